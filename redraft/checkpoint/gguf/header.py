"""Reads the header of a GGUF file: metadata and the list of tensors. The numbers of the tensors stay in the mapped file.

    magic "GGUF", version, number of tensors, number of metadata keys
    metadata:  key, type, value          an array has the type of its items, their number, and the items
    tensors:   name, sizes, type, offset
    padding to the alignment, then the data of the tensors

The `gguf` package reads the same, but makes an array of every token and every merge: a minute and 1.3 GiB for Gemma's
vocabulary. This reader takes half a second. A file comes from anywhere, so every count, length and offset is compared with
the size of the file before anything is allocated.
"""

import math
import mmap
import struct
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.checkpoint.gguf.blocks import BLOCK_TYPES, TYPE_NAMES, BlockType
from redraft.checkpoint.names import CheckpointError
from redraft.config import ConfigError, require_regular_file, show_value

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # the first version has shorter counts, and no file of this model has it
BIG_ENDIAN_VERSIONS = tuple(version << 24 for version in VERSIONS)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # type -> struct
STRING = 8
ARRAY = 9
ALIGNMENT = "general.alignment"
DEFAULT_ALIGNMENT = 32
LARGEST_ALIGNMENT = 65536
MAX_HEADER_BYTES = 100_000_000  # Gemma's vocabulary takes 17 million
MAX_ITEMS = 2**22  # of all arrays together; those of Gemma have 1.3 million
MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class TensorInfo:
    """An entry of the list of tensors."""

    name: str
    type: BlockType
    shape: tuple[int, ...]  # rows before inputs, as in PyTorch; files have them the other way round
    start: int  # the first byte, from the start of the file

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.type.size * self.type.nbytes


