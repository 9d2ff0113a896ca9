"""The training objective: one forward over [noisy | clean], two cross-entropies, and a loss of drafts on some rows.

The noisy half replaces tokens of every canvas by uniform noise, and the model learns to predict the clean token at every
canvas position, noised or not, so it learns to repair errors and to keep correct tokens. The clean half learns next-token
prediction, which keeps the encoder a language model. The loss has no weight by noise level, no term for prompt tokens, no
time input. The last rows may be draft rows: `draft_loss.py` has their canvases and their loss.

    batch -> [1 noise] -> Noise       all random choices, made once before the forward; `noise.py` selects the tokens
    layout -> [2 attention masks]
    Objective: [3 self-conditioning forward] -> soft embeddings -> training forward -> [4 cross-entropies, loss of drafts] +
    [5 load balance]

Shapes: B rows, R self-conditioned rows, O on-policy rows among them, W draft rows, L tokens of a row, N tokens or canvases,
V vocabulary, D hidden size, E experts, S slots of a draft canvas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from redraft.config import BackboneConfig
from redraft.kernels import argmax_entropy_sample
from redraft.model import masks
from redraft.model.backbone import Backbone
from redraft.model.lora import Adapter
from redraft.model.masks import Layout, Spans
from redraft.model.moe import Routing
from redraft.train.draft_loss import (
    DraftConfig,
    DraftLosses,
    DraftTerms,
    draft_loss,
    draft_terms,
    lay_out_drafts,
    terms_in_pieces,
)
from redraft.train.noise import draw_levels, limit_to_gaps, number_canvases, select_noised

Masks = Mapping[str, Tensor | BlockMask]  # layer type -> attention mask

MAX_LOGITS = 2**29  # logits in memory at once; larger batches are split, and recomputed in the backward pass
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights and probabilities of the objective. A share is a probability between 0 and 1."""

    noise: str = "uniform"  # "mask": the noise is the vocabulary's last token; for comparison only (evals/masked.py)
    t_power: float = 1.0  # t is a uniform number to this power: above 1, more canvases get little noise
    full_noise: float = 0.1  # share of canvases with t = 1, as at a canvas's first step
    span_noise: float = 0.0  # share of canvases whose noise hits spans of tokens instead of single tokens
    gap_noise: float = 0.0  # share of canvases with noise in their first tokens only: a gap to fill, and the text after it
    self_condition: float = 0.5  # share of rows
    on_policy: float = 0.0  # share of self-conditioned rows: the model's own confident samples replace their noise
    on_policy_nats: float = 2.0  # the entropy limit of such a sample is drawn between 0 and this for each row
    ar_weight: float = 1.0
    learns_prompts: bool = True  # False: the causal half learns to predict the tokens of answers only
    balance_weight: float = 0.01  # of the experts' load-balance loss
    t_min: float = 0.4  # the temperature of self-conditioning logits is drawn between this and 1, as inference scales them
    draft: DraftConfig = field(default_factory=DraftConfig)  # draft rows have no denoiser loss and no self-conditioning

    def __post_init__(self) -> None:
        if self.noise not in ("uniform", "mask"):
            raise ValueError(f"noise is uniform or mask, got {self.noise!r}")
        if self.noise == "mask" and self.on_policy:
            raise ValueError(f"on_policy must be 0 with mask noise, which cannot show a wrong token, got {self.on_policy!r}")
        for name in ("full_noise", "span_noise", "gap_noise", "self_condition", "on_policy"):
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
    """Clean rows and the layout of their tokens. Padding has document -1."""

    ids_BL: Tensor
    layout: Layout
    own_BL: Tensor | None = None  # whether a token belongs to a text that the model itself wrote; None: no token does
    given_BL: Tensor | None = None  # whether a token is given and not learned by the causal half; None: no token is

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Applies a function, such as a copy to a device, to all tensors."""
        layout = Layout(*(function(getattr(self.layout, f.name)) for f in fields(Layout)))
        own_BL, given_BL = (None if tensor is None else function(tensor) for tensor in (self.own_BL, self.given_BL))
        return Batch(function(self.ids_BL), layout, own_BL, given_BL)

    @property
    def canvas_BL(self) -> Tensor:
        """Whether a token belongs to a canvas: only those are noised and denoised."""
        return (self.layout.starts >= 0) & (self.layout.documents >= 0)

    @property
    def next_BL(self) -> Tensor:
        """Whether the next token of the row continues the same document."""
        documents = self.layout.documents
        same_BL = (documents[:, :-1] == documents[:, 1:]) & (documents[:, :-1] >= 0)
        return F.pad(same_BL, (0, 1), value=False)

    @property
    def learned_next_BL(self) -> Tensor:
        """Whether the causal half learns to predict the next token. Its own texts would only make it surer of itself."""
        learned_BL = self.next_BL if self.own_BL is None else self.next_BL & ~self.own_BL
        return learned_BL if self.given_BL is None else learned_BL & ~self.given_BL.roll(-1, dims=1)


class Losses(NamedTuple):
    """Mean cross-entropies in nats per token, their weighted sum, and each expert's share of the tokens."""

    total: Tensor
    denoiser: Tensor
    ar: Tensor
    share_E: Tensor  # [layers, E], sums to 1 in each layer
    draft: Tensor = torch.zeros(())  # the loss of drafts, no cross-entropy
    acceptance_S: Tensor = torch.zeros(0)  # by slot of a draft canvas; empty without draft rows


