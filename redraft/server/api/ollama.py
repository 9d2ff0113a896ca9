"""Ollama's wire: generate and chat as JSON lines, and all that clients look at to find a model."""

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from redraft.diffusion.generate import Stats
from redraft.server.completion import PLAIN_OBJECT, CompletionParams, End, Refused, Said, Text, stops_of
from redraft.server.fim import find_hole
from redraft.server.schema import Body, Likely, Seed, Stop, Temperature
from redraft.server.service import Route, Service, each, logprobs_of, ndjson, read
from redraft.tokenizer.chat_parser import ToolCall
from redraft.tokenizer.tokenizer import Message


class Options(Body):
    """Settings; those of samplers that a canvas does not have are not read."""

    num_predict: Annotated[int, Field(ge=-2, le=1_000_000)] | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None
    stop: Stop = None


class Asking(Body):
    """What both have in common. Streams, unless told not to."""

    stream: bool = True
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: Likely | None = None
    think: bool | str | None = None


class GenerateRequest(Asking):
    """POST /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool = False
    images: list[str] | None = None


class OllamaMessage(Body):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: list[str] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None


class OllamaChatRequest(Asking):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=2048)] = Field(default_factory=list)
    tools: Annotated[list[dict[str, Any]], Field(max_length=256)] | None = None


class ShowRequest(Body):
    """POST /api/show."""

    name: str | None = None


def routes(service: Service) -> list[Route]:
    """All of them."""
    one = Ollama(service)
    return [
        Route("/api/generate", one.generate, GenerateRequest),
        Route("/api/chat", one.chat, OllamaChatRequest),
        Route("/api/show", one.show, ShowRequest),
        Route("/api/tags", one.tags),
        Route("/api/ps", one.running),
        Route("/api/version", one.told_version),
    ]


class Ollama:
    """What the paths do."""

    def __init__(self, service: Service) -> None:
        self.service, self.began = service, now()

    async def generate(self, request: Request) -> Response:
        """POST /api/generate: a text continued or answered, or a hole filled."""
        body = await read(request, GenerateRequest)
        _no_pictures(body.images)
        options = body.options or Options()
        if not body.prompt and not body.suffix:  # the client wants the model loaded, and it is
            return self._sent(body, [{"response": "", "done": True, "done_reason": "load"}])
        if hole := find_hole(body.prompt, body.suffix):
            if body.format or body.logprobs:
                raise Refused("a hole cannot obey a format, and has no logprobs: leave them out", "format")
            most = options.num_predict if (options.num_predict or 0) > 0 else None
            settings = {"temperature": options.temperature, "seed": options.seed, "stops": stops_of(options.stop)}
            (found,) = await self.service.put(request, hole, max_tokens=most, **settings)
            return self._sent(body, [{"response": found.text, "done": True, "done_reason": "stop", **spent(found.stats)}])
        chats = self.service.writer.tokenizer.can_chat and not body.raw
        told: list[Message] = [{"role": "system", "content": body.system}] if body.system else []
        prompt = [*told, {"role": "user", "content": body.prompt}] if chats else (body.system or "") + body.prompt
        return await self._told(request, body, prompt, None, lambda text: {"response": text})

    async def chat(self, request: Request) -> Response:
        """POST /api/chat."""
        body = await read(request, OllamaChatRequest)
        for message in body.messages:
            _no_pictures(message.images)
        if not body.messages:
            return self._sent(body, [{"message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "load"}])
        messages = [message_of(message) for message in body.messages]
        say = lambda text: {"message": {"role": "assistant", "content": text}}  # noqa: E731
        return await self._told(request, body, messages, body.tools, say)

    async def show(self, request: Request) -> dict[str, Any]:
        """POST /api/show. `.Suffix` in the template tells clients that holes can be filled."""
        await read(request, ShowRequest)
        writer = self.service.writer
        told = {
            "general.architecture": "diffusion_gemma",
            "diffusion_gemma.context_length": writer.model.config.max_position_embeddings,
        }
        can = ["completion", "insert", *(["tools", "thinking"] if writer.tokenizer.can_chat else [])]
        template = "{{ .Prompt }}{{ .Suffix }}"
        return {"template": template, "parameters": "", "capabilities": can, "model_info": told, "details": self._details()}

    async def tags(self) -> dict[str, Any]:
        """GET /api/tags."""
        return {"models": [self._listed()]}

    async def running(self) -> dict[str, Any]:
        """GET /api/ps."""
        return {"models": [{**self._listed(), "expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}]}

    async def told_version(self) -> dict[str, str]:
        """GET /api/version."""
        return {"version": version("redraft")}

    def _details(self) -> dict[str, Any]:
        family, count = "diffusion_gemma", sum(p.numel() for p in self.service.writer.model.parameters())
        kind = str(self.service.writer.model.dtype).removeprefix("torch.")
        head = {"parent_model": "", "format": "safetensors", "family": family, "families": [family]}
        return {**head, "parameter_size": f"{count / 1e6:.1f}M", "quantization_level": kind}

    def _listed(self) -> dict[str, Any]:
        size = sum(p.numel() * p.element_size() for p in self.service.writer.model.parameters())
        names = {
            "name": self.service.name,
            "model": self.service.name,
            "modified_at": self.began,
            "digest": "",
            "size": size,
        }
        return {**names, "details": self._details()}

    def _sent(self, body: Asking, parts: Sequence[dict[str, Any]]) -> Response:
        """Parts that are there already."""
        whole = [{"model": self.service.name, "created_at": now(), **part} for part in parts]
        return ndjson(each(whole)) if body.stream else JSONResponse(whole[-1])

    async def _told(self, request: Request, body: Asking, prompt: Any, tools: Any, say: Any) -> Response:
        options, schema = body.options or Options(), {"json": PLAIN_OBJECT, "": None}
        wanted = body.format if isinstance(body.format, dict) else schema.get(body.format or "")
        asked = CompletionParams(
            prompt=prompt,
            max_tokens=options.num_predict if (options.num_predict or 0) > 0 else None,
            temperature=options.temperature,
            seed=options.seed,
            stops=stops_of(options.stop),
            tools=tools,
            think=body.think not in (None, False),
            pattern={"schema": wanted} if wanted is not None else {},
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        if body.stream:
            return ndjson(self._lines(await self.service.begin([asked]), say))
        (found,) = await self.service.gather(request, [asked])
        part = with_more(say(found.text), found.reasoning, found.tool_calls) | self._likely(found.tokens)
        return self._sent(body, [{**part, **ended(found.end)}])

    def _likely(self, tokens: Sequence[Said]) -> dict[str, Any]:
        return {"logprobs": logprobs_of(self.service.writer.tokenizer, tokens)} if tokens else {}

    async def _lines(self, merged: AsyncIterator[Any], say: Any) -> AsyncIterator[dict[str, Any]]:
        try:
            async for _, piece in merged:
                head = {"model": self.service.name, "created_at": now()}
                if isinstance(piece, Text):
                    part = with_more(say(piece.text), piece.reasoning, piece.tool_calls) | self._likely(piece.tokens)
                    yield {**head, **part, "done": False}
                elif isinstance(piece, End):
                    yield {**head, **say(""), **ended(piece)}
        except (RuntimeError, ValueError) as failure:  # it has begun: the status cannot be changed any more
            yield error(str(failure))


def with_more(part: dict[str, Any], reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """A part with thoughts and calls, where clients look for them."""
    place = part.get("message", part)
    if reasoning:
        place["thinking"] = reasoning
    if calls and "message" in part:
        place["tool_calls"] = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    return part


def message_of(message: OllamaMessage) -> Message:
    """A message as the chat template reads it."""
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        found["tool_calls"] = [{"type": "function", "function": call.get("function", {})} for call in message.tool_calls]
    if message.tool_name:
        found["name"] = message.tool_name
    return found


def _no_pictures(images: Sequence[str] | None) -> None:
    if images:
        raise Refused("only text can be read, got images", "images")


def ended(end: End) -> dict[str, Any]:
    """The last line's fields."""
    reason = "length" if end.reason in ("length", "deadline") else "stop"
    return {"done": True, "done_reason": reason, **spent(end.stats)}


def spent(stats: Stats) -> dict[str, int]:
    """Nanoseconds and tokens."""
    whole, before = int(1e9 * stats.seconds), int(1e9 * stats.prefill_seconds)
    read = {"prompt_eval_count": stats.prompt_tokens, "prompt_eval_duration": before}
    return {
        "total_duration": whole,
        "load_duration": 0,
        **read,
        "eval_count": stats.new_tokens,
        "eval_duration": whole - before,
    }


def now() -> str:
    """RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def error(sentence: str) -> dict[str, str]:
    """What clients raise."""
    return {"error": sentence}
