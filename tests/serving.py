"""A server in a thread, on a free port, for tests with real clients."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import tiny
import uvicorn
from tiny import wait_until

from redraft.constraints.constraints import Constraints
from redraft.server.app import ServerConfig, make_app
from redraft.server.connections import uvicorn_config
from redraft.tasks.generation import GenerationOptions
from redraft.tasks.text_events import EncodedPrompt
from redraft.writer import Writer


@contextmanager
def served(writer: Writer, send_buffer: int | None = None, sources=None, **changes) -> Iterator[str]:
    """Serves a writer and yields its address. `send_buffer` is what the system buffers for a client that does not read.

    `sources` are models that are loaded on demand.
    """
    settings = ServerConfig(**changes)
    app = make_app(writer, settings, sources)
    limits = settings.limits.connections
    config = uvicorn_config(app, limits, drain_seconds=settings.drain_seconds, port=0, lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    listening = server.servers[0].sockets[0]
    if send_buffer is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listening.getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(600)


__all__ = ["NO_END", "EchoWriter", "make", "post_and_leave", "served", "user", "wait_until"]
NO_END = {"1": -100, "5": -100}  # a logit_bias that forbids the stop tokens


def user(text):
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class EchoPrompt(EncodedPrompt):
    """A prompt that still knows its last message."""

    message: str


class EchoWriter(Writer):
    """Answers a message "say: TEXT" with TEXT, by pinning its tokens."""

    def encode(self, prompt, options):
        encoded = super().encode(prompt, options)
        return EchoPrompt(encoded.ids, encoded.is_chat, prompt[-1]["content"] if encoded.is_chat else "")

    def stream(self, prompt, options=None, **keywords):
        options = GenerationOptions.from_keywords(options, **keywords)
        encoded = prompt if isinstance(prompt, EchoPrompt) else self.encode(prompt, options)
        if encoded.message.startswith("say: "):
            ids = [*self.tokenizer.encode(encoded.message.removeprefix("say: ")), 5]
            options = replace(options, constraints=Constraints(pins=dict(enumerate(ids))))
        return super().stream(encoded, options)


def make(canvas: int = 16) -> Writer:
    """A writer with a tiny random model."""
    sampler = tiny.sampler(canvas_length=canvas, max_steps=3, max_new_tokens=32)
    return EchoWriter(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), sampler)


async def post_and_leave(app, path, body, has_left):
    """Posts a body; the client has left once the event is set. Returns the status."""
    raw = json.dumps(body).encode()
    headers = [(b"host", b"localhost"), (b"content-length", str(len(raw)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "client": ("a", 1)}
    messages = [{"type": "http.request", "body": raw, "more_body": False}]
    statuses = []

    async def receive():
        if messages:
            return messages.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        statuses.append(message.get("status"))

    await app(scope, receive, send)
    return statuses[0]


OPENED = []  # clients to close after a test: a socket that the garbage collector closes fails another test


def keep(client):
    """A client that is closed after the test."""
    OPENED.append(client)
    return client


def close_kept() -> None:
    """Closes the clients of a test."""
    while OPENED:
        client = OPENED.pop()
        (client if hasattr(client, "close") else client._client).close()  # ollama's client has no method for it
