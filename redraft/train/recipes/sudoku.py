"""Trains the model in redraft/weights/sudoku: 3.9M parameters that solve Sudoku and nothing else.

Reads puzzles from the folder REDRAFT_DATA (default: data), sudoku/{17clue,diabolical,hardest11}_train.csv.xz, and generates
120,000 more, which it caches in the run's folder. Cost: the weights that ship took two runs on one H200, 13 minutes with
these settings and 17 more from those weights with three unrolled steps
(benchmarks/results/train_sudoku_together_h200_202611.md).
"""

import os
from pathlib import Path

from redraft.config import FULL, SLIDING, ModelConfig, SamplerConfig
from redraft.tasks.sudoku import encoding
from redraft.train.config import TrainConfig
from redraft.train.optim import OptimConfig
from redraft.train.sudoku_data import PuzzleConfig


def recipe(folder: Path) -> TrainConfig:
    """Returns the configuration; generated puzzles are cached in `folder`."""
    puzzles = Path(os.environ.get("REDRAFT_DATA", "data")) / "sudoku"
    model = ModelConfig(
        vocab_size=encoding.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=384,
        moe_intermediate_size=32,
        num_experts=2,
        top_k_experts=1,
        layer_types=(SLIDING,) * 5 + (FULL,),
        num_attention_heads=8,
        num_key_value_heads=8,
        num_global_key_value_heads=8,
        head_dim=32,
        global_head_dim=32,
        sliding_window=256,
        max_position_embeddings=256,
        canvas_length=81,
        eos_token_ids=(1,),
        image_token_ids=(3, 4, 5),
    )
    sampler = SamplerConfig(
        canvas_length=81,
        max_new_tokens=81,
        max_steps=96,
        entropy_bound=0.3,
        t_min=0.6,
        t_max=0.6,
        confidence_threshold=0.02,
        eos_token_ids=(1,),
    )
    return TrainConfig(
        model=model,
        sampler=sampler,
        data=PuzzleConfig(
            files=tuple(str(puzzles / f"{name}_train.csv.xz") for name in ("17clue", "diabolical", "hardest11")),
            shares=(0.25, 0.3, 0.15),
            generated=120_000,
            cache_file=str(folder / "puzzles.npz"),
        ),
        optim=OptimConfig(muon_lr=5e-3, adamw_lr=2.5e-3, ema=0.999),
        steps=20_000,
        rows=2048,
        precision="bfloat16",
        compile=True,
        report_every=100,
        save_every=5000,
    )
