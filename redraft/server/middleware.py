"""Middleware in front of every route: access control, body size, metrics, and one log line per request.

A web page can make a browser send requests to a local server (DNS rebinding), so Host and Origin must name this machine.
The text of a body is never logged.
"""

import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hmac import compare_digest
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from redraft.server.bodies import BodyCounter, BodyLimits, Receive
from redraft.server.connections import ConnectionLimits, name_client
from redraft.server.errors import LOG, BodyTooLargeError, ServerBusyError, message_of, status_of

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
KEYLESS_PATHS = ("/health", "/", "/docs")  # need no API key
PAGE_FILES = "/page/"  # nor do the files of the web page, which asks for the key
UNKNOWN_FIELDS = "redraft.unknown_fields"  # scope key: names of body fields that the route does not know
BODY = "redraft.body"  # scope key: the body, whose bytes count until the route releases it
AT_END = "redraft.at_end"  # scope key: an ExitStack that is closed when the response has ended
MAX_NAMED_FIELDS = 20
DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # browsers leave them out of an origin
CORS_HEADERS = (
    (b"vary", b"Origin"),
    (b"access-control-expose-headers", b"x-redraft-unknown-fields, retry-after"),
)
PREFLIGHT_HEADERS = (
    (b"access-control-allow-methods", b"GET, HEAD, POST, OPTIONS"),
    (b"access-control-max-age", b"600"),
    (b"access-control-allow-private-network", b"true"),
)
HOST = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?)(?::[0-9]{1,5})?", re.ASCII | re.IGNORECASE)

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Which requests the server accepts."""

    hosts: tuple[str, ...] = ()  # names of this machine besides the local ones
    origins: tuple[str, ...] = ()  # of pages on other machines that may use the server, as `parse_origin` returns them
    key: str | None = None
    bodies: BodyLimits = field(default_factory=BodyLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)


class Metrics:
    """The metrics of /metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("redraft_requests", "Requests by route and status.", ["route", "status"], **options)
        self.seconds = Histogram("redraft_request_seconds", "From the first byte to the last.", ["route"], **options)
        self.tokens = Counter("redraft_tokens", "Tokens of prompts and of completions.", ["kind", "model"], **options)
        self.steps = Counter("redraft_steps", "Denoising steps.", **options)
        self.drafts = Counter(
            "redraft_drafts", "Drafted tokens that the causal half verified.", ["verdict", "model"], **options
        )
        self.unsettled = Counter("redraft_unsettled_canvases", "Canvases that changed at their last step.", **options)
        self.active = Gauge("redraft_active_requests", "Requests that run or wait.", **options)
        self.models = Gauge("redraft_loaded_models", "Models in memory.", **options)
        self.gpu_peak = Gauge("redraft_gpu_peak_bytes", "The most GPU memory in use so far; 0 without a GPU.", **options)
        self.gpu_limit = Gauge("redraft_gpu_limit_bytes", "The limit of --gpu-memory; 0 without one.", **options)


