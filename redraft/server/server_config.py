"""ServerConfig: the settings of a server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from redraft.config.values import require_int
from redraft.constraints.pattern_compiler import COMPILE_SECONDS
from redraft.server.keep_alive import KEEP_SECONDS
from redraft.server.middleware import Limits


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of a server."""

    name: str = "redraft"  # the first model's name, as clients see it
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of models; "*" is any name that there is not
    limits: Limits = field(default_factory=Limits)
    requests: int = 72  # that run or wait at once; more are answered with 429
    compile_seconds: float = COMPILE_SECONDS  # for the patterns of one request
    drain_seconds: float = 30.0  # for running requests when the server shuts down
    keep_seconds: float = KEEP_SECONDS  # for which a model that was loaded on demand stays in memory after its last request
    image_hosts: tuple[str, ...] = ()  # from which images are fetched, as `parse_image_hosts` returns them
    max_models: int = 3  # in memory at once, the first included
    pattern_folder: Path | None = None  # where compiled patterns are kept; with one, compilers start with the server

    def __post_init__(self) -> None:
        require_int("max_models", self.max_models)
