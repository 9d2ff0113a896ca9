"""Times the experts' two products in bf16, fp8, NVFP4 and int4 on one GPU, and searches tiles for the 4-bit ones.

    python benchmarks/bench_experts.py [--canvases 1] [--layers 4] [--tiles] [--shape released]

Prints, for every format, the microseconds of each product per layer, the bytes per second of its weights, and their share of
the memory's bandwidth. The 4-bit formats are timed with the conversion in PTX and with the plain one, with the four factors
of a tile in four products and in one, and with the tiles for 99 KiB of shared memory. `difference` compares the results of
both conversions: the largest difference, relative to the largest result. `--tiles` tries other tiles and prints the best for
each limit of shared memory. The last line is JSON.

The weights of all layers are distinct and larger than the L2 cache. All layers are launched from one CUDA graph.
`--shape tiny` checks the program itself, on a CPU in Triton's interpreter too.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
import triton
from bench_engine import BYTES
from random_weights import EXPERT_FORMATS, random_packed
from rich.console import Console
from rich.table import Table
from torch import Tensor

from redraft.config import ModelConfig
from redraft.kernels.backend import SMALLEST_LIMIT, select_card
from redraft.kernels.fp8 import Fp8Tensor, quantize
from redraft.kernels.int4 import Int4Tensor
from redraft.kernels.nvfp4 import Nvfp4Tensor
from redraft.kernels.packed import PackedTensor
from redraft.kernels.triton import experts, experts_fourbit
from redraft.kernels.triton.routing import sort_by_expert
from redraft.kernels.triton.tiles import Tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter computes bf16 products wrongly
FORMATS = ("bf16", "fp8", *EXPERT_FORMATS)
PRODUCTS = ("gate_up", "down")
LIMITS = (99, 227)  # KiB of shared memory per block

Weight = Tensor | PackedTensor


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer's experts."""

    experts: int
    chosen: int
    size: int
    inner: int
    tokens: int

    @classmethod
    def released(cls, canvases: int) -> "Shape":
        """The shape of the released 26B-A4B model."""
        c = ModelConfig()
        return cls(c.num_experts, c.top_k_experts, c.hidden_size, c.moe_intermediate_size, canvases * c.canvas_length)

    def of(self, product: str) -> tuple[int, int]:
        """Rows and inputs of a product's weight."""
        return (2 * self.inner, self.size) if product == "gate_up" else (self.size, self.inner)


TINY = Shape(experts=2, chosen=1, size=72, inner=16, tokens=2)


def random_weight(kind: str, shape: Shape, product: str) -> Weight:
    """Random weights of one layer, made on the device."""
    rows, size = shape.of(product)
    if kind == "bf16":
        return torch.randn(shape.experts, rows, size, dtype=DTYPE, device=DEVICE) * 0.05
    return random_packed((shape.experts, rows, size), kind, 1, torch.Generator(DEVICE).manual_seed(0))


def count_bytes(weight: Weight) -> int:
    """The bytes of a weight with its scales."""
    parts = [weight] if isinstance(weight, Tensor) else [part for part in weight if part is not None]
    return sum(part.numel() * part.element_size() for part in parts)


