"""Rows rounded to 8 bits, each by its largest number. Reference: `kernels/fp8.py`, pack.

Shapes: N rows, D numbers in each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.fp8 import FP8_DTYPE, FP8_MAX, MIN_SCALE, Fp8Tensor
from redraft.kernels.triton.pdl import pdl_options, pdl_wait

MOST, FEWEST = tl.constexpr(FP8_MAX), tl.constexpr(MIN_SCALE)


def empty_fp8(rows: int, size: int, device: torch.device) -> Fp8Tensor:
    """Room for so many rows."""
    eight = torch.empty(rows, size, dtype=FP8_DTYPE, device=device)
    return Fp8Tensor(eight, torch.empty(rows, 1, dtype=torch.float32, device=device))


def quantize_rows(x_ND: Tensor) -> Fp8Tensor:
    """x in 8 bits, and a scale for each row [N, 1]."""
    n, size = x_ND.shape
    packed = empty_fp8(n, size, x_ND.device)
    _quantize_rows[(n,)](x_ND, *packed, size, triton.next_power_of_2(size), num_warps=4, **pdl_options())
    return packed


@triton.jit
def _quantize_rows(x, eight, scale_out, D, WIDE: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    value = tl.load(x + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    _store_packed(value, eight, scale_out, row, at, D)


@triton.jit
def _store_packed(value, eight, scale_out, row, at, D):
    """A row of float32 numbers; those behind its end are zeros."""
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / MOST, FEWEST)
    value = tl.minimum(tl.maximum(value / scale, -MOST), MOST)
    tl.store(eight + row * D + at, value.to(tl.float8e4nv), mask=at < D)
    tl.store(scale_out + row, scale)
