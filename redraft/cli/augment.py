"""The command redraft augment IN.jsonl -o OUT.jsonl: variants of texts for a training set.

The variants of a record are written together, in the order of the records; each variant names its record. An interrupted
run resumes after the last complete record of the output.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from redraft.cli.options import Adapter, Device, Model, Ray, Threads, Workers, check_workers, option, parse_int
from redraft.cluster.jobs import Item, OutputFile, Result, process_here, run_job, to_line, whole_lines
from redraft.config import parse_json

if TYPE_CHECKING:
    from redraft.config import BackboneConfig
    from redraft.tasks.augment import Plan, Variant
    from redraft.tokenizer.tokenizer import Tokenizer
    from redraft.writer import Writer

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
    ray: Ray = None,
    workers: Workers = None,
) -> None:
    """Make variants of texts for a training set: some words are replaced by others that fit."""
    share_of_words = parse_share(share)
    records = read_records(Path(file), field)
    check_workers(ray, workers)
    with OutputFile(Path(out), resume=resume) as output:
        from redraft import checkpoint, writer
        from redraft.tasks.augment import Plan

        plan = Plan(share=share_of_words, regex=regex, keep=keep, count=count, seed=seed)
        begin = 0
        kept_bytes = 0
        if output.exists:
            begin, kept_bytes = find_resume_point(output, [record[field] for _, record in records], plan)
        items = [Item(number, to_line(records[number][1])) for number in range(begin, len(records))]
        if ray is None:
            processor = load_processor(plan, field, model or writer.DEFAULT_MODEL, device=device, adapter=adapter)
            check_records(file, field, records, processor.subject.model.config, processor.subject.tokenizer)
            processing = process_here(processor, items)
        else:
            from redraft.cluster.ray_data import ClusterOptions, absolute_path, process_on_ray

            cluster = ClusterOptions(address=ray, workers=workers, device=device, threads=threads)
            opened = checkpoint.open_checkpoint(checkpoint.find_base(model or writer.DEFAULT_MODEL)[0])
            check_records(file, field, records, opened.config, opened.tokenizer)
            name = absolute_path(model) or writer.DEFAULT_MODEL.name
            load = partial(load_processor, plan, field, name, adapter=absolute_path(adapter))
            processing = process_on_ray(load, items, cluster, group=group_size(plan), in_order=True)
        console = Console(stderr=True, highlight=False)
        began = time.perf_counter()
        numbers = [item.number for item in items]
        with processing as results:
            counts = run_job(results, output, numbers, kept_bytes=kept_bytes, done=begin, what="records", console=console)
        console.print(summary(counts, time.perf_counter() - began))


class VariantProcessor:
    """Makes the variants of records with one model."""

    def __init__(self, subject: Writer, plan: Plan, field: str) -> None:
        self.subject = subject
        self.plan = plan
        self.field = field

    def process(self, items: Iterable[Item]) -> Iterator[Result]:
        """Yields the variants of each record, in the order of the records."""
        from redraft.tasks.augment import variants

        subject = self.subject
        remaining = iter(items)
        while group := list(islice(remaining, group_size(self.plan))):
            records = {item.number: json.loads(item.text) for item in group}
            texts = [(number, record[self.field]) for number, record in records.items()]
            for number, made in zip(
                records, variants(subject.engine, subject.tokenizer, texts, subject.sampler, self.plan), strict=True
            ):
                lines = "".join(to_line(to_record(records[number], self.field, variant)) for variant in made)
                yield Result(number, lines, count_variants(made, self.plan.count))

    def close(self) -> None:
        """There is nothing to end: the engine runs in the caller's thread."""


def load_processor(plan: Plan, field: str, model: str | Path, **options: Any) -> VariantProcessor:
    """Loads the model of a job, in this process or in a worker of a cluster."""
    from redraft import writer

    return VariantProcessor(writer.load(model, **options), plan, field)


def group_size(plan: Plan) -> int:
    """How many records are denoised together."""
    from redraft.tasks.augment import BATCH

    return max(1, BATCH // plan.count)


def check_records(
    file: str, field: str, records: Sequence[tuple[int, dict[str, Any]]], config: BackboneConfig, tokenizer: Tokenizer
) -> None:
    """Refuses records whose text does not fit the model."""
    from redraft.tasks.augment import check_text

    for line, record in records:
        try:
            check_text(config, tokenizer, record[field])
        except ValueError as error:
            raise ValueError(f"line {line} of {file}: {error}") from None


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
            record = parse_json(raw.decode("utf-8-sig"))
        except ValueError as error:  # from JSON or UTF-8 decoding
            raise ValueError(f"line {number} of {path} is not JSON: {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise ValueError(f"line {number} of {path} has no text in the field {field!r}: name the field with --field")
        records.append((number, record))
    if not records:
        raise ValueError(f"{path} has no records")
    return records


def to_record(record: dict[str, Any], field: str, variant: Variant) -> dict[str, Any]:
    """A record with the text of a variant, and the variant's origin."""
    origin = {"record": variant.number, "seed": variant.seed, "spans": [list(span) for span in variant.spans]}
    return {**record, field: variant.text, ORIGIN: origin}


def find_resume_point(output: OutputFile, texts: Sequence[str], plan: Plan) -> tuple[int, int]:
    """The record to resume with, and the number of bytes before its variants.

    That is the last record in the output, since its variants may be incomplete. Refuses an output that these records and
    options would not have produced.
    """
    from redraft.tasks.augment import choose_spans

    path = output.path
    last_record = 0
    kept_bytes = 0
    size = 0
    for number, line in enumerate(whole_lines(output.read()), 1):
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


def count_variants(made: Sequence[Variant], requested: int) -> dict[str, int]:
    """What the variants of one record add to the totals."""
    tokens = sum(variant.tokens for variant in made)
    return {"records": 1, "variants": len(made), "dropped": requested - len(made), "tokens": tokens}


def summary(counts: Counter[str], seconds: float) -> str:
    """The totals of a run in one line."""
    return (
        f"{counts['variants']} variants of {counts['records']} records, {counts['dropped']} dropped as duplicates; "
        f"{seconds:.1f} s, {counts['variants'] / max(seconds, 1e-9):.1f} variants/s, "
        f"{counts['tokens'] / max(seconds, 1e-9):.0f} tokens/s"
    )
