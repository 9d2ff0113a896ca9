"""Times each kernel at the released 26B-A4B shape, against its reference and its floor, on one GPU. The last line is JSON.

The floor is the longer of two times: reading and writing every byte once at the memory's bandwidth, or the arithmetic at the
tensor cores' peak.

    python benchmarks/bench_kernels.py [--canvases 1] [--context 1024] [--tiles] [--shared-memory 99]

`--tiles` tries other tile sizes for the experts in bf16 and fp8 and the fp8 products and prints the best;
`bench_experts.py` does it for 4 bits. `--shared-memory 99` times the tiles of a card with so many KiB beside those of this
one, in the same run, and prints the ratio of their times.
"""

import argparse
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass

import bench_experts
import torch
import torch.nn.functional as F
import triton
from bench_engine import BYTES, FLOPS
from rich.console import Console
from rich.table import Table
from torch import Tensor

from redraft.config import ModelConfig
from redraft.kernels import attend, backend, gated_experts, rms_norm, rope_frequencies
from redraft.kernels import vocabulary as reference
from redraft.kernels.fp8 import Fp8Tensor, matmul_fp8, quantize
from redraft.kernels.triton import (
    attention,
    experts,
    linear_fp8,
    mlp,
    norm,
    qkv_rope,
    routing,
    vocabulary,
)
from redraft.kernels.triton.fp8 import quantize_rows
from redraft.kernels.triton.tiles import Tiles

C = ModelConfig()
DTYPE = torch.bfloat16
DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    """One operation to time."""

    name: str
    ours: Callable[[], object]
    reference: Callable[[], object] | None
    moved: float  # bytes read and written
    flops: float = 0.0
    is_fp8: bool = False  # fp8 products have twice the peak

    @property
    def floor_us(self) -> float:
        """The shortest possible time in microseconds."""
        return 1e6 * max(self.moved / BYTES, self.flops / (FLOPS * (2 if self.is_fp8 else 1)))


def measure(operation: Callable[[], object]) -> float:
    """The microseconds of an operation, launched from a CUDA graph: the host takes longer to launch a small kernel."""
    operation()
    try:
        return float(1e3 * triton.testing.do_bench_cudagraph(operation, rep=20))
    except RuntimeError:  # some references wait for the GPU, which a graph cannot capture
        return float(1e3 * triton.testing.do_bench(operation))


def rand(*shape: int) -> Tensor:
    """Random numbers of the size of weights."""
    return torch.randn(shape, dtype=DTYPE, device=DEVICE) * 0.05


def expert_cases(tokens: int) -> list[Case]:
    """The experts of one layer, the router, and the sort by expert."""
    chosen, number, size, inner = C.top_k_experts, C.num_experts, C.hidden_size, C.moe_intermediate_size
    x = rand(tokens, size)
    up = rand(number, 2 * inner, size)
    down = rand(number, size, inner)
    router = rand(number, size)
    ones = torch.ones(number, device=DEVICE)
    selected, weights = routing.route(x, router, ones, chosen)
    inputs = (x, selected, weights)
    reference_inputs = (x, selected.long(), weights, up, down)
    fp8 = [Fp8Tensor(*map(torch.stack, zip(*map(quantize, stack), strict=True))) for stack in (up, down)]
    shape = bench_experts.Shape(number, chosen, size, inner, tokens)
    fourbit = {
        kind: [bench_experts.random_weight(kind, shape, product) for product in bench_experts.PRODUCTS]
        for kind in bench_experts.EXPERT_FORMATS
    }
    parameters = up.numel() + down.numel()
    flops = 2 * tokens * chosen * parameters / number
    return [
        Case(
            "experts bf16",
            lambda: experts.gated_experts(*inputs, up, down),
            lambda: gated_experts(*reference_inputs),
            2 * parameters,
            flops,
        ),
        Case("experts fp8", lambda: experts.gated_experts(*inputs, *fp8), None, parameters, flops, True),
        *(
            Case(
                f"experts {kind}",
                lambda packed=packed: experts.gated_experts(*inputs, *packed),
                None,
                sum(map(bench_experts.count_bytes, packed)),
                flops,
            )
            for kind, packed in fourbit.items()
        ),
        Case("route", lambda: routing.route(x, router, ones, chosen), None, 2 * (tokens + number) * size),
        Case(
            "sort by expert",
            lambda: routing.sort_by_expert(selected, number),
            lambda: selected.flatten().sort(stable=True),
            8 * tokens * chosen,
        ),
    ]


