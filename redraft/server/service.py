"""Service: what the routes of every wire format use. Reads bodies, starts completions, collects them, counts them.

Wire formats (`api/`) build on this and know nothing of threads or of one another.
"""

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from redraft.constraints.pattern_compiler import COMPILE_SECONDS, CompilerProcess
from redraft.diffusion.generate import Stats
from redraft.server.bodies import check_json_size
from redraft.server.checks import verification_fields
from redraft.server.compiler_pool import CompilerPool
from redraft.server.completion import Chunk, CompletionParams, Finish, TextDelta, stream_completion
from redraft.server.connections import name_client
from redraft.server.errors import BadRequestError, ClientDisconnected
from redraft.server.fim import Gap
from redraft.server.images import NO_IMAGES, ServedImages
from redraft.server.infill import Infill, infill_gap
from redraft.server.logprobs import TokenLogprob
from redraft.server.middleware import BODY, UNKNOWN_FIELDS, Metrics
from redraft.server.streams import END, merge_streams, next_until_disconnected, until_disconnected
from redraft.server.tool_calls import WrittenCall, join_calls
from redraft.server.worker import Stream, Worker
from redraft.tokenizer.helper_process import return_free_memory
from redraft.writer import Writer

LONG_BODY = 64 * 2**10  # bytes
TRIM_SECONDS = 1.0  # after a long body
B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True)
class Route:
    """A path of a wire format: its handler, and the request body, if it takes one."""

    path: str
    handler: Callable[..., Any]
    body: type[BaseModel] | None = None


@dataclass(frozen=True)
class Completion:
    """A finished completion."""

    deltas: list[TextDelta]
    finish: Finish

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def reasoning(self) -> str:
        """The whole reasoning."""
        return "".join(delta.reasoning for delta in self.deltas)

    @property
    def tool_calls(self) -> list[WrittenCall]:
        """All tool calls."""
        return join_calls([part for delta in self.deltas for part in delta.tool_calls])

    @property
    def tokens(self) -> list[TokenLogprob]:
        """All tokens with their probabilities, if logprobs were requested."""
        return [token for delta in self.deltas for token in delta.tokens]


class Service:
    """One model's writer, worker and compiler pool, as routes use them. It serves between `open` and `close`."""

    load_seconds = 0.0  # for which the request of this service has waited until the model was loaded

    def __init__(
        self,
        writer: Writer,
        worker: Worker,
        metrics: Metrics,
        name: str,
        compile_seconds: float = COMPILE_SECONDS,
        images: ServedImages = NO_IMAGES,
        pattern_folder: Path | None = None,
    ) -> None:
        self.writer = writer
        self.worker = worker
        self.metrics = metrics
        self.name = name
        self.images = images
        adapted = {adapter: writer.with_adapter(adapter) for adapter in writer.adapters}
        self.writers = {name: writer, **adapted}  # by the names of the models that clients see: the base, the adapters
        self.pool = CompilerPool(
            lambda: CompilerProcess(writer.token_bytes, writer.sampler.eos_token_ids, compile_seconds, pattern_folder),
        )
        self.starts_compilers = pattern_folder is not None

    def open(self) -> None:
        """Starts the engine's own thread."""
        self._own_compilers = {name: each.pattern_compiler for name, each in self.writers.items()}
        for each in self.writers.values():
            each.pattern_compiler = self.pool
        self.worker.start()
        if self.starts_compilers:
            self.pool.start()

    async def close(self, drain_seconds: float) -> None:
        """Ends its threads and processes; running requests may take `drain_seconds` to finish."""
        await self.worker.close(drain_seconds)
        self.pool.close()
        for name, own_compiler in self._own_compilers.items():
            self.writers[name].pattern_compiler = own_compiler

    def select(self, name: str) -> "Service":
        """This service for its model or one of its adapters."""
        if name == self.name:
            return self
        selected = copy.copy(self)
        selected.name = name
        selected.writer = self.writers[name]
        return selected

    async def start(self, request: Request, params: Sequence[CompletionParams]) -> Stream[tuple[int, Chunk]]:
        """Starts completions and returns (number, chunk) of all of them as they come.

        Returns when the engine has accepted all of them, so bad requests raise here, before a response is started.
        """
        most = self.worker.slots.per_client
        if len(params) > most:
            message = f"{len(params)} completions in one request are more than the server's limit of {most} for one client"
            raise BadRequestError(message, "best_of" if params[0].best_of > 1 else "n")

        def run(number: int, single: CompletionParams) -> Stream[Chunk]:
            return self.worker.run(
                lambda stop: stream_completion(self.writer, single, stop, self.images),
                client=client_name_of(request),
                compiles=single.compiles and number == 0,  # all have the same pattern, which is compiled once
            )

        chunks = self._count_finished(merge_streams([run(number, single) for number, single in enumerate(params)]))
        await next_until_disconnected(request, chunks)  # Started
        return chunks

    async def _count_finished(self, chunks: Stream[tuple[int, Chunk]]) -> Stream[tuple[int, Chunk]]:
        async with aclosing(chunks):
            async for index, chunk in chunks:
                if isinstance(chunk, Finish):
                    self.count_stats(chunk.stats)
                yield index, chunk

    async def complete(self, request: Request, params: Sequence[CompletionParams]) -> list[Completion]:
        """Runs completions to their end."""
        deltas: list[list[TextDelta]] = [[] for _ in params]
        finishes: dict[int, Finish] = {}
        async for index, chunk in until_disconnected(request, await self.start(request, params)):
            if isinstance(chunk, TextDelta):
                deltas[index].append(chunk)
            elif isinstance(chunk, Finish):
                finishes[index] = chunk
        return [Completion(texts, finishes[index]) for index, texts in enumerate(deltas)]

    async def infill(self, request: Request, gap: Gap, **options: Any) -> list[Infill]:
        """Infills a gap. `options` are those of `infill_gap`."""

        def work(stop: threading.Event) -> Iterator[list[Infill]]:
            yield infill_gap(self.writer, gap, stop, **options)

        infills = await self.run_single(request, work)
        for infill in infills:
            self.count_stats(infill.stats)
        return infills

    async def run_single(self, request: Request, work: Callable[[threading.Event], Iterator[T]]) -> T:
        """Runs work that yields one item, and returns it."""
        item = await next_until_disconnected(request, self.worker.run(work, client=client_name_of(request)))
        assert item is not END
        return item

    @property
    def is_diffusion(self) -> bool:
        """Whether the model denoises canvases; a causal-only one writes left to right."""
        return self.writer.model.has_denoiser

    def timings_of(self, stats: Sequence[Stats]) -> dict[str, Any]:
        """Returns speeds over wall time, counts of steps, canvases and drafts, and whether all canvases settled."""
        seconds = max((row.seconds for row in stats), default=0.0)
        new_tokens = sum(row.new_tokens for row in stats)
        steps = sum(row.steps for row in stats)
        canvases = sum(row.canvases for row in stats)
        return {
            "predicted_n": new_tokens,
            "predicted_ms": round(1e3 * seconds, 3),
            "predicted_per_second": round(new_tokens / seconds, 3) if seconds else 0.0,
            "diffusion": self.is_diffusion,
            "diffusion_blocks": canvases,
            "diffusion_steps": steps,
            "diffusion_forwards": sum(row.forwards for row in stats),
            "diffusion_settled": sum(row.settled for row in stats) == canvases,
            "diffusion_wall_ms": round(1e3 * seconds, 3),
            "diffusion_output_tok_s": round(new_tokens / seconds, 3) if seconds else 0.0,
            "diffusion_steps_per_second": round(steps / seconds, 3) if seconds else 0.0,
            "seed": stats[0].seed if stats else None,
            **verification_fields(stats),
        }

    def count_stats(self, stats: Stats) -> None:
        """Adds a request's stats to /metrics."""
        self.metrics.tokens.labels("prompt", self.name).inc(stats.prompt_tokens)
        self.metrics.tokens.labels("completion", self.name).inc(stats.new_tokens)
        self.metrics.steps.inc(stats.steps)
        self.metrics.drafts.labels("accepted", self.name).inc(stats.accepted)
        self.metrics.drafts.labels("rejected", self.name).inc(stats.drafted - stats.accepted)
        self.metrics.unsettled.inc(stats.canvases - stats.settled)


