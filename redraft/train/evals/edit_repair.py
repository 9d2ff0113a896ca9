"""Edit repair: random tokens of a text are replaced, then the text is edited; counts errors repaired and tokens spoiled."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from redraft.config import SamplerConfig
from redraft.engine import Engine
from redraft.model.backbone import Backbone
from redraft.tasks.edit import redraft_tokens
from redraft.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class EditScores:
    """The result of editing texts with replaced tokens."""

    struck: int  # replaced tokens
    repaired: float  # share of the replaced tokens that are the original again
    noticed: float  # share of the replaced tokens that changed
    spoiled: float  # share of the other tokens that changed
    forwards: float  # per text


def score_edits(
    model: Backbone,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    sampler: SamplerConfig,
    *,
    share: float = 0.05,
    strength: float = 0.1,
    seed: int = 0,
) -> EditScores:
    """Replaces a share of the tokens by random ones, edits the texts, and compares."""
    engine = Engine(model)
    generator = torch.Generator().manual_seed(seed)
    textless = tokenizer.ids_without_text(model.config.vocab_size)
    replaced = repaired = noticed = spoiled = unchanged = forwards = 0
    for number, text in enumerate(texts):
        original = tokenizer.encode(text)
        is_replaced = torch.rand(len(original), generator=generator) < share
        noise = torch.randint(model.config.vocab_size, (len(original),), generator=generator)
        damaged = torch.where(is_replaced, noise, torch.tensor(original, dtype=torch.long)).tolist()
        options = {
            "strength": strength,
            "keep_positions": (),
            "forbidden": textless,
            "prompt": tokenizer.encode_prompt(""),
            "seed": seed + number,
        }
        edited, steps, _ = redraft_tokens(engine, damaged, sampler, **options)
        for before, bad, after in zip(original, damaged, edited, strict=True):
            if before == bad:
                unchanged += 1
                spoiled += after != before
            else:
                replaced += 1
                repaired += after == before
                noticed += after != bad
        forwards += steps
    return EditScores(
        struck=replaced,
        repaired=repaired / max(1, replaced),
        noticed=noticed / max(1, replaced),
        spoiled=spoiled / max(1, unchanged),
        forwards=forwards / max(1, len(texts)),
    )
