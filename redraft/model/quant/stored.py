"""StoredWeight: a weight as its file stores it, before it becomes a tensor or a packed tensor.

Each kind of file has a class of its own in `checkpoint/`. Nothing is read or allocated before a method is called. A weight
in full precision that is one tensor of its file is a Tensor instead: a view of the mapped file.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from redraft.kernels.packed import PackedTensor

# The words of safetensors and GGUF files for full precision.
PLAIN_FORMATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredFormat(NamedTuple):
    """What the memory plan needs to know of a quantized weight."""

    format: str  # the file's word
    packed_format: str | None  # as in StoredWeight


class StoredWeight(Protocol):
    """A matrix [O, I] of a file, or the stack [E, O, I] of a layer's experts, in a format of the file."""

    @property
    def format(self) -> str:
        """The file's own word for the format: "Q4_K", "nvfp4-pack-quantized", "BF16"."""

    @property
    def packed_format(self) -> str | None:
        """The format that `pack` returns, a word of `count_packed_bytes`; None where it returns None. Reads headers only."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, not of its bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file, scales included."""

    def select(self, part: slice, /) -> "StoredWeight":
        """Some matrices of a stack, or some rows of a matrix: conversions work on a few at a time and need little memory."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that the weight stands for: to the bit those of the format's reference, then rounded to the dtype."""

    def pack(self) -> PackedTensor | None:
        """The weight in a format that the kernels run, without another rounding of its codes; None if no format fits.

        Scales may be rounded to bf16 (relative error 2^-9).
        """