@dataclass(frozen=True)
class GgufFile:
    """The header of a file, and the whole file as mapped bytes."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: Tensor  # uint8

    def rows(self, name: str) -> Tensor:
        """The bytes of a tensor, a view of the mapped file: [..., bytes of a row]."""
        info = self.tensors[name]
        row_bytes = info.shape[-1] // info.type.size * info.type.nbytes
        return self.data[info.start : info.start + info.nbytes].view(*info.shape[:-1], row_bytes)


def read_gguf(path: str | Path, check_metadata: Callable[[Mapping[str, Any]], None] = lambda metadata: None) -> GgufFile:
    """Maps a file and reads its header. `check_metadata` may refuse the file before its tensors are looked at."""
    path = Path(path)
    try:
        require_regular_file(path)
        with open(path, "rb") as file:
            mapped = _map(file.fileno())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    reader = _HeaderReader(path, mapped)
    tensor_count, key_count = reader.read_start()
    metadata = reader.read_metadata(key_count)
    check_metadata(metadata)
    tensors = reader.read_tensors(tensor_count, _alignment(path, metadata))
    with warnings.catch_warnings():  # of a mapping that must not be written: nobody writes
        warnings.simplefilter("ignore")
        return GgufFile(path, metadata, tensors, torch.frombuffer(mapped, dtype=torch.uint8))


def _map(descriptor: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    except OSError:  # the file is larger than the memory, and a private mapping could need all of it
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    is_number = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not is_number or not 8 <= alignment <= LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise CheckpointError(
            f"{path}: {ALIGNMENT} must be a power of two from 8 to {LARGEST_ALIGNMENT}, got {show_value(alignment)}"
        )
    return alignment


class _HeaderReader:
    """Reads a header from its start to its end."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self.mapped = mapped
        self.position = 0
        self.end = min(len(mapped), MAX_HEADER_BYTES)
        self.items = 0  # of all arrays so far

    def read_start(self) -> tuple[int, int]:
        """Checks magic and version. Returns the number of tensors and the number of metadata keys."""
        magic = self.mapped[: len(MAGIC)]
        if magic != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it begins with {magic!r}, not with {MAGIC!r}")
        self.position = len(MAGIC)
        version = self._number("I")
        if version in BIG_ENDIAN_VERSIONS:
            raise CheckpointError(f"{self.path} is a big-endian GGUF file; redraft reads little-endian ones")
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path} has GGUF version {version}; redraft reads versions 2 and 3")
        tensors = self._count("tensors", least_bytes=32)  # a name of no length, one size, type and offset
        return tensors, self._count("metadata keys", least_bytes=13)  # a key of no length and a byte

    def read_metadata(self, count: int) -> dict[str, Any]:
        """Reads the keys and their values: numbers, booleans, texts, and lists of these."""
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._text("a metadata key")
            if key in metadata:
                raise CheckpointError(f"{self.path} has the metadata key {show_value(key)} twice")
            kind = self._number("I")
            metadata[key] = self._list(key) if kind == ARRAY else self._value(key, kind)
        return metadata

    def read_tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        """Reads the list of tensors, and checks that each lies inside the file and none overlaps another."""
        entries = [self._tensor() for _ in range(count)]
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        free = start  # the byte behind the tensors so far
        for offset, name, block_type, shape in sorted(entries, key=lambda entry: entry[0]):
            info = TensorInfo(name, block_type, shape, start + offset)
            if name in tensors:
                raise CheckpointError(f"{self.path} has the tensor {show_value(name)} twice")
            if offset % alignment:
                raise CheckpointError(
                    f"{self.path}: tensor {show_value(name)} begins at {offset}, which is no multiple of {alignment}"
                )
            if info.start < free:
                raise CheckpointError(f"{self.path}: tensor {show_value(name)} overlaps the one before it")
            free = info.start + info.nbytes
            if free > len(self.mapped):
                raise CheckpointError(
                    f"{self.path} is damaged or cut short: tensor {show_value(name)} ends at byte {free}, the file has "
                    f"{len(self.mapped)}; download it again"
                )
            tensors[name] = info
        return tensors

    def _tensor(self) -> tuple[int, str, BlockType, tuple[int, ...]]:
        name = self._text("the name of a tensor")
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise CheckpointError(f"{self.path}: tensor {show_value(name)} has {dimensions} dimensions, not 1 to 4")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        number = self._number("I")
        type_name = TYPE_NAMES.get(number, f"number {number}")
        block_type = BLOCK_TYPES.get(type_name)
        if block_type is None:
            raise CheckpointError(
                f"{self.path}: tensor {show_value(name)} has the format {type_name}; redraft reads files of "
                f"{', '.join(BLOCK_TYPES)}, such as Q4_K_M, Q5_K_M, Q6_K, Q8_0 and BF16 ones"
            )
        if 0 in shape or shape[-1] % block_type.size:
            raise CheckpointError(
                f"{self.path}: tensor {show_value(name)} has the shape {show_value(list(shape))}, which is no whole number "
                f"of {type_name} blocks of {block_type.size}"
            )
        return self._number("Q"), name, block_type, shape

    def _value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self._text(key)
        if kind not in SCALARS:
            raise CheckpointError(f"{self.path}: the metadata key {show_value(key)} has a value of the unknown type {kind}")
        return self._number(SCALARS[kind])

    def _list(self, key: str) -> list[Any]:
        kind = self._number("I")
        if kind != STRING and kind not in SCALARS:
            described = "arrays" if kind == ARRAY else f"the unknown type {kind}"
            raise CheckpointError(f"{self.path}: the metadata key {show_value(key)} is an array of {described}")
        item_bytes = 8 if kind == STRING else struct.calcsize("<" + SCALARS[kind])
        count = self._count(f"items of {key}", item_bytes)
        self.items += count
        if self.items > MAX_ITEMS:
            raise CheckpointError(f"{self.path}: the arrays of the metadata have more than {MAX_ITEMS} items")
        if kind == STRING:
            return self._texts(count, key)
        begin = self._advance(count * item_bytes)
        return list(struct.unpack_from(f"<{count}{SCALARS[kind]}", self.mapped, begin))

    def _texts(self, count: int, what: str) -> list[str]:
        """Texts, each after its length. One loop without calls: there are 777,050 of them."""
        mapped = self.mapped
        position = self.position
        last = self.end - 8  # where a length can begin
        read_length = struct.Struct("<Q").unpack_from
        pieces = []
        for _ in range(count):
            if position > last:
                self._refuse_end()
            begin = position + 8
            position = begin + read_length(mapped, position)[0]
            if position > self.end:
                self._refuse_end()
            pieces.append(mapped[begin:position])
        self.position = position
        try:
            return [piece.decode() for piece in pieces]
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: {show_value(what)} holds a text that is not UTF-8") from None

    def _text(self, what: str) -> str:
        return self._texts(1, what)[0]

    def _number(self, form: str) -> Any:
        return struct.unpack_from("<" + form, self.mapped, self._advance(struct.calcsize("<" + form)))[0]

    def _count(self, what: str, least_bytes: int) -> int:
        """A number of entries, refused if the rest of the file cannot hold them."""
        count = self._number("Q")
        if count * least_bytes > self.end - self.position:
            raise CheckpointError(
                f"{self.path} is damaged or cut short: its header names {count} {show_value(what)[1:-1]}, and "
                f"{self.end - self.position} bytes are left for them"
            )
        return count

    def _advance(self, nbytes: int) -> int:
        """The current position; the next one is this many bytes further."""
        begin = self.position
        if begin + nbytes > self.end:
            self._refuse_end()
        self.position = begin + nbytes
        return begin

    def _refuse_end(self) -> None:
        if self.end < len(self.mapped):
            raise CheckpointError(f"{self.path}: the header has more than {MAX_HEADER_BYTES} bytes")
        raise CheckpointError(f"{self.path} is damaged or cut short: the file ends inside the header; download it again")
