"""Tensors of a folder of safetensors files, memory-mapped."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from redraft.checkpoint.names import INDEX, VISION, WEIGHTS, CheckpointError
from redraft.config import read_json


class Tensors(Mapping[str, Tensor]):
    """A folder's tensors by published name, memory-mapped: nothing is read until it is used."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files, self._file_of = folder, {}, {}
        for file in self._listed():
            try:
                self._files[file] = safe_open(folder / file, framework="pt")
            except FileNotFoundError:
                raise CheckpointError(f"{folder / file} is missing") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{folder / file} is damaged or cut short ({error}); download it again") from None
            self._file_of |= dict.fromkeys(self._files[file].keys(), file)

    def _listed(self) -> list[str]:
        if not (self.folder / INDEX).exists():
            return [WEIGHTS]
        listed = read_json(self.folder / INDEX).get("weight_map")
        files = list(listed.values()) if isinstance(listed, dict) else [None]
        if wrong := [file for file in files if not isinstance(file, str) or file != Path(file).name]:
            raise CheckpointError(f"{self.folder / INDEX} is not an index of files in its folder: it names {wrong[0]!r}")
        return sorted(set(files))

    def __getitem__(self, name: str) -> Tensor:
        return self._files[self._file_of[name]].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def folder_with_vision(folder: Path) -> Path | None:
    """The folder, if its checkpoint has vision weights worth carrying along."""
    return folder if any(name.startswith(VISION) for name in Tensors(folder)) else None
