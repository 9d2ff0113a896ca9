"""Nibbles: 4-bit codes, four to a unit of 16 bits, in the order that the kernels load them.

A block is 64 inputs in 32 bytes, 16 units. Unit j of a block holds the codes of inputs j, j + 16, j + 32 and j + 48. So the
first codes of all units belong to 16 neighbouring inputs, and so do the second, third and fourth ones. A kernel loads the
units once, makes four factors of them, and loads the activations in their own order.

Two packings. Integers: code i of a unit is its nibble i, from the lowest up. 4-bit floats (e2m1): bits 12 to 15 are the four
signs, bits 0 to 11 the four magnitudes, so that few instructions turn a code into a bf16 number.

Published files store pairs instead: byte j holds input 2j in its low nibble and input 2j + 1 in its high nibble.
Shapes: I inputs, J blocks of 64 inputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # inputs
UNITS = 16  # of a block
NIBBLE_BITS = (0, 4, 8, 12)  # the lowest bit of each code in a unit
SIGN_BITS = (13, 12, 15, 14)  # of the four e2m1 codes of a unit
MAGNITUDE_BITS = (0, 3, 6, 9)  # the lowest bit of each magnitude of three bits


def pack_nibbles(codes: Tensor) -> Tensor:
    """Packs integers uint8 [..., I], each below 16, into bytes [..., 32 J]. A partial last block is filled with zeros."""
    return _to_bytes(_place(_split_blocks(codes), NIBBLE_BITS))


def unpack_nibbles(packed: Tensor, size: int) -> Tensor:
    """The inverse: the first `size` codes, uint8 [..., I]."""
    return _join([_take(packed, bit, 15) for bit in NIBBLE_BITS], size)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Packs e2m1 codes uint8 [..., I], each below 16, into bytes [..., 32 J]. A partial last block is filled with zeros."""
    blocks = _split_blocks(codes)
    return _to_bytes(_place(blocks >> 3, SIGN_BITS) | _place(blocks & 7, MAGNITUDE_BITS))


def unpack_e2m1(packed: Tensor, size: int) -> Tensor:
    """The inverse: the first `size` codes, uint8 [..., I]."""
    bits = zip(SIGN_BITS, MAGNITUDE_BITS, strict=True)
    return _join([_take(packed, sign, 1) << 3 | _take(packed, magnitude, 7) for sign, magnitude in bits], size)


def pack_pairs(codes: Tensor) -> Tensor:
    """Packs codes uint8 [..., I], I even, as published files do: bytes [..., I / 2]."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack_pairs(packed: Tensor) -> Tensor:
    """Unpacks the bytes [..., I / 2] of a published file into codes uint8 [..., I]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def _split_blocks(codes: Tensor) -> Tensor:
    """The codes [..., J, 4, 16]: blocks, codes of a unit, units. A partial last block is filled with zeros."""
    return F.pad(codes, (0, -codes.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK // UNITS, UNITS))


def _place(codes: Tensor, bits: tuple[int, ...]) -> Tensor:
    """The units int16 [..., J, 16] of codes [..., J, 4, 16]: `bits` are the lowest bits of a unit's four codes.

    Bit 15 is the sign of an int16, so a shift may make a unit negative.
    """
    units = torch.zeros_like(codes[..., 0, :], dtype=torch.int16)
    for index, bit in enumerate(bits):
        units |= codes[..., index, :].to(torch.int16) << bit
    return units


def _to_bytes(units: Tensor) -> Tensor:
    return units.flatten(-2).view(torch.uint8)


def _take(packed: Tensor, bit: int, mask: int) -> Tensor:
    """One code of every unit, uint8 [..., J, 16]: the unit shifted down to its lowest bit, masked."""
    units = packed.contiguous().view(torch.int16).unflatten(-1, (-1, UNITS))
    return (units >> bit & mask).to(torch.uint8)


def _join(codes: list[Tensor], size: int) -> Tensor:
    """The first `size` inputs of the four codes of every unit, each [..., J, 16]."""
    return torch.stack(codes, dim=-2).flatten(-3)[..., :size]
