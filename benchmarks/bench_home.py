"""The released 26B-A4B shape within the memory of a card at home: 4-bit experts, a limit, experts in host memory.

Random weights are made packed on the device, layer by layer; offloaded experts move to host memory at once. For each limit:
tokens per second, milliseconds of a step, the peak of torch's allocator and of the driver, the speed of the bus, and the
bound of a step: the larger of its copies over the bus and of the step without a limit, both measured in the same run. The
tokens must be those of the run without a limit, with prefill chunks of the same length. Every canvas takes all its steps,
because random weights never settle. The last line is JSON.

    python benchmarks/bench_home.py [--limits 18e9 24e9 16e9 12e9 8e9] [--context 16384] [--new 1024] [--steps 16]
        [--kv fp8] [--slots 2] [--shape released|tiny]

The plan rounds NVIDIA's layout (NVFP4 experts, bf16 elsewhere) as far as each limit asks for: `--gpu-memory` does the same.
Requests have no constraints, and the plans leave no room for any. `--shape tiny` runs on a CPU, where nothing is limited:
the same code, without a card.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from bench_engine import wait
from random_weights import fill_randomly, pack_randomly, random_packed
from rich.console import Console
from rich.table import Table

from redraft.config import FULL, SLIDING, ModelConfig, SamplerConfig
from redraft.diffusion.generate import Draft, Finished
from redraft.engine.engine import Engine
from redraft.engine.gpu_limit import GpuLimit, peak_bytes
from redraft.engine.memory_plan import RESERVE_SHARE, Demand, MemoryPlan, WeightBytes, choose_policy, plan_memory
from redraft.engine.offload import SLOTS, find_stream, measure_bus, offload_experts
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.embedding import PackedEmbedding
from redraft.model.quant.policy import ATTENTION, DENSE_MLP, EMBEDDING, EXPERT_DOWN, EXPERTS, QuantPolicy
from redraft.model.quant.stored import StoredFormat

NVIDIA = dict.fromkeys(EXPERTS, StoredFormat("NVFP4 (ModelOpt)", "nvfp4"))  # the other parts are bf16
PUBLISHED = QuantPolicy(runs_packed=True)
FP8_BESIDE = replace(PUBLISHED, packs_dense=True, packs_embedding=True)
UNLIMITED = 10**15
TINY = ModelConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=64,
    num_experts=4,
    top_k_experts=2,
    layer_types=(*(SLIDING,) * 5, FULL),
    num_attention_heads=4,
    num_key_value_heads=2,
    num_global_key_value_heads=2,
    head_dim=16,
    global_head_dim=16,
    sliding_window=16,
    max_position_embeddings=4096,
    canvas_length=16,
    image_token_ids=(509, 510, 511),
)


def random_model(
    config: ModelConfig, policy: QuantPolicy, device: torch.device, plan: MemoryPlan, slots: int
) -> DiffusionGemma:
    """A model in the policy's formats, experts where the plan puts them. A layer's weights depend on its number only."""
    with torch.device("meta"):
        model = DiffusionGemma(config).to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    offloaded = set(plan.offloaded_layers)
    packed = {
        "experts": policy.target(EXPERT_DOWN, NVIDIA[EXPERT_DOWN].format).format,
        "attention": policy.target(ATTENTION, None).format,
        "dense": policy.target(DENSE_MLP, None).format,
    }
    for number, layer in enumerate(model.layers):
        pack_randomly(layer, packed, torch.Generator(device).manual_seed(number))
        if number in offloaded:
            layer.experts = layer.experts.to("cpu")
    generator = torch.Generator(device).manual_seed(len(model.layers))
    if policy.target(EMBEDDING, None).format is not None:
        table = random_packed(tuple(model.embed_tokens.weight.shape), "fp8", 1, generator)
        model.embed_tokens = PackedEmbedding(table, model.dtype)
    fill_randomly(model, generator)
    if offloaded:
        offload_experts(model, plan.offloaded_layers, slots)
    return model.eval().requires_grad_(False)


def run(engine: Engine, prompt_length: int, new: int, steps: int) -> dict[str, Any]:
    """Times one request. Returns its tokens too."""
    config = engine.model.config
    cfg = SamplerConfig(
        canvas_length=config.canvas_length,
        max_new_tokens=new,
        max_steps=steps,
        confidence_threshold=1e-9,
        eos_token_ids=(config.vocab_size - 4,),
    )
    chance = torch.Generator().manual_seed(prompt_length)
    prompt = torch.randint(10, config.vocab_size // 2, (prompt_length,), generator=chance).tolist()
    wait(engine.model.device)
    began = time.perf_counter()
    at = []
    end = None
    engine.add(prompt, cfg, seed=0)
    while not engine.is_idle:
        events = [event for _, event in engine.step()]
        if any(isinstance(event, Draft) for event in events):
            at.append(time.perf_counter())
        end = next((event for event in events if isinstance(event, Finished)), end)
    wait(engine.model.device)
    seconds = time.perf_counter() - began
    assert end is not None
    steps_ms = [1e3 * (b - a) for a, b in pairwise(at)]
    return {"tokens_per_second": new / seconds, "step_ms": statistics.median(steps_ms), "ids": end.ids_BT[0].tolist()}


def ask(context: int, chunk: int, kv: str | None) -> Demand:
    """One canvas without constraints; no request finds another one's prefix."""
    return Demand(context=context, canvases=1, prefill_chunk=chunk, prefix_cache_entries=0, kv=kv, has_constraints=False)


