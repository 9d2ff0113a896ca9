"""llama.cpp's wire format: /completion, /infill as its editor plugins read it, tokens, /props, /slots, /health.

Timings are nested, or flat where a client names fields by path in `response_fields`.
"""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from redraft.diffusion.generate import Stats
from redraft.server.canvas_params import canvas_params
from redraft.server.checks import causal_settings, choose_check, ignored_settings, require_unchecked, verification_fields
from redraft.server.completion import (
    Chunk,
    CompletionParams,
    Finish,
    TextDelta,
    as_stop_strings,
    prompt_text,
    split_prompts,
)
from redraft.server.errors import BadRequestError, checking_request
from redraft.server.fim import Gap
from redraft.server.infill import Infill
from redraft.server.models import Handlers, Models
from redraft.server.schema import (
    NOT_BOOLEAN,
    Body,
    CanvasFields,
    CausalOptions,
    Count,
    ExtraFile,
    InfillRequest,
    Penalty,
    Seed,
    Stop,
    Temperature,
    TextPrompts,
)
from redraft.server.service import Route, name_ignored_fields, read_body
from redraft.server.streams import end_with_error, sse_response, stream_list, to_json
from redraft.server.worker import Stream
from redraft.tokenizer.tokenizer import Tokenizer

STOP_TYPES = {"stop": "eos", "length": "limit", "deadline": "limit"}


class CompletionRequest(CanvasFields, CausalOptions):
    """POST /completion. Several prompts get a list of completions."""

    prompt: TextPrompts
    n_predict: Annotated[int, Field(ge=-1, le=1_000_000), NOT_BOOLEAN] = -1
    temperature: Temperature | None = None
    repeat_penalty: Penalty | None = None
    seed: Seed | None = None  # -1: a random one
    stop: Stop = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None  # is refused
    ignore_eos: bool = False
    response_fields: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    stream: bool = False


class TokenizeRequest(Body):
    """POST /tokenize."""

    content: str
    add_special: bool = False  # the BOS token comes first
    parse_special: bool = True  # special tokens in the text are special tokens
    with_pieces: bool = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    tokens: Annotated[list[Count], Field(fail_fast=True)]


def routes(models: Models) -> list[Route]:
    """Returns the routes of this wire format."""
    handlers = LlamaCppRoutes(models)
    return [
        Route("/completion", handlers.complete, CompletionRequest),
        Route("/infill", handlers.infill, InfillRequest),
        Route("/tokenize", handlers.tokenize, TokenizeRequest),
        Route("/detokenize", handlers.detokenize, DetokenizeRequest),
        Route("/props", handlers.props),
        Route("/slots", handlers.slots),
        Route("/health", handlers.health),
    ]


