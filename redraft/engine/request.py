"""One request: what was asked, and how far it is. Knows nothing of the other requests.

    waiting -> [admitted: it has a cache] -> reading its prompt -> redrafting a page -> committing it -> ... -> over

Shapes: one row, C canvas positions, D model size.
"""

import threading
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.constraints.constraints import CanvasConstraints, ConstraintEdit, Constraints, build_canvas_constraints
from redraft.diffusion import rng, sampler
from redraft.diffusion.generate import Committed, Draft, Event, StatsCounter, make_draft
from redraft.kernels import TopProbs, compute_top_probs
from redraft.model.kv_cache import KVCache


class Stopped(RuntimeError):
    """Whoever asked wants no more of it."""

    def __init__(self) -> None:
        super().__init__("this request was stopped: nobody waits for it any more, or a newer one has taken its place")


class ReplayError(ValueError):
    """A turn that the run never came to."""


@dataclass(frozen=True)
class Intervention:
    """What else is fixed from behind this step of this page on. Step 0 is before the first."""

    block: int
    step: int
    edit: ConstraintEdit


@dataclass(frozen=True)
class Replay:
    """Where a run is taken up that was under way, and how it was steered: pages it had committed, and turns in order.

    Chance is the seed's, so the steps up to a turn are made again as they were, and no state has to be kept for it.
    """

    canvases: tuple[tuple[int, ...], ...] = ()
    interventions: tuple[Intervention, ...] = ()

    def check(self, cfg: SamplerConfig, vocab_size: int, constraints: Constraints) -> tuple[Constraints, ...]:
        """What holds before the first turn, where `constraints` did, and behind each. Refuses what cannot have been."""
        if len(self.canvases) >= cfg.max_canvases:
            raise ValueError(f"{len(self.canvases)} pages are there already, the answer has {cfg.max_canvases} at most")
        for number, page in enumerate(self.canvases):
            if len(page) != cfg.canvas_length:
                raise ValueError(f"page {number} has {len(page)} tokens, the canvas has {cfg.canvas_length}")
            if wrong := [token for token in page if not 0 <= token < vocab_size]:
                raise ValueError(f"page {number} has the token {wrong[0]}, the vocabulary ends at {vocab_size - 1}")
            if set(page) & set(cfg.eos_token_ids):
                raise ValueError(f"page {number} ends the text: nothing comes behind it")
        self.check_turns(cfg.max_canvases, cfg.max_steps)
        held = tuple(accumulate(self.interventions, lambda before, turn: before.apply_edit(turn.edit), initial=constraints))
        for one in held[1:]:
            one.validate(vocab_size, cfg.max_new_tokens, cfg.eos_token_ids)
        state = constraints.initial_state
        for number, page in enumerate(self.canvases):
            held[self.taken(number, cfg.max_steps)].check_canvas(page, number * cfg.canvas_length)
            state = constraints.advance(state, page, cfg.canvas_length)
        return held

    def taken(self, block: int, step: int) -> int:
        """How many turns are behind this step of this page."""
        return sum((turn.block, turn.step) <= (block, step) for turn in self.interventions)

    def check_turns(self, pages: int, steps: int) -> None:
        """Refuses turns at what none of so many pages of so many steps at most has, and what is not in order."""
        before = (-1, 0)
        for turn in self.interventions:
            if not 0 <= turn.block < pages or not 0 <= turn.step < steps:
                last = f"page {pages - 1} and step {steps - 1}"
                raise ValueError(f"a turn at page {turn.block}, step {turn.step}: the last that can be taken is at {last}")
            if (turn.block, turn.step) <= before:
                raise ValueError(f"turns come one after another, got one at page {turn.block}, step {turn.step} too late")
            before = (turn.block, turn.step)


