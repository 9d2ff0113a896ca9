"""A server over one Writer: its wire formats' routes, what stands before them, and how failures are told.

A mistake of the client's is a 400 with one sentence, in the shape its client reads; unknown paths are JSON too.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import prometheus_client
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from redraft.engine import Stopped
from redraft.server import page
from redraft.server.api import anthropic, canvas, llamacpp, ollama, openai
from redraft.server.completion import Refused
from redraft.server.middleware import AccessMiddleware, Limits, Metrics, TooLarge
from redraft.server.service import Gone, Service
from redraft.server.worker import Busy, Closing, Worker
from redraft.writer import Writer


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How a server is set up."""

    name: str = "redraft"  # of the model, as clients see it
    limits: Limits = field(default_factory=Limits)
    requests: int = 72  # that are answered or wait at once; more are told to come back
    drain_seconds: float = 30.0  # for what runs, when the server is asked to end


def make_app(writer: Writer, config: ServerConfig | None = None) -> FastAPI:
    """The server."""
    config = config or ServerConfig()
    metrics, worker = Metrics(), Worker(writer, config.requests)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            await worker.close(config.drain_seconds)

    app = FastAPI(title="redraft", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(AccessMiddleware, limits=config.limits, metrics=metrics, told=error_body)
    app.state.worker = worker
    metrics.active.set_function(lambda: worker.active)
    add_errors(app)
    service = Service(writer, worker, metrics, config.name)
    for wire in (canvas, openai, anthropic, ollama, llamacpp):
        for route in wire.routes(service):
            method, extra = ("POST", described(route.body)) if route.body else ("GET", None)
            told = ANSWERS if route.body else None
            app.add_api_route(route.path, route.handler, methods=[method], openapi_extra=extra, responses=told)

    for path, handler in (("/", page.index), ("/page/{name}", page.file)):
        app.add_api_route(path, handler, methods=["GET", "HEAD"], include_in_schema=False)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics_page() -> Response:
        return PlainTextResponse(prometheus_client.generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    return app


ERROR = {"type": "object", "required": ["error"]}
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}, "application/x-ndjson": {}}},
    **{status: {"content": {"application/json": {"schema": ERROR}}} for status in (400, 401, 403, 409, 413, 429, 503)},
}


def described(body: type[BaseModel]) -> dict[str, Any]:
    """A request's body in the API's description; routes read it themselves."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    inner = schema.pop("$defs", {})

    def written_out(part: Any) -> Any:
        if isinstance(part, dict):
            if "$ref" in part:
                return written_out(inner[part["$ref"].rsplit("/", 1)[1]])
            return {name: written_out(value) for name, value in part.items()}
        return [written_out(value) for value in part] if isinstance(part, list) else part

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": written_out(schema)}}}}


def error_body(path: str, status: int, sentence: str, param: str | None = None) -> dict[str, Any]:
    """A failure in the shape that clients of a path read."""
    if path.startswith("/api/"):
        return ollama.error(sentence)
    if path.startswith("/v1/messages"):
        return anthropic.error(status, sentence)
    return openai.error(status, sentence, param)


def add_errors(app: FastAPI) -> None:
    """Every failure is JSON with a sentence."""

    def told(status: int) -> Callable[[Request, Exception], Response]:
        def answer(request: Request, error: Exception) -> Response:
            headers = {"Retry-After": str(error.seconds)} if isinstance(error, Busy) else None
            sentence = str(error) or type(error).__name__
            body = error_body(request.url.path, status, sentence, getattr(error, "param", None))
            return JSONResponse(body, status_code=status, headers=headers)

        return answer

    kinds = {Refused: 400, ValueError: 400, RecursionError: 400, Busy: 429, Closing: 503, TooLarge: 413}
    # A failure of the engine is told like any other; only what nobody foresaw costs the client its connection.
    for kind, status in {**kinds, Stopped: 409, Gone: 499, RuntimeError: 500, Exception: 500}.items():
        app.add_exception_handler(kind, told(status))

    def missing(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        path = request.url.path
        sentences = {404: f"there is no {path} here", 405: f"{path} is not for {request.method}"}
        body = error_body(path, status, sentences.get(status, str(error)))
        return JSONResponse(body, status_code=status, headers=getattr(error, "headers", None))

    app.add_exception_handler(HTTPException, missing)
