"""Finds a checkpoint: a local folder, a packaged model by its name, or a hub id, which is downloaded once."""

import re
from pathlib import Path

from redraft.checkpoint.names import CONFIG, CheckpointError

PACKAGED = Path(__file__).parents[1] / "weights"
PACKAGED_NAMES = ("tiny", "sudoku")


def find(path_or_id: str | Path, *, weights: bool = True) -> Path:
    """Returns the folder of a checkpoint: a local folder, a packaged model ("tiny"), or a hub id, downloaded once.

    With `weights=False` only the small files of a hub id are downloaded.
    """
    try:
        folder = Path(path_or_id).expanduser()
    except RuntimeError as error:  # ~unknown-user
        raise CheckpointError(f"there is no folder {str(path_or_id)!r}: {error}") from None
    if str(path_or_id) in PACKAGED_NAMES and not (folder / CONFIG).exists():
        return PACKAGED / str(path_or_id)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{path_or_id} is a file; give the folder that holds config.json and the weights")
    hub_id = str(path_or_id).removeprefix("https://").removeprefix("hf.co/").removeprefix("huggingface.co/")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", hub_id):
        raise CheckpointError(f"there is no folder {str(path_or_id)!r}, and it is not a hub id (OWNER/NAME)")
    return _download(hub_id, ["*.json", "*.jinja", *(["*.safetensors"] if weights else [])])


def _download(hub_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # any fault of the network, a proxy or the hub: the user can only try again
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{hub_id!r} is no local folder, and the hub did not deliver it: {reason}") from None
