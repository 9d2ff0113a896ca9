"""Quantized weights of a GGUF file, as StoredWeight: read and converted a few rows at a time, on the device that asks.

GgufWeight     a tensor of the file
StackedWeight  the gate and the up experts of a layer, where a file has them apart
PaddedWeight   a tensor whose expert or MLP size was filled up with zeros to whole blocks
Shapes: E experts, P parts of the rows (gate, up), O rows, I inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from redraft.checkpoint.gguf.blocks import BlockType
from redraft.checkpoint.names import CheckpointError
from redraft.kernels.nvfp4 import Nvfp4Tensor
from redraft.kernels.packed import PackedTensor
from redraft.kernels.threads import adapt_threads
from redraft.model.quant.stored import StoredWeight

CHUNK = 2**21  # numbers converted at once: 8 MiB in float32, and a few times that on the way


@dataclass(frozen=True)
class GgufWeight:
    """A matrix [O, I] or a stack [E, O, I]."""

    name: str  # in the file
    type: BlockType
    rows: Tensor  # uint8 [..., O, bytes of a row], a view of the mapped file
    device: torch.device
    global_scale: Tensor | None = None  # NVFP4: float32 [], or [E] for a stack

    @property
    def format(self) -> str:
        """ggml's name of the format."""
        return self.type.name

    @property
    def packed_format(self) -> str | None:
        """The format that `pack` returns."""
        return self.type.packed_format

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return (*self.rows.shape[:-1], self.rows.shape[-1] // self.type.nbytes * self.type.size)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.rows.numel() + (0 if self.global_scale is None else self.global_scale.nbytes)

    def select(self, part: slice) -> "GgufWeight":
        """Some matrices of a stack, or some rows of a matrix."""
        scale = self.global_scale
        if scale is not None and scale.dim():  # one for each matrix
            scale = scale[part]
        return replace(self, rows=self.rows[part], global_scale=scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that the weight stands for."""
        numbers = torch.empty(self.shape, dtype=dtype, device=self.device)
        chunks = numbers.view(-1, self.shape[-1]).split(self._rows_at_once())
        scales = self._row_scales()
        if self.device.type == "cpu":
            adapt_threads()
        for chunk, blocks in zip(chunks, self._blocks(), strict=True):
            dequantized = self.type.dequantize(blocks).flatten(-2)
            if scales is not None:
                dequantized *= next(scales)[:, None]
            chunk.copy_(dequantized)
        return numbers

    def pack(self) -> PackedTensor | None:
        """The codes in the order of the kernels; None for formats that have more than 4 bits."""
        if self.type.pack is None:
            return None
        chunks = [self.type.pack(blocks) for blocks in self._blocks()]
        stack = self.rows.shape[:-1]
        if self.type.name == "NVFP4":
            global_scale = torch.ones(()) if self.global_scale is None else self.global_scale
            global_scale = global_scale.to(self.device).expand(stack[:-1])[..., None].contiguous()
            codes, scale = (torch.cat(field).unflatten(0, stack) for field in list(zip(*chunks, strict=True))[:2])
            return Nvfp4Tensor(codes, scale, global_scale)
        fields = (None if field[0] is None else torch.cat(field).unflatten(0, stack) for field in zip(*chunks, strict=True))
        return type(chunks[0])(*fields)

    def _rows_at_once(self) -> int:
        return max(1, CHUNK // self.shape[-1])

    def _blocks(self) -> Iterator[Tensor]:
        """The blocks of a few rows at a time, [R, J, bytes], on the device. Refuses scales that are not finite numbers."""
        for rows in self.rows.flatten(0, -2).split(self._rows_at_once()):
            blocks = rows.to(self.device).unflatten(-1, (-1, self.type.nbytes))
            if not self.type.has_only_finite_scales(blocks):
                raise CheckpointError(f"tensor {self.name} has a scale that is not a finite number; download the file again")
            yield blocks

    def _row_scales(self) -> Iterator[Tensor] | None:
        """The global scale of every row, in the chunks of `_blocks`."""
        if self.global_scale is None:
            return None
        scales = self.global_scale.to(self.device)[..., None].expand(self.rows.shape[:-1])
        return iter(scales.flatten().split(self._rows_at_once()))


@dataclass(frozen=True)
class StackedWeight:
    """Gate experts [E, O, I] and up experts [E, O, I] as one stack [E, 2 O, I]."""

    gate: GgufWeight
    up: GgufWeight

    @property
    def format(self) -> str:
        """One format, or both where they differ. Full precision is the gate's."""
        is_plain = self.gate.type.dtype is not None and self.up.type.dtype is not None
        is_one = is_plain or self.gate.format == self.up.format
        return self.gate.format if is_one else f"{self.gate.format} and {self.up.format}"

    @property
    def packed_format(self) -> str | None:
        """The format that `pack` returns: both halves need the same one."""
        return self.gate.packed_format if self.gate.packed_format == self.up.packed_format else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        experts, rows, inputs = self.gate.shape
        return experts, rows + self.up.shape[1], inputs

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.gate.nbytes + self.up.nbytes

    def select(self, matrices: slice) -> "StackedWeight":
        """Some experts."""
        return StackedWeight(self.gate.select(matrices), self.up.select(matrices))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, expert by expert: the gate rows, then the up rows."""
        numbers = torch.empty(self.shape, dtype=dtype, device=self.gate.device)
        for expert, matrix in enumerate(numbers):
            parts = (part.select(slice(expert, expert + 1)).dequantize(dtype)[0] for part in (self.gate, self.up))
            torch.cat(list(parts), out=matrix)
        return numbers

    def pack(self) -> PackedTensor | None:
        """The packed stack, if both halves have the same kind of codes. NVFP4 keeps a global scale for each half."""
        if self.packed_format is None:
            return None
        gate = self.gate.pack()
        up = self.up.pack()
        assert gate is not None
        assert up is not None
        pairs: list[tuple[Tensor | None, Tensor | None]] = list(zip(gate, up, strict=True))
        fields = (None if None in pair else torch.cat(cast(tuple[Tensor, Tensor], pair), dim=1) for pair in pairs)
        return cast(PackedTensor, type(gate)(*fields))


@dataclass(frozen=True)
class PaddedWeight:
    """A weight without the rows and inputs of zeros that its file added."""

    stored: StoredWeight
    name: str  # in the file
    shape: tuple[int, ...]  # [..., O, I], without the padding
    parts: int = 1  # each part of the rows has padding at its end: 2 for gate and up in one tensor

    @property
    def format(self) -> str:
        """ggml's name of the format."""
        return self.stored.format

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stored.nbytes

    @property
    def packed_format(self) -> None:
        """The format that `pack` returns: none."""

    def select(self, matrices: slice) -> "PaddedWeight":
        """Some matrices of a stack."""
        stored = self.stored.select(matrices)
        return replace(self, stored=stored, shape=(stored.shape[0], *self.shape[1:]))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers without the padding, which must be zeros."""
        if len(self.shape) == 2:
            return self._cut(self.stored.dequantize(dtype))
        numbers: Tensor | None = None
        for index in range(self.shape[0]):
            matrix = self._cut(self.stored.select(slice(index, index + 1)).dequantize(dtype)[0])
            numbers = matrix.new_empty(self.shape) if numbers is None else numbers
            numbers[index] = matrix
        assert numbers is not None  # a shape has no zeros
        return numbers

    def pack(self) -> None:
        """The padding would have to be cut inside of packed bytes; the weight is quantized again instead."""

    def _cut(self, matrix: Tensor) -> Tensor:
        rows, inputs = self.shape[-2:]
        by_part = matrix.unflatten(0, (self.parts, -1))
        kept = by_part[:, : rows // self.parts, :inputs]
        if int(by_part.count_nonzero()) != int(kept.count_nonzero()):
            raise CheckpointError(
                f"tensor {self.name} has the shape {list(self.stored.shape)}, the metadata describes {list(self.shape)}, "
                "and what lies outside of that is not zero"
            )
        return kept.flatten(0, 1).contiguous()
