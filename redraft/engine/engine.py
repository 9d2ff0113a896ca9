"""The engine: requests arrive, read their prompts, redraft page after page each at its own step, and leave one by one.

    schedule: admit, in order, within the memory
    run:      a chunk of a prompt, pages to read, a denoising pass for all
    settle:   each request's sampler, events, pages that are done

The tokens are those of `generate`, whatever runs beside it. Any thread may add, step and cancel; one does so at a time.
Whoever streams a request makes the steps; or, `with engine.running():`, a thread of the engine's own makes them for all.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from redraft.config import EngineConfig, SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import Event, Finished, StatsCounter, check_inputs
from redraft.engine.request import Replay, ReplayError, Request
from redraft.engine.runner import Runner
from redraft.engine.scheduler import PrefixCache, Scheduler
from redraft.kernels.backend import select_backend
from redraft.kernels.threads import adapt_threads
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.kv_cache import KVCache

LOG = logging.getLogger("redraft.engine")


class Engine:
    """Runs requests over one model."""

    def __init__(self, model: DiffusionGemma, config: EngineConfig | None = None) -> None:
        self.model, self.config = model, config or EngineConfig()
        self.runner = make_runner(model, self.config.prefill_chunk)
        budget = self.config.cache_bytes or self._room()
        self.scheduler = Scheduler(self.config.max_running, budget, PrefixCache(self.config.keep_contexts), self._cost)
        self._numbers, self._lock = itertools.count(), threading.RLock()
        self.fault = ""  # what ended the last step, in words: an exception would hold on to the memory of that step
        self._news, self._own = threading.Condition(), False  # what waiting threads are told by; a thread of our own steps

    def _room(self) -> int:
        """Bytes for caches: what a GPU has left when a full step and a chunk of a prompt were run once, but for a tenth.

        Elsewhere half of what is free: others live there too.
        """
        device = self.model.device
        if device.type != "cuda":
            return free_bytes(device) // 2
        taken = self.runner.warm_up(self.config.max_running)
        torch.cuda.empty_cache()  # what is not free then belongs to the graphs
        return int(0.9 * (free_bytes(device) - taken))

    def add(
        self,
        prompt: Sequence[int],
        cfg: SamplerConfig,
        *,
        seed: int,
        constraints: Constraints | None = None,
        first_1C: Tensor | None = None,
        seconds: float | None = None,
        stop: threading.Event | None = None,
        replay: Replay | None = None,
        candidates: int = 0,
    ) -> Request:
        """A request for text behind this prompt. After `seconds` the best page so far is committed, and that is all.

        Once `stop` is set nothing more comes of it. With a `replay` it is one that was under way. Drafts come with the
        probabilities of the `candidates` likeliest tokens. What cannot be generated is refused here, and nothing else notices.
        """
        constraints, replay = constraints or Constraints(), replay or Replay()
        check_inputs(self.model.config, [prompt], cfg, [seed], [constraints], first_1C)
        held = replay.check(cfg, self.model.config.vocab_size, constraints)
        if seconds is not None and not seconds > 0:
            raise ValueError(f"a deadline must be ahead, got {seconds!r} seconds")
        deadline = time.monotonic() + seconds if seconds is not None else None
        counter, more = StatsCounter(cfg, [seed], [len(prompt)]), {"matched": constraints.initial_state, "stop": stop}
        more |= {"replay": replay, "held": held, "candidates": candidates}
        request = Request(next(self._numbers), tuple(prompt), cfg, seed, constraints, first_1C, deadline, counter, **more)
        request.inbox = deque() if self._own else None  # it may run before anybody streams it
        self.scheduler.check(request)
        self.scheduler.waiting.append(request)  # a step may run now: nobody waits for its end
        self.tell()
        return request

    def cancel(self, request: Request) -> None:
        """Nothing more comes of it. What it has read is kept for another that begins alike."""
        if self._own:
            request.dropped = True  # the next step lets it go
            self.tell()
            return
        with self._lock:
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        if not request.over:
            request.over = request.told = True
            self._leave(request)

    def tell(self) -> None:
        """Wakes the threads that wait for something to happen."""
        with self._news:
            self._news.notify_all()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Steps are made by a thread of the engine's own meanwhile, so that streams in many threads only wait.

        At the end what still runs is cancelled.
        """
        if self._own:
            raise RuntimeError("the engine runs in a thread already")
        self._own, thread = True, threading.Thread(target=self._work, name="redraft-engine", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._own = False
            self.tell()
            thread.join()
            for request in [*self.scheduler.running, *self.scheduler.waiting]:
                self.cancel(request)
            self.tell()

    def _work(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)
        while self._own:
            with self._news:
                self._news.wait_for(lambda: not self._own or not self.idle)
            if self._own:
                try:
                    self.step()
                except Exception:  # those it concerns are told by their own `error`
                    LOG.exception("a step of the engine failed")
                self.tell()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.scheduler.running and not self.scheduler.waiting

    def stream(self, request: Request) -> "Stream":
        """The events of one request from now on; the others go on beside it."""
        if request.inbox is None:
            request.inbox = deque()
        return Stream(self, request)

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, Event]]:
        """One round for everybody. Returns what happened, to whom.

        Where it fails, by the machine's fault or by Ctrl-C, what runs is over: half-written caches serve nobody.
        """
        with self._lock:
            try:
                found, self.fault = self._step(), ""
                return found
            except BaseException as error:
                self.fault = f"{type(error).__name__}: {error}"
                for request in list(self.scheduler.running):
                    request.error = error
                    request.over = request.told = True
                    self._leave(request, keep=False)
                raise

    def _step(self) -> list[tuple[Request, Event]]:
        if self.model.device.type == "cpu":
            adapt_threads()
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            if request.unwanted:
                self._let_go(request)
        for request in self.scheduler.admit():
            self._begin(request)
        running = list(self.scheduler.running)
        room = self.config.prefill_chunk  # of a round: those who redraft do not wait for long prompts
        for request in running:
            if request.reading and room > 0:
                room -= self.runner.read(request)
                if not request.reading:
                    request.counter.mark_prefilled()
        found = []
        for request in running:
            if not request.reading and request.page is None and request.retold:
                found += self._told(request, request.retell(self.model.device))
        self.runner.read_pages([request for request in running if request.page is not None])
        ready = [request for request in running if not request.reading and not request.retold]
        for request in ready:
            if request.state is None:
                request.start_page(self.model.config.vocab_size, self.model.device)
        if ready:
            self.runner.redraft(ready)
        for request in ready:
            if request.over:
                request.told = True
                self._leave(request, keep=False)
                continue
            found += self._told(request, list(self._settle(request)))
        return found

    def _told(self, request: Request, events: list[Event]) -> list[tuple[Request, Event]]:
        """Events for whoever streams it, and for whoever steps."""
        if request.inbox is not None:
            request.inbox += events
        request.told = request.over
        return [(request, event) for event in events]

    def advance(self, request: Request) -> None:
        """A step, if nobody else makes it and the request has not moved meanwhile; or a wait until it has."""
        if self._own:
            with self._news:
                self._news.wait_for(lambda: request.inbox or request.told or not self._own)
            return
        with self._lock:
            if not request.inbox and not request.told:
                self.step()

    def _begin(self, request: Request) -> None:
        """Its cache: one that begins like its prompt, or an empty one."""
        found = self.scheduler.kept.take(request.prompt)
        if found is None:
            request.cache = self.model.new_cache(1, request.capacity, rewind=self.config.rewind)
        else:
            request.context, cache = found
            request.cache = cache.with_capacity(request.capacity)
            request.read = request.counter.reused[0] = len(request.context)
            if not request.reading:
                request.counter.mark_prefilled()

    def _settle(self, request: Request) -> Iterator[Event]:
        yield request.draft
        if request.turning:
            try:
                request.turn(self.model.config.vocab_size, self.model.device)
            except ReplayError as error:
                request.error, request.over = error, True
                self._leave(request, keep=False)
                return
        late = request.deadline is not None and time.monotonic() >= request.deadline
        if not request.done and not late:
            return
        yield from request.commit(late)
        if request.over:
            self._leave(request)

    def _leave(self, request: Request, keep: bool = True) -> None:
        self.scheduler.leave(request)
        if keep and request.cache is not None and request.context:
            self.scheduler.kept.put(request.context, request.cache)
        request.cache = request.state = request.soft_1CD = request.page = None

    def _cost(self, request: Request) -> int:
        """Bytes of cache."""
        return KVCache.count_bytes(self.model.config, request.capacity, self.model.dtype, self.config.rewind)

    def run(self, requests: Sequence[Request]) -> dict[Request, Finished]:
        """All of them to their end. One that was cancelled is left out."""
        return {request: event for request, event in self.events(requests) if isinstance(event, Finished)}

    def events(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Event]]:
        """All that comes of them: of the first as it happens, then of those that ran beside it."""
        streams = [self.stream(request) for request in requests]  # all of them, before the first step is made
        for request, stream in zip(requests, streams, strict=True):
            for event in stream:
                yield request, event


class Stream:
    """Events of one request, as they come. Left before its end, it cancels the request."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine, self.request = engine, request

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Event:
        inbox = self.request.inbox
        while not inbox and not self.request.told:
            self.engine.advance(self.request)
        if inbox:
            return inbox.popleft()
        if isinstance(self.request.error, ValueError):  # its own fault
            raise self.request.error
        if self.request.error is not None:
            raise RuntimeError(f"the engine failed while this request ran: {self.request.error}")
        raise StopIteration

    def close(self) -> None:
        """Nobody reads on."""
        self.engine.cancel(self.request)

    def __del__(self) -> None:
        self.close()


def make_runner(model: DiffusionGemma, chunk: int) -> Runner:
    """The one for GPUs where its kernels run, else the plain one."""
    if not select_backend(model.device).uses_triton:
        return Runner(model, chunk)
    from redraft.engine.cuda_graph_runner import CudaGraphRunner  # Triton takes long to import

    return CudaGraphRunner(model, chunk)


def free_bytes(device: torch.device) -> int:
    """Memory nobody uses now; where it cannot be asked for, what any machine has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 8 * 2**30
