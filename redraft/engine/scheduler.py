"""Scheduler: decides which requests run. Requests wait in order for a slot and for KV-cache memory.

Memory is counted in bytes of KV cache. A request states its bytes before it starts, so the budget is never exceeded. Work
beside the engine (ranking of infills, scoring of edits) takes its caches from the same budget through a `Reservation`.
Entries of the prefix cache use the memory that is left, and are evicted when a request or a reservation needs it.

A step costs the same however many requests wait: admission is decided again only after a change, from sums that are kept for
each client, and a few waiting requests are looked at in each step.

Clients are treated alike. The next request is one of the client that has the fewest running. A client without a running
request gets a slot even when all slots are taken; the steps then rotate among the requests.
"""

import itertools
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from redraft.engine.errors import Failure, RequestError
from redraft.engine.fair_share import FairShare
from redraft.engine.prefix_cache import PrefixCache
from redraft.engine.request import Request
from redraft.model.lora import Adapter

CHECKED_PER_STEP = 16  # waiting requests whose callers may have left unnoticed


@dataclass(eq=False)
class Reservation:
    """KV-cache bytes for work beside the engine. It needs no slot."""

    number: int  # order of arrival, counted together with requests
    nbytes: int
    client: str = ""
    wanted_prefix: tuple[int, ...] = ()  # what it takes over from the prefix cache, or the longest part that is there
    adapter: Adapter | None = None
    is_granted: bool = False
    is_released: bool = False
    failure: Failure | None = None  # of the engine, while it waited

    @property
    def is_held(self) -> bool:
        """Whether its bytes count as used."""
        return self.is_granted and not self.is_released


@dataclass(eq=False)
class Turn:
    """A forward of work beside the engine, which wants to run between two steps."""

    client: str
    tokens: int
    is_granted: bool = False
    is_done: bool = False
    failure: Failure | None = None  # of the engine, while it waited

    @property
    def is_waiting(self) -> bool:
        """It has been neither granted nor withdrawn."""
        return not self.is_granted and not self.is_done


