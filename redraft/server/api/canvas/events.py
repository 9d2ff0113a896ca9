"""What the endpoints share: prompts and constraints out of a body, and the events of the response."""

import math
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from redraft.constraints.constraints import ConstraintEdit
from redraft.diffusion.generate import Draft, Stats
from redraft.engine import Intervention, Replay
from redraft.server.checks import step_settings, temperature_settings
from redraft.server.completion import join_messages, template_message
from redraft.server.errors import BadRequestError
from redraft.server.frames import Frame, FrameBuilder, candidates_of
from redraft.server.schema import (
    AutoregressiveRequest,
    CanvasRequest,
    ConstraintFields,
    DecideRequest,
    PositionedToken,
    ReplayRequest,
    WatchedRequest,
)
from redraft.tasks.text_events import TextCommitted
from redraft.tokenizer.tokenizer import Message, Tokenizer
from redraft.writer import Writer, new_seed

Events = Iterator[dict[str, Any]]
MAX_POSITIONED_TOKENS = 4096  # in the pins, or in the bans, of a request or of one intervention


def check_one_input(*inputs: Any) -> None:
    """Raises BadRequestError unless exactly one input is given."""
    if sum(given is not None for given in inputs) != 1:
        raise BadRequestError("give exactly one of prompt, messages, and text with gaps", "prompt")


def prompt_of(writer: Writer, body: CanvasRequest | AutoregressiveRequest | DecideRequest) -> str | Sequence[Message]:
    """Returns a text or messages; for a model without a chat template, messages become a text."""
    if body.messages is None:
        return str(body.prompt)
    messages = [template_message(message) for message in body.messages]
    return messages if writer.tokenizer.can_chat else join_messages(messages)


def seed_of(seed: int | None) -> int:
    """Returns the seed of a request, or a fresh one."""
    return seed if seed is not None else new_seed()


def sampler_settings(writer: Writer, body: WatchedRequest, check: str = "off") -> dict[str, Any]:
    """Returns the sampler settings of a request that runs in this mode."""
    settings: dict[str, Any] = temperature_settings(writer.sampler.changed(check=check), body.temperature)
    if body.max_steps:
        settings["max_steps"] = body.max_steps
    return step_settings(check, settings)


def constraint_edit(tokenizer: Tokenizer, body: ConstraintFields, free: Sequence[int] = ()) -> ConstraintEdit:
    """Returns pins and bans by token id."""
    pins = dict(_positioned_ids(tokenizer, body.pins, "pins"))
    bans = tuple(_positioned_ids(tokenizer, body.bans, "bans"))
    return ConstraintEdit(pins=pins, bans=bans, free=tuple(free))


def _positioned_ids(tokenizer: Tokenizer, tokens: Sequence[PositionedToken], param: str) -> list[tuple[int, int]]:
    pairs = []
    for token in tokens:
        if token.id is not None and token.text is None:
            ids = [token.id]
        elif token.text is not None and token.id is None:
            ids = tokenizer.encode(token.text)
        else:
            raise BadRequestError(f"an entry of {param} has either an id or a text, at position {token.position}", param)
        if not ids:
            raise BadRequestError(f"the text at position {token.position} is empty", param)
        pairs += list(enumerate(ids, start=token.position))
        if len(pairs) > MAX_POSITIONED_TOKENS:
            raise BadRequestError(f"{param} have more than {MAX_POSITIONED_TOKENS:,} tokens: shorten their texts", param)
    return pairs


def replay_of(tokenizer: Tokenizer, body: ReplayRequest) -> Replay:
    """Returns the committed canvases and the interventions of a run that is resumed."""
    interventions = [
        Intervention(request.block, request.step, constraint_edit(tokenizer, request, request.free))
        for request in body.interventions
    ]
    return Replay(tuple(map(tuple, body.canvases)), tuple(interventions))


def last_seen_step(body: ReplayRequest) -> tuple[int, int]:
    """Returns block and step of the last frame that the client has."""
    return (body.resume_at.block, body.resume_at.step) if body.resume_at else (-1, 0)


def begin_event(writer: Writer, seed: int, prefix: str, **fields: Any) -> dict[str, Any]:
    """The first event. `prefix` is the text before the canvas."""
    return {"type": "begin", "seed": seed, "prefix": prefix, "eos_token_ids": list(writer.sampler.eos_token_ids), **fields}


def frame_event(frames: FrameBuilder, event: Draft) -> dict[str, Any]:
    """A denoising step, or a round of checked mode: the tokens that changed."""
    return frame_fields(frames.build(event))


def frame_fields(frame: Frame) -> dict[str, Any]:
    """A frame as an event."""
    return {"type": "frame", **{name: value for name, value in vars(frame).items() if name != "text"}}


def canvas_event(writer: Writer, event: TextCommitted) -> dict[str, Any]:
    """A committed canvas: all token ids, and the texts of the tokens that belong to the completion.

    In checked mode it has the probabilities that the causal half gives the tokens, and its likeliest tokens.
    """
    ids = event.ids_BC[0].tolist()
    probabilities: dict[str, Any] = {}
    if event.logprobs:
        probabilities["probabilities"] = [round(math.exp(logprob), 4) for logprob in event.logprobs]
        probabilities["candidates"] = candidates_of(writer.tokenizer, event)
    return {
        "type": "canvas",
        "block": event.block,
        "ids": ids,
        "texts": [writer.tokenizer.token_text(token) for token in ids[: event.shown]],
        "text": event.text,
        "reasoning": event.reasoning,
        "settled": bool(event.settled_B[0]),
        "steps": int(event.steps_B[0]),
        **probabilities,
    }


def end_event(finish_reason: str, text: str, stats: Stats, **fields: Any) -> dict[str, Any]:
    """The last event. The route counts `stats` for /metrics, and sends timings in their place."""
    return {"type": "end", "finish_reason": finish_reason, "text": text, **fields, "stats": stats}


def memory_of(device: torch.device) -> dict[str, int | None]:
    """Bytes that this process holds in main memory and on its GPU; None where that is unknown or there is no GPU."""
    on_device = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
    try:
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return {"process": None, "device": on_device}
    return {"process": resident_pages * mmap.PAGESIZE, "device": on_device}
