"""The objective: one pass over [noisy | clean], two cross-entropies.

Every canvas is corrupted by replacing tokens with uniform noise, and the model learns to say at every position, corrupted or
not, what the clean token is: repairing and keeping are one task. The clean half learns to predict the next token, which
keeps the encoder a language model. No weight by noise level, no loss on the prompt's canvas, no time input.

    batch -> [1 how noisy] -> t -> [2 corrupt] -> Noise        what chance decides, drawn once, before the pass
    layout -> [3 masks]                                         who may look at whom
    Objective: [4 first look] -> belief -> the pass that learns -> [5 cross-entropies] + [6 balance]

Shapes: B rows, R of them given a first look, O of those on-policy, L tokens of a row, N tokens at once, V vocabulary,
D model size, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from redraft.config import ModelConfig
from redraft.kernels import argmax_entropy_sample
from redraft.model import masks
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.masks import Layout, Spans
from redraft.model.moe import Routing

Masks = Mapping[str, Tensor | BlockMask]  # by kind of layer

HEAD_LOGITS = 2**29  # logits that exist at once; with more of them, pieces are recomputed for their gradient
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How much of what. TopProbs are probabilities."""

    noise: str = "uniform"  # "mask": one extra token, the vocabulary's last, for comparison only (see masked.py)
    t_power: float = 1.0  # t is a uniform number to this power: above 1, more blocks are lightly noised
    full_noise: float = 0.1  # of blocks: t = 1, as at a canvas's first step
    holes: float = 0.0  # of the blocks: noise strikes stretches of tokens instead of tokens here and there
    self_condition: float = 0.5  # of rows
    on_policy: float = 0.0  # of self-conditioned rows: the surest of the model's own samples stand in place of their noise
    on_policy_nats: float = 2.0  # how unsure a sample may be, drawn between 0 and this for each row
    ar_weight: float = 1.0
    balance_weight: float = 0.01  # of the experts' imbalance
    t_min: float = 0.4  # temperature of the logits fed back, drawn between this and 1: inference feeds tempered ones

    def __post_init__(self) -> None:
        if self.noise not in ("uniform", "mask"):
            raise ValueError(f"noise is uniform or mask, got {self.noise!r}")
        if self.noise == "mask" and self.on_policy:
            raise ValueError(f"a mask hides that a token is wrong: on_policy must be 0 with it, got {self.on_policy!r}")
        for name in ("full_noise", "holes", "self_condition", "on_policy"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a share between 0 and 1, got {getattr(self, name)!r}")
        if not self.t_power > 0:
            raise ValueError(f"t_power must be above 0, got {self.t_power!r}")
        for name in ("ar_weight", "balance_weight", "on_policy_nats"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)!r}")
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
        same_BL = (documents[:, :-1] == documents[:, 1:]) & (documents[:, :-1] >= 0)
        return F.pad(same_BL, (0, 1), value=False)


class Losses(NamedTuple):
    """Mean cross-entropies in nats per token, their weighted sum, and how tokens fall on the experts of each layer."""

    total: Tensor
    denoiser: Tensor
    ar: Tensor
    share_E: Tensor  # [layers, E], sums to 1 in each layer


# 1. How noisy


def number_blocks(layout: Layout) -> tuple[Tensor, int]:
    """Which block of the batch each token belongs to, index_BL (-1 in none), and how many there are."""
    starts, documents = layout.starts, layout.documents
    new_BL = torch.ones_like(starts, dtype=torch.bool)
    new_BL[:, 1:] = (starts[:, 1:] != starts[:, :-1]) | (documents[:, 1:] != documents[:, :-1])
    canvas_BL = (starts >= 0) & (documents >= 0)
    index_BL = (new_BL & canvas_BL).flatten().cumsum(0).view_as(starts) - 1
    return torch.where(canvas_BL, index_BL, -1), int(index_BL[-1, -1]) + 1


def noise_levels(count: int, cfg: LossConfig, generator: torch.Generator) -> Tensor:
    """t of every block: one draw from each of `count` equal slices of (0, 1), dealt out at random; some are 1.

    Stratified, so that no batch is all easy or all hard.
    """
    slices, offset = torch.randperm(count, generator=generator), torch.rand(1, generator=generator)
    t_N = ((slices + offset) / max(1, count)).pow(cfg.t_power).clamp(1e-4, 1 - 1e-4)
    return torch.where(torch.rand(count, generator=generator) < cfg.full_noise, 1.0, t_N)


