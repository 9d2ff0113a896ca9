"""Milliseconds of a forward by its width, at the released 26B-A4B shape with random weights: what a round of drafts costs.

A joint forward encodes clean tokens and denoises canvases behind them. A mixture of experts reads more weights the more
tokens a forward has, so a wide forward costs more there than in a dense model. Layers and head, as one CUDA graph. The last
line is JSON.

    python benchmarks/bench_joint.py [--shape released|small] [--model FOLDER] [--context 512]
"""

import argparse
import json
import time
from typing import Any

import torch
from bench_engine import SHAPES, wait
from random_weights import random_model

from redraft import checkpoint
from redraft.engine.cache_table import CacheTable
from redraft.engine.fused_layers import FusedLayers
from redraft.engine.graph_capture import capture_graph
from redraft.model.diffusion_gemma import DiffusionGemma

# Name: clean tokens, canvases, positions of a canvas. A canvas stands behind each of the last clean tokens.
LAYOUTS = {
    "1 token": (1, 0, 0),
    "8: 1 clean, a canvas of 7": (1, 1, 7),
    "8: 8 clean": (8, 0, 0),
    "16: 1 clean, a canvas of 15": (1, 1, 15),
    "16: 4 clean, 4 canvases of 3": (4, 4, 3),
    "32: 4 clean, 4 canvases of 7": (4, 4, 7),
    "72: 8 clean, 8 canvases of 8": (8, 8, 8),
    "256: a canvas": (0, 1, 256),
}


def time_layout(model: DiffusionGemma, fused: FusedLayers, layout: tuple[int, int, int], context: int) -> float:
    """Milliseconds of one forward of this layout."""
    clean, canvases, length = layout
    device = model.device
    cache = model.new_cache(1, context + 64, rewind=64)
    cache.advance([context + clean])
    table = CacheTable.empty(model, 1)
    table.fill([cache], [clean])
    canvas_table = CacheTable.empty(model, max(canvases, 1))
    canvas_table.fill([cache] * max(canvases, 1))
    generator = torch.Generator().manual_seed(0)
    clean_1S = torch.randint(10, model.config.vocab_size // 2, (1, max(clean, 1)), generator=generator).to(device)
    canvas_1JC = torch.randint(10, model.config.vocab_size // 2, (1, canvases, length), generator=generator).to(device)

    def body() -> None:
        if not clean:
            model.head(fused.denoise(canvas_1JC[0], None, canvas_table, context))
            return
        hidden_ND, canvas_ND = fused.joint(clean_1S, table, canvas_1JC if canvases else None, canvas_table, context)
        model.head(hidden_ND)
        if canvas_ND is not None:
            model.head(canvas_ND[:length])  # drafts come from one canvas

    with torch.inference_mode():
        replay = capture_graph(body, device, torch.cuda.graph_pool_handle() if device.type == "cuda" else None)
        repeats = 30 if device.type == "cuda" else 1
        for _ in range(3):
            replay()
        wait(device)
        began = time.perf_counter()
        for _ in range(repeats):
            replay()
        wait(device)
    return 1e3 * (time.perf_counter() - began) / repeats


def main() -> None:
    """Times all layouts and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="released")
    parser.add_argument("--model", help="a checkpoint instead of random weights")
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.model:
        model = checkpoint.load_model(checkpoint.find(options.model), device=device)
    else:
        model = random_model(SHAPES[options.shape], device)
    fused = FusedLayers(model)
    results: dict[str, Any] = {}
    print(f"{'positions':36} {'ms':>8} {'times one token':>16}")
    for name, layout in LAYOUTS.items():
        results[name] = time_layout(model, fused, layout, options.context)
        print(f"{name:36} {results[name]:8.3f} {results[name] / results['1 token']:16.2f}", flush=True)
    print(json.dumps({"model": options.model or options.shape, "context": options.context, "ms": results}))


if __name__ == "__main__":
    main()
