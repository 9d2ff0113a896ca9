"""The command for training sets: redraft augment IN.jsonl -o OUT.jsonl. `cli.py` makes it a command.

A record's variants are written together, in the order of the records, each with where it comes from. A run that was cut off
goes on behind the last record that is whole in the output.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from redraft import writer
from redraft.augmenting import AT_ONCE, Plan, Variant, variants

ORIGIN = "redraft"  # the field of a variant that says where it comes from


def augment(
    file: Annotated[str, typer.Argument(help="Records, one JSON object a line.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Where variants go, one JSON object a line.")],
    holes: Annotated[str, typer.Option("--holes", help="Share of words that become others, at random.")] = "30%",
    count: Annotated[int, typer.Option("--count", "-n", help="Variants of a record.")] = 1,
    field: Annotated[str, typer.Option("--field", help="Which field is the text.")] = "text",
    regex: Annotated[str | None, typer.Option("--regex", help="What becomes another, instead of words at random.")] = None,
    keep: Annotated[str | None, typer.Option("--keep", help="What does not, an expression too.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same variants.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an output that is there.")] = False,
    model: Annotated[
        str,
        typer.Option("--model", "-m", envvar="REDRAFT_MODEL", help="Checkpoint folder, or hub id. [tiny, in the package]"),
    ] = "",
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda. [a GPU if there is one]")] = None,
) -> None:
    """Make variants of texts for a training set: some words become others that fit."""
    plan = Plan(share=share(holes), regex=regex, keep=keep, count=count, seed=seed)
    records, target = read(Path(file), field), Path(out)
    if target.exists() and not resume:
        raise ValueError(f"{out} is there already: --resume goes on with it, or name another")
    begin = whole(target) if target.exists() else 0
    subject, console = writer.load(model or writer.SHIPPED, device=device), Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    made, began = _Made(), time.perf_counter()
    with open(target, "a", encoding="utf-8") as written, Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("records", total=len(records), completed=begin)
        group = max(1, AT_ONCE // plan.count)
        for first in range(begin, len(records), group):
            texts = [(number, records[number][field]) for number in range(first, min(first + group, len(records)))]
            for found in variants(subject.engine, subject.tokenizer, texts, subject.sampler, plan):
                lines = [json.dumps(varied(records[one.number], field, one), ensure_ascii=False) + "\n" for one in found]
                written.write("".join(lines))
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


def read(path: Path, field: str) -> list[dict[str, Any]]:
    """The records of a file, each with a text in this field."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is no JSON: {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise ValueError(f"line {number} of {path} has no text in the field {field!r}; --field names another")
        records.append(record)
    if not records:
        raise ValueError(f"{path} holds no records")
    return records


def varied(record: dict[str, Any], field: str, one: Variant) -> dict[str, Any]:
    """A record with another text."""
    origin = {"record": one.number, "seed": one.seed, "spans": [list(span) for span in one.spans]}
    return {**record, field: one.text, ORIGIN: origin}


def whole(path: Path) -> int:
    """The record to go on with: the last one there is, whose variants are taken out, since it may be in part."""
    kept = path.read_bytes()
    lines = kept[: kept.rfind(b"\n") + 1].splitlines(keepends=True)
    try:
        numbers = [json.loads(line)[ORIGIN]["record"] for line in lines]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} was not written by redraft augment; name another output") from None
    last = numbers[-1] if numbers else 0
    path.write_bytes(b"".join(line for line, number in zip(lines, numbers, strict=True) if number != last))
    return last


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
