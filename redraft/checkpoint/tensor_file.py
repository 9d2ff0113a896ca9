"""Writes safetensors files: at once with the safetensors library, or tensor by tensor where not all are in memory.

Tensor by tensor: the names, dtypes and shapes are known before the first tensor is written, so the header comes first and
every tensor has its place. Such a file gets its name when it is whole.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import save_file
from torch import Tensor

from redraft.checkpoint.publish_packed import TensorHeader

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Writes tensors in host memory, with the permissions of any new file: the library's are for the owner alone."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)


def header_bytes(header: TensorHeader) -> int:
    """The bytes that a tensor will have."""
    return math.prod(header.shape) * header.dtype.itemsize


class TensorFileWriter:
    """Writes PATH.part, which becomes PATH when the block ends without an error."""

    def __init__(self, path: Path, headers: Sequence[TensorHeader], metadata: dict[str, str]) -> None:
        self.path = path
        self.part = path.with_name(f"{path.name}.part")
        self._missing = {header.name: header for header in headers}
        offsets: dict[str, int] = {}
        end = 0
        # Wide dtypes first: every tensor then begins at a multiple of its item size, which memory-mapped views need.
        for header in sorted(headers, key=lambda header: -header.dtype.itemsize):
            offsets[header.name] = end
            end += header_bytes(header)
        described = {
            header.name: {
                "dtype": DTYPE_NAMES[header.dtype],
                "shape": list(header.shape),
                "data_offsets": [offsets[header.name], offsets[header.name] + header_bytes(header)],
            }
            for header in headers
        }
        text = json.dumps({"__metadata__": metadata, **described}).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self._offsets = {name: len(self._head) + offset for name, offset in offsets.items()}
        self._size = len(self._head) + end

    def __enter__(self) -> "TensorFileWriter":
        self._file = open(self.part, "wb")
        self._file.write(self._head)
        self._file.truncate(self._size)
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor to its place in the file."""
        header = self._missing.pop(name)
        assert (tensor.dtype, tuple(tensor.shape)) == (header.dtype, header.shape), (name, tensor.dtype, tensor.shape)
        self._file.seek(self._offsets[name])
        if tensor.numel():
            self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            assert not self._missing, f"{self.path}: not written: {list(self._missing)[:3]}"
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if kind is None:
            os.replace(self.part, self.path)