class Scheduler:
    """Admits requests and reservations in the order of their arrival, within `budget` bytes."""

    def __init__(self, max_running: int, budget: int, prefix_cache: PrefixCache) -> None:
        self.max_running = max_running
        self.budget = budget
        self.prefix_cache = prefix_cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.reservations: deque[Reservation] = deque()  # waiting and granted ones
        self.turns: deque[Turn] = deque()  # of work beside the engine; the thread that added one removes it
        self.fair_share = FairShare()
        self.changes = 0  # counts what may change who is admitted, or that a caller has left
        self._numbers = itertools.count()
        self._bytes: Counter[str] = Counter()  # of running requests, by client
        self._admitted_at = -1  # `changes` when nothing more could be admitted
        self._checked_at = -1  # `changes` when all waiting requests were checked
        self._next_check = 0  # the place in the line that is checked next

    def next_number(self) -> int:
        """The next number in the order of arrival."""
        return next(self._numbers)

    @property
    def used(self) -> int:
        """Bytes promised to running requests and granted reservations."""
        return self._bytes.total() + sum(self._reserved_bytes.values())

    @property
    def _reserved_bytes(self) -> Counter[str]:
        """Bytes of granted reservations, by client."""
        reserved: Counter[str] = Counter()
        for reservation in list(self.reservations):
            if reservation.is_held:
                reserved[reservation.client] += reservation.nbytes
        return reserved

    def check(self, nbytes: int, tokens: int, what: str = "this request") -> None:
        """Refuses a cache that would never fit."""
        if nbytes > self.budget:
            raise RequestError(
                f"{what} needs {nbytes / 2**20:,.1f} MiB of KV cache for {tokens:,} tokens, and the budget is "
                f"{self.budget / 2**20:,.1f} MiB: shorten the prompt or max_tokens"
            )

    def add(self, request: Request) -> None:
        """A request waits from now on. One that would never fit is refused.

        It is checked when it is in the line, so that a budget which shrinks at the same time (`take_memory`) considers it.
        """
        self.waiting.append(request)
        self.changes += 1
        try:
            self.check(request.nbytes, request.capacity)
        except RequestError:
            with suppress(ValueError):  # its caller may have cancelled it meanwhile
                self.waiting.remove(request)
            raise

    @property
    def can_admit(self) -> bool:
        """Whether `admit` would admit something now."""
        if self._admitted_at == self.changes:
            return False
        candidate = self._next_in_line()
        return candidate is not None and self._fits(candidate.nbytes)

    def choose_to_check(self) -> list[Request]:
        """Waiting requests whose callers may have left: all of them after a change, else a few, in turn."""
        changes = self.changes
        waiting = list(self.waiting)
        if self._checked_at != changes or len(waiting) <= CHECKED_PER_STEP:
            self._checked_at = changes
            return waiting
        begin = self._next_check % len(waiting)
        self._next_check = begin + CHECKED_PER_STEP
        return (waiting[begin:] + waiting[:begin])[:CHECKED_PER_STEP]

    def admit(self) -> list[Request]:
        """Admits what is next in line while slots and memory last. Returns the requests among it, which run from now on."""
        admitted: list[Request] = []
        changes = self.changes
        if self._admitted_at == changes:
            return admitted
        for reservation in list(self.reservations):
            if reservation.is_released:
                self.reservations.remove(reservation)
        while (candidate := self._next_in_line()) is not None and self._make_room_for(candidate):
            if isinstance(candidate, Reservation):
                candidate.is_granted = True
                continue
            self.waiting.remove(candidate)
            self.running.append(candidate)
            self._bytes[candidate.client] += candidate.nbytes
            admitted.append(candidate)
        self._admitted_at = changes
        return admitted

    def choose_for_step(self, max_unread: int | None, *, by_share: bool) -> list[Request]:
        """The running requests that the next step works on, at most `max_running`, oldest first.

        A request with `max_unread` unread events waits for its reader until its deadline. With `by_share`, clients that are
        ahead of others wait too: on a CPU a step takes as long as all its rows together, so a row of one client delays all.
        """
        ready = [request for request in self.running if not request.is_over and not request.is_paused(max_unread)]
        clients = {request.client for request in ready}
        furthest_behind = self.fair_share.choose(clients | {turn.client for turn in self.waiting_turns})
        if by_share:
            ready = [request for request in ready if request.client in furthest_behind]
        if len(ready) > self.max_running:
            rank: dict[str, int] = {}  # how many requests of the client come before
            order = []
            for request in ready:
                rank[request.client] = rank.get(request.client, -1) + 1
                order.append((request.client not in furthest_behind, rank[request.client], request.number))
            chosen = {number for _, _, number in sorted(order)[: self.max_running]}
            ready = [request for request in ready if request.number in chosen]
        return ready

    @property
    def waiting_turns(self) -> list[Turn]:
        """Turns that may be granted, oldest first."""
        return [turn for turn in list(self.turns) if turn.is_waiting]

    def next_turn(self) -> Turn | None:
        """The oldest turn of a client that is not ahead of others; the client is charged for it."""
        turns = self.waiting_turns
        clients = {request.client for request in self.running} | {turn.client for turn in turns}
        furthest_behind = self.fair_share.choose(clients)
        turn = next((turn for turn in turns if turn.client in furthest_behind), None)
        if turn is not None:
            self.fair_share.charge(turn.client, turn.tokens)
        return turn

    def remove(self, request: Request) -> None:
        """Takes a request out of the running or the waiting ones."""
        self.changes += 1
        if request in self.running:
            self.running.remove(request)
            self._bytes[request.client] -= request.nbytes
            if not self._bytes[request.client]:
                del self._bytes[request.client]
        elif request in self.waiting:
            self.waiting.remove(request)

    def fail_all(self, failure: Failure) -> None:
        """Ends all that runs or waits. Reservations and turns that were granted are in the hands of other threads."""
        requests = [*self.running, *self.waiting]
        for request in requests:
            if not request.is_over:
                request.fail(failure)
            request.release()
            with suppress(ValueError):  # its caller may have cancelled it meanwhile
                self.waiting.remove(request)
        self.running.clear()
        self._bytes.clear()
        self.changes += 1
        for reservation in list(self.reservations):
            if not reservation.is_granted:
                reservation.failure = failure
                reservation.is_released = True
        for turn in self.waiting_turns:
            turn.failure = failure
            turn.is_done = True

    def _next_in_line(self) -> Request | Reservation | None:
        """The request or reservation that is next. Without a free slot, requests let reservations pass."""
        held = self._bytes + self._reserved_bytes
        request = self._next_request(held)
        ungranted = (r for r in list(self.reservations) if not r.is_granted and not r.is_released)
        reservation = next((r for r in ungranted if self._is_within_share(r, held)), None)
        if request is None or reservation is None:
            return request or reservation
        return request if request.number < reservation.number else reservation

    def _next_request(self, held: Mapping[str, int]) -> Request | None:
        """The oldest waiting request of the client that has the fewest running; None if it must wait for a slot."""
        waiting = [request for request in list(self.waiting) if self._is_within_share(request, held)]
        if not waiting:
            return None
        running = Counter(request.client for request in self.running)
        request = min(waiting, key=lambda request: (running[request.client], request.number))
        has_slot = len(self.running) < self.max_running
        is_first_of_client = not running[request.client] and len(self.running) < 2 * self.max_running
        return request if has_slot or is_first_of_client else None

    def _is_within_share(self, candidate: Request | Reservation, held: Mapping[str, int]) -> bool:
        """Its client would hold at most eight ninths of the budget with its bytes."""
        client = candidate.client
        if not client or client not in held:  # a program that uses redraft from Python, or a client that has nothing
            return True
        return held[client] + candidate.nbytes <= self.budget - self.budget // 9

    def _fits(self, nbytes: int) -> bool:
        return self.used + nbytes <= self.budget

    def _make_room_for(self, candidate: Request | Reservation) -> bool:
        """Whether it fits beside what is promised; if so, evicts prefix cache entries until its bytes are free."""
        nbytes = candidate.nbytes
        if not self._fits(nbytes):
            return False
        spared = (candidate.wanted_prefix, candidate.adapter)
        while not self._fits(nbytes + self.prefix_cache.nbytes) and self.prefix_cache.evict(*spared):
            pass
        return True
