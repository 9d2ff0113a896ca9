"""Pictures that a user of `redraft chat` attaches to a message: paths in a typed line, and the files read.

Terminals paste the path of a file that is dropped on them: plain, 'in quotes', with backslash-escaped\\ spaces, or as a
file:// address. A path in a message counts only if it has the ending of a picture and the file exists.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

if TYPE_CHECKING:
    from redraft.writer import Writer

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
CLOSING = ",.;:!?)"  # may follow a path in a sentence
# A word in quotes, which may go on after an escaped character ('it'\''s.png'), or a word without blanks.
WORD = re.compile(
    r"""(?<!\S)(?:(?:'[^']*'|"(?:\\.|[^"\\])*")(?:\\.|'[^']*'|"[^"]*")*(?=[\s,.;:!?)]|$)|(?:\\.|[^\s\\])+)""", re.DOTALL
)
QUOTED = re.compile(r"""'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|\\(?P<escaped>.)""", re.DOTALL)
ESCAPED = re.compile(r"\\(?P<escaped>.)", re.DOTALL)


@dataclass(frozen=True)
class Attachment:
    """A picture that goes with the next message. The bytes are kept: the file may change or vanish meanwhile."""

    name: str
    data: bytes
    token_count: int
    has_frames: bool = False

    def __str__(self) -> str:
        """What the user sees."""
        frame = ", its first frame" if self.has_frames else ""
        return f"[image {self.name}, {self.token_count} tokens{frame}]"


@dataclass(frozen=True)
class TypedPath:
    """The path of an existing file in a line, from character `start` to `end`."""

    start: int
    end: int
    path: Path


def read_attachment(writer: Writer, path: Path) -> Attachment:
    """Reads a picture as the model will see it. Raises ImageError, or CheckpointError if the model takes no images."""
    from redraft.tokenizer.images import read_bytes, read_picture

    parts = writer.images.load_vision(writer.engine)
    data = read_bytes(path, path.name)
    picture = read_picture(data, parts.images, name=path.name)
    return Attachment(path.name, data, picture.token_count, picture.has_frames)


def find_pictures(line: str) -> list[TypedPath]:
    """The paths of existing picture files in a message."""
    whole = _existing_file(line)
    if whole is not None and _has_picture_ending(whole):  # blanks in it may be plain
        return [TypedPath(0, len(line), whole)]
    return [typed for typed in _find_files(line) if _has_picture_ending(typed.path)]


def remove_paths(line: str, paths: list[TypedPath]) -> str:
    """A message without the paths at its beginning. Of the others the file's name stays, as a word of the sentence."""
    text = ""
    position = 0
    for typed in paths:
        text += line[position : typed.start]
        text += typed.path.name if text.strip() else ""
        position = typed.end
    return (text + line[position:]).strip()


def parse_paths(argument: str) -> list[Path]:
    """The files that the argument of a command names: one path, which may have plain blanks, or several."""
    whole = _existing_file(argument)
    if whole is not None:
        return [whole]
    paths: list[Path] = []
    words = list(WORD.finditer(argument))
    for word in words:
        path = _existing_file(word[0])
        if path is None:
            name = argument if not paths and word is not words[-1] else word[0]
            raise ValueError(f"there is no file {name[:300]!r}: a path begins with / or ~, or in the folder {os.getcwd()}")
        paths.append(path)
    return paths


def _find_files(line: str) -> list[TypedPath]:
    files = []
    for word in WORD.finditer(line):
        for text in (word[0], word[0].rstrip(CLOSING)):
            path = _existing_file(text)
            if path is not None:
                files.append(TypedPath(word.start(), word.start() + len(text), path))
                break
    return files


def _existing_file(text: str) -> Path | None:
    """The file that a word names: as it stands, or without its quotes and escapes."""
    marks = QUOTED if text.startswith(("'", '"')) else ESCAPED  # quotes inside of a word are part of it
    for form in (text, marks.sub(_unquote, text)):
        name = _from_address(form) if form[:7].lower() == "file://" else os.path.expanduser(form)
        if os.path.isfile(name):  # False also for names that no file can have
            return Path(name)
    return None


def _unquote(match: re.Match[str]) -> str:
    groups = match.groupdict()
    if groups.get("double") is not None:
        return ESCAPED.sub(_unquote, groups["double"])
    return groups["escaped"] or groups["single"] or ""


def _from_address(address: str) -> str:
    """The path of a file:// address; empty if it is on another machine."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return ""
    return url2pathname(parts.path) if parts.netloc in ("", "localhost") else ""


def _has_picture_ending(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS
