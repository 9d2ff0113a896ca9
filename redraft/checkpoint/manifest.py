"""Manifest: the list of the files that one save wrote, in redraft.json. Loading refuses a folder with files of two saves.

    "files": {"config.json": {"bytes": 1834, "sha256": "..."}, "model.safetensors": {"bytes": 60190, "header_sha256": "..."}}

The hash of a safetensors file covers its header only, which is read in no time. The header holds an id that is new at every
save. Folders without a manifest, such as published ones, are loaded without this check.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redraft.checkpoint.names import (
    CONFIG,
    DRAFT_HEAD,
    GENERATION_CONFIG,
    INDEX,
    REDRAFT_CONFIG,
    TOKENIZER_FILES,
    CheckpointError,
)
from redraft.config import read_file, read_json, require_object, require_regular_file

FILES = "files"
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The manifest of a folder: every file but redraft.json, which will hold it."""
    return {path.name: _describe(path) for path in sorted(folder.iterdir()) if path.name != REDRAFT_CONFIG}


@contextmanager
def verify_files(folder: str | Path) -> Iterator[None]:
    """Refuses a folder whose files do not belong together, or that is replaced while the caller reads it."""
    folder = Path(folder)
    state = _state(folder)
    if (folder / REDRAFT_CONFIG).exists():
        files = read_json(folder / REDRAFT_CONFIG).get(FILES)
        _compare(folder, require_object(f"{folder / REDRAFT_CONFIG}: {FILES}", files))
    try:
        yield
    finally:
        if _state(folder) != state:
            raise CheckpointError(f"{folder} was replaced while it was read; load it again")


def _state(folder: Path) -> tuple[int, int, bytes] | None:
    """What changes when a folder is replaced: its inode, and the manifest with its hashes."""
    try:
        status = folder.stat()
        manifest = read_file(folder / REDRAFT_CONFIG) if (folder / REDRAFT_CONFIG).exists() else b""
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, manifest


def _compare(folder: Path, files: Mapping[str, Any]) -> None:
    """Compares the files of a folder with its manifest. Files that a loader does not read may be anything."""
    if not files:
        return
    for name, saved in files.items():
        if name != Path(name).name:
            raise CheckpointError(f"{folder / REDRAFT_CONFIG} lists {name!r}, which is no file of its folder")
        if not (folder / name).exists():
            raise CheckpointError(f"{folder / name} is missing; it was saved with this checkpoint")
        if _describe(folder / name) != saved:
            _refuse(folder / name)
    has_tokenizer = any(name in files for name in TOKENIZER_FILES)  # else `Tokenizer.save` may have added one
    for name in (CONFIG, GENERATION_CONFIG, INDEX, DRAFT_HEAD, *(TOKENIZER_FILES if has_tokenizer else ())):
        if name not in files and (folder / name).exists():
            _refuse(folder / name)


def _refuse(path: Path) -> None:
    raise CheckpointError(
        f"{path} is not the file that was saved with this checkpoint: save or download the checkpoint again, or, if you "
        f'changed the file yourself, remove "{FILES}" from {REDRAFT_CONFIG}'
    )


def _describe(path: Path) -> dict[str, Any]:
    require_regular_file(path)
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        return {"bytes": size, "sha256": hashlib.sha256(read_file(path)).hexdigest()}
    with open(path, "rb") as file:
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), MAX_HEADER_BYTES))
    return {"bytes": size, "header_sha256": hashlib.sha256(length + header).hexdigest()}
