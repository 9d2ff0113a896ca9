"""AsyncStream: the events of one answer for asyncio. A thread waits for each event, so the event loop stays free."""

import asyncio
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

from redraft.tasks.text_events import TextEvent


class AsyncStream:
    """Iterates over events with `async for`. Awaiting it starts the request and returns the stream itself.

    Streams of one writer run in one batch. Closing a stream, or cancelling the task that reads it, cancels the request.
    """

    def __init__(self, start: Callable[[], Iterator[TextEvent]], stop: threading.Event) -> None:
        self._start = start
        self._stop = stop
        self._events: Iterator[TextEvent] | None = None
        self._is_over = False

    def __await__(self) -> Generator[Any, None, "AsyncStream"]:
        return self._open().__await__()

    async def _open(self) -> "AsyncStream":
        if self._events is None:
            self._events = await asyncio.to_thread(self._start)
        return self

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> TextEvent:
        try:
            await self._open()
            assert self._events is not None
            event = await asyncio.to_thread(next, self._events, None)
        except asyncio.CancelledError:
            self._cancel()
            raise
        if event is None:
            self._is_over = True
            raise StopAsyncIteration
        return event

    async def aclose(self) -> None:
        """Cancels the request, unless it is over."""
        self._cancel()
        self._events = iter(())

    def _cancel(self) -> None:
        if not self._is_over:
            self._stop.set()

    def __del__(self) -> None:
        self._cancel()
