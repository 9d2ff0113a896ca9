"""Sampler: turns logits into the next canvas. It knows neither the model, nor the cache, nor text.

One step: divide by the temperature, sample every position, accept positions by entropy, renoise the rest, test whether the
canvas has settled. Acceptance is recomputed at every step: an accepted token can be rejected later, so a canvas corrects
itself. Shapes: B rows, C canvas positions, V vocabulary.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.constraints.constraints import NEVER, CanvasConstraints
from redraft.diffusion.rng import Draws
from redraft.kernels import Prediction, argmax_entropy_sample

SURE = 0.2  # nats: with `spread`, positions with less entropy than this need no distance from one another
BEHIND = 1e3  # nats: added to an entropy, it sorts a position after all others


@dataclass(frozen=True)
class Canvas:
    """A canvas between two steps."""

    ids_BC: Tensor  # the input of the next step: sampled tokens where accepted, noise elsewhere
    best_BC: Tensor  # argmax of the last logits: the draft, and what a commit takes
    entropy_BC: Tensor  # nats, of the last logits after temperature and constraints
    accepted_BC: Tensor  # positions of ids_BC whose tokens are sampled or pinned, not noise
    unchanged_B: Tensor  # consecutive steps in which best_BC has not changed
    steps_B: Tensor  # denoising steps that each row has used
    settled_B: Tensor  # rows that are stable and confident; no step changes them any more
    skipped_B: Tensor  # rows whose text ended on an earlier canvas
    same_BC: Tensor  # with `settle_prefix`: consecutive steps in which each position of best_BC has not changed
    final_B: Tensor  # with `settle_prefix`: positions from the left that no step changes any more
    step: int

    @property
    def frozen_B(self) -> Tensor:
        """Rows that no step changes any more."""
        return self.settled_B | self.skipped_B


def start(ids_BC: Tensor, constraints: CanvasConstraints | None = None, ended_B: Tensor | None = None) -> Canvas:
    """Makes a canvas before its first step, from noise or from the user's own tokens."""
    rows, length = ids_BC.shape
    device = ids_BC.device
    accepted_BC = torch.zeros_like(ids_BC, dtype=torch.bool)
    if constraints is not None:
        ids_BC = constraints.apply_pins(ids_BC)
        accepted_BC = constraints.pinned_BC
    false_B = torch.zeros(rows, dtype=torch.bool, device=device)
    zero_B = torch.zeros(rows, dtype=torch.long, device=device)
    return Canvas(
        ids_BC=ids_BC,
        best_BC=ids_BC,
        entropy_BC=torch.full((rows, length), math.inf, device=device),
        accepted_BC=accepted_BC,
        unchanged_B=zero_B,
        steps_B=zero_B,
        settled_B=false_B,
        skipped_B=ended_B if ended_B is not None else false_B,
        same_BC=torch.zeros_like(ids_BC),
        final_B=zero_B,
        step=0,
    )


def temperature(step: int, cfg: SamplerConfig) -> Tensor:
    """The temperature of a step: t_max at the first, falling linearly to one notch above t_min at the last.

    Float32 arithmetic, as in transformers: two nearly equal logits must round the same way in both.
    """
    left = torch.tensor((cfg.max_steps - step) / cfg.max_steps, dtype=torch.float32)
    return cfg.t_min + (cfg.t_max - cfg.t_min) * left


def accept_by_entropy(entropy_BC: Tensor, bound: float | Tensor, least_B: Tensor | None = None) -> Tensor:
    """The positions to accept, bool_BC: in order of entropy, as long as the sum of the entropies before stays in the bound.

    The last accepted token's own entropy does not count against the bound, so at least one position is accepted.
    `least_B` accepts at least that many, whatever their entropy.
    """
    sorted_BC, order_BC = entropy_BC.sort(dim=-1)
    accepted_BC = sorted_BC.cumsum(dim=-1) - sorted_BC <= bound
    if least_B is not None:
        accepted_BC |= torch.arange(accepted_BC.shape[-1], device=accepted_BC.device) < least_B[:, None]
    return torch.zeros_like(accepted_BC).scatter(-1, order_BC, accepted_BC)


