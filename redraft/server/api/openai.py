"""OpenAI's wire: chat and text completions, holes and edits, whole and streamed, in the shapes that its clients parse."""

import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError

from redraft.diffusion.generate import Stats
from redraft.server.completion import (
    PLAIN_OBJECT,
    CompletionParams,
    End,
    Frame,
    Refused,
    Said,
    Text,
    message_of,
    plain_text,
    stops_of,
)
from redraft.server.fim import Hole, find_hole, find_region
from redraft.server.infill import LONGEST, Put, rewritten
from redraft.server.schema import Canvas, ChatRequest, CompletionRequest, EditRequest, Sampling
from redraft.server.service import Route, Service, Whole, client_of, each, logprobs_of, read, refused, sse, timings_of
from redraft.tokenizer.chat_parser import ToolCall
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.writer import new_seed

ALIAS = "mercury-coder-local"  # the name under which an editor asks for edits

# A canvas is not drawn token by token. What these are where they change nothing:
NO_MEANING = {"top_p": (1,), "top_k": (0, -1), "frequency_penalty": (0,), "presence_penalty": (0,)}
UNKNOWN = ("guided_grammar", "stop_token_ids", "functions", "function_call", "audio", "modalities", "structured_outputs")
BANNED = -100.0
NAMES = {"pattern": "response_format", "forbidden": "logit_bias", "settings": "diffusion settings"}
NAMES |= {"draft": "diffusion_seed_canvas", "pins": "diffusion_pinned", "unending": "diffusion_read_only"}


# 1. What was asked


def chat_asked(body: ChatRequest) -> CompletionParams:
    """A chat completion."""
    choice = body.tool_choice
    if choice not in (None, "none", "auto"):
        raise Refused(f"tool_choice can be none or auto, got {choice!r}: a call cannot be forced", "tool_choice")
    messages = [message_of(message) for message in body.messages]
    think = (body.chat_template_kwargs or {}).get("enable_thinking") is True or body.reasoning_effort not in (None, "none")
    return CompletionParams(
        prompt=messages,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        tools=body.tools if choice != "none" else None,
        think=think,
        **predicted(body, sampling(body)),
    )


def predicted(body: ChatRequest, known: dict[str, Any]) -> dict[str, Any]:
    """With the text that an answer is expected to be like."""
    if body.prediction is None:
        return known
    if "draft" in known:
        raise Refused("a page starts from a prediction or from diffusion_seed_canvas, not from both", "prediction")
    return {**known, "draft": plain_text(body.prediction.content, "prediction")}


def text_asked(body: CompletionRequest, prompt: str) -> CompletionParams:
    """A completion of one text."""
    if body.best_of not in (None, 1):
        raise Refused(f"best_of is not supported: ask for n answers instead, got {body.best_of}", "best_of")
    return CompletionParams(prompt=prompt, max_tokens=body.max_tokens or 16, **sampling(body))


def sampling(body: Sampling) -> dict[str, Any]:
    """What chat and text have in common."""
    for name in UNKNOWN:
        if (body.model_extra or {}).get(name) not in (None, [], {}):
            raise Refused(f"{name} is not supported; response_format knows json_schema, regex and choice", name)
    options = body.stream_options
    return {
        "temperature": body.temperature,
        "seed": body.seed,
        "stops": stops_of(body.stop),
        "forbidden": banned(body.logit_bias),
        "pattern": pattern_of(body),
        "frames": body.diffusing or bool(options and options.include_frames),
        "logprobs": likely(body),
        **canvas_of(body),
    }


def likely(body: ChatRequest | CompletionRequest) -> int | None:
    """How many likely tokens are told beside each: chat says whether and how many, text only how many."""
    if isinstance(body, ChatRequest):
        if body.top_logprobs and not body.logprobs:
            raise Refused("top_logprobs come with logprobs: true", "top_logprobs")
        return (body.top_logprobs or 0) if body.logprobs else None
    if body.logprobs is None or body.logprobs is False:
        return None
    if body.echo:
        raise Refused("a prompt is read, not written: its tokens have no logprobs, so leave echo out", "echo")
    return int(body.logprobs)