class Inputs:
    """What the products of one layer read beside the weights."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(shape.tokens, shape.experts, generator=generator)
        self.chosen = shape.chosen
        self.experts_NK = scores.argsort(dim=1)[:, : shape.chosen].int().to(DEVICE)
        self.order_M, self.ends_E = sort_by_expert(self.experts_NK, shape.experts)
        self.weights_NK = torch.full((shape.tokens, shape.chosen), 1 / shape.chosen, device=DEVICE)
        self.x_ND = torch.randn(shape.tokens, shape.size, dtype=DTYPE, device=DEVICE)
        self.x_fp8 = quantize(self.x_ND)
        self.inner_MF = torch.randn(len(self.order_M), shape.inner, dtype=DTYPE, device=DEVICE)

    def multiply(self, product: str, weight: Weight, **options: Any) -> Tensor:
        """One product. The options are those of `experts_fourbit.multiply_gate_up`, for 4-bit weights."""
        if isinstance(weight, (Nvfp4Tensor, Int4Tensor)):
            if product == "gate_up":
                arguments = (self.x_ND, self.order_M, self.ends_E, weight, self.chosen)
                return experts_fourbit.multiply_gate_up(*arguments, **options)
            arguments = (self.inner_MF, self.order_M, self.ends_E, weight, self.weights_NK)
            return experts_fourbit.multiply_down(*arguments, **options)
        if product == "gate_up":
            x = self.x_fp8 if isinstance(weight, Fp8Tensor) else self.x_ND
            return experts.multiply_gate_up(x, self.order_M, self.ends_E, weight, self.chosen)
        return experts.multiply_down(self.inner_MF, self.order_M, self.ends_E, weight, self.weights_NK)


def measure(run: Callable[[], object]) -> float:
    """The microseconds of a function that launches kernels."""
    if DEVICE == "cuda":
        run()
        return float(1e3 * triton.testing.do_bench_cudagraph(run, rep=30))
    begin = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - begin)


def measure_layers(inputs: Inputs, product: str, layers: list[Weight], **options: Any) -> dict[str, float]:
    """Microseconds per layer, bytes per second and their share of the bandwidth."""

    def run() -> None:
        for weight in layers:
            inputs.multiply(product, weight, **options)

    us = measure(run) / len(layers)
    speed = count_bytes(layers[0]) / (us / 1e6)
    return {"us": round(us, 2), "GB/s": round(speed / 1e9, 1), "share": round(speed / BYTES, 3)}


def compare_formats(shape: Shape, inputs: Inputs, layers: int) -> dict[str, dict[str, dict[str, float]]]:
    """Every format with the tiles of the tables: results by name, then by product."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    card = select_card(torch.device(DEVICE))._replace(shared_memory=SMALLEST_LIMIT)
    for kind, (index, product) in itertools.product(FORMATS, enumerate(PRODUCTS)):
        weights = [random_weight(kind, shape, product) for _ in range(layers)]
        results.setdefault(kind, {})[product] = measure_layers(inputs, product, weights)
        if kind not in EXPERT_FORMATS:
            continue
        format = experts_fourbit.format_of(weights[0])
        small = experts_fourbit.select_tiles(format, len(inputs.order_M), shape.experts, card)
        named: dict[str, dict[str, Any]] = {
            f"{kind}, plain": {"uses_ptx": False},
            f"{kind}, four products": {"joins": False},
            f"{kind}, one product": {"joins": True},
            f"{kind}, 99 KiB": {"tiles": small[index]},
        }
        for name, options in named.items():
            results.setdefault(name, {})[product] = measure_layers(inputs, product, weights, **options)
        plain, ptx = (inputs.multiply(product, weights[0], uses_ptx=uses_ptx).float() for uses_ptx in (False, True))
        difference = float((plain - ptx).abs().max() / plain.abs().max())
        results[kind][product]["difference"] = difference
    return results


def candidate_tiles(shape: Shape) -> Iterator[Tiles]:
    """Tiles whose numbers per thread are reasonable. The shared memory is known after compiling."""
    average = shape.tokens * shape.chosen / shape.experts
    tokens = (16, 32) if average <= 24 else (64, 128)
    concurrent = (1,) if average <= 48 else (1, 2)
    for tile in itertools.product(tokens, (64, 128, 256), (64, 128, 256), (2, 3, 4), (4, 8), concurrent):
        tiles = Tiles(*tile)
        threads = 32 * tiles.warps
        weights_of_thread = tiles.features * tiles.inner / threads
        sums_of_thread = tiles.features * tiles.tokens / threads
        buffers = (tiles.features * 0.5625 + 2 * tiles.tokens) * tiles.inner * (tiles.stages - 1)
        if (
            32 <= weights_of_thread <= 128
            and sums_of_thread <= 64
            and 16 * tiles.warps <= tiles.features
            and buffers <= 200e3
        ):
            yield tiles


