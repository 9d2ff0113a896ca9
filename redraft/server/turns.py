"""Turns: work of which the server does little at a time, shared evenly among clients.

A client has at most `per_client` turns at a time. The next free turn goes to the client that has waited longest.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from redraft.tokenizer.helper_process import HelperStoppedError

POLL_SECONDS = 0.02


class Turns:
    """At most `size` turns at a time."""

    def __init__(self, size: int, per_client: int = 1) -> None:
        self.size = size
        self.per_client = per_client
        self._waiting: list[str] = []  # clients, in order
        self._taken: Counter[str] = Counter()  # turns of each client
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, client: str, stop: threading.Event | None) -> Iterator[None]:
        """Waits for a turn, which ends with the `with` block."""
        self.begin(client, stop)
        try:
            yield
        finally:
            self.end(client)

    def begin(self, client: str, stop: threading.Event | None) -> None:
        """Waits for a turn. Raises HelperStoppedError once `stop` is set."""
        with self._changed:
            self._waiting.append(client)
            try:
                while not self._is_next(client):
                    if stop is not None and stop.is_set():
                        raise HelperStoppedError("the caller has stopped waiting")
                    self._changed.wait(timeout=POLL_SECONDS)
                self._taken[client] += 1
            finally:
                self._waiting.remove(client)

    def end(self, client: str) -> None:
        """Ends the turn of a client."""
        with self._changed:
            self._taken -= Counter([client])  # drops clients that have none
            self._changed.notify_all()

    def _is_next(self, client: str) -> bool:
        """Whether a turn is free and no other client that may have one has waited longer."""
        if self._taken.total() >= self.size:
            return False
        return client == next((other for other in self._waiting if self._taken[other] < self.per_client), None)
