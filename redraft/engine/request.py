"""Request: what a caller wants generated, and how far its generation is. A request knows nothing of other requests.

    WAITING -> PREFILLING -> DENOISING -> COMMITTING -> DENOISING -> ... -> FINISHED
                         \\-> REPLAYING -> COMMITTING -> REPLAYING or DENOISING
    checked mode: DENOISING -> VERIFYING -> COMMITTING -> DENOISING -> ...; exact mode: PREFILLING -> VERIFYING
    from everywhere -> CANCELLED or FAILED

Shapes: one row, C canvas positions, V vocabulary, D model size.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.constraints.constraints import CanvasConstraints, Constraints, build_canvas_constraints
from redraft.diffusion import rng, sampler
from redraft.diffusion.generate import (
    Committed,
    Draft,
    Event,
    Finished,
    StatsCounter,
    find_chunk_end,
    images_inside,
    make_draft,
)
from redraft.diffusion.verified import OtherVerifier, Round, Verdict, Verification, make_checked_draft
from redraft.engine.errors import Failure
from redraft.engine.replay import ReplayPlan
from redraft.kernels import TopProbs, compute_top_probs
from redraft.model.kv_cache import KVCache
from redraft.model.lora import Adapter

if TYPE_CHECKING:  # text-only use does not load it
    from redraft.model.vision import ImageSpan

LOG = logging.getLogger("redraft.engine")
MIN_STEP_TOKENS = 32  # a forward of few tokens reads all weights and costs about as much as one of 32


class StopEvent(threading.Event):
    """A stop event that also names the client who waits. Clients share the engine evenly; "" is the client of a program."""

    def __init__(self, client: str = "") -> None:
        super().__init__()
        self.client = client


def client_of(stop: threading.Event | None) -> str:
    """The client's name; "" for a plain event and for None."""
    return stop.client if isinstance(stop, StopEvent) else ""


