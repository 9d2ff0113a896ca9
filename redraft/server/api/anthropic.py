"""Anthropic's wire format: messages, whole and streamed, with events in the order and with the fields that clients need."""

import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from redraft.constraints.errors import shorten
from redraft.diffusion.generate import Stats
from redraft.server.canvas_params import canvas_params
from redraft.server.checks import causal_settings, choose_check, ignored_settings, verification_fields
from redraft.server.completion import Chunk, CompletionParams, Finish, TextDelta, adapt_to_model
from redraft.server.errors import BadRequestError, checking_request
from redraft.server.images import ServedImages, parts_of_content, text_of_content
from redraft.server.models import Handlers, Models
from redraft.server.schema import Body, CanvasFields, CausalOptions, Content, Seed, StopString, Temperature, Tokens
from redraft.server.service import Completion, Route, name_ignored_fields, read_body
from redraft.server.streams import end_with_error, sse_response
from redraft.server.tool_calls import choose_tools
from redraft.server.worker import Stream
from redraft.tasks.generation import GenerationOptions
from redraft.tokenizer.tokenizer import Message
from redraft.writer import Writer

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "deadline": "max_tokens", "tool_calls": "tool_use"}


class InputMessage(Body):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Content


class OutputConfig(Body):
    """The form of the answer. An `effort` is ignored; a header of the response names it."""

    format: dict[str, Any] | None = None  # {"type": "json_schema", "schema": {...}}


class MessagesRequest(CanvasFields, CausalOptions):
    """POST /v1/messages. With check "off", settings of the causal half are ignored; a header of the response names them."""

    messages: Annotated[list[InputMessage], Field(fail_fast=True, min_length=1, max_length=2048)]
    max_tokens: Tokens | None = None
    system: Content | None = None
    stop_sequences: Annotated[list[StopString], Field(fail_fast=True, max_length=64)] | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=256)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    stream: bool = False


def routes(models: Models) -> list[Route]:
    """Returns the routes of this wire format."""
    handlers = AnthropicRoutes(models)
    return [
        Route("/v1/messages", handlers.messages, MessagesRequest),
        Route("/v1/messages/count_tokens", handlers.count_tokens, MessagesRequest),
    ]


class AnthropicRoutes(Handlers):
    """The handlers."""

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages."""
        body = await read_body(request, MessagesRequest)
        if body.max_tokens is None:
            raise BadRequestError("max_tokens: Field required", "max_tokens")
        service = (await self.of(request, body)).service
        params = params_of(body, service.writer.tokenizer.can_think)
        check = choose_check(service.writer.sampler, body.check, has_draft=bool(params.draft))
        name_ignored_fields(request, ignored_settings(body, check))
        head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": service.name}
        if body.stream:
            events = stream_events(await service.start(request, [params]), head)
            return sse_response(end_with_error(events, error), named=True, end="")
        (completion,) = await service.complete(request, [params])
        finish = completion.finish
        content = content_blocks(completion)
        return JSONResponse({**head, "content": content, **stop_fields(finish), "usage": usage_of(finish.stats)})

    async def count_tokens(self, request: Request) -> dict[str, int]:
        """POST /v1/messages/count_tokens."""
        body = await read_body(request, MessagesRequest)
        service = (await self.of(request, body)).service
        params = params_of(body, service.writer.tokenizer.can_think)

        def work(stop: threading.Event) -> Iterator[int]:
            yield count_prompt_tokens(service.writer, params, service.images, stop)

        return {"input_tokens": await service.run_single(request, work)}


def count_prompt_tokens(writer: Writer, params: CompletionParams, images: ServedImages, stop: threading.Event) -> int:
    """Counts the tokens that a prompt has for this model."""
    with checking_request():
        params = adapt_to_model(writer, params)
        options = GenerationOptions(tools=params.tools.tools, think=params.think, stop=stop)
        return images.count_tokens(writer, params.prompt, options)


async def stream_events(chunks: Stream[tuple[int, Chunk]], head: dict[str, Any]) -> Stream[dict[str, Any]]:
    """Yields the events of a streamed message."""
    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**head, **empty, "usage": {"input_tokens": 0, "output_tokens": 0}}}
    index = -1
    open_kind: tuple[str, int] | None = None  # of the content block that is open, with the number of its call
    async for _, chunk in chunks:
        if isinstance(chunk, TextDelta):
            for kind, start, delta in block_deltas(chunk):
                if kind != open_kind:
                    if open_kind is not None:
                        yield {"type": "content_block_stop", "index": index}
                    index += 1
                    open_kind = kind
                    yield {"type": "content_block_start", "index": index, "content_block": start}
                if delta.get("partial_json") != "":
                    yield {"type": "content_block_delta", "index": index, "delta": delta}
        elif isinstance(chunk, Finish):
            if open_kind is not None:
                yield {"type": "content_block_stop", "index": index}
            yield {"type": "message_delta", "delta": stop_fields(chunk), "usage": usage_of(chunk.stats)}
    yield {"type": "message_stop"}


def params_of(body: MessagesRequest, can_think: bool) -> CompletionParams:
    """Translates a request body. "adaptive" leaves it to the model whether it thinks."""
    thinking = (body.thinking or {}).get("type")
    tools = [template_tool(tool) for tool in body.tools or ()]
    parallel = not (body.tool_choice or {}).get("disable_parallel_tool_use")
    messages: list[Message] = []
    if body.system is not None:
        messages.append({"role": "system", "content": text_of_content(body.system, "messages")})
    for message in body.messages:
        messages += template_messages(message)
    return CompletionParams(
        prompt=messages,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        seed=body.seed,
        stop_strings=tuple(body.stop_sequences or ()),
        check=body.check,
        causal_settings=causal_settings(body),
        tools=choose_tools(tools, tool_choice_of(body), parallel=parallel),
        think=thinking == "enabled" or (thinking == "adaptive" and can_think),
        pattern=pattern_of(body.output_config),
        **canvas_params(body),
    )


def pattern_of(output_config: OutputConfig | None) -> dict[str, Any]:
    """Returns the pattern that the answer must match."""
    match output_config and output_config.format:
        case None:
            return {}
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"schema": schema}
        case other:
            message = f'output_config.format can be {{"type": "json_schema", "schema": {{...}}}}, got {shorten(other)}'
            raise BadRequestError(message, "output_config.format")


def tool_choice_of(body: MessagesRequest) -> Any:
    """Returns the tool choice in OpenAI's words."""
    match body.tool_choice:
        case None:
            return "auto"
        case {"type": "auto" | "none" as kind}:
            return kind
        case {"type": "any"}:
            return "required"
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "name": name}
    message = f"tool_choice can be auto, none, any or a tool by its name, got {shorten(body.tool_choice)}"
    raise BadRequestError(message, "tool_choice")


