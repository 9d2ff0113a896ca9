"""What a request costs beside others: the time of a step by canvases at once and by context, at the released shape.

Random weights never settle, so every canvas takes all its steps. A user waits for the steps of a canvas, so the time of a
step is what a user feels, and divided by the canvases it is what a request costs. The last line is JSON.

    python benchmarks/bench_curve.py [--quant none|fp8] [--canvases 1 2 4 8 16 32] [--contexts 512 4096 16384 65536 131072]
        [--most-tokens 1048576] [--steps 16] [--shape released|small]
    python benchmarks/bench_curve.py --draw FILE.json

Points with more tokens of context in all than `--most-tokens` are left out: their prompts take minutes, and their KV caches
do not fit. Prompts are prefilled once: the requests of a point continue those of the point before. `--draw` plots a last
line that was saved to a file, and writes the picture beside it.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_engine import SHAPES, wait
from random_weights import random_model
from rich.console import Console
from rich.table import Table

from redraft.config import EngineConfig, SamplerConfig
from redraft.diffusion.generate import Draft
from redraft.engine.engine import Engine
from redraft.model.kv_cache import KVCache
from redraft.model.quant import quantize_fp8


def time_step(engine: Engine, prompts: Sequence[list[int]], steps: int) -> float | None:
    """Milliseconds of a step in which every prompt has a canvas: the median of one canvas each. None without such a step."""
    config, device = engine.model.config, engine.model.device
    cfg = SamplerConfig(
        canvas_length=config.canvas_length,
        max_new_tokens=config.canvas_length,
        max_steps=steps,
        confidence_threshold=1e-9,
        eos_token_ids=(config.vocab_size - 4,),
    )
    for row, prompt in enumerate(prompts):
        engine.add(prompt, cfg, seed=row)
    at: list[float] = []
    while not engine.is_idle:
        drafting = sum(isinstance(event, Draft) for _, event in engine.step())
        wait(device)
        at = [*at, time.perf_counter()] if drafting == len(prompts) else at
    return 1e3 * statistics.median(b - a for a, b in pairwise(at)) if len(at) > 1 else None


def find_doubling(step_ms: dict[int, float]) -> float | None:
    """The number of canvases at which a step takes twice as long as with one, between the measured ones; None: never."""
    limit = 2 * step_ms[min(step_ms)]
    for (fewer, before), (more, after) in pairwise(sorted(step_ms.items())):
        if after >= limit:
            share = (limit - before) / (after - before)
            return 2 ** (math.log2(fewer) + share * math.log2(more / fewer))
    return None


def measure(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Times all points. Returns the time of a step by canvases, for each context."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SHAPES[options.shape]
    model = random_model(config, device, None)
    if options.quant == "fp8":
        model = quantize_fp8(model)
    rewind = 2 * config.canvas_length
    found = []
    table = Table("context", "canvases", "ms a step", "tokens/s of all", "ms of a step for each")
    for context in options.contexts:
        counts = [count for count in options.canvases if count * context <= options.most_tokens]
        chance = torch.Generator().manual_seed(context)
        prompts = torch.randint(10, config.vocab_size // 2, (max(counts), context), generator=chance).tolist()
        nbytes = KVCache.count_bytes(config, context + 4 * config.canvas_length, model.dtype, rewind)
        budget = 2**30 + 2 * max(counts) * nbytes  # a KV cache for each request, and one in the prefix cache
        limits = {"max_running": max(counts), "prefix_cache_entries": max(counts), "rewind": rewind}
        engine = Engine(model, EngineConfig(cache_bytes=budget, **limits))
        step_ms: dict[int, float] = {}
        for count in counts:
            time_step(engine, prompts[:count], 3)  # prefills new prompts, captures the graphs
            milliseconds = time_step(engine, prompts[:count], options.steps)
            if milliseconds is None:
                print(f"context {context:,}, {count} canvases: no step had all of them", flush=True)
                continue
            print(f"context {context:,}, {count} canvases: {milliseconds:,.1f} ms a step", flush=True)
            step_ms[count] = milliseconds
            speed = 1e3 * count * config.canvas_length / (options.steps * milliseconds)
            cells = (milliseconds, speed, milliseconds / count)
            table.add_row(f"{context:,}", str(count), *(f"{cell:,.1f}" for cell in cells))
        doubling = find_doubling(step_ms) if step_ms else None
        found.append({"context": context, "step_ms": step_ms, "doubles_at": doubling})
        del engine
    console.print(f"{'fp8' if options.quant == 'fp8' else 'bf16'}, {options.steps} steps a canvas", table)
    for one in found:
        at = "beyond what was measured" if one["doubles_at"] is None else f"at {one['doubles_at']:.1f} canvases"
        console.print(f"context {one['context']:,}: a user waits twice as long as alone {at}")
    return found


def draw(path: Path) -> None:
    """Plots the time of a step by canvases, a line for each context."""
    from matplotlib import pyplot as plt

    result = json.loads(path.read_text(encoding="utf-8"))
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for one in result["curves"]:
        counts = [int(count) for count in one["step_ms"]]
        axis.plot(counts, list(one["step_ms"].values()), marker="o", label=f"context {one['context']:,}")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlabel("canvases at once")
    axis.set_ylabel("milliseconds of a step")
    axis.legend()
    figure.savefig(path.with_suffix(".png"), dpi=120)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", choices=("none", "fp8"), default="none")
    parser.add_argument("--canvases", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096, 16384, 65536, 131072])
    parser.add_argument("--most-tokens", type=int, default=2**20)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="released")
    parser.add_argument("--draw", type=Path)
    options, console = parser.parse_args(), Console(width=120, highlight=False)
    if options.draw:
        draw(options.draw)
        return
    curves = measure(options, console)
    print(json.dumps({"shape": options.shape, "quant": options.quant, "steps": options.steps, "curves": curves}))


if __name__ == "__main__":
    main()
