"""The tensors of a folder of safetensors files, memory-mapped."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from redraft.checkpoint.names import DRAFT_HEAD, DRAFT_HEAD_PREFIX, INDEX, VISION, WEIGHTS, CheckpointError
from redraft.config import read_json, require_regular_file, show_value

DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2}


class CheckpointTensors(Mapping[str, Tensor]):
    """The tensors of a folder by published name.

    Nothing is read until a tensor is used: it is a view of the mapped file. The host holds no copy of its own, only
    reclaimable file pages.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}  # file name -> safe_open handle
        self._file_of: dict[str, str] = {}  # tensor name -> file name
        for file in self._list_files():
            self._files[file] = _open_safetensors(folder / file)
            self._file_of |= dict.fromkeys(self._files[file].keys(), file)

    def _list_files(self) -> list[str]:
        """The weight files: those of the index, or the single file when there is no index; then the draft head's, if any."""
        draft_head = [DRAFT_HEAD] if (self.folder / DRAFT_HEAD).exists() else []
        if not (self.folder / INDEX).exists():
            return [WEIGHTS, *draft_head]
        weight_map = read_json(self.folder / INDEX).get("weight_map")
        files: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
        for file in files:
            if not isinstance(file, str) or file != Path(file).name:
                raise CheckpointError(
                    f"{self.folder / INDEX} is not an index of files in its folder: it names {show_value(file)}"
                )
        return [*sorted(set(files)), *draft_head]

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor, from the header of its file: its values are not read."""
        return list(self._files[self._file_of[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of a tensor in safetensors' words ("BF16", "F8_E4M3"), from the header of its file."""
        return str(self._files[self._file_of[name]].get_slice(name).get_dtype())

    def nbytes(self, name: str) -> int:
        """The size of a tensor, from the header of its file."""
        return math.prod(self.shape(name)) * DTYPE_BYTES.get(self.dtype(name), 1)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of  # Mapping's own version would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def folder_with_vision(folder: Path) -> Path | None:
    """Returns the folder if its checkpoint has vision weights to carry along, else None. A GGUF file has none."""
    if folder.is_file():
        return None
    has_vision = any(name.startswith(VISION) for name in CheckpointTensors(folder))
    return folder if has_vision else None


def read_draft_head_size(folder: Path, hidden_size: int) -> int:
    """Returns the inner size of the draft head in a folder, from the header of its file; 0 if there is no such file."""
    path = folder / DRAFT_HEAD
    if not path.exists():
        return 0
    file = _open_safetensors(path)
    shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    inner = shapes.get(DRAFT_HEAD_PREFIX + "inner.weight", [0])
    size = inner[0] if inner else 0
    expected = {
        DRAFT_HEAD_PREFIX + "inner.weight": [size, 2 * hidden_size],
        DRAFT_HEAD_PREFIX + "outer.weight": [hidden_size, size],
    }
    if size < 1 or shapes != expected:
        raise CheckpointError(
            f"{path} holds {show_value(shapes)}, but a draft head of this model has inner.weight [N, {2 * hidden_size}] "
            f"and outer.weight [{hidden_size}, N]"
        )
    return size


def _open_safetensors(path: Path) -> Any:
    """Maps a file and reads its header. The message of an error names the file."""
    try:
        require_regular_file(path)
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cut short ({error}); download it again") from None