def select_accepted(prediction: Prediction, canvas: Canvas, cfg: SamplerConfig) -> Tensor:
    """The positions that this step accepts, bool_BC: by entropy and quota, and by two settings for small models.

    `stops_last` accepts stop tokens after all others: early on, a small model is surest of the end of the canvas, and a stop
    token accepted then cuts off the text before it.
    `spread` keeps newly accepted positions apart: neighbours sampled independently contradict one another ("was was").
    """
    rank_BC = prediction.entropy_BC  # positions are accepted in this order
    least_B = count_required(canvas, cfg)
    if cfg.stops_last:
        rank_BC = rank_BC + BEHIND * find_stops(prediction.best_BC, cfg)
    is_last_step = canvas.step + 1 == cfg.max_steps
    if not cfg.spread or is_last_step:
        return accept_by_entropy(rank_BC, cfg.entropy_bound, least_B)
    confirmed_BC = canvas.accepted_BC & (prediction.best_BC == canvas.ids_BC)
    allowed_BC = spread_apart(rank_BC, confirmed_BC, cfg.spread)
    rank_BC = torch.where(allowed_BC, rank_BC, rank_BC + BEHIND)
    return accept_by_entropy(rank_BC, cfg.entropy_bound, least_B) & allowed_BC


def spread_apart(rank_BC: Tensor, confirmed_BC: Tensor, spread: int) -> Tensor:
    """The positions that `spread` allows to be accepted, bool_BC.

    They are the accepted tokens that the model still predicts, the positions with entropy below SURE, and of the others the
    one with the lowest entropy within `spread` positions.
    """
    open_BC = torch.where(confirmed_BC, torch.inf, rank_BC)
    lowest_BC = -F.max_pool1d(-open_BC[:, None], 2 * spread - 1, stride=1, padding=spread - 1)[:, 0]
    return confirmed_BC | (rank_BC < SURE) | (open_BC == lowest_BC)


