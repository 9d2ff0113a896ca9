"""OpenAI's wire format: chat completions, completions, FIM and edits, whole and streamed, as its clients parse them.

openai_requests.py translates the request bodies.
"""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from redraft.diffusion.generate import Stats
from redraft.server.api.openai_requests import (
    chat_params,
    check_echo,
    check_infill_options,
    count_candidates,
    find_gaps,
    text_params,
)
from redraft.server.checks import choose_check, warnings_of
from redraft.server.completion import (
    Chunk,
    CompletionParams,
    Finish,
    TextDelta,
    as_stop_strings,
    prompt_text,
    split_prompts,
)
from redraft.server.errors import BadRequestError
from redraft.server.fim import Gap, find_gap, find_region
from redraft.server.frames import Frame
from redraft.server.images import ignored_image_fields, text_of_content
from redraft.server.infill import MAX_GAP_TOKENS, Infill, rewrite_region
from redraft.server.logprobs import TokenLogprob, logprobs_of
from redraft.server.models import Handlers, Models
from redraft.server.schema import ChatRequest, CompletionRequest, EditRequest
from redraft.server.service import Completion, Route, Service, name_ignored_fields, read_body
from redraft.server.streams import end_with_error, sse_response, stream_list
from redraft.server.tool_calls import CallDelta, WrittenCall
from redraft.server.worker import Stream
from redraft.tasks import best_of
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.writer import new_seed

# 1. Responses


