"""The objective: one pass over [noisy | clean], two cross-entropies.

Every canvas is corrupted by replacing tokens with uniform noise, and the model learns to say at every position, corrupted or
not, what the clean token is: repairing and keeping are one task. The clean half learns to predict the next token, which
keeps the encoder a language model. No weight by noise level, no loss on the prompt's canvas, no time input.
Shapes: B rows, R of them at once, L tokens of a row, N tokens at once, V vocabulary, D model size.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from redraft import masks
from redraft.kernels import read_vocabulary
from redraft.masks import Layout
from redraft.model import DiffusionGemma

HEAD_TOKENS = 4096  # positions whose logits exist at once; their gradient is recomputed


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How much of what. Shares are probabilities."""

    full_noise: float = 0.1  # of blocks: t = 1, as at a canvas's first step
    self_condition: float = 0.5  # of rows
    on_policy: float = 0.0  # of self-conditioned rows: corrupted by the model's own samples instead of noise
    ar_weight: float = 1.0
    t_min: float = 0.4  # temperature of the logits fed back, drawn between this and 1: inference feeds tempered ones

    def __post_init__(self) -> None:
        for name in ("full_noise", "self_condition", "on_policy"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share between 0 and 1, got {getattr(self, name)!r}")
        if not self.ar_weight >= 0:
            raise ValueError(f"ar_weight must be 0 or more, got {self.ar_weight!r}")
        if not 0 < self.t_min <= 1:
            raise ValueError(f"t_min must be above 0 and at most 1, got {self.t_min!r}")


@dataclass(frozen=True)
class Batch:
    """Clean rows and where their tokens stand. Padding has document -1."""

    ids_BL: Tensor
    layout: Layout

    @property
    def canvas_BL(self) -> Tensor:
        """What is noised and denoised: everything in a block."""
        return (self.layout.starts >= 0) & (self.layout.documents >= 0)

    @property
    def next_BL(self) -> Tensor:
        """Whose successor in the row is its successor in the text."""
        documents = self.layout.documents
        same_BL = torch.zeros_like(documents, dtype=torch.bool)
        same_BL[:, :-1] = (documents[:, :-1] == documents[:, 1:]) & (documents[:, :-1] >= 0)
        return same_BL


@dataclass(frozen=True)
class Losses:
    """Mean cross-entropies in nats per token, and their weighted sum."""

    total: Tensor
    denoiser: Tensor
    ar: Tensor


# 1. How noisy


def noise_levels(batch: Batch, cfg: LossConfig, generator: torch.Generator) -> Tensor:
    """t of every token, t_BL, the same throughout a block: stratified over the blocks of the batch, some of them 1."""
    starts, documents = batch.layout.starts, batch.layout.documents
    row_BL = torch.arange(len(starts), device=starts.device)[:, None].expand_as(starts)
    _, block_BL = torch.unique(torch.stack([row_BL, documents, starts], dim=-1).flatten(0, 1), dim=0, return_inverse=True)
    count = int(block_BL.max()) + 1
    # One draw from each of `count` equal slices of (0, 1), dealt out at random: no batch is all easy or all hard.
    offset = _uniform((1,), generator, starts.device)
    slices = torch.randperm(count, generator=generator, device=generator.device).to(starts.device)
    t_N = ((slices + offset) / count).clamp(1e-4, 1 - 1e-4)
    t_N = torch.where(_uniform((count,), generator, starts.device) < cfg.full_noise, 1.0, t_N)
    return t_N[block_BL].view_as(starts)


# 2. What the denoiser reads


def corrupt(batch: Batch, t_BL: Tensor, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Every canvas token replaced with probability t by a uniform one, which may be the same. Prompts stay whole."""
    shape, device = batch.ids_BL.shape, batch.ids_BL.device
    noise_BL = torch.randint(vocab_size, shape, generator=generator, device=generator.device).to(device)
    hit_BL = (_uniform(shape, generator, device) < t_BL) & batch.canvas_BL
    return torch.where(hit_BL, noise_BL, batch.ids_BL)


# 3. Who may look at whom


def training_masks(model: DiffusionGemma, layout: Layout) -> Mapping[str, Tensor | BlockMask]:
    """By kind of layer: FlexAttention's sparse mask on a GPU, a dense one elsewhere."""
    rows, length = layout.positions.shape
    found: dict[str, Tensor | BlockMask] = {}
    for layer, kind in enumerate(model.config.layer_types):
        if kind not in found:
            rule = masks.training(layout, model.config.layer_window(layer))
            found[kind] = (
                create_block_mask(lambda b, h, q, k, rule=rule: rule(b, q, k), rows, None, 2 * length, 2 * length)
                if layout.positions.is_cuda
                else masks.dense(rule, rows, 2 * length, layout.positions.device)
            )
    return found


# 4. What a first look believes


@torch.no_grad()
def first_look(
    model: DiffusionGemma,
    noisy_BL: Tensor,
    batch: Batch,
    mask_of: Mapping[str, Tensor | BlockMask],
    cfg: LossConfig,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """A pass without gradient: for rows chosen with probability `self_condition`, the belief that the second pass is told.

    Returns soft_BLD (zero for the other rows, and for tokens of no canvas) and the noisy rows, in which on-policy rows have
    the model's own samples wherever noise had struck: plausible errors instead of random ones.
    """
    rows, device = len(noisy_BL), noisy_BL.device
    chosen_B = _uniform((rows,), generator, device) < cfg.self_condition
    own_B = chosen_B & (_uniform((rows,), generator, device) < cfg.on_policy)
    temperature_B = cfg.t_min + (1 - cfg.t_min) * _uniform((rows,), generator, device)
    hidden_BLD, _ = model.learn(noisy_BL, batch.ids_BL, None, batch.layout.positions, mask_of)
    soft_BLD = torch.zeros_like(hidden_BLD)
    struck_BL = (noisy_BL != batch.ids_BL) & own_B[:, None]
    noisy_BL = noisy_BL.clone()
    for some in chosen_B.nonzero().flatten().split(max(1, HEAD_TOKENS // noisy_BL.shape[1])):
        logits_RLV = model.head(hidden_BLD[some]) / temperature_B[some][:, None, None]
        soft_BLD[some] = model.soft_embed(logits_RLV)
        if own_B[some].any():
            uniform_RL = _uniform(logits_RLV.shape[:2], generator, device).double()
            sampled_RL = read_vocabulary(logits_RLV, uniform_RL).sampled_BC
            noisy_BL[some] = torch.where(struck_BL[some], sampled_RL, noisy_BL[some])
    return soft_BLD * batch.canvas_BL[..., None], noisy_BL


# 5. The two cross-entropies


def losses(model: DiffusionGemma, batch: Batch, cfg: LossConfig, generator: torch.Generator) -> Losses:
    """Sections 1 to 4, then the pass that learns."""
    t_BL = noise_levels(batch, cfg, generator)
    noisy_BL = corrupt(batch, t_BL, model.config.vocab_size, generator)
    mask_of = training_masks(model, batch.layout)
    soft_BLD = None
    if cfg.self_condition > 0:
        soft_BLD, noisy_BL = first_look(model, noisy_BL, batch, mask_of, cfg, generator)
    noisy_BLD, clean_BLD = model.learn(noisy_BL, batch.ids_BL, soft_BLD, batch.layout.positions, mask_of)
    denoiser = cross_entropy(model, noisy_BLD, batch.ids_BL, batch.canvas_BL)
    ar = cross_entropy(model, clean_BLD, batch.ids_BL.roll(-1, dims=1), batch.next_BL)
    return Losses(denoiser + cfg.ar_weight * ar, denoiser, ar)


def cross_entropy(model: DiffusionGemma, hidden_BLD: Tensor, targets_BL: Tensor, counted_BL: Tensor) -> Tensor:
    """Mean over the counted tokens, in float32. Logits are made a piece at a time: whole they would dwarf the model."""
    hidden_ND, targets_N = hidden_BLD[counted_BL], targets_BL[counted_BL]
    pieces = zip(hidden_ND.split(HEAD_TOKENS), targets_N.split(HEAD_TOKENS), strict=True)

    def piece(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model.head(hidden), targets, reduction="sum")

    summed = [torch.utils.checkpoint.checkpoint(piece, h, t, use_reentrant=False) for h, t in pieces]
    return torch.stack(summed).sum() / max(1, len(targets_N)) if summed else hidden_BLD.sum() * 0.0


def _uniform(shape: tuple[int, ...] | torch.Size, generator: torch.Generator, device: torch.device) -> Tensor:
    """Uniform numbers drawn where the generator lives, so that a seed means the same on every device it is carried to."""
    return torch.rand(shape, generator=generator, device=generator.device).to(device)
