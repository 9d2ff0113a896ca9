"""POST /v1/canvas/edit: redrafts the least likely tokens of a text in place."""

import threading
import time
from dataclasses import asdict
from itertools import chain
from typing import Any

from redraft.diffusion.generate import Committed, Draft, Stats
from redraft.server.api.canvas.events import (
    Events,
    begin_event,
    canvas_event,
    end_event,
    frame_event,
    last_seen_step,
    replay_of,
    sampler_settings,
    seed_of,
)
from redraft.server.errors import checking_request
from redraft.server.frames import FrameBuilder
from redraft.server.schema import CanvasEditRequest
from redraft.tasks.edit import Edited, stream_edit
from redraft.tasks.text_events import TextCommitted
from redraft.tokenizer.chat_parser import Parsed
from redraft.writer import Writer, to_messages


def stream_canvas_edit(writer: Writer, body: CanvasEditRequest, stop: threading.Event) -> Events:
    """Yields a frame for every step and a canvas event for every part of the text, which is edited canvas by canvas."""
    began = time.perf_counter()
    seed = seed_of(body.seed)
    tokenizer = writer.tokenizer
    with checking_request():
        prompt = (
            writer.encode_prompt(to_messages(f"{body.instruction}\n\n{body.text}"), stop=stop) if body.instruction else []
        )
        cfg = writer.sampler.changed(**sampler_settings(writer, body))
        options: dict[str, Any] = {"strength": body.strength, "keep": body.keep, "prompt": prompt, "seed": seed}
        options |= {"stop": stop, "candidates": body.candidates, "replay": replay_of(tokenizer, body)}
        events = stream_edit(writer.engine, tokenizer, body.text, cfg, **options)
        events = chain([next(events)], events)  # the checks run with the first step
    yield begin_event(writer, seed, "", check="off", max_steps=cfg.max_steps, canvas_length=cfg.canvas_length)
    frames = FrameBuilder(tokenizer, with_candidates=True)
    last_seen = last_seen_step(body)
    canvases = 0
    settled = 0
    for event in events:
        match event:
            case Draft() if (event.block, event.step) > last_seen:
                yield frame_event(frames, event)
            case Committed():
                frames = FrameBuilder(tokenizer, with_candidates=True)
                if int(event.steps_B[0]) > 0:  # something was redrafted
                    canvases += 1
                    settled += bool(event.settled_B[0])
                ids = event.ids_BC[0].tolist()
                parsed = Parsed(tokenizer.decode_fragment(ids))
                yield canvas_event(writer, TextCommitted.from_committed(event, parsed, shown=len(ids)))
            case Edited():
                stats = Stats(
                    seed=seed,
                    prompt_tokens=len(tokenizer.encode(body.text)),
                    new_tokens=sum(len(tokenizer.encode(change.new)) for change in event.changes),
                    canvases=canvases,
                    settled=settled,
                    steps=event.forwards,
                    commits=0,
                    seconds=time.perf_counter() - began,
                    prefill_seconds=0.0,
                )
                yield end_event("stop", event.text, stats, changes=[asdict(change) for change in event.changes])
