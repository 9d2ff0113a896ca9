"""int4: 4-bit integers with a bf16 scale for every 32 inputs, symmetric or with a minimum.

Symmetric: a weight is (code - 8) * scale. With a minimum: a weight is code * scale + minimum.
Shapes: O rows, I inputs, J = ceil(I / 64) blocks of 64 inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from redraft.kernels.nibbles import unpack_nibbles

GROUP = 32  # inputs that share a scale
ZERO = 8  # the code of 0 without a minimum


class Int4Tensor(NamedTuple):
    """A matrix [O, I], or a stack of matrices [..., O, I], in 4 bits. The inputs are padded to whole blocks of 64."""

    codes: Tensor  # uint8 [..., O, 32 J], packed by `nibbles.pack_nibbles`
    scale: Tensor  # bfloat16 [..., O, 2 J]; 0 in the padding
    minimum: Tensor | None = None  # bfloat16 [..., O, 2 J]; None: symmetric

    def select(self, index: int | slice) -> "Int4Tensor":
        """Returns one matrix of a stack, or some of them."""
        minimum = None if self.minimum is None else self.minimum[index]
        return Int4Tensor(self.codes[index], self.scale[index], minimum)


def dequantize_int4(tensor: Int4Tensor, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the numbers that an int4 tensor stands for, [..., O, size], computed in float32."""
    codes = unpack_nibbles(tensor.codes, tensor.codes.shape[-1] * 2).float().unflatten(-1, (-1, GROUP))
    codes = codes - ZERO if tensor.minimum is None else codes
    numbers = codes * tensor.scale.float()[..., None]
    if tensor.minimum is not None:
        numbers += tensor.minimum.float()[..., None]
    return numbers.flatten(-2)[..., :size].to(dtype)