def measure(
    limit: int, config: ModelConfig, policies: Sequence[QuantPolicy], chunk: int, options: argparse.Namespace
) -> dict[str, Any]:
    """One run within a limit; UNLIMITED: without one. The plan chooses a policy. `chunk` is the longest prefill chunk."""
    device = torch.device("cuda:0" if torch.cuda.is_available() and config is not TINY else "cpu")
    weights = WeightBytes.by_policy(config, NVIDIA, policies)
    demand = ask(options.context, chunk, options.kv)
    is_limited = device.type == "cuda" and limit < UNLIMITED
    gpu_limit = GpuLimit(device, limit, demand) if is_limited else None
    cuda_context = gpu_limit.cuda_context if gpu_limit else 0
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy, plan = choose_policy(config, weights, limit, demand, dtype=dtype, cuda_context=cuda_context)
    bus = measure_bus(device) if device.type == "cuda" else None
    model = random_model(config, policy, device, plan, options.slots)
    engine_config = plan.engine_config if limit < UNLIMITED else replace(plan.engine_config, cache_bytes=20 * 2**30)
    engine = Engine(model, engine_config)
    longest = options.context - options.new - config.canvas_length
    run(engine, longest, config.canvas_length, 2)  # fills the context once, and captures graphs
    run(engine, options.prompt, 2 * config.canvas_length, options.steps)
    found = run(engine, options.prompt, options.new, options.steps)
    stream = find_stream(model)
    step_bytes = stream.step_bytes if stream is not None else 0
    found |= {"limit": limit if limit < UNLIMITED else None, "offloaded": plan.offloaded, "step_bytes": step_bytes}
    found |= {"policy": policy, "chunk": plan.prefill_chunk, "plan": dict(plan.rows(bus)), "bus": bus}
    found["copies_ms"] = 1e3 * step_bytes / bus if bus else None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found |= {"peak_bytes": peak_bytes(device), "reserved": torch.cuda.max_memory_reserved(), "driver": total - free}
    return found


def clean_up() -> None:
    """Frees what the last run left, and takes the limit away."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(1.0)


def tiny_limits(config: ModelConfig, policy: QuantPolicy, context: int) -> list[int]:
    """Limits for the tiny shape: all experts on the device, and all but one and three layers of them."""
    weights = WeightBytes.by_policy(config, NVIDIA, [policy])[policy]
    roomy = plan_memory(config, weights, UNLIMITED, ask(context, 256, None), dtype=torch.float32, cuda_context=0)
    used = sum(roomy.parts.values()) - roomy.parts["reserve"] + roomy.context_bytes
    sizes = [used - layers * weights.experts[0] + layers * 4096 for layers in (0, 1, 3)]
    return [size * RESERVE_SHARE // (RESERVE_SHARE - 1) + 1 for size in sizes]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", nargs="+", type=float, default=[18e9, 24e9, 16e9, 12e9, 8e9])
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--kv", choices=("fp8",))
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--shape", choices=("released", "tiny"), default="released")
    options, console = parser.parse_args(), Console(width=140, highlight=False)
    config = TINY if options.shape == "tiny" else ModelConfig()
    limits = [int(limit) for limit in options.limits]
    policies: Sequence[QuantPolicy] = PUBLISHED.alternatives
    if options.shape == "tiny":
        limits = tiny_limits(config, FP8_BESIDE, options.context)
        policies = [FP8_BESIDE]
    results = []
    table = Table(
        "limit", "layers in host memory", "tokens/s", "ms a step", "copies, ms", "bound", "of bound", "peak", "equal"
    )
    unlimited: dict[tuple[QuantPolicy, int], dict[str, Any]] = {}
    for limit in limits:
        found = measure(limit, config, policies, Demand.prefill_chunk, options)
        clean_up()
        policy = found.pop("policy")
        key = (policy, found["chunk"])
        if key not in unlimited:
            unlimited[key] = measure(UNLIMITED, config, [policy], found["chunk"], options)
            clean_up()
        plain = unlimited[key]
        found["bound_ms"] = max(found["copies_ms"] or 0.0, plain["step_ms"])
        found["equal"] = found.pop("ids") == plain["ids"]
        results.append(found)
        print(f"{limit / 1e9:.2f} GB: {found['tokens_per_second']:.0f} tokens/s, equal: {found['equal']}", file=sys.stderr)
        numbers = [found["tokens_per_second"], found["step_ms"], found["copies_ms"] or 0.0, found["bound_ms"]]
        cells = [f"{number:,.1f}" for number in (*numbers, found["step_ms"] / found["bound_ms"])]
        peak = f"{found.get('peak_bytes', 0) / 1e9:.2f}"
        table.add_row(f"{limit / 1e9:.2f}", str(found["offloaded"]), *cells, peak, str(found["equal"]))
    console.print(table)
    plain_runs = [{**found, "ids": None, "policy": vars(policy)} for (policy, _), found in unlimited.items()]
    print(json.dumps({"shape": options.shape, "context": options.context, "limited": results, "unlimited": plain_runs}))


if __name__ == "__main__":
    main()
