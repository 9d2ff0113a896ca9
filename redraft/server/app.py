"""The FastAPI app over the models of a server: routes of all wire formats, middleware, error handlers.

Every error is JSON with one sentence, in the shape that clients of the path read. `errors.py` has the status codes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import prometheus_client
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from redraft.engine.gpu_limit import peak_bytes
from redraft.server import docs_page, page
from redraft.server.api import anthropic, canvas, llamacpp, ollama, openai, responses
from redraft.server.errors import STATUS_CODES, ServerBusyError, log_fault, message_of, status_of
from redraft.server.middleware import AccessMiddleware, Metrics
from redraft.server.models import Models, ModelSource
from redraft.server.server_config import ServerConfig
from redraft.writer import Writer


def make_app(
    writer: Writer, config: ServerConfig | None = None, sources: Mapping[str, ModelSource] | None = None
) -> FastAPI:
    """Builds the server. `sources` are models that are loaded on demand, by the names that clients say."""
    config = config or ServerConfig()
    metrics = Metrics()
    models = Models(writer, sources or {}, config, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        models.open()
        try:
            yield
        finally:
            await models.close()

    app = FastAPI(title="redraft", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(AccessMiddleware, limits=config.limits, metrics=metrics, error_body=error_body)
    app.state.models = models
    app.state.limits = config.limits
    app.state.parsing = asyncio.Lock()  # held while a long body is parsed
    app.state.will_trim = False  # whether freed memory is about to be returned
    metrics.active.set_function(lambda: models.active)
    metrics.models.set_function(lambda: len(models.services))
    metrics.gpu_peak.set_function(lambda: peak_bytes(writer.model.device))
    metrics.gpu_limit.set(writer.gpu_limit.limit if writer.gpu_limit is not None else 0)
    add_error_handlers(app)

    def add_get(path: str, handler: Callable[..., Any], **options: Any) -> None:
        app.add_api_route(path, handler, methods=["GET"], **options)
        app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)  # one route would have one id for both

    for wire in (canvas, openai, responses, anthropic, ollama, llamacpp):
        for route in wire.routes(models):
            if route.body is None:
                add_get(route.path, route.handler, responses=GET_RESPONSES)
            else:
                schema = {"requestBody": describe_body(route.body)}
                app.add_api_route(route.path, route.handler, methods=["POST"], openapi_extra=schema, responses=RESPONSES)

    docs = docs_page.docs_handler(app.openapi)
    for path, handler in (("/", page.index), ("/page/{name}", page.file), ("/docs", docs)):
        add_get(path, handler, include_in_schema=False)

    async def metrics_page() -> Response:
        return PlainTextResponse(prometheus_client.generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    add_get("/metrics", metrics_page, response_class=PlainTextResponse)
    return app


ERROR_SCHEMA = {"type": "object", "required": ["error"]}
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}, "application/x-ndjson": {}}},
    **{
        status: {"content": {"application/json": {"schema": ERROR_SCHEMA}}}
        for status in (400, 401, 403, 404, 408, 413, 429, 500, 503)
    },
}
GET_RESPONSES: dict[int | str, dict[str, Any]] = {404: {"content": {"application/json": {"schema": ERROR_SCHEMA}}}}


def describe_body(body: type[BaseModel]) -> dict[str, Any]:
    """Describes a request body for /openapi.json. Routes parse bodies themselves, so FastAPI does not know them."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})

    def expand(part: Any) -> Any:
        if isinstance(part, dict):
            if "$ref" in part:
                return expand(definitions[part["$ref"].rsplit("/", 1)[1]])
            return {name: expand(value) for name, value in part.items()}
        return [expand(value) for value in part] if isinstance(part, list) else part

    return {"required": True, "content": {"application/json": {"schema": expand(schema)}}}


def error_body(path: str, status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Returns an error in the shape that clients of a path read."""
    if path.startswith("/api/"):
        return ollama.error(message)
    if path.startswith("/v1/messages"):
        return anthropic.error(status, message)
    return openai.error(status, message, param)


def add_error_handlers(app: FastAPI) -> None:
    """Makes every error JSON with a sentence."""

    def answer_error(request: Request, error: Exception) -> Response:
        log_fault(error)
        status = status_of(error)
        headers = {"Retry-After": str(error.retry_after)} if isinstance(error, ServerBusyError) else None
        body = error_body(request.url.path, status, message_of(error), getattr(error, "param", None))
        return JSONResponse(body, status_code=status, headers=headers)

    # Starlette answers with the handler of Exception too, but raises the error again and closes the connection. Faults of
    # the engine and failed checks are not worth that.
    for kind in (
        *STATUS_CODES,
        RuntimeError,
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AssertionError,
        Exception,
    ):
        app.add_exception_handler(kind, answer_error)

    def answer_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        messages = {404: f"there is no {path} here", 405: f"{path} does not support {request.method}"}
        body = error_body(path, error.status_code, messages.get(error.status_code, str(error)))
        return JSONResponse(body, status_code=error.status_code, headers=getattr(error, "headers", None))

    app.add_exception_handler(HTTPException, answer_http_error)
