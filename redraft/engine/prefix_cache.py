"""Prefix cache: KV caches of finished requests, kept for prompts that begin with the same tokens and images.

A new prompt takes over the cached context with which it shares the longest prefix, cut back to that prefix. Contexts that
were encoded with different adapters have nothing in common. Entries are evicted least recently stored first. All tokens of
an image have the same number, made from its content: prompts share an image as a whole or not at all.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redraft.model.kv_cache import KVCache
from redraft.model.lora import Adapter

if TYPE_CHECKING:  # text-only use does not load it
    from redraft.model.vision import ImageSpan

MIN_SHARED_TOKENS = 16  # a shorter common prefix is cheaper to prefill again than to look up and cut back


Key = tuple[Adapter | None, tuple[int, ...]]  # the adapter with which a context was encoded, and its tokens


def make_prefix_key(prompt: tuple[int, ...], images: Sequence["ImageSpan"]) -> tuple[int, ...]:
    """The prompt with a negative number, which is no token, in the place of each token of an image."""
    if not images:
        return prompt
    key = list(prompt)
    for span in images:
        digest = span.digest or _hash_features(span.features_ME)
        number = int.from_bytes(hashlib.sha256(digest + len(span.features_ME).to_bytes(8)).digest())
        key[span.start : span.end] = [-1 - number] * (span.end - span.start)
    return tuple(key)


def _hash_features(features_ME: Tensor) -> bytes:
    contents = features_ME.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(str(features_ME.dtype).encode() + contents).digest()


class PrefixCache:
    """At most `max_entries` contexts (token ids) with their KV caches, in the order in which they were stored."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self._entries: OrderedDict[Key, KVCache] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all stored KV caches."""
        return sum(cache.nbytes for cache in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, context: Sequence[int], cache: KVCache) -> None:
        """Stores a context as the newest entry. Evicts the oldest entries beyond `max_entries`."""
        key = (cache.adapter, tuple(context))
        self._entries[key] = cache
        self._entries.move_to_end(key)
        while len(self._entries) > self.max_entries:
            self.evict()

    def evict(self, sparing: Sequence[int] = (), adapter: Adapter | None = None) -> bool:
        """Drops the oldest entry, but never the entry that the prompt `sparing` would take over whole with this adapter.

        Returns False when there is nothing to drop.
        """
        candidates = list(self._entries)
        best_match = self._matches(sparing, adapter)[:1]
        if best_match and len(best_match[0]) == _shared_length(best_match[0], sparing):
            candidates.remove((adapter, best_match[0]))
        if not candidates:
            return False
        del self._entries[candidates[0]]
        return True

    def take(
        self, prompt: Sequence[int], capacity: int | None = None, adapter: Adapter | None = None
    ) -> tuple[list[int], KVCache] | None:
        """The longest shared prefix of this prompt and its KV cache, or None when no entry of the adapter shares enough.

        An entry that is a prefix of the prompt leaves the cache. An entry that continues differently is copied and stays.
        The KV cache has the given capacity, that of the entry without one.
        """
        for context in self._matches(prompt, adapter):
            shared = _shared_length(context, prompt)
            entry = self._entries[adapter, context]
            room = capacity if capacity is not None else entry.capacity
            try:
                if shared == len(context):
                    entry.rewind([shared])
                    del self._entries[adapter, context]
                    return list(context), entry.with_capacity(room)
                return list(context[:shared]), entry.copy_prefix(shared, room)
            except ValueError:  # its sliding layers no longer hold the window before `shared`
                continue
        return None

    def _matches(self, prompt: Sequence[int], adapter: Adapter | None) -> list[tuple[int, ...]]:
        """Contexts of the adapter that share at least MIN_SHARED_TOKENS with the prompt, the longest match first."""
        contexts = [context for own, context in self._entries if own is adapter]
        lengths = {context: _shared_length(context, prompt) for context in contexts}
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
