"""Blocks: the number formats of GGUF files. A row of a weight is a sequence of blocks, each with scales of its own.

Every function takes the bytes of whole blocks and works on any device. The layouts are those of ggml; in float32 the numbers
are to the bit those of the `gguf` package. Shapes: R rows, J blocks of a row, I inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.kernels.int4 import Int4Tensor
from redraft.kernels.nibbles import pack_e2m1, pack_nibbles
from redraft.kernels.nvfp4 import E2M1, Nvfp4Tensor
from redraft.kernels.packed import PackedTensor

# The numbers by which files name their formats. Those that are missing were removed from ggml.
TYPE_NAMES = {
    **dict(enumerate("F32 F16 Q4_0 Q4_1".split())),
    **dict(enumerate("Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K".split(), 6)),
    **dict(enumerate("IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS".split(), 16)),
    **dict(enumerate("I8 I16 I32 I64 F64 IQ1_M BF16".split(), 24)),
    **dict(enumerate("TQ1_0 TQ2_0".split(), 34)),
    **dict(enumerate("MXFP4 NVFP4 Q1_0".split(), 39)),
}
LARGEST_SCALE_BYTE = 0x7E  # NVFP4: 448; the byte above it is NaN, and the rest would be negative


@dataclass(frozen=True)
class BlockType:
    """A format. `dequantize` takes blocks [R, J, nbytes] to float32 [R, J, size]; `pack` takes them to packed rows."""

    name: str
    size: int  # numbers in a block
    nbytes: int  # bytes of a block
    dequantize: Callable[[Tensor], Tensor]
    halves: tuple[int, ...] = ()  # where the fp16 scales of a block begin
    pack: Callable[[Tensor], PackedTensor] | None = None  # None: no format of the kernels holds these codes
    packed_format: str | None = None  # the format that `pack` makes, as `count_packed_bytes` calls it
    dtype: torch.dtype | None = None  # of plain numbers; None: quantized

    def has_only_finite_scales(self, blocks: Tensor) -> bool:
        """Whether no scale is infinite or not a number."""
        if self.name == "NVFP4":
            return not bool((blocks[..., :4] > LARGEST_SCALE_BYTE).any())
        # The exponent of an fp16 number is in its second byte, and all ones where the number is not finite.
        return not any(bool(((blocks[..., start + 1] & 0x7C) == 0x7C).any()) for start in self.halves)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 number at a byte of every block, as float32 [..., J, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _low_then_high(packed: Tensor, run: int) -> Tensor:
    """Codes of 4 bits: of every run of bytes first the low nibbles, then the high ones."""
    runs = packed.unflatten(-1, (-1, 1, run))
    return torch.cat([runs & 15, runs >> 4], dim=-2).flatten(-3)


def _bit_planes(packed: Tensor, bits: int) -> Tensor:
    """Splits bytes [..., N] into 8 / bits planes, from the lowest bits up: [..., 8 / bits, N]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[..., None, :] >> shifts[:, None]) & ((1 << bits) - 1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """The bits of 4 bytes, from the lowest up, as 32 numbers 0 or 16."""
    return _bit_planes(packed, 1).mT.flatten(-2) << 4


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of the eight groups of a K-quant: 6 bits each in twelve bytes, times one fp16 number for all."""
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, third & 15 | (first >> 6) << 4], dim=-1)
    minimums = torch.cat([second & 63, third >> 4 | (second >> 6) << 4], dim=-1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minimums.float()


# Dequantize


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_low_then_high(blocks[..., 2:], 16).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _low_then_high(blocks[..., 4:], 16).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _low_then_high(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6])
    return _half(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _low_then_high(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8])
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[..., 2:].view(torch.int8).float()


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minimums = _k_scales(blocks)
    codes = _low_then_high(blocks[..., 16:], 32).unflatten(-1, (8, 32))
    return (scales[..., None] * codes.float() - minimums[..., None]).flatten(-2)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minimums = _k_scales(blocks)
    codes = _low_then_high(blocks[..., 48:], 32).unflatten(-1, (8, 32)) | _bit_planes(blocks[..., 16:48], 1) << 4
    return (scales[..., None] * codes.float() - minimums[..., None]).flatten(-2)


def _q6_k(blocks: Tensor) -> Tensor:
    high_bits = _bit_planes(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3)
    codes = (_low_then_high(blocks[..., :128], 64) | high_bits << 4).unflatten(-1, (16, 16))
    scales = _half(blocks, 208) * blocks[..., 192:208].view(torch.int8).float()
    return (scales[..., None] * (codes.float() - 32)).flatten(-2)


def _nvfp4(blocks: Tensor) -> Tensor:
    values = torch.tensor([*E2M1, *(0.0 - value for value in E2M1)], device=blocks.device)  # the reference has no -0
    numbers = values[_low_then_high(blocks[..., 4:], 8).int()].unflatten(-1, (4, 16))
    scales = blocks[..., :4].contiguous().view(torch.float8_e4m3fn).float()
    return (scales[..., None] * numbers).flatten(-2)


# Pack


def _int4(codes_RI: Tensor, scales: Tensor, minimums: Tensor | None = None) -> Int4Tensor:
    """Codes, and scales and minimums of every 32 of them. A row is filled up to whole blocks of 64 codes."""
    missing = scales.shape[-1] % 2
    minimum = None if minimums is None else F.pad(minimums.bfloat16(), (0, missing))
    return Int4Tensor(pack_nibbles(codes_RI), F.pad(scales.bfloat16(), (0, missing)), minimum)


def _pack_q4_0(blocks: Tensor) -> Int4Tensor:
    return _int4(_low_then_high(blocks[..., 2:], 16).flatten(-2), _half(blocks, 0).flatten(-2))


def _pack_q4_1(blocks: Tensor) -> Int4Tensor:
    codes = _low_then_high(blocks[..., 4:], 16).flatten(-2)
    return _int4(codes, _half(blocks, 0).flatten(-2), _half(blocks, 2).flatten(-2))


def _pack_q4_k(blocks: Tensor) -> Int4Tensor:
    scales, minimums = _k_scales(blocks)
    codes = pack_nibbles(_low_then_high(blocks[..., 16:], 32).flatten(-2))
    return Int4Tensor(codes, scales.flatten(-2).bfloat16(), (-minimums).flatten(-2).bfloat16())


def _pack_nvfp4(blocks: Tensor) -> Nvfp4Tensor:
    """The global scale is the caller's."""
    codes = pack_e2m1(_low_then_high(blocks[..., 4:], 8).flatten(-2))
    scales = blocks[..., :4].flatten(-2).contiguous().view(torch.float8_e4m3fn)
    return Nvfp4Tensor(codes, scales, torch.ones(1, device=blocks.device))


def _plain(name: str, dtype: torch.dtype) -> BlockType:
    return BlockType(name, 1, dtype.itemsize, lambda blocks: blocks.view(dtype).float(), dtype=dtype)


BLOCK_TYPES = {
    block.name: block
    for block in (
        _plain("F32", torch.float32),
        _plain("F16", torch.float16),
        _plain("BF16", torch.bfloat16),
        BlockType("Q8_0", 32, 34, _q8_0, (0,)),
        BlockType("Q6_K", 256, 210, _q6_k, (208,)),
        BlockType("Q5_K", 256, 176, _q5_k, (0, 2)),
        BlockType("Q5_1", 32, 24, _q5_1, (0, 2)),
        BlockType("Q5_0", 32, 22, _q5_0, (0,)),
        BlockType("Q4_K", 256, 144, _q4_k, (0, 2), _pack_q4_k, "int4 with minimum"),
        BlockType("Q4_1", 32, 20, _q4_1, (0, 2), _pack_q4_1, "int4 with minimum"),
        BlockType("Q4_0", 32, 18, _q4_0, (0,), _pack_q4_0, "int4"),
        BlockType("NVFP4", 64, 36, _nvfp4, (), _pack_nvfp4, "nvfp4"),
    )
}
