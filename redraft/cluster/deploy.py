"""Builds the Ray Serve application, deploys it to a cluster, shows its state, takes it down.

`serve run` and `serve deploy` of Ray use `build_app` through its import path: redraft.cluster.deploy:build_app.
"""

import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from redraft.cluster.cluster_config import FRONT, KEY_VARIABLE, ClusterConfig, ServedModel, config_from
from redraft.cluster.ray_connection import LOCAL, MISSING, connect
from redraft.cluster.replica import Replica
from redraft.config import ConfigError

APPLICATION = "redraft"
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
OBJECT_STORE_BYTES = 256 * 2**20  # requests and answers are small; Ray's default is 30% of the memory
SPARE_REQUESTS = 256  # of a front beyond its slots: Serve passes them on, and the front answers 429
LOOK_BACK_SECONDS = 15.0  # over which the queue length is averaged for autoscaling; replicas report every 10 s
CONSTRUCTIONS = 3  # of a replica that cannot be constructed, before the deployment fails
QUIET = {"log_level": "WARNING", "enable_access_log": False}  # the app logs one line per request itself


def build_app(args: Mapping[str, Any]) -> Any:
    """The application from the `args` of a Ray Serve config: the settings of ClusterConfig but for the address."""
    for key in ("host", "port"):
        if key in args:
            raise ConfigError(f"args has {key}: a Serve config says it in http_options")
    return build_application(config_from(args))


def build_application(config: ClusterConfig) -> Any:
    """One deployment for each model, and the front with their handles."""
    from ray import serve

    from redraft.cluster.front import Front

    handles = [build_deployment(model, config) for model in config.models]
    deployment = serve.deployment(
        name=FRONT,
        num_replicas=config.fronts,
        max_ongoing_requests=config.slots + SPARE_REQUESTS,
        graceful_shutdown_timeout_s=config.drain_seconds,
        max_surge_percent=100,  # a changed front starts before the old one drains
        ray_actor_options={"num_cpus": 0},
    )
    return deployment(serve.ingress()(Front)).bind(config, *handles)


def build_deployment(model: ServedModel, config: ClusterConfig) -> Any:
    """The deployment of a model, bound to its settings. Waiting requests stay with the front, which bounds their number."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig

    count: dict[str, Any] = {"num_replicas": model.replicas}
    if (scaling := model.autoscaling) is not None:
        count = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=scaling.min,
                max_replicas=scaling.max,
                target_ongoing_requests=scaling.target,
                look_back_period_s=LOOK_BACK_SECONDS,
                upscale_delay_s=scaling.up_seconds,
                downscale_delay_s=scaling.down_seconds,
            )
        }
    deployment = serve.deployment(
        name=model.deployment,
        **count,
        max_ongoing_requests=config.ongoing_of_a_replica,
        max_constructor_retry_count=CONSTRUCTIONS,
        graceful_shutdown_timeout_s=config.drain_seconds,
        request_router_config={"request_router_class": ROUTER},
        ray_actor_options={"num_cpus": model.cpus, "num_gpus": model.gpus},
    )
    without_counts = replace(model, replicas=1, autoscaling=None)  # Serve scales them
    return deployment(Replica).bind(without_counts, server_config(model, config))


def server_config(model: ServedModel, config: ClusterConfig) -> Any:
    """The settings of the app in a replica. Access is checked by the front."""
    from redraft.server.bodies import BodyLimits
    from redraft.server.image_urls import parse_image_hosts
    from redraft.server.middleware import Limits
    from redraft.server.server_config import ServerConfig

    size = config.max_body * 2**20
    return ServerConfig(
        name=model.name,
        aliases=config.aliases_of(model),
        limits=Limits(bodies=BodyLimits(body_bytes=size, received_bytes=4 * size, body_seconds=config.body_seconds)),
        requests=2 * config.requests,  # the front has the limit; a request whose client left still has its slot for a moment
        compile_seconds=config.compile_seconds,
        drain_seconds=config.drain_seconds,
        image_hosts=parse_image_hosts(config.image_hosts),
    )


def deploy(config: ClusterConfig) -> None:
    """Deploys to the cluster that Ray is connected to, and returns when every model answers."""
    from ray import serve
    from ray.serve.config import HTTPOptions

    http = HTTPOptions(host=config.host, port=config.port)
    try:
        serve.start(proxy_location="EveryNode", http_options=http, logging_config=QUIET)
    except TimeoutError:  # Ray waits a minute for its proxies, which start on; a busy machine needs longer
        serve.start(proxy_location="EveryNode", http_options=http, logging_config=QUIET)
    try:
        serve.run(build_application(config), name=APPLICATION, route_prefix="/", logging_config=QUIET)
    except RuntimeError as error:  # a replica could not be constructed; the message ends with its exception
        raise ValueError(f"the models cannot be deployed: {str(error).strip().splitlines()[-1].strip()}") from error


@contextmanager
def local_ray(cpus: float, gpus: int) -> Iterator[None]:
    """Ray on this machine only: all its ports are bound to the loopback address, and there is no dashboard."""
    counts = {"num_cpus": max(1, math.ceil(cpus)), "num_gpus": gpus}
    with connected_ray(LOCAL, **counts, object_store_memory=OBJECT_STORE_BYTES):
        yield


@contextmanager
def connected_ray(address: str, **options: Any) -> Iterator[None]:
    """A connection to a cluster, with Ray Serve."""
    connect(address, logging_level="WARNING", **options)
    import ray

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        require_serve()
        yield
    finally:
        ray.shutdown()


def require_serve() -> None:
    """Refuses a Ray that was installed without Serve."""
    try:
        from ray import serve  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(MISSING) from None


def read_state() -> dict[str, Any] | None:
    """The state of the application: `deployments` with their replicas, `health` as /health has it. None if there is none."""
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    if application is None:
        return None
    deployments = {
        name: {
            "status": state.status.value,
            "replicas": {str(getattr(kind, "value", kind)): count for kind, count in state.replica_states.items() if count},
            "message": state.message,
        }
        for name, state in application.deployments.items()
    }
    health: dict[str, Any] = {"status": "unknown", "replicas": []}
    if application.status.value == "RUNNING":
        health = serve.get_deployment_handle(FRONT, APPLICATION).health.remote().result(timeout_s=30)
    return {"status": application.status.value, "deployments": deployments, "health": health}


def take_down() -> bool:
    """Takes the application down; its running requests finish first. False if there is none."""
    from ray import serve

    if APPLICATION not in serve.status().applications:
        return False
    while True:
        try:
            serve.delete(APPLICATION)
        except TimeoutError:  # Ray waits for a minute; the requests may have longer
            continue
        return True


def shut_down_if_idle() -> None:
    """Ends Serve on the cluster, with its proxies, unless it runs something else."""
    from ray import serve

    if not serve.status().applications:
        serve.shutdown()


def check_access(config: ClusterConfig) -> None:
    """Refuses an address that other machines reach without a key."""
    config.check_key(os.environ.get(KEY_VARIABLE))
