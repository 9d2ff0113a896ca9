"""Training on text: streams of packed rows, and the objective of `loss.py` on each.

A task provides to the training loop: `objective(model)`, `open` and `close`, `losses` of a microbatch, its part of a
checkpoint (`positions` as JSON, `tensors`), and its fields of a Report. `sudoku_task.py` has the other task.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from redraft.config import ModelConfig
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.masks import Layout
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train import data
from redraft.train.config import TrainConfig
from redraft.train.data import PAD_ID, STOP_ID, Batches, DataConfig, InterleavedBatches, Position, PrefetchedBatches, Rows
from redraft.train.loss import Batch, Losses, Masks, Noise, Objective, SparseMasks, dense_masks, draw_noise, slice_masks

FLEX_BLOCK = 128  # FlexAttention finds no kernel on a GPU for rows shorter than a block; these get dense masks


class TextTask:
    """The task of a run whose data are texts."""

    def __init__(
        self,
        cfg: TrainConfig,
        config: ModelConfig,
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
        self.streams: dict[int, InterleavedBatches] = {}

    def objective(self, model: DiffusionGemma) -> nn.Module:
        """Returns the module that is compiled, sharded and differentiated."""
        return Objective(model, self.cfg.loss)

    def open(self) -> None:
        """Starts the streams of this process's microbatches, each at its position."""
        self.streams = {m: self._open_stream(m) for m in self.microbatches}

    def _open_stream(self, m: int) -> InterleavedBatches:
        cfg = self.cfg
        stop, pad = STOP_ID, PAD_ID
        if cfg.init:
            stop, pad = self.config.eos_token_ids[0], self.config.pad_token_id
        batches: list[Batches | PrefetchedBatches] = []
        for number, saved in enumerate(self.positions.get(str(m), [None] * cfg.streams)):
            rows = Rows(
                self.data,
                self.tokenizer,
                stop=stop,
                pad=pad,
                shard=m * cfg.streams + number,
                shards=cfg.microbatches * cfg.streams,
                position=Position.from_json(saved) if saved is not None else None,
            )
            stream = Batches(rows, cfg.rows // cfg.streams)
            batches.append(PrefetchedBatches(stream) if cfg.prefetch else stream)
        return InterleavedBatches(batches)

    def close(self) -> None:
        """Ends the processes that prefetch."""
        for stream in self.streams.values():
            stream.close()

    def losses(self, compute: Callable[..., Losses], m: int, generator: torch.Generator) -> Losses:
        """Computes the objective on the next batch of microbatch m."""
        columns, self.positions[str(m)] = next(self.streams[m])
        batch = data.to_batch(columns)
        noise = draw_noise(batch, self.cfg.loss, self.config.vocab_size, generator)
        noise = Noise(*(self._to_device(t) for t in vars(noise).values()))
        batch = Batch(self._to_device(batch.ids_BL), Layout(*(self._to_device(t) for t in vars(batch.layout).values())))
        mask_of: Masks = self.sparse(batch.layout) if self.sparse else dense_masks(self.config, batch.layout)
        return compute(batch, noise, mask_of, slice_masks(mask_of, len(noise.temperature_R)))

    def _to_device(self, tensor: Tensor) -> Tensor:
        """Copies to the device without waiting for it."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def tensors(self) -> dict[str, Tensor]:
        """Returns nothing: the task's state is in `positions`."""
        return {}

    def report_fields(self) -> dict[str, Any]:
        """Returns this task's fields of a Report: epochs of the first source, and records skipped."""
        positions = [position for streams in self.positions.values() for position in streams]
        return {
            "epoch": min(position["epochs"][0] for position in positions),
            "bad": sum(position["bad"] for position in positions),
        }
