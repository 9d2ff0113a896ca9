"""Engine: runs many requests over one model, one step at a time.

    schedule: admit waiting requests, in order, within the memory budget
    run:      prefill chunks of prompts, encode committed canvases, denoise all canvases
    settle:   run each request's sampler, emit events, commit canvases that are done

The tokens of a request are those of `generate`, regardless of the other requests. Methods may be called from any thread; a
lock makes steps one after another. The thread that reads a stream makes the steps, unless `with engine.run_in_background():`
gives the engine a thread that makes all steps.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redraft.config import EngineConfig, SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion.draft_policy import DraftPolicy
from redraft.diffusion.generate import (
    Event,
    Finished,
    StatsCounter,
    check_images,
    check_inputs,
    check_steering,
    require_drafter,
)
from redraft.diffusion.verified import OtherVerifier, Verification, check_verified_images
from redraft.engine.errors import MEMORY_ADVICE, USER_ERRORS, Failure, RequestError
from redraft.engine.make_runner import make_runner
from redraft.engine.memory import measure_budget
from redraft.engine.prefix_cache import PrefixCache, make_prefix_key
from redraft.engine.replay import Replay
from redraft.engine.request import LOG, MIN_STEP_TOKENS, Request, RequestStatus, contain_failure
from redraft.engine.scheduler import Reservation, Scheduler
from redraft.engine.stream import Stream
from redraft.engine.work_beside import POLL_SECONDS, WorkBeside
from redraft.kernels.backend import use_device
from redraft.kernels.threads import adapt_threads
from redraft.model.backbone import Backbone
from redraft.model.kv_cache import KVCache

if TYPE_CHECKING:  # text-only use does not load it
    from redraft.model.vision import ImageSpan

Emitted = list[tuple[Request, Event]]


class Engine(WorkBeside):
    """Runs requests over one model."""

    def __init__(self, model: Backbone, config: EngineConfig | None = None, verifier: Backbone | None = None) -> None:
        """Another model may be the `verifier` of checked and exact mode."""
        self.model = model
        self.verifier = verifier
        self.config = config or EngineConfig()
        if self.config.kv is not None:
            for each in (model, verifier) if verifier is not None else (model,):
                each.store_cache_in_fp8()
        self.runner = make_runner(model, self.config.prefill_chunk, self.config.prefill_chunk_alone)
        self.scheduler = Scheduler(
            self.config.max_running,
            self.config.cache_bytes or measure_budget(self.runner, self.config.max_running),
            PrefixCache(self.config.prefix_cache_entries),
        )
        self.fault = ""  # the engine's own failure in the last step, as text; empty when there was none
        self.memory_advice = MEMORY_ADVICE  # what a request that lacks memory tells the user
        self.has_thread = False  # whether a background thread makes the steps
        self.max_unread: int | None = None  # events a stream may leave unread before its request pauses; None: any number
        self._lock = threading.RLock()  # held during a step
        self._changed = threading.Condition()  # for the engine's thread and for work beside it; requests have their own

    def add(
        self,
        prompt: Sequence[int],
        cfg: SamplerConfig,
        *,
        seed: int,
        constraints: Constraints | None = None,
        first_canvas_1C: Tensor | None = None,
        seconds: float | None = None,
        stop: threading.Event | None = None,
        replay: Replay | None = None,
        candidates: int = 0,
        images: Sequence["ImageSpan"] = (),
    ) -> Request:
        """Adds a request to continue this prompt. A request that cannot be carried out is refused here.

        After `seconds` the canvas in work is committed as it is, and the request ends; while it waits or is prefilled, it
        ends with no tokens. Setting `stop` cancels the request. A `replay` repeats an earlier run up to some point. Drafts
        show the probabilities of the `candidates` most likely tokens of each position. `images` are those of the prompt, in
        order.
        """
        constraints = constraints or Constraints()
        replay = replay or Replay()
        try:
            require_drafter(self.model, cfg)
            check_inputs(self.model, [prompt], cfg, [seed], [constraints], first_canvas_1C)
            check_images([prompt], [images])
            plan = replay.plan(cfg, self.model.config.vocab_size, constraints)
            if cfg.check != "off":
                check_verified_images(prompt, images, self.verifier)
            if self.verifier is not None and cfg.check != "off":
                check_inputs(self.verifier, [prompt], cfg, [seed], [constraints], None)
            check_steering(cfg, constraints, is_steered=replay.is_steered, has_draft=first_canvas_1C is not None)
        except USER_ERRORS:
            raise
        except ValueError as error:
            raise RequestError(str(error)) from None
        if seconds is not None and not seconds > 0:
            raise RequestError(f"a deadline must be ahead, got {seconds!r} seconds: give a positive number")
        verification = None
        if cfg.check != "off":
            if cfg.draft_length + 2 > self.config.rewind:  # a round appends the drafts and the token before them
                raise RequestError(
                    f"draft_length is {cfg.draft_length}, but this engine can cut a KV cache back by {self.config.rewind} "
                    f"tokens only: lower draft_length to {max(0, self.config.rewind - 2)} or raise EngineConfig.rewind"
                )
            cfg = cfg.for_drafts
            verification = Verification.start(prompt, cfg, seed, constraints, self.model.config.vocab_size)
            verification.candidates = candidates
            if cfg.check == "exact" and cfg.draft_length and self.runner.token_cost and self.verifier is None:
                runner = self.runner
                policy = DraftPolicy(runner.token_cost, cfg.draft_length, runner.draft_speed, runner.may_draft)
                verification.policy = policy
        ids = tuple(prompt)
        request = Request(
            number=self.scheduler.next_number(),
            prompt=ids,
            prefix_key=make_prefix_key(ids, images),
            cfg=cfg,
            seed=seed,
            constraints=constraints,
            plan=plan,
            counter=StatsCounter(cfg, [seed], [len(prompt)], [constraints]),
            first_canvas_1C=first_canvas_1C,
            deadline=time.monotonic() + seconds if seconds is not None else None,
            stop=stop,
            candidates=candidates,
            verification=verification,
            other_verifier=OtherVerifier(self.model, self.verifier) if verification and self.verifier else None,
            images=tuple(images),
            adapter=self.adapter,
            spare_slots=self.runner.spare_slots(cfg) if verification and not self.verifier and not self.adapter else 0,
            events=deque() if self.has_thread else None,  # the thread may run it before anybody streams it
            automaton_state=constraints.initial_state,
        )
        request.nbytes = self._cache_bytes(request)
        self.scheduler.add(request)  # without the lock: the caller does not wait for the end of a step
        self.wake()
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request. Its KV cache goes to the prefix cache."""
        if self.has_thread:
            request.cancel_requested = True  # the thread cancels it at its next step
            self.notify()
            return
        with self._lock:
            self._cancel(request)

    def _cancel(self, request: Request) -> None:
        if not request.is_over:
            self._release(request)
            request.end(RequestStatus.CANCELLED)

    def notify(self) -> None:
        """Says that something has changed: work has arrived or left, memory was freed, a stop event was set."""
        self.scheduler.changes += 1
        self.wake()

    def wake(self) -> None:
        """Wakes the engine's thread, and the threads that wait for a turn or for memory."""
        with self._changed:
            self._changed.notify_all()

    def _step_for_memory(self, reservation: Reservation) -> bool:
        """Makes steps that free memory, in a thread that waits for it. Returns whether they may go on."""
        with self._lock:
            self._admit()
            self._release_failed()
            if not reservation.is_granted and self.scheduler.running:
                self._step_for_streams()
                return True
            return reservation.is_granted

    @contextmanager
    def run_in_background(self, max_unread: int | None = None) -> Iterator[None]:
        """Inside the block a thread of the engine makes all steps. At its end, requests that still run are cancelled.

        A request pauses while its stream has left `max_unread` events unread, so that a slow reader fills no memory.
        """
        if self.has_thread:
            raise RuntimeError("the engine runs in a thread already: leave the first run_in_background() block before")
        thread = threading.Thread(target=self._work, name="redraft-engine", daemon=True)
        self.has_thread = True
        self.max_unread = max_unread
        try:
            thread.start()
            yield
        finally:
            self.has_thread = False
            self.max_unread = None
            self.notify()
            if thread.ident is not None:
                thread.join()
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                self.cancel(request)
            self.notify()

    def _work(self) -> None:
        """The background thread."""
        while self.has_thread:
            try:
                with self._changed:
                    has_work = self._has_work()
                    if self.has_thread and not has_work:  # no notification comes with a deadline or a stop event
                        self._changed.wait(None if self.is_idle else POLL_SECONDS)
                if self.has_thread and has_work:
                    self._grant_turns()
                    self._step_for_streams()
                    self.wake()
            except BaseException as error:  # the thread must live: without it all streams would wait for ever
                self._fail_all(error)

    def _has_work(self) -> bool:
        """Whether a step would do something. A waiting request may have to wait until a reservation is released."""
        if self.is_idle and not self.scheduler.turns and not self.scheduler.reservations:
            return False
        running = list(self.scheduler.running)
        if any(not request.is_paused(self.max_unread) for request in running) or self.scheduler.can_admit:
            return True
        if self.scheduler.waiting_turns:
            return True
        return any(request.must_end for request in (*running, *list(self.scheduler.waiting)))

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self.scheduler.running and not self.scheduler.waiting

    @property
    def unused_cache_bytes(self) -> int:
        """What KV caches may still take of the budget. Waits for the end of a step."""
        with self._lock:
            return max(0, self.scheduler.budget - self.scheduler.used - self.scheduler.prefix_cache.nbytes)

    def stream(self, request: Request) -> Stream:
        """The events of one request from now on. The other requests run beside it."""
        if request.events is None:
            request.events = deque()
        return Stream(self, request)

    @torch.inference_mode()
    def step(self) -> Emitted:
        """One step of every running request. Returns the events and their requests.

        A failure that belongs to some requests ends these requests, and their streams raise it. Any other failure, and
        Ctrl-C, ends all requests and is raised here: KV caches may be half written, and it might come again at every step.
        """
        with self._lock, use_device(self.model.device):
            try:
                emitted = self._step()
                self.fault = self._release_failed()
            except BaseException as error:
                self._fail_all(error)
                raise
            for request in {request for request, _ in emitted}:
                request.wake_reader()
            return emitted

    def _fail_all(self, error: BaseException) -> None:
        """Ends all that runs or waits: the failure belongs to no request."""
        failure = Failure.from_exception(error)
        self.fault = failure.message
        self.scheduler.fail_all(failure)
        if isinstance(error, Exception):
            LOG.exception("the engine failed; this ends all requests")
        with self._changed:
            self._changed.notify_all()

    def _step_for_streams(self) -> None:
        """A step whose failures are left to the streams of the requests that failed."""
        with suppress(Exception):  # `step` has logged it and failed the requests
            self.step()

    def _step(self) -> Emitted:
        device = self.model.device
        vocab_size = self.model.config.vocab_size
        emitted: Emitted = []
        if device.type == "cpu":
            adapt_threads()
        for request in [*self.scheduler.running, *self.scheduler.choose_to_check()]:
            if not request.must_end:
                continue
            if request.is_unwanted:
                self._cancel(request)
            else:
                emitted += self._emit(request, [request.finish_empty()])
                self._finish(request)
        self._admit()
        chosen = self.scheduler.choose_for_step(self.max_unread, by_share=device.type == "cpu")
        self._prefill(with_status(chosen, RequestStatus.PREFILLING))
        for request in with_status(chosen, RequestStatus.REPLAYING):
            with contain_failure(request):
                emitted += self._emit(request, request.replay_canvas(device))
        committing = with_status(chosen, RequestStatus.COMMITTING)
        self.runner.encode_canvases(committing)
        for request in committing:
            self.scheduler.fair_share.charge(request.client, request.tokens_per_encode)
        emitted += self._verify(with_status(chosen, RequestStatus.VERIFYING))
        for request in with_status(chosen, RequestStatus.DENOISING):
            if request.canvas is None:
                with contain_failure(request):
                    request.start_canvas(vocab_size, device)
        denoising = with_status(chosen, RequestStatus.DENOISING)
        if denoising:
            self.runner.step(denoising)
        for request in denoising:
            self.scheduler.fair_share.charge(request.client, request.tokens_per_step)
            if not request.is_over:
                with contain_failure(request):
                    emitted += self._emit(request, [request.draft])
                    emitted += self._settle(request)
        return emitted

    def _verify(self, requests: Sequence[Request]) -> Emitted:
        """One round of every request in checked or exact mode."""
        emitted: Emitted = []
        tokens = self.runner.verify(requests) if requests else {}
        for request in requests:
            self.scheduler.fair_share.charge(request.client, max(tokens.get(request, 0), MIN_STEP_TOKENS))
            if not request.is_over:
                with contain_failure(request):
                    events, is_last = request.verified_events(is_late=request.is_late, device=self.model.device)
                    emitted += self._emit(request, events)
                    if is_last:
                        self._finish(request)
        return emitted

    def _admit(self) -> None:
        """Gives admitted requests a KV cache: one from the prefix cache, or an empty one."""
        for request in self.scheduler.admit():
            with contain_failure(request):
                cached = self.scheduler.prefix_cache.take(request.wanted_prefix, request.capacity, request.adapter)
                if cached is None:
                    request.start(self.model.new_cache(1, request.capacity, self.config.rewind, request.adapter), [])
                else:
                    context, cache = cached
                    request.start(cache, context)

    def _prefill(self, requests: Sequence[Request]) -> None:
        """Prefills at most about one chunk of tokens a step, so that requests in work do not wait for long prompts."""
        tokens_left = self.config.prefill_chunk
        is_alone = len(self.scheduler.running) == 1
        for request in requests:
            if tokens_left > 0:
                with contain_failure(request):
                    count = self.runner.prefill(request, is_alone=is_alone)
                    self.scheduler.fair_share.charge(request.client, count)
                    tokens_left -= count

    def _emit(self, request: Request, events: list[Event]) -> Emitted:
        """Hands events to the request's stream, and returns them for the caller of `step`."""
        if request.events is not None:
            request.events += events
        return [(request, event) for event in events]

    def _settle(self, request: Request) -> Emitted:
        """After a step: applies an intervention; commits the canvas when it is done or the deadline has passed."""
        if request.has_intervention_now:
            request.apply_intervention(self.model.config.vocab_size, self.model.device)
        is_late = request.is_late
        if not request.is_canvas_done and not is_late:
            return []
        if request.verification is not None and request.is_canvas_done and not is_late:
            request.start_verifying()
            return []
        if request.verification is not None:
            events, is_last = request.finish_late(self.model.device)
        else:
            events, is_last = request.commit(is_late=is_late)
        emitted = self._emit(request, events)
        if is_last:
            self._finish(request)
        return emitted

    def _finish(self, request: Request) -> None:
        """Its last event was emitted."""
        self._release(request)
        request.end(RequestStatus.FINISHED)  # last: the stream ends when it sees this

    def _release_failed(self) -> str:
        """Releases the requests that failed in this step. Returns the last of the engine's own faults as text, or "".

        A lack of memory is none: smaller requests go on.
        """
        fault = ""
        for request in [*self.scheduler.running]:
            if request.failure is not None:
                self._release(request, keep_context=False)
                if request.failure.is_engine_fault and not request.failure.is_out_of_memory:
                    fault = request.failure.message
        return fault

    def _release(self, request: Request, *, keep_context: bool = True) -> None:
        """Frees the request's slot and memory. Its KV cache goes to the prefix cache unless it may be half written."""
        self.scheduler.remove(request)
        if keep_context and request.cache is not None and request.context:
            self.scheduler.prefix_cache.put(request.context, request.cache)
        request.release()

    def wait_for_event(self, request: Request, seconds: float | None = None) -> None:
        """Waits until the request has moved, or so long. Without a background thread, this thread makes a step."""
        if self.has_thread:
            with request.has_moved:
                request.has_moved.wait_for(lambda: request.events or request.is_over, seconds)
            return
        with self._lock:
            if not request.events and not request.is_over:
                self._step_for_streams()
            is_blocked = not self.scheduler.running and not request.is_over  # by a reservation of another thread
        if is_blocked:
            with self._changed:
                self._changed.wait(timeout=POLL_SECONDS)

    def _cache_bytes(self, request: Request) -> int:
        """Bytes of the request's KV cache, in both models if another one verifies."""
        nbytes = KVCache.count_bytes(self.model.config, request.capacity, self.model.cache_dtype, self.config.rewind)
        if request.other_verifier is not None and self.verifier is not None:
            model = self.verifier
            nbytes += KVCache.count_bytes(model.config, request.capacity, model.cache_dtype, self.config.rewind)
        return nbytes

    def run(self, requests: Sequence[Request]) -> dict[Request, Finished]:
        """Runs all of them to their end. A cancelled request is left out."""
        return {request: event for request, event in self.events(requests) if isinstance(event, Finished)}

    def events(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Event]]:
        """All events of these requests, those of the first as they happen.

        No request pauses because an earlier one is still read: it would keep the memory that the earlier one waits for.
        """
        streams = {request: self.stream(request) for request in requests}  # before the first step: no event is lost
        while streams:
            for request, stream in list(streams.items()):
                while request.events or request.is_over:
                    event = next(stream, None)
                    if event is None:
                        del streams[request]
                        break
                    yield request, event
            for request in list(streams)[:1]:
                self.wait_for_event(request, POLL_SECONDS)


def with_status(requests: Sequence[Request], status: RequestStatus) -> list[Request]:
    """The requests that have this status now."""
    return [request for request in requests if request.status is status]
