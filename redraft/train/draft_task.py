"""Training of a drafter: rows of the model's own text, every canvas of them a draft canvas.

The loss is that of `draft_loss.py`. The model is frozen, so its causal half needs no loss: it is the teacher.
Shapes: B rows, L tokens of a row.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from redraft.model.backbone import Backbone
from redraft.model.drafter import shift_rows
from redraft.model.lora import Adapter
from redraft.train import data
from redraft.train.draft_loss import DraftConfig, draft_terms, expected_length, lay_out_drafts
from redraft.train.held_out import HeldOut
from redraft.train.loss import Batch, Losses, Masks, dense_masks, draft_losses
from redraft.train.text_task import TextTask


class DraftObjective(nn.Module):
    """The objective of a drafter as one module that can be compiled and differentiated."""

    def __init__(self, model: Backbone, cfg: DraftConfig) -> None:
        super().__init__()
        self.model = model
        self.cfg = cfg
        self.terms = draft_terms

    def forward(self, batch: Batch, temperature_B: Tensor, mask_of: Masks) -> Losses:
        """Returns the losses of one batch; `temperature_B` is that of teacher and student in each row."""
        noisy_BL = torch.where(batch.canvas_BL, self.model.config.vocab_size, batch.ids_BL)
        noisy_BLD, clean_BLD, _ = self.model.forward_train(noisy_BL, batch.ids_BL, None, batch.layout.positions, mask_of)
        is_first_BL = batch.layout.positions == batch.layout.starts
        noisy_BLD = shift_rows(noisy_BLD, clean_BLD, is_first_BL)
        found = draft_losses(self.terms, self.model, batch, slice(None), noisy_BLD, clean_BLD, temperature_B, self.cfg)
        zero = found.loss.detach() * 0
        no_experts = torch.ones(1, 1, device=zero.device)
        return Losses(found.loss, zero, zero, no_experts, found.loss, found.acceptance_S)


class DraftTask(TextTask):
    """The task of a run that trains a drafter."""

    def objective(self, model: Backbone, adapter: Adapter | None = None) -> nn.Module:
        """Returns the module that is compiled and differentiated."""
        return DraftObjective(model, self.draft_config)

    @property
    def draft_config(self) -> DraftConfig:
        """All rows of a microbatch are draft rows."""
        return replace(self.cfg.loss.draft, rows=self.cfg.rows)

    def compute_losses(self, compute: Callable[..., Losses], columns_5BL: np.ndarray, generator: torch.Generator) -> Losses:
        """Computes the objective on some rows."""
        batch = data.to_batch(columns_5BL)
        cfg = replace(self.draft_config, rows=len(batch.ids_BL))
        batch = replace(batch, layout=lay_out_drafts(batch.layout, cfg, generator))
        chosen_B = torch.randint(len(cfg.temperatures), (cfg.rows,), generator=generator)
        temperature_B = self._to_device(torch.tensor(cfg.temperatures)[chosen_B])
        batch = batch.map(self._to_device)
        mask_of: Masks = self.sparse(batch.layout) if self.sparse else dense_masks(self.config, batch.layout)
        return compute(batch, temperature_B, mask_of)


class DraftHeldOut(HeldOut):
    """The accepted drafts on own texts that are not learned."""

    @torch.no_grad()
    def evaluate(self, compute: Callable[..., Losses]) -> dict[str, float]:
        """Returns the mean loss, and the tokens of a round: accepted drafts and the one that the check gives."""
        losses = self._losses(compute)
        acceptance_S = torch.stack([each.acceptance_S for each in losses]).mean(dim=0)
        loss = float(torch.stack([each.draft for each in losses]).mean())
        return {"draft": loss, "tokens_per_round": 1 + float(expected_length(acceptance_S))}

    def weigh(self, scores: dict[str, float]) -> float:
        """The number that is compared: the best drafter is the one whose drafts are accepted."""
        return -scores["tokens_per_round"]