# 1. Noise


@dataclass(frozen=True)
class Noise:
    """The random choices for one batch. The first R rows are self-conditioned, the first O of them are on-policy.

    The last W rows are draft rows.
    """

    noisy_BL: Tensor
    temperature_R: Tensor
    nats_O: Tensor  # a sample replaces noise where its entropy is below this
    uniform_OL: Tensor  # chooses the samples
    draft_temperature_W: Tensor = field(default_factory=lambda: torch.ones(0))

    def to(self, device: torch.device | str) -> "Noise":
        """Copies the tensors to a device."""
        return Noise(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))


def draw_noise(batch: Batch, cfg: LossConfig, vocab_size: int, generator: torch.Generator) -> Noise:
    """Makes every random choice of one forward with a CPU generator, so that a seed means the same on every device.

    Noise is uniform over the vocabulary and may repeat the clean token. Prompt tokens are not noised. Where a share of the
    rows is not a whole number, it is rounded up or down at random. The canvases of draft rows are empty.
    """
    page_rows = len(batch.ids_BL) - cfg.draft.rows
    drafts = Batch(batch.ids_BL[page_rows:], _slice_layout(batch.layout, slice(page_rows, None)))
    batch = Batch(batch.ids_BL[:page_rows], _slice_layout(batch.layout, slice(page_rows)))
    shape = batch.ids_BL.shape
    index_BL, count = number_canvases(batch.layout)
    t_N = draw_levels(count, generator, power=cfg.t_power, full=cfg.full_noise)
    noised_BL = select_noised(batch.layout, t_N, index_BL, cfg.span_noise, generator)
    if cfg.gap_noise:
        noised_BL &= limit_to_gaps(batch.layout, index_BL, count, cfg.gap_noise, generator)
    noise_BL = torch.randint(vocab_size, shape, generator=generator)
    if cfg.noise == "mask":
        noise_BL = torch.full(shape, vocab_size - 1)
    noisy_BL = torch.where(noised_BL, noise_BL, batch.ids_BL)
    round_rows, round_on_policy = torch.rand(2, generator=generator).tolist()
    rows = int(cfg.self_condition * shape[0] + round_rows)
    temperature_R = cfg.t_min + (1 - cfg.t_min) * torch.rand(rows, generator=generator)
    on_policy = int(cfg.on_policy * rows + round_on_policy)
    nats_O = cfg.on_policy_nats * torch.rand(on_policy, generator=generator)
    uniform_OL = torch.rand(on_policy, shape[1], generator=generator, dtype=torch.float64)
    noisy_BL = torch.cat([noisy_BL, torch.where(drafts.canvas_BL, cfg.draft.token, drafts.ids_BL)])
    chosen_W = torch.randint(len(cfg.draft.temperatures), (cfg.draft.rows,), generator=generator)
    return Noise(noisy_BL, temperature_R, nats_O, uniform_OL, torch.tensor(cfg.draft.temperatures)[chosen_W])


def _slice_layout(layout: Layout, rows: slice) -> Layout:
    return Layout(*(getattr(layout, f.name)[rows] for f in fields(Layout)))


