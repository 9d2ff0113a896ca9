"""Worker: runs requests in threads and hands what they yield to coroutines.

    route -> Worker.run(work) -> [thread: work(stop) yields items] -> queue -> route

Every request has a thread that reads its events; the engine's own thread makes the steps for all of them. When a
coroutine stops listening, the request's stop event is set and the engine drops the request at its next step.
This file knows nothing of HTTP.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

from redraft.server.errors import ServerBusyError, ServerClosingError
from redraft.writer import Writer

T = TypeVar("T")
Work = Callable[[threading.Event], Iterator[T]]
Stream = AsyncGenerator[T, None]
CLOSE_POLL_SECONDS = 0.02


class Worker:
    """Runs at most `limit` requests at a time over one Writer."""

    def __init__(self, writer: Writer, limit: int = 72) -> None:
        self.writer = writer
        self.limit = limit
        self.closing = False
        self._stops: set[threading.Event] = set()
        self._latest: dict[Hashable, threading.Event] = {}
        self._threads = ThreadPoolExecutor(limit, thread_name_prefix="redraft-request")
        self._engine_running = ExitStack()

    @property
    def active(self) -> int:
        """The number of requests that run or wait."""
        return len(self._stops)

    def start(self) -> None:
        """Starts the engine's own thread."""
        self._engine_running.enter_context(self.writer.engine.run_in_background())

    async def close(self, drain_seconds: float) -> None:
        """Accepts nothing new, waits at most `drain_seconds` for running requests, then stops them."""
        self.closing = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain_seconds
        while self._stops and loop.time() < deadline:
            await asyncio.sleep(CLOSE_POLL_SECONDS)
        for stop in list(self._stops):
            stop.set()
        self.writer.engine.notify()
        await asyncio.to_thread(self._engine_running.close)
        await asyncio.to_thread(self._threads.shutdown)

    async def run(self, work: Work[T], latest: Hashable | None = None) -> Stream[T]:
        """Yields the items of `work` as they come. A newer request with the same `latest` key stops the older one."""
        if self.closing:
            raise ServerClosingError("the server is shutting down")
        stop = threading.Event()
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Any] = asyncio.Queue()
        older = self._latest.get(latest) if latest is not None else None
        if older is not None:
            self._stop(older)
        if self.active - (older is not None) >= self.limit:
            raise ServerBusyError(self.active)
        if latest is not None:
            self._latest[latest] = stop
        self._stops.add(stop)

        def put(entry: Any) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, entry)

        def run_in_thread() -> None:
            try:
                for item in work(stop):
                    put((item, None))
            except BaseException as error:  # raised again in the coroutine that waits
                put((None, error))
            finally:
                put(None)
                loop.call_soon_threadsafe(self._stops.discard, stop)

        self._threads.submit(run_in_thread)
        try:
            while (entry := await queue.get()) is not None:
                item, error = entry
                if error is not None:
                    raise error
                yield item
        finally:
            self._stop(stop)
            if latest is not None and self._latest.get(latest) is stop:
                del self._latest[latest]

    def _stop(self, stop: threading.Event) -> None:
        stop.set()
        self.writer.engine.notify()
