"""Finds a checkpoint: a local folder or GGUF file, a packaged or pulled model by its name, or a hub id, downloaded once.

A GGUF file on the hub is named as llama.cpp and Ollama users do: OWNER/NAME:Q4_K_M, or OWNER/NAME/FILE.gguf.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redraft.checkpoint.gguf import is_gguf
from redraft.checkpoint.names import ADAPTER_CONFIG, CONFIG, CheckpointError
from redraft.checkpoint.pulled_models import KNOWN_MODELS, find_pulled
from redraft.config import show_value

PACKAGED = Path(__file__).parents[1] / "weights"
PACKAGED_NAMES = ("tiny", "sudoku")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")  # how torch.save names its files
SMALL_FILES = ("*.json", "*.jinja", "README.md", "LICENSE*")  # settings, tokenizer, model card and licence
SECOND_COPIES = ["consolidated*", "original/*"]  # of the same weights, in the layouts of Mistral and Llama
REPOSITORY = r"[\w-][\w.-]*/[\w-][\w.-]*"
HUB_FILE = re.compile(rf"({REPOSITORY})/([\w./ -]+)")
HUB_TAG = re.compile(rf"({REPOSITORY}):([\w.-]+)")


def find(path_or_id: str | Path, *, weights: bool = True) -> Path:
    """Returns the folder of a checkpoint, or its GGUF file. One on the hub is downloaded once.

    With `weights=False` only the small files of a hub id are downloaded; a GGUF file is always downloaded whole.
    """
    if not isinstance(path_or_id, str | Path):
        raise CheckpointError(f"a checkpoint is named by a folder, a file or a hub id, got {path_or_id!r}")
    try:
        folder = Path(path_or_id).expanduser()
        (folder / CONFIG).exists()
    except (RuntimeError, OSError) as error:  # ~unknown-user; a name that is too long; a folder that is closed to us
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"there is no folder {show_value(str(path_or_id))}: {reason}") from None
    if str(path_or_id) in PACKAGED_NAMES and not (folder / CONFIG).exists():
        return PACKAGED / str(path_or_id)
    if str(path_or_id) in KNOWN_MODELS and not (folder / CONFIG).exists():
        return find_pulled(str(path_or_id))
    if folder.is_dir():
        _refuse_adapter(folder)
        _refuse_folder_of_gguf_files(folder)
        if weights:
            _refuse_pickles(folder, sorted(path for path in folder.iterdir()))
        return folder
    if folder.exists() and is_gguf(folder):
        return folder
    if folder.exists():
        _refuse_pickles(folder, [folder])
        raise CheckpointError(
            f"{path_or_id} is a file; give a .gguf file, or the folder that holds config.json and the weights"
        )
    return find_on_hub(str(path_or_id), weights=weights)


def find_on_hub(name: str, *, weights: bool = True) -> Path:
    """Downloads a checkpoint from the hub, unless the hub's cache has it; `weights` as for `find`."""
    hub_id = _strip_address(name)
    if tag := HUB_TAG.fullmatch(hub_id):
        return _download_file(tag[1], _find_tagged_file(tag[1], tag[2]))
    if is_gguf(hub_id):
        if (named := _match_file(hub_id)) is None:
            expected = "it is not one on the hub (OWNER/NAME/FILE.gguf)"
            raise CheckpointError(f"there is no file {show_value(name)}, and {expected}")
        return _download_file(named[1], named[2])
    if not re.fullmatch(REPOSITORY, hub_id):
        raise CheckpointError(f"there is no folder {show_value(name)}, and it is not a hub id (OWNER/NAME)")
    return _download(hub_id, [*SMALL_FILES, *(["*.safetensors"] if weights else [])])


def is_hub_name(name: str) -> bool:
    """Whether a name has the form of a checkpoint on the hub: OWNER/NAME, OWNER/NAME:Q4_K_M or OWNER/NAME/FILE.gguf."""
    hub_id = _strip_address(name)
    return bool(re.fullmatch(REPOSITORY, hub_id) or HUB_TAG.fullmatch(hub_id) or (is_gguf(hub_id) and _match_file(hub_id)))


def _strip_address(name: str) -> str:
    return name.removeprefix("https://").removeprefix("hf.co/").removeprefix("huggingface.co/")


def _match_file(hub_id: str) -> re.Match[str] | None:
    named = HUB_FILE.fullmatch(hub_id)
    return None if named is None or ".." in Path(named[2]).parts else named


def _refuse_adapter(folder: Path) -> None:
    """An adapter is no model: the user gives its base, and the adapter beside it."""
    if (folder / ADAPTER_CONFIG).exists() and not (folder / CONFIG).exists():
        raise CheckpointError(f"{folder} holds an adapter, not a model: give its base with --model and --adapter {folder}")


def _refuse_folder_of_gguf_files(folder: Path) -> None:
    """A folder may hold several GGUF files, so the user names one."""
    files = [] if (folder / CONFIG).exists() else sorted(path for path in folder.iterdir() if is_gguf(path))
    if files:
        raise CheckpointError(f"{folder} has no {CONFIG}, but GGUF files: name one of them, such as {files[0]}")


def _refuse_pickles(name: Path, files: list[Path]) -> None:
    """Refuses weights that are stored as pickles only."""
    pickles = [file for file in files if file.suffix in PICKLES]
    if pickles and not any(file.suffix == ".safetensors" for file in files):
        inside = "" if pickles == [name] else f"{name} holds its weights as a pickle: "
        raise CheckpointError(
            f"{inside}{pickles[0].name} is a pickle of torch.save, which can run any code when it is loaded; "
            "convert it to safetensors where you trust it"
        )


def _find_tagged_file(hub_id: str, tag: str) -> str:
    """The one GGUF file of a repository whose name ends in the tag, such as Q4_K_M."""
    import huggingface_hub

    with _explained(hub_id):
        files = [file for file in huggingface_hub.list_repo_files(hub_id) if is_gguf(file)]
    ending = re.compile(rf"(?:.*[-._/])?{re.escape(tag)}\.gguf", re.IGNORECASE)
    tagged = [file for file in files if ending.fullmatch(file) and "mmproj" not in file]  # mmproj: vision towers
    if len(tagged) != 1:
        names = ", ".join(sorted(files)[:20]) or "no GGUF file"
        raise CheckpointError(f"{hub_id!r} has {len(tagged)} GGUF files that end in {tag}; it has {names}")
    return tagged[0]


def _download_file(hub_id: str, name: str) -> Path:
    import huggingface_hub

    with _explained(hub_id):
        return Path(huggingface_hub.hf_hub_download(hub_id, name))


def _download(hub_id: str, patterns: list[str]) -> Path:
    import huggingface_hub

    with _explained(hub_id):
        folder = Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=SECOND_COPIES))
    if not (folder / CONFIG).exists():
        raise CheckpointError(f"{hub_id!r} has no {CONFIG}; if it has GGUF files, name one of them, such as {hub_id}:Q4_K_M")
    return folder


@contextmanager
def _explained(hub_id: str) -> Iterator[None]:
    """Turns any fault of the network, a proxy or the hub into one sentence: the user can only try again."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{hub_id!r} is no local folder, and the hub did not deliver it: {reason}") from None