def client_name_of(request: Request) -> str:
    """The name of the client, among whom slots and steps are shared."""
    return name_client(request.client.host if request.client else None)


async def read_body(request: Request, kind: type[B]) -> B:
    """Parses the body of a request, and notes the names of unknown fields for the response header.

    Long bodies are parsed one at a time, and other work of the event loop has its turn between two of them.
    """
    state = request.app.state
    try:
        raw = b"".join([piece async for piece in request.stream()])  # request.body() would keep it
    except ClientDisconnect:
        raise ClientDisconnected("the client has disconnected") from None
    if len(raw) <= LONG_BODY:
        body = parse_body(raw, kind, state.limits.bodies.json_values)
    else:
        async with state.parsing:
            await asyncio.sleep(0)
            try:
                body = parse_body(raw, kind, state.limits.bodies.json_values)
            finally:
                del raw
                request.scope[BODY].release()
                trim_memory_soon(state)
    request.scope[UNKNOWN_FIELDS] = unknown_fields(body)
    return body


def name_ignored_fields(request: Request, names: Sequence[str]) -> None:
    """Names fields that were not applied in the response header, behind the unknown ones."""
    request.scope[UNKNOWN_FIELDS] = [*request.scope[UNKNOWN_FIELDS], *names]


def trim_memory_soon(state: Any) -> None:
    """Returns the memory of long bodies to the operating system, at most once a second, in a thread."""
    if not state.will_trim:
        state.will_trim = True
        asyncio.get_running_loop().call_later(TRIM_SECONDS, trim_memory, state)


def trim_memory(state: Any) -> None:
    """Returns freed memory to the operating system."""
    state.will_trim = False
    asyncio.get_running_loop().run_in_executor(None, return_free_memory)


def parse_body(raw: bytes, kind: type[B], max_values: int) -> B:
    """Parses JSON; a mistake in it becomes a BadRequestError."""
    check_json_size(raw, max_values)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise bad_request_from(error) from None


def unknown_fields(body: BaseModel, path: str = "") -> list[str]:
    """Returns the names of fields that the body's class does not declare, nested ones with their path."""
    names = [path + name for name in body.model_extra or {}]
    for name, value in body:
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, BaseModel):
                names += unknown_fields(part, f"{path}{name}.")
    return list(dict.fromkeys(names))


def bad_request_from(error: ValidationError, path: str = "") -> BadRequestError:
    """Returns the first mistake that pydantic found, in a sentence."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in (path, *first["loc"]) if part != "")
    return BadRequestError(f"{field}: {first['msg']}" if field else first["msg"], field or None)
