"""The command for training sets: redraft augment IN.jsonl -o OUT.jsonl. `cli.py` makes it a command.

A record's variants are written together, in the order of the records, each with where it comes from. A run that was cut off
goes on behind the last record that is whole in the output.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from redraft import writer
from redraft.cli.options import Device, Model, Threads, option, whole
from redraft.tasks.augment import AT_ONCE, Plan, Variant, check, spans, variants

ORIGIN = "redraft"  # the field of a variant that says where it comes from


def augment(
    file: Annotated[str, typer.Argument(help="Records, one JSON object a line.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Where variants go, one JSON object a line.")],
    holes: Annotated[str, typer.Option("--holes", help="Share of words that become others, at random.")] = "30%",
    count: Annotated[int, option("--count", "-n", help="Variants of a record.", parser=whole)] = 1,
    field: Annotated[str, typer.Option("--field", help="Which field is the text.")] = "text",
    regex: Annotated[str | None, typer.Option("--regex", help="What becomes another, instead of words at random.")] = None,
    keep: Annotated[str | None, typer.Option("--keep", help="What does not, an expression too.")] = None,
    seed: Annotated[int, option("--seed", help="The same seed gives the same variants.", parser=whole)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an output that is there.")] = False,
    model: Model = "",
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Make variants of texts for a training set: some words become others that fit."""
    plan = Plan(share=share(holes), regex=regex, keep=keep, count=count, seed=seed)
    records, target = read(Path(file), field), Path(out)
    if target.exists() and not resume:
        raise ValueError(f"{out} is there already: --resume goes on with it, or name another")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {str(target.parent)!r} to write {out!r} into")
    begin, room = there(target, [record[field] for _, record in records], plan) if target.exists() else (0, 0)
    subject, console = writer.load(model or writer.DEFAULT_MODEL, device=device), Console(stderr=True, highlight=False)
    for line, record in records:
        try:
            check(subject.engine, subject.tokenizer, record[field])
        except ValueError as error:
            raise ValueError(f"line {line} of {file}: {error}") from None
    if target.exists():
        os.truncate(target, room)  # only now, when nothing can be refused any more
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    made, began = _Made(), time.perf_counter()
    with open(target, "a", encoding="utf-8") as written, Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("records", total=len(records), completed=begin)
        group = max(1, AT_ONCE // plan.count)
        for first in range(begin, len(records), group):
            texts = [(number, records[number][1][field]) for number in range(first, min(first + group, len(records)))]
            for found in variants(subject.engine, subject.tokenizer, texts, subject.sampler, plan):
                written.write("".join(line_of(varied(records[one.number][1], field, one)) for one in found))
                written.flush()
                made.add(found, plan.count)
                bar.advance(task)
    console.print(made.summary(time.perf_counter() - began))


def share(text: str) -> float:
    """30% or 0.3."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"--holes is a share of words such as 30% or 0.3, got {text!r}") from None


def read(path: Path, field: str) -> list[tuple[int, dict[str, Any]]]:
    """The records of a file, each with its line and a text in this field."""
    records = []
    for number, raw in enumerate(path.read_bytes().split(b"\n"), 1):  # other line ends may stand in a JSON text
        if not raw.strip():
            continue
        try:
            record = json.loads(raw.decode("utf-8-sig"))
        except ValueError as error:  # of JSON or of UTF-8
            raise ValueError(f"line {number} of {path} is no JSON: {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise ValueError(f"line {number} of {path} has no text in the field {field!r}; --field names another")
        records.append((number, record))
    if not records:
        raise ValueError(f"{path} holds no records")
    return records


def line_of(record: dict[str, Any]) -> str:
    """A record as a line; with escapes where it holds what is no character."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(record)
    return line + "\n"


def varied(record: dict[str, Any], field: str, one: Variant) -> dict[str, Any]:
    """A record with another text."""
    origin = {"record": one.number, "seed": one.seed, "spans": [list(span) for span in one.spans]}
    return {**record, field: one.text, ORIGIN: origin}


def there(path: Path, texts: Sequence[str], plan: Plan) -> tuple[int, int]:
    """The record to go on with, the last one there is, since it may be in part; and how many bytes are before it.

    What is there must be what this run would have written.
    """
    kept, last, room, size = path.read_bytes(), 0, 0, 0
    for number, line in enumerate(kept[: kept.rfind(b"\n") + 1].split(b"\n")[:-1], 1):
        try:
            origin = json.loads(line)[ORIGIN]
            record, seed, open_ = origin["record"], origin["seed"], [tuple(span) for span in origin["spans"]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} was not written by redraft augment (line {number}); name another output") from None
        if not last <= record < len(texts) or seed not in plan.seeds(record) or open_ != spans(texts[record], plan, seed):
            raise ValueError(f"line {number} of {path} is of other records or other options than these; name another output")
        if record > last:
            last, room = record, size
        size += len(line) + 1
    return last, room


@dataclass
class _Made:
    """What was made so far."""

    records: int = 0
    variants: int = 0
    dropped: int = 0
    tokens: int = 0

    def add(self, found: list[Variant], asked: int) -> None:
        """The variants of one more record."""
        self.records += 1
        self.variants += len(found)
        self.dropped += asked - len(found)
        self.tokens += sum(one.tokens for one in found)

    def summary(self, seconds: float) -> str:
        """In a line."""
        return (
            f"{self.variants} variants of {self.records} records, {self.dropped} dropped as they were nothing new; "
            f"{seconds:.1f} s, {self.variants / max(seconds, 1e-9):.1f} variants/s, "
            f"{self.tokens / max(seconds, 1e-9):.0f} tokens/s"
        )
