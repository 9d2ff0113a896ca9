"""Worker: runs requests in threads and hands what they yield to coroutines.

    route -> Worker.run(work) -> [thread: work(stop) yields items] -> queue -> route

Every request has a thread that reads its events; the engine's own thread makes the steps for all of them. When a
coroutine stops listening, the request's stop event is set and the engine drops the request at its next step. A coroutine
that listens slowly holds its thread up, and the engine pauses the request: nothing piles up.

Requests are admitted by what they cost. Those that compile a pattern need a second slot until they have started, and no
client gets all slots of a kind. This file knows nothing of HTTP.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar

from redraft.engine import StopEvent, Stopped
from redraft.server.errors import ServerBusyError, ServerClosingError
from redraft.writer import Writer

T = TypeVar("T")
Work = Callable[[threading.Event], Iterator[T]]
Stream = AsyncGenerator[T, None]
CLOSE_POLL_SECONDS = 0.02
QUEUE_POLL_SECONDS = 0.05
MAX_QUEUED = 32  # items of a request that wait for their reader
MAX_UNREAD = 128  # events of a request that wait in the engine; more pause it
MAX_COMPILING = 16  # requests that compile a pattern or wait to


class Slots:
    """A number of slots. One client gets all but a ninth, and of several all but one: others always find room."""

    def __init__(self, count: int, what: str) -> None:
        self.count = count
        self.per_client = max(1, count - max(1, count // 9))
        self.what = what
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """The number of slots in use."""
        return self._taken.total()

    def take(self, client: str) -> None:
        """Takes a slot. Raises ServerBusyError if there is none for this client."""
        if self.taken >= self.count:
            raise ServerBusyError(f"the server already has {self.taken} requests {self.what}")
        if self._taken[client] >= self.per_client:
            raise ServerBusyError(f"this client already has {self._taken[client]} requests {self.what}")
        self._taken[client] += 1

    def release(self, client: str) -> None:
        """Gives a slot back."""
        self._taken[client] -= 1
        if not self._taken[client]:
            del self._taken[client]


class Worker:
    """Runs at most `limit` requests at a time over one Writer.

    The workers of a server's models share their slots: the limit is that of all of them together.
    """

    def __init__(self, writer: Writer, limit: int = 72, *, shares_slots_with: "Worker | None" = None) -> None:
        self.writer = writer
        self.limit = limit
        self.closing = False
        self.slots = Slots(limit, "running or waiting")
        self.compile_slots = Slots(MAX_COMPILING, "whose patterns are being compiled")
        if shares_slots_with is not None:
            self.slots = shares_slots_with.slots
            self.compile_slots = shares_slots_with.compile_slots
        self._stops: set[StopEvent] = set()
        self._threads = ThreadPoolExecutor(limit, thread_name_prefix="redraft-request")
        self._engine_running = ExitStack()

    @property
    def active(self) -> int:
        """The number of requests that run or wait."""
        return len(self._stops)

    def start(self) -> None:
        """Starts the engine's own thread."""
        self._engine_running.enter_context(self.writer.engine.run_in_background(MAX_UNREAD))

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

    async def run(self, work: Work[T], *, client: str = "", compiles: bool = False) -> Stream[T]:
        """Yields the items of `work` as they come. With `compiles`, it compiles a pattern before it yields its first one."""
        if self.closing:
            raise ServerClosingError("the server is shutting down")
        stop = StopEvent(client)
        with ExitStack() as compile_slot:
            if compiles:
                self.compile_slots.take(client)
                compile_slot.callback(self.compile_slots.release, client)
            self.slots.take(client)
            self._stops.add(stop)
            try:
                async with aclosing(self._run_in_thread(work, stop)) as items:
                    async for item in items:
                        compile_slot.close()
                        yield item
            except Stopped:
                if self.closing:
                    raise ServerClosingError("the server is shutting down") from None
                raise
            finally:
                stop.set()
                self.writer.engine.notify()

    async def _run_in_thread(self, work: Work[T], stop: StopEvent) -> Stream[T]:
        """Runs the work in a thread of the pool and yields its items. The thread waits while MAX_QUEUED are unread."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Any] = asyncio.Queue()
        room = threading.Semaphore(MAX_QUEUED)

        def end(error: BaseException | None) -> None:
            self._release(stop)  # first: a client that has its answer may send the next request at once
            queue.put_nowait(None if error is None else (None, error))

        def wait_for_room() -> None:
            while not room.acquire(timeout=QUEUE_POLL_SECONDS):
                if stop.is_set():
                    raise Stopped

        def run_in_thread() -> None:
            try:
                for item in work(stop):
                    wait_for_room()
                    loop.call_soon_threadsafe(queue.put_nowait, (item, None))
            except BaseException as error:  # raised again in the coroutine that waits
                loop.call_soon_threadsafe(end, error)
            else:
                loop.call_soon_threadsafe(end, None)

        self._threads.submit(run_in_thread)
        while (entry := await queue.get()) is not None:
            item, error = entry
            if error is not None:
                raise error
            room.release()
            yield item

    def _release(self, stop: StopEvent) -> None:
        if stop in self._stops:
            self._stops.discard(stop)
            self.slots.release(stop.client)
