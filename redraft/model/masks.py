"""Who may look at whom. Pure functions of positions; True means "may look".

Knows nothing of the cache, which hands in the positions its keys hold (negative where a slot holds nothing), nor of heads.
Shapes: B rows (1 where all rows agree), S queries, T cached keys, C canvas positions.

A causal query at position q sees keys k <= q, on a sliding layer only the last `window` of them, itself included.
A canvas query sees the whole canvas and the cache, on a sliding layer only the last `window - 1` cached tokens: the same
ones for every position of the canvas. With window 4 and 10 cached tokens, a canvas at positions 10, 11, 12 sees 7, 8, 9
and 10, 11, 12, from each of its positions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def causal(queries_BS: Tensor, keys_BT: Tensor, window: int | None) -> Tensor:
    """Encoder mask bool_BST over any keys, cached or new."""
    q_BS1, k_B1T = queries_BS[:, :, None], keys_BT[:, None, :]
    allowed_BST = (k_B1T >= 0) & (k_B1T <= q_BS1)
    if window is not None:
        allowed_BST &= q_BS1 - k_B1T < window
    return allowed_BST


def cached_for_canvas(lengths_B: Tensor, keys_BT: Tensor, window: int | None) -> Tensor:
    """Which cached keys a canvas sees, bool_BT: the same for each of its positions."""
    allowed_BT = keys_BT >= 0
    if window is not None:
        allowed_BT &= keys_BT >= lengths_B[:, None] - (window - 1)
    return allowed_BT


def canvas(lengths_B: Tensor, keys_BT: Tensor, canvas_length: int, window: int | None) -> Tensor:
    """Denoiser mask bool_B1(T+C) over [cache ; canvas]; one row serves every query."""
    seen_BT = cached_for_canvas(lengths_B, keys_BT, window)
    own_BC = torch.ones(seen_BT.shape[0], canvas_length, dtype=torch.bool, device=seen_BT.device)
    return torch.cat([seen_BT, own_BC], dim=1)[:, None, :]


@dataclass(frozen=True)
class Layout:
    """Where each token of a training row stands. All [B, L].

    `starts` is the position at which a token's block begins, -1 where nothing is ever noised (prompt, padding).
    """

    positions: Tensor
    starts: Tensor
    documents: Tensor

    def to(self, device: torch.device | str) -> "Layout":
        """The same on another device."""
        return Layout(*(t.to(device, non_blocking=True) for t in (self.positions, self.starts, self.documents)))


@dataclass(frozen=True)
class Spans:
    """What a query of [noisy | clean] sees, over its 2L indices: clean tokens from `low` to before `high`, and its `block`.

    All [B, 2L], in places of the row. Blocks are numbered by where they begin; what is in none has a number of its own.
    """

    low: Tensor
    high: Tensor
    block: Tensor


def spans(layout: Layout, window: int | None) -> Spans:
    """The mask of one pass over [noisy | clean].

    Clean tokens read causally, as in `causal`. A noisy token sees its whole block of noise, and of the clean half what
    lies before its block: what `canvas` would show it after everything before was committed. Strictly before: were the
    clean copy of its own block in sight, there would be nothing to learn. Nobody sees another document; a token that is
    never noised sees, as noise, only itself, and so does padding.
    """
    length = layout.positions.shape[1]
    place_L = torch.arange(length, device=layout.positions.device)
    origin_BL = place_L - layout.positions  # of the document
    noised_BL = (layout.starts >= 0) & (layout.documents >= 0)
    block_BL = torch.where(noised_BL, origin_BL + layout.starts, -1 - place_L)
    high_BL = torch.where(noised_BL, block_BL, 0)
    end_BL = torch.where(layout.documents >= 0, place_L + 1, 0)
    high_BS, low_BS = torch.cat([high_BL, end_BL], dim=1), origin_BL.repeat(1, 2)
    if window is not None:
        # A canvas sees the last window - 1 tokens before it; a clean token counts itself among its window.
        seen = torch.cat([high_BL - (window - 1), end_BL - window], dim=1)
        low_BS = torch.maximum(low_BS, seen)
    alone_BL = (-1 - length - place_L).expand_as(block_BL)
    return Spans(low_BS, high_BS, torch.cat([block_BL, alone_BL], dim=1))


MaskFunction = Callable[[Tensor, Tensor, Tensor], Tensor]  # row, query and key index (0 .. 2L - 1) -> may look


def training(spans: Spans) -> MaskFunction:
    """Spans as a rule, the same for a dense mask and for FlexAttention, which compiles it into its kernel."""
    low, high, block = spans.low, spans.high, spans.block
    length = low.shape[1] // 2

    def may_look(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        place = k - length  # negative for noisy keys, and no span begins below zero
        return ((place >= low[b, q]) & (place < high[b, q])) | (block[b, q] == block[b, k])

    return may_look


def dense(rule: MaskFunction, rows: int, size: int, device: torch.device) -> Tensor:
    """A rule over indices as bool [B, size, size]."""
    b = torch.arange(rows, device=device)[:, None, None]
    index = torch.arange(size, device=device)
    return rule(b, index[None, :, None], index[None, None, :])
