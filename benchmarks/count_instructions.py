"""Counts the instructions per weight in the loops of the 4-bit experts, from compiled kernels. Needs no GPU.

    python benchmarks/count_instructions.py [--architectures 89,90,120] [--plain]

On an H200 the instructions decide the speed from about four per weight up; below that the memory does. The tiles are those
of one canvas. `--plain` counts the plain conversion too. The last line is JSON.
"""

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from redraft.config import ModelConfig
from redraft.kernels.backend import KIB, Card
from redraft.kernels.triton import experts_fourbit
from redraft.kernels.triton.tiles import Tiles

C = ModelConfig()
LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB of shared memory per block
FORMATS = {
    "nvfp4": experts_fourbit._NVFP4.value,
    "int4": experts_fourbit._INT4.value,
    "int4 with minimum": experts_fourbit._INT4_MINIMUM.value,
}
TYPES = {"order": "*i32", "ends": "*i32", "codes": "*i16", "scale": "*i32", "minimum": "*i32"} | dict.fromkeys(
    ("global_scale", "router_weights"), "*fp32"
)


def compile_kernel(kernel: Any, architecture: int, kind: str, uses_ptx: bool, tiles: Tiles, size: int) -> Any:
    """Compiles a kernel as a launch at the released shape would."""
    constants = {
        "K": C.top_k_experts, "FORMAT": FORMATS[kind], "PARTS": 1, "PTX": uses_ptx, "JOINED": architecture in (90, 100),
        "EVEN": size % tiles.inner == 0, "BLOCK_T": tiles.tokens, "BLOCK_F": tiles.features, "BLOCK_J": tiles.inner // 64,
        "PDL": architecture >= 90,
    }  # fmt: skip
    signature: dict[str, str] = {}
    values: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(index,)] = constants[name]
            continue
        signature[name] = TYPES.get(name, "i32" if name.isupper() else "*bf16")
        if name != "J":  # 44 and 11 blocks
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def disassemble(binary: bytes) -> str:
    """The machine code of a compiled kernel."""
    program = Path(triton.backends.nvidia.__file__).parent / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=True).stdout


def count_loop(code: str) -> int:
    """The number of instructions in the longest loop without a loop inside."""
    count = 0
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            target = re.search(r"BRA.*?(\.L_x_\d+)", instruction[1])
            if target and target[1] in labels:
                loops.append((labels[target[1]], count))
            count += 1
    innermost = [
        (first, last)
        for first, last in loops
        if not any(other != (first, last) and first <= other[0] and other[1] <= last for other in loops)
    ]
    return max(last - first + 1 for first, last in innermost)


def main() -> None:
    """Compiles and counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", default="89,90,120")
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    pairs = C.canvas_length * C.top_k_experts
    products = (
        ("gate_up", experts_fourbit._gate_up_fourbit, C.hidden_size),
        ("down", experts_fourbit._down_fourbit, C.moe_intermediate_size),
    )
    table = Table("architecture", "format", "conversion", "product", "tiles", "shared, KiB", "spills", "per weight")
    rows = []
    conversions = (True, False) if options.plain else (True,)
    for architecture, kind, uses_ptx in itertools.product(map(int, options.architectures.split(",")), FORMATS, conversions):
        card = Card(architecture, LIMITS[architecture] * KIB)
        chosen = experts_fourbit.select_tiles(FORMATS[kind], pairs, C.num_experts, card)
        for (product, kernel, size), tiles in zip(products, chosen, strict=True):
            compiled = compile_kernel(kernel, architecture, kind, uses_ptx, tiles, size)
            code = disassemble(compiled.asm["cubin"])
            padded = -(-size // tiles.inner) * tiles.inner / size  # blocks past the end are converted too
            per_weight = padded * count_loop(code) * 32 * tiles.warps / (tiles.features * tiles.inner)
            spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
            conversion = "PTX" if uses_ptx else "plain"
            sizes = (tiles.tokens, tiles.features, tiles.inner, tiles.stages, tiles.warps)
            row = (architecture, kind, conversion, product, sizes, compiled.metadata.shared, spills, round(per_weight, 2))
            rows.append(row)
            table.add_row(f"sm_{architecture}", *map(str, row[1:5]), f"{row[5] / 1024:.0f}", str(spills), f"{row[7]:.2f}")
    Console(width=140, highlight=False).print(table)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
