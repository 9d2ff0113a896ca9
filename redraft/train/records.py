"""Training records: what the files of a source hold, read line by line, in a shuffled order.

    files -> lines -> records

A record is one of {"text"}, {"prompt", "completion"}, {"messages"}, {"ids"}, {"prompt_ids", "ids"} (tokens, as `own_text.py`
and `own_answers.py` write them); in a .txt file a separator line stands between texts. Files are read as bytes and decoded
record by record, so that a mistake is one record's mistake and has a line number. No file is ever held in memory as a whole.
"""

import gzip
import lzma
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO, cast

from redraft.config import parse_json

Record = Mapping[str, Any]

JSON_LINES = (".jsonl", ".ndjson", ".json")  # the names of files with one JSON object in each line
MAX_LINE = 64 * 2**20  # bytes of a record; a longer one is a bad record, and is skipped without being held
MAX_SHUFFLED = 64 * 2**20  # bytes of the records in the shuffle buffer; long records shuffle less far
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BadRecord(ValueError):
    """A record that cannot be used; the message names the file, the line and the reason."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of one kind."""

    files: tuple[str, ...]
    share: float = 1.0  # of the documents, relative to the other sources
    text: str = "text"  # the key of the text in JSON records
    mid_start: float = 0.0  # share of text records that start at a random line instead of the first
    prompt_share: float = 0.0  # share of documents whose beginning, up to a quarter of the text, becomes the prompt
    drop_prompt_share: float = 0.0  # share of records with prompt_ids that are learned without them
    own: bool = False  # texts that the model itself wrote: the causal half does not learn from them
    every: int = 0  # of each file every so many-th record is held out; 0: none is
    is_held_out: bool = False  # read only the records that are held out, instead of all others

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("a source has no files")
        if not self.share > 0:
            raise ValueError(f"share must be above 0, got {self.share!r}")
        for name in ("mid_start", "prompt_share", "drop_prompt_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share between 0 and 1, got {getattr(self, name)!r}")
        if self.every < 0 or self.every == 1:
            raise ValueError(f"every must be 0 (nothing is held out) or at least 2, got {self.every!r}")
        if self.is_held_out and not self.every:
            raise ValueError("a held-out source needs every: which of the records are held out")

    def has(self, number: int) -> bool:
        """Whether record `number` of a file, counted from 0, belongs to this source."""
        return not self.every or (number % self.every == self.every - 1) == self.is_held_out


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The texts, their order, and how they are packed."""

    sources: tuple[Source, ...]
    length: int = 512  # tokens of a row
    canvas_lengths: tuple[int, ...] = (256,)  # row i has canvases of canvas_lengths[i % len(canvas_lengths)] tokens
    seed: int = 0
    short_fill: float = 0.0  # share of documents whose last canvas is cut at a random place after its end, to save tokens
    keeps_bos: bool = False  # a prompt that is cut keeps its BOS token: a pretrained model has never seen a text without it
    lookahead: int = 32  # documents to choose from when a row is filled
    shuffle: int = 4096  # records in the shuffle buffer; 1 keeps the order of the files
    separator: str = "<|endofstory|>"  # the line between documents of a .txt file
    skip_bad: bool = False  # count bad records instead of stopping at the first one

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("there are no sources to learn from")
        for name in ("length", "lookahead", "shuffle"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.short_fill <= 1:
            raise ValueError(f"short_fill is a share between 0 and 1, got {self.short_fill!r}")
        if not self.canvas_lengths or min(self.canvas_lengths) < 1 or max(self.canvas_lengths) > self.length:
            raise ValueError(f"canvas_lengths must be between 1 and the row length {self.length}, got {self.canvas_lengths}")


# 1. Files to lines


def open_text(path: str | Path) -> TextIO:
    """Opens a text file; .xz and .gz are decompressed."""
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    return openers.get(Path(path).suffix, open)(path, "rt", encoding="utf-8")


@contextmanager
def _open_bytes(path: str | Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file: its decompressed bytes, and the bytes on the disk, whose position tells the progress."""
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    suffix = Path(path).suffix
    with open(path, "rb") as stored:
        if suffix not in openers:
            yield stored, stored
            return
        try:
            with openers[suffix](stored, "rb") as file:
                yield file, stored
        except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is not a whole {suffix} file: {error}") from None


