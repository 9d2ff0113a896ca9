"""KVCache: the keys and values of the committed context, and the owner of that memory.

The cache stores positions, not tokens. Canvas keys are never stored. Rows may have different lengths.
Shapes: B rows, T cached tokens in view, S new tokens, G key-value heads, K head size.

Full layers store every token. Sliding layers store a ring of the last R tokens, position p in slot p % R. R is `window - 1`
(all that a canvas attends to) plus `rewind` (how far back the context may be cut). Example: window 4 and rewind 2 give
R = 5; after 7 tokens the slots hold positions 5, 6, 2, 3, 4. The view is in order of position: 4, 5, 6.

An fp8 cache stores e4m3 numbers without a scale: keys and values are normed, so they are far from its limit of 448.
"""

import copy
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from redraft.config import BackboneConfig
from redraft.kernels.fp8 import FP8_DTYPE, FP8_MAX
from redraft.model.lora import Adapter


class ContextCache(Protocol):
    """The methods of a cache that `Backbone.encode` and `.denoise` call. KVCache has them, and BatchedCache."""

    @property
    def adapters(self) -> Sequence[Adapter | None]:
        """The adapter of each row: keys and values that were made with one adapter are of no use with another."""

    @property
    def lengths_B(self) -> Tensor:
        """Cached tokens of each row."""

    @property
    def has_equal_lengths(self) -> bool:
        """Whether all rows have the same length, so that denoising needs no mask."""

    def next_positions(self, count: int) -> Tensor:
        """Positions of the next `count` tokens of each row: [B, count], or [1, count] where rows agree."""

    def key_positions(self, layer: int) -> Tensor:
        """Positions of the keys in a layer's view, [B, T] or [1, T]; negative where a shorter row has no token."""

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, G, K] of a layer, in order of position."""

    def append(self, layer: int, k_BSGK: Tensor, v_BSGK: Tensor, counts: Sequence[int]) -> None:
        """Writes the first counts[row] of S new tokens after each row's context."""

    def advance(self, counts: Sequence[int]) -> None:
        """Adds the appended tokens to the context, once every layer has appended them."""


def to_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as a cache of this dtype stores them."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE) if dtype == FP8_DTYPE else x.to(dtype)


