"""Random weights in every packed format, for tests of layers and kernels."""

import torch
from interpreted import DEVICE
from torch import Tensor

from redraft.kernels.fp8 import Fp8Tensor, quantize
from redraft.kernels.int4 import Int4Tensor
from redraft.kernels.nibbles import pack_e2m1, pack_nibbles
from redraft.kernels.nvfp4 import Nvfp4Tensor
from redraft.kernels.packed import PackedTensor


def randint(high: int, *shape: int, seed: int) -> Tensor:
    """Random integers below `high`."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def randn(*shape: int, seed: int) -> Tensor:
    """Random normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weight(kind: str, number: int, rows: int, size: int, parts: int = 1, seed: int = 0) -> Tensor | PackedTensor:
    """A stack of matrices about as large as weights are: "bf16" (in float32), "fp8", "nvfp4", "int4", "int4 with minimum".

    All 16 codes occur, -0 too. NVFP4 has every e4m3 scale that is not negative, subnormal scales and 0 among them.
    """
    blocks = -(-size // 64)
    codes = randint(16, number, rows, size, seed=seed).to(torch.uint8)
    if kind == "bf16":
        return (randn(number, rows, size, seed=seed) * 0.2).to(DEVICE)
    if kind == "fp8":
        return Fp8Tensor(*(field.to(DEVICE) for field in quantize(randn(number, rows, size, seed=seed) * 0.2)))
    if kind == "nvfp4":
        scale = randint(127, number, rows, 4 * blocks, seed=seed + 1).to(torch.uint8)
        scale[..., -(-size // 16) :] = 0
        global_scale = 1e-4 + randn(number, parts, seed=seed + 2).abs() * 1e-3
        fields = (pack_e2m1(codes), scale.view(torch.float8_e4m3fn), global_scale)
        return Nvfp4Tensor(*(field.to(DEVICE) for field in fields))
    scale = (randn(number, rows, 2 * blocks, seed=seed + 1) * 0.03).bfloat16()
    scale[:, 0] = 0
    scale[..., -(-size // 32) :] = 0
    minimum = (randn(number, rows, 2 * blocks, seed=seed + 2) * 0.2).bfloat16().to(DEVICE) if kind != "int4" else None
    return Int4Tensor(pack_nibbles(codes).to(DEVICE), scale.to(DEVICE), minimum)
