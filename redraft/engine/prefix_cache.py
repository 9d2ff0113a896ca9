"""Prefix cache: KV caches of finished requests, kept for prompts that begin with the same tokens.

A new prompt takes over the cached context with which it shares the longest prefix, cut back to that prefix. Entries are
evicted least recently stored first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from redraft.model.kv_cache import KVCache

MIN_SHARED_TOKENS = 16  # a shorter common prefix is cheaper to prefill again than to look up and cut back


class PrefixCache:
    """At most `max_entries` contexts (token ids) with their KV caches, in the order in which they were stored."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._entries: OrderedDict[tuple[int, ...], KVCache] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all stored KV caches."""
        return sum(cache.nbytes for cache in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, context: Sequence[int], cache: KVCache) -> None:
        """Stores a context as the newest entry. Evicts the oldest entries beyond `max_entries`."""
        self._entries[tuple(context)] = cache
        self._entries.move_to_end(tuple(context))
        while len(self._entries) > self.max_entries:
            self.evict()

    def evict(self, sparing: Sequence[int] = ()) -> bool:
        """Drops the oldest entry, but never the entry that the prompt `sparing` would take over whole.

        Returns False when there is nothing to drop.
        """
        candidates = list(self._entries)
        best_match = self._matches(sparing)[:1]
        if best_match and len(best_match[0]) == _shared_length(best_match[0], sparing):
            candidates.remove(best_match[0])
        if not candidates:
            return False
        del self._entries[candidates[0]]
        return True

    def take(self, prompt: Sequence[int], capacity: int | None = None) -> tuple[list[int], KVCache] | None:
        """The longest shared prefix of this prompt and its KV cache, or None when no entry shares enough.

        An entry that is a prefix of the prompt leaves the cache. An entry that continues differently is copied and stays.
        The KV cache has the given capacity, that of the entry without one.
        """
        for context in self._matches(prompt):
            shared = _shared_length(context, prompt)
            entry = self._entries[context]
            room = capacity if capacity is not None else entry.capacity
            try:
                if shared == len(context):
                    entry.rewind([shared])
                    del self._entries[context]
                    return list(context), entry.with_capacity(room)
                return list(context[:shared]), entry.copy_prefix(shared, room)
            except ValueError:  # its sliding layers no longer hold the window before `shared`
                continue
        return None

    def _matches(self, prompt: Sequence[int]) -> list[tuple[int, ...]]:
        """Contexts that share at least MIN_SHARED_TOKENS with the prompt, the longest match first."""
        lengths = {context: _shared_length(context, prompt) for context in self._entries}
        matches = [context for context, shared in lengths.items() if shared >= MIN_SHARED_TOKENS]
        return sorted(matches, key=lambda context: -lengths[context])


def _shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = 0
    for first_token, second_token in zip(first, second, strict=False):
        if first_token != second_token:
            break
        length += 1
    return length
