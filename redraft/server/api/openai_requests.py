"""Requests of OpenAI's wire format: chat completions and completions become CompletionParams."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from redraft.constraints.errors import shorten
from redraft.server.canvas_params import canvas_params
from redraft.server.checks import causal_settings, require_unchecked
from redraft.server.completion import (
    JSON_OBJECT_SCHEMA,
    CompletionParams,
    as_stop_strings,
    template_message,
)
from redraft.server.errors import BadRequestError
from redraft.server.fim import Gap, find_gap
from redraft.server.images import text_of_content
from redraft.server.schema import ChatRequest, CompletionRequest, SamplingOptions
from redraft.server.tool_calls import choose_tools

UNSUPPORTED = (
    "grammar json_schema guided_grammar stop_token_ids functions function_call audio modalities structured_outputs".split()
)
FORBIDDING_BIAS = -100.0
TOKEN_ID = re.compile("[0-9]{1,9}")
MAX_ECHO = 1 << 20  # characters of prompts in all choices of an infill: a prefix may be longer than what the model reads
RESPONSE_FORMATS = "text, json_object, json_schema, regex or choice"
# Fields of CompletionParams that infill does not support, and the client's name for each.
NOT_FOR_INFILL = {
    "pattern": "response_format",
    "forbidden": "logit_bias",
    "logit_bias": "logit_bias",
    "sampler_settings": "diffusion settings",
    "draft": "diffusion_seed_canvas",
    "pins": "diffusion_pinned",
    "ignore_eos": "diffusion_read_only",
    "include_frames": "frames",
    "logprobs": "logprobs",
}


def chat_params(body: ChatRequest) -> CompletionParams:
    """Translates a chat completion."""
    enable_thinking = (body.chat_template_kwargs or {}).get("enable_thinking") is True
    params = CompletionParams(
        prompt=[template_message(message) for message in body.messages],
        max_tokens=body.max_completion_tokens or body.max_tokens,
        tools=choose_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls),
        think=enable_thinking or body.reasoning_effort not in (None, "none"),
        logprobs=chat_logprobs(body),
        **sampling_params(body),
    )
    if body.prediction is None:
        return params
    if params.draft is not None:
        message = "a canvas starts from a prediction or from diffusion_seed_canvas, not from both"
        raise BadRequestError(message, "prediction")
    return replace(params, draft=text_of_content(body.prediction.content, "prediction"))


def text_params(body: CompletionRequest, prompt: str | Sequence[int]) -> CompletionParams:
    """Translates a completion of one text, or of its token ids."""
    params = {**sampling_params(body), "logprobs": text_logprobs(body)}
    return CompletionParams(prompt=prompt, max_tokens=body.max_tokens or 16, **params)


def sampling_params(body: SamplingOptions) -> dict[str, Any]:
    """Translates the options that chat and text share into fields of CompletionParams."""
    for name in UNSUPPORTED:
        if (body.model_extra or {}).get(name) not in (None, "", [], {}):
            raise BadRequestError(f"{name} is not supported; response_format knows json_schema, regex and choice", name)
    options = body.stream_options
    biases = parse_logit_bias(body.logit_bias)
    return {
        "check": body.check,
        "causal_settings": causal_settings(body),
        "best_of": count_candidates(body) if body.best_of is not None else 1,
        "temperature": body.temperature,
        "seed": body.seed,
        "stop_strings": as_stop_strings(body.stop),
        "forbidden": tuple(token for token, bias in biases.items() if bias <= FORBIDDING_BIAS),
        "logit_bias": {token: bias for token, bias in biases.items() if bias > FORBIDDING_BIAS},
        "pattern": pattern_of(body),
        "include_frames": body.diffusing or bool(options and options.include_frames),
        **canvas_params(body),
    }


def chat_logprobs(body: ChatRequest) -> int | None:
    """Returns how many likely tokens come with each token; None without logprobs."""
    if body.top_logprobs and not body.logprobs:
        raise BadRequestError("top_logprobs come with logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def text_logprobs(body: CompletionRequest) -> int | None:
    """Returns how many likely tokens come with each token; None without logprobs."""
    if body.logprobs is None or body.logprobs is False:
        return None
    if body.echo:
        raise BadRequestError("logprobs of the prompt are not available: leave echo out", "echo")
    return int(body.logprobs)


def count_candidates(body: SamplingOptions) -> int:
    """Returns how many completions of each prompt are generated: `best_of`, of which `n` are returned, or `n`."""
    count = body.n or 1
    if body.best_of is None:
        return count
    if body.best_of < count:
        raise BadRequestError(f"best_of must be at least n, got best_of {body.best_of} and n {count}", "best_of")
    if body.best_of > 1 and body.stream:
        message = "best_of compares whole completions, so they cannot be streamed: leave stream or best_of out"
        raise BadRequestError(message, "best_of")
    return body.best_of


def parse_logit_bias(logit_bias: Mapping[str, Any] | None) -> dict[int, float]:
    """Returns the number that is added to each token's logit; -100 and less forbid the token in every mode."""
    biases = {}
    for token, bias in (logit_bias or {}).items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not TOKEN_ID.fullmatch(token) or not is_number or not bias <= -FORBIDDING_BIAS:
            message = f"logit_bias has token ids and numbers from -100 to 100, got {shorten(token)}: {shorten(bias)}"
            raise BadRequestError(message, "logit_bias")
        if int(token) in biases:
            raise BadRequestError(f"logit_bias names token {int(token)} twice: give one number for each", "logit_bias")
        biases[int(token)] = float(max(bias, FORBIDDING_BIAS))
    return biases


