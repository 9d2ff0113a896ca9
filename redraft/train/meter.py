"""Meter: averages the losses of a run between two reports."""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from redraft.train.draft_loss import expected_length
from redraft.train.loss import Losses


@dataclass(frozen=True)
class Report:
    """Metrics, averaged over the steps since the last report."""

    step: int
    steps: int
    loss: float
    denoiser: float  # nats per token
    ar: float  # nats per token
    balance: float  # the busiest expert's share of tokens over an even share, in the worst layer
    idle: float  # the same for the least used expert
    gradient: float  # norm before clipping, at the last step
    rate: float  # factor on the learning rates
    tokens: int
    tokens_per_second: float
    seconds: float
    epoch: int  # of the first source
    bad: int  # records skipped
    lost: int  # microbatches whose loss was not finite; they did not change the weights
    shortened: int = 0  # records with a cut prompt or a divided answer
    solved: float | None = None  # share of solved puzzles among those that left their slot
    draft: float | None = None  # the loss of drafts
    accepted: float | None = None  # drafts that a check by the causal half would accept, of the longest draft canvas
    acceptance: tuple[float, ...] | None = None  # by slot of a draft canvas


class Meter:
    """Collects losses on the device and reads them only for a report, since reading makes the GPU wait."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._reset()

    def _reset(self) -> None:
        self.losses: list[Losses] = []
        self.norm = torch.zeros(())
        self.steps = 0
        self.start_time = time.perf_counter()

    def add(self, losses: list[Losses], norm: Tensor) -> None:
        """Adds the results of one step."""
        self.losses += losses
        self.norm = norm
        self.steps += 1

    def report(self) -> Report:
        """Returns the averages since the last report. Raises ValueError if no loss was finite."""
        trainer = self.trainer
        cfg = trainer.cfg
        terms = torch.stack([torch.stack([*losses[:3], losses.draft.to(losses.total)]) for losses in self.losses])
        is_finite = terms[:, 0].isfinite()
        sums = torch.cat([terms.where(is_finite[:, None], 0.0).sum(dim=0), is_finite.sum()[None]])
        share = torch.stack([losses.share_E for losses in self.losses]).mean(dim=0)
        acceptance_S = torch.stack([losses.acceptance_S for losses in self.losses]).mean(dim=0)
        if trainer.world > 1:
            for tensor in (sums, share, *([acceptance_S] if len(acceptance_S) else [])):
                dist.all_reduce(tensor)
            share /= trainer.world
            acceptance_S /= trainer.world
        *totals, finite = sums.tolist()
        if not finite:
            raise ValueError(
                f"the loss is {float(terms[-1, 0])} at step {trainer.step}: lower the learning rates, or check the data"
            )
        loss, denoiser, ar, draft = (total / finite for total in totals)
        relative_share = share * share.shape[1]
        has_drafts = len(acceptance_S) > 0
        report = Report(
            step=trainer.step,
            steps=cfg.steps,
            loss=loss,
            denoiser=denoiser,
            ar=ar,
            balance=float(relative_share.max()),
            idle=float(relative_share.min()),
            gradient=float(self.norm),
            rate=trainer.rate_scale,
            tokens=trainer.step * cfg.step_tokens,
            tokens_per_second=self.steps * cfg.step_tokens / (time.perf_counter() - self.start_time),
            seconds=trainer.seconds,
            lost=self.steps * cfg.microbatches - int(finite),
            draft=draft if has_drafts else None,
            accepted=float(expected_length(acceptance_S)) if has_drafts else None,
            acceptance=tuple(acceptance_S.tolist()) if has_drafts else None,
            **trainer.task.report_fields(),
        )
        self._reset()
        return report
