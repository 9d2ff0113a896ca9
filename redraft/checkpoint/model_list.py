"""The models on this machine: those in the package, pulled ones, and those of the hub's cache that redraft can run."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.checkpoint.atomic_folder import count_bytes
from redraft.checkpoint.find import HUB_FILE, HUB_TAG, PACKAGED, PACKAGED_NAMES, REPOSITORY
from redraft.checkpoint.gguf import is_gguf, open_gguf
from redraft.checkpoint.load import open_weights
from redraft.checkpoint.names import CheckpointError
from redraft.checkpoint.part_sizes import measure_parts
from redraft.checkpoint.parts import read_configs
from redraft.checkpoint.pulled_models import KNOWN_MODELS, Removed, find_pulled, is_pulled, remove_pulled
from redraft.config import read_file, show_value

CARD = "README.md"
UNKNOWN = "unknown"
LONGEST_NAME = 255  # of a folder
CARD_LICENCE = re.compile(r"^license: *[\"']?([\w.+ -]{1,60}?)[\"']? *$", re.MULTILINE)
GGUF_LICENCE = "general.license"


@dataclass(frozen=True)
class ListedModel:
    """A model that `--model NAME` finds without a network."""

    name: str
    kind: str  # "packaged", "pulled" or "hub"
    size: int  # bytes on the disk
    format: str  # of most of its weights
    licence: str
    path: Path


def list_models() -> list[ListedModel]:
    """All models on this machine: packaged ones first, then pulled ones, then those of the hub's cache by name."""
    packaged = [_describe(name, "packaged", PACKAGED / name) for name in PACKAGED_NAMES]
    pulled = [
        ListedModel(model.name, "pulled", model.size, model.format, model.licence, find_pulled(name))
        for name, model in KNOWN_MODELS.items()
        if is_pulled(name)
    ]
    return [*packaged, *pulled, *_list_hub_cache()]


def remove_model(name: str) -> Removed:
    """Removes a pulled model, or a repository of the hub's cache, and what interrupted downloads of it left behind."""
    if name in PACKAGED_NAMES:
        raise CheckpointError(f"{name} is part of redraft and cannot be removed; pip uninstall redraft removes all of it")
    if name in KNOWN_MODELS:
        return remove_pulled(name)
    if file := HUB_FILE.fullmatch(name) or HUB_TAG.fullmatch(name):
        raise CheckpointError(f"the hub's cache is removed by repository: redraft rm {file[1]}, which removes all its files")
    # The hub's names have no "--": its cache writes so for "/".
    folder = _hub_cache() / f"models--{name.replace('/', '--')}"
    if not re.fullmatch(REPOSITORY, name) or "--" in name or len(folder.name) > LONGEST_NAME or not folder.is_dir():
        raise CheckpointError(f"there is no model {show_value(name)} to remove; redraft models lists those that are there")
    nbytes = count_bytes(folder)
    leftovers = sum(file.stat().st_size for file in folder.glob("blobs/*.incomplete"))
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be removed: {error.strerror or error}") from None
    return Removed(nbytes - leftovers, leftovers)


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _repositories() -> list[Any]:
    """The model repositories of the hub's cache."""
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = huggingface_hub.scan_cache_dir(_hub_cache()).repos
    except (CacheNotFound, ValueError, OSError):  # ValueError: the cache folder is a file
        return []
    return sorted((repo for repo in repositories if repo.repo_type == "model"), key=lambda repo: repo.repo_id)


def _list_hub_cache() -> list[ListedModel]:
    """Of each repository the revision that its name stands for. What cannot be run, or has no weights yet, is left out."""
    models = []
    for repository in _repositories():
        revision = next((revision for revision in repository.revisions if "main" in revision.refs), None)
        if revision is None:
            continue
        folder = Path(revision.snapshot_path)
        files = [file.file_path for file in revision.files]
        candidates = {f"{repository.repo_id}/{path.relative_to(folder)}": path for path in files if is_gguf(path)}
        if any(path.suffix == ".safetensors" for path in files):
            candidates[repository.repo_id] = folder
        for name, path in sorted(candidates.items()):
            try:
                models.append(_describe(name, "hub", path))
            except (ValueError, OSError):  # another architecture, or a download that is not complete
                continue
    return models


def _describe(name: str, kind: str, path: Path) -> ListedModel:
    """Reads the headers of a checkpoint. Raises what loading it would raise, as far as headers tell."""
    files = [path] if is_gguf(path) else [file for file in path.iterdir() if file.is_file()]
    config, _ = read_configs(path)
    parts = measure_parts(open_weights(path)[1], config)
    bytes_of: dict[str, int] = {}
    for part in parts:
        bytes_of[part.format] = bytes_of.get(part.format, 0) + part.nbytes
    main_format = max(bytes_of, key=bytes_of.__getitem__)
    return ListedModel(name, kind, sum(file.stat().st_size for file in files), main_format, _read_licence(path), path)


def _read_licence(path: Path) -> str:
    """The licence that a model card or a GGUF file names."""
    if is_gguf(path):
        licence = open_gguf(path).file.metadata.get(GGUF_LICENCE)
        return licence[:60] if isinstance(licence, str) and licence else UNKNOWN
    try:
        card = read_file(path / CARD).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return UNKNOWN
    header = card.split("---")[1] if card.startswith("---") and card.count("---") > 1 else ""
    found = CARD_LICENCE.search(header)
    return found[1] if found else UNKNOWN
