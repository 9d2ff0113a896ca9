"""Checks the records of a run before it starts, so that no bad line stops it after hours, and estimates their tokens.

The check reads every record once, without tokenizing it. A sample of the records is kept for the estimate.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.documents import Document, check_record, move_text, to_documents
from redraft.train.records import BadRecord, DataConfig, Record, scan_records

SAMPLE = 200  # records that are tokenized for an estimate
MAX_SAMPLED_BYTES = 2**18  # of a record in the sample: all of them are in memory
MAX_NAMED = 20  # bad records whose message is kept
REPORT_EVERY = 1000  # records

Sampled = tuple[str, Record, int]  # a record's name, the record, its bytes


@dataclass(frozen=True)
class DataCheck:
    """What the files hold, as far as they are read."""

    kinds: Mapping[str, int]  # records by kind, bad ones left out
    bad: int = 0
    named: tuple[str, ...] = ()  # what is wrong with the first bad records
    held_out: int = 0  # records that no source trains on
    record_bytes: int = 0  # of all usable records, decompressed
    read_bytes: int = 0  # of the files on the disk
    total_bytes: int = 0
    sample: tuple[Sampled, ...] = field(default=(), repr=False)  # of the usable records; empty before the end

    @property
    def records(self) -> int:
        """The usable records."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class TokenEstimate:
    """Tokens of one epoch of the records that are trained on."""

    documents: int
    prompt: int
    answer: int
    packed: int  # with the fill of the last canvases and the repeated context of divided answers: what the rows hold

    def steps(self, step_tokens: int) -> int:
        """Steps of an epoch, padding of rows not counted."""
        return max(1, -(-self.packed // step_tokens))


class _Sample:
    """A sample of a stream, in which every item is with the same probability (reservoir sampling)."""

    def __init__(self, seed: int) -> None:
        self.items: list[Sampled] = []
        self._rng = random.Random(seed)
        self._seen = 0

    def add(self, item: Sampled) -> None:
        """Keeps the item, or not; it may replace another one."""
        self._seen += 1
        if len(self.items) < SAMPLE:
            self.items.append(item)
            return
        place = self._rng.randrange(self._seen)
        if place < SAMPLE:
            self.items[place] = item


def check_records(cfg: DataConfig) -> Iterator[DataCheck]:
    """Reads all files and yields what was found so far, now and then; the last DataCheck is about everything.

    Raises the first BadRecord unless `cfg.skip_bad`. Held-out records are checked too.
    """
    source_of = {file: source for source in cfg.sources for file in source.files}
    sizes = {file: Path(file).stat().st_size for file in source_of}
    kinds: Counter[str] = Counter()
    sample = _Sample(cfg.seed)
    named: list[str] = []
    bad = held_out = record_bytes = done_bytes = 0

    def report(read_bytes: int, sampled: bool = False) -> DataCheck:
        """The state as a frozen record."""
        found = tuple(sample.items) if sampled else ()
        return DataCheck(dict(kinds), bad, tuple(named), held_out, record_bytes, read_bytes, sum(sizes.values()), found)

    for file, source in source_of.items():
        for number, (where, record, size, end) in enumerate(scan_records(file, cfg.separator)):
            try:
                usable = move_text(record, source)
                kinds[check_record(usable, where)] += 1
            except BadRecord as error:
                if not cfg.skip_bad:
                    raise
                bad += 1
                named += [str(error)] if len(named) < MAX_NAMED else []
                continue
            record_bytes += size
            if source.every and number % source.every == source.every - 1:
                held_out += 1
            is_small = size <= MAX_SAMPLED_BYTES or not sample.items
            if is_small and not isinstance(usable, BadRecord):
                sample.add((where, usable, size))
            if (number + 1) % REPORT_EVERY == 0:
                yield report(done_bytes + end)
        done_bytes += sizes[file]
    yield report(done_bytes, sampled=True)


def estimate_tokens(check: DataCheck, cfg: DataConfig, tokenizer: Tokenizer, stop: int) -> TokenEstimate:
    """Tokenizes the sample, and scales its tokens to the bytes of all records that are trained on.

    Raises the first BadRecord of the sample unless `cfg.skip_bad`: only a tokenizer finds what its template refuses.
    """
    documents: list[Document] = []
    sampled_bytes = 0
    for where, record, size in check.sample:
        try:
            documents += to_documents(record, where, tokenizer, stop)
        except BadRecord:
            if not cfg.skip_bad:
                raise
        sampled_bytes += size
    if not documents:
        raise ValueError("there is nothing to learn from in the sampled records")
    scale = check.record_bytes / sampled_bytes * (1 - check.held_out / check.records)
    counts = [
        len(documents),
        sum(len(document.prompt) for document in documents),
        sum(len(document.answer) for document in documents),
        sum(packed_size(document, cfg.length, cfg.canvas_lengths[0]) for document in documents),
    ]
    return TokenEstimate(*(round(count * scale) for count in counts))


def packed_size(document: Document, length: int, canvas_length: int) -> int:
    """The tokens that a document takes in rows: its prompt, its canvases, and the context of a divided answer's parts."""
    prompt = min(len(document.prompt), length - canvas_length)
    remaining = len(document.answer)
    total = 0
    while True:
        capacity = (length - prompt) // canvas_length * canvas_length
        total += prompt + -(-min(remaining, capacity) // canvas_length) * canvas_length
        remaining -= capacity
        if remaining <= 0:
            return total
        prompt = min(prompt + capacity, length // 4, length - canvas_length)