# 2. What the denoiser reads


@dataclass(frozen=True)
class Noise:
    """What chance decides about a batch. The first R rows are given a first look, the first of those are on-policy."""

    noisy_BL: Tensor
    temperature_R: Tensor
    nats_O: Tensor  # samples of the on-policy rows stand where they are surer than this
    uniform_OL: Tensor  # chooses them

    def to(self, device: torch.device | str) -> "Noise":
        """The same on another device."""
        return Noise(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))


def struck(layout: Layout, t_N: Tensor, index_BL: Tensor, holes: float, generator: torch.Generator) -> Tensor:
    """Which tokens noise replaces, bool_BL: each of a block with probability t, or each stretch of it as a whole.

    Stretches of a block are equally long, from 2 tokens to half of it, as likely between 4 and 8 as between 32 and 64.
    """
    chance_BL = torch.rand(index_BL.shape, generator=generator)
    if holes:
        length_N = torch.bincount(index_BL[index_BL >= 0], minlength=len(t_N))
        size_N = (2 * (length_N / 4).clamp(min=1) ** torch.rand(len(t_N), generator=generator)).long()
        size_N = torch.where(torch.rand(len(t_N), generator=generator) < holes, size_N, 1)
        shift_N = (torch.rand(len(t_N), generator=generator) * size_N).long()
        at_BL = layout.positions - layout.starts
        behind_BL = torch.minimum(at_BL, (at_BL + shift_N[index_BL]) % size_N[index_BL])  # the stretch's first token
        first_BL = torch.arange(index_BL.shape[1]) - torch.where(index_BL >= 0, behind_BL, 0)
        chance_BL = chance_BL.gather(1, first_BL)
    return (chance_BL < t_N[index_BL]) & (index_BL >= 0)


def draw(batch: Batch, cfg: LossConfig, vocab_size: int, generator: torch.Generator) -> Noise:
    """Everything random about one pass, from a generator on the CPU: a seed means the same on every device.

    Noise is uniform over the vocabulary and may repeat the clean token. Prompts stay whole. TopProbs of rows that are no
    whole number are rounded up or down by chance.
    """
    shape = batch.ids_BL.shape
    index_BL, count = number_blocks(batch.layout)
    t_N = noise_levels(count, cfg, generator)
    hit_BL = struck(batch.layout, t_N, index_BL, cfg.holes, generator)
    noise_BL = torch.randint(vocab_size, shape, generator=generator)
    if cfg.noise == "mask":
        noise_BL = torch.full(shape, vocab_size - 1)
    noisy_BL = torch.where(hit_BL, noise_BL, batch.ids_BL)
    looks, own = torch.rand(2, generator=generator).tolist()
    rows = int(cfg.self_condition * shape[0] + looks)
    temperature_R = cfg.t_min + (1 - cfg.t_min) * torch.rand(rows, generator=generator)
    on_policy = int(cfg.on_policy * rows + own)
    nats_O = cfg.on_policy_nats * torch.rand(on_policy, generator=generator)
    uniform_OL = torch.rand(on_policy, shape[1], generator=generator, dtype=torch.float64)
    return Noise(noisy_BL, temperature_R, nats_O, uniform_OL)


# 3. Who may look at whom


def training_spans(config: ModelConfig, layout: Layout) -> dict[str, Spans]:
    """By kind of layer."""
    windows = {kind: config.layer_window(layer) for layer, kind in enumerate(config.layer_types)}
    return {kind: masks.spans(layout, window) for kind, window in windows.items()}


def dense_masks(config: ModelConfig, layout: Layout) -> dict[str, Tensor]:
    """The masks written out, for devices without FlexAttention."""
    rows, length = layout.positions.shape
    device = layout.positions.device
    found = training_spans(config, layout)
    return {kind: masks.dense(masks.training(spans), rows, 2 * length, device) for kind, spans in found.items()}


