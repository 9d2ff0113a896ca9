"""Where routes meet the worker: bodies read, answers begun, gathered and counted, streams written out.

Wire formats stand on this and know nothing of threads or of one another.
"""

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ValidationError

from redraft.diffusion.generate import Stats
from redraft.server.completion import Begun, CompletionParams, End, Piece, Refused, Said, Text, pieces
from redraft.server.fim import Hole
from redraft.server.infill import Put, put
from redraft.server.middleware import UNREAD, Metrics
from redraft.server.worker import Worker
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.writer import Writer

NEVER = -9999.0  # what clients read for a probability of nothing
PATIENCE = 0.1  # seconds between two looks whether a client is still there
B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")


class Gone(RuntimeError):
    """The client has left."""


@dataclass(frozen=True)
class Route:
    """A path of a wire format: its handler, and the body that is sent there, if any."""

    path: str
    handler: Callable[..., Any]
    body: type[BaseModel] | None = None


@dataclass(frozen=True)
class Whole:
    """A whole answer."""

    texts: list[Text]
    end: End

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(piece.text for piece in self.texts)

    @property
    def reasoning(self) -> str:
        """Its thoughts."""
        return "".join(piece.reasoning for piece in self.texts)

    @property
    def tool_calls(self) -> list[Any]:
        """Its calls."""
        return [call for piece in self.texts for call in piece.tool_calls]

    @property
    def tokens(self) -> list[Said]:
        """Its tokens, where they were asked for."""
        return [token for piece in self.texts for token in piece.tokens]


class Service:
    """One server's worker, as routes use it."""

    def __init__(self, writer: Writer, worker: Worker, metrics: Metrics, name: str) -> None:
        self.writer, self.worker, self.metrics, self.name = writer, worker, metrics, name

    async def begin(self, asked: Sequence[CompletionParams]) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces of all of them as they come, with their numbers; what cannot be done is told before this returns."""
        if len(asked) > self.worker.limit:
            raise Refused(f"{len(asked)} answers at once are more than the {self.worker.limit} that can be", "n")
        streams = [self.worker.items(lambda stop, one=one: pieces(self.writer, one, stop)) for one in asked]
        merged = self._counted(together(streams))
        await anext(merged)
        return merged

    async def _counted(self, merged: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[tuple[int, Piece]]:
        async for index, piece in merged:
            if isinstance(piece, End):
                self.count(piece.stats)
            yield index, piece

    async def gather(self, request: Request, asked: Sequence[CompletionParams]) -> list[Whole]:
        """All of them, whole."""
        texts: list[list[Text]] = [[] for _ in asked]
        ends: list[Any] = [None] * len(asked)
        async for index, piece in unless_gone(request, await self.begin(asked)):
            if isinstance(piece, Text):
                texts[index].append(piece)
            elif isinstance(piece, End):
                ends[index] = piece
        return [Whole(found, end) for found, end in zip(texts, ends, strict=True)]

    async def put(self, request: Request, hole: Hole, latest: Hashable | None = None, **options: Any) -> list[Put]:
        """Texts for a hole."""

        def work(stop: threading.Event) -> Iterator[list[Put]]:
            yield put(self.writer, hole, stop, **options)

        found = await self.once(request, work, latest)
        for one in found:
            self.count(one.stats)
        return found

    async def once(
        self, request: Request, work: Callable[[threading.Event], Iterator[T]], latest: Hashable | None = None
    ) -> T:
        """The one thing that some work yields."""
        (found,) = [one async for one in unless_gone(request, self.worker.items(work, latest))]
        return found

    def count(self, stats: Stats) -> None:
        """For /metrics."""
        self.metrics.tokens.labels("read").inc(stats.prompt_tokens)
        self.metrics.tokens.labels("written").inc(stats.new_tokens)
        self.metrics.steps.inc(stats.steps)
        self.metrics.unsettled.inc(stats.canvases - stats.settled)


def logprobs_of(tokenizer: Tokenizer, tokens: Sequence[Said]) -> list[dict[str, Any]]:
    """Tokens and the logarithms of their probabilities, as OpenAI and Ollama tell them."""

    def one(token: int, share: float) -> dict[str, Any]:
        log = round(math.log(share), 6) if share > 0 else NEVER
        return {"token": tokenizer.token_text(token), "logprob": log, "bytes": list(tokenizer.bytes_of(token))}

    tops = [{"top_logprobs": [one(*other) for other in said.likeliest]} for said in tokens]
    return [one(said.id, said.share) | top for said, top in zip(tokens, tops, strict=True)]


def timings_of(parts: Sequence[Stats]) -> dict[str, Any]:
    """Honest speeds: what was received over the wall's time. Steps, pages, and whether all of them settled."""
    seconds = max((one.seconds for one in parts), default=0.0)
    new, steps = sum(one.new_tokens for one in parts), sum(one.steps for one in parts)
    canvases, settled = sum(one.canvases for one in parts), sum(one.settled for one in parts)
    return {
        "predicted_n": new,
        "predicted_ms": round(1e3 * seconds, 3),
        "predicted_per_second": round(new / seconds, 3) if seconds else 0.0,
        "diffusion": True,
        "diffusion_blocks": canvases,
        "diffusion_steps": steps,
        "diffusion_forwards": sum(one.forwards for one in parts),
        "diffusion_settled": settled == canvases,
        "diffusion_wall_ms": round(1e3 * seconds, 3),
        "diffusion_output_tok_s": round(new / seconds, 3) if seconds else 0.0,
        "diffusion_steps_per_second": round(steps / seconds, 3) if seconds else 0.0,
        "seed": parts[0].seed if parts else None,
    }


