"""8-bit floats (e4m3): quantize, dequantize, and the product of two fp8 tensors.

A weight has one scale per output channel, activations have one scale per token. A GPU multiplies fp8 twice as fast as bf16
and loads it in half the time. Shapes: N tokens, D in, O out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest number in e4m3
MIN_SCALE = 1e-12  # a row of zeros would have scale 0, and 0 / 0 is NaN


class Fp8Tensor(NamedTuple):
    """A tensor [..., O, D] in 8 bits, and its scales [..., O, 1] in float32."""

    qdata: Tensor
    scale: Tensor

    def select(self, index: int | slice) -> "Fp8Tensor":
        """Returns one matrix of a stack, or some of them."""
        return Fp8Tensor(self.qdata[index], self.scale[index])


def quantize(x: Tensor, scale_dtype: torch.dtype = torch.float32) -> Fp8Tensor:
    """Rounds to fp8, with one scale per row of the last axis, from its largest absolute value.

    The scale is rounded to `scale_dtype` before it is used, so a checkpoint that stores it in that dtype holds the same
    numbers.
    """
    scale = (x.float().abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp(min=MIN_SCALE).to(scale_dtype).float()
    return Fp8Tensor((x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE), scale)


def dequantize(tensor: Fp8Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the numbers that an fp8 tensor stands for."""
    return (tensor.qdata.float() * tensor.scale).to(dtype)


def matmul_fp8(x_ND: Fp8Tensor, weight_OD: Fp8Tensor) -> Tensor:
    """Returns x times the transposed weight, y_NO: bf16 on a GPU, float32 elsewhere. The reference, in plain PyTorch."""
    if x_ND.qdata.is_cuda:
        return torch._scaled_mm(
            x_ND.qdata, weight_OD.qdata.t(), scale_a=x_ND.scale, scale_b=weight_OD.scale.t(), out_dtype=torch.bfloat16
        )
    return (x_ND.qdata.float() @ weight_OD.qdata.float().t()) * x_ND.scale * weight_OD.scale.t()
