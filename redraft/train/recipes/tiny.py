"""Trains the model in redraft/weights/tiny: 16M parameters, mixture of experts, stories and Python functions.

Reads data from the folder REDRAFT_DATA (default: data): stories/*.txt.xz, stories/ccby_storybooks.jsonl.xz and
code/pyfuncs_train.jsonl.xz. A step has 104,448 tokens. Cost: 0.535M tokens/s on one H200, after two and a half minutes of
compilation. The weights that ship were trained by the clock, 6,887 steps in 25 minutes
(benchmarks/results/train_tiny_h200_202611.md); the 5,000 steps below take 19 minutes.
"""

import os
from pathlib import Path

from redraft.config import FULL, SLIDING, ModelConfig, SamplerConfig
from redraft.train.config import TrainConfig
from redraft.train.data import DataConfig, Source
from redraft.train.loss import LossConfig
from redraft.train.optim import OptimConfig


def recipe(folder: Path) -> TrainConfig:
    """Returns the configuration."""
    texts = Path(os.environ.get("REDRAFT_DATA", "data"))
    stories = Source(
        files=tuple(str(texts / f"stories/stories_{n:02}.txt.xz") for n in range(8)),
        share=0.77,
        mid_start=0.5,
        prompt_share=0.3,
    )
    books = Source(files=(str(texts / "stories/ccby_storybooks.jsonl.xz"),), share=0.01, mid_start=0.5, prompt_share=0.3)
    functions = Source(files=(str(texts / "code/pyfuncs_train.jsonl.xz"),), share=0.22, text="t", prompt_share=0.3)
    model = ModelConfig(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=576,
        moe_intermediate_size=128,
        num_experts=4,
        top_k_experts=2,
        layer_types=((SLIDING,) * 3 + (FULL,)) * 2,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_global_key_value_heads=1,
        head_dim=64,
        global_head_dim=128,
        sliding_window=256,
        max_position_embeddings=4096,
        canvas_length=256,
        eos_token_ids=(1,),
        image_token_ids=(3, 4, 5),
    )
    sampler = SamplerConfig(
        canvas_length=256,
        canvas_lengths=(32, 64, 128, 256),
        max_new_tokens=256,
        max_steps=32,
        entropy_bound=1.0,
        t_min=0.5,
        t_max=0.5,
        confidence_threshold=0.05,
        eos_token_ids=(1,),
        quota=True,
        accept_at_end=True,
        spread=8,
        stops_last=True,
    )
    return TrainConfig(
        model=model,
        sampler=sampler,
        data=DataConfig(
            sources=(stories, books, functions),
            length=1088,
            short_fill=0.3,
            skip_bad=True,
            canvas_lengths=(64, 256, 32, 128),
        ),
        loss=LossConfig(t_power=1.5, span_noise=0.2),
        optim=OptimConfig(muon_lr=5e-3, adamw_lr=2.5e-3),
        steps=5000,
        rows=96,
        streams=2,
        precision="bfloat16",
        compile=True,
        prefetch=True,
        report_every=50,
        save_every=1000,
    )
