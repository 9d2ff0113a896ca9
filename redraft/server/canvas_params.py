"""Canvas options of a request, under vLLM's names, as fields of CompletionParams. Every wire format may have them."""

from typing import Any

from pydantic import ValidationError

from redraft.constraints.errors import shorten
from redraft.server.errors import BadRequestError
from redraft.server.schema import CanvasFields, CanvasOptions
from redraft.server.service import bad_request_from


def canvas_params(body: CanvasFields) -> dict[str, Any]:
    """Translates vLLM's canvas options, which may stand in the body or in vllm_xargs, into fields of CompletionParams."""
    names = set(CanvasOptions.model_fields)
    in_body = body.model_dump(include=names, exclude_unset=True)
    in_xargs = body.vllm_xargs or {}
    if unknown := sorted(set(in_xargs) - names):
        raise BadRequestError(f"vllm_xargs has {shorten(unknown[0])}, which is not supported", "vllm_xargs")
    try:
        options = CanvasOptions.model_validate({**in_body, **in_xargs})
    except ValidationError as error:
        raise bad_request_from(error, "vllm_xargs") from None
    if options.diffusion_constrained:
        message = "diffusion_constrained is not supported: use response_format or guided_choice"
        raise BadRequestError(message, "diffusion_constrained")
    seed_canvas = options.diffusion_seed_canvas
    pinned = options.diffusion_pinned or []
    if pinned and (seed_canvas is None or not all(0 <= position < len(seed_canvas) for position in pinned)):
        raise BadRequestError("diffusion_pinned must name positions of diffusion_seed_canvas", "diffusion_pinned")
    settings = {
        "canvas_length": options.diffusion_canvas_length,
        "max_steps": options.diffusion_max_steps,
        "settle_prefix": options.diffusion_settle_prefix,
    }
    params: dict[str, Any] = {"sampler_settings": {name: value for name, value in settings.items() if value is not None}}
    if seed_canvas is not None:
        params["draft"] = tuple(seed_canvas)
        params["pins"] = {position: seed_canvas[position] for position in pinned}
    if options.diffusion_read_only:
        params["ignore_eos"] = True
    return params
