"""Stream: the events of one request, as an iterator."""

from typing import Protocol

from redraft.diffusion.generate import Event
from redraft.engine.request import Request


class Source(Protocol):
    """What a stream needs of the engine."""

    max_unread: int | None
    memory_advice: str

    def wait_for_event(self, request: Request) -> None:
        """Waits until the request has moved."""

    def wake(self) -> None:
        """Wakes the engine's thread."""

    def cancel(self, request: Request) -> None:
        """Ends a request."""


class Stream:
    """Iterates over the events of one request. Closing or dropping the stream cancels the request."""

    def __init__(self, engine: Source, request: Request) -> None:
        self.engine = engine
        self.request = request

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Event:
        events = self.request.events
        assert events is not None
        while not events and not self.request.is_over:
            self.engine.wait_for_event(self.request)
        if events:
            event = events.popleft()
            max_unread = self.engine.max_unread
            if max_unread is not None and len(events) == max_unread - 1:
                self.engine.wake()  # the request goes on
            return event
        if self.request.failure is not None:
            raise self.request.failure.to_exception(self.engine.memory_advice)
        raise StopIteration

    def close(self) -> None:
        """Cancels the request, unless it is over."""
        self.engine.cancel(self.request)

    def __del__(self) -> None:
        self.close()
