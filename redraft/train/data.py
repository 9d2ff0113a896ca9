"""Training data: text and JSON lines become packed rows with canvas boundaries.

    sources -> records -> documents (prompt ids, answer ids) -> rows of L tokens -> batches

The stream is shuffled by seed, sharded, and resumable to the document. A record is one of {"text"}, {"prompt",
"completion"}, {"messages"}, {"ids"} (tokens, as `own_text.py` writes them); in a .txt file a separator line stands between
documents. Sources are mixed by share, and each repeats its files epoch after epoch. An answer ends with the stop token, and
more stop tokens fill its last canvas. The model learns to predict this fill: it is how it ends a text. Shapes: B rows,
L tokens of a row.
"""

import gzip
import json
import lzma
import multiprocessing
import queue
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Vocabulary

from redraft.model.masks import Layout
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.loss import Batch

Record = Mapping[str, Any]

# The first ids of vocabularies that we train. transformers treats image tokens specially wherever they occur, so no word may
# have their ids.
SPECIAL_TOKENS = ("<pad>", "<eos>", "<bos>", "<|image>", "<|image|>", "<image|>")
PAD_ID = 0
STOP_ID = 1


class BadRecord(ValueError):
    """A record that cannot be used; the message names the file, the line and the reason."""


@dataclass(frozen=True)
class Document:
    """Token ids of a prompt, which is given, and of an answer, which is learned.

    The answer ends with the stop token unless a later piece continues it, or the model was cut off when it wrote it.
    """

    prompt: list[int]
    answer: list[int]
    own: bool = False  # the model itself wrote it


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of one kind."""

    files: tuple[str, ...]
    share: float = 1.0  # of the documents, relative to the other sources
    text: str = "text"  # the key of the text in JSON records
    mid_start: float = 0.0  # share of text records that start at a random line instead of the first
    prompt_share: float = 0.0  # share of text records whose beginning, up to a quarter of the text, becomes the prompt
    own: bool = False  # texts that the model itself wrote: the causal half does not learn from them

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("a source has no files")
        if not self.share > 0:
            raise ValueError(f"share must be above 0, got {self.share!r}")
        for name in ("mid_start", "prompt_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share between 0 and 1, got {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The texts, their order, and how they are packed."""

    sources: tuple[Source, ...]
    length: int = 512  # tokens of a row
    canvas_lengths: tuple[int, ...] = (256,)  # row i has canvases of canvas_lengths[i % len(canvas_lengths)] tokens
    seed: int = 0
    short_fill: float = 0.0  # share of documents whose last canvas is cut at a random place after its end, to save tokens
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


# 1. Files to records


def open_text(path: str | Path) -> TextIO:
    """Opens a text file; .xz and .gz are decompressed."""
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    return openers.get(Path(path).suffix, open)(path, "rt", encoding="utf-8")


def read_records(path: str | Path, separator: str) -> Iterator[tuple[str, Record | BadRecord]]:
    """Yields ("file:line", record) for every record. A line that is no JSON object is yielded as a BadRecord."""
    uncompressed = Path(path).with_suffix("") if Path(path).suffix in (".xz", ".gz") else Path(path)
    with open_text(path) as file:
        if uncompressed.suffix == ".jsonl":
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}:{number}", _parse_line(line, f"{path}:{number}")
            return
        first_line = 1
        lines: list[str] = []
        for number, line in enumerate(file, 1):
            if line.rstrip("\n") != separator:
                lines.append(line)
                continue
            yield f"{path}:{first_line}", {"text": "".join(lines).strip("\n")}
            first_line = number + 1
            lines = []
        if "".join(lines).strip():
            yield f"{path}:{first_line}", {"text": "".join(lines).strip("\n")}


def _parse_line(line: str, where: str) -> Record | BadRecord:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        return BadRecord(f"{where}: not JSON: {error}")
    return record if isinstance(record, dict) else BadRecord(f"{where}: a JSON {type(record).__name__}, not an object")