class LlamaCppRoutes(Handlers):
    """The handlers."""

    async def complete(self, request: Request) -> Response:
        """POST /completion."""
        body = await read_body(request, CompletionRequest)
        return await (await self.of(request, body))._complete(request, body)

    async def _complete(self, request: Request, body: CompletionRequest) -> Response:
        prompts = split_prompts(body.prompt)
        params = [self._completion_params(body, prompt) for prompt in prompts]
        check = choose_check(self.service.writer.sampler, body.check, has_draft=bool(params[0].draft))
        name_ignored_fields(request, ignored_settings(body, check))
        tokenizer = self.service.writer.tokenizer
        texts = [await asyncio.to_thread(prompt_text, tokenizer, prompt) for prompt in prompts]
        if body.n_predict == 0:  # the client warms up
            entries = [self._entry(number, text, "", None, body) for number, text in enumerate(texts)]
        elif body.stream:
            chunks = self._stream_chunks(await self.service.start(request, params), texts, body)
            return sse_response(end_with_error(chunks, error), end="")
        else:
            completions = await self.service.complete(request, params)
            entries = [
                self._entry(number, text, completion.text, completion.finish, body)
                for number, (text, completion) in enumerate(zip(texts, completions, strict=True))
            ]
        has_several = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
        content = entries if has_several else entries[0]
        return sse_response(stream_list(entries), end="") if body.stream else JSONResponse(content)

    def _completion_params(self, body: CompletionRequest, prompt: str | Sequence[int]) -> CompletionParams:
        if body.grammar:
            raise BadRequestError("grammar is not supported: send json_schema instead", "grammar")
        return CompletionParams(
            prompt=prompt,
            max_tokens=body.n_predict if body.n_predict > 0 else None,
            temperature=body.temperature,
            seed=None if body.seed == -1 else body.seed,
            stop_strings=as_stop_strings(body.stop),
            check=body.check,
            causal_settings=causal_settings(body),
            pattern={"schema": body.json_schema} if body.json_schema is not None else {},
            forbidden=tuple(self.service.writer.sampler.eos_token_ids) if body.ignore_eos else (),
            **canvas_params(body),
        )

    async def _stream_chunks(
        self, chunks: Stream[tuple[int, Chunk]], prompts: Sequence[str], body: CompletionRequest
    ) -> Stream[dict[str, Any]]:
        texts = [""] * len(prompts)
        async for index, chunk in chunks:
            if isinstance(chunk, TextDelta) and chunk.text:
                texts[index] += chunk.text
                yield {"index": index, "content": chunk.text, "tokens": [], "stop": False}
            elif isinstance(chunk, Finish):
                yield {**self._entry(index, prompts[index], texts[index], chunk, body), "content": ""}

    def _entry(self, index: int, prompt: str, text: str, finish: Finish | None, body: CompletionRequest) -> dict[str, Any]:
        """Returns a finished completion; without a finish, an empty one."""
        entry = completion_entry(text, finish.stats if finish else None)
        stop_string = finish.stop_string if finish else None
        entry |= {
            "index": index,
            "tokens": [],
            "id_slot": 0,
            "model": self.service.name,
            "prompt": prompt,
            "has_new_line": "\n" in text,
            "stop_type": "word" if stop_string else STOP_TYPES[finish.finish_reason] if finish else "limit",
            "stopping_word": stop_string or "",
        }
        entry["generation_settings"] |= {"n_predict": body.n_predict, "stop": list(as_stop_strings(body.stop))}
        return entry if body.response_fields is None else pick_fields(entry, body.response_fields)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize. A text that cannot fit the model's context is refused, as a prompt is."""
        body = await read_body(request, TokenizeRequest)
        if not body.parse_special:
            message = "parse_special false is not supported: special tokens in a text are always parsed"
            raise BadRequestError(message, "parse_special")
        service = (await self.of(request, body)).service
        tokenizer = service.writer.tokenizer
        limit = service.writer.model.config.max_position_embeddings

        def work(stop: threading.Event) -> Iterator[str]:
            with checking_request():
                encode = tokenizer.encode_prompt if body.add_special else tokenizer.encode
                ids: list[Any] = encode(body.content, limit)
            tokens = [{"id": token, "piece": piece_of(tokenizer, token)} for token in ids] if body.with_pieces else ids
            yield to_json({"tokens": tokens})

        return Response(await service.run_single(request, work), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize. More tokens than the model's context holds are refused."""
        body = await read_body(request, DetokenizeRequest)
        service = (await self.of(request, body)).service
        tokenizer = service.writer.tokenizer
        config = service.writer.model.config

        def work(stop: threading.Event) -> Iterator[str]:
            if len(body.tokens) > config.max_position_embeddings:
                limit = f"the model's limit of {config.max_position_embeddings:,}"
                raise BadRequestError(f"{len(body.tokens):,} tokens are more than {limit}: send fewer at once", "tokens")
            if (largest := max(body.tokens, default=0)) >= config.vocab_size:
                message = f"token {largest} is outside the vocabulary of {config.vocab_size}"
                raise BadRequestError(message, "tokens")
            yield to_json({"content": tokenizer.decode(body.tokens, keep_special=True)})

        return Response(await service.run_single(request, work), media_type="application/json")

    async def infill(self, request: Request) -> Response:
        """POST /infill. An editor that leaves before its answer, as for a newer one, has it stopped."""
        body = await read_body(request, InfillRequest)
        require_unchecked(body.check, "a gap")
        self.models.find_name(body.model)  # that it exists; warming up loads none
        if body.n_predict == 0 or not (body.input_prefix or body.prompt or body.input_suffix):  # an editor warms up
            return JSONResponse(response_body([], body))
        gap = Gap(body.input_prefix + body.prompt, body.input_suffix, context_of(body.input_extra))
        service = (await self.of(request, body)).service
        infills = await service.infill(
            request,
            gap,
            count=body.n_cmpl,
            max_tokens=body.n_predict if body.n_predict > 0 else None,
            temperature=body.temperature,
            seed=body.seed,
            seconds=body.t_max_predict_ms / 1e3 if body.t_max_predict_ms else None,
            stop_strings=as_stop_strings(body.stop),
            indent=body.n_indent,
            paragraph=True,
        )
        content = response_body(infills, body)
        return sse_response(stream_list([content]), end="") if body.stream else JSONResponse(content)

    async def props(self) -> dict[str, Any]:
        """GET /props, of the first model."""
        writer = self.service.writer
        return {
            "default_generation_settings": {
                "n_ctx": writer.model.config.max_position_embeddings,
                "n_predict": writer.sampler.max_new_tokens,
                "check": writer.sampler.check,
            },
            "total_slots": writer.engine.config.max_running,
            "model_path": self.service.name,
            "chat_template": writer.tokenizer.template or "",
            "can_chat": writer.tokenizer.can_chat,
            "modalities": {"vision": self.models.cards[self.service.name].takes_images, "audio": False},
        }

    async def slots(self) -> list[dict[str, Any]]:
        """GET /slots, of the first model: how many requests run, and nothing of what they are."""
        writer = self.service.writer
        sampler = writer.sampler
        running = len(writer.engine.scheduler.running)
        shared = {
            "n_ctx": writer.model.config.max_position_embeddings,
            "speculative": sampler.check != "off" and sampler.draft_length > 0,
        }
        return [
            {"id": number, **shared, "is_processing": number < running} for number in range(writer.engine.config.max_running)
        ]

    async def health(self) -> Response:
        """GET /health: 503 if the last step of some model failed."""
        services = self.models.services
        for service in services:
            if fault := service.writer.engine.fault:
                of_model = f" of {service.name}" if len(services) > 1 else ""
                body = {"status": "error", "error": f"the last step{of_model} failed: {fault}"}
                return JSONResponse(body, status_code=503)
        return JSONResponse({"status": "ok"})


def error(status: int, message: str) -> dict[str, Any]:
    """Returns the last event of a stream that failed."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"code": status, "message": message, "type": kind}}


def context_of(files: Sequence[ExtraFile]) -> str:
    """Returns other files as one text, each behind its name."""
    texts = [
        (f"# {file.filename}\n" if file.filename else "") + file.text.rstrip("\n") + "\n"
        for file in files
        if file.text.strip()
    ]
    return "\n".join(texts) + "\n" if texts else ""


def response_body(infills: Sequence[Infill], body: InfillRequest) -> Any:
    """Returns one object, or a list if the client asked for several."""
    entries = [completion_entry(infill.text, infill.stats) for infill in infills] or [completion_entry("", None)]
    if body.response_fields is not None:
        entries = [pick_fields(entry, body.response_fields) for entry in entries]
    return entries if body.n_cmpl > 1 else entries[0]


def completion_entry(text: str, stats: Stats | None) -> dict[str, Any]:
    """Returns a completion with its timings; without stats, one that took no step."""
    prompt_tokens = stats.prompt_tokens if stats else 0
    new_tokens = stats.new_tokens if stats else 0
    seconds = stats.seconds if stats else 0.0
    milliseconds = 1e3 * seconds
    timings = {
        "prompt_n": prompt_tokens,
        "prompt_ms": 0.0,
        "prompt_per_token_ms": 0.0,
        "prompt_per_second": 0.0,
        "predicted_n": new_tokens,
        "predicted_ms": round(milliseconds, 3),
        "predicted_per_token_ms": round(milliseconds / new_tokens, 3) if new_tokens else 0.0,
        "predicted_per_second": round(new_tokens / seconds, 3) if seconds else 0.0,
        **verification_fields([stats] if stats else []),
    }
    return {
        "content": text,
        "timings": timings,
        "tokens_cached": stats.reused if stats else 0,
        "tokens_predicted": new_tokens,
        "tokens_evaluated": prompt_tokens,
        "truncated": False,
        "stop": True,
        "generation_settings": {"seed": stats.seed if stats else None},
    }


def piece_of(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """Returns the text of a token; its bytes if they are not whole characters."""
    if token in tokenizer.special_tokens:
        return tokenizer.special_tokens[token]
    try:
        return tokenizer.bytes_of(token).decode()
    except UnicodeDecodeError:
        return list(tokenizer.bytes_of(token))


def pick_fields(entry: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Returns the fields that a client names, each under its path (timings/predicted_ms)."""
    return {path: value for path in paths if (value := _value_at(entry, path)) is not None}


def _value_at(entry: dict[str, Any], path: str) -> Any:
    value: Any = entry
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value