def canvas_of(body: Sampling) -> dict[str, Any]:
    """What vLLM's names say of the canvas, wherever they stand."""
    sent, more = body.model_dump(include=set(Canvas.model_fields), exclude_unset=True), body.vllm_xargs or {}
    if unknown := sorted(set(more) - set(Canvas.model_fields)):
        raise Refused(f"vllm_xargs has {unknown[0]!r}, which is not known here", "vllm_xargs")
    try:
        wanted = Canvas.model_validate({**sent, **more})
    except ValidationError as error:
        raise refused(error, "vllm_xargs") from None
    if wanted.diffusion_constrained:
        raise Refused(
            "diffusion_constrained is not supported: use response_format or guided_choice", "diffusion_constrained"
        )
    seeded, pinned = wanted.diffusion_seed_canvas, wanted.diffusion_pinned or []
    if pinned and (seeded is None or not all(0 <= at < len(seeded) for at in pinned)):
        raise Refused("diffusion_pinned names places of diffusion_seed_canvas", "diffusion_pinned")
    settings = {"canvas_length": wanted.diffusion_canvas_length, "max_steps": wanted.diffusion_max_steps}
    found: dict[str, Any] = {"settings": {name: value for name, value in settings.items() if value is not None}}
    if seeded is not None:
        found |= {"draft": tuple(seeded), "pins": {at: seeded[at] for at in pinned}}
    return found | ({"unending": True} if wanted.diffusion_read_only else {})


def warnings_of(body: Sampling) -> list[str]:
    """What was sent and has no meaning here."""
    sent = [name for name, neutral in NO_MEANING.items() if getattr(body, name) not in (None, *neutral)]
    return [f"{name} has no meaning for a canvas and was not applied" for name in sent]


def banned(bias: Mapping[str, float] | None) -> tuple[int, ...]:
    """Tokens that a bias of -100 forbids; other biases are refused."""
    found = []
    for token, value in (bias or {}).items():
        if value > BANNED or not token.isdigit():
            raise Refused(f"logit_bias can forbid a token with -100, got {token!r}: {value!r}", "logit_bias")
        found.append(int(token))
    return tuple(found)


def pattern_of(body: Sampling) -> dict[str, Any]:
    """The pattern that the answer must match, under any of the names that clients have for it."""
    found: dict[str, Any] = {"regex": body.guided_regex, "choices": body.guided_choice, "schema": body.guided_json}
    wanted = body.response_format or {"type": "text"}
    match wanted.get("type"):
        case "text":
            pass
        case "json_object":
            found["schema"] = PLAIN_OBJECT
        case "json_schema":
            inner = wanted.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else wanted.get("schema")
            if not isinstance(schema, dict):
                raise Refused(
                    "response_format json_schema needs a schema: {json_schema: {schema: {...}}}", "response_format"
                )
            found["schema"] = schema
        case "regex":
            found["regex"] = wanted.get("regex") or wanted.get("pattern")
        case "choice":
            found["choices"] = wanted.get("choices") or wanted.get("choice")
        case other:
            known = "text, json_object, json_schema, regex or choice"
            raise Refused(f"response_format can be {known}, got {other!r}", "response_format")
    return {name: value for name, value in found.items() if value is not None}


# 2. What is answered


class Reply:
    """The objects of one answer."""

    def __init__(self, kind: str, model: str) -> None:
        prefix = {"chat.completion": "chatcmpl", "text_completion": "cmpl", "edit.completion": "editcmpl"}[kind]
        self.kind, self.chat = kind, kind != "text_completion"
        self.head = {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}

    @property
    def part(self) -> str:
        """What a part of a stream is called."""
        return "chat.completion.chunk" if self.chat else self.kind

    def whole(
        self, choices: list[dict[str, Any]], spent: Sequence[Sequence[Stats]], warnings: Sequence[str]
    ) -> dict[str, Any]:
        """Everything at once; `spent` has the choices of each prompt together."""
        every = [one for some in spent for one in some]
        found = {**self.head, "choices": choices, "usage": usage_of(spent), "timings": timings_of(every)}
        return {**found, "warnings": list(warnings)} if warnings else found

    def chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None, **more: Any
    ) -> dict[str, Any]:
        """A part of a stream."""
        head = {**self.head, "object": self.part}
        part = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        return {**head, "choices": [{"index": index, **part, "logprobs": logprobs, "finish_reason": reason}], **more}

    def logprobs(self, tokenizer: Tokenizer, tokens: Sequence[Said]) -> dict[str, Any]:
        """Tokens with their probabilities, in the shape of chats or of texts."""
        told = logprobs_of(tokenizer, tokens)
        if self.chat:
            return {"content": told, "refusal": None}
        # Halves of characters are spelled alike: of one key, the likeliest stays.
        tops = [{other["token"]: other["logprob"] for other in reversed(one["top_logprobs"])} for one in told]
        return {
            "tokens": [one["token"] for one in told],
            "token_logprobs": [one["logprob"] for one in told],
            "top_logprobs": tops,
            "text_offset": [said.at for said in tokens],
        }

    def frame(self, index: int, frame: Frame) -> dict[str, Any]:
        """A step of a page, as a chunk that says nothing to those who do not know it."""
        more = {"block": frame.block, "step": frame.step, "total": frame.total, "text": frame.text}
        more |= {"tokens": frame.tokens, "entropy": frame.entropy, "accepted": frame.accepted}
        return self.chunk(index, {}, None, type="diffusion_frame", **more)

    def delta(self, piece: Text, calls: int) -> dict[str, Any]:
        """What a page adds."""
        found: dict[str, Any] = {}
        if piece.reasoning:
            found["reasoning_content"] = piece.reasoning
        if piece.text:
            found["content"] = piece.text
        if piece.tool_calls:
            found["tool_calls"] = [call_of(call, calls + at) for at, call in enumerate(piece.tool_calls)]
        return found


