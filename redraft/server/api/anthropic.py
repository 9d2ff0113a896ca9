"""Anthropic's wire: messages, whole and streamed, events in the order and with the fields that strict clients want."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from redraft.diffusion.generate import Stats
from redraft.server.completion import CompletionParams, End, Refused, Text, plain_text
from redraft.server.schema import Body, Seed, Temperature, Tokens
from redraft.server.service import Route, Service, Whole, compact, read, sse
from redraft.tokenizer.tokenizer import Message

REASONS = {"stop": "end_turn", "length": "max_tokens", "deadline": "max_tokens", "tool_calls": "tool_use"}
Content = str | list[dict[str, Any]]


class Said(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Content


class MessagesRequest(Body):
    """POST /v1/messages."""

    messages: Annotated[list[Said], Field(min_length=1, max_length=2048)]
    max_tokens: Tokens | None = None
    system: Content | None = None
    stop_sequences: Annotated[list[str], Field(max_length=64)] | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=256)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    stream: bool = False


def routes(service: Service) -> list[Route]:
    """All of them."""
    one = Anthropic(service)
    return [
        Route("/v1/messages", one.messages, MessagesRequest),
        Route("/v1/messages/count_tokens", one.count_tokens, MessagesRequest),
    ]


class Anthropic:
    """What the paths do."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages."""
        body = await read(request, MessagesRequest)
        if body.max_tokens is None:
            raise Refused("max_tokens: Field required", "max_tokens")
        asked, head = asked_of(body), self._head()
        if body.stream:
            return sse(self._events(await self.service.begin([asked]), head), named=True, end="")
        (found,) = await self.service.gather(request, [asked])
        return JSONResponse({**head, "content": blocks(found), **ended(found.end), "usage": usage_of(found.end.stats)})

    async def count_tokens(self, request: Request) -> dict[str, int]:
        """POST /v1/messages/count_tokens."""
        asked = asked_of(await read(request, MessagesRequest))
        return {"input_tokens": await asyncio.to_thread(self._tokens, asked)}

    def _tokens(self, asked: CompletionParams) -> int:
        writer = self.service.writer
        if writer.tokenizer.can_chat:
            return len(writer.encode_prompt(asked.prompt, asked.tools, asked.think))
        return sum(len(writer.tokenizer.encode(str(one["content"]))) for one in asked.prompt)

    def _head(self) -> dict[str, Any]:
        return {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": self.service.name}

    async def _events(self, merged: AsyncIterator[Any], head: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        nothing = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": {**head, **nothing, "usage": {"input_tokens": 0, "output_tokens": 0}}}
        index, open_ = -1, None  # the block in work, and of what kind it is
        try:
            async for _, piece in merged:
                if isinstance(piece, Text):
                    for kind, start, delta in parts(piece):
                        if kind != open_ or kind == "tool_use":
                            if open_ is not None:
                                yield {"type": "content_block_stop", "index": index}
                            index, open_ = index + 1, kind
                            yield {"type": "content_block_start", "index": index, "content_block": start}
                        yield {"type": "content_block_delta", "index": index, "delta": delta}
                elif isinstance(piece, End):
                    if open_ is not None:
                        yield {"type": "content_block_stop", "index": index}
                    yield {"type": "message_delta", "delta": ended(piece), "usage": usage_of(piece.stats)}
        except RuntimeError as failure:  # it has begun: the status cannot be changed any more
            yield error(500, str(failure))
            return
        yield {"type": "message_stop"}


def asked_of(body: MessagesRequest) -> CompletionParams:
    """What a body asks for."""
    if body.tool_choice and body.tool_choice.get("type") not in ("auto", "none"):
        raise Refused(f"tool_choice can be auto or none, got {body.tool_choice.get('type')!r}", "tool_choice")
    messages: list[Message] = []
    if body.system is not None:
        messages.append({"role": "system", "content": plain_text(body.system, "messages")})
    for said in body.messages:
        messages += messages_of(said)
    forbidden = bool(body.tool_choice) and body.tool_choice.get("type") == "none"
    return CompletionParams(
        prompt=messages,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        seed=body.seed,
        stops=tuple(body.stop_sequences or ()),
        tools=[tool_of(tool) for tool in body.tools] if body.tools and not forbidden else None,
        think=bool(body.thinking) and body.thinking.get("type") in ("enabled", "adaptive"),
    )


def messages_of(said: Said) -> list[Message]:
    """A message as the chat template reads it: calls and their results are blocks among its content."""
    if isinstance(said.content, str):
        return [{"role": said.role, "content": said.content}]
    calls, found, rest = [], [], []
    for block in said.content:
        match block.get("type"):
            case "tool_use":
                function = {"name": str(block.get("name")), "arguments": block.get("input") or {}}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                content = plain_text(block.get("content") or "", "messages")
                found.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": content})
            case "thinking" | "redacted_thinking":
                pass  # thoughts are not read again
            case _:
                rest.append(block)
    if rest or calls or not found:
        own: Message = {"role": said.role, "content": plain_text(rest, "messages")}
        found.append({**own, "tool_calls": calls} if calls else own)
    return found


def tool_of(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the chat template reads it."""
    if not isinstance(tool.get("name"), str):
        raise Refused("a tool has a name, a description and an input_schema", "tools")
    described = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or {},
    }
    return {"type": "function", "function": described}


def parts(piece: Text) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """What a page adds: kinds of blocks, how each starts, and what is added to it."""
    found = []
    if piece.reasoning:
        delta = {"type": "thinking_delta", "thinking": piece.reasoning}
        found.append(("thinking", {"type": "thinking", "thinking": "", "signature": ""}, delta))
    if piece.text:
        found.append(("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": piece.text}))
    for call in piece.tool_calls:
        start = {"type": "tool_use", "id": f"toolu_{uuid4().hex[:24]}", "name": call.name, "input": {}}
        found.append(("tool_use", start, {"type": "input_json_delta", "partial_json": compact(call.arguments)}))
    return found


def blocks(answer: Whole) -> list[dict[str, Any]]:
    """A whole answer's content."""
    found: list[dict[str, Any]] = []
    if answer.reasoning:
        found.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text or not answer.tool_calls:
        found.append({"type": "text", "text": answer.text})
    for call in answer.tool_calls:
        found.append({"type": "tool_use", "id": f"toolu_{uuid4().hex[:24]}", "name": call.name, "input": call.arguments})
    return found


def ended(end: End) -> dict[str, Any]:
    """Why."""
    return {"stop_reason": "stop_sequence" if end.stop is not None else REASONS[end.reason], "stop_sequence": end.stop}


def usage_of(stats: Stats) -> dict[str, int]:
    """What it cost."""
    return {
        "input_tokens": stats.prompt_tokens - stats.reused,
        "cache_read_input_tokens": stats.reused,
        "cache_creation_input_tokens": 0,
        "output_tokens": stats.new_tokens,
    }


def error(status: int, sentence: str) -> dict[str, Any]:
    """What clients raise."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 503: "overloaded_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": sentence}}