class ResponseBuilder:
    """Builds the objects of one response, which share id, time and model."""

    PREFIXES = {"chat.completion": "chatcmpl", "text_completion": "cmpl", "edit.completion": "editcmpl"}  # noqa: RUF012

    def __init__(self, kind: str, service: Service) -> None:
        self.kind = kind
        self.service = service
        self.is_chat = kind != "text_completion"
        self.chunk_kind = "chat.completion.chunk" if self.is_chat else kind
        self.head = {
            "id": f"{self.PREFIXES[kind]}-{uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": service.name,
        }

    def response(
        self, choices: list[dict[str, Any]], stats_by_prompt: Sequence[Sequence[Stats]], warnings: Sequence[str]
    ) -> dict[str, Any]:
        """Builds a whole response. `stats_by_prompt` groups the choices of each prompt."""
        all_stats = [stats for group in stats_by_prompt for stats in group]
        timings = self.service.timings_of(all_stats)
        body = {**self.head, "choices": choices, "usage": usage_of(stats_by_prompt), "timings": timings}
        return {**body, "warnings": list(warnings)} if warnings else body

    def chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None, **fields: Any
    ) -> dict[str, Any]:
        """Builds a chunk of a stream."""
        content = {"delta": delta} if self.is_chat else {"text": delta.get("content", "")}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self.head, "object": self.chunk_kind, "choices": [choice], **fields}

    def frame_chunk(self, index: int, frame: Frame) -> dict[str, Any]:
        """Builds the chunk of a denoising step, whose delta is empty for clients that do not know frames."""
        fields: dict[str, Any] = {"block": frame.block, "step": frame.step, "total": frame.max_steps, "text": frame.text}
        fields |= {"tokens": frame.tokens, "entropy": frame.entropy, "accepted": frame.accepted}
        fields |= {"verified": frame.verified}
        return self.chunk(index, {}, type="diffusion_frame", **fields)

    def logprobs(self, tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Builds logprobs in the shape of chat or of text completions."""
        entries = logprobs_of(tokenizer, tokens)
        if self.is_chat:
            return {"content": entries, "refusal": None}
        # Halves of characters have the same text: of entries with the same key, the likeliest stays.
        top = [{other["token"]: other["logprob"] for other in reversed(entry["top_logprobs"])} for entry in entries]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": top,
            "text_offset": [token.offset for token in tokens],
        }


def deltas_of(delta: TextDelta, call_ids: dict[int, str]) -> list[dict[str, Any]]:
    """Returns the deltas of chunks. `call_ids` has the ids of the calls that have begun.

    A delta has one part of a call, as OpenAI sends them: some clients read no more of it.
    """
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.text:
        fields["content"] = delta.text
    parts = [{"tool_calls": [call_delta(part, call_ids)]} for part in delta.tool_calls]
    return [fields, *parts] if fields else parts


def call_delta(part: CallDelta, call_ids: dict[int, str]) -> dict[str, Any]:
    """Returns a part of a tool call: the first one has its id and its name."""
    if part.index in call_ids:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    call = tool_call(part)
    call_ids[part.index] = call["id"]
    return {"index": part.index, **call}


def message_of(completion: Completion) -> dict[str, Any]:
    """Returns the message of a whole chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": completion.text}
    if completion.reasoning:
        message["reasoning_content"] = completion.reasoning
    if completion.tool_calls:
        message["tool_calls"] = [tool_call(call) for call in completion.tool_calls]
        message["content"] = message["content"] or None
    return message


def tool_call(call: WrittenCall | CallDelta) -> dict[str, Any]:
    """Returns a tool call as clients read it."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}


def finish_reason_of(finish: Finish) -> str:
    """Returns the finish reason; OpenAI has none for a deadline."""
    return "length" if finish.finish_reason == "deadline" else finish.finish_reason


def usage_of(stats_by_prompt: Sequence[Sequence[Stats]]) -> dict[str, Any]:
    """Counts tokens. A prompt counts once, whatever the number of its choices."""
    prompt_tokens = sum(max(stats.prompt_tokens for stats in group) for group in stats_by_prompt)
    completion_tokens = sum(stats.new_tokens for group in stats_by_prompt for stats in group)
    cached_tokens = sum(max(stats.reused for stats in group) for group in stats_by_prompt)
    accepted = sum(stats.accepted for group in stats_by_prompt for stats in group)
    drafted = sum(stats.drafted for group in stats_by_prompt for stats in group)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,  # drafts that the causal half accepted
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def error(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Returns an error body, or the error chunk of a stream."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


# 2. Routes


def routes(models: Models) -> list[Route]:
    """Returns the routes of this wire format."""
    handlers = OpenAIRoutes(models)
    model_paths = ("/v1/models", "/v1/models/", "/models", "/v1/fim/completions/models", "/v1/edit/completions/models")
    return [
        Route("/v1/chat/completions", handlers.chat, ChatRequest),
        Route("/v1/apply/completions", handlers.chat, ChatRequest),
        Route("/v1/completions", handlers.complete, CompletionRequest),
        Route("/v1/fim/completions", handlers.fim, CompletionRequest),
        Route("/v1/edit/completions", handlers.edit, EditRequest),
        *(Route(path, handlers.list_models) for path in model_paths),
        Route("/v1/models/{model_id:path}", handlers.show_model),
    ]


class OpenAIRoutes(Handlers):
    """The handlers."""

    def __init__(self, models: Models) -> None:
        super().__init__(models)
        self.started_at = int(time.time())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await read_body(request, ChatRequest)
        own = await self.of(request, body)
        builder = ResponseBuilder("chat.completion", own.service)
        name_ignored_fields(request, ignored_image_fields(body.messages))
        return await own._complete(request, body, [chat_params(body)], builder)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions: continues texts, or infills a gap if there is a suffix or the prompt has FIM sentinels."""
        body = await read_body(request, CompletionRequest)
        prompts = split_prompts(body.prompt)
        own = await self.of(request, body)
        builder = ResponseBuilder("text_completion", own.service)
        gaps = await asyncio.to_thread(find_gaps, body, prompts)
        if not gaps:
            return await own._complete(request, body, [text_params(body, prompt) for prompt in prompts], builder)
        if len(gaps) < len(prompts):
            raise BadRequestError("either all prompts have a gap to infill, or none has", "prompt")
        return await own._infill(request, body, gaps, builder, paragraph=False)

    async def fim(self, request: Request) -> Response:
        """POST /v1/fim/completions: infills between prompt and suffix, for Mistral's and for OpenAI's clients."""
        body = await read_body(request, CompletionRequest)
        prompts = split_prompts(body.prompt)
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) < len(prompts):
            raise BadRequestError("infill needs texts as prompts, got token ids", "prompt")
        marked = [await asyncio.to_thread(find_gap, text, body.suffix) for text in texts]
        gaps = [gap or Gap(text, "") for gap, text in zip(marked, texts, strict=True)]
        own = await self.of(request, body)
        builder = ResponseBuilder("text_completion", own.service)
        return await own._infill(request, body, gaps, builder, paragraph=True)

    async def edit(self, request: Request) -> Response:
        """POST /v1/edit/completions: mends a region of a file, and returns it between fences."""
        body = await read_body(request, EditRequest)
        prompt = "\n".join(text_of_content(message.content or "", "messages") for message in body.messages)
        region = await asyncio.to_thread(find_region, prompt)
        if region is None:
            message = "there is nothing to edit: no <|code_to_edit|> ... <|/code_to_edit|> in the messages"
            raise BadRequestError(message, "messages")

        # Repairs draw no random numbers, and a cut would lose text of the user's.
        settings = ("temperature", "seed", "max_tokens")
        name_ignored_fields(request, [name for name in settings if getattr(body, name) is not None])
        service = (await self.of(request, body)).service

        def work(stop: threading.Event) -> Iterator[Infill]:
            yield rewrite_region(service.writer, region, stop, seed=body.seed)

        infill = await service.run_single(request, work)
        service.count_stats(infill.stats)
        reply = {"role": "assistant", "content": f"```\n{infill.text}\n```"}
        builder = ResponseBuilder("edit.completion", service)
        if body.stream:
            return sse_response(stream_list([builder.chunk(0, reply), builder.chunk(0, {}, "stop")]))
        choice = {"index": 0, "message": reply, "finish_reason": "stop"}
        return JSONResponse(builder.response([choice], [[infill.stats]], []))

    async def list_models(self) -> dict[str, Any]:
        """GET /v1/models."""
        return {"object": "list", "data": [self._model_entry(name) for name in self.models.names]}

    async def show_model(self, model_id: str) -> dict[str, Any]:
        """GET /v1/models/ID."""
        return self._model_entry(self.models.find_name(model_id))

    def _model_entry(self, name: str) -> dict[str, Any]:
        base = self.models.base_of(name)
        card = self.models.cards[base]
        return {
            "id": name,
            "object": "model",
            "created": self.started_at,
            "owned_by": "redraft",
            "max_model_len": card.context_length,
            "can_chat": card.can_chat,
            "diffusion": card.is_diffusion,
            "vision": card.takes_images,
            **card.drafter_fields,
            **({"parent": base} if name != base else {}),  # as vLLM names the base of an adapter
        }

    async def _infill(
        self, request: Request, body: CompletionRequest, gaps: Sequence[Gap], builder: ResponseBuilder, *, paragraph: bool
    ) -> Response:
        check_infill_options(body)
        check_echo(gaps, body.n or 1, is_echoed=body.echo)
        choices: list[dict[str, Any]] = []
        stats_by_prompt = []
        for gap in gaps:
            infills = await self.service.infill(
                request,
                gap,
                count=body.n or 1,
                max_tokens=body.max_tokens,
                temperature=body.temperature,
                seed=body.seed,
                stop_strings=as_stop_strings(body.stop),
                paragraph=paragraph,
            )
            stats_by_prompt.append([infill.stats for infill in infills])
            for infill in infills:
                text = infill.text
                echoed = gap.prefix + text if body.echo else text
                shapes = {"text": echoed, "delta": {"content": text}, "message": {"role": "assistant", "content": text}}
                choices.append({"index": len(choices), **shapes, "logprobs": None, "finish_reason": "stop"})
        warnings = warnings_of(body, "off")
        if (body.max_tokens or 0) > MAX_GAP_TOKENS:
            warnings.append(f"infill has at most {MAX_GAP_TOKENS} tokens, max_tokens was {body.max_tokens}")
        response = builder.response(choices, stats_by_prompt, warnings)
        if body.stream:
            return sse_response(stream_list([{**response, "choices": [choice]} for choice in choices]))
        return JSONResponse(response)

    async def _complete(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        params: Sequence[CompletionParams],
        builder: ResponseBuilder,
    ) -> Response:
        """Runs the completions of every prompt, each with a seed of its own, and sends n of each, whole or streamed."""
        count = body.n or 1
        candidates = count_candidates(body)
        numbered = seed_candidates(params, body.seed, candidates, has_best_of=body.best_of is not None)
        warnings = self._warnings(body, params[0])
        if body.stream:
            started = await self.service.start(request, numbered)
            chunks = self._stream_chunks(started, body, builder, numbered, warnings)
            return sse_response(end_with_error(chunks, error))
        completions = await self.service.complete(request, numbered)
        groups = rank_by_prompt(list(zip(completions, numbered, strict=True)), candidates)
        choices: list[dict[str, Any]] = []
        for completion, single in (pair for group in groups for pair in group[:count]):
            choice: dict[str, Any] = {"index": len(choices), "finish_reason": finish_reason_of(completion.finish)}
            choice["logprobs"] = await self._logprobs(builder, single, completion.tokens)
            if builder.is_chat:
                choice["message"] = message_of(completion)
            else:
                choice["text"] = await self._echo(body, single) + completion.text
            choices.append(choice)
        stats = [[completion.finish.stats for completion, _ in group] for group in groups]
        return JSONResponse(builder.response(choices, stats, [*warnings, *completions[0].finish.notes]))

    async def _echo(self, body: ChatRequest | CompletionRequest, params: CompletionParams) -> str:
        """Returns the prompt if the client wants it before the completion. Token ids are decoded in a thread."""
        if not getattr(body, "echo", False):
            return ""
        return await asyncio.to_thread(prompt_text, self.service.writer.tokenizer, params.prompt)  # type: ignore[arg-type]

    def _warnings(self, body: ChatRequest | CompletionRequest, params: CompletionParams) -> list[str]:
        """Names the options that the mode of a request does not apply."""
        has_draft = bool(params.draft)
        return warnings_of(body, choose_check(self.service.writer.sampler, params.check, has_draft=has_draft))

    async def _logprobs(self, builder: ResponseBuilder, params: CompletionParams, tokens: Sequence[TokenLogprob]) -> Any:
        """Logprobs of a completion, if requested. In a thread: thousands of tokens take a second."""
        is_requested = params.logprobs is not None
        return await asyncio.to_thread(builder.logprobs, self.service.writer.tokenizer, tokens) if is_requested else None

    async def _stream_chunks(
        self,
        chunks: Stream[tuple[int, Chunk]],
        body: ChatRequest | CompletionRequest,
        builder: ResponseBuilder,
        params: Sequence[CompletionParams],
        warnings: Sequence[str],
    ) -> Stream[dict[str, Any]]:
        stats: dict[int, Stats] = {}
        call_ids: list[dict[int, str]] = [{} for _ in params]
        for index, single in enumerate(params):
            if builder.is_chat:
                yield builder.chunk(index, {"role": "assistant", "content": ""})
            elif echo := await self._echo(body, single):
                yield builder.chunk(index, {"content": echo})
        async for index, chunk in chunks:
            match chunk:
                case Frame():
                    yield builder.frame_chunk(index, chunk)
                case TextDelta():
                    for delta in deltas_of(chunk, call_ids[index]):
                        logprobs = await self._logprobs(builder, params[index], chunk.tokens)
                        yield builder.chunk(index, delta, logprobs=logprobs)
                case Finish():
                    stats[index] = chunk.stats
                    sentences = [*warnings, *chunk.notes]
                    last_fields = {"warnings": sentences} if sentences else {}
                    yield builder.chunk(index, {}, finish_reason_of(chunk), **last_fields)
        if body.stream_options and body.stream_options.include_usage:
            groups = group_by_prompt([stats[index] for index in range(len(params))], body.n or 1)
            yield builder.response([], groups, []) | {"object": builder.chunk_kind}


