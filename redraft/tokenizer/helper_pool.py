"""Helper pool: lends a few helper processes to many callers, so that no client stalls the others.

A client has at most `per_client` processes at a time. The next free process goes to the client that has the fewest, and of
these to the one that has waited longest.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from redraft.tokenizer.helper_process import HelperStoppedError

POLL_SECONDS = 0.02


class Closable(Protocol):
    """A helper process, or what wraps one."""

    def close(self) -> None:
        """Ends the process."""


Process = TypeVar("Process", bound=Closable)


@dataclass(frozen=True, eq=False)
class Place:
    """One caller that waits for a process."""

    client: str


class HelperPool(Generic[Process]):
    """At most `size` processes. `make_process` is called when one is first needed."""

    def __init__(self, make_process: Callable[[], Process], size: int, per_client: int = 1) -> None:
        self.size = size
        self.per_client = per_client
        self._make_process = make_process
        self._processes: list[Process] = []
        self._free: list[Process] = []
        self._waiting: list[Place] = []  # in order
        self._busy: Counter[str] = Counter()  # processes of each client
        self._is_closed = False
        self._changed = threading.Condition()

    @contextmanager
    def lend(self, stop: threading.Event | None) -> Iterator[Process]:
        """A process for the caller alone. Waits for one; raises HelperStoppedError once `stop` is set while it waits.

        The stop events of a server name the client; a program's own have none, and count as those of one client.
        """
        client = str(getattr(stop, "client", ""))
        process = self._acquire(client, stop)
        try:
            yield process
        finally:
            self._release(client, process)

    def close(self) -> None:
        """Ends all processes; calls that wait raise HelperStoppedError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            processes = list(self._processes)
        for process in processes:
            process.close()

    def _acquire(self, client: str, stop: threading.Event | None) -> Process:
        with self._changed:
            place = Place(client)
            self._waiting.append(place)
            try:
                while not self._is_next(place):
                    if self._is_closed or (stop is not None and stop.is_set()):
                        raise HelperStoppedError("the caller has stopped waiting")
                    self._changed.wait(timeout=POLL_SECONDS)
                self._busy[client] += 1
            finally:
                self._waiting.remove(place)
            if self._free:
                return self._free.pop()
            try:
                process = self._make_process()
            except BaseException:
                self._release(client, None)
                raise
            self._processes.append(process)
            return process

    def _release(self, client: str, process: Process | None) -> None:
        with self._changed:
            self._free += [process] if process is not None else []
            self._busy -= Counter([client])  # drops clients that have none
            self._changed.notify_all()
            is_late = self._is_closed
        if is_late and process is not None:
            process.close()  # its caller may have started it after `close`

    def _is_next(self, place: Place) -> bool:
        """Whether a process is free, and it is the turn of this place."""
        if self._is_closed or (not self._free and len(self._processes) >= self.size):
            return False
        allowed = [other for other in self._waiting if self._busy[other.client] < self.per_client]
        return place is min(allowed, key=lambda other: self._busy[other.client], default=None)
