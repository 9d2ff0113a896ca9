"""Fine-tunes `tiny` on Sudoku as text: the published DiffusionGemma Sudoku recipe with our small model.

Puzzles of 30 to 40 clues are made from the training lists in REDRAFT_DATA (sudoku/*_train.csv.xz) with random symmetries and
some digits of the solution added; the recipe writes them to the run's folder once. Cost: 18 minutes on one H200 for 86% of
boards, in three runs (benchmarks/results/train_tiny_sudoku_h200_202611.md has the commands).
"""

import os
from dataclasses import replace
from pathlib import Path

from redraft import checkpoint
from redraft.train import sudoku_data
from redraft.train.config import TrainConfig
from redraft.train.loss import LossConfig
from redraft.train.optim import OptimConfig
from redraft.train.recipe import load_recipe
from redraft.train.records import DataConfig, Source
from redraft.train.sudoku_data import PuzzleConfig


def recipe(folder: Path) -> TrainConfig:
    """Returns the configuration of `tiny` with its weights as the start and other data."""
    lists = Path(os.environ.get("REDRAFT_DATA", "data")) / "sudoku"
    puzzles = PuzzleConfig(
        files=tuple(str(lists / f"{name}_train.csv.xz") for name in ("17clue", "diabolical", "hardest11")),
        shares=(0.33, 0.33, 0.33),
        generated=64,
        cache_file=str(folder / "puzzles.npz"),
    )
    records = folder / "puzzles.jsonl.gz"
    if lists.is_dir():
        sudoku_data.write_text_records(puzzles, records, count=400_000, clues=(30, 40))
    base = load_recipe("tiny", folder)
    return replace(
        base,
        init=str(checkpoint.PACKAGED / "tiny"),
        data=DataConfig(sources=(Source(files=(str(records),)),), length=792, canvas_lengths=(96,)),
        loss=LossConfig(t_power=0.7, full_noise=0.25, ar_weight=0.1, on_policy=0.5, self_condition=0.75),
        optim=OptimConfig(muon_lr=4e-3, adamw_lr=2e-3, cooldown=0.5),
        sampler=replace(
            base.sampler,
            canvas_length=96,
            max_new_tokens=96,
            spread=0,
            stops_last=False,
            entropy_bound=0.05,
            t_min=0.25,
            t_max=0.25,
            confidence_threshold=0.01,
            stability_threshold=2,
        ),
        steps=2500,
        rows=128,
        streams=4,
    )