class RequestStatus(Enum):
    """What the engine does next with a request."""

    WAITING = "waiting"  # for a slot and for memory
    PREFILLING = "prefilling"  # a part of the prompt is not in the KV cache yet
    REPLAYING = "replaying"  # the next canvas is taken from the replay
    DENOISING = "denoising"  # a canvas is in work, or is started at the next step
    VERIFYING = "verifying"  # checked and exact mode: drafts are verified, one round a step
    COMMITTING = "committing"  # a committed canvas is not in the KV cache yet
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether no more events come."""
        return self in (RequestStatus.FINISHED, RequestStatus.CANCELLED, RequestStatus.FAILED)


@dataclass(eq=False)
class Request:
    """One prompt and its generation. `Engine.add` makes it; only the engine changes it."""

    number: int  # order of arrival
    prompt: tuple[int, ...]
    prefix_key: tuple[int, ...]  # the prompt as the prefix cache knows it: see `make_prefix_key`
    cfg: SamplerConfig
    seed: int
    constraints: Constraints  # before any intervention
    plan: ReplayPlan
    counter: StatsCounter
    first_canvas_1C: Tensor | None = None  # the user's tokens instead of noise on the first canvas
    deadline: float | None = None  # on the clock of time.monotonic()
    stop: threading.Event | None = None  # the caller sets it to cancel the request
    candidates: int = 0  # tokens per position whose probabilities every draft shows
    verification: Verification | None = None  # in checked and exact mode
    other_verifier: OtherVerifier | None = None  # if another model verifies
    images: Sequence["ImageSpan"] = ()  # those of the prompt, in order
    adapter: Adapter | None = None  # that its KV cache has, so that every forward goes through it
    nbytes: int = 0  # of its KV cache, which it needs to run
    spare_slots: int = 0  # of its KV cache, for drafts that are written before they are verified

    status: RequestStatus = RequestStatus.WAITING
    cancel_requested: bool = False  # the engine's thread cancels the request at its next step
    failure: Failure | None = None  # why the status is FAILED
    events: deque[Event] | None = None  # events that its stream has not read yet; None without a stream
    has_moved: threading.Condition = field(default_factory=threading.Condition)  # notified after events and at its end

    cache: KVCache | None = None
    context: list[int] = field(default_factory=list)  # the tokens that the cache holds, those of images as in prefix_key
    prefilled: int = 0  # how many tokens of the prompt the cache holds
    block: int = 0  # index of the canvas in work
    canvas: sampler.Canvas | None = None  # the canvas in work
    soft_1CD: Tensor | None = None  # self-conditioning: the soft embedding of the last step's probabilities
    is_canvas_done: bool = False  # the canvas has settled or has used all its steps
    committed: sampler.CommitResult | None = None  # a committed canvas that is not in the cache yet
    draws: rng.Draws | None = None  # the random numbers of the canvas in work
    canvas_constraints: CanvasConstraints | None = None  # the constraints on the canvas in work
    automaton_state: int = 0  # the pattern's state before the canvas in work
    top_probs: TopProbs | None = None  # of the last step, when `candidates` are shown

    @property
    def is_over(self) -> bool:
        """Whether it is finished, cancelled or failed."""
        return self.status.is_over

    @property
    def is_unwanted(self) -> bool:
        """Whether its caller has cancelled it."""
        return self.cancel_requested or (self.stop is not None and self.stop.is_set())

    @property
    def is_late(self) -> bool:
        """Its deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def must_end(self) -> bool:
        """It ends before its next step: its caller has cancelled it, or it is late and has nothing to commit."""
        return self.is_unwanted or (self.is_late and self.status in (RequestStatus.WAITING, RequestStatus.PREFILLING))

    @cached_property
    def client(self) -> str:
        """The client that asked for it."""
        return client_of(self.stop)

    @property
    def tokens_per_step(self) -> int:
        """What a denoising step costs, in tokens through the model. The sums of an automaton count as a second pass."""
        return self.tokens_per_encode * (2 if self.constraints.automaton is not None else 1)

    @property
    def tokens_per_encode(self) -> int:
        """What it costs to encode a committed canvas, in tokens through the model."""
        return max(self.cfg.canvas_length, MIN_STEP_TOKENS)

    @property
    def capacity(self) -> int:
        """Tokens its KV cache must hold: the prompt and all canvases but the last, which is encoded only to be verified."""
        if self.verification is not None:
            return len(self.prompt) + self.cfg.max_answer + self.spare_slots
        return len(self.prompt) + (self.cfg.max_canvases - 1) * self.cfg.canvas_length

    def has_unread(self, count: int | None) -> bool:
        """Whether its stream has left this many events unread. None means any number may be."""
        return count is not None and self.events is not None and len(self.events) >= count

    def is_paused(self, max_unread: int | None) -> bool:
        """It makes no steps until its stream is read, or until its deadline."""
        return self.has_unread(max_unread) and not self.is_late

    @property
    def wanted_prefix(self) -> tuple[int, ...]:
        """The tokens whose KV cache it takes over from the prefix cache.

        The first round of a verified request encodes the last token of the prompt itself.
        """
        return self.prefix_key if self.verification is None else self.prefix_key[:-1]

    @property
    def has_intervention_now(self) -> bool:
        """Whether the constraints change after the step that was just made."""
        assert self.canvas is not None
        return self.plan.has_intervention_at(self.block, self.canvas.step)

    def start(self, cache: KVCache, context: list[int]) -> None:
        """The request was admitted. Its cache already holds `context`, a prefix of the prompt."""
        self.cache = cache
        self.context = []
        self.counter.reused[0] = len(context)
        self.add_prefilled(len(context))

    def next_chunk(self, length: int) -> tuple[tuple[int, ...], list["ImageSpan"]]:
        """About `length` tokens of the prompt that are not in the cache yet, and their images, none of which is divided."""
        begin = self.prefilled
        if not self.images:
            return self.prompt[begin : begin + length], []
        end = find_chunk_end(begin, len(self.prompt), length, self.images)
        return self.prompt[begin:end], images_inside(self.images, begin, end)

    @property
    def next_image(self) -> int:
        """Where the next image begins that is not in the cache yet, or the end of the prompt."""
        return next((span.start for span in self.images if span.start >= self.prefilled), len(self.prompt))

    def add_prefilled(self, count: int) -> None:
        """The next tokens of the prompt are in the cache."""
        self.context += self.prefix_key[self.prefilled : self.prefilled + count]
        self.prefilled += count
        if self.prefilled < len(self.prompt):
            self.status = RequestStatus.PREFILLING
            return
        self.counter.mark_prefilled()
        self.status = self._status_at_canvas_start()

    def replay_canvas(self, device: torch.device) -> list[Event]:
        """Commits the next canvas of the replay. It is encoded like any other and costs no denoising step."""
        ids_1C = torch.tensor([self.plan.canvas(self.block)], device=device)
        canvas = sampler.start(ids_1C)
        self.counter.add_replayed(ids_1C)
        self._set_committed(sampler.commit(canvas, self.cfg))
        return [Committed(self.block, ids_1C, canvas.entropy_BC, torch.ones_like(canvas.settled_B), canvas.steps_B)]

    def take_committed(self) -> Tensor:
        """The committed canvas, ids_1C, which counts as context from now on; the next canvas begins."""
        assert self.committed is not None
        ids_1C = self.committed.ids_BC
        self.committed = None
        self.context += ids_1C[0].tolist()
        self.block += 1
        self.status = self._status_at_canvas_start()
        return ids_1C

    def start_canvas(self, vocab_size: int, device: torch.device) -> None:
        """A new canvas: noise, or the user's own tokens."""
        length = self.cfg.canvas_length
        self.draws = rng.draws([self.seed], self.block, device)
        self.canvas_constraints = self._constraints_after(0, vocab_size, device)
        if self.first_canvas_1C is not None and self.block == 0:
            ids_1C = self.first_canvas_1C.to(device)
        else:
            ids_1C = self.draws.noise(0, length, vocab_size)
        ended_1 = torch.zeros(1, dtype=torch.bool, device=device)
        self.canvas = sampler.start(ids_1C, self.canvas_constraints, ended_1)
        self.soft_1CD = None
        self.is_canvas_done = False

    def apply_logits(self, logits_1CV: Tensor) -> Tensor:
        """One sampler step. Returns the temperature-shaped logits, from which the caller makes the soft embedding."""
        assert self.canvas is not None
        assert self.draws is not None
        canvas, shaped_1CV = sampler.step(logits_1CV, self.canvas, self.cfg, self.draws, self.canvas_constraints)
        self.canvas = canvas
        self.top_probs = None
        if self.candidates:
            self.top_probs = compute_top_probs(shaped_1CV, canvas.ids_BC, canvas.best_BC, self.candidates)
        self.is_canvas_done = sampler.is_finished(canvas, self.cfg) and not self.has_intervention_now
        self._check_replay()
        return shaped_1CV

    def apply_intervention(self, vocab_size: int, device: torch.device) -> None:
        """Puts the canvas under the constraints that hold from this step on."""
        assert self.canvas is not None
        assert self.draws is not None
        self.canvas_constraints = self._constraints_after(self.canvas.step, vocab_size, device)
        if self.canvas_constraints is not None:
            self.canvas = sampler.apply_constraints(self.canvas, self.canvas_constraints, self.draws, vocab_size)
            draft = self.canvas.best_BC[0].tolist()
            automata = [automaton for automaton in self.canvas_constraints.automata if automaton is not None]
            if not all(automaton.accepts(draft) for automaton in automata):
                self.canvas = sampler.unsettle(self.canvas)
        self.is_canvas_done = sampler.is_finished(self.canvas, self.cfg)
        self._check_replay()

    @property
    def draft(self) -> Draft:
        """The canvas in work, as an event."""
        assert self.canvas is not None
        draft = make_draft(self.block, self.canvas, self.cfg, self.canvas_constraints)
        return replace(draft, top_probs=self.top_probs)

    def commit(self, *, is_late: bool) -> tuple[list[Event], bool]:
        """Commits the canvas as it is. Returns the events and whether this was the last canvas.

        When another canvas follows, the committed one is encoded at the next step. After a deadline none follows.
        """
        assert self.canvas is not None
        assert self.verification is None, "a verified answer ends in `verified_events`"
        canvas = self.canvas
        committed = sampler.commit(canvas, self.cfg)
        has_ended = bool(committed.ended_B[0])
        was_done = self.is_canvas_done
        fills_answer = self.block + 1 == self.cfg.max_canvases
        is_last = fills_answer or has_ended or is_late
        self.counter.add_canvas(canvas, committed, is_last)
        settled_1 = canvas.settled_B | canvas.skipped_B
        events: list[Event] = [Committed(self.block, committed.ids_BC, canvas.entropy_BC, settled_1, canvas.steps_B)]
        self.canvas = None
        self.soft_1CD = None
        if not is_last:
            self._set_committed(committed)
            return events, False
        finished = self.counter.finish(committed.ended_B)
        if is_late and not has_ended and not (was_done and fills_answer):
            finished = replace(finished, reasons=("deadline",))
        return [*events, finished], True

    def finish_empty(self) -> Finished:
        """A deadline has passed while the request waited or was prefilled: the answer has no tokens."""
        self.counter.canvases.append(torch.empty(1, 0, dtype=torch.long))
        self.counter.logprob = None if self.verification is None else 0.0
        return replace(self.counter.finish(torch.zeros(1, dtype=torch.bool)), reasons=("deadline",))

    def start_verifying(self) -> None:
        """Checked mode: the canvas is drafted, and its tokens are verified from now on."""
        assert self.verification is not None
        assert self.canvas is not None
        self.counter.rows[0]["steps"] += self.canvas.step
        self.verification.set_canvas(self.canvas.best_BC[0].tolist())
        self.canvas = None
        self.soft_1CD = None
        self.status = RequestStatus.VERIFYING

    def begin_round(self) -> Round:
        """What the next forward verifies. The cache is cut back to the tokens before the first of them."""
        assert self.verification is not None
        assert self.cache is not None
        cached = self.verification.cached
        self.cache.rewind([cached])
        del self.context[cached:]
        return self.verification.next_round()

    def end_round(self, work: Round, verdict: Verdict, fresh: list[int]) -> None:
        """Takes over a round. The cache keeps the verified tokens but the last; its clean tokens were all appended."""
        assert self.verification is not None
        assert self.cache is not None
        kept = work.clean[: verdict.accepted + 1]
        self.context += kept
        self.cache.rewind([len(self.context)])
        self.verification.apply(work, verdict, fresh)

    def run_other_round(self) -> int:
        """A round in which another model verifies. Returns how many tokens went through both models."""
        state = self.verification
        worker = self.other_verifier
        assert state is not None
        assert worker is not None
        assert self.cache is not None
        if worker.cache is None:
            worker.attach(self.cache, self.prompt, self.cfg)
        work = state.next_round()
        verdict, fresh = worker.run(state, work)
        state.apply(work, verdict, fresh)
        if state.is_canvas_done and not state.is_finished:
            worker.catch_up(state)
        self.context = [*self.prefix_key, *state.tokens][: self.cache.lengths[0]]
        return len(work.clean) + work.canvas_length

    def finish_late(self, device: torch.device) -> tuple[list[Event], bool]:
        """A deadline has passed while a canvas was drafted: the answer ends with the tokens that were verified before.

        If there are none, the draft is the answer.
        """
        assert self.verification is not None
        self.start_verifying()
        if not self.verification.tokens:
            self.verification.take_drafts()
        return self.verified_events(is_late=True, device=device)

    def verified_events(self, *, is_late: bool, device: torch.device) -> tuple[list[Event], bool]:
        """The events after a round, and whether it was the last. A deadline ends the answer at the last verified token."""
        state = self.verification
        assert state is not None
        if self.cfg.check == "checked":
            events: list[Event] = [make_checked_draft(state, self.block, device)]
            if (state.is_canvas_done or is_late) and len(state.tokens) > state.block_begin:
                events.append(state.committed(self.block, state.block_begin))
        else:
            events = [state.committed(self.block, state.round_begin)]
        if not state.is_finished and not is_late:
            if state.is_canvas_done:
                self._encode_last_token(device)
            return events, False
        self.counter.add_verified(state.tokens, sum(state.logprobs), state.counts, device)
        finished = self.counter.finish(torch.tensor([state.has_ended], device=device))
        if not state.is_finished:
            finished = replace(finished, reasons=("deadline",))
        return [*events, finished], True

    def _encode_last_token(self, device: torch.device) -> None:
        """Checked mode: before the next canvas is drafted, the last verified token must be in the cache."""
        assert self.verification is not None
        ids_1C = torch.tensor([[self.verification.last]], device=device)
        false_1 = torch.zeros(1, dtype=torch.bool, device=device)
        self.committed = sampler.CommitResult(ids_1C, torch.ones_like(ids_1C[0]), false_1)
        self.automaton_state = self.verification.automaton_state
        self.counter.rows[0]["commits"] += 1
        self.status = RequestStatus.COMMITTING

    def fail(self, failure: Failure) -> None:
        """Ends the request. The engine releases its memory at the end of the step."""
        self.failure = failure
        self.end(RequestStatus.FAILED)

    def end(self, status: RequestStatus) -> None:
        """No event comes any more. The thread that reads its stream sees that at once."""
        self.status = status
        self.wake_reader()

    def wake_reader(self) -> None:
        """Wakes the thread that reads its stream, and no thread of another request."""
        with self.has_moved:
            self.has_moved.notify_all()

    def release(self) -> None:
        """Drops all tensors but those of events that its stream has not read yet."""
        self.cache = None
        self.canvas = None
        self.soft_1CD = None
        self.committed = None
        self.other_verifier = None
        self.first_canvas_1C = None
        self.draws = None
        self.canvas_constraints = None
        self.top_probs = None
        self.images = ()
        self.counter.canvases.clear()

    def _set_committed(self, committed: sampler.CommitResult) -> None:
        self.committed = committed
        ids = committed.ids_BC[0].tolist()
        self.automaton_state = self.constraints.advance(self.automaton_state, ids, self.cfg.canvas_length)
        self.status = RequestStatus.COMMITTING

    def _status_at_canvas_start(self) -> RequestStatus:
        if self.cfg.check == "exact":
            return RequestStatus.VERIFYING
        return RequestStatus.REPLAYING if self.plan.has_canvas(self.block) else RequestStatus.DENOISING

    def _constraints_after(self, step: int, vocab_size: int, device: torch.device) -> CanvasConstraints | None:
        """The constraints on the canvas in work after this step."""
        length = self.cfg.canvas_length
        constraints = self.plan.constraints_at(self.block, step)
        automaton = constraints.canvas_automaton(self.automaton_state, self.block * length, length, self.cfg.max_new_tokens)
        return build_canvas_constraints(
            [constraints], self.block, length, vocab_size, self.cfg.eos_token_ids, device, [automaton]
        )

    def _check_replay(self) -> None:
        """When the canvas is done: no intervention may lie ahead that the run cannot reach any more."""
        if not self.is_canvas_done or not self.plan.has_interventions:
            return
        assert self.canvas is not None
        has_ended = bool(sampler.commit(self.canvas, self.cfg).ended_B[0])
        is_last = self.block + 1 == self.cfg.max_canvases or has_ended
        self.plan.check_reached(self.block, self.canvas.step, is_last=is_last)


@contextmanager
def contain_failure(*requests: Request) -> Iterator[None]:
    """An exception inside ends these requests and no others. A fault of the engine's own is logged with its trace."""
    try:
        yield
    except Exception as error:
        failure = Failure.from_exception(error)
        if failure.is_engine_fault:
            LOG.exception("the engine failed; this ends the requests %s", [request.number for request in requests])
        for request in requests:
            if not request.is_over:
                request.fail(failure)
