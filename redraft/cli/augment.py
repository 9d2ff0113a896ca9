"""The command redraft augment IN.jsonl -o OUT.jsonl: variants of texts for a training set.

The variants of a record are written together, in the order of the records; each variant names its record. An interrupted
run resumes after the last complete record of the output.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from redraft.cli.options import Adapter, Device, Model, Threads, option, parse_int

if TYPE_CHECKING:
    from redraft.tasks.augment import Plan, Variant

ORIGIN = "redraft"  # the field of a variant that names its record, seed and spans


def augment(
    file: Annotated[str, typer.Argument(help="Records, one JSON object a line.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Output file, one JSON object a line.")],
    share: Annotated[str, typer.Option("--share", help="Share of words to replace, chosen at random.")] = "30%",
    count: Annotated[int, option("--count", "-n", help="Variants per record.", parser=parse_int)] = 1,
    field: Annotated[str, typer.Option("--field", help="Name of the field that holds the text.")] = "text",
    regex: Annotated[
        str | None, typer.Option("--regex", help="Replace what this expression matches, instead of random words.")
    ] = None,
    keep: Annotated[str | None, typer.Option("--keep", help="Never replace what this expression matches.")] = None,
    seed: Annotated[int, option("--seed", help="The same seed gives the same variants.", parser=parse_int)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an existing output file.")] = False,
    model: Model = "",
    device: Device = None,
    threads: Threads = None,
    adapter: Adapter = None,
) -> None:
    """Make variants of texts for a training set: some words are replaced by others that fit."""
    share_of_words = parse_share(share)
    records = read_records(Path(file), field)
    target = Path(out)
    if target.exists() and not resume:
        raise ValueError(f"{out} exists already: continue it with --resume, or name another file")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {str(target.parent)!r} to write {out!r} into")
    from redraft import writer
    from redraft.tasks.augment import BATCH, Plan, check_text, variants

    plan = Plan(share=share_of_words, regex=regex, keep=keep, count=count, seed=seed)
    begin = 0
    kept_bytes = 0
    if target.exists():
        begin, kept_bytes = find_resume_point(target, [record[field] for _, record in records], plan)
    subject = writer.load(model or writer.DEFAULT_MODEL, device=device, adapter=adapter)
    console = Console(stderr=True, highlight=False)
    for line, record in records:
        try:
            check_text(subject.engine, subject.tokenizer, record[field])
        except ValueError as error:
            raise ValueError(f"line {line} of {file}: {error}") from None
    if target.exists():
        os.truncate(target, kept_bytes)  # only now: all errors of the user have been checked
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    counts = _Counts()
    began = time.perf_counter()
    with open(target, "a", encoding="utf-8") as output, Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("records", total=len(records), completed=begin)
        group = max(1, BATCH // plan.count)
        for first in range(begin, len(records), group):
            texts = [(number, records[number][1][field]) for number in range(first, min(first + group, len(records)))]
            for made in variants(subject.engine, subject.tokenizer, texts, subject.sampler, plan):
                output.write("".join(to_line(to_record(records[variant.number][1], field, variant)) for variant in made))
                output.flush()
                counts.add(made, plan.count)
                bar.advance(task)
    console.print(counts.summary(time.perf_counter() - began))


def parse_share(text: str) -> float:
    """Parses 30% or 0.3."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"--share is a share of words such as 30% or 0.3, got {text!r}") from None


def read_records(path: Path, field: str) -> list[tuple[int, dict[str, Any]]]:
    """Reads the records of a file, each with its line number; each has a text in this field."""
    records = []
    for number, raw in enumerate(path.read_bytes().split(b"\n"), 1):  # not splitlines: JSON strings may hold other line ends
        if not raw.strip():
            continue
        try:
            record = json.loads(raw.decode("utf-8-sig"))
        except ValueError as error:  # from JSON or UTF-8 decoding
            raise ValueError(f"line {number} of {path} is not JSON: {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise ValueError(f"line {number} of {path} has no text in the field {field!r}: name the field with --field")
        records.append((number, record))
    if not records:
        raise ValueError(f"{path} has no records")
    return records


def to_line(record: dict[str, Any]) -> str:
    """A record as a line of JSON; escaped where it holds lone surrogates, which UTF-8 cannot encode."""
    line = json.dumps(record, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        line = json.dumps(record)
    return line + "\n"


def to_record(record: dict[str, Any], field: str, variant: Variant) -> dict[str, Any]:
    """A record with the text of a variant, and the variant's origin."""
    origin = {"record": variant.number, "seed": variant.seed, "spans": [list(span) for span in variant.spans]}
    return {**record, field: variant.text, ORIGIN: origin}


def find_resume_point(path: Path, texts: Sequence[str], plan: Plan) -> tuple[int, int]:
    """The record to resume with, and the number of bytes before its variants.

    That is the last record in the output, since its variants may be incomplete. Refuses an output that these records and
    options would not have produced.
    """
    from redraft.tasks.augment import choose_spans

    written = path.read_bytes()
    last_record = 0
    kept_bytes = 0
    size = 0
    for number, line in enumerate(written[: written.rfind(b"\n") + 1].split(b"\n")[:-1], 1):
        try:
            origin = json.loads(line)[ORIGIN]
            record = origin["record"]
            seed = origin["seed"]
            replaced = [tuple(span) for span in origin["spans"]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} was not written by redraft augment (line {number}): name another output") from None
        is_ours = isinstance(record, int) and last_record <= record < len(texts) and seed in plan.seeds(record)
        if not is_ours or replaced != choose_spans(texts[record], plan, seed):
            raise ValueError(f"line {number} of {path} comes from other records or other options: name another output")
        if record > last_record:
            last_record = record
            kept_bytes = size
        size += len(line) + 1
    return last_record, kept_bytes


@dataclass
class _Counts:
    """Totals of a run."""

    records: int = 0
    variants: int = 0
    dropped: int = 0
    tokens: int = 0

    def add(self, made: list[Variant], requested: int) -> None:
        """Adds the variants of one record."""
        self.records += 1
        self.variants += len(made)
        self.dropped += requested - len(made)
        self.tokens += sum(variant.tokens for variant in made)

    def summary(self, seconds: float) -> str:
        """One line."""
        return (
            f"{self.variants} variants of {self.records} records, {self.dropped} dropped as duplicates; "
            f"{seconds:.1f} s, {self.variants / max(seconds, 1e-9):.1f} variants/s, "
            f"{self.tokens / max(seconds, 1e-9):.0f} tokens/s"
        )