def message_of_answer(answer: Whole) -> dict[str, Any]:
    """A whole answer's message."""
    found: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        found["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        calls = [call_of(call, at) for at, call in enumerate(answer.tool_calls)]
        found["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
        found["content"] = found["content"] or None
    return found


def call_of(call: ToolCall, index: int) -> dict[str, Any]:
    """A call as clients read it."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"index": index, "id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def finish(reason: str) -> str:
    """OpenAI knows no deadline."""
    return "length" if reason == "deadline" else reason


def usage_of(spent: Sequence[Sequence[Stats]]) -> dict[str, Any]:
    """Every prompt is counted once, whatever the number of its choices."""
    prompt = sum(max(one.prompt_tokens for one in some) for some in spent)
    new = sum(one.new_tokens for some in spent for one in some)
    details = {"prompt_tokens_details": {"cached_tokens": sum(max(one.reused for one in some) for some in spent)}}
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new, **details}


def error(status: int, sentence: str, param: str | None = None) -> dict[str, Any]:
    """What clients raise."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": sentence, "type": kind, "param": param, "code": status}}


# 3. Routes


def routes(service: Service) -> list[Route]:
    """All of them."""
    one = OpenAI(service)
    listed = ("/v1/models", "/v1/fim/completions/models", "/v1/edit/completions/models")
    return [
        Route("/v1/chat/completions", one.chat, ChatRequest),
        Route("/v1/apply/completions", one.chat, ChatRequest),
        Route("/v1/completions", one.complete, CompletionRequest),
        Route("/v1/fim/completions", one.fim, CompletionRequest),
        Route("/v1/edit/completions", one.edit, EditRequest),
        *(Route(path, one.models) for path in listed),
    ]


