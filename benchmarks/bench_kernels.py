"""Each kernel at the released 26B-A4B shape against its reference and against its floor, on one GPU. The last line is JSON.

The floor is what must be read and written once at the memory's speed, or computed at the tensor cores', whichever is longer.

    python benchmarks/bench_kernels.py [--canvases 1] [--context 1024] [--tiles]

`--tiles` tries other tiles for the experts and prints the best.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from bench_engine import BYTES, FLOPS
from rich.console import Console
from rich.table import Table
from torch import Tensor

from redraft.config import ModelConfig
from redraft.kernels import attend, gated_experts, rms_norm, rope_frequencies
from redraft.kernels import vocabulary as reference
from redraft.kernels.fp8 import Fp8Tensor, quantize
from redraft.kernels.linear_fp8 import linear_fp8
from redraft.kernels.triton import attention, experts, mlp, norm, qkv_rope, routing, vocabulary

C = ModelConfig()
DTYPE, DEVICE = torch.bfloat16, "cuda"


@dataclass(frozen=True)
class Case:
    """One operation."""

    name: str
    ours: Callable[[], object]
    reference: Callable[[], object] | None
    moved: float  # bytes
    flops: float = 0.0
    eight: bool = False  # 8-bit products are twice as fast

    @property
    def floor_us(self) -> float:
        """Microseconds it must take."""
        return 1e6 * max(self.moved / BYTES, self.flops / (FLOPS * (2 if self.eight else 1)))


def rand(*shape: int) -> Tensor:
    """Random numbers of a weight's size."""
    return torch.randn(shape, dtype=DTYPE, device=DEVICE) * 0.05


def expert_cases(tokens: int) -> list[Case]:
    """The experts of one layer, and what sorts tokens for them."""
    chosen, number, size, inner = C.top_k_experts, C.num_experts, C.hidden_size, C.moe_intermediate_size
    x, up, down = rand(tokens, size), rand(number, 2 * inner, size), rand(number, size, inner)
    router, ones = rand(number, size), torch.ones(number, device=DEVICE)
    who, weights = routing.route(x, router, ones, chosen)
    asked, slow = (x, who, weights), (x, who.long(), weights, up, down)
    eight = [Fp8Tensor(*map(torch.stack, zip(*map(quantize, stack), strict=True))) for stack in (up, down)]
    weighed = up.numel() + down.numel()
    flops = 2 * tokens * chosen * weighed / number
    return [
        Case(
            "experts bf16", lambda: experts.gated_experts(*asked, up, down), lambda: gated_experts(*slow), 2 * weighed, flops
        ),
        Case("experts fp8", lambda: experts.gated_experts(*asked, *eight), None, weighed, flops, True),
        Case("route", lambda: routing.route(x, router, ones, chosen), None, 2 * (tokens + number) * size),
        Case(
            "deal", lambda: routing.sort_by_expert(who, number), lambda: who.flatten().sort(stable=True), 8 * tokens * chosen
        ),
    ]


