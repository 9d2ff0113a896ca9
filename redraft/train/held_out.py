"""Evaluation on held-out records: the losses of an adapter on text that it does not learn, always with the same noise."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from redraft.train.config import TrainConfig
from redraft.train.data import Batches, Rows
from redraft.train.loss import Losses
from redraft.train.text_task import TextTask

MOST_BATCHES = 8


@dataclass(frozen=True)
class Evaluated:
    """The losses on the held-out records, in nats per token."""

    step: int
    denoiser: float
    ar: float
    is_best: bool  # the lowest so far

    @property
    def scores(self) -> dict[str, Any]:
        """For the adapter's file."""
        return {"step": self.step, "denoiser": self.denoiser, "next_token": self.ar}


class HeldOut:
    """The batches of the held-out records, made once: all records, or MOST_BATCHES batches."""

    def __init__(self, cfg: TrainConfig, task: TextTask) -> None:
        assert cfg.held_out is not None
        self.task = task
        self.ar_weight = cfg.loss.ar_weight
        rows = Rows(cfg.held_out, task.tokenizer, stop=task.config.eos_token_ids[0], pad=task.config.pad_token_id)
        stream = Batches(rows, cfg.rows)
        self.batches: list[np.ndarray] = []
        while len(self.batches) < MOST_BATCHES:
            columns_5BL, position = next(stream)
            self.batches.append(columns_5BL)
            if position["epochs"][0]:
                break

    @torch.no_grad()
    def evaluate(self, compute: Callable[..., Losses]) -> tuple[float, float]:
        """Returns the mean losses of denoiser and next token."""
        losses = []
        for number, columns_5BL in enumerate(self.batches):
            generator = torch.Generator().manual_seed(number)
            losses.append(self.task.compute_losses(compute, columns_5BL, generator))
        denoiser = torch.stack([each.denoiser for each in losses]).mean()
        return float(denoiser), float(torch.stack([each.ar for each in losses]).mean())

    def weigh(self, denoiser: float, ar: float) -> float:
        """The number that is compared: the loss that training lowers."""
        return denoiser + self.ar_weight * ar
