"""BatchProcessor: answers the requests of a batch with the server's own app, without a network.

    items -> [thread of an event loop: the app's routes, many requests at once] -> results, as they finish

The routes, their checks and their error messages are those of `redraft serve`; the engine batches what is in flight.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Coroutine, Iterable, Iterator, MutableMapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from redraft.cluster.batch_file import BatchRequest, answer_result
from redraft.cluster.jobs import Item, Result
from redraft.server.addresses import ANY
from redraft.server.app import make_app
from redraft.server.server_config import ServerConfig
from redraft.writer import Writer, load

BUSY = 429
FIRST_PAUSE = 0.02  # seconds before a request is tried again that found no slot
LONGEST_PAUSE = 0.5
GROUP = 8  # requests that a worker of a cluster gets at a time


class BatchProcessor:
    """Answers requests with one model. Several threads may call `process` at once."""

    def __init__(self, writer: Writer, name: str) -> None:
        """`name` is the model's name in the answers."""
        self.writer = writer
        self.in_flight = 2 * writer.engine.config.max_running  # what the engine runs at once, and the next ones
        self.app = make_app(writer, ServerConfig(name=name, aliases={ANY: name}, drain_seconds=0.0))
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._is_open: Future[None] = Future()
        self._thread = threading.Thread(target=self._run_loop, name="redraft-batch", daemon=True)
        self._thread.start()
        self._is_open.result()

    def process(self, items: Iterable[Item]) -> Iterator[Result]:
        """Yields an answer per request, as they finish."""
        finished: queue.SimpleQueue[Future[Result]] = queue.SimpleQueue()
        remaining = iter(items)
        running: set[Future[Result]] = set()
        try:
            while True:
                while len(running) < self.in_flight and (item := next(remaining, None)) is not None:
                    future = self._submit(self._answer(item))
                    running.add(future)
                    future.add_done_callback(finished.put)
                if not running:
                    return
                future = finished.get()
                running.discard(future)
                yield future.result()
        finally:
            for future in running:
                future.cancel()

    def close(self) -> None:
        """Stops what runs, and ends the event loop and the engine's thread."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels what still runs at its end
            runner.run(self._serve())

    async def _serve(self) -> None:
        """Keeps the app open until `close`."""
        try:
            async with self.app.router.lifespan_context(self.app):
                self._is_open.set_result(None)
                await self._stop.wait()
        except BaseException as error:
            if self._is_open.done():
                raise
            self._is_open.set_exception(error)

    async def _answer(self, item: Item) -> Result:
        """Answers a request. One that finds no free slot waits: several completions of one request take a slot each."""
        request = BatchRequest.from_text(item.text)
        pause = FIRST_PAUSE
        while True:
            status, body = await self._call(request)
            if status != BUSY:
                return answer_result(item.number, request, status, body)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _call(self, request: BatchRequest) -> tuple[int, Any]:
        """Calls a route of the app, and returns its status and body."""
        content = request.body.encode()
        is_read = False
        status = 0
        pieces: list[bytes] = []

        async def receive() -> MutableMapping[str, Any]:
            nonlocal is_read
            if is_read:
                await asyncio.get_running_loop().create_future()  # the client never leaves
            is_read = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                pieces.append(message.get("body", b""))

        try:
            await self.app(make_scope(request.url, len(content)), receive, send)
        except Exception:  # a fault that the app has answered and logged; Starlette raises it again
            if not status:
                raise
        return status, json.loads(b"".join(pieces))


def make_scope(url: str, size: int) -> dict[str, Any]:
    """The ASGI scope of a request."""
    headers = {"host": "localhost", "content-length": str(size), "content-type": "application/json"}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(key.encode(), value.encode()) for key, value in headers.items()],
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 80),
        "state": {},
    }


def load_processor(model: str | Path, **options: Any) -> BatchProcessor:
    """Loads the model of a batch, in this process or in a worker of a cluster."""
    return BatchProcessor(load(model, **options), Path(model).name)
