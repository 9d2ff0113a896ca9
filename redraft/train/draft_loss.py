"""The draft objective: the denoiser learns to draft what the causal half would write.

The last rows of a batch are draft rows. Their canvases are short, begin behind any token, and are filled with one token that
means "empty". The causal half of the same forward is the teacher: p is its next-token distribution, without gradient. The
student q is the denoiser's distribution at a slot of the canvas, given the token before the slot (`draft_logits`).

    loss = mean over slots of  w (0.1 CE(q, token) + c KL(p || q) + (1 - c) (1 - a)),    a = sum over tokens of min(p, q)

a is the chance that speculative sampling accepts the draft. KL leads while a is small, because 1 - a has little gradient
there: c = exp(-3 mean a). A rejected draft discards those behind it, so early slots weigh more (D-PACE): w of slot i is the
sum over j >= i of the product of (0.5 + 0.5 a) from slot 2 to j. The causal half answers slot 1 itself when drafts are
verified, so slot 1 has a small weight.

Shapes: B rows, R draft rows, L tokens of a row, N = R L slots, S slots of a canvas, J canvas lengths, V vocabulary,
D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from redraft.model.backbone import Backbone
from redraft.model.masks import Layout

MAX_LOGITS = 2**29  # of student and teacher together, in memory at once; more are split, and recomputed in the backward pass


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The share and the weights of the draft objective."""

    rows: int = 0  # of a microbatch, its last ones; 0 turns the objective off
    lengths: tuple[int, ...] = (8, 16)  # of canvases; row i has lengths[i % len(lengths)]
    token: int = 0  # fills the canvases
    temperatures: tuple[float, ...] = (0.7, 1.0)  # of teacher and student, drawn for each row
    weight: float = 1.0  # of the draft loss in the total
    cross_entropy: float = 0.1  # its weight beside KL and acceptance
    kl_decay: float = 3.0  # KL has weight exp(-this times the mean acceptance)
    first_slot: float = 0.1  # the weight of slot 1, times that of slot 2

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise ValueError(f"draft rows must be 0 or more, got {self.rows!r}")
        if not self.lengths or min(self.lengths) < 2:
            raise ValueError(f"draft lengths must be at least 2, got {self.lengths!r}")
        if not self.temperatures or min(self.temperatures) <= 0:
            raise ValueError(f"draft temperatures must be above 0, got {self.temperatures!r}")
        for name in ("token", "weight", "cross_entropy", "kl_decay", "first_slot"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"draft {name} must be 0 or more, got {getattr(self, name)!r}")


class DraftLosses(NamedTuple):
    """The mean loss of all slots, and the mean acceptance of each slot; slots of the longest canvas."""

    loss: Tensor
    acceptance_S: Tensor


# 1. Canvases behind any token


def lay_out_drafts(layout: Layout, cfg: DraftConfig, generator: torch.Generator) -> Layout:
    """Replaces the canvases of the last `cfg.rows` rows by short ones, with a random phase for each document.

    The first canvas of a document begins behind its first token or up to a canvas later. A canvas that does not fit into
    its document is left out: its length would tell the drafts where the text ends.
    """
    if not cfg.rows:
        return layout
    positions_RL = layout.positions[-cfg.rows :]
    documents_RL = layout.documents[-cfg.rows :]
    shape = positions_RL.shape
    length_R1 = row_lengths(cfg)[:, None]
    uniform_RL = torch.rand(shape, generator=generator).gather(1, documents_RL.clamp(min=0))  # the same in a document
    phase_RL = 1 + (uniform_RL * length_R1).long()
    slot_RL = (positions_RL - phase_RL) % length_R1
    starts_RL = positions_RL - slot_RL
    last_RL = torch.arange(shape[1]) - slot_RL + length_R1 - 1
    is_whole_RL = (last_RL < shape[1]) & (documents_RL.gather(1, last_RL.clamp(max=shape[1] - 1)) == documents_RL)
    is_draft_RL = is_whole_RL & (starts_RL >= 1) & (documents_RL >= 0)
    starts_BL = torch.cat([layout.starts[: -cfg.rows], torch.where(is_draft_RL, starts_RL, -1)])
    return Layout(layout.positions, starts_BL, layout.documents)


def row_lengths(cfg: DraftConfig) -> Tensor:
    """Returns the canvas length of each draft row."""
    return torch.tensor([cfg.lengths[row % len(cfg.lengths)] for row in range(cfg.rows)], dtype=torch.long)


