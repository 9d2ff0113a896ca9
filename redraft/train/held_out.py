"""Evaluation on held-out records: scores on text that a run does not learn, always with the same noise."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from redraft.train.config import TrainConfig
from redraft.train.data import Batches, Rows
from redraft.train.loss import Losses
from redraft.train.text_task import TextTask

MOST_BATCHES = 8


@dataclass(frozen=True)
class Evaluated:
    """The scores on the held-out records: losses in nats per token; of drafts, also the tokens of a round."""

    step: int
    scores: dict[str, float]
    is_best: bool


class HeldOut:
    """The batches of the held-out records, made once: all records, or MOST_BATCHES batches."""

    def __init__(self, cfg: TrainConfig, task: TextTask) -> None:
        assert cfg.held_out is not None
        self.task = task
        self.ar_weight = cfg.loss.ar_weight
        self.has_causal_score = cfg.page is None  # the causal half of a page adapter's model is frozen
        rows = Rows(cfg.held_out, task.tokenizer, stop=task.config.eos_token_ids[0], pad=task.config.pad_token_id)
        stream = Batches(rows, cfg.rows)
        self.batches: list[np.ndarray] = []
        while len(self.batches) < MOST_BATCHES:
            columns_5BL, position = next(stream)
            self.batches.append(columns_5BL)
            if position["epochs"][0]:
                break

    @torch.no_grad()
    def evaluate(self, compute: Callable[..., Losses]) -> dict[str, float]:
        """Returns the mean losses of denoiser and, where it learns, next token."""
        losses = self._losses(compute)
        scores = {"denoiser": float(torch.stack([each.denoiser for each in losses]).mean())}
        if self.has_causal_score:
            scores["next_token"] = float(torch.stack([each.ar for each in losses]).mean())
        return scores

    def weigh(self, scores: dict[str, float]) -> float:
        """The number that is compared, the lowest is the best: the loss that training lowers."""
        return scores["denoiser"] + self.ar_weight * scores.get("next_token", 0.0)

    def _losses(self, compute: Callable[..., Losses]) -> list[Losses]:
        """The losses of all batches."""
        seeds = (torch.Generator().manual_seed(number) for number in range(len(self.batches)))
        return [self.task.compute_losses(compute, *each) for each in zip(self.batches, seeds, strict=True)]
