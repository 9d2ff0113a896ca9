"""A second phase for redraft/weights/tiny: more Python, more holes, and the denoiser before the encoder.

Starts from the weights that `tiny` left. Reads REDRAFT_DATA as `tiny` does, five of its eight files of stories. The rates
fall from the first step to the last. Cost: by the clock, 800 seconds on one H200
(benchmarks/results/train_tiny_more_h200_202611.md).
"""

from dataclasses import replace
from pathlib import Path

from redraft.train import recipes
from redraft.train.loop import TrainConfig
from redraft.train.loss import LossConfig
from redraft.train.optim import OptimConfig


def recipe(folder: Path) -> TrainConfig:
    """The first phase's configuration with what changes."""
    first = recipes.load("tiny", folder)
    stories, books, functions = first.data.sources
    sources = (replace(stories, files=stories.files[:5], share=0.44), books, replace(functions, share=0.55))
    return replace(
        first,
        init="redraft/weights/tiny",
        data=replace(first.data, sources=sources, seed=1),
        loss=LossConfig(t_power=1.5, holes=0.5, ar_weight=0.3),
        optim=OptimConfig(muon_lr=3e-3, adamw_lr=1.5e-3, cooldown=1.0),
        seed=1,
        steps=100_000,
        max_seconds=800.0,
        by_clock=True,
    )
