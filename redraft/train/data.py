"""Text and JSON lines to packed rows with block boundaries: streamed, shuffled by seed, sharded, resumable to the document.

    sources -> records -> documents (prompt ids, answer ids) -> rows of L tokens -> batches

A record is one of {"text"}, {"prompt", "completion"}, {"messages"}; in a .txt file documents are parted by a line. Sources
are mixed by share, each going through its files epoch after epoch. An answer
ends with the stop token and is filled with it to the end of its last block, and the fill is learned: it is how a model says
that it has nothing more to say. Knows nothing of the model. Shapes: B rows, L tokens of a row.
"""

import gzip
import json
import lzma
import multiprocessing
import queue
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Vocabulary

from redraft.model.masks import Layout
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.loss import Batch

Record = Mapping[str, Any]

# The first ids of a vocabulary of our own. transformers looks for images wherever their marks stand: no word may have them.
MARKS = ("<pad>", "<eos>", "<bos>", "<|image>", "<|image|>", "<image|>")
PAD, STOP = 0, 1


class BadRecord(ValueError):
    """A record that cannot be used: which file, which line, why."""


@dataclass(frozen=True)
class Document:
    """What is given and what is learned, as ids. The answer ends with its stop token unless it goes on elsewhere."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of one kind."""

    files: tuple[str, ...]
    share: float = 1.0  # of the documents, relative to the other sources
    text: str = "text"  # what JSON records call their text
    mid_start: float = 0.0  # of text records: begin at a random line instead of the first
    given: float = 0.0  # of text records: up to a quarter of the text is prompt

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("a source has no files")
        if not self.share > 0:
            raise ValueError(f"share must be above 0, got {self.share!r}")
        for name in ("mid_start", "given"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share between 0 and 1, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which texts, in which order, packed how."""

    sources: tuple[Source, ...]
    length: int = 512
    blocks: tuple[int, ...] = (256,)  # row i has blocks of size blocks[i % len(blocks)]
    seed: int = 0
    short: float = 0.0  # of documents: behind the end, the last block is cut off at random, to spend less on filling
    lookahead: int = 32  # documents to choose from when a row is filled up
    shuffle: int = 4096  # records held back at a time to be drawn from; 1 keeps the files' order
    separator: str = "<|endofstory|>"  # the line between documents of a .txt file
    skip_bad: bool = False  # count records that cannot be used instead of stopping at the first

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("there are no sources to learn from")
        for name in ("length", "lookahead", "shuffle"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.short <= 1:
            raise ValueError(f"short is a share between 0 and 1, got {self.short!r}")
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


def ordered(cfg: DataConfig, source: Source, epoch: int) -> Iterator[tuple[str, Record | BadRecord]]:
    """All records once, in an order that depends on seed and epoch only: files shuffled, then drawn from a buffer."""
    rng = random.Random(f"{cfg.seed} {epoch}")
    files = list(source.files)
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


def cut(record: Record | BadRecord, source: Source, rng: random.Random) -> Record | BadRecord:
    """The record under its usual name, its text perhaps begun in the middle."""
    if isinstance(record, BadRecord):
        return record
    if source.text != "text" and source.text in record:
        record = {**record, "text": record[source.text]}
    text = record.get("text")
    if isinstance(text, str) and rng.random() < source.mid_start:
        starts = [at + 1 for at, letter in enumerate(text) if letter == "\n"]
        record = {**record, "text": text[rng.choice([0, *starts]) :].lstrip("\n") or text}
    return record


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
            prompt, answer, end = tokenizer.encode_prompt(record["prompt"]), record["completion"], stop
        elif keys == {"messages"} and record["messages"] and record["messages"][-1].get("role") == "assistant":
            *before, last = record["messages"]
            prompt, answer = tokenizer.encode_chat(before), last["content"]
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


def give(document: Document, source: Source, rng: random.Random) -> Document:
    """The document, the beginning of its text perhaps made prompt: a canvas may start anywhere in a sentence."""
    if rng.random() >= source.given:
        return document
    given = rng.randint(0, len(document.answer) // 4)
    return Document(document.prompt + document.answer[:given], document.answer[given:])


# 3. Documents to rows


@dataclass
class Row:
    """L tokens and where each stands; grows from the left, padding behind."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)

    def put(self, piece: Document, block: int, room: int, stop: int, fill: int) -> Document | None:
        """Adds as much of a document as fits in `room`, filled to a whole block by at most `fill`; the rest comes back.

        What is left is given the end of what went in as its prompt, so that it does not start from nothing.
        """
        fits = max(0, (room - len(piece.prompt)) // block * block)
        taken, left = piece.answer[:fits], piece.answer[fits:]
        filled = taken + [stop] * (min(fill, -len(taken) % block) if not left else 0)
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

    epochs: list[int] = field(default_factory=list)  # of each source
    taken: list[int] = field(default_factory=list)  # records of this epoch that were read, by all shards
    documents: int = 0
    rows: int = 0
    bad: int = 0
    waiting: list[Document] = field(default_factory=list)  # read but not yet packed

    def to_json(self) -> dict[str, Any]:
        """A copy that JSON can hold."""
        lists = {"epochs": list(self.epochs), "taken": list(self.taken)}
        return {**vars(self), **lists, "waiting": [[document.prompt, document.answer] for document in self.waiting]}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Position":
        """The position that `to_json` wrote."""
        return cls(**{**saved, "waiting": [Document(*document) for document in saved["waiting"]]})


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
        none = [0] * len(cfg.sources)
        self.position = position if position is not None else Position(epochs=list(none), taken=list(none))
        if len(self.position.taken) != len(cfg.sources):
            raise ValueError(f"the position is one of {len(self.position.taken)} sources, the data has {len(cfg.sources)}")
        self._of_source = [self._read(number) for number in range(len(cfg.sources))]

    def _next_document(self) -> Document:
        """From a source drawn by share; the draw depends on how many came before, so it needs no memory."""
        rng = random.Random(f"{self.cfg.seed} {self.shard} {self.position.documents}")
        (source,) = rng.choices(range(len(self.cfg.sources)), [source.share for source in self.cfg.sources])
        self.position.documents += 1
        return next(self._of_source[source])

    def _read(self, number: int) -> Iterator[Document]:
        """Documents of a source from the position on, epoch after epoch. Records already taken are only counted."""
        source, position = self.cfg.sources[number], self.position
        while True:
            seen = found = 0
            for where, record in ordered(self.cfg, source, position.epochs[number]):
                seen += 1
                if seen <= position.taken[number]:
                    found += 1
                    continue
                position.taken[number] = seen
                if (seen - 1) % self.shards != self.shard:
                    continue
                rng = random.Random(f"{self.cfg.seed} {position.epochs[number]} {seen}")
                try:
                    document = to_document(cut(record, source, rng), where, self.tokenizer, self.stop)
                    document = give(document, source, rng)
                except BadRecord:
                    if not self.cfg.skip_bad:
                        raise
                    position.bad += 1
                    continue
                found += 1
                yield document
            if not found:
                raise ValueError(f"there is nothing to learn from in {', '.join(source.files)}")
            position.epochs[number], position.taken[number] = position.epochs[number] + 1, 0

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        """The next row: the document that has waited longest, then whatever fills the room best without being cut."""
        row, waiting = Row(), self.position.waiting
        block = self.cfg.blocks[self.position.rows % len(self.cfg.blocks)]
        while True:
            while len(waiting) < self.cfg.lookahead:
                waiting.append(self._next_document())
            room = self.cfg.length - len(row.ids)
            sizes = [len(d.prompt) + -(-len(d.answer) // block) * block for d in waiting]
            fitting = [at for at, size in enumerate(sizes) if size <= room] if row.ids else [0]
            if not fitting:
                break
            document = waiting.pop(max(fitting, key=sizes.__getitem__))
            if len(document.prompt) > room - block:  # of a prompt without end, the end
                document = Document(document.prompt[len(document.prompt) - (room - block) :], document.answer)
            rng = random.Random(f"{self.cfg.seed} {self.shard} {self.position.rows} {room}")
            fill = rng.randint(0, block) if rng.random() < self.cfg.short else block
            if (left := row.put(document, block, room, self.stop, fill)) is not None:
                waiting.insert(0, left)
        self.position.rows += 1
        return row.padded(self.cfg.length, self.pad)


# 4. Rows to batches

COLUMNS = ("ids", "positions", "starts", "documents")


def stack(rows: Sequence[Row]) -> np.ndarray:
    """The columns of some rows, [4, B, L]."""
    return np.array([[getattr(row, name) for row in rows] for name in COLUMNS], dtype=np.int32)


def to_batch(columns_4BL: np.ndarray) -> Batch:
    """Columns as tensors."""
    ids, *places = torch.from_numpy(columns_4BL).long()
    return Batch(ids, Layout(*places))


class Batches:
    """Batches of one stream of rows, each with the position behind it, made in this process."""

    def __init__(self, stream: Rows, rows: int) -> None:
        self.stream, self.rows = stream, rows

    def __next__(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Columns of the next rows, and where to go on after them."""
        columns_4BL = stack([next(self.stream) for _ in range(self.rows)])
        return columns_4BL, self.stream.position.to_json()

    def close(self) -> None:
        """Nothing is held."""


class ReadAhead:
    """The same batches, made in a process of their own while the GPU works on earlier ones."""

    def __init__(self, batches: Batches, depth: int = 4) -> None:
        stream = batches.stream
        names = ("cfg", "tokenizer", "stop", "pad", "shard", "shards", "position")
        context = multiprocessing.get_context("spawn")  # a fork would inherit the GPU
        self.queue = context.Queue(depth)
        arguments = ({name: getattr(stream, name) for name in names}, batches.rows, self.queue)
        self.process = context.Process(target=_make_batches, args=arguments, daemon=True)
        self.process.start()
        self.queue._writer.close()  # else a reader that dies in the middle of a batch would be waited for for ever

    def __next__(self) -> tuple[np.ndarray, dict[str, Any]]:
        """The next batch, or the error that ended them."""
        while True:
            try:
                item = self.queue.get(timeout=5)
            except (queue.Empty, EOFError, OSError):
                self.process.join(0.1)
                if not self.process.is_alive():
                    raise RuntimeError(f"the reading process ended with code {self.process.exitcode}") from None
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def close(self) -> None:
        """Ends the process."""
        self.process.terminate()
        self.process.join()


class Interleaved:
    """Several streams as one, a row of each in turn: one process alone may be too slow for a GPU."""

    def __init__(self, streams: Sequence[Batches | ReadAhead]) -> None:
        self.streams = streams

    def __next__(self) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """Columns of the next rows, and the positions of all streams behind them."""
        parts, positions = zip(*(next(stream) for stream in self.streams), strict=True)
        columns_4BSL = np.stack(parts, axis=2)
        return columns_4BSL.reshape(len(COLUMNS), -1, columns_4BSL.shape[-1]), list(positions)

    def close(self) -> None:
        """Ends what the streams hold."""
        for stream in self.streams:
            stream.close()


def _make_batches(stream: dict[str, Any], rows: int, out: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that trains decides
    try:
        batches = Batches(Rows(**stream), rows)
        while True:
            out.put(next(batches))
    except Exception as error:
        out.put(error)


# 5. A vocabulary


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