class SparseMasks:
    """FlexAttention's masks, over spans that stay in place: what was compiled for one batch serves all of its size."""

    def __init__(self, config: ModelConfig, rows: int, length: int, device: torch.device | str) -> None:
        self.config, self.rows, self.length, self.device = config, rows, length, torch.device(device)
        shape, kinds = (rows, 2 * length), set(config.layer_types)
        places = {kind: [torch.zeros(shape, dtype=torch.int32, device=device) for _ in fields(Spans)] for kind in kinds}
        self.spans = {kind: Spans(*tensors) for kind, tensors in places.items()}
        self.rules = {kind: _with_heads(masks.training(spans)) for kind, spans in self.spans.items()}
        self.build = torch.compile(create_block_mask) if self.device.type == "cuda" else create_block_mask

    def __call__(self, layout: Layout) -> dict[str, BlockMask]:
        """The masks of this layout; the ones given before are void."""
        for kind, spans in training_spans(self.config, layout).items():
            for f in fields(Spans):
                getattr(self.spans[kind], f.name).copy_(getattr(spans, f.name))
        shape = (self.rows, None, 2 * self.length, 2 * self.length)
        return {kind: self.build(rule, *shape, device=self.device) for kind, rule in self.rules.items()}


def _with_heads(rule: masks.MaskFunction) -> Any:
    return lambda b, h, q, k: rule(b, q, k)


# 4. What a first look believes


def tempered(model: DiffusionGemma, hidden_NLD: Tensor, temperature_N: Tensor) -> Tensor:
    """Logits at a temperature for each row."""
    return model.head(hidden_NLD) / temperature_N[:, None, None]


def believed(model: DiffusionGemma, hidden_NLD: Tensor, temperature_N: Tensor) -> Tensor:
    """The expected embedding of each token at that temperature."""
    return model.soft_embed(tempered(model, hidden_NLD, temperature_N))