@dataclass(eq=False)
class Request:
    """A prompt on its way. Made by `Engine.add`; the engine moves it."""

    number: int
    prompt: tuple[int, ...]
    cfg: SamplerConfig
    seed: int
    constraints: Constraints
    first_1C: Tensor | None  # the user's own first canvas
    deadline: float | None  # of time.monotonic()
    counter: StatsCounter
    replay: Replay = Replay()
    held: tuple[Constraints, ...] = ()  # its constraints at first, and behind each turn
    candidates: int = 0  # how many of the likeliest tokens are shown at every position, with their probabilities
    top_probs: TopProbs | None = None  # these, of the last step
    cache: KVCache | None = None
    read: int = 0  # tokens of the prompt that the cache holds
    block: int = 0
    state: sampler.Canvas | None = None  # the page in work
    soft_1CD: Tensor | None = None  # what its last step believed
    page: sampler.CommitResult | None = None  # committed, not yet read into the cache
    done: bool = False  # another step of the page would change nothing, or is not allowed
    over: bool = False  # finished, cancelled or refused: nothing more comes of it
    told: bool = False  # and all that came of it is in its inbox
    context: list[int] = field(default_factory=list)  # the tokens in the cache
    matched: int = 0  # where its pattern is
    draws: rng.Draws | None = None
    fixed: CanvasConstraints | None = None
    stop: threading.Event | None = None  # set by whoever wants no more of it
    dropped: bool = False  # cancelled while a step ran
    inbox: deque[Event] | None = None  # events for the one who streams it
    error: BaseException | None = None  # the machine's fault that ended it

    @property
    def unwanted(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.dropped or (self.stop is not None and self.stop.is_set())

    @property
    def capacity(self) -> int:
        """Tokens its cache must hold: the prompt and all pages but the last."""
        return len(self.prompt) + (self.cfg.max_canvases - 1) * self.cfg.canvas_length

    @property
    def reading(self) -> bool:
        """Whether a part of the prompt is still to be read."""
        return self.read < len(self.prompt)

    @property
    def retold(self) -> bool:
        """Whether its next page is one that it had committed before."""
        return self.block < len(self.replay.canvases)

    @property
    def turning(self) -> bool:
        """Whether other constraints hold from here on."""
        return any((turn.block, turn.step) == (self.block, self.state.step) for turn in self.replay.interventions)

    def retell(self, device: torch.device) -> list[Event]:
        """A page that it had committed before: it is read, and costs nothing else."""
        ids_1C = torch.tensor([self.replay.canvases[self.block]], device=device)
        state = sampler.start(ids_1C)
        self.counter.add_replayed(ids_1C)
        self.page = sampler.commit(state, self.cfg)
        self.matched = self.constraints.advance(self.matched, ids_1C[0].tolist(), self.cfg.canvas_length)
        return [Committed(self.block, ids_1C, state.entropy_BC, torch.ones_like(state.settled_B), state.steps_B)]

    def _ruled(self, step: int, vocab_size: int, device: torch.device) -> CanvasConstraints | None:
        """The constraints on its page behind this step."""
        found, length = self.held[self.replay.taken(self.block, step)], self.cfg.canvas_length
        pattern = found.canvas_automaton(self.matched, self.block * length, length, self.cfg.max_new_tokens)
        known = (self.block, length, vocab_size, self.cfg.eos_token_ids, device)
        return build_canvas_constraints([found], *known, [pattern])

    def start_page(self, vocab_size: int, device: torch.device) -> None:
        """A new canvas: noise, or the user's own tokens."""
        length = self.cfg.canvas_length
        self.draws = rng.draws([self.seed], self.block, device)
        self.fixed = self._ruled(0, vocab_size, device)
        given = self.first_1C is not None and self.block == 0
        canvas_1C = self.first_1C.to(device) if given else self.draws.noise(0, length, vocab_size)
        ended_B = torch.zeros(1, dtype=torch.bool, device=device)
        self.state, self.soft_1CD, self.done = sampler.start(canvas_1C, self.fixed, ended_B), None, False

    def settle(self, logits_1CV: Tensor) -> Tensor:
        """One step of its page; what it believes comes back, for whoever makes it an embedding."""
        self.state, shaped_1CV = sampler.step(logits_1CV, self.state, self.cfg, self.draws, self.fixed)
        self.top_probs = (
            compute_top_probs(shaped_1CV, self.state.ids_BC, self.state.best_BC, self.candidates)
            if self.candidates
            else None
        )
        self.done = sampler.is_finished(self.state, self.cfg) and not self.turning
        if self.done and self.replay.interventions:
            self._check_course()
        return shaped_1CV

    def _check_course(self) -> None:
        """A page is done: no turn may lie ahead on it, nor on pages that will not be."""
        last = self.block + 1 == self.cfg.max_canvases or bool(sampler.commit(self.state, self.cfg).ended_B[0])
        for turn in self.replay.interventions:
            if turn.block == self.block and turn.step > self.state.step:
                raise ReplayError(f"its page stood still at step {self.state.step}: it has no step {turn.step} to turn at")
            if turn.block > self.block and last:
                raise ReplayError(f"the text ended on page {self.block}: there is no page {turn.block} to turn at")

    def turn(self, vocab_size: int, device: torch.device) -> None:
        """The constraints that hold from here on, on the page as it is."""
        self.fixed = self._ruled(self.state.step, vocab_size, device)
        if self.fixed is not None:
            self.state = sampler.apply_constraints(self.state, self.fixed, self.draws, vocab_size)
            if not all(one.accepts(self.state.best_BC[0].tolist()) for one in self.fixed.automata):
                self.state = sampler.unsettle(self.state)
        self.done = sampler.is_finished(self.state, self.cfg)
        if self.done and self.replay.interventions:
            self._check_course()

    @property
    def draft(self) -> Draft:
        """The page as it is now."""
        return replace(make_draft(self.block, self.state, self.cfg, self.fixed), top_probs=self.top_probs)

    def commit(self, late: bool) -> list[Event]:
        """The page leaves as it is: emitted now, read into the cache later, if anything is to come behind it."""
        state, page = self.state, sampler.commit(self.state, self.cfg)
        ended, done = bool(page.ended_B[0]), self.done
        last = self.block + 1 == self.cfg.max_canvases or ended or late
        self.counter.add_canvas(state, page, last)
        settled_B = state.settled_B | state.skipped_B
        events: list[Event] = [Committed(self.block, page.ids_BC, state.entropy_BC, settled_B, state.steps_B)]
        self.state, self.soft_1CD = None, None
        if not last:
            self.page = page
            self.matched = self.constraints.advance(self.matched, page.ids_BC[0].tolist(), self.cfg.canvas_length)
            return events
        self.over, end = True, self.counter.finish(page.ended_B)
        cut = late and not ended and not (done and self.block + 1 == self.cfg.max_canvases)
        return [*events, replace(end, reasons=("deadline",)) if cut else end]