def attention_cases(canvases: int, context: int) -> list[Case]:
    """Canvases over their caches, with the keys split among 1, 2, 4 and 8 programs."""
    cases = []
    length = C.canvas_length
    for name, layer in (("sliding", 0), ("full", C.num_hidden_layers - 1)):
        groups, size = C.layer_heads(layer)
        window = C.layer_window(layer)
        seen = min(context, window - 1) if window else context
        q, k, v = (rand(canvases, length, n, size) for n in (C.num_attention_heads, groups, groups))
        keys = rand(canvases, context, groups, size)
        values = rand(canvases, context, groups, size)
        base = rand(16)
        addresses = [torch.tensor([row.data_ptr() for row in store], device=DEVICE) for store in (keys, values)]
        offsets = [(address - base.data_ptr()) // base.element_size() for address in addresses]
        counts = [torch.full((canvases,), context, dtype=torch.int32, device=DEVICE)] * 3
        cached = attention.KVLocations(base, *offsets, *counts)
        q_elements = canvases * length * C.num_attention_heads * size
        flops = 4 * q_elements * (seen + length)
        moved = 2 * (2 * canvases * (seen + length) * groups * size + 2 * q_elements)
        keys_values = [torch.cat([old[:, -seen:], new], dim=1) for old, new in ((keys, k), (values, v))]
        for splits in (1, 2, 4, 8):
            ours = lambda s=splits, a=(q, k, v, cached), w=window: attention.attend(*a, window=w, causal=False, splits=s)  # noqa: E731
            slow = (lambda a=(q, *keys_values): attend(*a, None)) if splits == 1 else None
            cases.append(Case(f"attention {name}, {splits} splits", ours, slow, moved, flops))
    return cases


def other_cases(tokens: int) -> list[Case]:
    """Norms and activations between the products, and the dense products."""
    d = C.hidden_size
    cases = []
    x, y, w = rand(tokens, d), rand(tokens, d), rand(d)
    answers = rand(tokens, C.top_k_experts, d)
    scalar = torch.ones(1, dtype=DTYPE, device=DEVICE)
    row = 2 * tokens * d
    cases.append(
        Case(
            "after attention",
            lambda: norm.add_attention_and_norm(x, y, w, w, w, w, 1e-6),
            lambda: [rms_norm(x, w, 1e-6) for _ in range(4)],
            6 * row,
        )
    )
    cases.append(
        Case(
            "after experts",
            lambda: norm.add_mlp_and_norm(x, y, answers, (w, w, w), (scalar, scalar), 0, w, 1e-6),
            None,
            (4 + C.top_k_experts) * row,
        )
    )
    width = (C.num_attention_heads + 2 * C.num_key_value_heads) * C.head_dim
    qkv, at = rand(tokens, width), torch.arange(tokens, device=DEVICE)
    turn, hw = rope_frequencies(C.head_dim, 1e4, 1.0, DEVICE), rand(C.head_dim)
    cases.append(
        Case(
            "split qkv, rope",
            lambda: qkv_rope.split_qkv_rope(qkv, hw, hw, at, turn, C.num_attention_heads, C.num_key_value_heads, 1e-6),
            None,
            4 * qkv.numel(),
        )
    )
    gate_up = rand(tokens, 2 * C.intermediate_size)
    cases.append(Case("gelu and mul", lambda: mlp.gelu_and_mul(gate_up), None, 3 * gate_up.numel()))
    return cases + product_cases(tokens, width)


def product_cases(tokens: int, width: int) -> list[Case]:
    """Dense products: bf16 by cuBLAS; fp8 by our kernel, beside torch._scaled_mm where it runs; fp8 weights widened."""
    cases = []
    shapes = {
        "qkv": (width, C.hidden_size),
        "o": (C.hidden_size, C.num_attention_heads * C.head_dim),
        "gate up": (2 * C.intermediate_size, C.hidden_size),
        "down": (C.hidden_size, C.intermediate_size),
    }
    for name, (rows, columns) in shapes.items():
        weight, x = rand(rows, columns), rand(tokens, columns)
        weight8, x8 = quantize(weight), quantize(x)
        size, flops = weight.numel(), 2 * tokens * weight.numel()
        ours = lambda a=x8, b=weight8: linear_fp8.matmul_fp8(a, b)  # noqa: E731
        cublas = lambda a=x8, b=weight8: matmul_fp8(a, b)  # noqa: E731
        widened = lambda a=x, b=weight8: linear_fp8.matmul_widened(a, b)  # noqa: E731
        cases.append(Case(f"product {name} bf16", lambda a=x, b=weight: F.linear(a, b), None, 2 * size, flops))
        cases.append(Case(f"product {name} fp8", ours, cublas if runs(cublas) else None, size, flops, True))
        cases.append(Case(f"product {name} fp8 widened", widened, None, size, flops))
    return cases


def runs(operation: Callable[[], object]) -> bool:
    """Whether this GPU runs an operation."""
    try:
        operation()
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def vocabulary_cases(tokens: int) -> list[Case]:
    """From the last hidden state to the prediction and the soft embedding."""
    raw, table = rand(tokens, C.vocab_size) * 100, rand(C.vocab_size, C.hidden_size)
    temperature, uniform = torch.full((tokens,), 0.6, device=DEVICE), torch.rand(tokens, dtype=torch.float64, device=DEVICE)
    read = vocabulary.argmax_entropy_sample(raw, 30.0, temperature, uniform)
    spare, hidden = raw.clone(), rand(tokens, C.hidden_size)
    flops = 2 * tokens * table.numel()
    slow = lambda: reference.argmax_entropy_sample(reference.softcap_(raw.clone(), 30.0)[:, None] / 0.6, uniform[:, None])  # noqa: E731
    return [
        Case("output projection", lambda: F.linear(hidden, table), None, 2 * table.numel() + 2 * raw.numel(), flops),
        Case(
            "argmax, entropy, sample",
            lambda: vocabulary.argmax_entropy_sample(raw, 30.0, temperature, uniform),
            slow,
            2 * raw.numel(),
        ),
        Case("probabilities", lambda: vocabulary.compute_probs_(spare, 30.0, temperature, read), None, 4 * raw.numel()),
        Case("soft embedding", lambda: raw @ table, None, 2 * table.numel() + 2 * raw.numel(), flops),
        *packed_embedding_cases(hidden, raw, quantize_rows(table)),
    ]


def packed_embedding_cases(hidden: Tensor, raw: Tensor, table: Fp8Tensor) -> list[Case]:
    """Head and soft embedding with an fp8 embedding. The reference of the head: torch._scaled_mm."""
    hidden8 = quantize(hidden)
    flops = 2 * len(raw) * table.qdata.numel()
    cublas = lambda: matmul_fp8(hidden8, table)  # noqa: E731
    return [
        Case(
            "output projection fp8",
            lambda: linear_fp8.matmul_fp8(hidden8, table),
            cublas if runs(cublas) else None,
            table.qdata.numel() + 2 * raw.numel(),
            flops,
            True,
        ),
        Case(
            "soft embedding fp8",
            lambda: linear_fp8.sum_rows(raw, table, DTYPE),
            None,
            table.qdata.numel() + 2 * raw.numel(),
            flops,
        ),
    ]


def try_tiles(tokens: int, console: Console) -> None:
    """Times experts and fp8 products with other tiles and prints the best five."""
    products = [case for case in other_cases(tokens) if case.name.endswith(" fp8")]
    cases = [(case, experts) for case in expert_cases(tokens) if case.name in ("experts bf16", "experts fp8")]
    cases += [(case, linear_fp8) for case in products]
    for case, module in cases:
        select_tiles = module.select_tiles
        times = []
        for sizes in itertools.product((16, 32, 64, 128, 256), (64, 128), (64, 128, 256), (2, 3, 4), (4, 8)):
            tiles = Tiles(*sizes)
            chosen = (tiles, tiles) if module is experts else tiles
            module.select_tiles = lambda *arguments, chosen=chosen: chosen
            try:
                times.append((measure(case.ours), sizes))
            except Exception:  # too much shared memory
                continue
        module.select_tiles = select_tiles
        console.print(case.name, f"floor {case.floor_us:.0f} us", sorted(times)[:5])


def compare_tiles(cases: list[Case], kib: int, console: Console) -> dict[str, float]:
    """Times our kernels with this card's tiles and with those for fewer KiB. Returns the ratios of their times."""
    table, ratios = Table("operation", "us", f"us within {kib} KiB", "speed of the small tiles"), {}
    for case in cases:
        times = []
        for limit in ("", str(kib)):
            os.environ[backend.SHARED_MEMORY_VARIABLE] = limit
            backend.select_card.cache_clear()
            times.append(measure(case.ours))
        ratios[case.name] = times[0] / times[1]
        table.add_row(case.name, f"{times[0]:.1f}", f"{times[1]:.1f}", f"{ratios[case.name]:.2f}")
    del os.environ[backend.SHARED_MEMORY_VARIABLE]
    backend.select_card.cache_clear()
    console.print(table)
    return ratios


def main() -> None:
    """Times all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--canvases", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--shared-memory", type=int, metavar="KIB")
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
            ours = measure(case.ours)
            slow = measure(case.reference) if case.reference else None
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
    ratios = {}
    if options.shared_memory:
        tiled = [case for case in expert_cases(tokens) if case.name.startswith("experts")]
        tiled += attention_cases(options.canvases, options.context)
        tiled += [case for case in other_cases(tokens) if case.name.endswith(" fp8")]
        ratios = compare_tiles(tiled, options.shared_memory, console)
    shape = {"canvases": options.canvases, "context": options.context}
    print(json.dumps({**shape, "operations": result, "speed_of_small_tiles": ratios}))


if __name__ == "__main__":
    main()
