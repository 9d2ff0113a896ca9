"""BatchedCache: the KV caches of several requests, presented to the model as one.

Shapes: B requests, T cached tokens, S new tokens, G key-value heads, K head size.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.model.kv_cache import ContextCache, KVCache
from redraft.model.lora import Adapter


class BatchedCache(ContextCache):
    """An `ContextCache` of B rows, made of B caches of one row each."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches = list(caches)
        self.device = caches[0].device

    @property
    def adapters(self) -> list[Adapter | None]:
        """The adapter of each cache."""
        return [cache.adapter for cache in self.caches]

    @property
    def lengths_B(self) -> Tensor:
        """Tokens that each cache holds."""
        return torch.tensor([cache.lengths[0] for cache in self.caches], device=self.device)

    @property
    def has_equal_lengths(self) -> bool:
        """Whether all caches hold the same number of tokens, so that no mask is needed."""
        return len({cache.lengths[0] for cache in self.caches}) == 1

    def next_positions(self, count: int) -> Tensor:
        """Positions [B, count] of the next tokens."""
        return self.lengths_B[:, None] + torch.arange(count, device=self.device)

    def key_positions(self, layer: int) -> Tensor:
        """Positions [B, T] in a layer's view; negative where a shorter cache has no token."""
        visible = max(cache.count_visible(layer) for cache in self.caches)
        return self.next_positions(visible) - visible

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, G, K] of all caches. Shorter ones are padded with zeros on the left."""
        views = [cache.view(layer) for cache in self.caches]
        if len(views) == 1:
            return views[0]
        longest = max(keys.shape[1] for keys, _ in views)
        padded = [[F.pad(t, (0, 0, 0, 0, longest - t.shape[1], 0)) for t in column] for column in zip(*views, strict=True)]
        keys_BTGK, values_BTGK = (torch.cat(column) for column in padded)
        return keys_BTGK, values_BTGK

    def append(self, layer: int, k_BSGK: Tensor, v_BSGK: Tensor, counts: Sequence[int]) -> None:
        """Writes the first counts[row] new tokens of each row to its cache."""
        for row, cache in enumerate(self.caches):
            cache.append(layer, k_BSGK[row : row + 1], v_BSGK[row : row + 1], [counts[row]])

    def advance(self, counts: Sequence[int]) -> None:
        """The appended tokens become part of each context."""
        for cache, count in zip(self.caches, counts, strict=True):
            cache.advance([count])
