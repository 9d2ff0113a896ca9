"""Quantizes rows to fp8, each with a scale from its largest absolute value. Reference: `quantize` in `kernels/fp8.py`.

Shapes: N rows of D numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.fp8 import FP8_DTYPE, FP8_MAX, MIN_SCALE, Fp8Tensor
from redraft.kernels.triton.pdl import _pdl_wait, pdl_options

_FP8_MAX = tl.constexpr(FP8_MAX)  # a kernel reads only globals of this type
_MIN_SCALE = tl.constexpr(MIN_SCALE)


def empty_fp8(rows: int, size: int, device: torch.device) -> Fp8Tensor:
    """Allocates an fp8 tensor without values."""
    qdata = torch.empty(rows, size, dtype=FP8_DTYPE, device=device)
    return Fp8Tensor(qdata, torch.empty(rows, 1, dtype=torch.float32, device=device))


def quantize_rows(x_ND: Tensor) -> Fp8Tensor:
    """Returns x in fp8 with one scale per row, [N, 1]."""
    n, size = x_ND.shape
    quantized = empty_fp8(n, size, x_ND.device)
    _quantize_rows[(n,)](x_ND, *quantized, size, triton.next_power_of_2(size), num_warps=4, **pdl_options())
    return quantized


def data_and_scale(tensor: Tensor | Fp8Tensor, as_bytes: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the two kernel arguments of a tensor. Without scales it is passed twice; the kernel ignores the second.

    `as_bytes` is for cards on which Triton has no fp8 type: the kernel widens the bytes.
    """
    if isinstance(tensor, Tensor):
        return tensor, tensor
    return tensor.qdata.view(torch.uint8) if as_bytes else tensor.qdata, tensor.scale


@triton.jit
def _widen_e4m3(byte, dtype: tl.constexpr):
    """The numbers of e4m3 bytes, exactly, by integer operations: their bits in a wider format are 2^-120 times too small."""
    if dtype == tl.bfloat16:
        bits = byte.to(tl.int16)
        return ((bits & 128) << 8 | (bits & 127) << 4).to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
    bits = byte.to(tl.int32)
    return (((bits & 128) << 24 | (bits & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)


@triton.jit
def _quantize_rows(x, fp8_out, scale_out, D, D_PADDED: tl.constexpr, PDL: tl.constexpr):
    """One row."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, D_PADDED)
    value = tl.load(x + row * D + offs, mask=offs < D, other=0.0).to(tl.float32)
    _store_quantized(value, fp8_out, scale_out, row, offs, D)


@triton.jit
def _store_quantized(value, fp8_out, scale_out, row, offs, D):
    """Stores a row of float32 numbers as fp8. Numbers past the row's end must be 0."""
    scale = tl.maximum(tl.max(tl.abs(value), axis=0) / _FP8_MAX, _MIN_SCALE)
    value = tl.minimum(tl.maximum(value / scale, -_FP8_MAX), _FP8_MAX)
    tl.store(fp8_out + row * D + offs, value.to(tl.float8e4nv), mask=offs < D)
    tl.store(scale_out + row, scale)
