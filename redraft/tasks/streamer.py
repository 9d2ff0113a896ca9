"""Streamers of transformers: objects that receive the prompt, every draft and every committed canvas of a batch."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from redraft.config import SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion.events import Committed, Draft, Event, Finished
from redraft.diffusion.generate import generate
from redraft.diffusion.verified import generate_verified
from redraft.engine import Engine
from redraft.tasks.generation import GenerationOptions, start_from_draft
from redraft.tasks.text_events import EncodedPrompt
from redraft.tokenizer.tokenizer import Tokenizer


def run_with_streamer(
    engine: Engine,
    tokenizer: Tokenizer,
    encoded: Sequence[EncodedPrompt],
    cfg: SamplerConfig,
    seeds: list[int],
    options: GenerationOptions,
    constraints: Constraints | None,
    streamer: Any,
) -> Finished:
    """Runs `generate` instead of the engine: a streamer expects all rows of a batch at the same step."""
    if options.seconds is not None or options.stop is not None or options.replay is not None:
        raise ValueError("seconds, stop and replay do not work with a streamer; iterate over Writer.stream instead")
    model = engine.model
    prompts = [prompt.ids for prompt in encoded]
    images = [prompt.images for prompt in encoded]
    first_canvas_BC = start_from_draft(seeds, options.draft, tokenizer, cfg, model.config.vocab_size)
    settings: dict[str, Any] = {"adapter": engine.adapter}
    if cfg.check != "off":
        if options.draft or options.best_of > 1:
            raise ValueError("draft and best_of do not work with a streamer in checked and exact mode")
        if len(prompts) > 1:
            raise ValueError(f"with check {cfg.check!r} a streamer takes one prompt, got {len(prompts)}")
        settings |= {"seed": seeds[0], "constraints": constraints, "verifier": engine.verifier, "images": images[0]}
        events = generate_verified(model, prompts[0], cfg, **settings)
    else:
        settings |= {"seeds": seeds, "constraints": [constraints or Constraints()] * len(prompts), "images": images}
        events = generate(model, prompts, cfg, first_canvas_BC=first_canvas_BC, **settings)
    *_, end = feed_streamer(events, prompts, streamer)
    assert isinstance(end, Finished)
    return end


def feed_streamer(events: Iterator[Event], prompts: Sequence[Sequence[int]], streamer: Any) -> Iterator[Event]:
    """Passes events on and feeds a streamer as transformers does: prompt, drafts if it takes them, canvases, end."""
    if getattr(streamer, "_takes_logits", False):
        raise ValueError(f"{type(streamer).__name__} wants logits with every draft; redraft sends token ids")
    if not hasattr(streamer, "put") or not hasattr(streamer, "end"):
        raise ValueError(f"a streamer has the methods put and end, as those of transformers do, got {streamer!r}")
    longest = max(map(len, prompts))
    streamer.put(torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]))
    for event in events:
        if isinstance(event, Draft) and hasattr(streamer, "put_draft"):
            streamer.put_draft(event.ids_BC.detach().cpu().clone())
        elif isinstance(event, Committed):
            streamer.put(event.ids_BC.detach().cpu().clone())
        yield event
    streamer.end()
