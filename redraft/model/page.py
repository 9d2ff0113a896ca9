"""Page adapter: what lets a left-to-right model denoise whole canvases. What `encode` computes stays as it is.

It has LoRA pairs, which act on canvas tokens only, and one begin vector. Canvases begin as uniform noise, and there is no
self-conditioning. The model then infills and edits; it still writes left to right, which it does better.

A left-to-right model answers for the next position, and a page adapter keeps that: a canvas token is predicted at the
position before its own. The vector stands before the first one, at the position of the last cached token; in training
there always is such a token.

    positions    n-2   n-1    n    n+1   n+2
    cached        a     b
    canvas            begin   x     y     z        all of them attend to a, b and to one another
    predicted           x     y     z     -

`redraft adapt --page` trains one (`train/page_task.py`); `checkpoint/drafter_files.py` reads and writes it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redraft.config import BackboneConfig, ConfigError, require_lengths
from redraft.model.lora import DENOISE, Adapter, AdapterConfig, untrained_adapter

LARGEST_CANVAS = 4096


@dataclass(frozen=True, kw_only=True)
class PageConfig:
    """The size of a page adapter, and the canvases that it was trained on."""

    rank: int = 24
    alpha: float = 48.0  # the pairs' sum is scaled by alpha / rank
    canvas_lengths: tuple[int, ...] = (32, 64, 128)  # of training, where the vector takes the first position

    def __post_init__(self) -> None:
        object.__setattr__(self, "canvas_lengths", require_lengths("canvas_lengths", self.canvas_lengths))
        if not self.canvas_lengths or min(self.canvas_lengths) < 2 or max(self.canvas_lengths) > LARGEST_CANVAS:
            given = list(self.canvas_lengths)
            raise ConfigError(f"canvas_lengths must be at least one length, from 2 to {LARGEST_CANVAS}, got {given}")
        _ = self.adapter  # refuses a rank or an alpha that cannot be

    @property
    def adapter(self) -> AdapterConfig:
        """The pairs: on every matrix of a layer, for canvas tokens only."""
        return AdapterConfig(rank=self.rank, alpha=self.alpha, targets=("attention", "dense"), halves=DENOISE)


class PageAdapter(nn.Module):
    """The pairs of canvas tokens, and the vector that stands before a canvas."""

    def __init__(self, cfg: PageConfig, adapter: Adapter, config: BackboneConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.adapter = adapter
        self.begin_D = nn.Parameter(torch.zeros(config.hidden_size))
        self.metadata: dict[str, Any] = {}  # of its file: base, tokens, scores


def new_page_adapter(cfg: PageConfig, config: BackboneConfig, embedding_D: Tensor, seed: int = 0) -> PageAdapter:
    """An untrained page adapter, whose pairs add nothing yet. `embedding_D`, as of `new_drafter`, is the first vector."""
    page = PageAdapter(cfg, untrained_adapter(cfg.adapter, config, seed), config)
    with torch.no_grad():
        page.begin_D.copy_(embedding_D)
    return page
