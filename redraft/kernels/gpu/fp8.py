"""Rows rounded to 8 bits, each by its largest number. Reference: `kernels/fp8.py`, pack.

Shapes: N rows, D numbers in each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.fp8 import EIGHT, LARGEST, LEAST, Packed


def pack_rows(x_ND: Tensor) -> Packed:
    """x in 8 bits, and a scale for each row [N, 1]."""
    n, size = x_ND.shape
    eight_ND = torch.empty(n, size, dtype=EIGHT, device=x_ND.device)
    scale_N1 = torch.empty(n, 1, dtype=torch.float32, device=x_ND.device)
    _pack[(n,)](x_ND, eight_ND, scale_N1, size, triton.next_power_of_2(size), LARGEST, LEAST, num_warps=4)
    return Packed(eight_ND, scale_N1)


@triton.jit
def _pack(x, eight, scale_out, D, WIDE: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    value = tl.load(x + row * D + at, mask=at < D, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / LARGEST, LEAST)
    value = tl.minimum(tl.maximum(value / scale, -LARGEST), LARGEST)
    tl.store(eight + row * D + at, value.to(tl.float8e4nv), mask=at < D)
    tl.store(scale_out + row, scale)
