"""KVCache: the keys and values of the committed context, and the only owner of that memory.

Knows positions, not tokens; has never heard of the canvas, whose keys are never stored. Rows may have different lengths.
Shapes: B rows, T cached tokens in view, S new tokens, G key-value heads, K head size.

Full layers keep every token. Sliding layers keep a ring of the last R tokens, position p in slot p % R, where R is
`window - 1` (all that can be seen) plus `rewind` (how far back the context may be cut). Example: window 4, rewind 2, so
R = 5; after 7 tokens the slots hold positions 5, 6, 2, 3, 4. A view of it is in order of position: 4, 5, 6.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from redraft.config import ModelConfig


class KVCache:
    """Keys and values by layer. `append` writes, `advance` makes it count, `view` reads, `rewind` cuts back."""

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rewind: int | None = None,
    ) -> None:
        """Room for `capacity` tokens a row. `rewind=None` allows cutting back to anywhere, at the price of memory."""
        self.capacity, self.rows, self.device, self._rewind = capacity, rows, torch.device(device), rewind
        self.lengths = [0] * rows
        self._windows = [config.layer_window(layer) for layer in range(config.num_hidden_layers)]
        self._sizes, self._keys, self._values = [], [], []
        self._oldest = [[0] * rows for _ in self._windows]  # positions still held, by layer; older ring slots are gone
        for layer, window in enumerate(self._windows):
            size = _size(window, capacity, rewind)
            heads, head_dim = config.layer_heads(layer)
            self._sizes.append(size)
            for store in (self._keys, self._values):
                store.append(torch.zeros(rows, size, heads, head_dim, dtype=dtype, device=self.device))

    @classmethod
    def count_bytes(cls, config: ModelConfig, capacity: int, dtype: torch.dtype, rewind: int | None = None) -> int:
        """What a cache of one row would hold."""
        total = 0
        for layer in range(config.num_hidden_layers):
            heads, head_dim = config.layer_heads(layer)
            total += 2 * _size(config.layer_window(layer), capacity, rewind) * heads * head_dim * dtype.itemsize
        return total

    @property
    def lengths_B(self) -> Tensor:
        """Tokens held by each row, as a tensor."""
        return torch.tensor(self.lengths, device=self.device)

    @property
    def has_equal_lengths(self) -> bool:
        """Whether all rows have the same length, so that none of them needs masking."""
        return len(set(self.lengths)) == 1

    @property
    def slot_addresses(self) -> tuple[list[int], list[int], list[int]]:
        """By layer: addresses of keys and of values [slots, G, K], and the number of slots. Position p is in slot p % slots.

        For kernels that look for themselves; of a cache of one row.
        """
        return [t.data_ptr() for t in self._keys], [t.data_ptr() for t in self._values], list(self._sizes)

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(t.nbytes for t in (*self._keys, *self._values))

    def next_positions(self, count: int) -> Tensor:
        """Positions of the next `count` tokens of each row: [B, count], or [1, count] where rows agree."""
        start = self.lengths_B[:1] if self.has_equal_lengths else self.lengths_B
        return start[:, None] + torch.arange(count, device=self.device)

    def key_positions(self, layer: int) -> Tensor:
        """The positions in a layer's view, [B, T] or [1, T]; negative where a shorter row has no token."""
        seen = self.count_visible(layer)
        return self.next_positions(seen) - seen

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, G, K] a canvas may see, in order of position, every row ending at its own length."""
        size, count = self._sizes[layer], self.count_visible(layer)
        start = (self.lengths[0] - count) % size
        if self.has_equal_lengths and start + count <= size:
            return self._keys[layer][:, start : start + count], self._values[layer][:, start : start + count]
        rows = torch.arange(self.rows, device=self.device)[:, None]
        slots = self.key_positions(layer) % size
        return self._keys[layer][rows, slots], self._values[layer][rows, slots]

    def append(self, layer: int, k_BSGK: Tensor, v_BSGK: Tensor, counts: Sequence[int]) -> None:
        """Writes the first counts[row] of S new tokens behind each row. They count once `advance` is called."""
        size = self._sizes[layer]
        self.check_room(counts)
        if self.has_equal_lengths and len(set(counts)) == 1 and (self.lengths[0] % size) + counts[0] <= size:
            start, count = self.lengths[0] % size, counts[0]
            self._keys[layer][:, start : start + count] = k_BSGK[:, :count]
            self._values[layer][:, start : start + count] = v_BSGK[:, :count]
            return
        for row, count in enumerate(counts):
            kept = range(max(0, count - size), count)  # of a long chunk only the ring's length survives
            slots = torch.tensor([(self.lengths[row] + i) % size for i in kept], dtype=torch.long, device=self.device)
            self._keys[layer][row, slots] = k_BSGK[row, kept.start : count]
            self._values[layer][row, slots] = v_BSGK[row, kept.start : count]

    def check_room(self, counts: Sequence[int]) -> None:
        """Refuses more tokens than fit."""
        for held, count in zip(self.lengths, counts, strict=True):
            if held + count > self.capacity:
                raise ValueError(f"the cache holds {self.capacity} tokens, {held} are used and {count} more do not fit")

    def select_rows(self, rows: Sequence[int]) -> "KVCache":
        """A cache of these rows of this one, in this order, a row as often as it is named."""
        other = copy.copy(self)
        at = torch.tensor(rows, dtype=torch.long, device=self.device)
        other.rows = len(rows)
        other.lengths = [self.lengths[row] for row in rows]
        other._oldest = [[oldest[row] for row in rows] for oldest in self._oldest]
        other._keys, other._values = ([tensor[at] for tensor in store] for store in (self._keys, self._values))
        return other

    def with_capacity(self, capacity: int) -> "KVCache":
        """The same context with another capacity, this one where it has it already. The old one must not be used again."""
        if capacity == self.capacity:
            return self
        other = copy.copy(self)
        other.capacity, other._keys, other._values = capacity, [], []
        other._sizes = [_size(window, capacity, self._rewind) for window in self._windows]
        for layer, size in enumerate(other._sizes):
            oldest = max(0, max(self.lengths) - min(size, self._sizes[layer]))
            held = torch.arange(oldest, max(self.lengths), device=self.device)
            for mine, theirs in ((self._keys, other._keys), (self._values, other._values)):
                moved = mine[layer].new_zeros(self.rows, size, *mine[layer].shape[2:])
                moved[:, held % size] = mine[layer][:, held % self._sizes[layer]]
                theirs.append(moved)
        other._oldest = [list(oldest) for oldest in self._oldest]
        other._forget()
        return other

    def advance(self, counts: Sequence[int]) -> None:
        """The tokens that every layer has appended become part of the context."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._forget()

    def _forget(self) -> None:
        """What no longer fits in the rings is gone."""
        for oldest, size in zip(self._oldest, self._sizes, strict=True):
            oldest[:] = [max(had, length - size) for had, length in zip(oldest, self.lengths, strict=True)]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Cuts each row back to a former length; what follows then is written over."""
        for row, length in enumerate(lengths):
            if not 0 <= length <= self.lengths[row]:
                raise ValueError(f"row {row} holds {self.lengths[row]} tokens and cannot be cut to {length}")
            for window, size, held in zip(self._windows, self._sizes, self._oldest, strict=True):
                oldest = held[row]
                if window is not None and max(0, length - (window - 1)) < oldest:
                    raise ValueError(
                        f"row {row} cannot be cut to {length}: its sliding layers keep {size} tokens, from {oldest} on; "
                        "make the cache with a larger rewind, or encode the context again"
                    )
        self.lengths = list(lengths)

    def count_visible(self, layer: int) -> int:
        """Tokens in a layer's view."""
        longest, window = max(self.lengths), self._windows[layer]
        return longest if window is None else min(longest, window - 1)


def _size(window: int | None, capacity: int, rewind: int | None) -> int:
    """Tokens a layer keeps."""
    return capacity if window is None or rewind is None else min(capacity, window - 1 + rewind)
