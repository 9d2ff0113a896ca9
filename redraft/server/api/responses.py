"""OpenAI's newer wire format, /v1/responses: input items in, output items or events out.

The server keeps no state, so a request holds its whole conversation. Items of the output are reasoning, a message, and
function calls; a stream announces each, sends its text in pieces, and repeats it when it is done.
"""

import asyncio
import copy
import time
from collections.abc import Iterator
from typing import Annotated, Any
from uuid import uuid4

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from redraft.constraints.errors import shorten
from redraft.server.api.openai_requests import pattern_of_format
from redraft.server.canvas_params import canvas_params
from redraft.server.checks import causal_settings, choose_check, warnings_of
from redraft.server.completion import Chunk, CompletionParams, Finish, TextDelta, parse_arguments
from redraft.server.errors import BadRequestError
from redraft.server.images import ignored_image_fields, parts_of_content, text_of_content
from redraft.server.models import Handlers, Models
from redraft.server.schema import CanvasFields, CausalOptions, Seed, Temperature, Tokens
from redraft.server.service import Route, name_ignored_fields, read_body
from redraft.server.streams import end_with_error, sse_response
from redraft.server.tool_calls import CallDelta, choose_tools
from redraft.server.worker import Stream
from redraft.tokenizer.tokenizer import Message, Tokenizer

Items = Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=2048)]
STATEFUL = ("previous_response_id", "conversation", "background", "prompt")  # fields that need a server with a memory
DELTAS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}  # events of a text, without the verb


class ResponsesRequest(CanvasFields, CausalOptions):
    """POST /v1/responses."""

    input: str | Items
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=256)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = None  # its `format` is what response_format is for chat completions
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None  # nothing is stored, and the response says so
    stream: bool = False


def routes(models: Models) -> list[Route]:
    """Returns the routes of this wire format."""
    return [Route("/v1/responses", ResponsesRoutes(models).respond, ResponsesRequest)]


class ResponsesRoutes(Handlers):
    """The handler."""

    async def respond(self, request: Request) -> Response:
        """POST /v1/responses."""
        body = await read_body(request, ResponsesRequest)
        params = params_of(body)
        if isinstance(body.input, list):
            name_ignored_fields(request, ignored_image_fields(body.input))
        return await (await self.of(request, body))._respond(request, body, params)

    async def _respond(self, request: Request, body: ResponsesRequest, params: CompletionParams) -> Response:
        check = choose_check(self.service.writer.sampler, body.check, has_draft=bool(params.draft))
        head = response_head(body, self.service.name, warnings_of(body, check))
        if body.stream:
            chunks = await self.service.start(request, [params])
            events = end_with_error(self._stream_events(chunks, head), error_event)
            return sse_response(number_events(events), named=True, end="")
        (completion,) = await self.service.complete(request, [params])
        output = OutputBuilder()
        for delta in completion.deltas:
            list(output.add(delta))
        list(output.finish(completion.finish))
        return JSONResponse(await self._finish_response(head, output, completion.finish))

    async def _stream_events(self, chunks: Stream[tuple[int, Chunk]], head: dict[str, Any]) -> Stream[dict[str, Any]]:
        in_progress = {**head, "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": in_progress}
        yield {"type": "response.in_progress", "response": in_progress}
        output = OutputBuilder()
        async for _, chunk in chunks:
            if isinstance(chunk, TextDelta):
                for event in output.add(chunk):
                    yield event
            elif isinstance(chunk, Finish):
                for event in output.finish(chunk):
                    yield event
                response = await self._finish_response(head, output, chunk)
                yield {"type": f"response.{response['status']}", "response": response}

    async def _finish_response(self, head: dict[str, Any], output: "OutputBuilder", finish: Finish) -> dict[str, Any]:
        """Returns the whole response. Tokens of the reasoning are counted in a thread."""
        is_cut = is_incomplete(finish)
        reasoning_tokens = await asyncio.to_thread(count_reasoning, self.service.writer.tokenizer, output.items)
        stats = finish.stats
        notes = {"warnings": [*head.get("warnings", ()), *finish.notes]} if finish.notes else {}
        return {
            **head,
            **notes,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output.items,
            "usage": {
                "input_tokens": stats.prompt_tokens,
                "input_tokens_details": {"cached_tokens": stats.reused, "cache_write_tokens": 0},
                "output_tokens": stats.new_tokens,
                "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
                "total_tokens": stats.prompt_tokens + stats.new_tokens,
            },
            "timings": self.service.timings_of([stats]),
        }


# 1. Requests


def params_of(body: ResponsesRequest) -> CompletionParams:
    """Translates a request body."""
    for name in STATEFUL:
        if (body.model_extra or {}).get(name):
            raise BadRequestError(f"{name} is not supported: the server keeps no state, so send all input items", name)
    tools = [template_tool(tool) for tool in body.tools or ()]
    effort = (body.reasoning or {}).get("effort")
    return CompletionParams(
        prompt=messages_of(body),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        seed=body.seed,
        check=body.check,
        causal_settings=causal_settings(body),
        tools=choose_tools(tools, body.tool_choice, parallel=body.parallel_tool_calls),
        think=effort not in (None, "none"),
        pattern=pattern_of_format((body.text or {}).get("format"), "text.format"),
        **canvas_params(body),
    )


