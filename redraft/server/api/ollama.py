"""Ollama's wire format: generate and chat as JSON lines, and the model listing that clients read."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Annotated, Any, Literal, Self

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from redraft.diffusion.generate import Stats
from redraft.server.checks import causal_settings, choose_check, ignored_settings, require_unchecked, verification_fields
from redraft.server.completion import (
    JSON_OBJECT_SCHEMA,
    Chunk,
    CompletionParams,
    Finish,
    TextDelta,
    as_stop_strings,
)
from redraft.server.errors import BadRequestError
from redraft.server.fim import find_gap
from redraft.server.images import image_from_base64
from redraft.server.keep_alive import parse_keep_alive
from redraft.server.logprobs import TokenLogprob, logprobs_of
from redraft.server.models import Handlers, Models
from redraft.server.schema import NOT_BOOLEAN, Body, CausalOptions, Penalty, Seed, Stop, Temperature, TopLogprobs
from redraft.server.service import Route, name_ignored_fields, read_body
from redraft.server.streams import end_with_error, ndjson_response, stream_list
from redraft.server.tool_calls import CallDelta, WrittenCall, choose_tools, join_calls
from redraft.server.worker import Stream
from redraft.tokenizer.tokenizer import Message

MOST_SECONDS = 1e9  # a model that stays longer stays for ever
TextField = Callable[[str], dict[str, Any]]  # puts a text where a client reads it: `response`, or `message`


class Options(CausalOptions):
    """Sampler options. With check "off", those of the causal half are ignored; a header of the response names them."""

    repeat_penalty: Penalty | None = None
    num_predict: Annotated[int, Field(ge=-2, le=1_000_000), NOT_BOOLEAN] | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None
    stop: Stop = None


class OllamaRequest(Body):
    """Fields that generate and chat share. Responses are streamed by default."""

    stream: bool = True
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    think: bool | str | None = None
    keep_alive: Annotated[float, Field(allow_inf_nan=False), NOT_BOOLEAN] | str | None = None

    @property
    def keep_seconds(self) -> float | None:
        """How long the model stays in memory after this request; None: as the server has it."""
        if self.keep_alive is None:
            return None
        try:
            return parse_keep_alive(self.keep_alive)
        except ValueError as error:
            raise BadRequestError(str(error), "keep_alive") from None


class GenerateRequest(OllamaRequest):
    """POST /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool = False
    images: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None