class AccessMiddleware:
    """ASGI middleware. `error_body` makes the body of a refusal from path, status and message."""

    def __init__(
        self, app: Any, limits: Limits, metrics: Metrics, error_body: Callable[[str, int, str], dict[str, Any]]
    ) -> None:
        self.app = app
        self.limits = limits
        self.metrics = metrics
        self.error_body = error_body
        self.hosts = {*LOCAL_HOSTS, *(host.lower() for host in limits.hosts)}
        self.bodies = BodyCounter(limits.bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses a request, or passes it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        is_body_complete = not self._has_body(headers)
        origin = headers.get("origin", "").lower()
        cors_headers = self._cors_headers(origin)

        async def send_and_note_status(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_unknown_fields_header(scope), *cors_headers]
                if not is_body_complete:  # the rest of the body is not read
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        async def receive_and_note_end() -> MutableMapping[str, Any]:
            nonlocal is_body_complete
            message = await receive()
            is_body_complete |= not message.get("more_body", False)
            return message

        async def refuse(status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
            await _send_json(send_and_note_status, status, self.error_body(scope["path"], status, text), *headers)

        try:
            if refusal := self._refusal(scope, headers):
                await refuse(*refusal)
                return
            if is_preflight(scope, headers):
                await _answer_preflight(send_and_note_status, headers)
                return
            length = headers.get("content-length", "0")
            announced = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0
            client = name_client(scope["client"][0] if scope.get("client") else None)
            try:
                body = self.bodies.count(receive_and_note_end, client, announced)
            except (BodyTooLargeError, ServerBusyError) as error:
                retry = [(b"retry-after", b"1")] if isinstance(error, ServerBusyError) else []
                await refuse(status_of(error), message_of(error), *retry)
                return
            scope[BODY] = body
            with body, ExitStack() as at_end:
                scope[AT_END] = at_end
                await self.app(scope, body.receive, send_and_note_status)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            taken = time.perf_counter() - began
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(taken)
            line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "route": route}
            LOG.info(json.dumps({**line, "method": scope["method"][:20], "status": status, "seconds": round(taken, 4)}))

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        """Returns status and message if the request is not allowed."""
        for name in (b"host", b"origin"):
            if sum(header.lower() == name for header, _ in scope["headers"]) > 1:
                return 400, f"the request has more than one {name.decode().capitalize()} header"
        if (host := _host_name(headers.get("host", ""))) not in self.hosts:
            if host is None:
                return 400, f"the Host header {headers.get('host', '')[:100]!r} is not HOST or HOST:PORT"
            return 403, f"this server does not answer to the host {host!r}; start it with --allow-host {host} if it is yours"
        if (origin := headers.get("origin")) is not None and not self._is_origin_allowed(origin.lower()):
            return 403, f"pages from {origin[:100]!r} may not use this server; start it with --cors ORIGIN if they are yours"
        if is_preflight(scope, headers):
            return None  # a browser asks without a key whether a page may send one
        path = scope["path"]
        needs_key = self.limits.key is not None and path not in KEYLESS_PATHS and not path.startswith(PAGE_FILES)
        if needs_key and not self._has_key(headers):
            return 401, "this server needs its API key: Authorization: Bearer KEY, or x-api-key: KEY"
        return None

    def _is_origin_allowed(self, origin: str) -> bool:
        return origin in self.limits.origins or _origin_host(origin) in self.hosts

    def _cors_headers(self, origin: str) -> list[tuple[bytes, bytes]]:
        """The headers that let a page of this origin read the response; none for pages of this machine."""
        if origin not in self.limits.origins:
            return []
        return [(b"access-control-allow-origin", origin.encode("latin-1")), *CORS_HEADERS]

    def _has_body(self, headers: dict[str, str]) -> bool:
        return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers

    def _has_key(self, headers: dict[str, str]) -> bool:
        """Whether a header has the key, in UTF-8 or in Latin-1: clients differ in how they send other letters than ASCII."""
        key = str(self.limits.key)
        expected = [key.encode()]
        with suppress(UnicodeEncodeError):
            expected.append(key.encode("latin-1"))
        scheme, _, credentials = headers.get("authorization", "").partition(" ")
        given = (credentials.strip(" \t") if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
        return any(compare_digest(each.encode("latin-1"), right) for each in given for right in expected)


def is_preflight(scope: Scope, headers: dict[str, str]) -> bool:
    """Whether a browser asks what a page of another origin may send."""
    return scope["method"] == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


async def _answer_preflight(send: Send, headers: dict[str, str]) -> None:
    """Allows the headers that the page wants to send; the request itself is checked when it comes."""
    wanted = headers.get("access-control-request-headers", "")[:1000].encode("latin-1")
    allowed = [(b"access-control-allow-headers", wanted)] if wanted else []
    await send({"type": "http.response.start", "status": 204, "headers": [*PREFLIGHT_HEADERS, *allowed]})
    await send({"type": "http.response.body", "body": b""})


def parse_origin(value: str) -> str:
    """Returns an origin as browsers send it: https://HOST or https://HOST:PORT, or with http. Raises ValueError."""
    origin = value.strip().lower().removesuffix("/")
    scheme = origin.partition("://")[0]
    if _origin_host(origin) is None:
        raise ValueError(f"--cors takes the origin of a page, such as https://example.org, got {value!r}")
    return origin.removesuffix(DEFAULT_PORTS[scheme])


def _unknown_fields_header(scope: Scope) -> Iterable[tuple[bytes, bytes]]:
    """The header that names unknown fields of the body, so that the server ignores none silently."""
    names = scope.get(UNKNOWN_FIELDS, ())[:MAX_NAMED_FIELDS]
    safe_names = [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:60] or "?" for name in names]
    return [(b"x-redraft-unknown-fields", ", ".join(safe_names).encode("ascii"))] if safe_names else []


def _host_name(value: str) -> str | None:
    """Returns the host of HOST or HOST:PORT, without the brackets of IPv6; None for anything else."""
    match = HOST.fullmatch(value)
    return match[1].strip("[]").lower() if match else None


def _origin_host(origin: str) -> str | None:
    """Returns the host of http://HOST:PORT or https://HOST:PORT; None for anything else."""
    scheme, separator, rest = origin.partition("://")
    return _host_name(rest) if separator and scheme.lower() in ("http", "https") else None


async def _send_json(send: Send, status: int, body: Any, *more_headers: tuple[bytes, bytes]) -> None:
    headers: Iterable[tuple[bytes, bytes]] = [(b"content-type", b"application/json"), *more_headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
