"""fp8 (e4m3): quantizes rows, and converts single numbers. Reference: `kernels/fp8.py`.

A row has one scale, from its largest absolute value. Single numbers have none: they become bytes, and bytes become numbers,
without the fp8 type that cards before sm_89 lack.

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
def _widen_e4m3(byte, dtype: tl.constexpr, HAS_FP8_TYPE: tl.constexpr = False):
    """The numbers of e4m3 bytes, exactly. Cards before sm_89 lack the type: integer operations replace the conversion there.

    Sign, exponent and fraction at their places in a wider format are the number times 2^-120.
    """
    if HAS_FP8_TYPE:
        return byte.to(tl.float8e4nv, bitcast=True).to(dtype)
    if dtype == tl.bfloat16:
        bits = byte.to(tl.int16)
        return ((bits & 128) << 8 | (bits & 127) << 4).to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
    bits = byte.to(tl.int32)
    return (((bits & 128) << 24 | (bits & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)


@triton.jit
def _encode_e4m3(x):
    """The e4m3 bytes nearest to these numbers, ties to the even code; numbers beyond 448 become 448."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 448.0)
    size = magnitude.to(tl.int32, bitcast=True)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # 960: the difference of the exponents' biases, 120 * 8
    # Below 2^-6 codes are multiples of 2^-9. Adding 2^14, whose last bit is 2^-9, rounds to one.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xFFFFF
    code = tl.where(magnitude < 0.015625, small, normal)
    return (((bits >> 24) & 128) | code).to(tl.uint8)


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
