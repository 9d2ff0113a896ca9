"""Training on text: streams of packed rows, and the objective of `loss.py` on each. Draft rows have streams of their own.

A task provides to the training loop: `objective(model)`, `open` and `close`, `losses` of a microbatch, its part of a
checkpoint (`positions` as JSON, `tensors`), and its fields of a Report. `sudoku_task.py` has the other task.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from redraft.config import BackboneConfig
from redraft.model.backbone import Backbone
from redraft.model.lora import Adapter
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train import data
from redraft.train.config import TrainConfig
from redraft.train.data import PAD_ID, STOP_ID, Batches, InterleavedBatches, Position, PrefetchedBatches, Rows
from redraft.train.loss import Losses, Masks, Noise, Objective, SparseMasks, dense_masks, prepare, slice_masks
from redraft.train.records import DataConfig

FLEX_BLOCK = 128  # FlexAttention finds no kernel on a GPU for rows shorter than a block; these get dense masks
MAX_NOTES = 10_000  # kept until they are taken


class TextTask:
    """The task of a run whose data are texts."""

    def __init__(
        self,
        cfg: TrainConfig,
        config: BackboneConfig,
        tokenizer: Tokenizer,
        device: torch.device,
        microbatches: Iterable[int],
    ) -> None:
        assert isinstance(cfg.data, DataConfig)
        if tokenizer.size > config.vocab_size:
            raise ValueError(f"the tokenizer has {tokenizer.size} tokens, the model {config.vocab_size}")
        if cfg.loss.noise == "mask" and tokenizer.size == config.vocab_size:
            raise ValueError(f"mask noise needs a token that no text uses; all {config.vocab_size} are taken")
        self.cfg = cfg
        self.data = cfg.data
        self.config = config
        self.tokenizer = tokenizer
        self.device = device
        self.microbatches = microbatches
        uses_flex = device.type == "cuda" and 2 * cfg.data.length >= FLEX_BLOCK
        self.sparse = SparseMasks(config, cfg.rows, cfg.data.length, device) if uses_flex else None
        self.positions: dict[str, Any] = {}
        self.streams: dict[int, list[InterleavedBatches]] = {}  # by microbatch: the rows of pages, then the draft rows
        self.records: dict[int, list[str]] = {}  # by microbatch: the names of the records in its last batch, for errors
        self._notes: deque[tuple[str, str]] = deque(maxlen=MAX_NOTES)

    def objective(self, model: Backbone, adapter: Adapter | None = None) -> nn.Module:
        """Returns the module that is compiled, sharded and differentiated."""
        return Objective(model, self.cfg.loss, adapter, recomputes=self.cfg.recompute)

    def open(self) -> None:
        """Starts the streams of this process's microbatches, each at its position."""
        cfg = self.cfg
        draft_rows = cfg.loss.draft.rows
        for m in self.microbatches:
            saved = self.positions.get(str(m), [None] * cfg.streams * (2 if draft_rows else 1))
            self.streams[m] = [self._open_stream(m, self.data, cfg.rows - draft_rows, saved[: cfg.streams])]
            if cfg.draft_data is not None:
                self.streams[m].append(self._open_stream(m, cfg.draft_data, draft_rows, saved[cfg.streams :]))

    def _open_stream(self, m: int, texts: DataConfig, rows: int, positions: list[Any]) -> InterleavedBatches:
        cfg = self.cfg
        stop, pad = STOP_ID, PAD_ID
        if cfg.init:
            stop, pad = self.config.eos_token_ids[0], self.config.pad_token_id
        batches: list[Batches | PrefetchedBatches] = []
        for number, saved in enumerate(positions):
            packed = Rows(
                texts,
                self.tokenizer,
                stop=stop,
                pad=pad,
                shard=m * cfg.streams + number,
                shards=cfg.microbatches * cfg.streams,
                position=Position.from_json(saved) if saved is not None else None,
            )
            stream = Batches(packed, rows // cfg.streams)
            batches.append(PrefetchedBatches(stream) if cfg.prefetch else stream)
        return InterleavedBatches(batches)

    def close(self) -> None:
        """Ends the processes that prefetch."""
        for streams in self.streams.values():
            for stream in streams:
                stream.close()

    def losses(self, compute: Callable[..., Losses], m: int, generator: torch.Generator) -> Losses:
        """Computes the objective on the next batch of microbatch m."""
        parts, positions = zip(*(next(stream) for stream in self.streams[m]), strict=True)
        self.positions[str(m)] = [position for part in positions for position in part]
        self.records[m] = [where for position in self.positions[str(m)] for where in position["records"]]
        self._notes.extend((where, note) for position in self.positions[str(m)] for where, note in position["notes"])
        return self.compute_losses(compute, np.concatenate(parts, axis=1), generator)

    def compute_losses(self, compute: Callable[..., Losses], columns_5BL: np.ndarray, generator: torch.Generator) -> Losses:
        """Computes the objective on some rows."""
        batch = data.to_batch(columns_5BL)
        batch, noise = prepare(batch, self.cfg.loss, self.config.vocab_size, generator)
        noise = Noise(*(self._to_device(t) for t in vars(noise).values()))
        batch = batch.map(self._to_device)
        mask_of: Masks = self.sparse(batch.layout) if self.sparse else dense_masks(self.config, batch.layout)
        return compute(batch, noise, mask_of, slice_masks(mask_of, len(noise.temperature_R)))

    def take_notes(self) -> list[tuple[str, str]]:
        """Returns the records that were skipped or shortened since the last call, and what happened to each."""
        notes = list(self._notes)
        self._notes.clear()
        return notes

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Copies to the device without waiting for it."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def tensors(self) -> dict[str, Tensor]:
        """Returns nothing: the task's state is in `positions`."""
        return {}

    def report_fields(self) -> dict[str, Any]:
        """Returns this task's fields of a Report: epochs of the first source, records skipped and shortened."""
        positions = [position for streams in self.positions.values() for position in streams]
        pages = [position for streams in self.positions.values() for position in streams[: self.cfg.streams]]
        return {
            "epoch": min(position["epochs"][0] for position in pages),
            "bad": sum(position["bad"] for position in positions),
            "shortened": sum(position["shortened"] for position in positions),
        }