def prepare(batch: Batch, cfg: LossConfig, vocab_size: int, generator: torch.Generator) -> tuple[Batch, Noise]:
    """Lays out the canvases of draft rows and draws the noise: what one forward needs, made on the CPU."""
    given_BL = None if cfg.learns_prompts else ~batch.canvas_BL  # now: the canvases of draft rows are not where answers are
    batch = Batch(batch.ids_BL, lay_out_drafts(batch.layout, cfg.draft, generator), batch.own_BL, given_BL)
    return batch, draw_noise(batch, cfg, vocab_size, generator)


# 2. Attention masks


def training_spans(config: BackboneConfig, layout: Layout) -> dict[str, Spans]:
    """Returns the attention spans of each layer type."""
    windows = {kind: config.layer_window(layer) for layer, kind in enumerate(config.layer_types)}
    return {kind: masks.spans(layout, window) for kind, window in windows.items()}


def dense_masks(config: BackboneConfig, layout: Layout) -> dict[str, Tensor]:
    """Returns boolean mask tensors, for devices without FlexAttention."""
    rows, length = layout.positions.shape
    device = layout.positions.device
    spans_of = training_spans(config, layout)
    return {kind: masks.dense(masks.training(spans), rows, 2 * length, device) for kind, spans in spans_of.items()}


class SparseMasks:
    """Makes FlexAttention block masks.

    The spans stay at fixed addresses, so code compiled for one batch serves all batches of the same size.
    """

    def __init__(self, config: BackboneConfig, rows: int, length: int, device: torch.device | str) -> None:
        self.config = config
        self.rows = rows
        self.length = length
        self.device = torch.device(device)
        self.spans = {kind: self._empty_spans() for kind in set(config.layer_types)}
        self.mask_functions = {kind: _with_heads(masks.training(spans)) for kind, spans in self.spans.items()}
        self.build: Callable[..., BlockMask] = create_block_mask
        if self.device.type == "cuda":
            self.build = torch.compile(create_block_mask)

    def _empty_spans(self) -> Spans:
        shape = (self.rows, 2 * self.length)
        return Spans(*(torch.zeros(shape, dtype=torch.int32, device=self.device) for _ in fields(Spans)))

    def __call__(self, layout: Layout) -> dict[str, BlockMask]:
        """Returns the masks of this layout. Masks returned earlier become invalid."""
        for kind, spans in training_spans(self.config, layout).items():
            for f in fields(Spans):
                getattr(self.spans[kind], f.name).copy_(getattr(spans, f.name))
        shape = (self.rows, None, 2 * self.length, 2 * self.length)
        return {kind: self.build(function, *shape, device=self.device) for kind, function in self.mask_functions.items()}


def _with_heads(function: masks.MaskFunction) -> Any:
    return lambda b, h, q, k: function(b, q, k)


def slice_masks(mask_of: Masks, rows: int) -> dict[str, Tensor | BlockMask]:
    """Returns the masks of the first rows, for the self-conditioning forward."""
    return {
        kind: _slice_block_mask(mask, rows) if isinstance(mask, BlockMask) else mask[:rows] for kind, mask in mask_of.items()
    }


def _slice_block_mask(mask: BlockMask, rows: int) -> BlockMask:
    """Slices by hand: BlockMask's own slicing disables the mask function, since it may depend on the row. Ours may be kept,
    because the first rows keep their indices."""
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    return BlockMask.from_kv_blocks(
        *(getattr(mask, name)[:rows] for name in names),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
        compute_q_blocks=False,
    )


# 3. Self-conditioning


def scaled_logits(model: Backbone, hidden_NLD: Tensor, temperature_N: Tensor) -> Tensor:
    """Returns logits divided by each row's temperature."""
    return model.head(hidden_NLD) / temperature_N[:, None, None]


def predict_soft_embedding(model: Backbone, hidden_NLD: Tensor, temperature_N: Tensor) -> Tensor:
    """Returns the expected embedding at each position, at each row's temperature."""
    return model.soft_embed(scaled_logits(model, hidden_NLD, temperature_N))


