"""Connections: limits that hold before a request reaches a route, for uvicorn's HTTP protocol.

    too many connections, or of one client    -> 503, closed
    no complete request head in time          -> closed
    a body in tiny chunks                     -> closed: each chunk costs time on the event loop, whatever its size
    a client that does not read its response  -> closed

The middleware limits bodies; `worker.py` limits requests. uvicorn's own `limit_concurrency` is not used: it refuses requests
on connections that are open already.
"""

import asyncio
import ipaddress
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n\r\n"
    b'{"error": {"message": "too many connections are open: close some, or start the server with a higher --connections", '
    b'"type": "server_error", "code": null, "param": null}}'
)
HEAD_PIECE = 4096  # bytes that are parsed at once until the head of a request is complete
FREE_CHUNKS = 256  # chunks of a body that may be of any size
CHUNK_SIZE_LINE = re.compile(rb"\r\n[0-9A-Fa-f]{1,8}(?=[\r;])")
MIN_CHUNK = 64  # bytes of a chunk with its lines, on average, in a body of more chunks


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits on connections. A client is an IPv4 address or an IPv6 network of 64 bits."""

    connections: int = 512  # in all; more are answered with 503
    connections_per_client: int = 256
    head_seconds: float = 10.0  # for the head of a request, from its first byte or from the start of the connection
    reader_seconds: float = 30.0  # without reading a byte of a response that waits


def name_client(address: str | None) -> str:
    """The name under which a client's requests are counted."""
    try:
        parsed = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return address or ""
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol with limits. `make_protocol` binds the limits and the counts of one server."""

    limits: ClassVar[ConnectionLimits]
    trusted_proxies: ClassVar[frozenset[str]]
    open_connections: ClassVar[Counter[str]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._client_name = ""
        self._chunks = 0
        self._chunked_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts the connection; refuses it if its client has too many."""
        super().connection_made(transport)
        self._client_name = name_client(self.client[0] if self.client else None)
        self.open_connections[self._client_name] += 1
        is_proxy = self._client_name in self.trusted_proxies
        has_too_many = self.open_connections[self._client_name] > self.limits.connections_per_client and not is_proxy
        if has_too_many or self.open_connections.total() > self.limits.connections:
            self.transport.write(REFUSAL)
            self.transport.close()
            return
        self._start_timer("head", self.limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        for name in list(self._timers):
            self._stop_timer(name)
        self.open_connections[self._client_name] -= 1
        if not self.open_connections[self._client_name]:
            del self.open_connections[self._client_name]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Passes data on. Until it completes the head of a request, the timer runs."""
        while data and not self.transport.is_closing():
            size = HEAD_PIECE if self._is_between_requests else len(data)  # behind a head, a body may begin
            piece = data[:size]
            data = data[size:]
            if self._is_body_in_tiny_chunks(piece):
                self.transport.abort()
                return
            super().data_received(piece)
        if self._is_between_requests:
            if "head" not in self._timers:
                self._start_timer("head", self.limits.head_seconds)
        else:
            self._stop_timer("head")

    def on_response_complete(self) -> None:
        """The next head has its own time; until its first byte comes, uvicorn's keep-alive timer runs."""
        self._stop_timer("head")
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client does not read fast enough: it has some time to go on."""
        super().pause_writing()
        self._start_timer("reader", self.limits.reader_seconds)

    def resume_writing(self) -> None:
        """The client has read."""
        self._stop_timer("reader")
        super().resume_writing()

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _is_body_in_tiny_chunks(self, data: bytes) -> bool:
        """Counts the chunks of a body by the lines with their sizes."""
        if self._is_between_requests or all(name != b"transfer-encoding" for name, _ in self.headers):
            self._chunks = 0
            self._chunked_bytes = 0
            return False
        self._chunks += len(CHUNK_SIZE_LINE.findall(data))
        self._chunked_bytes += len(data)
        return self._chunks > FREE_CHUNKS and self._chunked_bytes < self._chunks * MIN_CHUNK

    def _start_timer(self, name: str, seconds: float) -> None:
        self._stop_timer(name)
        self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _stop_timer(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()


def make_protocol(limits: ConnectionLimits, trusted_proxies: tuple[str, ...] = ()) -> type[GuardedProtocol]:
    """A protocol class with these limits and its own counts. A trusted proxy may have all connections."""
    proxies = frozenset(map(name_client, trusted_proxies))
    settings = {"limits": limits, "trusted_proxies": proxies, "open_connections": Counter()}
    return type("GuardedProtocol", (GuardedProtocol,), settings)


def uvicorn_config(
    app: Any, limits: ConnectionLimits, *, drain_seconds: float, trusted_proxies: tuple[str, ...] = (), **options: Any
) -> uvicorn.Config:
    """uvicorn's settings for a server. Only trusted proxies may name the client that they forward."""
    return uvicorn.Config(
        app,
        http=make_protocol(limits, trusted_proxies),
        ws="none",
        proxy_headers=bool(trusted_proxies),
        forwarded_allow_ips=list(trusted_proxies),
        timeout_graceful_shutdown=int(drain_seconds),
        log_level="warning",
        **options,
    )
