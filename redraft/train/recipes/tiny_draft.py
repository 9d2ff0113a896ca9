"""Trains `tiny` to draft: short empty canvases behind any token, with the model's own causal half as the teacher.

Starts from redraft/weights/tiny and adds a draft head. Half of the rows are pages as in `tiny.py`; the other half are draft
rows, two thirds of their texts written by the model itself. Reads REDRAFT_DATA like `tiny.py`, and the model's own text from
the file REDRAFT_OWN_TEXT (default: own_text.jsonl in the run's folder), which `benchmarks/train_tiny_draft.py` samples
before it trains. Cost: a step has 104,448 tokens, as in `tiny.py`; meant for 15 to 20 minutes by the clock on one H200.
"""

import os
from dataclasses import replace
from pathlib import Path

from redraft import checkpoint
from redraft.train.config import TrainConfig
from redraft.train.draft_loss import DraftConfig
from redraft.train.optim import OptimConfig
from redraft.train.recipe import load_recipe
from redraft.train.records import DataConfig, Source

OWN_SHARE = 0.65  # of the documents of draft rows


def recipe(folder: Path) -> TrainConfig:
    """Returns the configuration of `tiny` with its weights as the start, a draft head, and draft rows."""
    base = load_recipe("tiny", folder)
    assert isinstance(base.data, DataConfig)
    own_text = Path(os.environ.get("REDRAFT_OWN_TEXT", folder / "own_text.jsonl"))
    corpus = tuple(replace(source, share=source.share * (1 - OWN_SHARE), prompt_share=0.0) for source in base.data.sources)
    own = Source(files=(str(own_text),), share=OWN_SHARE, own=True)
    return replace(
        base,
        init=str(checkpoint.PACKAGED / "tiny"),
        model=replace(base.model, draft_head_size=256),
        # Canvases of 16 end a text with at most 15 stop tokens of fill; another seed gives other texts than the pages.
        draft_data=replace(base.data, sources=(own, *corpus), canvas_lengths=(16,), seed=1),
        loss=replace(base.loss, draft=DraftConfig(rows=base.rows // 2, lengths=(8, 8, 8, 16), temperatures=(0.7, 0.7, 1.0))),
        optim=OptimConfig(muon_lr=1.7e-3, adamw_lr=8e-4, warmup=200, cooldown=0.9),
        sampler=replace(base.sampler, check="checked", draft_token=0, draft_length=7, tolerance=0.5, temperature=0.6),
        steps=10**6,
        max_seconds=1000.0,
        by_clock=True,
        save_every=500,
    )