def messages_of(body: ResponsesRequest) -> list[Message]:
    """Returns the conversation as the chat template reads it."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        match item.get("type", "message"):
            case "message":
                messages.append(message_of(item))
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(template_call(item))
            case "function_call_output":
                content = text_of_content(item.get("output") or "", "input")
                messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content})
            case "reasoning":
                pass  # earlier reasoning is not prefilled again
            case other:
                kinds = "message, function_call, function_call_output or reasoning"
                raise BadRequestError(f"an input item can be a {kinds}, got {shorten(other)}", "input")
    if all(message["role"] == "system" for message in messages):
        raise BadRequestError("input has no message to answer", "input")
    return list(messages)


def message_of(item: dict[str, Any]) -> dict[str, Any]:
    """Returns a message of the input as the chat template reads it."""
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise BadRequestError(f"a message has the role user, assistant, system or developer, got {shorten(role)}", "input")
    content = parts_of_content(item.get("content") or "", "input")
    return {"role": "system" if role == "developer" else role, "content": content}


def template_call(item: dict[str, Any]) -> dict[str, Any]:
    """Returns an earlier function call as the chat template reads it."""
    arguments = item.get("arguments") or "{}"
    if not isinstance(item.get("name"), str) or not isinstance(arguments, str):
        raise BadRequestError("a function_call needs a name and its arguments as a JSON string", "input")
    function = {"name": item["name"], "arguments": parse_arguments(arguments)}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def template_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool as the chat template reads it."""
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        message = f"a tool is a function with a name, got the type {shorten(tool.get('type'))}: leave other tools out"
        raise BadRequestError(message, "tools")
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("parameters") or {},
    }
    return {"type": "function", "function": function}


# 2. Responses


def response_head(body: ResponsesRequest, model: str, warnings: list[str]) -> dict[str, Any]:
    """Returns the fields of a response that are known when it begins."""
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        **({"warnings": warnings} if warnings else {}),
    }


class OutputBuilder:
    """Builds the output items of a response from text deltas; yields the events of a stream on the way."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item may still grow
        self._calls = 0

    def add(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Adds a delta."""
        if delta.reasoning:
            yield from self._add_text("reasoning", delta.reasoning)
        if delta.text:
            yield from self._add_text("message", delta.text)
        for part in delta.tool_calls:
            yield from self._add_call_part(part)

    def finish(self, finish: Finish) -> Iterator[dict[str, Any]]:
        """Ends the last item. A response without any has an empty message."""
        if not self.items:
            yield from self._start("message")
        yield from self._close("incomplete" if is_incomplete(finish) else "completed")

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _add_item(self, item: dict[str, Any]) -> dict[str, Any]:
        self.items.append(item)
        return self._item_event("added")

    def _item_event(self, verb: str) -> dict[str, Any]:
        item = copy.deepcopy(self.items[-1])
        return {"type": f"response.output_item.{verb}", "output_index": len(self.items) - 1, "item": item}

    def _start(self, kind: str) -> Iterator[dict[str, Any]]:
        item: dict[str, Any]
        part: dict[str, Any]
        if kind == "message":
            item = {"id": f"msg_{uuid4().hex}", "type": kind, "role": "assistant", "status": "in_progress", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": f"rs_{uuid4().hex}", "type": kind, "status": "in_progress", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        yield self._add_item(item)
        yield {"type": "response.content_part.added", **self._place, "content_index": 0, "part": dict(part)}
        item["content"] = [part]
        self._is_open = True

    def _add_text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._start(kind)
        self.items[-1]["content"][0]["text"] += text
        yield {"type": f"{DELTAS[kind]}.delta", **self._text_fields(kind), "delta": text}

    def _text_fields(self, kind: str) -> dict[str, Any]:
        return {**self._place, "content_index": 0, **({"logprobs": []} if kind == "message" else {})}

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """Ends an item, if one is open."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            fields = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **self._place, **fields}
            yield self._item_event("done")
            return
        (part,) = item["content"]
        yield {"type": f"{DELTAS[item['type']]}.done", **self._text_fields(item["type"]), "text": part["text"]}
        yield {"type": "response.content_part.done", **self._place, "content_index": 0, "part": dict(part)}
        yield self._item_event("done")

    def _add_call_part(self, part: CallDelta) -> Iterator[dict[str, Any]]:
        if part.index >= self._calls:
            yield from self._close("completed")
            ids = {"id": f"fc_{uuid4().hex}", "call_id": f"call_{uuid4().hex[:24]}"}
            item = {"type": "function_call", **ids, "name": part.name, "arguments": "", "status": "in_progress"}
            yield self._add_item(item)
            self._is_open = True
            self._calls += 1
        if part.arguments:
            self.items[-1]["arguments"] += part.arguments
            yield {"type": "response.function_call_arguments.delta", **self._place, "delta": part.arguments}


def is_incomplete(finish: Finish) -> bool:
    """Whether the limit of tokens, not the model, ended a response."""
    return finish.finish_reason in ("length", "deadline")


def count_reasoning(tokenizer: Tokenizer, items: list[dict[str, Any]]) -> int:
    """Counts the tokens of the reasoning."""
    texts = [item["content"][0]["text"] for item in items if item["type"] == "reasoning"]
    return sum(len(tokenizer.encode(text)) for text in texts)


async def number_events(events: Stream[dict[str, Any]]) -> Stream[dict[str, Any]]:
    """Adds the number that every event of a stream has."""
    number = 0
    async for event in events:
        yield {**event, "sequence_number": number}
        number += 1


def error_event(status: int, message: str) -> dict[str, Any]:
    """Returns the last event of a stream that failed."""
    return {"type": "error", "code": str(status), "message": message, "param": None}
