"""The choice between torch._scaled_mm, the fp8 product of cuBLAS, and our Triton kernel.

The choice is a rule, never a measurement: a request gives the same text in every process on the same kind of GPU.
torch._scaled_mm with a scale per row fails on some cards and drivers. It is chosen on sm_90 and sm_100 only, where a small
product shows that it is right, and not for products whose result has few tiles: there our kernel, with smaller tiles, was
faster on an H200 (11 instead of 15 microseconds). REDRAFT_FP8_PRODUCT=triton or scaled_mm overrides the rule.
Shapes: N tokens, D in, O out.
"""

import os
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from redraft.kernels.backend import select_card
from redraft.kernels.fp8 import dequantize, matmul_fp8, quantize

ENV_VARIABLE = "REDRAFT_FP8_PRODUCT"
ARCHITECTURES = (90, 100)  # where torch._scaled_mm is preferred
ALIGNMENT = 16  # torch._scaled_mm takes multiples of it, for D and O
PROBE_SIZE = 256  # N, D and O of the product that is tried
CUBLAS_TILE = 128  # tokens and features of a tile of torch._scaled_mm's result
MAX_DIFFERENCE = 2**-6  # of the largest number: bf16 results of two orders of summation differ by less


class Fp8Product(NamedTuple):
    """The fp8 product of a device, and the reason for the choice."""

    uses_scaled_mm: bool  # else our kernel
    reason: str
    is_forced: bool = False  # by the environment

    def __str__(self) -> str:
        return f"{'torch._scaled_mm' if self.uses_scaled_mm else 'Triton'} ({self.reason})"


def uses_scaled_mm(weight_OD: Tensor, tokens: int) -> bool:
    """Whether torch._scaled_mm multiplies so many tokens with this weight."""
    product = select_product(weight_OD.device)
    if not product.uses_scaled_mm or any(size % ALIGNMENT for size in weight_OD.shape):
        return False
    tiles = -(-tokens // CUBLAS_TILE) * -(-len(weight_OD) // CUBLAS_TILE)
    return product.is_forced or tiles > select_card(weight_OD.device).processors // 2


@cache
def select_product(device: torch.device) -> Fp8Product:
    """Chooses the fp8 product of a device, once. The first call must not be in the capture of a CUDA graph."""
    requested = os.environ.get(ENV_VARIABLE, "")
    if requested not in ("", "triton", "scaled_mm"):
        raise ValueError(f"{ENV_VARIABLE} may be triton or scaled_mm, got {requested!r}")
    if requested:
        return Fp8Product(requested == "scaled_mm", f"{ENV_VARIABLE}={requested}", is_forced=True)
    architecture = select_card(device).architecture
    if architecture not in ARCHITECTURES:
        return Fp8Product(False, f"sm_{architecture}")
    fault = probe_scaled_mm(device)
    return Fp8Product(not fault, f"sm_{architecture}, where torch._scaled_mm {fault or 'is right'}")


def probe_scaled_mm(device: torch.device) -> str:
    """Tries torch._scaled_mm with numbers that are the same in every process. Returns what is wrong with it, or ""."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(2, PROBE_SIZE, PROBE_SIZE, generator=generator).to(device)
    x_ND, weight_OD = (quantize(factor) for factor in factors)
    expected_NO = dequantize(x_ND) @ dequantize(weight_OD).T
    try:
        difference = (matmul_fp8(x_ND, weight_OD) - expected_NO).abs().max().item()
    except torch.OutOfMemoryError:  # says nothing about the product
        raise
    except RuntimeError:  # CUBLAS_STATUS_NOT_SUPPORTED, or a build without it
        return "fails"
    return "" if difference <= MAX_DIFFERENCE * expected_NO.abs().max().item() else "is wrong"