def count_required(canvas: Canvas, cfg: SamplerConfig) -> Tensor | None:
    """The number of positions that this step must accept, least_B, or None when the entropy bound alone decides.

    With `quota`, the open positions are shared out over the steps left: 250 open positions and 10 steps left require 25 more
    than the last step accepted. The last step requires all.
    """
    length = canvas.ids_BC.shape[1]
    steps_left = cfg.max_steps - canvas.step
    if cfg.quota:
        accepted_B = canvas.accepted_BC.sum(dim=-1)
        return accepted_B + -(-(length - accepted_B) // steps_left)
    if cfg.accept_at_end and steps_left == 1:
        return torch.full_like(canvas.steps_B, length)
    return None


def settled(
    prediction: Prediction, canvas: Canvas, cfg: SamplerConfig, constraints: CanvasConstraints | None
) -> tuple[Tensor, Tensor]:
    """Whether each row is stable and confident (bool_B), and for how many steps its argmax has not changed (long_B).

    Confidence is the mean entropy of the positions that the model decides: pinned and final positions have no entropy.
    """
    is_unchanged_B = torch.zeros_like(canvas.settled_B)
    if canvas.step > 0:
        is_unchanged_B = (prediction.best_BC == canvas.best_BC).all(dim=-1)
    unchanged_B = torch.where(is_unchanged_B, canvas.unchanged_B + 1, 0)
    mean_B = prediction.entropy_BC.mean(dim=-1)
    if constraints is not None or cfg.settle_prefix:
        fixed_BC = final_positions(canvas)
        fixed_BC = fixed_BC | constraints.pinned_BC if constraints is not None else fixed_BC
        open_B = (~fixed_BC).sum(dim=-1).clamp(min=1)
        mean_B = prediction.entropy_BC.sum(dim=-1) / open_B
    is_stable_B = unchanged_B >= cfg.stability_threshold
    is_confident_B = mean_B < cfg.confidence_threshold
    return is_stable_B & is_confident_B, unchanged_B


def final_positions(canvas: Canvas) -> Tensor:
    """The positions that no step changes any more, bool_BC."""
    return torch.arange(canvas.ids_BC.shape[1], device=canvas.final_B.device) < canvas.final_B[:, None]


def hold_final(logits_BCV: Tensor, canvas: Canvas) -> Tensor:
    """Leaves final positions no choice but their token."""
    is_other_BCV = torch.arange(logits_BCV.shape[-1], device=logits_BCV.device) != canvas.best_BC[..., None]
    return logits_BCV.masked_fill(final_positions(canvas)[..., None] & is_other_BCV, NEVER)


def count_settled(same_BC: Tensor, entropy_BC: Tensor, cfg: SamplerConfig) -> Tensor:
    """How many positions from the left have settled, long_B: the rule of a whole canvas, applied to each of them.

    They are stable (unchanged for `same_BC` steps) and confident.
    """
    is_settled_BC = (same_BC >= cfg.stability_threshold) & (entropy_BC < cfg.confidence_threshold)
    return is_settled_BC.long().cumprod(dim=-1).sum(dim=-1)


def settle_prefix(prediction: Prediction, canvas: Canvas, cfg: SamplerConfig) -> tuple[Tensor, Tensor]:
    """How many positions from the left are final now (long_B), and for how many steps each has not changed (long_BC)."""
    is_same_BC = (prediction.best_BC == canvas.best_BC) & (canvas.step > 0)
    same_BC = torch.where(is_same_BC, canvas.same_BC + 1, 0)
    return torch.maximum(count_settled(same_BC, prediction.entropy_BC, cfg), canvas.final_B), same_BC


def step(
    logits_BCV: Tensor, canvas: Canvas, cfg: SamplerConfig, draws: Draws, constraints: CanvasConstraints | None = None
) -> tuple[Canvas, Tensor]:
    """Returns the next canvas, and the logits after temperature and constraints, which self-conditioning takes.

    Frozen rows stay as they are.
    """
    length = canvas.ids_BC.shape[1]
    number = canvas.step + 1
    matching_BC = None
    if cfg.settle_prefix:
        logits_BCV = hold_final(logits_BCV, canvas)
    if constraints is None:
        shaped_BCV = logits_BCV / temperature(canvas.step, cfg)
    else:
        shaped_BCV = constraints.mask_logits(logits_BCV) / temperature(canvas.step, cfg)
        shaped_BCV, matching_BC = constraints.apply_automata(shaped_BCV)
    prediction = argmax_entropy_sample(shaped_BCV, draws.uniform(number, length))
    if matching_BC is not None:  # the argmax of each position is in general no match of the pattern
        prediction = prediction._replace(best_BC=matching_BC)
    accepted_BC = select_accepted(prediction, canvas, cfg)
    if constraints is not None:
        accepted_BC = accepted_BC | constraints.pinned_BC
    final_B, same_BC = canvas.final_B, canvas.same_BC
    if cfg.settle_prefix:
        accepted_BC = accepted_BC | final_positions(canvas)
        final_B, same_BC = settle_prefix(prediction, canvas, cfg)
    noise_BC = draws.noise(number, length, logits_BCV.shape[-1])
    settled_B, unchanged_B = settled(prediction, canvas, cfg, constraints)
    next_canvas = Canvas(
        ids_BC=torch.where(accepted_BC, prediction.sampled_BC, noise_BC),
        best_BC=prediction.best_BC,
        entropy_BC=prediction.entropy_BC,
        accepted_BC=accepted_BC,
        unchanged_B=unchanged_B,
        steps_B=canvas.steps_B + 1,
        settled_B=settled_B,
        skipped_B=canvas.skipped_B,
        same_BC=same_BC,
        final_B=final_B,
        step=number,
    )
    if cfg.settle_prefix:
        next_canvas = replace(next_canvas, settled_B=settled_B | has_final_stop(next_canvas, cfg))
    return _keep_frozen_rows(canvas, next_canvas), shaped_BCV


def has_final_stop(canvas: Canvas, cfg: SamplerConfig) -> Tensor:
    """Whether a row's text has ended for good, bool_B: one of its final tokens is a stop token."""
    return (find_stops(canvas.best_BC, cfg) & final_positions(canvas)).any(dim=-1)


def find_stops(ids_BC: Tensor, cfg: SamplerConfig) -> Tensor:
    """The positions of stop tokens, bool_BC."""
    return torch.isin(ids_BC, torch.tensor(cfg.eos_token_ids, dtype=torch.long, device=ids_BC.device))


def _keep_frozen_rows(old: Canvas, new: Canvas) -> Canvas:
    """The new canvas, with the rows that were frozen in the old one taken from there."""
    frozen_B = old.frozen_B
    if not frozen_B.any():
        return new
    merged: dict[str, Any] = {}
    for field in fields(Canvas):
        before = getattr(old, field.name)
        after = getattr(new, field.name)
        if isinstance(after, Tensor):
            merged[field.name] = torch.where(frozen_B if after.dim() == 1 else frozen_B[:, None], before, after)
    return replace(new, **merged)


def apply_constraints(canvas: Canvas, constraints: CanvasConstraints, draws: Draws, vocab_size: int) -> Canvas:
    """Applies new constraints to a canvas between two steps: tokens that violate them are pinned or renoised.

    A row whose draft violates nothing stays settled if it was; the others must settle again.
    """
    noise_BC = draws.noise(canvas.step, canvas.ids_BC.shape[1], vocab_size)
    violated_BC = constraints.find_violations(canvas.ids_BC)
    must_settle_again_B = constraints.find_violations(canvas.best_BC).any(dim=-1)
    return replace(
        canvas,
        ids_BC=constraints.apply_pins(torch.where(violated_BC, noise_BC, canvas.ids_BC)),
        best_BC=constraints.apply_pins(canvas.best_BC),
        accepted_BC=canvas.accepted_BC & ~violated_BC | constraints.pinned_BC,
        unchanged_B=torch.where(must_settle_again_B, 0, canvas.unchanged_B),
        settled_B=canvas.settled_B & ~must_settle_again_B,
    )


def unsettle(canvas: Canvas) -> Canvas:
    """The same canvas, with all rows required to settle again."""
    zero_B = torch.zeros_like(canvas.unchanged_B)
    return replace(canvas, unchanged_B=zero_B, settled_B=torch.zeros_like(canvas.settled_B))


def is_finished(canvas: Canvas, cfg: SamplerConfig) -> bool:
    """Whether another step would change nothing or would exceed max_steps."""
    return canvas.step >= cfg.max_steps or bool(canvas.frozen_B.all())


class CommitResult(NamedTuple):
    """A finished canvas as tokens."""

    ids_BC: Tensor  # padding after the first stop token
    lengths_B: Tensor  # tokens up to and including the stop token; 0 for a row that ended on an earlier canvas
    ended_B: Tensor  # rows whose text ends here or ended before


def commit(canvas: Canvas, cfg: SamplerConfig) -> CommitResult:
    """Commits the argmax of the last logits, not the last sample.

    The last sample would not do: on a canvas that never settled it has noise wherever the last step rejected a token.
    """
    is_stop_BC = find_stops(canvas.best_BC, cfg)
    stops_before_BC = is_stop_BC.cumsum(dim=-1) - is_stop_BC.long()
    is_text_BC = (stops_before_BC == 0) & ~canvas.skipped_B[:, None]
    ids_BC = torch.where(is_text_BC, canvas.best_BC, cfg.pad_token_id)
    return CommitResult(ids_BC, is_text_BC.sum(dim=-1), is_stop_BC.any(dim=-1) | canvas.skipped_B)
