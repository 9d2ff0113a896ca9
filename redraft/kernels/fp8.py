"""Products with 8-bit floats (e4m3): weights with a scale for each output channel, activations with one for each token.

Activations are rounded on the way in, so the product is between 8-bit numbers, which a GPU multiplies twice as fast and a
memory hands out twice as fast. Shapes: N tokens, D in, O out.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from redraft.kernels.backend import select_backend

FP8_DTYPE, FP8_MAX = torch.float8_e4m3fn, 448.0
MIN_SCALE = 1e-12  # a scale of zero would make nothing of nothing


class Fp8Tensor(NamedTuple):
    """A weight [..., O, D] in 8 bits and its scales [..., O, 1], float32."""

    qdata: Tensor
    scale: Tensor

    def __getitem__(self, at: int) -> "Fp8Tensor":  # type: ignore[override]
        """One of a stack."""
        return Fp8Tensor(self.qdata[at], self.scale[at])


def quantize(x: Tensor, scale_as: torch.dtype = torch.float32) -> Fp8Tensor:
    """Rounded to 8 bits along the last axis, each row by its largest number. Scales are rounded as they will be stored."""
    scale = (x.float().abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp(min=MIN_SCALE).to(scale_as).float()
    return Fp8Tensor((x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE), scale)


def dequantize(packed: Fp8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that 8 bits stand for."""
    return (packed.qdata.float() * packed.scale).to(dtype)


@cache
def _kernels(device: torch.device) -> bool:
    """CompletionParams for every product, found once."""
    return select_backend(device).uses_triton


def _rows(x_ND: Tensor) -> Fp8Tensor:
    """Activations, packed in one pass where a kernel can."""
    if not x_ND.is_cuda or not _kernels(x_ND.device):
        return quantize(x_ND)
    from redraft.kernels.triton.fp8 import quantize_rows  # Triton takes long to import

    return quantize_rows(x_ND)


def linear_fp8(x: Tensor, packed: Fp8Tensor) -> Tensor:
    """x times the weight, in x's precision."""
    return matmul_fp8(_rows(x.reshape(-1, x.shape[-1])), packed).to(x.dtype).view(*x.shape[:-1], -1)


def matmul_fp8(x_ND: Fp8Tensor, packed: Fp8Tensor) -> Tensor:
    """y_NO, in bf16 on a GPU and in float32 elsewhere."""
    if x_ND.qdata.is_cuda:
        scales = {"scale_a": x_ND.scale, "scale_b": packed.scale.t()}
        return torch._scaled_mm(x_ND.qdata, packed.qdata.t(), **scales, out_dtype=torch.bfloat16)
    return (x_ND.qdata.float() @ packed.qdata.float().t()) * x_ND.scale * packed.scale.t()