def read_shuffled(cfg: DataConfig, source: Source, epoch: int) -> Iterator[tuple[str, Record | BadRecord]]:
    """Yields all records once. The order depends on seed and epoch only: files are shuffled, then records pass a buffer."""
    rng = random.Random(f"{cfg.seed} {epoch}")
    files = list(source.files)
    if cfg.shuffle > 1:
        rng.shuffle(files)
    buffer: list[tuple[str, Record | BadRecord]] = []
    for file in files:
        for item in read_records(file, cfg.separator):
            if len(buffer) < cfg.shuffle:
                buffer.append(item)
                continue
            index = rng.randrange(len(buffer)) if cfg.shuffle > 1 else 0
            yield buffer[index]
            buffer[index] = item
    if cfg.shuffle > 1:
        rng.shuffle(buffer)
    yield from buffer


# 2. Records to documents


def crop_text(record: Record | BadRecord, source: Source, rng: random.Random) -> Record | BadRecord:
    """Moves the text to the key "text" and, with probability `mid_start`, starts it at a random line."""
    if isinstance(record, BadRecord):
        return record
    if source.text != "text" and source.text in record:
        record = {**record, "text": record[source.text]}
    text = record.get("text")
    if isinstance(text, str) and rng.random() < source.mid_start:
        line_starts = [index + 1 for index, letter in enumerate(text) if letter == "\n"]
        record = {**record, "text": text[rng.choice([0, *line_starts]) :].lstrip("\n") or text}
    return record


def to_document(record: Record | BadRecord, where: str, tokenizer: Tokenizer, stop: int) -> Document:
    """Tokenizes a record; raises BadRecord if it cannot be used."""
    if isinstance(record, BadRecord):
        raise record
    keys = set(record) & {"text", "prompt", "completion", "messages", "ids"}
    start_ids = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    try:
        if keys == {"ids"}:
            return Document(start_ids, _require_tokens(record["ids"], where, tokenizer.size))
        if keys == {"text"}:
            prompt, answer, end = start_ids, record["text"], stop
        elif keys == {"prompt", "completion"}:
            prompt, answer, end = tokenizer.encode_prompt(record["prompt"]), record["completion"], stop
        elif keys == {"messages"} and record["messages"] and record["messages"][-1].get("role") == "assistant":
            *history, reply = record["messages"]
            prompt = tokenizer.encode_chat(history)
            answer = reply["content"]
            end = tokenizer.vocabulary.token_to_id("<turn|>") or stop
        else:
            kinds = "text, ids, prompt and completion, or messages that end with the assistant's"
            raise BadRecord(f"{where}: a record has {kinds}; this one has {sorted(record)}")
        if not isinstance(answer, str) or not answer:
            raise BadRecord(f"{where}: nothing to learn from {answer!r}")
        return Document(list(prompt), [*tokenizer.encode(answer), end])
    except BadRecord:
        raise
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise BadRecord(f"{where}: {error}") from None


def _require_tokens(ids: Any, where: str, vocab_size: int) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise BadRecord(f"{where}: ids must be a list of tokens below {vocab_size}")
    return ids


