"""Request bodies: how many bytes the server receives at once, how long a body may take, and how many values its JSON has.

A body is counted before it is received, by its Content-Length, and piece by piece where it has none. JSON is counted before
it is parsed: a megabyte of `[],[],[],...` would become hundreds of megabytes of Python objects.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from redraft.server.errors import BadRequestError, BodyTimeoutError, BodyTooLargeError, TooManyBytesError

PIECE = 2**20  # bytes that are counted at once
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """Limits on request bodies."""

    body_bytes: int = 8 * 2**20  # of one body
    received_bytes: int = 32 * 2**20  # of all bodies that are being received or parsed; half of it for one client
    free_bytes: int = 64 * 2**10  # bodies up to this size do not count
    body_seconds: float = 60.0  # for a whole body
    json_values: int = 300_000  # of one body


@dataclass
class BodyCounter:
    """Counts the bytes of the bodies that the server is receiving or parsing."""

    limits: BodyLimits
    by_client: Counter[str] = field(default_factory=Counter)

    def count(self, receive: Receive, client: str, announced: int) -> "CountedBody":
        """A body of which `announced` bytes are known to come; 0 if unknown. They count until it is released."""
        body = CountedBody(self, receive, client)
        body.count(announced)
        return body

    def add(self, client: str, count: int) -> None:
        """Counts bytes. Raises TooManyBytesError if the server, or this client, would have too many."""
        most = self.limits.received_bytes
        if count > 0 and (self.by_client.total() + count > most or self.by_client[client] + count > most // 2):
            raise TooManyBytesError
        self.by_client[client] += count
        if not self.by_client[client]:
            del self.by_client[client]


class CountedBody:
    """One body. `release`, and leaving its `with` block, give its bytes back."""

    def __init__(self, counter: BodyCounter, receive: Receive, client: str) -> None:
        self._counter = counter
        self._receive = receive
        self._client = client
        self._counted = 0
        self._received = 0
        self._deadline: float | None = None
        self._is_complete = False

    def __enter__(self) -> "CountedBody":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def count(self, size: int) -> None:
        """Counts a body of so many bytes, unless it is small."""
        if size > self._counter.limits.body_bytes:
            raise BodyTooLargeError(self._counter.limits.body_bytes)
        if size > max(self._counted, self._counter.limits.free_bytes):
            self._counter.add(self._client, size - self._counted)
            self._counted = size

    def release(self) -> None:
        """The bytes do not count any more."""
        self._counter.add(self._client, -self._counted)
        self._counted = 0

    async def receive(self) -> MutableMapping[str, Any]:
        """The next piece of the body. Behind the body, waits for the client to leave, without a time limit."""
        if self._is_complete:
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._counter.limits.body_seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise BodyTimeoutError(self._counter.limits.body_seconds) from None
        self._received += len(message.get("body", b""))
        self.count(self._received)
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._is_complete = True
        return message


def check_json_size(raw: bytes, limit: int, what: str = "the body") -> None:
    """Refuses JSON with more than `limit` values, before it is parsed."""
    if raw.count(b",") + raw.count(b":") + raw.count(b"[") + raw.count(b"{") <= limit:
        return  # the usual case; what follows does not count what stands in strings
    if (values := count_json_values(raw)) > limit:
        raise BadRequestError(f"{what} has about {values:,} JSON values, at most {limit:,} are accepted: send less at once")


def count_json_values(raw: bytes) -> int:
    """About how many values and keys JSON text has: its commas, colons and opening brackets outside of strings."""
    raw = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    is_separator = np.zeros(256, dtype=bool)
    is_separator[list(b",:[{")] = True
    values = 0
    is_inside = np.uint8(0)  # a string, at the beginning of the piece
    for start in range(0, len(raw), PIECE):
        codes_N = np.frombuffer(raw[start : start + PIECE], dtype=np.uint8)
        inside_N = (np.cumsum(codes_N == ord('"'), dtype=np.uint8) + is_inside) % 2
        values += int(np.count_nonzero(is_separator[codes_N] & (inside_N == 0)))
        is_inside = inside_N[-1]
    return values
