"""A linear layer with a packed weight, in any format.

Inference runs the format's own product: an fp8 weight meets quantized activations, a 4-bit weight is dequantized to their
dtype. Where a gradient is needed, every weight is dequantized, once in each direction: only its codes stay in
memory in between, and the activations keep their precision. Shapes: O out, I in.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.kernels.fp8 import Fp8Tensor
from redraft.kernels.linear_fp8 import linear_fp8
from redraft.kernels.packed import PackedTensor, dequantize_packed


def linear_packed(x: Tensor, weight_OI: PackedTensor) -> Tensor:
    """Returns x times the transposed weight, in the dtype of x."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _DequantizedLinear.apply(x, weight_OI)
    if isinstance(weight_OI, Fp8Tensor):
        return linear_fp8(x, weight_OI)
    return F.linear(x, dequantize_packed(weight_OI, x.shape[-1], x.dtype))


class _DequantizedLinear(torch.autograd.Function):
    """The product with the dequantized weight, and its gradient with respect to x. The weight itself has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: PackedTensor) -> Tensor:
        ctx.weight = weight_OI
        ctx.size = x.shape[-1]
        return F.linear(x, dequantize_packed(weight_OI, ctx.size, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ dequantize_packed(ctx.weight, ctx.size, grad.dtype), None
