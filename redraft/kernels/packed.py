"""Packed tensors: a weight in fewer bits, whatever its format. A weight in full precision is a plain Tensor.

Shapes: E matrices of a stack, O rows, I inputs.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from redraft.kernels.fp8 import Fp8Tensor, dequantize
from redraft.kernels.int4 import Int4Tensor, dequantize_int4
from redraft.kernels.nibbles import BLOCK
from redraft.kernels.nvfp4 import Nvfp4Tensor, dequantize_nvfp4

PackedTensor: TypeAlias = Fp8Tensor | Nvfp4Tensor | Int4Tensor
Weight: TypeAlias = Tensor | PackedTensor
FORMATS: dict[type, str] = {Fp8Tensor: "fp8", Nvfp4Tensor: "nvfp4", Int4Tensor: "int4"}


def weight_tensors(weight: Weight) -> list[Tensor]:
    """The tensors that a weight consists of: one, or those of its fields."""
    return [weight] if isinstance(weight, Tensor) else [tensor for tensor in weight if tensor is not None]


def map_weight(weight: Weight, change: Callable[[Tensor], Tensor]) -> Any:
    """The same kind of weight, made of changed tensors."""
    if isinstance(weight, Tensor):
        return change(weight)
    return type(weight)(*(None if tensor is None else change(tensor) for tensor in weight))


def dequantize_packed(tensor: PackedTensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the numbers that a packed tensor stands for, [..., O, size]."""
    if isinstance(tensor, Fp8Tensor):
        return dequantize(tensor, dtype)
    if isinstance(tensor, Nvfp4Tensor):
        return dequantize_nvfp4(tensor, size, dtype)
    return dequantize_int4(tensor, size, dtype)


def count_packed_bytes(rows: int, inputs: int, format: str) -> int:
    """Bytes of a matrix in memory, its scales included.

    A block of 64 inputs in 4 bits has 32 bytes of codes, 4 of scales and 4 of minimums, and the last block is padded.
    """
    blocks = -(-inputs // BLOCK)
    by_format = {
        "fp8": rows * (inputs + 4),
        "nvfp4": rows * blocks * 36 + 4,  # and a global scale
        "int4": rows * blocks * 36,
        "int4 with minimum": rows * blocks * 40,
    }
    return by_format[format]