class KVCache:
    """Keys and values by layer. `append` writes, `advance` makes the tokens count, `view` reads, `rewind` cuts back."""

    def __init__(
        self,
        config: BackboneConfig,
        rows: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        stored: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        rewind: int | None = None,
    ) -> None:
        """Allocates room for `capacity` tokens per row. `rewind=None` allows cutting back to any length, but stores all.

        Views have the dtype `dtype`. The memory has the dtype `stored`, the same one unless it is given.
        """
        self.capacity = capacity
        self.rows = rows
        self.device = torch.device(device)
        self.lengths = [0] * rows
        self.adapter: Adapter | None = None  # of all rows
        self._dtype = dtype
        self._stored = stored or dtype
        self._rewind = rewind
        self._windows = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
        self._sizes = [_ring_size(window, capacity, rewind) for window in self._windows]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        # By layer and row, the oldest position still stored: older ring slots have been overwritten.
        self._oldest = [[0] * rows for _ in self._windows]
        for layer, size in enumerate(self._sizes):
            heads, head_dim = config.layer_heads(layer)
            for tensors in (self._keys, self._values):
                tensors.append(torch.zeros(rows, size, heads, head_dim, dtype=self._stored, device=self.device))

    @classmethod
    def count_bytes(cls, config: BackboneConfig, capacity: int, dtype: torch.dtype, rewind: int | None = None) -> int:
        """The memory that a cache of one row would take. `dtype` is the one that is stored."""
        total = 0
        for layer in range(config.num_hidden_layers):
            heads, head_dim = config.layer_heads(layer)
            size = _ring_size(config.layer_window(layer), capacity, rewind)
            total += 2 * size * heads * head_dim * dtype.itemsize
        return total

    @property
    def adapters(self) -> list[Adapter | None]:
        """The adapter of each row."""
        return [self.adapter] * self.rows

    @property
    def lengths_B(self) -> Tensor:
        """Cached tokens of each row, as a tensor."""
        return torch.tensor(self.lengths, device=self.device)

    @property
    def has_equal_lengths(self) -> bool:
        """Whether all rows have the same length, so that denoising needs no mask."""
        return len(set(self.lengths)) == 1

    @property
    def slot_addresses(self) -> tuple[list[int], list[int], list[int]]:
        """By layer: memory addresses of keys and of values [slots, G, K], and the number of slots.

        For kernels that read the slots in place: position p is in slot p % slots. Only for a cache of one row.
        """
        keys = [tensor.data_ptr() for tensor in self._keys]
        values = [tensor.data_ptr() for tensor in self._values]
        return keys, values, list(self._sizes)

    @property
    def nbytes(self) -> int:
        """Memory of all keys and values."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def next_positions(self, count: int) -> Tensor:
        """Positions of the next `count` tokens of each row: [B, count], or [1, count] where rows agree."""
        start = self.lengths_B[:1] if self.has_equal_lengths else self.lengths_B
        return start[:, None] + torch.arange(count, device=self.device)

    def key_positions(self, layer: int) -> Tensor:
        """Positions of the keys in a layer's view, [B, T] or [1, T]; negative where a shorter row has no token."""
        visible = self.count_visible(layer)
        return self.next_positions(visible) - visible

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, G, K] that a canvas attends to, in order of position. Each row ends at its own length."""
        size = self._sizes[layer]
        count = self.count_visible(layer)
        start = (self.lengths[0] - count) % size
        if self.has_equal_lengths and start + count <= size:
            keys = self._keys[layer][:, start : start + count]
            values = self._values[layer][:, start : start + count]
        else:
            rows = torch.arange(self.rows, device=self.device)[:, None]
            slots = self.key_positions(layer) % size
            keys = self._keys[layer][rows, slots]
            values = self._values[layer][rows, slots]
        return keys.to(self._dtype), values.to(self._dtype)

    def append(self, layer: int, k_BSGK: Tensor, v_BSGK: Tensor, counts: Sequence[int]) -> None:
        """Writes the first counts[row] of S new tokens after each row's context. They count once `advance` is called."""
        size = self._sizes[layer]
        k_BSGK = to_stored(k_BSGK, self._stored)
        v_BSGK = to_stored(v_BSGK, self._stored)
        self.check_room(counts)
        start = self.lengths[0] % size
        if self.has_equal_lengths and len(set(counts)) == 1 and start + counts[0] <= size:
            count = counts[0]
            self._keys[layer][:, start : start + count] = k_BSGK[:, :count]
            self._values[layer][:, start : start + count] = v_BSGK[:, :count]
            return
        for row, count in enumerate(counts):
            stored = range(max(0, count - size), count)  # of a chunk longer than the ring, only the end survives
            slots = torch.tensor([(self.lengths[row] + i) % size for i in stored], dtype=torch.long, device=self.device)
            self._keys[layer][row, slots] = k_BSGK[row, stored.start : count]
            self._values[layer][row, slots] = v_BSGK[row, stored.start : count]

    def check_room(self, counts: Sequence[int]) -> None:
        """Refuses more tokens than fit."""
        for length, count in zip(self.lengths, counts, strict=True):
            if length + count > self.capacity:
                raise ValueError(f"the cache holds {self.capacity} tokens, {length} are used and {count} more do not fit")

    def select_rows(self, rows: Sequence[int]) -> "KVCache":
        """Copies these rows, in this order, into a new cache. A row may be named more than once."""
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        other = copy.copy(self)
        other.rows = len(rows)
        other.lengths = [self.lengths[row] for row in rows]
        other._oldest = [[oldest[row] for row in rows] for oldest in self._oldest]
        other._keys = [tensor[index] for tensor in self._keys]
        other._values = [tensor[index] for tensor in self._values]
        return other

    def with_capacity(self, capacity: int) -> "KVCache":
        """Moves the context into a cache of another capacity. Do not use the old cache afterwards.

        Returns this cache itself when the capacity is the same. The old tensors are freed one by one, so that both caches
        together need hardly more memory than the larger one.
        """
        return self if capacity == self.capacity else self._resized(capacity, frees=True)

    def copy_prefix(self, length: int, capacity: int) -> "KVCache":
        """A cache of another capacity with the first `length` tokens of the only row, if they can be cut as by `rewind`.

        This cache stays as it is.
        """
        other = copy.copy(self)
        other.rewind([length])
        return other._resized(capacity, frees=False)

    def _resized(self, capacity: int, *, frees: bool) -> "KVCache":
        other = copy.copy(self)
        other.capacity = capacity
        other._sizes = [_ring_size(window, capacity, self._rewind) for window in self._windows]
        other._keys = self._moved(self._keys, other._sizes, frees)
        other._values = self._moved(self._values, other._sizes, frees)
        other._oldest = [list(oldest) for oldest in self._oldest]
        other._update_oldest()
        return other

    def _moved(self, tensors: list[Tensor], new_sizes: list[int], frees: bool) -> list[Tensor]:
        """Copies each layer's stored tokens into a ring of another size; `frees` gives up the old tensor at once."""
        longest = max(self.lengths)
        moved = []
        for layer, (old_size, new_size) in enumerate(zip(self._sizes, new_sizes, strict=True)):
            copied = tensors[layer].new_zeros(self.rows, new_size, *tensors[layer].shape[2:])
            if longest <= min(old_size, new_size):  # no ring has wrapped: each position is its own slot
                copied[:, :longest] = tensors[layer][:, :longest]
            else:
                positions = torch.arange(max(0, longest - min(old_size, new_size)), longest, device=self.device)
                copied[:, positions % new_size] = tensors[layer][:, positions % old_size]
            if frees:
                tensors[layer] = copied
            moved.append(copied)
        return moved

    def advance(self, counts: Sequence[int]) -> None:
        """Adds the appended tokens to the context, once every layer has appended them."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._update_oldest()

    def _update_oldest(self) -> None:
        """Notes that tokens which no longer fit in the rings are overwritten."""
        if max(self.lengths) <= min(self._sizes):
            return
        for oldest_by_row, size in zip(self._oldest, self._sizes, strict=True):
            pairs = zip(oldest_by_row, self.lengths, strict=True)
            oldest_by_row[:] = [max(oldest, length - size) for oldest, length in pairs]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Cuts each row back to a former length. Later tokens are overwritten by the next `append`."""
        for row, length in enumerate(lengths):
            if not 0 <= length <= self.lengths[row]:
                raise ValueError(f"row {row} holds {self.lengths[row]} tokens and cannot be cut to {length}")
            for window, size, oldest_by_row in zip(self._windows, self._sizes, self._oldest, strict=True):
                oldest = oldest_by_row[row]
                if window is not None and max(0, length - (window - 1)) < oldest:
                    raise ValueError(
                        f"row {row} cannot be cut to {length}: its sliding layers store {size} tokens, from {oldest} on; "
                        "make the cache with a larger rewind, or encode the context again"
                    )
        self.lengths = list(lengths)

    def count_visible(self, layer: int) -> int:
        """The number of tokens in a layer's view."""
        longest = max(self.lengths)
        window = self._windows[layer]
        return longest if window is None else min(longest, window - 1)


def _ring_size(window: int | None, capacity: int, rewind: int | None) -> int:
    """The number of tokens that a layer stores."""
    return capacity if window is None or rewind is None else min(capacity, window - 1 + rewind)
