"""Drafter: what lets a left-to-right model draft. The model's own weights, and what `encode` computes, stay as they are.

A drafter has LoRA pairs that act on canvas tokens only, one vector that embeds an empty position of a canvas, and a draft
head. In exact mode the model verifies its own drafts, so the text has the model's own distribution, in fewer forwards.
`redraft adapt` trains one (`train/adapting.py`); `checkpoint/drafter_files.py` reads and writes it.
Shapes: N positions, D model size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.config import BackboneConfig, ConfigError
from redraft.model.layers import gelu
from redraft.model.lora import DENOISE, Adapter, AdapterConfig, untrained_adapter

LARGEST_CANVAS = 65  # one more than the longest draft


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """The size of a drafter."""

    rank: int = 24
    alpha: float = 48.0  # the pairs' sum is scaled by alpha / rank
    head_size: int = 1024  # inner size of the draft head
    canvas_length: int = 8  # of training: the first position is not a draft, so this is one more than the longest draft

    def __post_init__(self) -> None:
        if not 1 <= self.head_size <= 2**16:
            raise ConfigError(f"head_size must be from 1 to {2**16}, got {self.head_size!r}")
        if not 2 <= self.canvas_length <= LARGEST_CANVAS:
            raise ConfigError(f"canvas_length must be from 2 to {LARGEST_CANVAS}, got {self.canvas_length!r}")
        _ = self.adapter  # refuses a rank or an alpha that cannot be

    @property
    def adapter(self) -> AdapterConfig:
        """The pairs: on every matrix of a layer, for canvas tokens only."""
        return AdapterConfig(rank=self.rank, alpha=self.alpha, targets=("attention", "dense"), halves=DENOISE)


def shift_canvases(canvas_JCD: Tensor, before_JD: Tensor) -> Tensor:
    """Moves the hidden states of canvases one position on. `before_JD` are those of the tokens before each canvas.

    A left-to-right model answers for the next position, and a drafter keeps that: a draft comes from the empty position
    before its own.
    """
    return torch.cat([before_JD.unsqueeze(-2), canvas_JCD[..., :-1, :]], dim=-2)


def shift_rows(noisy_BLD: Tensor, clean_BLD: Tensor, is_first_BL: Tensor) -> Tensor:
    """The same for rows of training, whose canvases stand one behind the other; `is_first_BL` is where one begins."""
    return torch.where(is_first_BL[..., None], clean_BLD.roll(1, dims=1), noisy_BLD.roll(1, dims=1))


class DraftHead(nn.Module):
    """Adds to a draft position's hidden state what the token before it says: h + outer(GELU(inner([h ; embedding]))).

    The positions of a canvas are denoised at once and do not know one another's tokens, so neighbours may contradict each
    other. Drafts are therefore sampled from left to right, and this head is all that runs again for each of them.
    """

    def __init__(self, size: int, inner: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.inner = nn.Linear(2 * size, inner, bias=False)
        self.outer = nn.Linear(inner, size, bias=False)

    def forward(self, hidden_ND: Tensor, previous_ND: Tensor) -> Tensor:
        """`previous_ND` are the embeddings of the tokens before."""
        return self.add_previous(hidden_ND, self.begin(hidden_ND), previous_ND)

    def begin(self, hidden_ND: Tensor) -> Tensor:
        """The part of the inner layer that needs no token: all positions of a canvas can have theirs at once."""
        return F.linear(hidden_ND, self.inner.weight[:, : hidden_ND.shape[-1]].to(hidden_ND.dtype))

    def add_previous(self, hidden_ND: Tensor, begun_NI: Tensor, previous_ND: Tensor) -> Tensor:
        """The rest: `begun_NI` is what `begin` gave. In training, weights are float32 and activations may be bf16."""
        dtype = hidden_ND.dtype
        of_previous_ID = self.inner.weight[:, hidden_ND.shape[-1] :].to(dtype)
        normed_ND = F.rms_norm(previous_ND, previous_ND.shape[-1:], eps=self.eps)
        inner_NI = gelu(torch.addmm(begun_NI, normed_ND, of_previous_ID.t()))
        return torch.addmm(hidden_ND, inner_NI, self.outer.weight.to(dtype).t())


def init_draft_head(head: DraftHead, generator: torch.Generator) -> None:
    """Random inner weights and zero outer ones: the head changes no logits until it has learned something."""
    with torch.no_grad():
        noise = torch.randn(head.inner.weight.shape, generator=generator)
        head.inner.weight.copy_(noise * head.inner.in_features**-0.5)
        head.outer.weight.zero_()


class Drafter(nn.Module):
    """The pairs, the embedding of an empty position, and the draft head."""

    def __init__(self, cfg: DrafterConfig, adapter: Adapter, config: BackboneConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.adapter = adapter
        self.blank_D = nn.Parameter(torch.zeros(config.hidden_size))
        self.head = DraftHead(config.hidden_size, cfg.head_size, config.rms_norm_eps)
        self.metadata: dict[str, Any] = {}  # of its file: base, tokens, scores

    @property
    def parameter_count(self) -> int:
        """Trainable numbers."""
        return sum(p.numel() for p in self.parameters())


def new_drafter(cfg: DrafterConfig, config: BackboneConfig, embedding_D: Tensor, seed: int = 0) -> Drafter:
    """An untrained drafter. Its pairs and its head add nothing yet; `embedding_D` is the first embedding of empty positions.

    The mean of all embeddings is a good one: it says "some token".
    """
    drafter = Drafter(cfg, untrained_adapter(cfg.adapter, config, seed), config)
    init_draft_head(drafter.head, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        drafter.blank_D.copy_(embedding_D)
    return drafter
