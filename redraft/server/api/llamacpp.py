"""llama.cpp's wire: /infill as its editors read it, timings nested or, where they ask for fields by path, flat; /props."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from redraft.server.completion import stops_of
from redraft.server.fim import Hole
from redraft.server.infill import Put
from redraft.server.schema import Extra, InfillRequest
from redraft.server.service import Route, Service, client_of, each, read, sse


def routes(service: Service) -> list[Route]:
    """All of them."""
    one = Llama(service)
    return [Route("/infill", one.infill, InfillRequest), Route("/props", one.props), Route("/health", one.health)]


class Llama:
    """What the paths do."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def infill(self, request: Request) -> Response:
        """POST /infill: the newest of an editor's requests takes the place of the one before."""
        body = await read(request, InfillRequest)
        if body.n_predict == 0 or not (body.input_prefix or body.prompt or body.input_suffix):  # an editor warms up
            return JSONResponse(answer([], body))
        hole = Hole(body.input_prefix + body.prompt, body.input_suffix, context(body.input_extra))
        found = await self.service.put(
            request,
            hole,
            ("infill", client_of(request), body.id_slot),
            count=body.n_cmpl,
            max_tokens=body.n_predict if body.n_predict > 0 else None,
            temperature=body.temperature,
            seed=body.seed,
            seconds=body.t_max_predict_ms / 1e3 if body.t_max_predict_ms else None,
            stops=stops_of(body.stop),
            indent=body.n_indent,
            paragraph=True,
        )
        whole = answer(found, body)
        return sse(each([whole]), end="") if body.stream else JSONResponse(whole)

    async def props(self) -> dict[str, Any]:
        """GET /props."""
        writer = self.service.writer
        settings = {"n_ctx": writer.model.config.max_position_embeddings, "n_predict": writer.sampler.max_new_tokens}
        slots, template = writer.engine.config.max_running, writer.tokenizer.template or ""
        head = {"default_generation_settings": settings, "total_slots": slots}
        return {**head, "model_path": self.service.name, "chat_template": template}

    async def health(self) -> Response:
        """GET /health: whether the last step of the engine was made."""
        fault = self.service.writer.engine.fault
        if not fault:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "error", "error": f"the last step failed: {fault}"}, status_code=503)


def context(extra: Sequence[Extra]) -> str:
    """Other files, each behind its name."""
    named = [
        (f"# {one.filename}\n" if one.filename else "") + one.text.rstrip("\n") + "\n" for one in extra if one.text.strip()
    ]
    return "\n".join(named) + "\n" if named else ""


def answer(found: Sequence[Put], body: InfillRequest) -> Any:
    """One object, or a list of them where several were asked for."""
    whole = [one_answer(one) for one in found] or [one_answer(None)]
    if body.response_fields is not None:
        whole = [{path: value for path in body.response_fields if (value := _at(one, path)) is not None} for one in whole]
    return whole if body.n_cmpl > 1 else whole[0]


def one_answer(one: Put | None) -> dict[str, Any]:
    """A completion with its timings."""
    read, new, seconds = (one.stats.prompt_tokens, one.stats.new_tokens, one.stats.seconds) if one else (0, 0, 0.0)
    spent = 1e3 * seconds
    timings = {
        "prompt_n": read,
        "prompt_ms": 0.0,
        "prompt_per_token_ms": 0.0,
        "prompt_per_second": 0.0,
        "predicted_n": new,
        "predicted_ms": round(spent, 3),
        "predicted_per_token_ms": round(spent / new, 3) if new else 0.0,
        "predicted_per_second": round(new / seconds, 3) if seconds else 0.0,
    }
    text = one.text if one else ""
    return {
        "content": text,
        "timings": timings,
        "tokens_cached": one.stats.reused if one else 0,
        "tokens_predicted": new,
        "tokens_evaluated": read,
        "truncated": False,
        "stop": True,
        "generation_settings": {"seed": one.stats.seed if one else None},
    }


def _at(whole: dict[str, Any], path: str) -> Any:
    found: Any = whole
    for part in path.split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found
