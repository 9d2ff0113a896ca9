"""A linear layer with an fp8 weight: it quantizes its activations, so both factors of the product have 8 bits.

On a GPU without fp8 products (before sm_89) the weight is widened instead, and activations keep their precision.
Shapes: N tokens, D in, O out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.kernels.backend import select_card, uses_triton
from redraft.kernels.fp8 import Fp8Tensor, dequantize, matmul_fp8, quantize
from redraft.kernels.scaled_mm import uses_scaled_mm


def linear_fp8(x: Tensor, weight_OD: Fp8Tensor) -> Tensor:
    """Returns x times the transposed weight, in the dtype of x."""
    x_ND = x.reshape(-1, x.shape[-1]).contiguous()  # the kernels take no strides
    if packs_activations(x.device):
        y_NO = multiply_fp8(quantize_tokens(x_ND), weight_OD)
    elif uses_triton(x.device):
        from redraft.kernels.triton.linear_fp8 import matmul_widened  # importing Triton takes long

        y_NO = matmul_widened(x_ND, weight_OD)
    else:
        y_NO = F.linear(x_ND, dequantize(weight_OD, x.dtype))
    return y_NO.to(x.dtype).view(*x.shape[:-1], -1)


def multiply_fp8(x_ND: Fp8Tensor, weight_OD: Fp8Tensor) -> Tensor:
    """Returns x times the transposed weight, y_NO: bf16 on a GPU, float32 elsewhere."""
    device = x_ND.qdata.device
    if device.type != "cuda" or not uses_triton(device) or uses_scaled_mm(weight_OD.qdata, len(x_ND.qdata)):
        return matmul_fp8(x_ND, weight_OD)
    from redraft.kernels.triton.linear_fp8 import matmul_fp8 as multiply

    return multiply(x_ND, weight_OD)


def quantize_tokens(x_ND: Tensor) -> Fp8Tensor:
    """Quantizes each token, in one Triton kernel where there is a GPU."""
    if not x_ND.is_cuda or not uses_triton(x_ND.device):
        return quantize(x_ND)
    from redraft.kernels.triton.fp8 import quantize_rows

    return quantize_rows(x_ND)


def packs_activations(device: torch.device) -> bool:
    """Whether activations are quantized for products with fp8 weights: on every device but GPUs without fp8 products."""
    return device.type != "cuda" or select_card(device).has_fp8
