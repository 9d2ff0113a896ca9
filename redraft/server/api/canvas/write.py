"""POST /v1/canvas: continues a text, answers messages, or fills gaps marked [[ ]] in a text."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import Draft, Finished, Stats
from redraft.engine import Stopped
from redraft.server.api.canvas.events import (
    Events,
    begin_event,
    canvas_event,
    check_one_input,
    constraint_edit,
    end_event,
    frame_event,
    frame_fields,
    last_seen_step,
    prompt_of,
    replay_of,
    sampler_settings,
    seed_of,
)
from redraft.server.checks import causal_settings, choose_check, require_unchecked
from redraft.server.errors import BadRequestError, checking_request
from redraft.server.frames import ExactFrames, FrameBuilder
from redraft.server.images import NO_IMAGES, ServedImages
from redraft.server.schema import CanvasRequest
from redraft.tasks import infill
from redraft.tasks.generation import GenerationOptions
from redraft.tasks.infill import Filled, Infiller
from redraft.tasks.text_events import TextCommitted, TextEvent
from redraft.writer import Prompt, Writer, is_text_prompt

MAX_GAP_TOKENS = 32  # of a gap whose length is not given


def stream_canvas(writer: Writer, body: CanvasRequest, stop: threading.Event, images: ServedImages = NO_IMAGES) -> Events:
    """Yields the events of a request."""
    check_one_input(body.prompt, body.messages, body.text)
    if body.text is None:
        return stream_text(writer, body, stop, images)
    require_unchecked(body.check, "a gap")
    for name in ("max_tokens", "draft"):
        if getattr(body, name) is not None:
            raise BadRequestError(f"the length of a text with gaps is fixed: leave {name} out", name)
    with checking_request():
        has_open_lengths = None in infill.parse_template(body.text).lengths
    return stream_gaps(writer, body, stop) if has_open_lengths else stream_text(writer, body, stop, images)


@dataclass(frozen=True)
class _Plan:
    """What the model gets: the prompt, the text shown before the canvas, constraints and sampler settings."""

    prompt: Prompt
    prefix: str
    constraints: Constraints
    max_tokens: int | None
    check: str
    settings: dict[str, Any]


def _check_of(writer: Writer, body: CanvasRequest) -> str:
    """The mode of a request. Without a `check`, gaps are not checked, nor are runs that are steered or resumed."""
    is_steered = bool(body.canvases or body.interventions)
    if body.check is None and (body.text is not None or is_steered):
        return "off"
    return choose_check(writer.sampler, body.check, has_draft=bool(body.draft))


def _plan(writer: Writer, body: CanvasRequest) -> _Plan:
    check = _check_of(writer, body)
    settings = sampler_settings(writer, body, check)
    if check != "off":
        settings |= causal_settings(body)
    if body.canvas_length:
        settings["canvas_length"] = body.canvas_length
    forbidden = tuple(body.forbidden)
    if body.text is None:
        prompt = prompt_of(writer, body)
        prefix = prompt if isinstance(prompt, str) else ""
        return _Plan(prompt, prefix, Constraints(forbidden=forbidden), body.max_tokens, check, settings)
    infiller = Infiller(writer.engine, writer.tokenizer)
    prefix, ids, cfg, constraints = infiller.build_request(
        infill.parse_template(body.text), writer.sampler.changed(**settings)
    )
    settings["canvas_length"] = cfg.canvas_length
    constraints = replace(constraints, forbidden=(*constraints.forbidden, *forbidden))
    return _Plan(ids, prefix, constraints, cfg.max_new_tokens, check, settings)


def stream_text(writer: Writer, body: CanvasRequest, stop: threading.Event, images: ServedImages) -> Events:
    """Continues a text, answers messages, or fills gaps of given lengths, all on one canvas."""
    seed = seed_of(body.seed)
    with checking_request():
        plan = _plan(writer, body)
        if body.think and is_text_prompt(plan.prompt):
            raise BadRequestError("think needs messages and a model with a chat template: leave think out", "think")
        options = GenerationOptions(
            seed=seed,
            check=plan.check,
            max_tokens=plan.max_tokens,
            constraints=plan.constraints.apply_edit(constraint_edit(writer.tokenizer, body)),
            replay=replay_of(writer.tokenizer, body),
            draft=body.draft or None,
            think=body.think,
            candidates=body.candidates,
            drafts=False,
            stop=stop,
            regex=body.regex,
            schema=body.schema_,
            choices=body.choices,
            sampler=plan.settings,
        )
        prompt = images.encode(writer, plan.prompt, options)
        events = writer.stream(prompt, options)
        (cfg,), _ = writer.plan([prompt.ids], options)
    max_steps = cfg.draft_steps if cfg.check == "checked" else cfg.max_steps
    limits = {"canvas_length": cfg.canvas_length, "max_steps": max_steps, "max_tokens": cfg.max_new_tokens}
    yield begin_event(writer, seed, plan.prefix, check=cfg.check, **limits)
    if cfg.check == "exact":
        yield from _exact_events(writer, events, cfg.canvas_length)
    else:
        yield from _text_events(writer, events, body, plan.prefix if body.text is not None else "")


def _text_events(writer: Writer, events: Iterator[TextEvent], body: CanvasRequest, text: str) -> Events:
    """Translates the Writer's events. `text` is the beginning of the final text."""
    frames = FrameBuilder(writer.tokenizer, with_candidates=True)
    last_seen = last_seen_step(body)
    finished: Finished | None = None
    for event in events:
        match event:
            case Draft() if (event.block, event.step) > last_seen:
                yield frame_event(frames, event)
            case TextCommitted():
                text += event.text
                if event.block >= len(body.canvases):
                    yield canvas_event(writer, event)
                frames = FrameBuilder(writer.tokenizer, with_candidates=True)
            case Finished():
                finished = event
    if finished is None:
        raise Stopped
    yield end_event(finished.reasons[0], text, finished.stats[0])