def _read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields lines with their line breaks. Of a line above MAX_LINE, only the first MAX_LINE + 1 bytes are yielded."""
    while line := file.readline(MAX_LINE + 1):
        piece = line
        while len(piece) > MAX_LINE and not piece.endswith(b"\n"):
            piece = file.readline(MAX_LINE + 1)
        yield line


# 2. Lines to records


class ReadRecord(NamedTuple):
    """A record, or what is wrong with it, and where it was read."""

    where: str  # "file:line"
    record: Record | BadRecord
    size: int  # bytes, decompressed
    end: int  # bytes of the stored file that are read so far


def read_records(path: str | Path, separator: str) -> Iterator[tuple[str, Record | BadRecord]]:
    """Yields ("file:line", record) for every record. A line that is no JSON object is yielded as a BadRecord."""
    for where, record, _, _ in scan_records(path, separator):
        yield where, record


def scan_records(path: str | Path, separator: str) -> Iterator[ReadRecord]:
    """Yields every record with its size and the progress in the file."""
    uncompressed = Path(path).with_suffix("") if Path(path).suffix in (".xz", ".gz") else Path(path)
    with _open_bytes(path) as (file, stored):
        if uncompressed.suffix in JSON_LINES:
            for number, line in enumerate(_read_lines(file), 1):
                if line.strip():
                    where = f"{path}:{number}"
                    yield ReadRecord(where, _parse_line(line, where, number), len(line), stored.tell())
            return
        first_line = 1
        text = bytearray()
        for number, line in enumerate(_read_lines(file), 1):
            if line.rstrip(b"\r\n") != separator.encode():
                text += line[: MAX_LINE + 1 - len(text)]
                continue
            where = f"{path}:{first_line}"
            yield ReadRecord(where, _decode_text(text, where, separator), len(text), stored.tell())
            first_line = number + 1
            text.clear()
        if text.strip():
            where = f"{path}:{first_line}"
            yield ReadRecord(where, _decode_text(text, where, separator), len(text), stored.tell())


def _decode_text(encoded: bytearray, where: str, separator: str) -> Record | BadRecord:
    """The record of one text of a .txt file."""
    if len(encoded) > MAX_LINE:
        return BadRecord(f"{where}: a text of more than {MAX_LINE:,} bytes; divide it by lines of {separator!r}")
    try:
        text = encoded.decode()
    except UnicodeDecodeError as error:
        return _not_utf8(error, where)
    return {"text": text.replace("\r\n", "\n").replace("\r", "\n").strip("\n")}


def _parse_line(line: bytes, where: str, number: int) -> Record | BadRecord:
    if len(line) > MAX_LINE:
        return BadRecord(f"{where}: a line of more than {MAX_LINE:,} bytes; divide the record")
    try:
        record = parse_json(line.removeprefix(BYTE_ORDER_MARK if number == 1 else b"").decode())
    except UnicodeDecodeError as error:
        return _not_utf8(error, where)
    except ValueError as error:
        return BadRecord(f"{where}: not JSON: {error}")
    return record if isinstance(record, dict) else BadRecord(f"{where}: a JSON {type(record).__name__}, not an object")


def _not_utf8(error: UnicodeDecodeError, where: str) -> BadRecord:
    byte = cast(bytes, error.object)[error.start]
    return BadRecord(f"{where}: not UTF-8: byte {error.start + 1} is 0x{byte:02x}")


# 3. Shuffled records


def read_shuffled(cfg: DataConfig, source: Source, epoch: int) -> Iterator[tuple[str, Record | BadRecord]]:
    """Yields all records of a source once. The order depends on seed and epoch only.

    Files are shuffled, then records pass a buffer that is limited in records and in bytes.
    """
    rng = random.Random(f"{cfg.seed} {epoch}")
    files = list(source.files)
    if cfg.shuffle > 1:
        rng.shuffle(files)
    buffer: list[ReadRecord] = []
    held_bytes = 0
    for file in files:
        for number, item in enumerate(scan_records(file, cfg.separator)):
            if not source.has(number):
                continue
            buffer.append(item)
            held_bytes += item.size
            while len(buffer) > cfg.shuffle or (held_bytes > MAX_SHUFFLED and len(buffer) > 1):
                index = rng.randrange(len(buffer) - 1)
                chosen = buffer[index]
                buffer[index] = buffer[-1]
                buffer.pop()
                held_bytes -= chosen.size
                yield chosen.where, chosen.record
    if cfg.shuffle > 1:
        rng.shuffle(buffer)
    yield from ((item.where, item.record) for item in buffer)
