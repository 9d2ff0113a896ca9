"""Conversion: brings a weight into its target format, a few experts at a time, and keeps count of what was rounded.

Shapes: E matrices of a stack, O rows, I inputs.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from redraft.kernels.fp8 import Fp8Tensor
from redraft.kernels.packed import FORMATS, PackedTensor, count_packed_bytes, dequantize_packed
from redraft.model.quant.policy import EMBEDDING, EXPERT_GATE_UP, FORMAT_WORDS, NATIVE, QuantPolicy, Target, part_of
from redraft.model.quant.quantizers import RoundingError, measure_error, quantize_weight
from redraft.model.quant.stored import StoredFormat, StoredWeight

LOG = logging.getLogger("redraft")
EXPERTS_AT_ONCE = 8
ROWS_AT_ONCE = 2**14  # of an embedding
WeightT = TypeVar("WeightT", bound=Tensor | PackedTensor)


def split_stack(weight: Tensor | StoredWeight) -> Iterator[Tensor | StoredWeight]:
    """Yields a stack a few matrices at a time; a single matrix as it is."""
    if len(weight.shape) < 3:
        yield weight
        return
    for first in range(0, weight.shape[0], EXPERTS_AT_ONCE):
        some = slice(first, first + EXPERTS_AT_ONCE)
        yield weight[some] if isinstance(weight, Tensor) else weight.select(some)


def stored_format(weight: Tensor | StoredWeight) -> StoredFormat | None:
    """The formats of a quantized weight; None for one in full precision."""
    return None if isinstance(weight, Tensor) else StoredFormat(weight.format, weight.packed_format)


def format_name(weight: Tensor | StoredWeight) -> str:
    """The format that a weight is stored in: the file's word, or the dtype."""
    return str(weight.dtype).removeprefix("torch.") if isinstance(weight, Tensor) else weight.format


class PackedPiece(NamedTuple):
    """Some packed matrices, and what rounding did to them; None if the file's codes were taken as they are."""

    weight: PackedTensor
    error: RoundingError | None


def choose_target(policy: QuantPolicy, name: str, stored: StoredFormat | None) -> Target:
    """What becomes of a weight, by our name of it. Codes that fit no format of ours are rounded to the substitute.

    Integers in groups of 16 are such codes.
    """
    target = policy.target(part_of(name), stored.format if stored is not None else None)
    if stored is None or stored.packed_format is not None or target.format is None:
        return target
    return target._replace(format=policy.substitute) if target.format == NATIVE.get(stored.format) else target


def count_bytes(name: str, shape: Sequence[int], target: Target, stored: StoredFormat | None, dtype: torch.dtype) -> int:
    """The bytes of a weight in memory, by our name of it, once it is converted to its target."""
    if target.format is None or target.is_dequantized:
        return math.prod(shape) * dtype.itemsize
    is_native = stored is not None and target.format == NATIVE.get(stored.format)
    packed_format = stored.packed_format if stored is not None and is_native else target.format
    assert packed_format is not None  # `choose_target` has seen to it
    *stack, rows, inputs = shape
    parts = parts_of(name)
    return math.prod(stack) * parts * count_packed_bytes(rows // parts, inputs, packed_format)


def pack_piece(weight: Tensor | StoredWeight, to: str, *, parts: int = 1, device: torch.device | str = "cpu") -> PackedPiece:
    """Packs a few matrices: takes the codes of the file if they have this format, else rounds to it."""
    if not isinstance(weight, Tensor) and NATIVE.get(weight.format) == to:
        packed = weight.pack()
        if packed is not None:
            return PackedPiece(move_packed(packed, device), None)
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


class Converter:
    """Converts the weights of a model, and remembers every kind of conversion."""

    def __init__(self, policy: QuantPolicy, device: torch.device | str) -> None:
        self.policy = policy
        self.device = device
        self._counts: dict[Conversion, int] = {}
        self._errors: dict[Conversion, RoundingError] = {}

    def convert(self, name: str, weight: Tensor | StoredWeight, dtype: torch.dtype) -> Tensor | PackedTensor:
        """A weight, by our name of it, in the format that the policy chooses, on the device."""
        return self.convert_to(choose_target(self.policy, name, stored_format(weight)), name, weight, dtype)

    def convert_to(
        self, target: Target, name: str, weight: Tensor | StoredWeight, dtype: torch.dtype
    ) -> Tensor | PackedTensor:
        """The same with a given target."""
        if target.format is None:
            return self._read(name, weight, dtype)
        if part_of(name) == EMBEDDING:
            return self._pack_embedding(name, weight, dtype)
        pieces = [
            pack_piece(piece, target.format, parts=parts_of(name), device=self.device) for piece in split_stack(weight)
        ]
        packed = join([piece.weight for piece in pieces])
        errors = [piece.error for piece in pieces if piece.error is not None]
        words = FORMAT_WORDS[FORMATS[type(packed)]]
        if target.is_dequantized:
            self._record(name, weight, f"{words}, dequantized", errors)
            return dequantize_packed(packed, weight.shape[-1], dtype)
        if errors:
            self._record(name, weight, words, errors)
        return packed

    def _pack_embedding(self, name: str, weight: Tensor | StoredWeight, dtype: torch.dtype) -> Fp8Tensor:
        """The embedding in fp8, some rows at a time: in float32 the whole table would take twice its memory."""
        table = (weight if isinstance(weight, Tensor) else weight.dequantize(dtype)).to(self.device)
        pieces = []
        errors = []
        for rows in table.split(ROWS_AT_ONCE):
            packed = quantize_weight(rows, "fp8")
            pieces.append(packed)
            errors.append(measure_error(rows, packed))
        self._record(name, weight, FORMAT_WORDS["fp8"], errors)
        joined = join(pieces)
        assert isinstance(joined, Fp8Tensor)
        return joined

    def _read(self, name: str, weight: Tensor | StoredWeight, dtype: torch.dtype) -> Tensor:
        """A weight in full precision. First to the device, then to the precision: a conversion on the way would be slow."""
        if isinstance(weight, Tensor):
            return weight.to(self.device).to(dtype)
        self._record(name, weight, str(dtype).removeprefix("torch."), [])
        numbers = torch.empty(weight.shape, dtype=dtype, device=self.device)
        pieces = numbers.split(EXPERTS_AT_ONCE) if len(weight.shape) == 3 else (numbers,)
        for target, piece in zip(pieces, split_stack(weight), strict=True):
            assert not isinstance(piece, Tensor)
            target.copy_(piece.dequantize(dtype))
        return numbers

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


def join(pieces: list[PackedTensor]) -> PackedTensor:
    """Joins packed stacks into one."""
    if len(pieces) == 1:
        return pieces[0]
    fields: list[Any] = [None if tensors[0] is None else torch.cat(tensors) for tensors in zip(*pieces, strict=True)]
    return type(pieces[0])(*fields)


def move_packed(weight: WeightT, device: torch.device | str) -> WeightT:
    """A weight on another device, packed or not."""
    if isinstance(weight, Tensor):
        return weight.to(device)
    packed: Any = weight
    fields: list[Any] = [None if tensor is None else tensor.to(device) for tensor in packed]
    return type(packed)(*fields)