class OllamaMessage(Body):
    """One message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=256)] | None = None
    tool_name: str | None = None


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=2048)] = Field(default_factory=list)
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=256)] | None = None


class ShowRequest(Body):
    """POST /api/show."""

    name: str | None = None


def routes(models: Models) -> list[Route]:
    """Returns the routes of this wire format."""
    handlers = OllamaRoutes(models)
    return [
        Route("/api/generate", handlers.generate, GenerateRequest),
        Route("/api/chat", handlers.chat, OllamaChatRequest),
        Route("/api/show", handlers.show, ShowRequest),
        Route("/api/tags", handlers.tags),
        Route("/api/ps", handlers.running),
        Route("/api/version", handlers.version),
    ]


class OllamaRoutes(Handlers):
    """The handlers."""

    def __init__(self, models: Models) -> None:
        super().__init__(models)
        self.started_at = now()

    async def generate(self, request: Request) -> Response:
        """POST /api/generate: continues or answers a prompt, or infills a gap."""
        body = await read_body(request, GenerateRequest)
        if not body.prompt and not body.suffix and not body.images:
            return await self._load_or_unload(request, body, {"response": ""})
        return await (await self._of(request, body))._generate(request, body)

    async def _generate(self, request: Request, body: GenerateRequest) -> Response:
        options = body.options or Options()
        if gap := await asyncio.to_thread(find_gap, body.prompt, body.suffix):
            if body.images:
                raise BadRequestError("infill takes no images: leave images or the suffix out", "images")
            require_unchecked(options.check, "a gap")
            self._name_ignored(request, options, "off")
            if body.format or body.logprobs:
                raise BadRequestError("infill supports neither format nor logprobs: leave them out", "format")
            (infill,) = await self.service.infill(
                request,
                gap,
                max_tokens=max_tokens_of(options),
                temperature=options.temperature,
                seed=options.seed,
                stop_strings=as_stop_strings(options.stop),
            )
            finish = {"done": True, "done_reason": "stop", **self._durations(infill.stats)}
            return self._respond(body, [{"response": infill.text, **finish}])
        prompt: str | list[Message] = (body.system or "") + body.prompt
        if body.images and body.raw:
            raise BadRequestError("a raw prompt takes no images, which the chat template puts in: leave raw out", "images")
        if (self.service.writer.tokenizer.can_chat or body.images) and not body.raw:
            system: list[Message] = [{"role": "system", "content": body.system}] if body.system else []
            prompt = [*system, {"role": "user", "content": add_images(body.prompt, body.images)}]
        return await self._complete(request, body, prompt, None, lambda text: {"response": text})

    async def chat(self, request: Request) -> Response:
        """POST /api/chat."""
        body = await read_body(request, OllamaChatRequest)
        if not body.messages:
            return await self._load_or_unload(request, body, {"message": {"role": "assistant", "content": ""}})
        own = await self._of(request, body)
        messages = [template_message(message) for message in body.messages]
        text_field: TextField = lambda text: {"message": {"role": "assistant", "content": text}}  # noqa: E731
        return await own._complete(request, body, messages, body.tools, text_field)

    async def _of(self, request: Request, body: OllamaRequest) -> Self:
        """These handlers with the model that a body names; `keep_alive` does not apply to one that stays loaded."""
        if body.keep_alive is not None and self.models.find_name(body.model) not in self.models.sources:
            name_ignored_fields(request, ["keep_alive"])
        return await self.of(request, body, body.keep_seconds)

    async def _load_or_unload(self, request: Request, body: OllamaRequest, empty: dict[str, Any]) -> Response:
        """Answers a request without a prompt: it has a model loaded or, with a keep_alive of 0, unloaded."""
        if body.keep_seconds == 0 and await self.models.unload(body.model):
            head = {"model": self.models.find_name(body.model), "created_at": now()}
            line = {**head, **empty, "done": True, "done_reason": "unload"}
            return ndjson_response(stream_list([line])) if body.stream else JSONResponse(line)
        own = await self._of(request, body)
        load_nanoseconds = int(1e9 * own.service.load_seconds)
        durations = {"total_duration": load_nanoseconds, "load_duration": load_nanoseconds}
        return own._respond(body, [{**empty, "done": True, "done_reason": "load", **durations}])

    async def show(self, request: Request) -> dict[str, Any]:
        """POST /api/show. `.Suffix` in the template tells clients that the model can infill."""
        body = await read_body(request, ShowRequest)
        name = self.models.find_name(body.model or body.name)
        card = self.models.cards[self.models.base_of(name)]
        infills = ["insert"] if card.is_diffusion else []
        chat_capabilities = ["tools"] if card.can_chat else []
        chat_capabilities += ["thinking"] if card.can_think else []
        chat_capabilities += ["vision"] if card.takes_images else []
        return {
            "template": "{{ .Prompt }}{{ .Suffix }}" if card.is_diffusion else "{{ .Prompt }}",
            "parameters": "",
            "capabilities": ["completion", *infills, *chat_capabilities],
            "model_info": {
                "general.architecture": card.family,
                f"{card.family}.context_length": card.context_length,
            },
            "details": self._details(name),
        }

    async def tags(self) -> dict[str, Any]:
        """GET /api/tags: all models, loaded or not."""
        return {"models": [self._model_entry(name) for name in self.models.names]}

    async def running(self) -> dict[str, Any]:
        """GET /api/ps: the models that are in memory."""
        seconds_left = self.models.seconds_left
        entries = []
        for name in self.models.names:
            base = self.models.base_of(name)
            if base in seconds_left:
                entry = self._model_entry(name)
                size_on_gpu = entry["size"] if self.service.writer.model.device.type == "cuda" else 0
                entries.append({**entry, "expires_at": time_in(seconds_left[base]), "size_vram": size_on_gpu})
        return {"models": entries}

    async def version(self) -> dict[str, str]:
        """GET /api/version."""
        return {"version": version("redraft")}

    def _details(self, name: str) -> dict[str, Any]:
        """What a model is. An adapter names its base as its parent."""
        base = self.models.base_of(name)
        card = self.models.cards[base]
        return {
            "parent_model": base if base != name else "",
            "format": "safetensors",
            "family": card.family,
            "families": [card.family],
            "parameter_size": f"{card.parameters / 1e6:.1f}M",
            "quantization_level": card.precision,
            "diffusion": card.is_diffusion,
            **card.drafter_fields,
        }

    def _model_entry(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "modified_at": self.started_at,
            "digest": "",
            "size": self.models.cards[self.models.base_of(name)].nbytes,
            "details": self._details(name),
        }

    def _respond(self, body: OllamaRequest, chunks: Sequence[dict[str, Any]]) -> Response:
        """Sends chunks that are complete already."""
        lines = [{"model": self.service.name, "created_at": now(), **chunk} for chunk in chunks]
        return ndjson_response(stream_list(lines)) if body.stream else JSONResponse(lines[-1])

    async def _complete(
        self, request: Request, body: OllamaRequest, prompt: str | list[Message], tools: Any, text_field: TextField
    ) -> Response:
        options = body.options or Options()
        schema = body.format if isinstance(body.format, dict) else JSON_OBJECT_SCHEMA if body.format == "json" else None
        params = CompletionParams(
            prompt=prompt,
            max_tokens=max_tokens_of(options),
            temperature=options.temperature,
            seed=options.seed,
            stop_strings=as_stop_strings(options.stop),
            check=options.check,
            causal_settings=causal_settings(options),
            tools=choose_tools(tools, None),
            think=body.think not in (None, False),
            pattern={"schema": schema} if schema is not None else {},
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        self._name_ignored(request, options, choose_check(self.service.writer.sampler, options.check))
        if body.stream:
            lines = self._stream_lines(await self.service.start(request, [params]), text_field)
            return ndjson_response(end_with_error(lines, lambda status, message: error(message)))
        (completion,) = await self.service.complete(request, [params])
        line = add_reasoning_and_calls(text_field(completion.text), completion.reasoning, completion.tool_calls)
        return self._respond(body, [{**line, **self._logprobs(completion.tokens), **self._finish(completion.finish)}])

    def _name_ignored(self, request: Request, options: Options, check: str) -> None:
        name_ignored_fields(request, [f"options.{name}" for name in ignored_settings(options, check)])

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"logprobs": logprobs_of(self.service.writer.tokenizer, tokens)} if tokens else {}

    async def _stream_lines(self, chunks: Stream[tuple[int, Chunk]], text_field: TextField) -> Stream[dict[str, Any]]:
        calls: list[CallDelta] = []  # a line has whole calls
        async for _, chunk in chunks:
            head = {"model": self.service.name, "created_at": now()}
            if isinstance(chunk, TextDelta):
                calls += chunk.tool_calls
                if chunk.text or chunk.reasoning:
                    line = add_reasoning_and_calls(text_field(chunk.text), chunk.reasoning, ())
                    yield {**head, **line, **self._logprobs(chunk.tokens), "done": False}
            elif isinstance(chunk, Finish):
                if calls:
                    yield {**head, **add_reasoning_and_calls(text_field(""), "", join_calls(calls)), "done": False}
                yield {**head, **text_field(""), **self._finish(chunk)}

    def _finish(self, finish: Finish) -> dict[str, Any]:
        """The fields of the last line."""
        reason = "length" if finish.finish_reason in ("length", "deadline") else "stop"
        return {"done": True, "done_reason": reason, **self._durations(finish.stats)}

    def _durations(self, stats: Stats) -> dict[str, Any]:
        """Durations in nanoseconds, counts of tokens and drafts, and the mode."""
        load = int(1e9 * self.service.load_seconds)
        generation = int(1e9 * stats.seconds)
        prefill = int(1e9 * stats.prefill_seconds)
        return {
            "total_duration": load + generation,
            "load_duration": load,
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": prefill,
            "eval_count": stats.new_tokens,
            "eval_duration": generation - prefill,
            **verification_fields([stats]),
        }


def max_tokens_of(options: Options) -> int | None:
    """Returns the token limit; Ollama's -1 and -2 mean no limit of the client's own."""
    return options.num_predict if (options.num_predict or 0) > 0 else None


def add_reasoning_and_calls(line: dict[str, Any], reasoning: str, tool_calls: Sequence[WrittenCall]) -> dict[str, Any]:
    """Adds reasoning and tool calls to a line, where clients read them."""
    target = line.get("message", line)
    if reasoning:
        target["thinking"] = reasoning
    if tool_calls and "message" in line:
        target["tool_calls"] = [{"function": {"name": call.name, "arguments": call.parse()}} for call in tool_calls]
    return line


def template_message(message: OllamaMessage) -> Message:
    """Returns a message as the chat template reads it."""
    converted: dict[str, Any] = {"role": message.role, "content": add_images(message.content, message.images)}
    if message.tool_calls:
        calls = [{"type": "function", "function": call.get("function", {})} for call in message.tool_calls]
        converted["tool_calls"] = calls
    if message.tool_name:
        converted["name"] = message.tool_name
    return converted


def add_images(text: str, images: Sequence[str] | None) -> str | list[dict[str, Any]]:
    """Returns the content of a message: its images, in base64, come before its text, as in Ollama."""
    if not images:
        return text
    return [*(image_from_base64(image, "images") for image in images), {"type": "text", "text": text}]


def now() -> str:
    """Returns the time in RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def time_in(seconds: float) -> str:
    """Returns the time in so many seconds, in RFC 3339."""
    if seconds > MOST_SECONDS:
        return "9999-12-31T23:59:59Z"
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def error(message: str) -> dict[str, Any]:
    """Returns an error body, or the error line of a stream."""
    return {"error": message}
