"""A linear layer with an fp8 weight: it quantizes its activations, so both factors of the product have 8 bits.

Shapes: N tokens, D in.
"""

from functools import cache

import torch
from torch import Tensor

from redraft.kernels.backend import select_backend
from redraft.kernels.fp8 import Fp8Tensor, matmul_fp8, quantize


def linear_fp8(x: Tensor, weight: Fp8Tensor) -> Tensor:
    """Returns x times the transposed weight, in the dtype of x."""
    x_ND = x.reshape(-1, x.shape[-1])
    return matmul_fp8(_quantize_activations(x_ND), weight).to(x.dtype).view(*x.shape[:-1], -1)


def _quantize_activations(x_ND: Tensor) -> Fp8Tensor:
    """Quantizes each token, in one Triton kernel where there is a GPU."""
    if not x_ND.is_cuda or not _uses_triton(x_ND.device):
        return quantize(x_ND)
    from redraft.kernels.triton.fp8 import quantize_rows  # importing Triton takes long

    return quantize_rows(x_ND)


@cache
def _uses_triton(device: torch.device) -> bool:
    """Selects the backend once per device: every product asks for it."""
    return select_backend(device).uses_triton