@torch.no_grad()
def self_conditioning_forward(
    model: Backbone,
    batch: Batch,
    noise: Noise,
    canvas_BL: Tensor,
    mask_of: Masks,
    soft_embedding: Callable[[Backbone, Tensor, Tensor], Tensor] = predict_soft_embedding,
    adapter: Adapter | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the first R rows without gradient. Returns the soft embeddings and the ids that the training forward reads.

    The soft embeddings soft_BLD are zero for the other rows and outside canvases. In on-policy rows, samples with low
    entropy replace noise, as on a canvas between two steps: the errors left there are plausible ones.
    """
    rows = len(noise.temperature_R)
    on_policy = len(noise.uniform_OL)
    noisy_RL = noise.noisy_BL[:rows]
    clean_RL = batch.ids_BL[:rows]
    positions_RL = batch.layout.positions[:rows]
    hidden_RLD, _, _ = model.forward_train(noisy_RL, clean_RL, None, positions_RL, mask_of, adapter=adapter)
    rows_at_once = max(1, MAX_LOGITS // model.config.vocab_size // noisy_RL.shape[1])
    slices = [slice(begin, begin + rows_at_once) for begin in range(0, rows, rows_at_once)]
    soft_parts = [soft_embedding(model, hidden_RLD[part], noise.temperature_R[part]) for part in slices]
    soft_RLD = torch.cat(soft_parts) * canvas_BL[:rows, :, None]
    soft_BLD = F.pad(soft_RLD, (0, 0, 0, 0, 0, len(batch.ids_BL) - rows))
    ids_parts = [noise.noisy_BL[:0]]
    for part in (slice(part.start, min(part.stop, on_policy)) for part in slices if part.start < on_policy):
        logits_NLV = scaled_logits(model, hidden_RLD[part], noise.temperature_R[part])
        prediction = argmax_entropy_sample(logits_NLV, noise.uniform_OL[part])
        is_replaced_NL = (prediction.entropy_BC < noise.nats_O[part, None]) & (noisy_RL[part] != clean_RL[part])
        ids_parts.append(torch.where(is_replaced_NL, prediction.sampled_BC, noisy_RL[part]))
    return soft_BLD, torch.cat([*ids_parts, noise.noisy_BL[on_policy:]])


# 4. The two cross-entropies


def cross_entropy(model: Backbone, hidden_BLD: Tensor, targets_BL: Tensor, most: int = MAX_LOGITS) -> Tensor:
    """Returns the mean over targets that are not IGNORED, in float32. Computes more than `most` logits in pieces."""

    def summed(hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        return F.cross_entropy(model.head(hidden_ND), targets_N, ignore_index=IGNORED, reduction="sum")

    tokens_at_once = max(1, most // model.config.vocab_size)
    hidden_ND = hidden_BLD.flatten(0, 1)
    targets_N = targets_BL.flatten()
    pieces = list(zip(hidden_ND.split(tokens_at_once), targets_N.split(tokens_at_once), strict=True))
    if len(pieces) == 1:
        total = summed(*pieces[0])
    else:
        total = sum(torch.utils.checkpoint.checkpoint(summed, *piece, use_reentrant=False) for piece in pieces)
    return total / (targets_N != IGNORED).sum().clamp(min=1)


# 5. Load balance


def load_balance(routings: Sequence[Routing]) -> tuple[Tensor, Tensor]:
    """Returns the load-balance loss (1 when even, mean over layers) and each expert's share of the tokens, [layers, E].

    The loss sums share times mean router probability; its gradient lowers the probability of overloaded experts.
    """
    if not routings:  # a model without experts
        return torch.zeros(()), torch.ones(1, 1)
    probs = torch.stack([routing.probs_NE.mean(dim=0) for routing in routings])
    experts = probs.shape[1]
    with torch.no_grad():
        indices = torch.arange(experts, device=probs.device)
        share = torch.stack([(r.experts_NK[..., None] == indices).float().mean(dim=(0, 1)) for r in routings])
    return experts * (share * probs).sum(dim=1).mean(), share


def draft_losses(
    terms: DraftTerms,
    model: Backbone,
    batch: Batch,
    rows: slice,
    noisy_BLD: Tensor,
    clean_BLD: Tensor,
    temperature_B: Tensor,
    cfg: DraftConfig,
) -> DraftLosses:
    """The loss of the draft rows. What follows a stop token is fill, which is never drafted and does not count."""
    ids_BL = batch.ids_BL[rows]
    canvas_BL = batch.canvas_BL[rows]
    previous_BL = ids_BL.roll(1, dims=1)
    is_fill_BL = torch.zeros_like(canvas_BL)
    for stop in model.config.eos_token_ids:
        is_fill_BL |= previous_BL == stop
    length = ids_BL.shape[1]
    terms_3N = terms_in_pieces(
        terms,
        model,
        noisy_BLD[rows].flatten(0, 1),
        clean_BLD[rows].detach().roll(1, dims=1).flatten(0, 1),
        previous_BL.flatten(),
        ids_BL.flatten(),
        temperature_B.repeat_interleave(length),
    )
    slot_BL = (batch.layout.positions - batch.layout.starts)[rows]
    row_B = torch.arange(len(ids_BL), device=ids_BL.device)
    length_index_N = (row_B % len(cfg.lengths)).repeat_interleave(length)
    return draft_loss(terms_3N, slot_BL.flatten(), length_index_N, (canvas_BL & ~is_fill_BL).flatten(), cfg)


class Objective(nn.Module):
    """The objective as one module that can be compiled, sharded and differentiated.

    With an adapter, the adapter is trained and the model stays as it is. `recomputes`: see `forward_train`.
    """

    def __init__(
        self, model: Backbone, cfg: LossConfig, adapter: Adapter | None = None, *, recomputes: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.cfg = cfg
        self.adapter = adapter
        self.recomputes = recomputes
        self.cross_entropy = cross_entropy
        self.soft_embedding = predict_soft_embedding
        self.draft_terms = draft_terms

    def forward(self, batch: Batch, noise: Noise, mask_of: Masks, self_conditioning_mask_of: Masks) -> Losses:
        """Returns the losses of one batch. `self_conditioning_mask_of` holds the masks of the self-conditioned rows."""
        canvas_BL = batch.canvas_BL
        noisy_BL = noise.noisy_BL
        soft_BLD = None
        if len(noise.temperature_R):
            soft_BLD, noisy_BL = self_conditioning_forward(
                self.model, batch, noise, canvas_BL, self_conditioning_mask_of, self.soft_embedding, self.adapter
            )
        elif dist.is_initialized():
            self._run_idle_forward(batch, mask_of)
        positions_BL = batch.layout.positions
        options: dict[str, Any] = {"adapter": self.adapter, "recomputes": self.recomputes}
        noisy_BLD, clean_BLD, routings = self.model.forward_train(
            noisy_BL, batch.ids_BL, soft_BLD, positions_BL, mask_of, **options
        )
        counted_BL = canvas_BL
        if self.cfg.noise == "mask":
            counted_BL = canvas_BL & (noise.noisy_BL != batch.ids_BL)
        page_rows = len(batch.ids_BL) - self.cfg.draft.rows
        targets_BL = torch.where(counted_BL, batch.ids_BL, IGNORED)
        most = MAX_LOGITS // 8 if self.recomputes else MAX_LOGITS
        denoiser = self.cross_entropy(self.model, noisy_BLD[:page_rows], targets_BL[:page_rows], most)
        next_ids_BL = torch.where(batch.learned_next_BL, batch.ids_BL.roll(-1, dims=1), IGNORED)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.cfg.ar_weight > 0):
            ar = self.cross_entropy(self.model, clean_BLD, next_ids_BL, most)
        balance, share_E = load_balance(routings)
        total = denoiser + self.cfg.ar_weight * ar + self.cfg.balance_weight * balance
        if not self.cfg.draft.rows:
            return Losses(total, denoiser, ar, share_E)
        rows = slice(page_rows, None)
        temperature_W = noise.draft_temperature_W
        drafts = draft_losses(self.draft_terms, self.model, batch, rows, noisy_BLD, clean_BLD, temperature_W, self.cfg.draft)
        total = total + self.cfg.draft.weight * drafts.loss
        return Losses(total, denoiser, ar, share_E, drafts.loss, drafts.acceptance_S)

    @torch.no_grad()
    def _run_idle_forward(self, batch: Batch, mask_of: Masks) -> None:
        """Another process may have self-conditioned rows where this one has none: FSDP waits until all gather the layers."""
        ids_1L = batch.ids_BL[:1]
        self.model.forward_train(ids_1L, ids_1L, None, batch.layout.positions[:1], slice_masks(mask_of, 1))


def compute_losses(model: Backbone, batch: Batch, cfg: LossConfig, generator: torch.Generator) -> Losses:
    """Runs the whole objective on one batch without compiling or sharding."""
    batch, noise = prepare(batch, cfg, model.config.vocab_size, generator)
    noise = noise.to(model.device)
    batch = batch.map(lambda tensor: tensor.to(model.device))
    mask_of = dense_masks(model.config, batch.layout)
    return Objective(model, cfg)(batch, noise, mask_of, slice_masks(mask_of, len(noise.temperature_R)))
