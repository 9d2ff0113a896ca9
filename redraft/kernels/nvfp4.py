"""NVFP4: 4-bit floats (e2m1) with an 8-bit scale (e4m3) for every 16 inputs and a float32 scale for a whole matrix.

A weight is e2m1(code) * e4m3(scale) * global_scale. Codes 0 to 7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign.
Shapes: O rows, I inputs, J = ceil(I / 64) blocks of 64 inputs, P parts of a matrix with a global scale of their own.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from redraft.kernels.nibbles import unpack_e2m1

GROUP = 16  # inputs that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Nvfp4Tensor(NamedTuple):
    """A matrix [O, I], or a stack of matrices [..., O, I], in 4 bits. The inputs are padded to whole blocks of 64.

    The rows of a matrix are divided into P equal parts, each with a global scale: the gate rows and the up rows of an
    expert have one each.
    """

    codes: Tensor  # uint8 [..., O, 32 J], packed by `nibbles.pack_e2m1`
    scale: Tensor  # float8_e4m3fn [..., O, 4 J], never negative; 0 in the padding
    global_scale: Tensor  # float32 [..., P]

    def select(self, index: int | slice) -> "Nvfp4Tensor":
        """Returns one matrix of a stack, or some of them."""
        return Nvfp4Tensor(self.codes[index], self.scale[index], self.global_scale[index])


def dequantize_nvfp4(tensor: Nvfp4Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the numbers that an NVFP4 tensor stands for, [..., O, size].

    The product of code and scale is exact in float32 (and in bf16), so the result is rounded once, by the global scale.
    """
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=tensor.codes.device)
    numbers = values[unpack_e2m1(tensor.codes, tensor.codes.shape[-1] * 2).int()]
    numbers = numbers.unflatten(-1, (-1, GROUP)) * tensor.scale.float()[..., None]
    rows = tensor.codes.shape[-2]
    global_scale = tensor.global_scale.repeat_interleave(rows // tensor.global_scale.shape[-1], dim=-1)
    return (numbers.flatten(-2) * global_scale[..., None])[..., :size].to(dtype)