def pattern_of(body: SamplingOptions) -> dict[str, Any]:
    """Returns the pattern that the completion must match, under any of the names that clients use."""
    guided = {"regex": body.guided_regex, "choices": body.guided_choice, "schema": body.guided_json}
    pattern = {name: value for name, value in guided.items() if value is not None}
    return {**pattern, **pattern_of_format(body.response_format, "response_format")}


def pattern_of_format(response_format: Any, field: str) -> dict[str, Any]:
    """Returns the pattern of a response format, which stands in this field of the body."""
    match response_format or {"type": "text"}:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"schema": response_format.get("schema") or JSON_OBJECT_SCHEMA}  # llama.cpp's clients send a schema
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}} | {
            "type": "json_schema",
            "schema": dict(schema),
        }:
            return {"schema": schema}
        case {"type": "json_schema"}:
            raise BadRequestError(f"{field} json_schema needs a schema: {{json_schema: {{schema: {{...}}}}}}", field)
        case {"type": "regex"}:
            return {"regex": response_format.get("regex") or response_format.get("pattern")}
        case {"type": "choice"}:
            return {"choices": response_format.get("choices") or response_format.get("choice")}
        case other:
            kind = other.get("type") if isinstance(other, dict) else other
            raise BadRequestError(f"{field} can be {RESPONSE_FORMATS}, got {shorten(kind)}", field)


def find_gaps(body: CompletionRequest, prompts: Sequence[str | Sequence[int]]) -> list[Gap]:
    """Returns the gaps to infill: before the suffix, or between FIM sentinels in a prompt."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if body.suffix and len(texts) < len(prompts):
        raise BadRequestError("a suffix needs a text as the prompt, got token ids", "prompt")
    return [gap for text in texts if (gap := find_gap(text, body.suffix))]


def check_infill_options(body: CompletionRequest) -> None:
    """Raises BadRequestError for options that infill does not support."""
    require_unchecked(body.check, "a gap")
    if body.best_of not in (None, 1):
        raise BadRequestError("infill returns the likeliest of several lengths already: leave best_of out", "best_of")
    params = {**sampling_params(body), "logprobs": text_logprobs(body)}
    for name, client_name in NOT_FOR_INFILL.items():
        value = params.get(name)
        if value is not None if name == "logprobs" else value:
            raise BadRequestError(f"infill does not support {client_name}: leave that out", client_name)


def check_echo(gaps: Sequence[Gap], count: int, *, is_echoed: bool) -> None:
    """Refuses to repeat long prefixes in `count` choices of each gap."""
    size = count * sum(len(gap.prefix) for gap in gaps)
    if is_echoed and size > MAX_ECHO:
        message = f"echo would repeat {size:,} characters, at most {MAX_ECHO:,} are: leave it out, or ask for fewer choices"
        raise BadRequestError(message, "echo")
