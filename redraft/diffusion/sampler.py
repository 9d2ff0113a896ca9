"""Canvas mathematics: from logits to the next canvas.

Knows nothing of the model, the cache or text. Shapes: B rows, C canvas positions, V vocabulary.
A step is: temperature -> sample -> accept while summed entropy stays under a bound -> noise elsewhere -> done?
Acceptance is recomputed at every step: a token once accepted can be taken back, which is how a page corrects itself.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.constraints.constraints import CanvasConstraints
from redraft.diffusion.rng import Draws
from redraft.kernels import Prediction, argmax_entropy_sample

SURE = 0.2  # nats: with `spread`, whoever is surer than this needs no distance
BEHIND = 1e3  # more than any entropy


@dataclass(frozen=True)
class Canvas:
    """A page between two steps."""

    ids_BC: Tensor  # what the denoiser reads next: accepted tokens, noise elsewhere
    best_BC: Tensor  # argmax of the last logits: the draft, and what gets committed
    entropy_BC: Tensor  # nats, of the last temperature-shaped logits
    accepted_BC: Tensor  # whose tokens in ids_BC are sampled, not noise
    unchanged_B: Tensor  # steps in a row that best_BC has stayed the same
    steps_B: Tensor  # denoising steps each row has used
    settled_B: Tensor  # stopped because stable and confident; rows where this holds are frozen
    skipped_B: Tensor  # rows whose text had ended before this canvas
    step: int

    @property
    def frozen_B(self) -> Tensor:
        """Rows that no step changes any more."""
        return self.settled_B | self.skipped_B


def start(ids_BC: Tensor, constraints: CanvasConstraints | None = None, ended_B: Tensor | None = None) -> Canvas:
    """A canvas before its first step, from noise or from the user's own tokens."""
    rows, length = ids_BC.shape
    ids_BC = constraints.apply_pins(ids_BC) if constraints is not None else ids_BC
    device = ids_BC.device
    no_B = torch.zeros(rows, dtype=torch.bool, device=device)
    count_B = torch.zeros(rows, dtype=torch.long, device=device)
    return Canvas(
        ids_BC=ids_BC,
        best_BC=ids_BC,
        entropy_BC=torch.full((rows, length), math.inf, device=device),
        accepted_BC=constraints.pinned_BC if constraints is not None else torch.zeros_like(ids_BC, dtype=torch.bool),
        unchanged_B=count_B,
        steps_B=count_B,
        settled_B=no_B,
        skipped_B=ended_B if ended_B is not None else no_B,
        step=0,
    )


def temperature(step: int, cfg: SamplerConfig) -> Tensor:
    """Falls linearly with the steps left: t_max at the first step, one notch above t_min at the last.

    Float32 arithmetic throughout, as in transformers: a page that hangs on a hair must tip to the same side.
    """
    left = torch.tensor((cfg.max_steps - step) / cfg.max_steps, dtype=torch.float32)
    return cfg.t_min + (cfg.t_max - cfg.t_min) * left


def accept_by_entropy(entropy_BC: Tensor, bound: float, least_B: Tensor | None = None) -> Tensor:
    """Which positions to keep, bool_BC: the surest ones, as long as the entropy of those before stays within the bound.

    The sum leaves out the position's own entropy, so the surest is always accepted. `least_B` forces that many.
    """
    sorted_BC, order_BC = entropy_BC.sort(dim=-1)
    keep_BC = sorted_BC.cumsum(dim=-1) - sorted_BC <= bound
    if least_B is not None:
        keep_BC |= torch.arange(keep_BC.shape[-1], device=keep_BC.device) < least_B[:, None]
    return torch.zeros_like(keep_BC).scatter(-1, order_BC, keep_BC)


def select_accepted(belief: Prediction, state: Canvas, cfg: SamplerConfig) -> Tensor:
    """What this step keeps, by entropy, quota, and the two constraints that keep small models from contradicting themselves.

    `stops_last`: at first, the end of a page is what a model is surest of; accepted early, it eats the text before it.
    `spread`: neighbours drawn apart from one another disagree ("was was"), positions far apart seldom do.
    """
    worry_BC, least_B = belief.entropy_BC, count_required(state, cfg)
    if cfg.stops_last:
        stops = torch.tensor(cfg.eos_token_ids, dtype=torch.long, device=worry_BC.device)
        worry_BC = worry_BC + BEHIND * torch.isin(belief.best_BC, stops)
    if not cfg.spread or state.step + 1 == cfg.max_steps:
        return accept_by_entropy(worry_BC, cfg.entropy_bound, least_B)
    may_BC = spread_apart(worry_BC, state.accepted_BC & (belief.best_BC == state.ids_BC), cfg.spread)
    return accept_by_entropy(torch.where(may_BC, worry_BC, worry_BC + BEHIND), cfg.entropy_bound, least_B) & may_BC


def spread_apart(worry_BC: Tensor, kept_BC: Tensor, spread: int) -> Tensor:
    """Who may be accepted, bool_BC: what was and still is believed, the sure, and of the rest the surest around."""
    open_BC = torch.where(kept_BC, torch.inf, worry_BC)
    least_BC = -F.max_pool1d(-open_BC[:, None], 2 * spread - 1, stride=1, padding=spread - 1)[:, 0]
    return kept_BC | (worry_BC < SURE) | (open_BC == least_BC)


