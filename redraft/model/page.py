"""Page adapter: what lets a left-to-right model denoise whole canvases. What `encode` computes stays as it is.

It has LoRA pairs that act on canvas tokens only, as those of a drafter, and nothing else: canvases begin as uniform noise,
and there is no self-conditioning. The model then infills and edits; it still writes left to right, which it does better.
`redraft adapt --page` trains one (`train/adapting.py`); `checkpoint/drafter_files.py` reads and writes it.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from redraft.config import BackboneConfig, ConfigError, require_lengths
from redraft.model.lora import DENOISE, Adapter, AdapterConfig, untrained_adapter

LARGEST_CANVAS = 4096


@dataclass(frozen=True, kw_only=True)
class PageConfig:
    """The size of a page adapter, and the canvases that it was trained on."""

    rank: int = 24
    alpha: float = 48.0  # the pairs' sum is scaled by alpha / rank
    canvas_lengths: tuple[int, ...] = (32, 64, 128)

    def __post_init__(self) -> None:
        object.__setattr__(self, "canvas_lengths", require_lengths("canvas_lengths", self.canvas_lengths))
        if not self.canvas_lengths or max(self.canvas_lengths) > LARGEST_CANVAS:
            given = list(self.canvas_lengths)
            raise ConfigError(f"canvas_lengths must be at least one length, from 1 to {LARGEST_CANVAS}, got {given}")
        _ = self.adapter  # refuses a rank or an alpha that cannot be

    @property
    def adapter(self) -> AdapterConfig:
        """The pairs: on every matrix of a layer, for canvas tokens only."""
        return AdapterConfig(rank=self.rank, alpha=self.alpha, targets=("attention", "dense"), halves=DENOISE)


class PageAdapter(nn.Module):
    """The pairs of canvas tokens."""

    def __init__(self, cfg: PageConfig, adapter: Adapter) -> None:
        super().__init__()
        self.cfg = cfg
        self.adapter = adapter
        self.metadata: dict[str, Any] = {}  # of its file: base, tokens, scores


def new_page_adapter(cfg: PageConfig, config: BackboneConfig, seed: int = 0) -> PageAdapter:
    """An untrained page adapter, whose pairs add nothing yet."""
    return PageAdapter(cfg, untrained_adapter(cfg.adapter, config, seed))
