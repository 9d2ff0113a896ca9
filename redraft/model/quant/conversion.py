"""Conversion: brings a weight into its target format and keeps count of what was rounded.

A few experts, or a few rows of the embedding, are moved to the device and converted there at a time. So the device never
holds a weight in full precision that is going to be packed.

Shapes: E matrices of a stack, O rows, I inputs.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redraft.kernels.packed import (
    FORMATS,
    PackedTensor,
    Weight,
    count_packed_bytes,
    dequantize_packed,
    map_weight,
    weight_tensors,
)
from redraft.model.quant.policy import EMBEDDING, EXPERT_GATE_UP, FORMAT_WORDS, NATIVE, Target, part_of
from redraft.model.quant.quantizers import RoundingError, measure_error, quantize_weight
from redraft.model.quant.stored import PLAIN_FORMATS, StoredFormat, StoredWeight

LOG = logging.getLogger("redraft")
EXPERTS_AT_ONCE = 4  # of the released shape: 0.06 GB in float32, and 0.45 GB for the search of NVFP4 scales
ROWS_AT_ONCE = 2**13  # of an embedding


def split_weight(name: str, weight: Tensor | StoredWeight) -> Iterator[Tensor | StoredWeight]:
    """Yields a weight, by our name of it, in pieces: some experts of a stack, some rows of an embedding, a matrix whole."""
    return _split(weight, ROWS_AT_ONCE) if part_of(name) == EMBEDDING else split_stack(weight)


def split_stack(weight: Tensor | StoredWeight) -> Iterator[Tensor | StoredWeight]:
    """Yields a stack a few matrices at a time; a single matrix as it is."""
    return _split(weight, EXPERTS_AT_ONCE) if len(weight.shape) == 3 else iter((weight,))


def _split(weight: Tensor | StoredWeight, count: int) -> Iterator[Tensor | StoredWeight]:
    for first in range(0, weight.shape[0], count):
        part = slice(first, first + count)
        yield weight[part] if isinstance(weight, Tensor) else weight.select(part)


def stored_format(weight: Tensor | StoredWeight) -> StoredFormat | None:
    """The formats of a quantized weight; None for one in full precision."""
    if isinstance(weight, Tensor) or weight.format in PLAIN_FORMATS:
        return None
    return StoredFormat(weight.format, weight.packed_format)


def plain_dtype(weight: Tensor | StoredWeight) -> torch.dtype | None:
    """The dtype of a weight in full precision; None for a quantized one."""
    return weight.dtype if isinstance(weight, Tensor) else PLAIN_FORMATS.get(weight.format)


def format_name(weight: Tensor | StoredWeight) -> str:
    """The format that a weight is stored in: the file's word, or the dtype."""
    if isinstance(weight, Tensor):
        return dtype_name(weight.dtype)
    return dtype_name(PLAIN_FORMATS[weight.format]) if weight.format in PLAIN_FORMATS else weight.format


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, "bfloat16"."""
    return str(dtype).removeprefix("torch.")


class PackedPiece(NamedTuple):
    """Some packed matrices, and what rounding did to them; None if the file's codes were taken as they are."""

    weight: PackedTensor
    error: RoundingError | None