def count_required(state: Canvas, cfg: SamplerConfig) -> Tensor | None:
    """How many positions must be accepted at this step, least_B, or None when the bound alone decides.

    With a quota, what was refused last time is shared out over the steps left: 250 open positions and 10 steps to go
    ask for 25 more than last time. At the last step that is everything.
    """
    left = cfg.max_steps - state.step
    if cfg.quota:
        had_B = state.accepted_BC.sum(dim=-1)
        return had_B + -(-(state.ids_BC.shape[1] - had_B) // left)
    if cfg.accept_at_end and left == 1:
        return torch.full_like(state.steps_B, state.ids_BC.shape[1])
    return None


def settled(
    belief: Prediction, state: Canvas, cfg: SamplerConfig, constraints: CanvasConstraints | None
) -> tuple[Tensor, Tensor]:
    """Whether each row is stable and confident, and how long its argmax has stayed the same.

    Confidence is the mean entropy of the positions that are the model's to decide; pins have none of their own.
    """
    same_B = (belief.best_BC == state.best_BC).all(dim=-1) if state.step > 0 else torch.zeros_like(state.settled_B)
    unchanged_B = torch.where(same_B, state.unchanged_B + 1, 0)
    mean_B = belief.entropy_BC.mean(dim=-1)
    if constraints is not None:
        open_B = (~constraints.pinned_BC).sum(dim=-1).clamp(min=1)
        mean_B = belief.entropy_BC.sum(dim=-1) / open_B
    return (unchanged_B >= cfg.stability_threshold) & (mean_B < cfg.confidence_threshold), unchanged_B


def step(
    logits_BCV: Tensor, state: Canvas, cfg: SamplerConfig, draws: Draws, constraints: CanvasConstraints | None = None
) -> tuple[Canvas, Tensor]:
    """The next canvas, and the temperature-shaped logits that self-conditioning feeds back. Frozen rows stay as they are."""
    shaped_BCV = constraints.mask_logits(logits_BCV) if constraints is not None else logits_BCV
    shaped_BCV, matching_BC = shaped_BCV / temperature(state.step, cfg), None
    if constraints is not None:
        shaped_BCV, matching_BC = constraints.apply_automata(shaped_BCV)
    length, now = state.ids_BC.shape[1], state.step + 1
    belief = argmax_entropy_sample(shaped_BCV, draws.uniform(now, length))
    if matching_BC is not None:
        belief = belief._replace(best_BC=matching_BC)
    accepted_BC = select_accepted(belief, state, cfg)
    noise_BC = draws.noise(now, length, logits_BCV.shape[-1])
    if constraints is not None:
        accepted_BC = accepted_BC | constraints.pinned_BC
    done_B, unchanged_B = settled(belief, state, cfg, constraints)
    moved = Canvas(
        ids_BC=torch.where(accepted_BC, belief.sampled_BC, noise_BC),
        best_BC=belief.best_BC,
        entropy_BC=belief.entropy_BC,
        accepted_BC=accepted_BC,
        unchanged_B=unchanged_B,
        steps_B=state.steps_B + 1,
        settled_B=done_B,
        skipped_B=state.skipped_B,
        step=now,
    )
    return _freeze(state, moved), shaped_BCV


def _freeze(old: Canvas, new: Canvas) -> Canvas:
    """The new canvas, except in rows that were frozen before it."""
    frozen_B, kept = old.frozen_B, {}
    if not frozen_B.any():
        return new
    for field in fields(Canvas):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if isinstance(after, Tensor):
            kept[field.name] = torch.where(frozen_B if after.dim() == 1 else frozen_B[:, None], before, after)
    return replace(new, **kept)


def apply_constraints(state: Canvas, constraints: CanvasConstraints, draws: Draws, vocab_size: int) -> Canvas:
    """A page between two steps under new constraints: what disobeys them is pinned, or is noise again.

    A page whose draft obeys is as settled as it was; else it has to settle anew.
    """
    noise_BC = draws.noise(state.step, state.ids_BC.shape[1], vocab_size)
    disobeyed_BC, again_B = constraints.find_violations(state.ids_BC), constraints.find_violations(state.best_BC).any(dim=-1)
    return replace(
        state,
        ids_BC=constraints.apply_pins(torch.where(disobeyed_BC, noise_BC, state.ids_BC)),
        best_BC=constraints.apply_pins(state.best_BC),
        accepted_BC=state.accepted_BC & ~disobeyed_BC | constraints.pinned_BC,
        unchanged_B=torch.where(again_B, 0, state.unchanged_B),
        settled_B=state.settled_B & ~again_B,
    )


def unsettle(state: Canvas) -> Canvas:
    """The same page, which has to settle anew."""
    return replace(state, unchanged_B=torch.zeros_like(state.unchanged_B), settled_B=torch.zeros_like(state.settled_B))


def is_finished(state: Canvas, cfg: SamplerConfig) -> bool:
    """Whether another step would change nothing, or is not allowed."""
    return state.step >= cfg.max_steps or bool(state.frozen_B.all())


class CommitResult(NamedTuple):
    """A canvas as tokens."""

    ids_BC: Tensor  # padding behind the first stop token
    lengths_B: Tensor  # tokens up to and with the stop token; 0 where the text had ended before
    ended_B: Tensor  # rows whose text has ended by now


def commit(state: Canvas, cfg: SamplerConfig) -> CommitResult:
    """What becomes of a page: the argmax of the last logits, not the last sample.

    A page that never settled still carries noise wherever the last step refused a token.
    """
    stops = torch.tensor(cfg.eos_token_ids, dtype=torch.long, device=state.best_BC.device)
    is_stop_BC = torch.isin(state.best_BC, stops)
    text_BC = (is_stop_BC.cumsum(dim=-1) - is_stop_BC.long() == 0) & ~state.skipped_B[:, None]
    ids_BC = torch.where(text_BC, state.best_BC, cfg.pad_token_id)
    return CommitResult(ids_BC, text_BC.sum(dim=-1), is_stop_BC.any(dim=-1) | state.skipped_B)
