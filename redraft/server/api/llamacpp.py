"""llama.cpp's wire format: /infill as its editor plugins read it, /props, /health.

Timings are nested, or flat where a client names fields by path in `response_fields`.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from redraft.server.checks import require_unchecked, verification_fields
from redraft.server.completion import as_stop_strings
from redraft.server.fim import Gap
from redraft.server.infill import Infill
from redraft.server.schema import ExtraFile, InfillRequest
from redraft.server.service import Route, Service, program_of, read_body
from redraft.server.streams import sse_response, stream_list


def routes(service: Service) -> list[Route]:
    """Returns the routes of this wire format."""
    handlers = LlamaCppRoutes(service)
    return [
        Route("/infill", handlers.infill, InfillRequest),
        Route("/props", handlers.props),
        Route("/health", handlers.health),
    ]


class LlamaCppRoutes:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def infill(self, request: Request) -> Response:
        """POST /infill: an editor's newest request replaces its previous one."""
        body = await read_body(request, InfillRequest)
        require_unchecked(body.check, "a gap")
        if body.n_predict == 0 or not (body.input_prefix or body.prompt or body.input_suffix):  # an editor warms up
            return JSONResponse(response_body([], body))
        gap = Gap(body.input_prefix + body.prompt, body.input_suffix, context_of(body.input_extra))
        infills = await self.service.infill(
            request,
            gap,
            ("infill", program_of(request), body.id_slot),
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
        """GET /props."""
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
        }

    async def health(self) -> Response:
        """GET /health: 503 if the engine's last step failed."""
        fault = self.service.writer.engine.fault
        if not fault:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "error", "error": f"the last step failed: {fault}"}, status_code=503)


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
    entries = [completion_entry(infill) for infill in infills] or [completion_entry(None)]
    if body.response_fields is not None:
        paths = body.response_fields
        entries = [{path: value for path in paths if (value := _value_at(entry, path)) is not None} for entry in entries]
    return entries if body.n_cmpl > 1 else entries[0]


def completion_entry(infill: Infill | None) -> dict[str, Any]:
    """Returns a completion with its timings; None is an empty one."""
    prompt_tokens = infill.stats.prompt_tokens if infill else 0
    new_tokens = infill.stats.new_tokens if infill else 0
    seconds = infill.stats.seconds if infill else 0.0
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
        **verification_fields([infill.stats] if infill else []),
    }
    return {
        "content": infill.text if infill else "",
        "timings": timings,
        "tokens_cached": infill.stats.reused if infill else 0,
        "tokens_predicted": new_tokens,
        "tokens_evaluated": prompt_tokens,
        "truncated": False,
        "stop": True,
        "generation_settings": {"seed": infill.stats.seed if infill else None},
    }


def _value_at(entry: dict[str, Any], path: str) -> Any:
    value: Any = entry
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value
