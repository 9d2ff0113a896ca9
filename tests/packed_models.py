"""Models whose experts are packed, with random codes: for tests of what moves packed weights, not of how they are made."""

from collections.abc import Sequence

import torch

from redraft.kernels.fp8 import quantize
from redraft.kernels.int4 import Int4Tensor
from redraft.kernels.nvfp4 import Nvfp4Tensor
from redraft.kernels.packed import PackedTensor
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.quant.layers import PackedExperts

FORMATS = ("fp8", "nvfp4", "int4", "int4 with minimum")


def random_packed(weight: torch.Tensor, format: str, parts: int) -> PackedTensor:
    """A packed tensor of this weight's shape. Inputs must be a multiple of 64."""
    if format == "fp8":
        return quantize(weight)
    *rows, size = weight.shape
    generator = torch.Generator().manual_seed(size)
    codes = torch.randint(0, 256, (*rows, size // 2), dtype=torch.uint8, generator=generator)
    if format == "nvfp4":
        scale = (torch.rand(*rows, size // 16, generator=generator) + 0.5).to(torch.float8_e4m3fn)
        return Nvfp4Tensor(codes, scale, torch.full((*rows[:-1], parts), 0.05))
    scale = (torch.rand(*rows, size // 32, generator=generator) * 0.05).bfloat16()
    minimum = -7 * scale if format == "int4 with minimum" else None
    return Int4Tensor(codes, scale, minimum)


def pack_experts(model: DiffusionGemma, format: str, layers: Sequence[int] | None = None) -> None:
    """Replaces the experts of these layers, of all without a list, by packed ones."""
    for number in layers if layers is not None else range(len(model.layers)):
        layer = model.layers[number]
        gate_up, down = layer.experts.gate_up_proj, layer.experts.down_proj
        packed = PackedExperts(random_packed(gate_up, format, 2), random_packed(down, format, 1))
        layer.experts = packed.to(gate_up.device)
