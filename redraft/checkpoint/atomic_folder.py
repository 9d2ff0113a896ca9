"""Replaces a folder as a whole: a reader, and a run that is killed at any moment, finds the old folder or the new one.

    PARENT/NAME                  the folder
    PARENT/.NAME.part-1a2b3c4d   the next one: being written, or left behind by a writer that was killed

The new folder gets its name in one rename. An old folder there changes places with it, which Linux can do in one step
(renameat2), and is then removed. Other systems need two renames, and for a moment between them there is no folder NAME.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from redraft.checkpoint.names import (
    CONFIG,
    DRAFT_HEAD,
    GENERATION_CONFIG,
    INDEX,
    PROCESSOR_FILES,
    REDRAFT_CONFIG,
    SHARD,
    TOKENIZER_FILES,
    WEIGHTS,
    CheckpointError,
)

AT_FDCWD = -100  # "relative to the working directory", from Linux's fcntl.h
RENAME_EXCHANGE = 2  # from Linux's fs.h
MOST_TRIES = 100  # to make a folder that no other writer removes
REPLACED_FILES = {CONFIG, GENERATION_CONFIG, REDRAFT_CONFIG, WEIGHTS, INDEX, DRAFT_HEAD, *TOKENIZER_FILES}
REPLACED_FILES |= {*PROCESSOR_FILES, "special_tokens_map.json"}
LEFTOVER_FILE = re.compile(r"\.(.+)\.part-[0-9a-f]{8}|(.+)\.part")  # of a killed writer, which wrote a single file
KEPT_FILES = re.compile(r"README\.md|LICENSE[\w.-]*|\.gitattributes")  # written by people: a new save does not remove them


@contextmanager
def replace_folder(folder: str | Path, *, force: bool = False) -> Iterator[Path]:
    """Yields an empty folder to write into, which then takes the place of `folder`.

    After an exception the old folder is as it was. `force` allows to replace a checkpoint. A symbolic link stays a link:
    the folder that it points to is replaced.
    """
    target = Path(folder).resolve()
    check_target(folder, force=force)
    with new_folder_beside(target) as part:
        if target.exists():
            shutil.copymode(target, part)  # before anything is written: the old folder may be private
        yield part
        check_target(target, force=force)  # again: the work may have taken long
        _keep_files(target, part)
        sync_files(part)
        put_in_place(part, target)


@contextmanager
def new_folder_beside(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target`, for `put_in_place`. It is locked, and removed at the end if it is still there.

    What killed writers of the same target left behind is removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    with ExitStack() as stack:
        part = _make_locked_folder(target, stack)
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)  # holds the old folder, or a failed new one


def _make_locked_folder(target: Path, stack: ExitStack) -> Path:
    """Makes a folder beside `target`. Another writer may take it for a leftover, and remove it, until it is locked."""
    for _ in range(MOST_TRIES):
        part = leftover_path(target)
        part.mkdir()
        with suppress(FileNotFoundError, BlockingIOError):
            stack.enter_context(lock_folder(part))
            if part.is_dir():
                return part
        shutil.rmtree(part, ignore_errors=True)
    raise CheckpointError(f"{target.parent} allows no lock on a new folder; name a folder on another disk")


def leftover_path(target: Path) -> Path:
    """A new name beside `target`. Whatever has such a name and no lock is removed by the next writer of `target`."""
    return target.with_name(f".{target.name}.part-{secrets.token_hex(4)}")


def check_target(folder: str | Path, *, force: bool = False) -> None:
    """Refuses a folder that `replace_folder` would refuse. For callers whose work is long: nothing is written."""
    target = Path(folder).resolve()
    existing = next(parent for parent in (target, *target.parents) if parent.exists())
    if not existing.is_dir():
        raise CheckpointError(f"{existing} is a file; name a folder to write")
    beside = existing if existing != target else target.parent
    if not os.access(beside, os.W_OK | os.X_OK):
        raise CheckpointError(f"{folder} cannot be written: {beside} does not allow it")
    if existing != target:
        return
    if os.path.ismount(target):
        raise CheckpointError(f"{folder} is a mount point, which cannot be renamed; name a folder inside it")
    entries = sorted(os.scandir(target), key=lambda entry: entry.name)
    if not entries:
        return
    if not force:
        raise CheckpointError(
            f"{folder} exists already; replace it with --force (Python: force=True), or name another folder"
        )
    for entry in entries:
        if not entry.is_file() or not _is_known(entry.name):
            raise CheckpointError(
                f"{folder} holds {entry.name!r}, which is no file of a checkpoint; --force would delete it"
            )
    if not any(entry.name in (CONFIG, WEIGHTS, INDEX, *TOKENIZER_FILES) for entry in entries):
        raise CheckpointError(f"{folder} is not a checkpoint, and --force replaces nothing else; name another folder")


def put_in_place(part: Path, target: Path) -> None:
    """Renames a folder to its final name. Afterwards, `part` is the old folder of that name, if there was one."""
    if target.exists() and any(target.iterdir()):
        _exchange(part, target)
    else:
        os.rename(part, target)  # replaces an empty folder
    _sync(target.parent)


def sync_files(folder: Path) -> None:
    """Writes the files of a folder to the disk, so that a power cut after its rename does not leave them empty."""
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _is_known(name: str) -> bool:
    if leftover := LEFTOVER_FILE.fullmatch(name):
        name = leftover[1] or leftover[2]
    return name in REPLACED_FILES or bool(SHARD.fullmatch(name) or KEPT_FILES.fullmatch(name))


def _keep_files(target: Path, part: Path) -> None:
    """Copies the files that people wrote from the old folder to the new one."""
    for path in target.iterdir() if target.exists() else ():
        if KEPT_FILES.fullmatch(path.name) and not (part / path.name).exists():
            shutil.copy2(path, part / path.name)


def _exchange(part: Path, target: Path) -> None:
    """Lets two folders change places, in one step where the system can."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or an old C library
        return _exchange_in_two_steps(part, target)
    if renameat2(AT_FDCWD, os.fsencode(part), AT_FDCWD, os.fsencode(target), RENAME_EXCHANGE) == 0:
        return None
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):  # the kernel or the file system cannot
        return _exchange_in_two_steps(part, target)
    raise OSError(number, os.strerror(number), str(target))


