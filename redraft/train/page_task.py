"""Training of a page adapter: rows of text, whose canvases are noised at all levels.

The first position of every canvas is where the adapter's begin vector stands: its clean token is context, and not learned.
Every other token is predicted at the position before its own (`model/page.py`). The model is frozen, so its causal half
needs no loss.
Shapes: B rows, L tokens of a row.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from redraft.model.backbone import Backbone
from redraft.model.lora import Adapter
from redraft.model.masks import Layout
from redraft.train import data
from redraft.train.loss import IGNORED, MAX_LOGITS, Batch, Losses, Masks, cross_entropy, dense_masks, prepare
from redraft.train.text_task import TextTask


class PageObjective(nn.Module):
    """The objective of a page adapter as one module that can be compiled and differentiated."""

    def __init__(self, model: Backbone, *, recomputes: bool = False) -> None:
        super().__init__()
        self.model = model
        self.recomputes = recomputes
        self.cross_entropy = cross_entropy

    def forward(self, batch: Batch, noisy_BL: Tensor, mask_of: Masks) -> Losses:
        """Returns the losses of one batch that `begin_canvases` has laid out."""
        noisy_BLD, _, _ = self.model.forward_train(
            noisy_BL, batch.ids_BL, None, batch.layout.positions, mask_of, recomputes=self.recomputes
        )
        is_learned_BL = batch.canvas_BL & (noisy_BL != self.model.config.vocab_size)
        targets_BL = torch.where(is_learned_BL, batch.ids_BL, IGNORED)
        loss = self.cross_entropy(self.model, noisy_BLD.roll(1, dims=1), targets_BL, MAX_LOGITS)
        return Losses(loss, loss, loss.detach() * 0, torch.ones(1, 1, device=loss.device))


def begin_canvases(batch: Batch, noisy_BL: Tensor, begin: int) -> tuple[Batch, Tensor]:
    """Puts the id of the begin vector at the first position of every canvas, whose clean token becomes context."""
    layout = batch.layout
    starts_BL = torch.where(layout.starts >= 0, layout.starts + 1, layout.starts)
    noisy_BL = torch.where(layout.positions == layout.starts, begin, noisy_BL)
    return replace(batch, layout=Layout(layout.positions, starts_BL, layout.documents)), noisy_BL


class PageTask(TextTask):
    """The task of a run that trains a page adapter."""

    def objective(self, model: Backbone, adapter: Adapter | None = None) -> nn.Module:
        """Returns the module that is compiled and differentiated."""
        return PageObjective(model, recomputes=self.cfg.recompute)

    def compute_losses(self, compute: Callable[..., Losses], columns_5BL: np.ndarray, generator: torch.Generator) -> Losses:
        """Computes the objective on some rows."""
        vocab_size = self.config.vocab_size
        batch, noise = prepare(data.to_batch(columns_5BL), self.cfg.loss, vocab_size, generator)
        batch, noisy_BL = begin_canvases(batch, noise.noisy_BL, vocab_size)
        batch = batch.map(self._to_device)
        mask_of: Masks = self.sparse(batch.layout) if self.sparse else dense_masks(self.config, batch.layout)
        return compute(batch, self._to_device(noisy_BL), mask_of)