def compile_tiles(shape: Shape, kind: str, product: str, tiles: Tiles) -> None:
    """Compiles the kernel of one candidate into Triton's cache, in a process of its own: one expert, one token."""
    few = Shape(1, 1, shape.size, shape.inner, 1)
    inputs = Inputs(few)
    inputs.chosen = shape.chosen  # a constant of the kernel
    with contextlib.suppress(triton.runtime.errors.OutOfResources):  # the search meets it again
        inputs.multiply(product, random_weight(kind, few, product), tiles=tiles)


def search_tiles(shape: Shape, inputs: Inputs, layers: int, kinds: tuple[str, ...]) -> dict[str, dict[str, dict[str, list]]]:
    """The best tiles by format, product and limit: microseconds per layer, tiles."""
    candidates = list(candidate_tiles(shape)) if shape != TINY else [Tiles(16, 32, 64, 2, 4)]
    jobs = list(itertools.product(kinds, PRODUCTS, candidates))
    if DEVICE == "cuda":
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
            list(pool.map(partial(_compile_job, shape), jobs))
    found: dict[str, dict[str, dict[str, list]]] = {}
    card = select_card(torch.device(DEVICE))
    for kind, product in itertools.product(kinds, PRODUCTS):
        weights = [random_weight(kind, shape, product) for _ in range(layers)]
        weight_bytes = experts_fourbit.WEIGHT_BYTES[experts_fourbit.format_of(weights[0])]
        times = []
        for tiles in candidates:
            try:
                us = measure_layers(inputs, product, weights, tiles=tiles)["us"]
            except triton.runtime.errors.OutOfResources:  # too much shared memory
                continue
            times.append((us, astuple(tiles), tiles.shared_memory(card, weight_bytes, DTYPE.itemsize)))
        best = {str(limit): [entry[:2] for entry in sorted(times) if entry[2] <= limit * 1024][:5] for limit in LIMITS}
        print(kind, product, best, flush=True)
        found.setdefault(kind, {})[product] = best
    return found


def _compile_job(shape: Shape, job: tuple[str, str, Tiles]) -> None:
    compile_tiles(shape, *job)


def main(arguments: list[str] | None = None) -> None:
    """Compares the formats, searches tiles if asked to, and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--canvases", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4, help="layers of distinct weights")
    parser.add_argument("--tiles", action="store_true", help="search tiles")
    parser.add_argument("--formats", default="nvfp4,int4", help="formats of the search, with commas between them")
    parser.add_argument("--shape", choices=("released", "tiny"), default="released")
    options = parser.parse_args(arguments)
    shape = TINY if options.shape == "tiny" else Shape.released(options.canvases)
    inputs = Inputs(shape)
    console = Console(width=140, highlight=False)
    formats = compare_formats(shape, inputs, options.layers)
    table = Table("format", *(f"{product}: us a layer, GB/s, share" for product in PRODUCTS), "sum, us", "difference")
    for name, by_product in formats.items():
        cells = [f"{one['us']:.1f}  {one['GB/s']:.0f}  {one['share']:.2f}" for one in by_product.values()]
        differences = [f"{one['difference']:.1e}" for one in by_product.values() if "difference" in one]
        table.add_row(name, *cells, f"{sum(one['us'] for one in by_product.values()):.1f}", " ".join(differences))
    console.print(table)
    best = search_tiles(shape, inputs, options.layers, tuple(options.formats.split(","))) if options.tiles else {}
    for kind, by_product in best.items():
        for product, by_limit in by_product.items():
            for limit, entries in by_limit.items():
                console.print(f"{kind} {product}, {limit} KiB:", *(f"{us} us {tiles}" for us, tiles in entries), sep="\n  ")
    print(json.dumps({"tokens": shape.tokens, "layers": options.layers, "formats": formats, "tiles": best}))


if __name__ == "__main__":
    main()
