"""Trains a byte-level model of 0.1M parameters that writes sentences like "the big fox saw our old hen."

Cost: about half a minute on two CPU cores, 140 steps. The next-token loss then is 0.26 nats per byte, which is the entropy
of the grammar, the denoiser's loss is below 0.65, and three of four words it writes are words of the grammar. The recipe
makes the sentences itself, from 14 words of three letters. In each word class no two words share a letter at the same place,
so a single letter identifies its word.
"""

import itertools
import random
from pathlib import Path

from redraft.config import FULL, SLIDING, ModelConfig, SamplerConfig, write_text
from redraft.train.config import TrainConfig
from redraft.train.data import DataConfig, Source
from redraft.train.loss import LossConfig
from redraft.train.optim import OptimConfig

DETERMINERS = ("the", "our")
ADJECTIVES = ("big", "shy", "fat", "old")
NOUNS = ("fox", "cat", "hen", "pig")
VERBS = ("saw", "met", "hid", "ate")


def sentences(seed: int = 0) -> list[str]:
    """Returns 2,000 random sentences."""
    rng = random.Random(seed)
    phrases = [" ".join(words) for words in itertools.product(DETERMINERS, ADJECTIVES, NOUNS)]
    return [f"{rng.choice(phrases)} {rng.choice(VERBS)} {rng.choice(phrases)}." for _ in range(2000)]


def recipe(folder: Path) -> TrainConfig:
    """Returns the configuration; writes the sentences into the run's folder."""
    texts = folder / "sentences.txt"
    if not texts.exists():
        texts.parent.mkdir(parents=True, exist_ok=True)
        write_text(texts, "\n<|endofstory|>\n".join(sentences()))
    model = ModelConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=4,
        top_k_experts=2,
        layer_types=(SLIDING, FULL),
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
        canvas_lengths=(16, 32),
        max_new_tokens=32,
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
        data=DataConfig(sources=(Source(files=(str(texts),), prompt_share=0.5),), length=42, canvas_lengths=(16, 32)),
        loss=LossConfig(t_power=1.5),
        optim=OptimConfig(muon_lr=3e-2, adamw_lr=1.2e-2, warmup=10, ema=0.95),
        tokenizer="bytes",
        steps=140,
        rows=16,
        save_every=100,
    )