def template_messages(message: InputMessage) -> list[Message]:
    """Returns a message as the chat template reads it. Tool calls and tool results are blocks of its content."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    tool_calls: list[dict[str, Any]] = []
    messages: list[Message] = []
    other_blocks: list[dict[str, Any]] = []
    for block in message.content:
        match block.get("type"):
            case "tool_use":
                function = {"name": str(block.get("name")), "arguments": block.get("input") or {}}
                tool_calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                content = tool_result(block)
                messages.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": content})
            case "thinking" | "redacted_thinking":
                pass  # earlier reasoning is not prefilled again
            case _:
                other_blocks.append(block)
    if other_blocks or tool_calls or not messages:
        own: Message = {"role": message.role, "content": parts_of_content(other_blocks, "messages")}
        messages.append({**own, "tool_calls": tool_calls} if tool_calls else own)
    return messages


def tool_result(block: dict[str, Any]) -> str:
    """Returns the text of a tool's result. The chat template has no place for an image there."""
    parts = block.get("content") or ""
    if isinstance(parts, list) and any(isinstance(part, dict) and part.get("type") == "image" for part in parts):
        message = "a tool_result has an image, which the model cannot be shown there: send it as a block beside the result"
        raise BadRequestError(message, "messages")
    return text_of_content(parts, "messages")


def template_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool as the chat template reads it."""
    if not isinstance(tool.get("name"), str):
        raise BadRequestError("a tool needs a name, a description and an input_schema", "tools")
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or {},
    }
    return {"type": "function", "function": function}


def block_deltas(delta: TextDelta) -> list[tuple[tuple[str, int], dict[str, Any], dict[str, Any]]]:
    """Returns, for each content block that a delta belongs to: its kind, the block as it starts, and what is added."""
    blocks: list[tuple[tuple[str, int], dict[str, Any], dict[str, Any]]] = []
    if delta.reasoning:
        added: dict[str, Any] = {"type": "thinking_delta", "thinking": delta.reasoning}
        blocks.append((("thinking", 0), {"type": "thinking", "thinking": "", "signature": ""}, added))
    if delta.text:
        blocks.append((("text", 0), {"type": "text", "text": ""}, {"type": "text_delta", "text": delta.text}))
    for part in delta.tool_calls:
        added = {"type": "input_json_delta", "partial_json": part.arguments}
        blocks.append((("tool_use", part.index), tool_use(part.name, {}), added))
    return blocks


def tool_use(name: str, arguments: Any) -> dict[str, Any]:
    """Returns the content block of a tool call."""
    return {"type": "tool_use", "id": f"toolu_{uuid4().hex[:24]}", "name": name, "input": arguments}


def content_blocks(completion: Completion) -> list[dict[str, Any]]:
    """Returns the content of a whole message."""
    blocks: list[dict[str, Any]] = []
    if completion.reasoning:
        blocks.append({"type": "thinking", "thinking": completion.reasoning, "signature": ""})
    if completion.text or not completion.tool_calls:
        blocks.append({"type": "text", "text": completion.text})
    for call in completion.tool_calls:
        blocks.append(tool_use(call.name, call.parse()))
    return blocks


def stop_fields(finish: Finish) -> dict[str, Any]:
    """Returns why a message ended."""
    reason = "stop_sequence" if finish.stop_string is not None else STOP_REASONS[finish.finish_reason]
    return {"stop_reason": reason, "stop_sequence": finish.stop_string}


def usage_of(stats: Stats) -> dict[str, Any]:
    """Returns counts of tokens and drafts, and the mode."""
    return {
        "input_tokens": stats.prompt_tokens,  # as count_tokens counts them
        "cache_read_input_tokens": 0,  # of caches that a client has marked; ours needs no marks
        "cache_creation_input_tokens": 0,
        "output_tokens": stats.new_tokens,
        **verification_fields([stats]),
    }


def error(status: int, message: str) -> dict[str, Any]:
    """Returns an error body, or the error event of a stream."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 503: "overloaded_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
