"""Single files, read and replaced: an untrusted file can neither stall its reader nor fill the memory.

A killed writer leaves the old content or the new, never a part.
"""

import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from redraft.config.json_text import JSONDepthError, parse_json
from redraft.config.values import ConfigError

MAX_FILE_BYTES = 64 * 2**20  # of a file that is read whole; Gemma's tokenizer.json has half of it


def require_regular_file(path: str | Path) -> None:
    """Refuses a pipe, a socket, a device or a folder before it is opened: opening a pipe waits for its other end."""
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, but redraft needs a regular file there")


def read_file(path: str | Path) -> bytes:
    """Reads a regular file of at most MAX_FILE_BYTES."""
    require_regular_file(path)
    with open(path, "rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB, too much for a file of its kind")
    return content


def read_json(path: str | Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object."""
    try:
        raw = parse_json(read_file(path).decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a checkpoint folder needs it") from None
    except (UnicodeDecodeError, json.JSONDecodeError, JSONDepthError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from None
    except ConfigError:
        raise
    except ValueError:  # Python limits the digits of a whole number, and its message is for programmers
        raise ConfigError(f"{path} is not readable JSON: it holds a number with thousands of digits") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a JSON {type(raw).__name__}, not an object")
    return raw


@contextmanager
def replace_file(path: str | Path, *, keep_unfinished: bool = False) -> Iterator[TextIO]:
    """Yields a new text file beside `path`, and renames it to `path` at the end: a reader sees the old or the new file.

    After an exception the old file is as it was. The new one is removed, unless `keep_unfinished` and it has some content.
    A symbolic link stays a link, and permissions stay. A pipe or a device is written directly.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8", newline="") as file:
            yield file
        return
    path = Path(path).resolve()
    part = path.with_name(f".{path.name}.part-{secrets.token_hex(4)}")
    try:
        file = open(part, "x", encoding="utf-8", newline="")  # noqa: SIM115  (the block below closes it)
    except OSError as error:
        error.filename = str(path)  # the name that the user knows
        raise
    try:
        with file:
            if path.exists():
                shutil.copymode(path, part)  # before anything is written: the old file may be private
            yield file
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the content, and then the power may fail
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):  # the folder may be gone: the first error counts
            if not keep_unfinished or not part.stat().st_size:
                part.unlink()
        raise


def write_text(path: str | Path, text: str) -> None:
    """Replaces a file as a whole: it has the old or the new content, never a part."""
    with replace_file(path) as file:
        file.write(text)
