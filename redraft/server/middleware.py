"""What stands before every route: whose requests are taken, how large they may be, and one line of log for each.

A page on the web can make a browser ask a local server (DNS rebinding), so Host and Origin must name this machine. A body's
text is never logged.
"""

import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LOCAL = ("localhost", "127.0.0.1", "::1")
LOG = logging.getLogger("redraft.server")
OPEN = ("/health", "/")  # without a key, and the files of the page, which asks for it
PAGE = "/page/"
UNREAD = "redraft.unread"  # where a route leaves the names of fields that it does not know
NAMED = 20  # of them at most

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server takes."""

    hosts: tuple[str, ...] = ()  # names of this machine besides the local ones
    key: str | None = None
    body_bytes: int = 8 * 2**20


class Metrics:
    """What /metrics tells."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("redraft_requests", "Requests by route and status.", ["route", "status"], **options)
        self.seconds = Histogram("redraft_request_seconds", "From the first byte to the last.", ["route"], **options)
        self.tokens = Counter("redraft_tokens", "Tokens read and written.", ["kind"], **options)
        self.steps = Counter("redraft_steps", "Denoising steps.", **options)
        self.unsettled = Counter("redraft_unsettled_pages", "Pages that still moved at their last step.", **options)
        self.active = Gauge("redraft_active_requests", "Requests that are being answered or wait.", **options)


class AccessMiddleware:
    """ASGI middleware. `told` puts a refusal into the shape that clients of a path read."""

    def __init__(self, app: Any, limits: Limits, metrics: Metrics, told: Callable[[str, int, str], Any]) -> None:
        self.app, self.limits, self.metrics, self.told = app, limits, metrics, told
        self.hosts = {*LOCAL, *(host.lower() for host in limits.hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses, or passes on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_not_read(scope)]
            await send(message)

        try:
            if refusal := self._refusal(scope, headers):
                await _answer(noted, refusal[0], self.told(scope["path"], *refusal))
            else:
                await self.app(scope, self._counted(receive), noted)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            taken = time.perf_counter() - began
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(taken)
            LOG.info(json.dumps({"route": route, "method": scope["method"], "status": status, "seconds": round(taken, 4)}))

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        if (host := _name(headers.get("host", ""))) not in self.hosts:
            return 403, f"this server does not answer to the host {host!r}; start it with --allow-host {host} if it is yours"
        if (origin := headers.get("origin")) is not None and _name(origin.partition("://")[2]) not in self.hosts:
            return 403, f"pages from {origin!r} may not use this server; start it with --allow-host if they are yours"
        path = scope["path"]
        free = path in OPEN or path.startswith(PAGE)
        if self.limits.key is not None and not free and not self._has_key(headers):
            return 401, "this server wants its API key: Authorization: Bearer KEY, or x-api-key: KEY"
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self.limits.body_bytes:
            return 413, _too_large(self.limits.body_bytes)
        return None

    def _has_key(self, headers: dict[str, str]) -> bool:
        given = (headers.get("authorization", "").removeprefix("Bearer ").strip(), headers.get("x-api-key", ""))
        return any(compare_digest(one.encode(), str(self.limits.key).encode()) for one in given)

    def _counted(self, receive: Receive) -> Receive:
        seen = 0

        async def counting() -> MutableMapping[str, Any]:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limits.body_bytes:
                raise TooLarge(_too_large(self.limits.body_bytes))
            return message

        return counting


def _not_read(scope: Scope) -> Iterable[tuple[bytes, bytes]]:
    """Says which fields of the body nobody here knows, so that none is passed over in silence."""
    names = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:60] or "?" for name in scope.get(UNREAD, ())[:NAMED]]
    return [(b"x-redraft-not-read", ", ".join(names).encode("ascii"))] if names else []


class TooLarge(Exception):
    """More bytes than may be."""


def _too_large(most: int) -> str:
    return f"a request may have {most:,} bytes at most"


def _name(netloc: str) -> str:
    """The host of host:port, brackets of IPv6 taken off."""
    try:
        return (urlsplit(f"//{netloc}").hostname or "").lower()
    except ValueError:
        return ""


async def _answer(send: Send, status: int, body: Any) -> None:
    headers: Iterable[tuple[bytes, bytes]] = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
