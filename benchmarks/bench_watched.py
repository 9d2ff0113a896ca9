"""What top probabilities and constraints cost: an answer of 1,024 tokens at the released shape. The last line is JSON.

python benchmarks/bench_watched.py
"""

import json
import time

import torch
from bench_engine import SHAPES
from random_weights import random_model

from redraft.config import EngineConfig, SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.engine import Engine

VARIANTS = {
    "plain": {},
    "watched, 5 candidates": {"candidates": 5},
    "a pin": {"constraints": Constraints(pins={3: 77})},
}


def main() -> None:
    """Prints tokens per second of each variant: the better of two runs after a warm-up run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, steps, new = (SHAPES["released"], 16, 1024) if device.type == "cuda" else (SHAPES["small"], 3, 64)
    engine = Engine(random_model(shape, device), EngineConfig(cache_bytes=2**31, prefix_cache_entries=0))
    never = {"confidence_threshold": 1e-9, "eos_token_ids": (shape.vocab_size - 4,)}  # no canvas settles or ends
    cfg = SamplerConfig(canvas_length=shape.canvas_length, max_new_tokens=new, max_steps=steps, **never)
    tokens_per_second = {}
    for name, options in VARIANTS.items():
        speeds = []
        for _ in range(3):
            began = time.perf_counter()
            request = engine.add(list(range(10, 10 + new // 2)), cfg, seed=1, **options)
            engine.run([request])
            speeds.append(new / (time.perf_counter() - began))
        tokens_per_second[name] = max(speeds[1:])
        print(f"{name}: {tokens_per_second[name]:.0f} tokens/s", flush=True)
    print(json.dumps({"device": device.type, "tokens_per_second": tokens_per_second}))


if __name__ == "__main__":
    main()
