"""Work beside the engine: forwards that belong to no request, as the ranking of infills, scores of edits, and vision towers.

reserve      lends a KV cache within the engine's budget
lend_prompt  lends the KV cache of a prompt, which the prefix cache may have
take_memory  takes bytes out of this budget for good
take_turn    runs a forward between two steps
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from redraft.config import EngineConfig
from redraft.diffusion.generate import find_chunk_end, images_inside
from redraft.engine.errors import USER_ERRORS, EngineError, Failure, RequestError, Stopped
from redraft.engine.request import client_of
from redraft.engine.runner import encode_chunk
from redraft.engine.scheduler import Reservation, Scheduler, Turn
from redraft.kernels.backend import use_device
from redraft.model.backbone import Backbone
from redraft.model.kv_cache import KVCache
from redraft.model.lora import Adapter

if TYPE_CHECKING:  # text-only use does not load it
    from redraft.model.vision import ImageSpan

POLL_SECONDS = 0.05  # how often a waiting thread checks a stop event, which cannot wake it


class WorkBeside(ABC):
    """The part of an engine that lends its memory and its time to other work."""

    adapter: Adapter | None = None  # of the requests and reservations that are made here; see adapted_engine.py

    model: Backbone
    config: EngineConfig
    scheduler: Scheduler
    has_thread: bool  # whether a background thread makes the steps
    memory_advice: str
    _lock: AbstractContextManager[bool]  # held during a step
    _changed: threading.Condition  # notified after steps, and when work arrives or leaves

    @abstractmethod
    def notify(self) -> None:
        """Says that something has changed which may admit a request or end one, and wakes the threads that wait."""

    @abstractmethod
    def wake(self) -> None:
        """Wakes the threads that wait for work, for a turn or for memory."""

    @abstractmethod
    def _step_for_memory(self, reservation: Reservation) -> bool:
        """Makes steps that free memory, in a thread that waits for it. Returns whether they may go on."""

    @contextmanager
    def reserve(
        self, tokens: int, *, rows: int = 1, rewind: int = 0, stop: threading.Event | None = None
    ) -> Iterator[KVCache]:
        """Lends a KV cache for work beside the engine; its bytes count toward the engine's budget.

            with engine.reserve(len(ids), stop=stop) as cache:
                model.encode(ids_1S, cache)

        Waits until the cache fits beside the running requests, and evicts prefix cache entries for it. Raises RequestError
        when it can never fit, and Stopped once `stop` is set while it waits. Sliding layers keep only their window and
        `rewind` tokens. Inside the block do not reserve again and do not wait for a request: both might wait for this cache.
        """
        nbytes = rows * KVCache.count_bytes(self.model.config, tokens, self.model.cache_dtype, rewind)
        self.scheduler.check(nbytes, rows * tokens, "this text")
        with self._hold(Reservation(self.scheduler.next_number(), nbytes, client_of(stop)), stop):
            with self._explain_fault():
                cache = self.model.new_cache(rows, tokens, rewind, self.adapter)
            yield cache

    @contextmanager
    def lend_prompt(self, prompt: Sequence[int], stop: threading.Event | None = None) -> Iterator[KVCache]:
        """Lends a KV cache that holds a prompt, as `reserve` does. Inside the block nothing is appended to it.

        The cache begins with what the prefix cache has of the prompt, and goes there at the end: requests and loans that
        continue this prompt encode only the rest.
        """
        key = tuple(prompt)
        nbytes = KVCache.count_bytes(self.model.config, len(key), self.model.cache_dtype, self.config.rewind)
        self.scheduler.check(nbytes, len(key), "this text")
        number = self.scheduler.next_number()
        with self._hold(Reservation(number, nbytes, client_of(stop), wanted_prefix=key, adapter=self.adapter), stop):
            with self._lock, self._explain_fault():
                cached = self.scheduler.prefix_cache.take(key, len(key), self.adapter)
                context, cache = cached or ([], self.model.new_cache(1, len(key), self.config.rewind, self.adapter))
            self.prefill_beside(key[len(context) :], cache, stop)
            yield cache
            with self._lock:
                self.scheduler.prefix_cache.put(key, cache)

    def take_memory(
        self, nbytes: int, what: str, advice: str, *, least: int = 0, stop: threading.Event | None = None
    ) -> None:
        """Takes bytes out of the budget of KV caches for good, for weights that are loaded while the engine runs.

        Waits until they are free. Raises RequestError, which says `what` needs them and what to do, if less than `least`
        bytes would be left, or less than a request needs that was added before.
        """
        self._check_rest(nbytes, what, advice, least, self.scheduler.budget - nbytes)
        with self._hold(Reservation(self.scheduler.next_number(), nbytes), stop):
            self.scheduler.budget -= nbytes
        try:
            self._check_rest(nbytes, what, advice, least, self.scheduler.budget)  # with the requests that came meanwhile
        except RequestError:
            self.return_memory(nbytes)
            raise

    def _check_rest(self, nbytes: int, what: str, advice: str, least: int, rest: int) -> None:
        """Refuses a rest of the budget that is too small."""
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        least = max([least, *(request.nbytes for request in requests)])
        if rest < least:
            raise RequestError(
                f"{what} needs {nbytes / 2**20:,.1f} MiB, and the KV caches need {least / 2**20:,.1f} of their "
                f"{(rest + nbytes) / 2**20:,.1f} MiB: {advice}"
            )

    def return_memory(self, nbytes: int) -> None:
        """Gives bytes of `take_memory` back."""
        self.scheduler.budget += nbytes
        self.notify()

    @contextmanager
    def _hold(self, reservation: Reservation, stop: threading.Event | None) -> Iterator[None]:
        """Inside the block the reservation is granted. Waits for that; raises Stopped once `stop` is set while it waits."""
        self.scheduler.reservations.append(reservation)
        try:
            self.notify()
            while not reservation.is_granted:
                if stop is not None and stop.is_set():
                    raise Stopped
                if reservation.failure is not None:
                    raise reservation.failure.to_exception(self.memory_advice)
                if self.has_thread or not self._step_for_memory(reservation):
                    with self._changed:
                        self._changed.wait_for(
                            lambda: reservation.is_granted or reservation.failure is not None, timeout=POLL_SECONDS
                        )
            yield
        finally:
            reservation.is_released = True
            self.notify()

    @contextmanager
    def _explain_fault(self) -> Iterator[None]:
        """A fault in the block becomes an EngineError, which says what to do about a lack of memory."""
        try:
            yield
        except (Stopped, EngineError, *USER_ERRORS):
            raise
        except Exception as error:
            raise Failure.from_exception(error).to_exception(self.memory_advice) from error

    @contextmanager
    def take_turn(self, tokens: int, stop: threading.Event | None = None) -> Iterator[None]:
        """Inside the block no step runs: for a forward of work beside the engine.

            with engine.take_turn(len(ids), stop):
                model.encode(ids_1S, cache)

        Two forwards at once would take the cores from each other. Waits until the client is not ahead of others; `tokens`
        counts as its work. Raises Stopped once `stop` is set while it waits. A fault in the block becomes an EngineError.
        Do not wait for a request inside the block.
        """
        turn = Turn(client_of(stop), tokens)
        self.scheduler.turns.append(turn)
        try:
            self.wake()
            while self.has_thread and turn.is_waiting:
                if stop is not None and stop.is_set():
                    raise Stopped
                with self._changed:
                    self._changed.wait_for(lambda: not turn.is_waiting or not self.has_thread, timeout=POLL_SECONDS)
            if turn.failure is not None:
                raise turn.failure.to_exception(self.memory_advice)
            with self._explain_fault(), self._lock if not turn.is_granted else nullcontext(), use_device(self.model.device):
                if stop is not None and stop.is_set():
                    raise Stopped
                yield
        finally:
            turn.is_done = True
            self.scheduler.turns.remove(turn)
            self.wake()

    @torch.inference_mode()
    def prefill_beside(
        self,
        ids: Sequence[int],
        cache: KVCache,
        stop: threading.Event | None = None,
        images: Sequence["ImageSpan"] = (),
    ) -> None:
        """Encodes a prompt into a reserved cache, one turn for each chunk. No chunk divides an image."""
        begin = 0
        while begin < len(ids):
            end = find_chunk_end(begin, len(ids), self.config.prefill_chunk, images)
            chunk = list(ids[begin:end])
            inside = images_inside(images, begin, end)
            with self.take_turn(len(chunk), stop):
                encode_chunk(self.model, chunk, inside, cache)
            begin = end

    def _grant_turns(self) -> None:
        """Lets work beside the engine make forwards, one after another, as long as it is its turn.

        After about a canvas of tokens a step follows: requests wait about one step for the work beside them.
        """
        tokens_left = self.model.config.canvas_length
        while tokens_left > 0 and (turn := self.scheduler.next_turn()) is not None:
            tokens_left -= turn.tokens
            with self._changed:
                turn.is_granted = True
                self._changed.notify_all()
                self._changed.wait_for(lambda turn=turn: turn.is_done)  # type: ignore[misc]
