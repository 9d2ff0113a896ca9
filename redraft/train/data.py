"""Text and JSON lines to packed rows with block boundaries: streamed, shuffled by seed, sharded, resumable to the document.

    files -> records -> documents (prompt ids, answer ids) -> rows of L tokens -> batches

A record is one of {"text"}, {"prompt", "completion"}, {"messages"}; in a .txt file documents are parted by a line. An answer
ends with the stop token and is filled with it to the end of its last block, and the fill is learned: it is how a model says
that it has nothing more to say. Knows nothing of the model. Shapes: B rows, L tokens of a row.
"""

import gzip
import json
import lzma
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Vocabulary

from redraft.masks import Layout
from redraft.tokenizer import Tokenizer
from redraft.train.loss import Batch

Record = Mapping[str, Any]


class BadRecord(ValueError):
    """A record that cannot be used: which file, which line, why."""


@dataclass(frozen=True)
class Document:
    """What is given and what is learned, as ids. The answer ends with its stop token unless it goes on elsewhere."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which files, in which order, packed how."""

    files: tuple[str, ...]
    length: int = 512
    blocks: tuple[int, ...] = (256,)  # row i has blocks of size blocks[i % len(blocks)]
    seed: int = 0
    lookahead: int = 32  # documents to choose from when a row is filled up
    shuffle: int = 4096  # records held back at a time to be drawn from; 1 keeps the files' order
    separator: str = "<|endofstory|>"  # the line between documents of a .txt file
    skip_bad: bool = False  # count records that cannot be used instead of stopping at the first

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("no training files were given")
        for name in ("length", "lookahead", "shuffle"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.blocks or min(self.blocks) < 1 or max(self.blocks) > self.length:
            raise ValueError(f"blocks must be between 1 and the row length {self.length}, got {self.blocks}")


# 1. Files to records


def open_text(path: str | Path) -> TextIO:
    """A text file, compressed or not."""
    openers = {".xz": lzma.open, ".gz": gzip.open}
    return openers.get(Path(path).suffix, open)(path, "rt", encoding="utf-8")


def read_records(path: str | Path, separator: str) -> Iterator[tuple[str, Record | BadRecord]]:
    """(file:line, record) of every record; one that is no JSON object comes as the complaint about it."""
    plain = Path(path).with_suffix("") if Path(path).suffix in (".xz", ".gz") else Path(path)
    with open_text(path) as file:
        if plain.suffix == ".jsonl":
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _parsed(line, f"{path}:{number}")
            return
        begin, lines = 1, []
        for number, line in enumerate(file, 1):
            if line.rstrip("\n") != separator:
                lines.append(line)
                continue
            yield f"{path}:{begin}", {"text": "".join(lines).strip("\n")}
            begin, lines = number + 1, []
        if "".join(lines).strip():
            yield f"{path}:{begin}", {"text": "".join(lines).strip("\n")}


def _parsed(line: str, where: str) -> Record | BadRecord:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        return BadRecord(f"{where}: not JSON: {error}")
    return record if isinstance(record, dict) else BadRecord(f"{where}: a JSON {type(record).__name__}, not an object")


def ordered(cfg: DataConfig, epoch: int) -> Iterator[tuple[str, Record | BadRecord]]:
    """All records once, in an order that depends on seed and epoch only: files shuffled, then drawn from a buffer."""
    rng = random.Random(f"{cfg.seed} {epoch}")
    files = list(cfg.files)
    if cfg.shuffle > 1:
        rng.shuffle(files)
    held: list[tuple[str, Record | BadRecord]] = []
    for file in files:
        for item in read_records(file, cfg.separator):
            if len(held) < cfg.shuffle:
                held.append(item)
                continue
            at = rng.randrange(len(held)) if cfg.shuffle > 1 else 0
            yield held[at]
            held[at] = item
    if cfg.shuffle > 1:
        rng.shuffle(held)
    yield from held


# 2. Records to documents


def to_document(record: Record | BadRecord, where: str, tokenizer: Tokenizer, stop: int) -> Document:
    """A record's ids, or the reason why it has none."""
    if isinstance(record, BadRecord):
        raise record
    keys = set(record) & {"text", "prompt", "completion", "messages"}
    begin = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    try:
        if keys == {"text"}:
            prompt, answer, end = begin, record["text"], stop
        elif keys == {"prompt", "completion"}:
            prompt, answer, end = tokenizer.prompt(record["prompt"]), record["completion"], stop
        elif keys == {"messages"} and record["messages"] and record["messages"][-1].get("role") == "assistant":
            *before, last = record["messages"]
            prompt, answer = tokenizer.chat(before), last["content"]
            end = tokenizer.vocabulary.token_to_id("<turn|>") or stop
        else:
            kinds = "text, prompt and completion, or messages that end with the assistant's"
            raise BadRecord(f"{where}: a record has {kinds}; this one has {sorted(record)}")
        if not isinstance(answer, str) or not answer:
            raise BadRecord(f"{where}: nothing to learn from {answer!r}")
        return Document(list(prompt), [*tokenizer.encode(answer), end])
    except BadRecord:
        raise
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadRecord(f"{where}: {error}") from None


# 3. Documents to rows


@dataclass
class Row:
    """L tokens and where each stands; grows from the left, padding behind."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)

    def put(self, piece: Document, block: int, room: int, stop: int) -> Document | None:
        """Adds as much of a document as fits in `room`, filled to a whole block; what is left comes back.

        What is left is given the end of what went in as its prompt, so that it does not start from nothing.
        """
        fits = max(0, (room - len(piece.prompt)) // block * block)
        taken, left = piece.answer[:fits], piece.answer[fits:]
        filled = taken + [stop] * (-len(taken) % block if not left else 0)
        ids = piece.prompt + filled
        document = max(self.documents, default=-1) + 1
        self.ids += ids
        self.positions += range(len(ids))
        given = len(piece.prompt)
        self.starts += [-1] * given + [given + at // block * block for at in range(len(filled))]
        self.documents += [document] * len(ids)
        return Document(ids[-(room // 4) :], left) if left else None

    def padded(self, length: int, pad: int) -> "Row":
        """The row at its full length."""
        missing = length - len(self.ids)
        return Row(
            self.ids + [pad] * missing,
            self.positions + [0] * missing,
            self.starts + [-1] * missing,
            self.documents + [-1] * missing,
        )


@dataclass
class Position:
    """Where a stream of rows stands; written into checkpoints. Everything follows from it and the configuration."""

    epoch: int = 0
    taken: int = 0  # records of this epoch that were read, by all shards
    rows: int = 0
    bad: int = 0
    waiting: list[dict[str, list[int]]] = field(default_factory=list)  # documents read but not yet packed

    def to_json(self) -> dict[str, Any]:
        """What `Position(**...)` takes."""
        return asdict(self)


class Rows:
    """The endless stream of packed rows of one shard. `position` can be saved at any time and given back."""

    def __init__(
        self,
        cfg: DataConfig,
        tokenizer: Tokenizer,
        *,
        stop: int,
        pad: int,
        shard: int = 0,
        shards: int = 1,
        position: Position | None = None,
    ) -> None:
        if not 0 <= shard < shards:
            raise ValueError(f"shard {shard} of {shards} does not exist")
        self.cfg, self.tokenizer, self.stop, self.pad = cfg, tokenizer, stop, pad
        self.shard, self.shards = shard, shards
        self.position = position if position is not None else Position()
        self._documents = self._read()

    def _read(self) -> Iterator[Document]:
        """Documents of this shard from the position on, epoch after epoch. Records already taken are only counted."""
        while True:
            seen = found = 0
            for where, record in ordered(self.cfg, self.position.epoch):
                seen += 1
                if seen <= self.position.taken:
                    continue
                self.position.taken = seen
                if (seen - 1) % self.shards != self.shard:
                    continue
                try:
                    document = to_document(record, where, self.tokenizer, self.stop)
                except BadRecord:
                    if not self.cfg.skip_bad:
                        raise
                    self.position.bad += 1
                    continue
                found += 1
                yield document
            if not found and not self.position.rows:
                raise ValueError(f"there is nothing to learn from in {', '.join(self.cfg.files)}")
            self.position.epoch, self.position.taken = self.position.epoch + 1, 0

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        """The next row: the document that has waited longest, then whatever fills the room best without being cut."""
        row, waiting = Row(), self.position.waiting
        block = self.cfg.blocks[self.position.rows % len(self.cfg.blocks)]
        while True:
            while len(waiting) < self.cfg.lookahead:
                waiting.append(asdict(next(self._documents)))
            room = self.cfg.length - len(row.ids)
            sizes = [len(d["prompt"]) + -(-len(d["answer"]) // block) * block for d in waiting]
            fitting = [at for at, size in enumerate(sizes) if size <= room] if row.ids else [0]
            if not fitting:
                break
            document = Document(**waiting.pop(max(fitting, key=sizes.__getitem__)))
            if len(document.prompt) > room - block:  # of a prompt without end, the end
                document = Document(document.prompt[len(document.prompt) - (room - block) :], document.answer)
            if (left := row.put(document, block, room, self.stop)) is not None:
                waiting.insert(0, asdict(left))
        self.position.rows += 1
        return row.padded(self.cfg.length, self.pad)


def to_batch(rows: Sequence[Row], device: torch.device | str = "cpu") -> Batch:
    """Rows as tensors."""
    columns = ("ids", "positions", "starts", "documents")
    ids, *places = (torch.tensor([getattr(row, name) for row in rows], device=device) for name in columns)
    return Batch(ids, Layout(*places))


# 4. A vocabulary


def train_tokenizer(texts: Iterator[str], vocab_size: int, marks: Sequence[str]) -> Tokenizer:
    """A byte-level BPE of these texts, the marks first. Every byte is a token, so nothing is ever unknown."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(marks) + len(alphabet):
        raise ValueError(f"a vocabulary of {vocab_size} has no room for {len(marks)} marks and {len(alphabet)} bytes")
    vocabulary = Vocabulary(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    special = [AddedToken(mark, special=True, normalized=False) for mark in marks]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    vocabulary.train_from_iterator(texts, trainer)
    return Tokenizer(vocabulary)
