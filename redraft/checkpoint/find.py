"""Finds a checkpoint: a local folder, a model in the package by its name, or a hub id, downloaded once."""

import re
from pathlib import Path

from redraft.checkpoint.names import CONFIG, CheckpointError

PACKAGED = Path(__file__).parents[1] / "weights"
PACKAGED_NAMES = ("tiny", "sudoku")


def find(path_or_id: str | Path, *, weights: bool = True) -> Path:
    """The folder of a checkpoint: a local one, one in the package by its name ("tiny"), or a hub id, downloaded once.

    Without weights only the small files are fetched.
    """
    try:
        folder = Path(path_or_id).expanduser()
    except RuntimeError as error:  # ~nobody
        raise CheckpointError(f"there is no folder {str(path_or_id)!r}: {error}") from None
    if str(path_or_id) in PACKAGED_NAMES and not (folder / CONFIG).exists():
        return PACKAGED / str(path_or_id)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{path_or_id} is a file; give the folder that holds config.json and the weights")
    name = str(path_or_id).removeprefix("https://").removeprefix("hf.co/").removeprefix("huggingface.co/")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise CheckpointError(f"there is no folder {str(path_or_id)!r}, and it is not a hub id (OWNER/NAME)")
    return _download(name, ["*.json", "*.jinja", *(["*.safetensors"] if weights else [])])


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # whatever the network, a proxy or the hub may do: the user can only try again
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name!r} is no folder here, and the hub could not give it: {reason}") from None
