"""`redraft serve --replicas N`: the models and limits of `redraft serve`, N engines of each, with Ray on this machine."""

from __future__ import annotations

import signal
import threading
import webbrowser
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from redraft.cluster.cluster_config import ServedModel

CONNECTIONS = 512  # the defaults of flags that one process has and replicas have not
KEEP_ALIVE = "5m"
MAX_MODELS = 3
MOST_REPLICAS = 64  # of one machine


def refuse_flags(*, connections: int, keep_alive: str, max_models: int, device: str | None) -> None:
    """Refuses flags that cannot hold with replicas."""
    if connections != CONNECTIONS:
        raise ValueError(f"--connections {connections} cannot hold with --replicas: Ray's proxy takes them; leave it out")
    if (keep_alive, max_models) != (KEEP_ALIVE, MAX_MODELS):
        raise ValueError("--keep-alive and --max-models cannot hold with --replicas: every model stays; leave them out")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"--device {device} names one device, and each replica gets its own: give cpu or cuda")


def build_models(
    paths: Mapping[str, str], replicas: int, threads: int | None, loading: Mapping[str, Any], own: Mapping[str, Any]
) -> tuple[ServedModel, ...]:
    """The models with their replicas: one GPU each where this machine has GPUs, else a share of the cores.

    `own` are options of the first model.
    """
    import torch

    from redraft import checkpoint, writer
    from redraft.cluster.cluster_config import ServedModel
    from redraft.kernels.threads import core_count

    if not 1 <= replicas <= MOST_REPLICAS:
        raise ValueError(f"--replicas is from 1 to {MOST_REPLICAS}, got {replicas}")
    engines = replicas * len(paths)
    has_gpu = loading["device"] != "cpu" and torch.cuda.is_available()
    if has_gpu and engines > torch.cuda.device_count():
        many = f"{len(paths)} models with --replicas {replicas} need {engines} GPUs"
        raise ValueError(f"{many}, this machine has {torch.cuda.device_count()}: give fewer, or --device cpu")
    return tuple(
        ServedModel(
            name=name,
            model=str(checkpoint.find(path or writer.DEFAULT_MODEL)),
            replicas=replicas,
            gpus=1.0 if has_gpu else 0.0,
            threads=threads or max(1, core_count() // engines),
            **loading,
            **(own if number == 0 else {}),
        )
        for number, (name, path) in enumerate(paths.items())
    )


def serve_replicas(models: tuple[ServedModel, ...], opens_page: bool, **settings: Any) -> None:
    """Serves until Ctrl-C or SIGTERM; then running requests finish first. A second signal does not wait for them."""
    from redraft.cluster import deploy
    from redraft.cluster.cluster_config import ClusterConfig
    from redraft.cluster.ray_connection import LOCAL, import_ray

    import_ray(LOCAL)  # refused first, if it is not installed
    config = ClusterConfig(models=models, **settings)
    console = Console(stderr=True, highlight=False)
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{config.port}"
    received: list[int] = []

    def stop(number: int, _: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    with deploy.local_ray(cpus=sum(model.cpus * model.replicas for model in models), gpus=count_gpus(models)):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)  # now: replicas answer before `deploy` returns, and Ray's handlers would cut them
        try:
            with console.status("starting replicas"):
                deploy.deploy(config)
            names = ", ".join(f"{model.name} ({model.replicas} replicas)" for model in models)
            console.print(f"{names} at {url} (Ctrl-C stops it)", markup=False)
            if opens_page:
                webbrowser.open(url)
            threading.Event().wait()
        except KeyboardInterrupt:
            console.print("finishing the running requests", markup=False)
            deploy.take_down()
    if received != [signal.SIGTERM]:
        raise KeyboardInterrupt


def count_gpus(models: tuple[ServedModel, ...]) -> int:
    """The GPUs that all replicas need."""
    return int(sum(model.gpus * model.replicas for model in models))
