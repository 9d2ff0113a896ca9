"""Training data: documents become packed rows with canvas boundaries, and rows become batches.

    sources -> records -> documents (prompt ids, answer ids) -> rows of L tokens -> batches

The stream is shuffled by seed, sharded, and resumable to the document. `records.py` reads the records, `documents.py`
tokenizes them. Sources are mixed by share, and each repeats its files epoch after epoch. An answer ends with the stop token,
and more stop tokens fill its last canvas. The model learns to predict this fill: it is how it ends a text. Shapes: B rows,
L tokens of a row.
"""

import multiprocessing
import queue
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Vocabulary

from redraft.model.masks import Layout
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.documents import Document, crop_text, drop_prompt, move_start_to_prompt, to_documents
from redraft.train.loss import Batch
from redraft.train.records import BadRecord, DataConfig, Record, read_shuffled

# The first ids of vocabularies that we train. transformers treats image tokens specially wherever they occur, so no word may
# have their ids.
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<|image>", "<|image|>", "<image|>")
PAD_ID = 0
STOP_ID = 1


# 1. Documents to rows


@dataclass
class Row:
    """Up to L tokens of packed documents, with the layout of each token."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    records: list[str] = field(default_factory=list)  # the names of the records, "file:line"

    def append(self, document: Document, canvas_length: int, room: int, stop: int, max_fill: int) -> Document | None:
        """Appends the part of a document that fits in `room`, filled to a whole canvas by at most `max_fill` stop tokens.

        Returns the rest of the document, or None. The rest has the appended part as its prompt.
        """
        capacity = max(0, (room - len(document.prompt)) // canvas_length * canvas_length)
        answer = document.answer[:capacity]
        rest = document.answer[capacity:]
        is_cut = document.own and answer[-1:] != [stop]
        fill = min(max_fill, -len(answer) % canvas_length) if not rest and not is_cut else 0
        filled = answer + [stop] * fill
        ids = document.prompt + filled
        prompt_length = len(document.prompt)
        number = max(self.documents, default=-1) + 1
        self.ids += ids
        self.positions += range(len(ids))
        self.starts += [-1] * prompt_length
        self.starts += [prompt_length + offset // canvas_length * canvas_length for offset in range(len(filled))]
        self.documents += [number] * len(ids)
        self.own += [document.own] * len(ids)
        self.records += [document.where] if document.where not in self.records else []
        return replace(document, prompt=ids, answer=rest) if rest else None

    def padded(self, length: int, pad: int) -> "Row":
        """Returns the row padded to `length` tokens."""
        missing = length - len(self.ids)
        return Row(
            self.ids + [pad] * missing,
            self.positions + [0] * missing,
            self.starts + [-1] * missing,
            self.documents + [-1] * missing,
            self.own + [False] * missing,
            self.records,
        )


def cut_prompt(document: Document, most: int, kept: int | None) -> Document:
    """Keeps the last `most` tokens of a prompt. If the prompt begins with the token `kept`, the result does so too."""
    if len(document.prompt) <= most:
        return document
    start = [kept] if kept is not None and document.prompt[0] == kept and most > 0 else []
    return replace(document, prompt=start + document.prompt[len(document.prompt) - most + len(start) :])


def describe_cuts(documents: Sequence[Document], cfg: DataConfig) -> str:
    """What is lost or divided when a record's documents are packed; empty if they are packed whole."""
    canvas_length = max(cfg.canvas_lengths)
    max_prompt = cfg.length - canvas_length
    prompts = [len(document.prompt) for document in documents if len(document.prompt) > max_prompt]
    answers = [
        len(document.answer)
        for document in documents
        if min(len(document.prompt), max_prompt) + -(-len(document.answer) // canvas_length) * canvas_length > cfg.length
    ]
    cuts = []
    if prompts:
        cuts.append(
            f"{len(prompts)} of {len(documents)} prompts cut to {max_prompt} tokens (the longest has {max(prompts)})"
        )
    if answers:
        cuts.append(
            f"{len(answers)} of {len(documents)} answers divided between rows (the longest has {max(answers)} tokens)"
        )
    return "; ".join(cuts)


@dataclass
class Position:
    """The position of a stream of rows, for checkpoints. It and the configuration determine all later rows."""

    epochs: list[int] = field(default_factory=list)  # of each source
    taken: list[int] = field(default_factory=list)  # records of this epoch that all shards have read, for each source
    begun: list[int] = field(default_factory=list)  # documents that were taken from the record after them
    documents: int = 0
    rows: int = 0
    bad: int = 0  # records skipped, each counted once
    shortened: int = 0  # records with a cut prompt or a divided answer, each counted once
    waiting: list[Document] = field(default_factory=list)  # read but not yet packed
    records: list[str] = field(default_factory=list)  # the names of the records in the last batch
    # The records that were skipped or shortened in the last batch, and what happened to each.
    notes: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def start(cls, sources: int) -> "Position":
        """The position before the first record of every source."""
        return cls(epochs=[0] * sources, taken=[0] * sources, begun=[0] * sources)

    def to_json(self) -> dict[str, Any]:
        """Returns a copy as JSON values."""
        copies = {name: list(value) for name, value in vars(self).items() if isinstance(value, list)}
        waiting = [list(vars(document).values()) for document in self.waiting]
        return {**vars(self), **copies, "waiting": waiting, "notes": [list(note) for note in self.notes]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Position":
        """Restores the position from the values of `to_json`."""
        waiting = [Document(*document) for document in values["waiting"]]
        return cls(**{**values, "waiting": waiting, "notes": [(where, note) for where, note in values["notes"]]})


class Rows:
    """The endless stream of packed rows of one shard. `position` can be saved at any time and passed back."""

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
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.stop = stop
        self.pad = pad
        self.shard = shard
        self.shards = shards
        sources = len(cfg.sources)
        self.position = position if position is not None else Position.start(sources)
        if len(self.position.taken) != sources:
            raise ValueError(f"the position is one of {len(self.position.taken)} sources, the data has {sources}")
        self._kept = tokenizer.bos_id if cfg.keeps_bos else None  # at the start of a prompt that is cut
        self._documents_of = [self._read_source(number) for number in range(sources)]

    def _next_document(self) -> Document:
        """Reads from a source drawn by share. The draw depends only on the number of documents before."""
        rng = random.Random(f"{self.cfg.seed} {self.shard} {self.position.documents}")
        (source,) = rng.choices(range(len(self.cfg.sources)), [source.share for source in self.cfg.sources])
        self.position.documents += 1
        return next(self._documents_of[source])

    def _read_source(self, number: int) -> Iterator[Document]:
        """Yields documents of a source from the position on, epoch after epoch. Skips documents that were taken before."""
        source = self.cfg.sources[number]
        position = self.position
        while True:
            seen = 0
            usable = 0
            for where, record in read_shuffled(self.cfg, source, position.epochs[number]):
                seen += 1
                if seen <= position.taken[number]:
                    usable += 1
                    continue
                if (seen - 1) % self.shards == self.shard:
                    documents = self._read_documents(number, seen, where, record)
                    usable += len(documents)
                    for index in range(position.begun[number], len(documents)):
                        position.begun[number] = index + 1
                        yield documents[index]
                position.taken[number] = seen
                position.begun[number] = 0
            if not usable:
                counts = f"{seen} records, {position.bad} skipped, {self.shards} shards"
                raise ValueError(f"there is nothing to learn from in {', '.join(source.files)}: {counts}")
            position.epochs[number] += 1
            position.taken[number] = 0

    def _read_documents(self, number: int, seen: int, where: str, record: Record | BadRecord) -> list[Document]:
        """Tokenizes a record, and notes in the first epoch whether it is skipped or shortened."""
        source = self.cfg.sources[number]
        position = self.position
        is_new = position.epochs[number] == 0 and position.begun[number] == 0
        rng = random.Random(f"{self.cfg.seed} {position.epochs[number]} {seen}")
        try:
            record = drop_prompt(crop_text(record, source, rng), source, rng)
            documents = to_documents(record, where, self.tokenizer, self.stop)
        except BadRecord as error:
            if not self.cfg.skip_bad:
                raise
            position.bad += is_new
            position.notes += [(where, str(error).removeprefix(f"{where}: "))] if is_new else []
            return []
        documents = [move_start_to_prompt(replace(document, own=source.own), source, rng) for document in documents]
        cuts = describe_cuts(documents, self.cfg)
        if cuts and is_new:
            position.shortened += 1
            position.notes.append((where, cuts))
        max_prompt = self.cfg.length - min(self.cfg.canvas_lengths)  # no row takes more, and memory stays bounded
        return [cut_prompt(document, max_prompt, self._kept) for document in documents]

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        """Packs the next row: first the document that waited longest, then the largest documents that fit uncut."""
        row = Row()
        waiting = self.position.waiting
        canvas_length = self.cfg.canvas_lengths[self.position.rows % len(self.cfg.canvas_lengths)]
        while True:
            while len(waiting) < self.cfg.lookahead:
                waiting.append(self._next_document())
            room = self.cfg.length - len(row.ids)
            sizes = [len(d.prompt) + -(-len(d.answer) // canvas_length) * canvas_length for d in waiting]
            fitting = [index for index, size in enumerate(sizes) if size <= room] if row.ids else [0]
            if not fitting:
                break
            document = waiting.pop(max(fitting, key=sizes.__getitem__))
            document = cut_prompt(document, room - canvas_length, self._kept)
            rng = random.Random(f"{self.cfg.seed} {self.shard} {self.position.rows} {room}")
            max_fill = rng.randint(0, canvas_length) if rng.random() < self.cfg.short_fill else canvas_length
            rest = row.append(document, canvas_length, room, self.stop, max_fill)
            if rest is not None:  # it sees the last quarter of a row
                waiting.insert(0, cut_prompt(rest, room // 4, self._kept))
        self.position.rows += 1
        return row.padded(self.cfg.length, self.pad)


# 2. Rows to batches

COLUMNS = ("ids", "positions", "starts", "documents", "own")


def stack_rows(rows: Sequence[Row]) -> np.ndarray:
    """Stacks the columns of rows: [5, B, L]."""
    return np.array([[getattr(row, name) for row in rows] for name in COLUMNS], dtype=np.int32)


def to_batch(columns_5BL: np.ndarray) -> Batch:
    """Converts stacked columns to tensors."""
    ids_BL, *layout, own_BL = torch.from_numpy(columns_5BL).long()
    return Batch(ids_BL, Layout(*layout), own_BL.bool())


class Batches:
    """Batches of one stream of rows, each with the stream's position after it, made in this process."""

    def __init__(self, stream: Rows, rows: int) -> None:
        self.stream = stream
        self.rows = rows

    def __next__(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Returns the columns of the next rows and the position after them."""
        position = self.stream.position
        position.notes = []
        rows = [next(self.stream) for _ in range(self.rows)]
        position.records = list(dict.fromkeys(where for row in rows for where in row.records))
        return stack_rows(rows), position.to_json()

    def close(self) -> None:
        """Does nothing: no process is held."""


class PrefetchedBatches:
    """The same batches, made ahead of time in another process while the GPU works."""

    def __init__(self, batches: Batches, depth: int = 4) -> None:
        stream = batches.stream
        names = ("cfg", "tokenizer", "stop", "pad", "shard", "shards", "position")
        context = multiprocessing.get_context("spawn")  # a fork would inherit the GPU
        self.queue = cast(Any, context.Queue(depth))  # Any, because of the private attribute below
        # start() waits until the other process has read its arguments, and a tokenizer is large. Through a queue, several
        # processes start at once.
        self.arguments = context.Queue(1)  # kept: the other process opens it by name
        self.arguments.put(({name: getattr(stream, name) for name in names}, batches.rows))
        self.arguments.cancel_join_thread()  # a process that dies before it reads them must not keep this one
        self.process = context.Process(target=_make_batches, args=(self.arguments, self.queue), daemon=True)
        self.process.start()
        self.queue._writer.close()  # else get() would wait forever after the other process died in the middle of a batch

    def __next__(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Returns the next batch, or raises the error that ended the other process."""
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


class InterleavedBatches:
    """Several streams as one, a row of each in turn: one process alone may be too slow for a GPU."""

    def __init__(self, streams: Sequence[Batches | PrefetchedBatches]) -> None:
        self.streams = streams

    def __next__(self) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """Returns the columns of the next rows and the positions of all streams after them."""
        parts, positions = zip(*(next(stream) for stream in self.streams), strict=True)
        columns_5BSL = np.stack(parts, axis=2)
        return columns_5BSL.reshape(len(COLUMNS), -1, columns_5BSL.shape[-1]), list(positions)

    def close(self) -> None:
        """Closes every stream."""
        for stream in self.streams:
            stream.close()


def _make_batches(arguments: Any, out: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the training process decides
    try:
        stream, rows = arguments.get()
        batches = Batches(Rows(**stream), rows)
        while True:
            out.put(next(batches))
    except Exception as error:
        out.put(error)


# 3. Vocabulary


def train_tokenizer(texts: Iterator[str], vocab_size: int, special_tokens: Sequence[str]) -> Tokenizer:
    """Trains a byte-level BPE vocabulary; special tokens get the first ids. Every byte is a token, so no text is unknown."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(special_tokens) + len(alphabet):
        raise ValueError(
            f"a vocabulary of {vocab_size} has no room for {len(special_tokens)} special tokens and {len(alphabet)} bytes"
        )
    vocabulary = Vocabulary(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=added, initial_alphabet=alphabet, show_progress=False
    )
    vocabulary.train_from_iterator(texts, trainer)
    return Tokenizer(vocabulary)