def _exact_events(writer: Writer, events: Iterator[TextEvent], canvas_length: int) -> Events:
    """Translates the events of exact mode: a frame for every round, and a canvas whenever it is full.

    A round that ends one canvas and begins the next adds all its text to the first of them.
    """
    frames = ExactFrames(writer.tokenizer, canvas_length)
    text = ""
    shown = 0  # tokens of the completion so far
    blocks: list[tuple[str, str]] = [("", "")]  # text and reasoning of each canvas
    finished: Finished | None = None
    for event in events:
        if isinstance(event, TextCommitted):
            text += event.text
            shown += event.shown
            blocks[-1] = (blocks[-1][0] + event.text, blocks[-1][1] + event.reasoning)
            for frame in frames.build(event):
                yield frame_fields(frame)
            while len(frames.ids) >= len(blocks) * canvas_length:
                yield _exact_canvas(writer, frames, len(blocks) - 1, shown, *blocks[-1])
                blocks.append(("", ""))
        elif isinstance(event, Finished):
            finished = event
    if finished is None:
        raise Stopped
    if len(frames.ids) > (len(blocks) - 1) * canvas_length:
        yield _exact_canvas(writer, frames, len(blocks) - 1, shown, *blocks[-1])
    yield end_event(finished.reasons[0], text, finished.stats[0])


def _exact_canvas(writer: Writer, frames: ExactFrames, block: int, shown: int, text: str, reasoning: str) -> dict[str, Any]:
    """The canvas event of exact mode."""
    begin = block * frames.canvas_length
    ids = frames.ids[begin : begin + frames.canvas_length]
    texts = [writer.tokenizer.token_text(token) for token in ids[: max(0, shown - begin)]]
    head = {"type": "canvas", "block": block, "ids": ids, "texts": texts}
    return {**head, "text": text, "reasoning": reasoning, "settled": True, "steps": 0}


def stream_gaps(writer: Writer, body: CanvasRequest, stop: threading.Event) -> Events:
    """Fills gaps of which some have no length, one after another. The block of a frame is the number of the gap."""
    replay_fields = (body.canvases, body.interventions, body.pins, body.bans, body.forbidden, body.resume_at)
    other_fields = (body.canvas_length, body.think, body.regex, body.schema_, body.choices)
    if any(replay_fields) or any(other_fields):
        message = "only gaps of a given length can have constraints or interventions: mark each as [[ 8 ]]"
        raise BadRequestError(message, "text")
    began = time.perf_counter()
    seed = seed_of(body.seed)
    tokenizer = writer.tokenizer
    with checking_request():
        template = infill.parse_template(str(body.text))
        cfg = writer.sampler.changed(**sampler_settings(writer, body))
        options: dict[str, Any] = {"seed": seed, "stop": stop, "candidates": body.candidates, "longest": MAX_GAP_TOKENS}
        events = Infiller(writer.engine, tokenizer).stream(template, cfg, **options)
        events = chain([next(events)], events)  # the checks run with the first step
    yield begin_event(writer, seed, template.texts[0], check="off", max_steps=cfg.max_steps, canvas_length=0)
    gap = -1
    frames = FrameBuilder(tokenizer, with_candidates=True)
    for event in events:
        if isinstance(event, Draft):
            if event.step == 1 and event.block == 0:
                gap += 1
                frames = FrameBuilder(tokenizer, with_candidates=True)
            yield frame_event(frames, replace(event, block=gap))
            continue
        (filled,) = event
        stats = _stats_of(writer, filled, template, time.perf_counter() - began)
        lengths = [len(tokenizer.encode(text)) for text in filled.gaps]
        yield end_event("stop", filled.text, stats, gaps=filled.gaps, texts=template.texts, lengths=lengths)


def _stats_of(writer: Writer, filled: Filled, template: infill.Template, seconds: float) -> Stats:
    count = len(filled.gaps)
    return Stats(
        seed=filled.seed,
        prompt_tokens=sum(len(writer.tokenizer.encode(text)) for text in template.texts),
        new_tokens=sum(len(writer.tokenizer.encode(text)) for text in filled.gaps),
        canvases=count,
        settled=count if filled.settled else 0,
        steps=filled.forwards,
        commits=0,
        seconds=seconds,
        prefill_seconds=0.0,
    )
