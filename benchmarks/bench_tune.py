"""Training an adapter at the released shape with random weights: tokens per second and peak memory, by base.

    python benchmarks/bench_tune.py [--quant none fp8 nvfp4 int4] [--rows 1] [--length 2048] [--steps 4]
        [--shape released|small]

Every base is measured with rank 16 on attention and dense MLP, and with rank 8 on these and the experts. A step is one
forward of [noisy | clean] with self-conditioning in half of the rows, its backward pass with recomputed layers, and AdamW.
The last line is JSON.
"""

import argparse
import gc
import json
import time
from dataclasses import replace
from typing import Any

import torch
from bench_engine import SHAPES
from random_weights import random_model

from redraft.config import ModelConfig
from redraft.model.lora import AdapterConfig, new_adapter
from redraft.model.masks import Layout
from redraft.model.quant import quantize_fp8
from redraft.train.loss import Batch, LossConfig, Objective, dense_masks, prepare, slice_masks
from redraft.train.optim import OptimConfig, Optimizer

ADAPTERS = {
    "rank 16, attention and dense": AdapterConfig(rank=16),
    "rank 8, attention, dense and experts": AdapterConfig(rank=8, targets=("attention", "dense", "experts")),
}


def random_batch(config: ModelConfig, rows: int, length: int, generator: torch.Generator) -> Batch:
    """Rows of one document each: a prompt of a quarter, then canvases."""
    ids_BL = torch.randint(config.vocab_size, (rows, length), generator=generator)
    positions_BL = torch.arange(length).expand(rows, -1)
    prompt = length // 4
    canvas = min(config.canvas_length, length // 4)
    starts_BL = torch.where(positions_BL < prompt, -1, prompt + (positions_BL - prompt) // canvas * canvas)
    return Batch(ids_BL, Layout(positions_BL, starts_BL, torch.zeros_like(ids_BL)))


def measure(model: Any, cfg: AdapterConfig, options: argparse.Namespace, quant: str | None) -> dict[str, Any]:
    """Some steps of one adapter."""
    device = model.device
    adapter = new_adapter(cfg, model.config).to(device)
    loss = LossConfig(balance_weight=0.0)
    objective = Objective(model, loss, adapter, recomputes=True)
    optimizer = Optimizer(adapter, OptimConfig(muon=False, adamw_lr=1e-4, ema=0.0, weight_decay=0.0))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses = []
    for step in range(options.steps + 1):
        if step == 1:
            wait(device)
            begin = time.perf_counter()
        generator = torch.Generator().manual_seed(step % 2)
        batch = random_batch(model.config, options.rows, options.length, generator)
        batch, noise = prepare(batch, replace(loss, self_condition=0.5), model.config.vocab_size, generator)
        batch = batch.map(lambda tensor: tensor.to(device))
        mask_of = dense_masks(model.config, batch.layout)
        noise = noise.to(device)
        found = objective(batch, noise, mask_of, slice_masks(mask_of, len(noise.temperature_R)))
        found.total.backward()
        optimizer.step(step, 1.0)
        losses.append(found.total.detach())
    wait(device)
    seconds = (time.perf_counter() - begin) / options.steps
    return {
        "quant": quant or "bf16",
        "parameters": adapter.parameter_count,
        "tokens_per_second": options.rows * options.length / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        "losses": [float(each) for each in losses],
    }


def wait(device: torch.device) -> None:
    """Waits for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measures all bases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", nargs="+", default=["none", "fp8", "nvfp4", "int4"])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="released")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SHAPES[options.shape]
    results = []
    for quant in options.quant:
        model = random_model(config, device, quant if quant in ("nvfp4", "int4") else None)
        if quant != "none":
            model = quantize_fp8(model)
        model.requires_grad_(False)
        for name, adapter in ADAPTERS.items():
            found = {"adapter": name, **measure(model, adapter, options, None if quant == "none" else quant)}
            results.append(found)
            speed = f"{found['tokens_per_second']:,.0f} tokens/s"
            print(f"{found['quant']}, {name}: {speed}, {found['peak_bytes'] / 1e9:.1f}e9 bytes")
        del model
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps({"rows": options.rows, "length": options.length, "results": results}))


if __name__ == "__main__":
    main()