class OpenAI:
    """What the paths do."""

    def __init__(self, service: Service) -> None:
        self.service, self.began = service, int(time.time())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await read(request, ChatRequest)
        return await self._told(request, body, [chat_asked(body)], Reply("chat.completion", self.service.name))

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions: texts continued, or a hole filled where there is a suffix or sentinels."""
        body = await read(request, CompletionRequest)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        reply = Reply("text_completion", self.service.name)
        found = [find_hole(prompt, body.suffix) for prompt in prompts]
        if any(found):
            if not all(found):
                raise Refused("either all prompts have a hole, or none has", "prompt")
            return await self._put(request, body, [hole for hole in found if hole], reply, paragraph=False)
        return await self._told(request, body, [text_asked(body, prompt) for prompt in prompts], reply)

    async def fim(self, request: Request) -> Response:
        """POST /v1/fim/completions: what is missing between prompt and suffix, in the shapes of both kinds of clients."""
        body = await read(request, CompletionRequest)
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        found = [find_hole(prompt, body.suffix) or Hole(prompt, "") for prompt in prompts]
        return await self._put(request, body, found, Reply("text_completion", self.service.name), paragraph=True)

    async def edit(self, request: Request) -> Response:
        """POST /v1/edit/completions: a region of a file written anew, between fences."""
        body = await read(request, EditRequest)
        region = find_region("\n".join(plain_text(one.content or "", "messages") for one in body.messages))
        if region is None:
            raise Refused("there is nothing to edit: no <|code_to_edit|> ... <|/code_to_edit|> in the messages", "messages")

        def work(stop: threading.Event) -> Iterator[Put]:
            yield rewritten(self.service.writer, region, stop, seed=body.seed, temperature=body.temperature)

        found = await self.service.once(request, work, ("edit", client_of(request)))
        self.service.count(found.stats)
        message = {"role": "assistant", "content": f"```\n{found.text}\n```"}
        reply = Reply("edit.completion", self.service.name)
        if body.stream:
            return sse(each([reply.chunk(0, message), reply.chunk(0, {}, "stop")]))
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse(reply.whole([choice], [[found.stats]], []))

    async def models(self) -> dict[str, Any]:
        """GET /v1/models."""
        length = self.service.writer.model.config.max_position_embeddings
        head = {"object": "model", "created": self.began, "owned_by": "redraft", "max_model_len": length}
        return {"object": "list", "data": [{"id": name, **head} for name in (self.service.name, ALIAS)]}

    async def _put(
        self, request: Request, body: CompletionRequest, found: Sequence[Hole], reply: Reply, *, paragraph: bool
    ) -> Response:
        for name, value in sampling(body).items():
            given = value is not None if name == "logprobs" else bool(value)
            if given and name not in ("temperature", "seed", "stops"):
                called = NAMES.get(name, name)
                raise Refused(f"a hole is filled without {called}: leave that out", called)
        options = {"count": body.n or 1, "max_tokens": body.max_tokens, "temperature": body.temperature, "seed": body.seed}
        options |= {"stops": stops_of(body.stop), "paragraph": paragraph}
        filled = [(hole, await self.service.put(request, hole, **options)) for hole in found]
        choices, told = [], warnings_of(body)
        if (body.max_tokens or 0) > LONGEST:
            told.append(f"a hole has at most {LONGEST} tokens, max_tokens was {body.max_tokens}")
        for hole, one in ((hole, one) for hole, texts in filled for one in texts):
            text = (hole.before if body.echo else "") + one.text
            shapes = {"text": text, "delta": {"content": text}, "message": {"role": "assistant", "content": text}}
            choices.append({"index": len(choices), **shapes, "logprobs": None, "finish_reason": "stop"})
        whole = reply.whole(choices, [[one.stats for one in texts] for _, texts in filled], told)
        return sse(each([{**whole, "choices": [choice]} for choice in choices])) if body.stream else JSONResponse(whole)

    async def _told(
        self, request: Request, body: ChatRequest | CompletionRequest, asked: Sequence[CompletionParams], reply: Reply
    ) -> Response:
        """Answers, whole or streamed: of every prompt as many as were asked for, each with a seed of its own."""
        first = body.seed if body.seed is not None else new_seed()
        many = [one for one in asked for _ in range(body.n or 1)]
        many = [replace(one, seed=first + number) for number, one in enumerate(many)]
        if body.stream:
            return sse(self._parts(await self.service.begin(many), body, reply, many))
        choices, found = [], await self.service.gather(request, many)
        for index, one in enumerate(found):
            choice = {"index": index, "finish_reason": finish(one.end.reason), "logprobs": None}
            if many[index].logprobs is not None:
                choice["logprobs"] = reply.logprobs(self.service.writer.tokenizer, one.tokens)
            echoed = many[index].prompt if getattr(body, "echo", False) else ""
            choices.append(choice | ({"message": message_of_answer(one)} if reply.chat else {"text": echoed + one.text}))
        spent = [one.end.stats for one in found]
        return JSONResponse(reply.whole(choices, grouped(spent, body.n or 1), warnings_of(body)))

    async def _parts(
        self,
        merged: AsyncIterator[Any],
        body: ChatRequest | CompletionRequest,
        reply: Reply,
        many: Sequence[CompletionParams],
    ) -> AsyncIterator[dict[str, Any]]:
        spent: list[Any] = [None] * len(many)
        calls, warnings = [0] * len(many), {"warnings": told} if (told := warnings_of(body)) else {}
        for index, asked in enumerate(many):
            if reply.chat:
                yield reply.chunk(index, {"role": "assistant", "content": ""})
            elif getattr(body, "echo", False):
                yield reply.chunk(index, {"content": asked.prompt})
        try:
            async for index, piece in merged:
                match piece:
                    case Frame():
                        yield reply.frame(index, piece)
                    case Text():
                        if delta := reply.delta(piece, calls[index]):
                            wanted = many[index].logprobs is not None
                            told = reply.logprobs(self.service.writer.tokenizer, piece.tokens) if wanted else None
                            yield reply.chunk(index, delta, logprobs=told)
                        calls[index] += len(piece.tool_calls)
                    case End():
                        spent[index] = piece.stats
                        yield reply.chunk(index, {}, finish(piece.reason), **warnings)
        except (RuntimeError, ValueError) as failure:  # it has begun: the status cannot be changed any more
            yield error(500, str(failure))
            return
        if body.stream_options and body.stream_options.include_usage:
            yield reply.whole([], grouped(spent, body.n or 1), []) | {"object": reply.part}


def grouped(spent: Sequence[Stats], each_has: int) -> list[list[Stats]]:
    """Choices of each prompt together."""
    return [list(spent[at : at + each_has]) for at in range(0, len(spent), each_has)]