def attention_cases(canvases: int, context: int) -> list[Case]:
    """One canvas each over its cache, keys shared out among more and more programs."""
    found, length = [], C.canvas_length
    for name, layer in (("sliding", 0), ("full", C.num_hidden_layers - 1)):
        groups, size = C.layer_heads(layer)
        window = C.layer_window(layer)
        seen = min(context, window - 1) if window else context
        q, k, v = (rand(canvases, length, n, size) for n in (C.num_attention_heads, groups, groups))
        keys, values = rand(canvases, context, groups, size), rand(canvases, context, groups, size)
        base = rand(16)
        places = [torch.tensor([one.data_ptr() for one in store], device=DEVICE) for store in (keys, values)]
        table = [base, *((place - base.data_ptr()) // base.element_size() for place in places)]
        counts = [torch.full((canvases,), context, dtype=torch.int32, device=DEVICE)] * 3
        past = attention.KVLocations(*table, *counts)
        every = canvases * length * C.num_attention_heads * size
        flops, moved = 4 * every * (seen + length), 2 * (2 * canvases * (seen + length) * groups * size + 2 * every)
        both = [torch.cat([old[:, -seen:], new], dim=1) for old, new in ((keys, k), (values, v))]
        for splits in (1, 2, 4, 8):
            ours = lambda s=splits, a=(q, k, v, past), w=window: attention.attend(*a, window=w, causal=False, splits=s)  # noqa: E731
            slow = (lambda a=(q, *both): attend(*a, None)) if splits == 1 else None
            found.append(Case(f"attention {name}, {splits} splits", ours, slow, moved, flops))
    return found


def other_cases(tokens: int) -> list[Case]:
    """What stands between the products, and the products."""
    d, found = C.hidden_size, []
    x, y, w = rand(tokens, d), rand(tokens, d), rand(d)
    answers = rand(tokens, C.top_k_experts, d)
    one = torch.ones(1, dtype=DTYPE, device=DEVICE)
    row = 2 * tokens * d
    found.append(
        Case(
            "after attention",
            lambda: norm.add_attention_and_norm(x, y, w, w, w, w, 1e-6),
            lambda: [rms_norm(x, w, 1e-6) for _ in range(4)],
            6 * row,
        )
    )
    found.append(
        Case(
            "after experts",
            lambda: norm.add_mlp_and_norm(x, y, answers, (w, w, w), (one, one), 0, w, 1e-6),
            None,
            (4 + C.top_k_experts) * row,
        )
    )
    width = (C.num_attention_heads + 2 * C.num_key_value_heads) * C.head_dim
    qkv, at = rand(tokens, width), torch.arange(tokens, device=DEVICE)
    turn, hw = rope_frequencies(C.head_dim, 1e4, 1.0, DEVICE), rand(C.head_dim)
    found.append(
        Case(
            "heads",
            lambda: qkv_rope.split_qkv_rope(qkv, hw, hw, at, turn, C.num_attention_heads, C.num_key_value_heads, 1e-6),
            None,
            4 * qkv.numel(),
        )
    )
    both = rand(tokens, 2 * C.intermediate_size)
    found.append(Case("gate times up", lambda: mlp.gelu_and_mul(both), None, 3 * both.numel()))
    shapes = {
        "qkv": (width, d),
        "o": (d, C.num_attention_heads * C.head_dim),
        "gate up": (2 * C.intermediate_size, d),
        "down": (d, C.intermediate_size),
    }
    for name, (rows, columns) in shapes.items():
        weight, z = rand(rows, columns), rand(tokens, columns)
        weight8 = quantize(weight)
        flops = 2 * tokens * rows * columns
        found.append(Case(f"product {name} bf16", lambda a=z, b=weight: F.linear(a, b), None, 2 * weight.numel(), flops))
        found.append(Case(f"product {name} fp8", lambda a=z, b=weight8: linear_fp8(a, b), None, weight.numel(), flops, True))
    return found  # fmt: skip


def vocabulary_cases(tokens: int) -> list[Case]:
    """From the last hidden state to the belief."""
    raw, table = rand(tokens, C.vocab_size) * 100, rand(C.vocab_size, C.hidden_size)
    heat, uniform = torch.full((tokens,), 0.6, device=DEVICE), torch.rand(tokens, dtype=torch.float64, device=DEVICE)
    read = vocabulary.argmax_entropy_sample(raw, 30.0, heat, uniform)
    spare, hidden = raw.clone(), rand(tokens, C.hidden_size)
    flops = 2 * tokens * table.numel()
    slow = lambda: reference.argmax_entropy_sample(reference.softcap_(raw.clone(), 30.0)[:, None] / 0.6, uniform[:, None])  # noqa: E731
    return [
        Case("head", lambda: F.linear(hidden, table), None, 2 * table.numel() + 2 * raw.numel(), flops),
        Case(
            "read the vocabulary", lambda: vocabulary.argmax_entropy_sample(raw, 30.0, heat, uniform), slow, 2 * raw.numel()
        ),
        Case("believe", lambda: vocabulary.compute_probs_(spare, 30.0, heat, read), None, 4 * raw.numel()),
        Case("soft embedding", lambda: raw @ table, None, 2 * table.numel() + 2 * raw.numel(), flops),
    ]


def try_tiles(tokens: int, console: Console) -> None:
    """Experts with other tiles, each product's best five."""
    for name, eight in (("experts bf16", False), ("experts fp8", True)):
        case = next(one for one in expert_cases(tokens) if one.name == name)
        fitting, found = experts.select_tiles, []
        for tile in itertools.product((16, 32, 64), (64, 128), (64, 128, 256), (2, 3, 4, 5), (4, 8)):
            one = experts.Tiles(*tile)
            experts.select_tiles = lambda each, pairs, number, one=one: (one, one)
            try:
                found.append((1e3 * triton.testing.do_bench(case.ours, warmup=5, rep=20), tile))
            except Exception:  # too much shared memory
                continue
        experts.select_tiles = fitting
        console.print(name, f"floor {case.floor_us:.0f} us", sorted(found)[:5], "8 bits" if eight else "")


def main() -> None:
    """Times all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--canvases", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tiles", action="store_true")
    options, console = parser.parse_args(), Console(width=120, highlight=False)
    tokens = options.canvases * C.canvas_length
    table, result = Table("operation", "us", "reference", "floor", "share of the floor"), {}
    for cases in (
        expert_cases(tokens),
        attention_cases(options.canvases, options.context),
        other_cases(tokens),
        vocabulary_cases(tokens),
    ):
        for case in cases:
            ours = 1e3 * triton.testing.do_bench(case.ours)
            slow = 1e3 * triton.testing.do_bench(case.reference) if case.reference else None
            result[case.name] = {"us": ours, "reference_us": slow, "floor_us": case.floor_us}
            table.add_row(
                case.name,
                f"{ours:.1f}",
                f"{slow:.1f}" if slow else "",
                f"{case.floor_us:.1f}",
                f"{case.floor_us / ours:.2f}",
            )
    console.print(table)
    if options.tiles:
        try_tiles(tokens, console)
    print(json.dumps({"canvases": options.canvases, "context": options.context, "operations": result}))


if __name__ == "__main__":
    main()