# 2. Terms of each slot


def draft_terms(
    model: Backbone,
    hidden_ND: Tensor,
    teacher_ND: Tensor,
    previous_N: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
) -> Tensor:
    """Returns cross-entropy, KL divergence and acceptance of each slot, [3, N]."""
    with torch.no_grad():
        log_p_NV = torch.log_softmax(model.head(teacher_ND) / temperature_N[:, None], dim=-1)
    log_q_NV = torch.log_softmax(model.draft_logits(hidden_ND, previous_N) / temperature_N[:, None], dim=-1)
    p_NV = log_p_NV.exp()
    acceptance_N = torch.minimum(p_NV, log_q_NV.exp()).sum(dim=-1)
    divergence_N = (p_NV * (log_p_NV - log_q_NV)).sum(dim=-1)
    cross_entropy_N = -log_q_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    return torch.stack([cross_entropy_N, divergence_N, acceptance_N])


DraftTerms = Callable[[Backbone, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def terms_in_pieces(terms: DraftTerms, model: Backbone, *slots: Tensor) -> Tensor:
    """Returns the terms of all slots, [3, N]. Computes more than MAX_LOGITS logits in pieces."""
    slots_at_once = max(1, MAX_LOGITS // 2 // model.config.vocab_size)
    pieces = list(zip(*(tensor.split(slots_at_once) for tensor in slots), strict=True))
    if len(pieces) == 1:
        return terms(model, *slots)
    return torch.cat([recompute(terms, model, *piece, use_reentrant=False) for piece in pieces], dim=1)


# 3. Weights of the slots, and the loss


def slot_weights(acceptance_JS: Tensor, cfg: DraftConfig) -> Tensor:
    """Returns the D-PACE weights of each slot, [J, S], for canvases of each length. Slots behind a canvas have weight 0."""
    slot_S = torch.arange(acceptance_JS.shape[1], device=acceptance_JS.device)
    is_slot_JS = torch.stack(
        [slot_S < length for length in cfg.lengths]
    )  # no copy from the host, which a GPU would wait for
    chance_JS = torch.where(slot_S == 0, 1.0, 0.5 + 0.5 * acceptance_JS)
    reached_JS = chance_JS.cumprod(dim=1) * is_slot_JS
    weights_JS = reached_JS.flip(1).cumsum(dim=1).flip(1)
    first_J1 = cfg.first_slot * weights_JS[:, 1:2]
    return torch.cat([first_J1, weights_JS[:, 1:]], dim=1)


def expected_length(acceptance_S: Tensor) -> Tensor:
    """Returns the expected number of accepted drafts: slot 1 is no draft, and a rejection discards the slots behind it."""
    return acceptance_S[1:].cumprod(dim=0).sum()


def draft_loss(
    terms_3N: Tensor, slot_N: Tensor, length_index_N: Tensor, is_counted_N: Tensor, cfg: DraftConfig
) -> DraftLosses:
    """Combines the terms of all slots. `slot_N` counts from 0; `length_index_N` is the index of the canvas length."""
    cross_entropy_N, divergence_N, acceptance_N = terms_3N
    slots = max(cfg.lengths)
    counted_N = is_counted_N.float()
    with torch.no_grad():
        cell_N = torch.where(is_counted_N, length_index_N * slots + slot_N, 0)
        cells = torch.arange(len(cfg.lengths) * slots, device=cell_N.device)
        is_cell_NC = (cell_N[:, None] == cells).float()  # a product has a fixed order, atomic additions have none
        sums_2C = torch.stack([counted_N, acceptance_N * counted_N]) @ is_cell_NC
        count_JS, sum_JS = sums_2C.view(2, -1, slots)
        weight_N = slot_weights(sum_JS / count_JS.clamp(min=1), cfg).flatten()[cell_N] * counted_N
        weight_N = weight_N / weight_N.sum().clamp(min=1e-9)
        is_draft_N = counted_N * (slot_N > 0)
        mean_acceptance = (acceptance_N * is_draft_N).sum() / is_draft_N.sum().clamp(min=1)
        kl_weight = torch.exp(-cfg.kl_decay * mean_acceptance)
        acceptance_S = sum_JS.sum(dim=0) / count_JS.sum(dim=0).clamp(min=1)
    terms_N = cfg.cross_entropy * cross_entropy_N + kl_weight * divergence_N + (1 - kl_weight) * (1 - acceptance_N)
    return DraftLosses((weight_N * terms_N).sum(), acceptance_S)