def _exchange_in_two_steps(part: Path, target: Path) -> None:
    """Moves the old folder aside, then renames the new one. A run killed in between leaves the old one as .NAME.old-..."""
    aside = target.with_name(f".{target.name}.old-{secrets.token_hex(4)}")
    os.rename(target, aside)
    try:
        os.rename(part, target)
    except OSError:
        os.rename(aside, target)
        raise
    os.rename(aside, part)


def remove_leftovers(target: Path, *, is_unwanted: bool = False) -> int:
    """Removes what killed writers of this folder left behind, and returns its bytes.

    A folder that another process is writing is locked, and stays. Without a target an old folder may be the only one: it
    stays unless the target `is_unwanted` too.
    """
    freed = 0
    kinds = "part|old" if target.exists() or is_unwanted else "part"
    pattern = re.compile(rf"\.{re.escape(target.name)}\.({kinds})-[0-9a-f]{{8}}")
    for path in target.parent.iterdir():
        if pattern.fullmatch(path.name) and path.is_dir():
            with suppress(OSError), lock_folder(path):
                nbytes = count_bytes(path)
                shutil.rmtree(path)
                freed += nbytes
    return freed


def count_bytes(folder: Path) -> int:
    """The bytes of all files below a folder. A link counts nothing: the file that it names may be elsewhere."""
    files = (os.lstat(os.path.join(parent, name)) for parent, _, names in os.walk(folder) for name in names)
    return sum(status.st_size for status in files if stat.S_ISREG(status.st_mode))


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Holds a lock on a folder. The system releases it when the process ends. Raises BlockingIOError if another has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # the file system has no locks
                raise
        yield
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
