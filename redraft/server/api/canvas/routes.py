"""The routes of our own wire format: each runs one generator of events and sends it whole or as server-sent events."""

from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from redraft.server.api.canvas.autoregressive import stream_autoregressive
from redraft.server.api.canvas.decide import stream_decision
from redraft.server.api.canvas.edit import stream_canvas_edit
from redraft.server.api.canvas.events import Events, memory_of
from redraft.server.api.canvas.sudoku import SudokuSolver
from redraft.server.api.canvas.write import stream_canvas
from redraft.server.images import ignored_image_fields
from redraft.server.models import Handlers, Models
from redraft.server.schema import AutoregressiveRequest, CanvasEditRequest, CanvasRequest, DecideRequest, SudokuRequest
from redraft.server.service import Route, Service, client_name_of, name_ignored_fields, read_body
from redraft.server.streams import end_with_error, next_until_disconnected, sse_response, until_disconnected
from redraft.server.worker import Stream

Watched = TypeVar("Watched", CanvasRequest, CanvasEditRequest, SudokuRequest, DecideRequest, AutoregressiveRequest)


def routes(models: Models) -> list[Route]:
    """Returns the routes of this wire format."""
    handlers = CanvasRoutes(models)
    return [
        Route("/v1/canvas", handlers.canvas, CanvasRequest),
        Route("/v1/canvas/edit", handlers.edit, CanvasEditRequest),
        Route("/v1/canvas/sudoku", handlers.sudoku, SudokuRequest),
        Route("/v1/canvas/decide", handlers.decide, DecideRequest),
        Route("/v1/canvas/autoregressive", handlers.autoregressive, AutoregressiveRequest),
    ]


class CanvasRoutes(Handlers):
    """The handlers."""

    def __init__(self, models: Models) -> None:
        super().__init__(models)
        self.sudoku_solver = SudokuSolver()

    async def canvas(self, request: Request) -> Response:
        """POST /v1/canvas."""
        body = await read_body(request, CanvasRequest)
        compiles = body.regex is not None or body.schema_ is not None or body.choices is not None
        if body.messages is not None:
            name_ignored_fields(request, ignored_image_fields(body.messages))
        return await self._respond(request, body, stream_canvas, compiles=compiles, takes_images=True)

    async def edit(self, request: Request) -> Response:
        """POST /v1/canvas/edit."""
        body = await read_body(request, CanvasEditRequest)
        return await self._respond(request, body, stream_canvas_edit)

    async def sudoku(self, request: Request) -> Response:
        """POST /v1/canvas/sudoku."""
        body = await read_body(request, SudokuRequest)
        return await self._respond(request, body, self.sudoku_solver.stream)

    async def decide(self, request: Request) -> Response:
        """POST /v1/canvas/decide."""
        body = await read_body(request, DecideRequest)
        return await self._respond(request, body, stream_decision, compiles=True)

    async def autoregressive(self, request: Request) -> Response:
        """POST /v1/canvas/autoregressive."""
        body = await read_body(request, AutoregressiveRequest)
        return await self._respond(request, body, stream_autoregressive)

    async def _respond(
        self,
        request: Request,
        body: Watched,
        stream_events: Callable[..., Events],  # (writer, body, stop), with `takes_images` also `images`
        *,
        compiles: bool = False,
        takes_images: bool = False,
    ) -> Response:
        """Runs the events of a body over the model that it names."""
        service = (await self.of(request, body)).service
        images = {"images": service.images} if takes_images else {}
        work = partial(stream_events, service.writer, body, **images)
        events = finish_events(service, service.worker.run(work, client=client_name_of(request), compiles=compiles))
        if not body.stream:
            return JSONResponse({"events": [event async for event in until_disconnected(request, events)]})
        first = await next_until_disconnected(request, events)  # a bad request raises here, before the response starts
        return sse_response(end_with_error(_prepend(first, events), _error_event))


async def finish_events(service: Service, events: Stream[dict[str, Any]]) -> Stream[dict[str, Any]]:
    """Counts the stats of the end event and turns them into timings, and adds the memory in use to it."""
    async with aclosing(events):
        async for event in events:
            if (stats := event.pop("stats", None)) is not None:
                service.count_stats(stats)
                event["timings"] = service.timings_of([stats])
            if event["type"] == "end":
                event["memory"] = memory_of(service.writer.model.device)
            yield event


async def _prepend(first: dict[str, Any], rest: Stream[dict[str, Any]]) -> Stream[dict[str, Any]]:
    yield first
    async with aclosing(rest):
        async for event in rest:
            yield event


def _error_event(status: int, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"message": message, "code": status}}
