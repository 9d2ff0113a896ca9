"""Caches of several requests, seen by the model as one.

Shapes: B requests, T cached tokens, S new ones, G key-value heads, K head size.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.model.kv_cache import KVCache


class BatchedCache:
    """What `model.encode` and `model.denoise` ask of a cache, answered by one cache of one row for each request."""

    def __init__(self, caches: Sequence[KVCache]) -> None:
        self.caches, self.device = list(caches), caches[0].device

    @property
    def lengths_B(self) -> Tensor:
        """Tokens held by each."""
        return torch.tensor([cache.lengths[0] for cache in self.caches], device=self.device)

    @property
    def has_equal_lengths(self) -> bool:
        """Whether none needs masking."""
        return len({cache.lengths[0] for cache in self.caches}) == 1

    def next_positions(self, count: int) -> Tensor:
        """Positions of the next tokens of each."""
        return self.lengths_B[:, None] + torch.arange(count, device=self.device)

    def key_positions(self, layer: int) -> Tensor:
        """Positions in a layer's view; negative where a shorter one has no token."""
        seen = max(cache.count_visible(layer) for cache in self.caches)
        return self.next_positions(seen) - seen

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, G, K]: the views of all, the shorter ones with nothing in front."""
        views = [cache.view(layer) for cache in self.caches]
        if len(views) == 1:
            return views[0]
        longest = max(keys.shape[1] for keys, _ in views)
        padded = [[F.pad(t, (0, 0, 0, 0, longest - t.shape[1], 0)) for t in column] for column in zip(*views, strict=True)]
        keys_BTGK, values_BTGK = (torch.cat(column) for column in padded)
        return keys_BTGK, values_BTGK

    def append(self, layer: int, k_BSGK: Tensor, v_BSGK: Tensor, counts: Sequence[int]) -> None:
        """Each writes its own."""
        for row, cache in enumerate(self.caches):
            cache.append(layer, k_BSGK[row : row + 1], v_BSGK[row : row + 1], [counts[row]])

    def advance(self, counts: Sequence[int]) -> None:
        """What was appended counts."""
        for cache, count in zip(self.caches, counts, strict=True):
            cache.advance([count])
