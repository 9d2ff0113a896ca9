"""The command redraft serve: runs the server on a port of this machine."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import webbrowser
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from redraft.cli.options import (
    Context,
    Device,
    Dtype,
    GpuMemory,
    KeepBf16,
    Kv,
    Quant,
    Threads,
    VerifyWith,
    Vision,
    option,
    parse_float,
    parse_int,
)
from redraft.cli.replicas import CONNECTIONS, KEEP_ALIVE, MAX_MODELS, build_models, refuse_flags, serve_replicas
from redraft.cli.terminal import QUIET
from redraft.cli.warm import show_builds, show_loaded
from redraft.config import show_value
from redraft.server.addresses import LATEST, PORT, check_aliases, is_local
from redraft.server.first_launch import launch_if_triton

if TYPE_CHECKING:
    from redraft.server.middleware import Limits
    from redraft.server.models import ModelSource
    from redraft.writer import Writer

BROWSER_DELAY = 0.5  # seconds; the server listens by then
MODEL_VARIABLE = "REDRAFT_MODEL"
LONGEST_NAME = 200  # characters
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        "-m",
        metavar="[NAME=]MODEL",
        help="Checkpoint folder, GGUF file or hub id, after the name that clients say; may be repeated. Those after the "
        f"first are loaded when a client names them. [{MODEL_VARIABLE}, or tiny, in the package]",
    ),
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on; any but a local one needs --api-key.")]
Port = Annotated[int, option("--port", "-p", help="Port to listen on.", parser=parse_int)]
Name = Annotated[str, typer.Option("--name", help="The first model's name in the API. [the folder's name]")]
Key = Annotated[str | None, typer.Option("--api-key", envvar="REDRAFT_API_KEY", help="Require this key from every client.")]
Hosts = Annotated[list[str] | None, typer.Option("--allow-host", help="Another host name to accept; may be repeated.")]
ImageHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-image-urls",
        metavar="HOST",
        help="Host from which images in requests may be fetched: HOST, HOST:PORT, *.HOST; may be repeated. [none]",
    ),
]
Requests = Annotated[
    int, option("--requests", help="Maximum requests running or waiting; more are answered 429.", parser=parse_int)
]
Connections = Annotated[
    int, option("--connections", help="Maximum open connections; one client gets half.", parser=parse_int)
]
MaxBody = Annotated[int, option("--max-body", help="Maximum size of a request body, in MiB.", parser=parse_int)]
Replicas = Annotated[
    int | None,
    option(
        "--replicas",
        help="Engines of each model, one per GPU, with Ray; see docs/cluster.md. [one, no Ray]",
        parser=parse_int,
    ),
]
Cors = Annotated[
    list[str] | None,
    typer.Option("--cors", metavar="ORIGIN", help="Origin of a web page that may use the server; may be repeated."),
]
BodySeconds = Annotated[
    float, option("--body-seconds", help="Maximum time for a request body to arrive.", parser=parse_float)
]
CompileSeconds = Annotated[
    float, option("--compile-seconds", help="Maximum processor time to compile a request's pattern.", parser=parse_float)
]
DrainSeconds = Annotated[
    float, option("--drain-seconds", help="Time for running requests to finish at shutdown.", parser=parse_float)
]
KeepAlive = Annotated[
    str, typer.Option("--keep-alive", help="How long an idle model stays loaded: 5m, 0, -1 for ever. The first stays.")
]
MaxModels = Annotated[int, option("--max-models", help="Maximum models loaded at once, with the first.", parser=parse_int)]
Proxies = Annotated[
    list[str] | None,
    typer.Option("--trusted-proxy", help="Address of a reverse proxy that names the client; may be repeated."),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=DIR",
        help="A LoRA adapter of the first model that clients name as their model; may be repeated.",
    ),
]
Aliases = Annotated[
    list[str] | None,
    typer.Option(
        "--alias",
        metavar="NAME=MODEL",
        help="Another name for a model or adapter; *=MODEL for every name that there is not. May be repeated.",
    ),
]


def serve(
    models: Models = None,
    host: Host = "127.0.0.1",
    port: Port = PORT,
    name: Name = "",
    key: Key = None,
    hosts: Hosts = None,
    cors: Cors = None,
    allow_image_urls: ImageHosts = None,
    requests: Requests = 72,
    connections: Connections = CONNECTIONS,
    max_body: MaxBody = 8,
    body_seconds: BodySeconds = 60.0,
    compile_seconds: CompileSeconds = 10.0,
    drain_seconds: DrainSeconds = 30.0,
    keep_alive: KeepAlive = KEEP_ALIVE,
    max_models: MaxModels = MAX_MODELS,
    proxies: Proxies = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    quant: Quant = None,
    keep_bf16: KeepBf16 = False,
    verify_with: VerifyWith = None,
    kv: Kv = None,
    gpu_memory: GpuMemory = None,
    context: Context = None,
    vision: Vision = False,
    adapters: Adapters = None,
    aliases: Aliases = None,
    replicas: Replicas = None,
) -> None:
    """Serve models to OpenAI, Anthropic, Ollama and llama.cpp clients, and a web page that shows the canvas."""
    check_address(host, port, key)
    check_limits(requests, connections, max_body, body_seconds, compile_seconds, drain_seconds)
    try:
        import uvicorn

        from redraft.checkpoint.pulled_models import cache_folder
        from redraft.server.app import ServerConfig, make_app
        from redraft.server.connections import uvicorn_config
        from redraft.server.image_urls import parse_image_hosts
        from redraft.server.keep_alive import parse_keep_alive
        from redraft.server.middleware import parse_origin
    except ModuleNotFoundError as error:
        raise ValueError(f"the server needs {error.name}: pip install 'redraft[server]'") from None
    origins = tuple(map(parse_origin, cors or ()))
    paths = parse_models(models or (), name)
    name = next(iter(paths))
    loading = {"device": device, "dtype": dtype, "quant": quant, "keep_bf16": keep_bf16, "kv": kv}
    own: dict[str, Any] = {"verify_with": verify_with, "gpu_memory": gpu_memory, "context": context, "vision": vision}
    own["adapters"] = parse_adapters(adapters or (), paths)
    limited: dict[str, Any] = {"aliases": parse_aliases(aliases or (), (*paths, *own["adapters"]))}
    limited |= {"requests": requests, "image_hosts": parse_image_hosts(allow_image_urls or ())}
    limited |= {"compile_seconds": compile_seconds, "drain_seconds": drain_seconds}
    if replicas is not None:
        refuse_flags(connections=connections, keep_alive=keep_alive, max_models=max_models, device=device)
        check_models(paths, quant)
        check_port_is_free(host, port)
        limited |= {"max_body": max_body, "body_seconds": body_seconds, "trusted_proxies": tuple(proxies or ())}
        access = {"host": host, "port": port, "key": key, "hosts": tuple(hosts or ()), "origins": origins}
        serve_replicas(build_models(paths, replicas, threads, loading, own), open_page, **access, **limited)
        return
    check_several(paths, max_models, gpu_memory)
    limits = build_limits(max_body, body_seconds, connections, hosts=(host, *(hosts or ())), origins=origins, key=key)
    models_kept: dict[str, Any] = {"keep_seconds": parse_keep_alive(keep_alive), "max_models": max_models}
    models_kept["pattern_folder"] = cache_folder() / "patterns"
    config = ServerConfig(name=name, limits=limits, **models_kept, **limited)
    sockets = bind_address(host, port)
    check_models(paths, quant)
    sources = {other: on_demand(other, path, **loading) for other, path in paths.items() if other != name}
    app = make_app(load_warm(paths[name], **loading, **own), config, sources)
    log_to(Console(stderr=True, highlight=False))
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    Console(stderr=True, highlight=False).print(f"{', '.join(paths)} at {url} (Ctrl-C stops it)", markup=False)
    if open_page:
        threading.Timer(BROWSER_DELAY, webbrowser.open, [url]).start()
    address: dict[str, Any] = {"host": host, "port": port, "trusted_proxies": tuple(proxies or ())}
    uvicorn.Server(uvicorn_config(app, limits.connections, drain_seconds=drain_seconds, **address)).run(sockets)


def load_warm(model: str, **options: Any) -> Writer:
    """Loads a model, says what became of its weights, and launches its kernels: the first requests do not wait for them."""
    from redraft import writer

    console = Console(stderr=True, highlight=False)
    with show_builds(console, message="loading"):
        subject = writer.load(model or writer.DEFAULT_MODEL, **options)
        show_loaded(subject, console)
        launch_if_triton(subject)
    return subject


def check_models(paths: Mapping[str, str], quant: str | None) -> None:
    """Refuses models that do not exist, that redraft cannot run, or that --quant does not fit.

    It needs their settings only, so that no weights are loaded or downloaded before.
    """
    from redraft import checkpoint, writer

    for name, path in paths.items():
        config, _ = checkpoint.read_configs(checkpoint.find(path or writer.DEFAULT_MODEL, weights=False))
        checkpoint.check_quant(config, quant, name)


def on_demand(name: str, model: str, **options: Any) -> ModelSource:
    """A model that the server loads when a client names it. Its files are downloaded now; one that lacks some is refused."""
    from redraft import checkpoint, writer
    from redraft.server.model_card import ModelCard
    from redraft.server.models import ModelSource

    if checkpoint.is_hub_name(model) and not Path(model).exists():
        Console(stderr=True, highlight=False).print(f"downloading {name}, unless it is here", style=QUIET, markup=False)
    path = checkpoint.find(model or writer.DEFAULT_MODEL)
    return ModelSource(lambda: launch_if_triton(writer.load(path, **options)), ModelCard.from_checkpoint(path))


def parse_models(values: Sequence[str], first_name: str = "") -> dict[str, str]:
    """The models by the names that clients say, the default first. Refuses names that clients could not tell apart."""
    from redraft.writer import DEFAULT_MODEL

    paths: dict[str, str] = {}
    for value in values or (os.environ.get(MODEL_VARIABLE, ""),):
        name, separator, path = value.partition("=")
        if not separator or os.path.exists(value):
            name, path = os.path.basename(os.path.abspath(os.path.expanduser(value or DEFAULT_MODEL))), value
        elif not name or not path:
            raise ValueError(f"--model is a model, or a name and a model, NAME=MODEL, got {show_value(value)}")
        if not paths:
            name = first_name or name
        check_name(name, "--name" if first_name and not paths else "--model", value)
        if name in paths:
            way_out = "put another name before one of them, NAME=MODEL"
            named = f"{paths[name] or 'tiny'} and {path or 'tiny'}"
            raise ValueError(f"--model gives the name {name} twice, for {named}: {way_out}")
        paths[name] = path
    return paths


def check_name(name: str, flag: str, value: str) -> None:
    """Refuses a name that a client could not say, or that a list could not show."""
    if not name or name != name.strip() or not name.isprintable() or len(name) > LONGEST_NAME:
        rule = f"a name has 1 to {LONGEST_NAME} printable characters and no spaces around them"
        raise ValueError(f"{flag} gives {show_value(value)} the name {show_value(name)}: {rule}; choose another, NAME=MODEL")
    if name.endswith(LATEST):
        raise ValueError(f"{flag} gives the name {name}: leave out {LATEST}, which clients add to any name")


def check_several(paths: Mapping[str, str], max_models: int, gpu_memory: str | None) -> None:
    """Refuses settings under which the models after the first could not be loaded."""
    if max_models < 1:
        raise ValueError(f"--max-models must be above 0, got {max_models}")
    if len(paths) > 1 and max_models == 1:
        raise ValueError(f"--max-models 1 leaves no room beside {next(iter(paths))}, which stays loaded: give 2 or more")
    if len(paths) > 1 and gpu_memory is not None:
        raise ValueError("--gpu-memory plans the memory of one model: leave it out, or serve one model")


def parse_pairs(values: Sequence[str], flag: str, rule: str) -> dict[str, str]:
    """The values of a flag NAME=VALUE, by their names. Refuses names that clients could not tell apart."""
    pairs: dict[str, str] = {}
    for text in values:
        name, _, value = text.partition("=")
        if not name or not value:
            raise ValueError(f"{flag} is {rule}, got {show_value(text)}")
        check_name(name, flag, value)
        if name in pairs:
            raise ValueError(f"{flag} gives the name {name} twice, for {pairs[name]} and {value}")
        pairs[name] = value
    return pairs


def parse_adapters(values: Sequence[str], models: Collection[str]) -> dict[str, str]:
    """The folders of adapters, by their names. Refuses the name of a model."""
    folders = parse_pairs(values, "--adapter", "a name and a folder, NAME=DIR")
    for name in folders:
        if name in models:
            raise ValueError(
                f"--adapter {name}={folders[name]} has the name of a model that the server has already: choose another one"
            )
    return folders


def parse_aliases(values: Sequence[str], models: Collection[str]) -> dict[str, str]:
    """The models and adapters that aliases stand for. Refuses an alias of one that is not served."""
    aliases = parse_pairs(values, "--alias", "a name and a model, NAME=MODEL")
    check_aliases(aliases, models)
    return aliases


def build_limits(max_body: int, body_seconds: float, connections: int, **options: Any) -> Limits:
    """The server's limits from the flags."""
    from redraft.server.middleware import BodyLimits, ConnectionLimits, Limits

    size = max_body * 2**20
    return Limits(
        bodies=BodyLimits(body_bytes=size, received_bytes=4 * size, body_seconds=body_seconds),
        connections=ConnectionLimits(connections=connections, connections_per_client=max(1, connections // 2)),
        **options,
    )


def check_address(host: str, port: int, key: str | None) -> None:
    """Refuses an address that cannot be, or that others reach without a key."""
    if not is_local(host) and not key:
        raise ValueError(f"{host} can be reached from other machines: set --api-key to listen there")
    if not 0 < port < 65536:
        raise ValueError(f"a port is between 1 and 65535, got {port}")


def bind_address(host: str, port: int) -> list[socket.socket]:
    """Takes the port before a model is loaded: one that is in use is refused at once. A name may have several addresses."""
    sockets = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ValueError(f"--host {host} is no address of this machine: {error.strerror}") from None
    for family, kind, _, _, address in addresses:
        listener = socket.socket(family, kind)
        sockets.append(listener)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            _bind(listener, address)
        except OSError as error:
            for bound in sockets:
                bound.close()
            if error.errno == errno.EADDRINUSE:
                raise ValueError(f"port {port} of {host} is in use: name another one with --port") from None
            raise ValueError(f"cannot listen on port {port} of {host}: {error.strerror}") from None
    return sockets


def check_port_is_free(host: str, port: int) -> None:
    """Refuses a port that is in use; another process listens on it later."""
    for listener in bind_address(host, port):
        listener.close()


def _bind(listener: socket.socket, address: Any) -> None:
    """Binds to a port, also if connections of an earlier server still linger there.

    First without SO_REUSEADDR: two sockets that have it could both be bound, as long as neither listens.
    """
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or os.name != "posix":
            raise
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)


def check_limits(
    requests: int, connections: int, max_body: int, body_seconds: float, compile_seconds: float, drain_seconds: float
) -> None:
    """Refuses limits under which a server could not work."""
    positive = {
        "requests": requests,
        "connections": connections,
        "max-body": max_body,
        "body-seconds": body_seconds,
        "compile-seconds": compile_seconds,
    }
    for flag, value in positive.items():
        if not value > 0:
            raise ValueError(f"--{flag} must be above 0, got {value}")
    if not 0 <= drain_seconds <= 86_400:
        raise ValueError(f"--drain-seconds must be from 0 to 86,400, got {drain_seconds}")


def log_to(console: Console) -> None:
    """Logs one line per request, without its text."""

    class ConsoleHandler(logging.Handler):
        def emit(self, record: Any) -> None:
            console.print(self.format(record), soft_wrap=True, markup=False)

    log = logging.getLogger("redraft.server")
    log.setLevel(logging.INFO)
    log.addHandler(ConsoleHandler())
