"""A byte-level model of 0.2M parameters that learns to count, to show that everything works.

Costs about a minute on two CPU cores. The data is made on the spot: lines such as "7 8 9 10 11".
"""

from pathlib import Path

from redraft.config import FULL, SLIDING, ModelConfig, SamplerConfig
from redraft.train.data import DataConfig, Source
from redraft.train.loop import TrainConfig
from redraft.train.loss import LossConfig
from redraft.train.optim import OptimConfig


def recipe(folder: Path) -> TrainConfig:
    """The whole configuration; the texts to learn from are written into the run's folder."""
    texts = folder / "counting.txt"
    if not texts.exists():
        texts.parent.mkdir(parents=True, exist_ok=True)
        lines = [" ".join(str(n) for n in range(first, first + 12)) for first in range(800)]
        texts.write_text("\n<|endofstory|>\n".join(lines), encoding="utf-8")
    model = ModelConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=4,
        top_k_experts=2,
        layer_types=(SLIDING, SLIDING, SLIDING, FULL),
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        sliding_window=64,
        max_position_embeddings=1024,
        canvas_length=32,
        eos_token_ids=(1,),
        image_token_ids=(261, 262, 263),
    )
    sampler = SamplerConfig(
        canvas_length=32,
        max_new_tokens=64,
        max_steps=16,
        entropy_bound=0.5,
        confidence_threshold=0.02,
        eos_token_ids=(1,),
        quota=True,
        accept_at_end=True,
    )
    return TrainConfig(
        model=model,
        sampler=sampler,
        data=DataConfig(sources=(Source(files=(str(texts),), given=0.5),), length=72, blocks=(16, 32)),
        loss=LossConfig(on_policy=0.25),
        optim=OptimConfig(warmup=20, ema=0.98),
        tokenizer="bytes",
        steps=400,
        rows=16,
        save_every=200,
    )