def count_bytes(name: str, shape: Sequence[int], target: Target, stored: StoredFormat | None, dtype: torch.dtype) -> int:
    """The bytes of a weight in memory, by our name of it, once it is converted to its target."""
    if target.format is None or not target.is_packed:
        return math.prod(shape) * dtype.itemsize
    is_native = stored is not None and target.format == NATIVE.get(stored.format)
    packed_format = stored.packed_format if stored is not None and is_native else target.format
    assert packed_format is not None  # `QuantPolicy.targets` has seen to it
    *stack, rows, inputs = shape
    parts = parts_of(name)
    return math.prod(stack) * parts * count_packed_bytes(rows // parts, inputs, packed_format)


def pack_piece(weight: Tensor | StoredWeight, to: str, *, parts: int = 1, device: torch.device | str = "cpu") -> PackedPiece:
    """Packs a few matrices: takes the codes of the file if they have this format, else rounds to it."""
    if not isinstance(weight, Tensor) and NATIVE.get(weight.format) == to:
        packed = weight.pack()
        if packed is not None:
            return PackedPiece(map_weight(packed, lambda tensor: tensor.to(device)), None)
    numbers = (weight if isinstance(weight, Tensor) else weight.dequantize()).to(device)
    rounded = quantize_weight(numbers, to, parts)
    return PackedPiece(rounded, measure_error(numbers, rounded))


def parts_of(name: str) -> int:
    """The parts of a weight that have a global scale each: the gate rows and the up rows of experts are two."""
    return 2 if name.endswith(EXPERT_GATE_UP) else 1


class Conversion(NamedTuple):
    """A kind of conversion: weights of one part, from one format to another."""

    part: str
    source: str
    target: str


class JoinedWeight:
    """A weight that is put together piece by piece on a device: memory holds the result and one piece."""

    def __init__(self, length: int, device: torch.device | str) -> None:
        self.length = length  # of the first axis
        self.device = device
        self.weight: Any = None
        self._filled = 0

    def append(self, piece: Weight) -> None:
        """Adds the next matrices of a stack, or the next rows of a matrix."""
        size = len(weight_tensors(piece)[0])
        if size == self.length:
            self.weight = map_weight(piece, lambda tensor: tensor.to(self.device))
            return
        if self.weight is None:
            self.weight = map_weight(piece, self._allocate)
        for whole, part in zip(weight_tensors(self.weight), weight_tensors(piece), strict=True):
            whole[self._filled : self._filled + size].copy_(part)
        self._filled += size

    def _allocate(self, part: Tensor) -> Tensor:
        return torch.empty((self.length, *part.shape[1:]), dtype=part.dtype, device=self.device)


class Converter:
    """Converts the weights of a model on a device, and remembers every kind of conversion."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = device
        self._counts: dict[Conversion, int] = {}
        self._errors: dict[Conversion, RoundingError] = {}

    def convert(
        self,
        target: Target,
        name: str,
        weight: Tensor | StoredWeight,
        dtype: torch.dtype,
        result_device: torch.device | str | None = None,
    ) -> Weight:
        """A weight, by our name of it, as its target says. The result lies on another device if one is given."""
        joined = JoinedWeight(weight.shape[0], self.device if result_device is None else result_device)
        if target.format is None:
            return self._read(name, weight, dtype, joined)
        errors = []
        for piece in split_weight(name, weight):
            packed, error = pack_piece(piece, target.format, parts=parts_of(name), device=self.device)
            joined.append(dequantize_packed(packed, weight.shape[-1], dtype) if target.is_dequantized else packed)
            errors += [] if error is None else [error]
        words = FORMAT_WORDS[FORMATS[type(packed)]]
        if target.is_dequantized:
            self._record(name, weight, f"{words}, dequantized", errors)
        elif errors:
            self._record(name, weight, words, errors)
        result: Weight = joined.weight
        return result

    def _read(self, name: str, weight: Tensor | StoredWeight, dtype: torch.dtype, joined: JoinedWeight) -> Tensor:
        """A weight in full precision. First to the device, then to the precision: a conversion on the way would be slow."""
        if isinstance(weight, Tensor) and weight.dtype == dtype:
            return weight.to(joined.device)
        stored = plain_dtype(weight)
        if stored is None or torch.promote_types(stored, dtype) != dtype:  # the dtype cannot hold every number
            self._record(name, weight, dtype_name(dtype), [])
        for piece in split_weight(name, weight):
            joined.append(piece.to(self.device).to(dtype) if isinstance(piece, Tensor) else piece.dequantize(dtype))
        assert isinstance(joined.weight, Tensor)
        return joined.weight

    def _record(self, name: str, weight: Tensor | StoredWeight, target: str, errors: list[RoundingError]) -> None:
        conversion = Conversion(part_of(name), format_name(weight), target)
        self._counts[conversion] = self._counts.get(conversion, 0) + 1
        for error in errors:
            known = self._errors.get(conversion)
            self._errors[conversion] = error if known is None else known + error

    def describe(self) -> tuple[str, ...]:
        """One sentence for every kind of conversion, with the measured rounding error, relative to the weights."""
        sentences = []
        for conversion, count in self._counts.items():
            error = self._errors.get(conversion)
            measured = f", relative error {error.relative:.2%}" if error else ""
            weights = "weight" if count == 1 else "weights"
            sentences.append(f"{conversion.part}, {count} {weights}: {conversion.source} -> {conversion.target}{measured}")
        return tuple(sentences)


def log_conversions(sentences: tuple[str, ...]) -> None:
    """Logs each kind of conversion once."""
    for sentence in sentences:
        LOG.info("%s", sentence)
