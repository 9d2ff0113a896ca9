"""Jobs: a processor turns the items of an input into lines that are appended to an output file. A killed job resumes.

    items -> [Processor: in this process, or on the workers of a Ray cluster] -> results -> [run_job] -> output file

The process that runs the job is the only one that writes. The lines of a result are written together, so a killed job
leaves whole results and at most one torn line at the end. `redraft augment` and `redraft batch` are such jobs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


@dataclass(frozen=True)
class Item:
    """A part of the input that is processed on its own."""

    number: int  # unique in the job
    text: str


@dataclass(frozen=True)
class Result:
    """What a processor made of an item."""

    number: int  # of the item
    lines: str  # whole lines, or nothing
    counts: Mapping[str, int] = field(default_factory=dict)  # totals of the job, which a summary shows


class Processor(Protocol):
    """Processes items. It holds a model, so a process builds it once."""

    def process(self, items: Iterable[Item]) -> Iterator[Result]:
        """Yields one result per item, in any order."""

    def close(self) -> None:
        """Ends its threads and processes."""


class OutputFile:
    """The output file of a job, which one process at a time may write.

    Nothing is created or changed before `start`, so that a user's mistake that is found meanwhile changes no file.
    It is a context manager that closes the file.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        if path.exists() and not resume:
            raise ValueError(f"{path} exists already: continue it with --resume, or name another file")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"there is no folder {str(path.parent)!r} to write {str(path)!r} into")
        if path.exists():
            self._file = path.open("r+b")
            self._lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def exists(self) -> bool:
        """Whether an earlier run has left a file."""
        return self._file is not None

    def read(self) -> bytes:
        """What earlier runs have written."""
        if self._file is None:
            return b""
        self._file.seek(0)
        return self._file.read()

    def start(self, kept_bytes: int = 0) -> None:
        """Keeps so many bytes of earlier runs; results are appended behind them."""
        if self._file is None:
            self._file = self.path.open("xb")
            self._lock()
        self._file.truncate(kept_bytes)
        self._file.seek(kept_bytes)

    def append(self, lines: str) -> None:
        """Writes the lines of one result."""
        assert self._file is not None, "append before start"
        self._file.write(lines.encode())
        self._file.flush()

    def _lock(self) -> None:
        """The lock ends with the process, however it ends."""
        assert self._file is not None
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"another process is writing {self.path}: wait for it, or name another file") from None
        except OSError:
            return  # a file system without locks


def whole_lines(written: bytes) -> list[bytes]:
    """The lines of an output file, without a last one that is torn."""
    return written[: written.rfind(b"\n") + 1].split(b"\n")[:-1]


def to_line(record: dict[str, Any]) -> str:
    """A record as a line of JSON; escaped where it holds lone surrogates, which UTF-8 cannot encode."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(record)
    return line + "\n"


def run_job(
    results: Iterable[Result],
    output: OutputFile,
    numbers: Iterable[int],
    *,
    kept_bytes: int,
    done: int,
    what: str,
    console: Console,
) -> Counter[str]:
    """Writes each result as it comes, shows the progress, and returns the totals.

    `numbers` are those of the items. `done` items were processed by earlier runs, in the first `kept_bytes` of the output.
    The output is not touched before the first result, since the first item finds mistakes of the user, too. A cluster may
    process an item again when a worker dies: the first result of an item is written, later ones are dropped.
    """
    missing = set(numbers)
    is_started = False
    counts: Counter[str] = Counter()
    with Progress(*COLUMNS, console=console, transient=True) as bar:
        task = bar.add_task(what, total=done + len(missing), completed=done)
        for result in results:
            if result.number not in missing:
                continue
            if not is_started:
                output.start(kept_bytes)
                is_started = True
            output.append(result.lines)
            missing.discard(result.number)
            counts.update(result.counts)
            bar.advance(task)
    if not is_started:
        output.start(kept_bytes)
    if missing:
        raise RuntimeError(f"the job has ended without {len(missing)} of its {what}: run it again with --resume")
    return counts


@contextmanager
def process_here(processor: Processor, items: Iterable[Item]) -> Iterator[Iterator[Result]]:
    """The results of a processor in this process."""
    with closing(processor):
        yield processor.process(items)