def move_start_to_prompt(document: Document, source: Source, rng: random.Random) -> Document:
    """Moves a random beginning of the answer to the prompt, with probability `prompt_share`: a canvas may start anywhere."""
    if rng.random() >= source.prompt_share:
        return document
    count = rng.randint(0, len(document.answer) // 4)
    return replace(document, prompt=document.prompt + document.answer[:count], answer=document.answer[count:])


# 3. Documents to rows


@dataclass
class Row:
    """Up to L tokens of packed documents, with the layout of each token."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)

    def append(self, document: Document, canvas_length: int, room: int, stop: int, max_fill: int) -> Document | None:
        """Appends the part of a document that fits in `room`, filled to a whole canvas by at most `max_fill` stop tokens.

        Returns the rest of the document, or None. The rest gets the end of the appended part as its prompt.
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
        return replace(document, prompt=ids[-(room // 4) :], answer=rest) if rest else None

    def padded(self, length: int, pad: int) -> "Row":
        """Returns the row padded to `length` tokens."""
        missing = length - len(self.ids)
        return Row(
            self.ids + [pad] * missing,
            self.positions + [0] * missing,
            self.starts + [-1] * missing,
            self.documents + [-1] * missing,
            self.own + [False] * missing,
        )


@dataclass
class Position:
    """The position of a stream of rows, for checkpoints. It and the configuration determine all later rows."""

    epochs: list[int] = field(default_factory=list)  # of each source
    taken: list[int] = field(default_factory=list)  # records of this epoch that all shards have read, for each source
    documents: int = 0
    rows: int = 0
    bad: int = 0
    waiting: list[Document] = field(default_factory=list)  # read but not yet packed

    def to_json(self) -> dict[str, Any]:
        """Returns a copy as JSON values."""
        lists = {"epochs": list(self.epochs), "taken": list(self.taken)}
        return {**vars(self), **lists, "waiting": [list(vars(document).values()) for document in self.waiting]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Position":
        """Restores the position from the values of `to_json`."""
        return cls(**{**values, "waiting": [Document(*document) for document in values["waiting"]]})


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
        self.position = position if position is not None else Position(epochs=[0] * sources, taken=[0] * sources)
        if len(self.position.taken) != sources:
            raise ValueError(f"the position is one of {len(self.position.taken)} sources, the data has {sources}")
        self._documents_of = [self._read_source(number) for number in range(sources)]

    def _next_document(self) -> Document:
        """Reads from a source drawn by share. The draw depends only on the number of documents before."""
        rng = random.Random(f"{self.cfg.seed} {self.shard} {self.position.documents}")
        (source,) = rng.choices(range(len(self.cfg.sources)), [source.share for source in self.cfg.sources])
        self.position.documents += 1
        return next(self._documents_of[source])

    def _read_source(self, number: int) -> Iterator[Document]:
        """Yields documents of a source from the position on, epoch after epoch. Skips records that were taken before."""
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
                position.taken[number] = seen
                if (seen - 1) % self.shards != self.shard:
                    continue
                rng = random.Random(f"{self.cfg.seed} {position.epochs[number]} {seen}")
                try:
                    document = to_document(crop_text(record, source, rng), where, self.tokenizer, self.stop)
                    document = move_start_to_prompt(replace(document, own=source.own), source, rng)
                except BadRecord:
                    if not self.cfg.skip_bad:
                        raise
                    position.bad += 1
                    continue
                usable += 1
                yield document
            if not usable:
                raise ValueError(f"there is nothing to learn from in {', '.join(source.files)}")
            position.epochs[number] += 1
            position.taken[number] = 0

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
            max_prompt = room - canvas_length
            if len(document.prompt) > max_prompt:  # keep the end of a prompt that is too long
                document = replace(document, prompt=document.prompt[len(document.prompt) - max_prompt :])
            rng = random.Random(f"{self.cfg.seed} {self.shard} {self.position.rows} {room}")
            max_fill = rng.randint(0, canvas_length) if rng.random() < self.cfg.short_fill else canvas_length
            rest = row.append(document, canvas_length, room, self.stop, max_fill)
            if rest is not None:
                waiting.insert(0, rest)
        self.position.rows += 1
        return row.padded(self.cfg.length, self.pad)


# 4. Rows to batches

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
        columns_5BL = stack_rows([next(self.stream) for _ in range(self.rows)])
        return columns_5BL, self.stream.position.to_json()

    def close(self) -> None:
        """Does nothing: no process is held."""


class PrefetchedBatches:
    """The same batches, made ahead of time in another process while the GPU works."""

    def __init__(self, batches: Batches, depth: int = 4) -> None:
        stream = batches.stream
        names = ("cfg", "tokenizer", "stop", "pad", "shard", "shards", "position")
        context = multiprocessing.get_context("spawn")  # a fork would inherit the GPU
        self.queue = cast(Any, context.Queue(depth))  # Any, because of the private attribute below
        arguments = ({name: getattr(stream, name) for name in names}, batches.rows, self.queue)
        self.process = context.Process(target=_make_batches, args=arguments, daemon=True)
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


def _make_batches(stream: dict[str, Any], rows: int, out: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the training process decides
    try:
        batches = Batches(Rows(**stream), rows)
        while True:
            out.put(next(batches))
    except Exception as error:
        out.put(error)


# 5. Vocabulary


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
