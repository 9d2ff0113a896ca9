"""The engine at the released 26B-A4B shape with random weights: output tokens per second, and where a step's time goes.

Every canvas takes all its steps, because random weights never settle. Seconds are those of the whole run: prefill, steps and
commits. `bound` is a lower bound of a step's time: every weight read once, the head and the soft embedding computed, at the
memory bandwidth and FLOPS below. The last line is JSON.

    python benchmarks/bench_engine.py [--quant none fp8 nvfp4 int4] [--canvases 1 2 4 8] [--contexts 512 4096 16384]
        [--new 1024] [--steps 16] [--shape released|small] [--no-profile] [--peer] [--pack-embedding]
    python benchmarks/bench_engine.py --draw FILE.json

`nvfp4` and `int4` are the formats of the experts; attention and dense MLP are fp8 then. `--peer` also times transformers,
compiled with a static cache (it compiles for minutes). `--draw` plots a last line that was saved to a file, and writes the
picture beside it.
"""

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from random_weights import EXPERT_FORMATS, random_model
from rich.console import Console
from rich.table import Table

from redraft import checkpoint
from redraft.config import FULL, SLIDING, EngineConfig, ModelConfig, SamplerConfig
from redraft.diffusion.generate import Draft
from redraft.engine.engine import Engine
from redraft.engine.request import Request
from redraft.kernels.packed import count_packed_bytes
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.kv_cache import KVCache
from redraft.model.quant import pack_embedding, quantize_fp8

BYTES, FLOPS = 4.3e12, 790e12  # of one H200, per second: what a copy and a large product reach
SHAPES = {
    "released": ModelConfig(),
    "small": ModelConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        top_k_experts=2,
        layer_types=(SLIDING, FULL),
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        sliding_window=64,
        canvas_length=32,
        image_token_ids=(2045, 2046, 2047),
    ),
}
PROFILED_STEPS = 6
PARTS = {  # of a step, by substrings of kernel names
    "experts": ("_gate_up", "_down"),  # 4-bit ones too
    "attention": ("_attend", "_combine_splits", "_score_tiles", "_sum_values"),
    "norms and heads": ("_and_norm", "_split_qkv_rope", "_activate_and_mul", "rms_norm", "_write_kv"),
    "routing": ("_route", "_sort_by_expert", "_score"),
    "vocabulary and sampler": ("_reduce_chunks", "_combine_chunks", "_compute_", "_step_canvases", "_draw_step"),
    "8 bits": ("_quantize_rows",),
    "fp8 products": ("_multiply_fp8", "_sum_splits"),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "splitK", "wgmma"),
}


def bound_ms(config: ModelConfig, quant: str | None, canvases: int, context: int) -> float:
    """A lower bound, in milliseconds, of one step of so many canvases."""
    with torch.device("meta"):
        model = DiffusionGemma(config)
    tokens = canvases * config.canvas_length
    read = canvases * KVCache.count_bytes(config, context, torch.bfloat16, 0)
    seconds = 0.0  # of arithmetic
    for layer in model.layers:
        experts = list(layer.experts.parameters())
        sparse = sum(weight.numel() for weight in experts)
        dense = sum(weight.numel() for weight in layer.parameters()) - sparse
        dense_speed, sparse_speed = FLOPS * (2 if quant else 1), FLOPS * (2 if quant == "fp8" else 1)
        seconds += 2 * tokens * dense / dense_speed
        seconds += 2 * tokens * sparse * config.top_k_experts / config.num_experts / sparse_speed
        read += dense * (1 if quant else 2)
        if quant in EXPERT_FORMATS:
            read += sum(count_packed_bytes(w.shape[0] * w.shape[1], w.shape[2], quant) for w in experts)
        else:
            read += sparse * (1 if quant else 2)
    head = 2 * config.vocab_size * config.hidden_size
    return 1e3 * (max(read / BYTES, seconds) + 2 * max(head / BYTES, head * tokens / FLOPS))


