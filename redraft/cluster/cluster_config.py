"""ClusterConfig: what is served on a Ray cluster, read from YAML.

    models:
      - {name: tiny, model: tiny, autoscaling: {min: 1, max: 4}}
      - {name: poet, model: /models/poet, replicas: 2, gpus: 1, adapters: {rhymes: /models/rhymes}}

Every model is a Ray Serve deployment of its own; a front deployment in front of them has the address. Unknown keys are
refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from redraft.config import ConfigError, read_file, show_value
from redraft.config.values import require_int, require_number, require_object, require_range
from redraft.server.addresses import ANY, LATEST, PORT, check_aliases, is_local

FRONT = "front"  # the deployment that has the address
KEY_VARIABLE = "REDRAFT_API_KEY"
LONGEST_DRAIN = 86_400.0  # seconds
MOST_REPLICAS = 10_000
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Autoscaling by queue length: Serve aims at `target` requests, running or waiting, for each replica."""

    min: int = 1
    max: int = 4
    target: float = 8.0
    up_seconds: float = 10.0  # for which the queue is too long before replicas are added
    down_seconds: float = 300.0  # for which it is short enough before they are removed

    def __post_init__(self) -> None:
        require_int("autoscaling.min", self.min, 1, MOST_REPLICAS)
        require_int("autoscaling.max", self.max, 1, MOST_REPLICAS)
        if self.min > self.max:
            raise ConfigError(f"autoscaling.min {self.min} is above autoscaling.max {self.max}: swap them")
        require_number("autoscaling.target", self.target)
        require_range("autoscaling.up_seconds", self.up_seconds, 0, LONGEST_DRAIN)
        require_range("autoscaling.down_seconds", self.down_seconds, 0, LONGEST_DRAIN)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model with its replicas. Each replica has an engine, and its GPUs, for itself."""

    name: str  # as clients say it
    model: str = "tiny"  # folder, GGUF file or hub id, as every node finds it
    replicas: int = 1
    autoscaling: Scaling | None = None  # in place of `replicas`
    gpus: float = 0.0  # of one replica
    cpus: float = 1.0
    threads: int | None = None  # of PyTorch; None: as Ray sets it from `cpus`
    adapters: Mapping[str, str] = field(default_factory=dict)  # folders by the names that clients say
    device: str | None = None
    dtype: str | None = None
    quant: str | None = None
    keep_bf16: bool = False
    kv: str | None = None
    verify_with: str | None = None
    gpu_memory: str | None = None
    context: int | None = None
    vision: bool = False  # load the vision tower at the start

    def __post_init__(self) -> None:
        for key in ("name", "model"):
            if not isinstance(value := getattr(self, key), str) or not value.strip() or not value.isprintable():
                raise ConfigError(f"models.{key} must be a text, got {show_value(value)}")
        if self.name.endswith(LATEST):
            raise ConfigError(f"the model {self.name}: leave out {LATEST}, which clients add to any name")
        for key in ("device", "dtype", "quant", "kv", "verify_with", "gpu_memory"):
            if not isinstance(value := getattr(self, key), str | None):
                raise ConfigError(f"{key} of {self.name} must be a text, got {show_value(value)}")
        for key in ("keep_bf16", "vision"):
            if not isinstance(value := getattr(self, key), bool):
                raise ConfigError(f"{key} of {self.name} must be true or false, got {show_value(value)}")
        if self.context is not None:
            require_int(f"context of {self.name}", self.context)
        if self.threads is not None:
            require_int(f"threads of {self.name}", self.threads, 1, 4096)
        require_int(f"replicas of {self.name}", self.replicas, 1, MOST_REPLICAS)
        require_range(f"gpus of {self.name}", self.gpus, 0, 64)
        require_range(f"cpus of {self.name}", self.cpus, 0, 1024)
        for key, value in require_object(f"adapters of {self.name}", self.adapters).items():
            if not isinstance(key, str) or not isinstance(value, str) or not key or not value:
                raise ConfigError(f"adapters of {self.name} are names and folders, got {show_value({key: value})}")
        if self.autoscaling is not None and self.replicas != 1:
            raise ConfigError(f"{self.name} has replicas {self.replicas} and autoscaling: leave one of them out")

    @property
    def deployment(self) -> str:
        """Its name in Ray Serve, which becomes part of file names."""
        return re.sub(r"[^\w.-]", "_", self.name, flags=re.ASCII)

    @property
    def most_replicas(self) -> int:
        """The most replicas that may run at once."""
        return self.autoscaling.max if self.autoscaling else self.replicas

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call it: the model, and its adapters."""
        return (self.name, *self.adapters)

    @property
    def loading(self) -> dict[str, Any]:
        """The keywords of `writer.load`."""
        keys = ("device", "dtype", "quant", "keep_bf16", "kv", "verify_with", "gpu_memory", "context", "vision")
        return {key: getattr(self, key) for key in keys} | {"adapters": dict(self.adapters)}


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A Ray Serve application of one or several models behind one address."""

    models: tuple[ServedModel, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of models, as --alias
    host: str = "127.0.0.1"
    port: int = PORT
    key: str | None = None  # None: the front reads REDRAFT_API_KEY on its own node
    hosts: tuple[str, ...] = ()  # other names of this address, as --allow-host
    origins: tuple[str, ...] = ()  # of web pages that may use it, as --cors
    trusted_proxies: tuple[str, ...] = ()
    image_hosts: tuple[str, ...] = ()  # from which images are fetched, as --allow-image-urls
    requests: int = 72  # running or waiting, for each replica; more are answered 429
    ongoing: int = 16  # that Serve gives to one replica at once; the others wait in the front
    fronts: int = 1  # processes that take requests and pass them to replicas
    max_body: int = 8  # MiB
    body_seconds: float = 60.0
    compile_seconds: float = 10.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("a cluster serves at least one model: name it under models")
        names = [name for model in self.models for name in model.names]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two models or adapters have the name {doubled[0]!r}: choose another name for one of them")
        check_aliases(require_object("aliases", self.aliases), names)
        deployments = [FRONT, *(model.deployment for model in self.models)]
        if doubled := sorted({name for name in deployments if deployments.count(name) > 1}):
            raise ConfigError(f"two deployments would have the name {doubled[0]!r}: choose another name for the model")
        require_int("port", self.port, 1, 65535)
        for key in ("requests", "ongoing", "fronts", "max_body"):
            require_int(key, getattr(self, key))
        for key in ("body_seconds", "compile_seconds"):
            require_number(key, getattr(self, key))
        require_range("drain_seconds", self.drain_seconds, 0, LONGEST_DRAIN)
        if self.key is not None and (not isinstance(self.key, str) or not self.key):
            raise ConfigError(f"key is a text: leave it out, and set {KEY_VARIABLE} where Ray runs")
        if self.image_hosts:
            from redraft.server.image_urls import parse_image_hosts

            parse_image_hosts(self.image_hosts, "image_hosts")
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host must be an address, got {show_value(self.host)}")

    @property
    def slots(self) -> int:
        """Requests that run or wait in one front; more are answered 429."""
        return self.requests * sum(model.most_replicas for model in self.models)

    @property
    def ongoing_of_a_replica(self) -> int:
        """Requests that Serve gives to one replica at once."""
        return min(self.ongoing, self.requests)

    def aliases_of(self, model: ServedModel) -> dict[str, str]:
        """The aliases in a replica of a model, which takes every request that the front sends to it."""
        return {ANY: model.name} | {alias: name for alias, name in self.aliases.items() if name in model.names}

    def check_key(self, key: str | None) -> None:
        """Refuses an address that other machines reach without a key."""
        if not is_local(self.host) and not (self.key or key):
            raise ConfigError(f"{self.host} can be reached from other machines: set {KEY_VARIABLE} to listen there")


def read_config(path: str | Path) -> ClusterConfig:
    """Reads the YAML file of `redraft cluster deploy`."""
    import yaml

    try:
        content = yaml.safe_load(read_file(path))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    return config_from(content)


def config_from(content: Any) -> ClusterConfig:
    """A config from what YAML or `args` of a Serve config holds."""
    settings = dict(require_object("the config", content))
    listed = settings.get("models")
    if not isinstance(listed, list | tuple):
        raise ConfigError(f"models must be a list with at least one model, got {show_value(listed)}")
    settings["models"] = tuple(_model_from(each) for each in listed)
    for key in ("hosts", "origins", "trusted_proxies", "image_hosts"):
        if key in settings:
            settings[key] = _texts(key, settings[key])
    return _build(ClusterConfig, settings, "the config")


def _model_from(content: Any) -> ServedModel:
    settings = dict(require_object("a model", content))
    if "name" not in settings:
        raise ConfigError(f"a model needs a name, got {show_value(content)}")
    if settings.get("autoscaling") is not None:
        scaling = require_object("autoscaling", settings["autoscaling"])
        settings["autoscaling"] = _build(Scaling, scaling, "autoscaling")
    return _build(ServedModel, settings, f"the model {show_value(settings['name'])}")


def _build(record: type[R], settings: Mapping[str, Any], what: str) -> R:
    known = [each.name for each in fields(record)]  # type: ignore[arg-type]
    if unknown := [key for key in settings if key not in known]:
        raise ConfigError(f"{what} has no setting {show_value(unknown[0])}; it has {', '.join(known)}")
    return record(**settings)


def _texts(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{key} must be a list of texts, got {show_value(value)}")
    return tuple(value)