def client_of(request: Request) -> str:
    """Who asks: which machine, and which program on it."""
    return f"{request.client.host if request.client else ''} {request.headers.get('user-agent', '')}"


async def read(request: Request, kind: type[B]) -> B:
    """The body of a request."""
    raw = await request.body()
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise refused(error) from None
    request.scope[UNREAD] = unread(body)
    return body


def unread(body: BaseModel, inside: str = "") -> list[str]:
    """Names of fields that were sent and that nobody here knows, those of parts behind the part's own."""
    found = [inside + name for name in body.model_extra or {}]
    for name, value in body:
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, BaseModel):
                found += unread(part, f"{inside}{name}.")
    return list(dict.fromkeys(found))


def refused(error: ValidationError, inside: str = "") -> Refused:
    """The first mistake in a sentence."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in (inside, *first["loc"]) if part != "")
    return Refused(f"{where}: {first['msg']}" if where else first["msg"], where or None)


async def unless_gone(request: Request, found: AsyncIterator[T]) -> AsyncIterator[T]:
    """Passes items on until the client leaves."""
    while True:
        task = asyncio.ensure_future(anext(found, None))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=PATIENCE)
                if not task.done() and await request.is_disconnected():
                    raise Gone("the client has left")
        finally:
            if not task.done():
                task.cancel()
        item = task.result()
        if item is None:
            return
        yield item


def sse(parts: AsyncIterator[dict[str, Any]], *, named: bool = False, end: str = "data: [DONE]\n\n") -> Response:
    """A stream of events; `named`: each has its type on a line of its own."""

    async def lines() -> AsyncIterator[str]:
        async with aclosing(parts):
            async for part in parts:
                yield (f"event: {part['type']}\n" if named else "") + f"data: {compact(part)}\n\n"
        if end:
            yield end

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def ndjson(parts: AsyncIterator[dict[str, Any]]) -> Response:
    """A stream of JSON lines."""

    async def lines() -> AsyncIterator[str]:
        async with aclosing(parts):
            async for part in parts:
                yield compact(part) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def compact(part: Any) -> str:
    """JSON without spaces: some clients look for it as it stands."""
    return json.dumps(part, ensure_ascii=False, separators=(",", ":"))


async def each(parts: Sequence[T]) -> AsyncIterator[T]:
    """A list as a stream."""
    for part in parts:
        yield part


async def together(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[tuple[int, T]]:
    """Items of several streams as they come, with the number of theirs. The first comes when all of them have begun."""
    queue: asyncio.Queue[Any] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[T]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((index, item, None))
        except Exception as error:
            queue.put_nowait((index, None, error))
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        left, begun, early = len(tasks), 0, []  # what came of some before the last had begun
        while left:
            told = await queue.get()
            if told is None:
                left -= 1
                continue
            index, item, error = told
            if error is not None:
                raise error
            begun += isinstance(item, Begun)
            if begun < len(tasks):
                early += [] if isinstance(item, Begun) else [(index, item)]
                continue
            yield index, item
            for one in early:
                yield one
            early = []
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