def start(engine: Engine, canvases: int, context: int, new: int, steps: int) -> list[Request]:
    """Adds so many requests with prompts of this length. No canvas settles or ends."""
    config = engine.model.config
    cfg = SamplerConfig(
        canvas_length=config.canvas_length,
        max_new_tokens=new,
        max_steps=steps,
        confidence_threshold=1e-9,
        eos_token_ids=(config.vocab_size - 4,),
    )
    chance = torch.Generator().manual_seed(canvases + context)
    prompts = torch.randint(10, config.vocab_size // 2, (canvases, context), generator=chance).tolist()
    return [engine.add(prompt, cfg, seed=row) for row, prompt in enumerate(prompts)]


def run(engine: Engine, canvases: int, context: int, new: int, steps: int) -> dict[str, Any]:
    """Times one run of so many requests in a batch."""
    config, device = engine.model.config, engine.model.device
    wait(device)
    began, at = time.perf_counter(), []
    requests = start(engine, canvases, context, new, steps)
    while not engine.is_idle:
        if any(isinstance(event, Draft) for _, event in engine.step()):
            at.append(time.perf_counter())
    wait(device)
    seconds = time.perf_counter() - began
    tokens = sum(request.counter.finish(torch.zeros(1, dtype=torch.bool)).stats[0].canvases for request in requests)
    steps_ms = [1e3 * (b - a) for a, b in pairwise(at)]
    first_steps = steps_ms[steps - 1 :: steps] if canvases == 1 else []  # of every canvas after the first
    return {
        "canvases": canvases,
        "context": context,
        "tokens_per_second": tokens * config.canvas_length / seconds,
        "step_ms": statistics.median(steps_ms),
        "first_ms": 1e3 * (at[0] - began),  # prefill and one step
        "turn_ms": statistics.median(first_steps) if first_steps else None,
        "seconds": seconds,
    }


def wait(device: torch.device) -> None:
    """Waits until the GPU is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def profile_parts(engine: Engine, canvases: int, context: int, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds by kind of kernel: of the time until the first step is done, and of a later step. Kernels overlap."""
    from torch.profiler import ProfilerActivity, profile

    start(engine, canvases, context, engine.model.config.canvas_length, steps)
    with profile(activities=[ProfilerActivity.CUDA]) as until_first_step:
        while not any(isinstance(event, Draft) for _, event in engine.step()):
            pass
        wait(engine.model.device)
    while sum(request.canvas is not None and request.canvas.step > 0 for request in engine.scheduler.running) < canvases:
        engine.step()
    engine.step()
    wait(engine.model.device)
    with profile(activities=[ProfilerActivity.CUDA]) as later:
        for _ in range(PROFILED_STEPS):
            engine.step()
        wait(engine.model.device)
    while not engine.is_idle:
        engine.step()
    return sum_parts(until_first_step, 1), sum_parts(later, PROFILED_STEPS)


def sum_parts(found: Any, steps: int) -> dict[str, float]:
    """Milliseconds of a profile by kind of kernel, divided by a number of steps; the longest first."""
    spent: dict[str, float] = defaultdict(float)
    for event in found.key_averages():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            part = next((part for part, names in PARTS.items() if any(name in event.key for name in names)), "other")
            spent[part] += event.self_device_time_total / 1e3 / steps
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def measured(quant: str | None, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Times all runs with one weight format."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SHAPES[options.shape]
    model = random_model(config, device, quant if quant in EXPERT_FORMATS else None)
    if quant == "fp8":
        model = quantize_fp8(model)
    if options.pack_embedding:
        model = pack_embedding(model)
    wait(device)
    weights = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    began = time.perf_counter()
    engine = Engine(model, EngineConfig(max_running=max(options.canvases), cache_bytes=20 * 2**30, prefix_cache_entries=0))
    run(engine, 1, 512, config.canvas_length, 2)
    wait(device)
    found: dict[str, Any] = {"quant": quant, "ready_seconds": time.perf_counter() - began, "runs": []}
    table = Table("canvases", "context", "tokens/s", "ms a step", "bound", "share", "GiB beyond weights and cache")
    for canvases in options.canvases:
        for context in options.contexts if canvases == 1 else options.contexts[:1]:
            run(engine, canvases, context, 2 * config.canvas_length, options.steps)  # captures the graphs
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            one = run(engine, canvases, context, options.new, options.steps)
            one["bound_ms"] = bound_ms(config, quant, canvases, context)
            cache = canvases * KVCache.count_bytes(config, context + options.new, model.dtype, engine.config.rewind)
            one["beyond_gib"] = (torch.cuda.max_memory_allocated() - weights - cache) / 2**30 if weights else 0.0
            found["runs"].append(one)
            share = one["bound_ms"] / one["step_ms"]
            cells = (one["tokens_per_second"], one["step_ms"], one["bound_ms"], share, one["beyond_gib"])
            table.add_row(str(canvases), f"{context:,}", *(f"{cell:,.2f}" for cell in cells))
    console.print(f"{quant or 'bf16'}: ready after {found['ready_seconds']:.1f} s", table)
    if not options.no_profile and device.type == "cuda":
        for one in found["runs"]:
            profiled = profile_parts(engine, one["canvases"], one["context"], options.steps)
            one["first_parts_ms"], one["parts_ms"] = profiled
        found["parts_ms"] = found["runs"][0]["parts_ms"]
        longest = max(found["runs"], key=lambda one: one["context"])
        names = [f"{one['canvases']} x {one['context']:,}" for one in found["runs"]]
        table = Table("ms a step", *names, f"prompt of {longest['context']:,} and a step")
        columns = [*(one["parts_ms"] for one in found["runs"]), longest["first_parts_ms"]]
        for part in (*PARTS, "other"):
            table.add_row(part, *(f"{column.get(part, 0.0):.2f}" for column in columns))
        console.print(table)
    del engine, model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def peer(options: argparse.Namespace) -> dict[str, Any]:
    """Times transformers at the same shape, compiled with a static cache: the better of two runs after the compiling one."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    config, device = SHAPES[options.shape], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.device("meta"):
        their_config = DiffusionGemmaConfig.from_dict(checkpoint.publish_model_config(config))
        theirs = DiffusionGemmaForBlockDiffusion(their_config).to(torch.bfloat16)
    theirs.tie_weights()
    theirs = theirs.to_empty(device=device).eval().requires_grad_(False)
    theirs.tie_weights()
    for name, tensor in (*theirs.named_parameters(), *theirs.named_buffers()):
        if tensor.is_floating_point():
            tensor.normal_(0, 0.02) if tensor.dim() > 1 else tensor.fill_(1.0)
            if "router.proj" in name:
                tensor.normal_(0, 1.0)
    for module in theirs.modules():
        kind = type(module).__name__
        if "Vision" not in kind and ("RotaryEmbedding" in kind or "ScaledWordEmbedding" in kind):
            theirs._init_weights(module)
    ids = torch.randint(10, config.vocab_size // 2, (1, options.contexts[0]), device=device)
    settings = {"max_new_tokens": options.new, "max_denoising_steps": options.steps, "confidence_threshold": 1e-9}
    took = []
    for _ in range(3):
        wait(ids.device)
        began = time.perf_counter()
        theirs.generate(ids, cache_implementation="static", **settings)
        wait(ids.device)
        took.append(time.perf_counter() - began)
    return {"first_seconds": took[0], "tokens_per_second": options.new / min(took[1:])}


PEERS = {"fp8": {"vLLM 0.26": 908}, None: {"transformers 5.17, compiled": 408, "vLLM 0.26": 708}}  # docs/engine.md


def draw(path: Path) -> None:
    """Plots tokens per second beside the peers, and the time of a step by kind of kernel."""
    from matplotlib import pyplot as plt

    result = json.loads(path.read_text(encoding="utf-8"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    names, speeds, colours = [], [], []
    for one in result["ours"]:
        kind = one["quant"] or "bf16"
        for run_ in one["runs"]:
            if run_["context"] == one["runs"][0]["context"]:
                names.append(f"redraft {kind}, {run_['canvases']} canvas{'es' if run_['canvases'] > 1 else ''}")
                speeds.append(run_["tokens_per_second"])
                colours.append("#0072b2")
        for name, speed in PEERS.get(one["quant"], {}).items():
            names.append(f"{name} {kind}, 1 canvas")
            speeds.append(speed)
            colours.append("#999999")
    left.barh(names, speeds, color=colours)
    left.invert_yaxis()
    left.set_xlabel("output tokens per second")
    kinds = [one["quant"] or "bf16" for one in result["ours"]]
    so_far = [0.0] * len(kinds)
    for part in dict.fromkeys(part for one in result["ours"] for part in one["parts_ms"]):
        spent = [one["parts_ms"].get(part, 0.0) for one in result["ours"]]
        right.bar(kinds, spent, bottom=so_far, label=part, width=0.5)
        so_far = [a + b for a, b in zip(so_far, spent, strict=True)]
    right.set_ylabel("milliseconds of kernels a step, one canvas")
    right.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)
    figure.savefig(path.with_suffix(".png"), dpi=120)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quant", nargs="+", choices=("none", "fp8", *EXPERT_FORMATS), default=["none", "fp8"])
    parser.add_argument("--canvases", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096, 16384])
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="released")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--pack-embedding", action="store_true", help="embedding and head in fp8")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--draw", type=Path)
    options, console = parser.parse_args(), Console(width=120, highlight=False)
    if options.draw:
        draw(options.draw)
        return
    found = [measured(None if quant == "none" else quant, options, console) for quant in options.quant]
    result: dict[str, Any] = {"shape": options.shape, "steps": options.steps, "new": options.new, "ours": found}
    if options.peer:
        result["transformers"] = peer(options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
