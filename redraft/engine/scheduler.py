"""Who may run: requests wait in order for a place and for memory; contexts of finished ones are kept while there is room.

Memory is counted in bytes of cache, which a request states before it begins: nothing is promised twice. A new prompt that
begins like a kept context takes it over, cut back to where they part.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from redraft.engine.request import Request
from redraft.model.kv_cache import KVCache

WORTH = 16  # tokens in common that are worth looking up


class PrefixCache:
    """Contexts that may come back, the latest last."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: OrderedDict[tuple[int, ...], KVCache] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(cache.nbytes for cache in self._of.values())

    def __len__(self) -> int:
        return len(self._of)

    def put(self, context: Sequence[int], cache: KVCache) -> None:
        """Keeps a context, and forgets the oldest where there are too many."""
        self._of[tuple(context)] = cache
        self._of.move_to_end(tuple(context))
        while len(self._of) > self.most:
            self.forget()

    def forget(self, sparing: Sequence[int] = ()) -> bool:
        """Drops the oldest, one that this prompt will take over last of all; False where there is nothing to drop."""
        best = self._matches(sparing)[:1]
        if best and len(best[0]) == _common(best[0], sparing):
            rest = [context for context in self._of if context != best[0]]
        else:
            rest = list(self._of)
        if rest:
            del self._of[rest[0]]
        return bool(rest)

    def take(self, prompt: Sequence[int]) -> tuple[list[int], KVCache] | None:
        """The context that has most of this prompt's beginning, cut back to that. One that goes on elsewhere stays, too."""
        for context in self._matches(prompt):
            shared = _common(context, prompt)
            cache = self._of[context] if shared == len(context) else self._of[context].select_rows([0])
            try:
                cache.rewind([shared])
            except ValueError:  # its windows do not reach back that far
                continue
            if shared == len(context):
                del self._of[context]
            return list(context[:shared]), cache
        return None

    def _matches(self, prompt: Sequence[int]) -> list[tuple[int, ...]]:
        """Contexts worth taking, the longest match first."""
        lengths = {context: _common(context, prompt) for context in self._of}
        return sorted((c for c, shared in lengths.items() if shared >= WORTH), key=lambda c: -lengths[c])


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length


class Scheduler:
    """Admits requests in the order they came."""

    def __init__(self, max_running: int, budget: int, kept: PrefixCache, cost: Callable[[Request], int]) -> None:
        self.max_running, self.budget, self.kept, self.cost = max_running, budget, kept, cost
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def used(self) -> int:
        """Bytes of cache promised to requests that run."""
        return sum(self.cost(request) for request in self.running)

    def check(self, request: Request) -> None:
        """Refuses what will never fit."""
        if (cost := self.cost(request)) > self.budget:
            raise ValueError(
                f"this request needs {cost / 2**20:,.1f} MiB of cache for {request.capacity:,} tokens, and there are "
                f"{self.budget / 2**20:,.1f} MiB in all: shorten the prompt or max_tokens"
            )

    def admit(self) -> list[Request]:
        """Those whose turn it is now. PrefixCache contexts make room; a request in front is never overtaken."""
        found = []
        while self.waiting and len(self.running) < self.max_running:
            cost = self.cost(self.waiting[0])
            if self.used + cost > self.budget:
                break
            request = self.waiting.popleft()
            while self.used + cost + self.kept.nbytes > self.budget and self.kept.forget(sparing=request.prompt):
                pass
            self.running.append(request)
            found.append(request)
        return found

    def leave(self, request: Request) -> None:
        """It is over, wherever it was."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
