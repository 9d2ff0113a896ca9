"""redraft serve: the server on a port of this machine. `cli.py` makes it a command."""

import ipaddress
import logging
import threading
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from redraft import writer
from redraft.cli.options import Device, Dtype, Model, Threads, option, whole

PORT = 8012  # where llama.vim looks
SOON = 0.5  # seconds until it listens, for sure


def serve(
    model: Model = "",
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; others than this machine's need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, option("--port", "-p", help="Port to listen on.", parser=whole)] = PORT,
    name: Annotated[str, typer.Option("--name", help="What clients see as the model's name. [the folder's]")] = "",
    key: Annotated[
        str | None, typer.Option("--api-key", envvar="REDRAFT_API_KEY", help="Ask every client for this key.")
    ] = None,
    hosts: Annotated[
        list[str] | None, typer.Option("--allow-host", help="Another name of this machine; may be given several times.")
    ] = None,
    requests: Annotated[
        int, option("--requests", help="Requests that run or wait at once; more get a 429.", parser=whole)
    ] = 72,
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    quant: Annotated[str | None, typer.Option("--quant", help="fp8: pack the layers on the way in.")] = None,
) -> None:
    """Serve a model to editors and to OpenAI, Anthropic and Ollama clients, and as a page to watch it on."""
    if not local(host) and not key:
        raise ValueError(f"{host} can be reached from other machines: listening there needs --api-key")
    if not 0 < port < 65536 or requests < 1:
        raise ValueError(f"a port is between 1 and 65535 and requests are at least 1, got {port} and {requests}")
    try:
        import uvicorn

        from redraft.server.app import Limits, ServerConfig, make_app
    except ModuleNotFoundError as error:
        raise ValueError(f"the server needs {error.name}: pip install 'redraft[server]'") from None
    subject = writer.load(model or writer.DEFAULT_MODEL, device=device, dtype=dtype, quant=quant)
    limits = Limits(hosts=(host, *(hosts or ())), key=key)
    config = ServerConfig(name=name or Path(model or writer.DEFAULT_MODEL).name, limits=limits, requests=requests)
    log_to(Console(stderr=True, highlight=False))
    shown = f"[{host}]" if ":" in host else host
    Console(stderr=True, highlight=False).print(f"{config.name} at http://{shown}:{port} (Ctrl-C ends it)")
    if open_page:
        threading.Timer(SOON, webbrowser.open, [f"http://{shown}:{port}"]).start()
    ends = {"timeout_graceful_shutdown": int(config.drain_seconds)}
    uvicorn.run(make_app(subject, config), host=host, port=port, log_level="warning", **ends)


def local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def log_to(console: Console) -> None:
    """One line of each request, without its text."""

    class Lines(logging.Handler):
        def emit(self, record: Any) -> None:
            console.print(self.format(record), soft_wrap=True, markup=False)

    log = logging.getLogger("redraft.server")
    log.setLevel(logging.INFO)
    log.addHandler(Lines())
