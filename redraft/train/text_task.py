"""What a run needs to learn from texts: streams of packed rows, and the objective of `loss.py` on each.

A task, as the loop knows it, has an objective for a model, `open` and `close`, `losses` of a microbatch, what a checkpoint
must hold of it (`positions` as JSON, `tensors`), and what it has to tell in a report. `boards.py` has the other one.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from redraft.config import ModelConfig
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.masks import Layout
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train import data
from redraft.train.data import PAD, STOP, Batches, Interleaved, Position, ReadAhead, Rows
from redraft.train.loss import Batch, Losses, Noise, Objective, SparseMasks, dense_masks, draw, first_rows

if TYPE_CHECKING:
    from redraft.train.loop import TrainConfig


class Texts:
    """The task of a run whose data are texts."""

    def __init__(
        self, cfg: "TrainConfig", config: ModelConfig, tokenizer: Tokenizer, device: torch.device, numbers: Iterable[int]
    ) -> None:
        if tokenizer.size > config.vocab_size:
            raise ValueError(f"the tokenizer has {tokenizer.size} tokens, the model {config.vocab_size}")
        if cfg.loss.noise == "mask" and tokenizer.size == config.vocab_size:
            raise ValueError(f"mask noise needs a token that no text uses; all {config.vocab_size} are taken")
        self.cfg, self.config, self.tokenizer, self.device = cfg, config, tokenizer, device
        self.numbers = numbers
        self.sparse = SparseMasks(config, cfg.rows, cfg.data.length, device) if device.type == "cuda" else None
        self.positions: dict[str, Any] = {}
        self.streams: dict[int, Interleaved] = {}

    def objective(self, model: DiffusionGemma) -> nn.Module:
        """What is compiled, sharded and differentiated."""
        return Objective(model, self.cfg.loss)

    def open(self) -> None:
        """Starts the streams of its microbatches, each where its position is."""
        self.streams = {m: self._stream(m) for m in self.numbers}

    def _stream(self, m: int) -> Interleaved:
        cfg, saved = self.cfg, self.positions.get(str(m), [None] * self.cfg.streams)
        marks = {"stop": STOP, "pad": PAD}
        if cfg.init:
            marks = {"stop": self.config.eos_token_ids[0], "pad": self.config.pad_token_id}
        parts = []
        for number, position in enumerate(saved):
            shards = {"shard": m * cfg.streams + number, "shards": cfg.microbatches * cfg.streams}
            position = Position.from_json(position) if position is not None else None
            rows = Rows(cfg.data, self.tokenizer, **marks, **shards, position=position)
            parts.append(Batches(rows, cfg.rows // cfg.streams))
        return Interleaved([ReadAhead(part) if cfg.read_ahead else part for part in parts])

    def close(self) -> None:
        """Ends the processes that read ahead."""
        for stream in self.streams.values():
            stream.close()

    def losses(self, compute: Callable[..., Losses], m: int, generator: torch.Generator) -> Losses:
        """The objective on the next batch of microbatch m."""
        columns, self.positions[str(m)] = next(self.streams[m])
        batch = data.to_batch(columns)
        noise = draw(batch, self.cfg.loss, self.config.vocab_size, generator)
        noise = Noise(*(self._onto(t) for t in vars(noise).values()))
        batch = Batch(self._onto(batch.ids_BL), Layout(*(self._onto(t) for t in vars(batch.layout).values())))
        mask_of = self.sparse(batch.layout) if self.sparse else dense_masks(self.config, batch.layout)
        return compute(batch, noise, mask_of, first_rows(mask_of, len(noise.temperature_R)))

    def _onto(self, tensor: Tensor) -> Tensor:
        """To the device without waiting for it."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def tensors(self) -> dict[str, Tensor]:
        """Nothing: positions are numbers."""
        return {}

    def told(self) -> dict[str, Any]:
        """How often the first source was read, and how many records were skipped."""
        positions = [position for one in self.positions.values() for position in one]
        return {
            "epoch": min(position["epochs"][0] for position in positions),
            "bad": sum(position["bad"] for position in positions),
        }