def group_by_prompt(stats: Sequence[Stats], choices_per_prompt: int) -> list[list[Stats]]:
    """Groups the stats of the choices of each prompt."""
    starts = range(0, len(stats), choices_per_prompt)
    return [list(stats[start : start + choices_per_prompt]) for start in starts]


def seed_candidates(
    params: Sequence[CompletionParams], seed: int | None, candidates: int, *, has_best_of: bool
) -> list[CompletionParams]:
    """Repeats every prompt with other seeds: consecutive numbers, or with `best_of` those of `best_of.seeds_of`."""
    first_seed = seed if seed is not None else new_seed()
    if has_best_of:
        seeds = [each for number in range(len(params)) for each in best_of.seeds_of(first_seed + number, candidates)]
    else:
        seeds = [first_seed + number for number in range(len(params) * candidates)]
    repeated = [single for single in params for _ in range(candidates)]
    return [replace(single, seed=each) for single, each in zip(repeated, seeds, strict=True)]


def rank_by_prompt(
    completions: Sequence[tuple[Completion, CompletionParams]], candidates: int
) -> list[list[tuple[Completion, CompletionParams]]]:
    """Groups the completions of each prompt. With `best_of` the likeliest comes first, else they keep their order."""
    starts = range(0, len(completions), candidates)
    groups = [completions[start : start + candidates] for start in starts]
    return [sorted(group, key=lambda pair: -(pair[0].finish.mean_logprob or 0.0)) for group in groups]
