"""A byte-level model of 0.2M parameters that learns to write sentences like "the red fox sees a big dog."

Costs a minute and a half on two CPU cores: 400 steps, after which 0.39 nats a byte are left of the next-token loss (the
grammar's own entropy), 0.5 of the denoiser's, and nine of ten words it writes are words. The sentences are made on the
spot, from 24 words.
"""

import itertools
import random
from pathlib import Path

from redraft.config import FULL, SLIDING, ModelConfig, SamplerConfig
from redraft.train.data import DataConfig, Source
from redraft.train.loop import TrainConfig
from redraft.train.loss import LossConfig
from redraft.train.optim import OptimConfig

ARTICLES = ("the", "a", "my", "her")
QUALITIES = ("red", "big", "old", "shy", "wet", "fat")
BEINGS = ("fox", "dog", "cat", "hen", "cow", "owl", "bee", "pig")
DEEDS = ("sees", "likes", "hears", "finds", "greets", "feeds")


def sentences(seed: int = 0) -> list[str]:
    """Texts of three sentences each."""
    rng = random.Random(seed)
    whole = [f"{a} {q} {b}" for a, q, b in itertools.product(ARTICLES, QUALITIES, BEINGS)]
    return [" ".join(f"{rng.choice(whole)} {rng.choice(DEEDS)} {rng.choice(whole)}." for _ in range(3)) for _ in range(2000)]


def recipe(folder: Path) -> TrainConfig:
    """The whole configuration; the texts to learn from are written into the run's folder."""
    texts = folder / "sentences.txt"
    if not texts.exists():
        texts.parent.mkdir(parents=True, exist_ok=True)
        texts.write_text("\n<|endofstory|>\n".join(sentences()), encoding="utf-8")
    model = ModelConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=4,
        top_k_experts=2,
        layer_types=(SLIDING, SLIDING, FULL),
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        sliding_window=64,
        max_position_embeddings=1024,
        canvas_length=32,
        eos_token_ids=(1,),
        image_token_ids=(3, 4, 5),
    )
    sampler = SamplerConfig(
        canvas_length=32,
        max_new_tokens=96,
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
        data=DataConfig(sources=(Source(files=(str(texts),), given=0.5),), length=104, blocks=(16, 32)),
        loss=LossConfig(t_power=1.5),
        optim=OptimConfig(muon_lr=1.5e-2, adamw_lr=6e-3, warmup=20, ema=0.98),
        tokenizer="bytes",
        steps=400,
        rows=16,
        save_every=200,
    )
