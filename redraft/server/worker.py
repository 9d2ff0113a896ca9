"""From a coroutine to the engine and back: each request has a thread that reads its events, one thread steps for all.

    route -> Worker.items(work) -> [thread: work(stop) yields] -> queue -> route

Whoever stops listening sets the request's stop, and the engine lets it go at its next step. Knows nothing of HTTP.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

from redraft.writer import Writer

T = TypeVar("T")
Work = Callable[[threading.Event], Iterator[T]]


class Busy(RuntimeError):
    """Too many requests wait already; `seconds` is when to try again."""

    def __init__(self, waiting: int, seconds: int = 1) -> None:
        super().__init__(f"{waiting} requests are being answered or wait already: try again in {seconds} s")
        self.seconds = seconds


class Closing(RuntimeError):
    """The server ends, and takes nothing new."""


class Worker:
    """Runs the work of requests, at most `limit` at a time, over one Writer."""

    def __init__(self, writer: Writer, limit: int = 72) -> None:
        self.writer, self.limit, self.closing = writer, limit, False
        self._stops: set[threading.Event] = set()
        self._latest: dict[Hashable, threading.Event] = {}
        self._threads = ThreadPoolExecutor(limit, thread_name_prefix="redraft-request")
        self._held = ExitStack()

    @property
    def active(self) -> int:
        """Requests that are being answered or wait."""
        return len(self._stops)

    def start(self) -> None:
        """From now on the engine steps by itself."""
        self._held.enter_context(self.writer.engine.running())

    async def close(self, seconds: float) -> None:
        """Takes nothing new, waits for what runs, at most so long, then stops it."""
        self.closing = True
        ends = asyncio.get_running_loop().time() + seconds
        while self._stops and asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(0.02)
        for stop in list(self._stops):
            stop.set()
        self.writer.engine.tell()
        await asyncio.to_thread(self._held.close)
        await asyncio.to_thread(self._threads.shutdown)

    async def items(self, work: Work[T], latest: Hashable | None = None) -> AsyncIterator[T]:
        """What the work yields, as it comes. Of requests with one `latest`, the newest lets the one before it go."""
        if self.closing:
            raise Closing("the server is shutting down")
        stop, loop, queue = threading.Event(), asyncio.get_running_loop(), asyncio.Queue[Any]()
        before = self._latest.get(latest) if latest is not None else None
        if before is not None:
            self._stop(before)
        if self.active - (before is not None) >= self.limit:
            raise Busy(self.active)
        if latest is not None:
            self._latest[latest] = stop
        self._stops.add(stop)

        def tell(item: Any) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        def go() -> None:
            try:
                for item in work(stop):
                    tell((item, None))
            except BaseException as error:  # told to whoever waits for it
                tell((None, error))
            finally:
                tell(None)
                loop.call_soon_threadsafe(self._stops.discard, stop)

        self._threads.submit(go)
        try:
            while (told := await queue.get()) is not None:
                item, error = told
                if error is not None:
                    raise error
                yield item
        finally:
            self._stop(stop)
            if self._latest.get(latest) is stop:
                del self._latest[latest]

    def _stop(self, stop: threading.Event) -> None:
        stop.set()
        self.writer.engine.tell()
