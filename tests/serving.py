"""A server in a thread, on a port of its own, for tests with real clients."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from redraft.server.app import ServerConfig, make_app
from redraft.writer import Writer


@contextmanager
def served(writer: Writer, **changes) -> Iterator[str]:
    """Its address."""
    config = uvicorn.Config(make_app(writer, ServerConfig(**changes)), port=0, log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
