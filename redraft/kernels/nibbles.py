"""Nibbles: 4-bit codes, two to a byte, in the order that the kernels load them.

A block is 64 inputs in 32 bytes: byte j holds input j in its low nibble and input j + 32 in its high nibble. One load of
bytes then gives two runs of 32 neighbouring inputs, and no activation has to be moved. Published files store pairs instead:
byte j holds input 2j in its low nibble and input 2j + 1 in its high nibble. Shapes: I inputs, J blocks of 64 inputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # inputs


def pack_nibbles(codes: Tensor) -> Tensor:
    """Packs codes uint8 [..., I], each below 16, into bytes [..., 32 J]. A partial last block is filled with zeros."""
    blocks = F.pad(codes, (0, -codes.shape[-1] % BLOCK)).unflatten(-1, (-1, 2, BLOCK // 2))
    return (blocks[..., 0, :] | blocks[..., 1, :] << 4).flatten(-2)


def unpack_nibbles(packed: Tensor, size: int) -> Tensor:
    """The inverse: the first `size` codes, uint8 [..., I]."""
    blocks = packed.unflatten(-1, (-1, 1, BLOCK // 2))
    return torch.cat([blocks & 15, blocks >> 4], dim=-2).flatten(-3)[..., :size]


def pack_pairs(codes: Tensor) -> Tensor:
    """Packs codes uint8 [..., I], I even, as published files do: bytes [..., I / 2]."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack_pairs(packed: Tensor) -> Tensor:
    """Unpacks the bytes [..., I / 2] of a published file into codes uint8 [..., I]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