@torch.no_grad()
def first_look(
    model: DiffusionGemma, batch: Batch, noise: Noise, canvas_BL: Tensor, mask_of: Masks, believe: Any = believed
) -> tuple[Tensor, Tensor]:
    """A pass without gradient over the first R rows: the belief that the second pass is told, and what that pass reads.

    The belief soft_BLD is zero for the other rows and for tokens of no canvas. In on-policy rows samples the model is sure
    of stand where noise had struck, as on a canvas between two steps: what is left to learn there are plausible errors.
    """
    rows, own = len(noise.temperature_R), len(noise.uniform_OL)
    noisy_RL, clean_RL = noise.noisy_BL[:rows], batch.ids_BL[:rows]
    hidden_RLD, _, _ = model.forward_train(noisy_RL, clean_RL, None, batch.layout.positions[:rows], mask_of)
    at_once = max(1, HEAD_LOGITS // model.config.vocab_size // noisy_RL.shape[1])
    parts = [slice(begin, begin + at_once) for begin in range(0, rows, at_once)]
    told = [believe(model, hidden_RLD[part], noise.temperature_R[part]) for part in parts]
    soft_RLD = torch.cat(told) * canvas_BL[:rows, :, None]
    soft_BLD = F.pad(soft_RLD, (0, 0, 0, 0, 0, len(batch.ids_BL) - rows))
    own_OL = [noise.noisy_BL[:0]]
    for part in (slice(part.start, min(part.stop, own)) for part in parts if part.start < own):
        logits_NLV = tempered(model, hidden_RLD[part], noise.temperature_R[part])
        belief = argmax_entropy_sample(logits_NLV, noise.uniform_OL[part])
        sure_NL = (belief.entropy_BC < noise.nats_O[part, None]) & (noisy_RL[part] != clean_RL[part])
        own_OL.append(torch.where(sure_NL, belief.sampled_BC, noisy_RL[part]))
    return soft_BLD, torch.cat([*own_OL, noise.noisy_BL[own:]])


# 5. The two cross-entropies


def cross_entropy(model: DiffusionGemma, hidden_BLD: Tensor, targets_BL: Tensor) -> Tensor:
    """Mean over the targets that are not IGNORED, in float32. Where logits would dwarf the model they are made in pieces."""

    def summed(hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        return F.cross_entropy(model.head(hidden_ND), targets_N, ignore_index=IGNORED, reduction="sum")

    at_once = HEAD_LOGITS // model.config.vocab_size
    hidden_ND, targets_N = hidden_BLD.flatten(0, 1), targets_BL.flatten()
    pieces = list(zip(hidden_ND.split(at_once), targets_N.split(at_once), strict=True))
    if len(pieces) == 1:
        total = summed(*pieces[0])
    else:
        total = sum(torch.utils.checkpoint.checkpoint(summed, *piece, use_reentrant=False) for piece in pieces)
    return total / (targets_N != IGNORED).sum().clamp(min=1)


# 6. Balance


def imbalance(routings: Sequence[Routing]) -> tuple[Tensor, Tensor]:
    """How unevenly tokens fall on the experts (1 when even, mean over layers), and the shares themselves [layers, E].

    Share times mean probability, summed: the gradient takes probability away from experts that get more than their share.
    """
    probs = torch.stack([routing.probs_NE.mean(dim=0) for routing in routings])
    experts = probs.shape[1]
    with torch.no_grad():
        everyone = torch.arange(experts, device=probs.device)
        share = torch.stack([(r.experts_NK[..., None] == everyone).float().mean(dim=(0, 1)) for r in routings])
    return experts * (share * probs).sum(dim=1).mean(), share


class Objective(nn.Module):
    """The whole of it as one module: what is compiled, sharded and differentiated."""

    def __init__(self, model: DiffusionGemma, cfg: LossConfig) -> None:
        super().__init__()
        self.model, self.cfg = model, cfg
        self.cross_entropy, self.believed = cross_entropy, believed

    def compile(self, **options: Any) -> None:
        """Part by part: one graph serves all layers of a kind. The whole as one graph takes minutes to compile."""
        for part in (*self.model.layers, self.model.self_conditioning, self.model.norm):
            part.compile(**options)
        self.cross_entropy = torch.compile(cross_entropy, **options)
        self.believed = torch.compile(believed, **options)

    def forward(self, batch: Batch, noise: Noise, mask_of: Masks, first_mask_of: Masks) -> Losses:
        """Losses of one batch. `first_mask_of` is the masks of the rows that are given a first look."""
        canvas_BL, noisy_BL, soft_BLD = batch.canvas_BL, noise.noisy_BL, None
        if len(noise.temperature_R):
            soft_BLD, noisy_BL = first_look(self.model, batch, noise, canvas_BL, first_mask_of, self.believed)
        positions_BL = batch.layout.positions
        noisy_BLD, clean_BLD, routings = self.model.forward_train(noisy_BL, batch.ids_BL, soft_BLD, positions_BL, mask_of)
        counted_BL = canvas_BL if self.cfg.noise == "uniform" else canvas_BL & (noise.noisy_BL != batch.ids_BL)
        denoiser = self.cross_entropy(self.model, noisy_BLD, torch.where(counted_BL, batch.ids_BL, IGNORED))
        ar = self.cross_entropy(self.model, clean_BLD, torch.where(batch.next_BL, batch.ids_BL.roll(-1, dims=1), IGNORED))
        uneven, share_E = imbalance(routings)
        return Losses(denoiser + self.cfg.ar_weight * ar + self.cfg.balance_weight * uneven, denoiser, ar, share_E)


def losses(model: DiffusionGemma, batch: Batch, cfg: LossConfig, generator: torch.Generator) -> Losses:
    """The objective from beginning to end, plainly."""
    noise = draw(batch, cfg, model.config.vocab_size, generator).to(model.device)
    batch = Batch(batch.ids_BL.to(model.device), batch.layout.to(model.device))
    mask_of = dense_masks(model.config, batch.layout)
    return Objective(model, cfg)(batch, noise, mask_of, first_rows(mask_of, len(noise.temperature_R)))


def first_rows(mask_of: Masks, rows: int) -> dict[str, Tensor | BlockMask]:
    """The masks of the first rows alone, for a pass without gradient."""
    return {kind: _first(mask, rows) if isinstance(mask, BlockMask) else mask[:rows] for kind, mask in mask_of.items()}


def _first(mask: BlockMask, rows: int) -> BlockMask:
    """A BlockMask can be sliced, but then refuses to be used: it cannot know whether its rule counts rows. Ours does."""
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    return BlockMask.from_kv_blocks(
        *(getattr(mask, name)[:rows] for name in names),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
        compute_q_blocks=False,
    )
