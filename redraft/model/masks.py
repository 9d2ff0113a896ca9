"""Attention masks: pure functions of token positions. True means that the query may attend to the key.

The cache passes in the positions of its keys; a negative position marks an empty slot. All heads share a mask.
Shapes: B rows (1 where all rows agree), S queries, T cached keys, C canvas positions, L tokens of a training row.

A causal query at position q attends to keys k <= q, on a sliding layer only to the last `window` of them, itself included.
Tokens of an image also attend to all other tokens of that image, whatever the window.
A canvas query attends to the whole canvas and to the cache, on a sliding layer only to the last `window - 1` cached tokens.
Every position of a canvas attends to the same cached tokens. Example: with window 4 and 10 cached tokens, each position of a
canvas at 10, 11, 12 attends to 7, 8, 9 and 10, 11, 12.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def causal(queries_BS: Tensor, keys_BT: Tensor, window: int | None) -> Tensor:
    """Encoder mask bool_BST, from the positions of queries and keys (cached or new)."""
    q_BS1 = queries_BS[:, :, None]
    k_B1T = keys_BT[:, None, :]
    allowed_BST = (k_B1T >= 0) & (k_B1T <= q_BS1)
    if window is not None:
        allowed_BST &= q_BS1 - k_B1T < window
    return allowed_BST


def join_images(allowed_BST: Tensor, images_BS: Tensor) -> Tensor:
    """The encoder mask with images: the last S of its T keys are the new tokens, those of an image attend to one another.

    images_BS numbers the images of a row, from 0; a token of text has -1.
    """
    count = images_BS.shape[1]
    is_same_BSS = (images_BS[:, :, None] == images_BS[:, None, :]) & (images_BS[:, :, None] >= 0)
    rows = max(len(allowed_BST), len(images_BS))
    cached_BST = allowed_BST[..., :-count].expand(rows, -1, -1)
    return torch.cat([cached_BST, allowed_BST[..., -count:] | is_same_BSS], dim=2)


def cached_for_canvas(lengths_B: Tensor, keys_BT: Tensor, window: int | None) -> Tensor:
    """The cached keys that a canvas attends to, bool_BT: the same keys for each canvas position."""
    allowed_BT = keys_BT >= 0
    if window is not None:
        allowed_BT &= keys_BT >= lengths_B[:, None] - (window - 1)
    return allowed_BT


def canvas(lengths_B: Tensor, keys_BT: Tensor, canvas_length: int, window: int | None) -> Tensor:
    """Denoiser mask bool_B1(T+C) over [cache ; canvas]. All queries share it, so the query axis has size 1."""
    cached_BT = cached_for_canvas(lengths_B, keys_BT, window)
    canvas_BC = torch.ones(cached_BT.shape[0], canvas_length, dtype=torch.bool, device=cached_BT.device)
    return torch.cat([cached_BT, canvas_BC], dim=1)[:, None, :]


def joint(
    lengths_B: Tensor, keys_BT: Tensor, clean_count: int, after_J: Tensor, canvas_length: int, window: int | None
) -> Tensor:
    """Mask bool_B(S+JC)(T+S+JC) of a joint forward over [cache ; clean tokens ; canvases].

    The S clean tokens are causal. Canvas j stands behind clean token after_J[j]: its positions attend to one another, to the
    clean tokens up to that one and to the cache, as `canvas` allows after these tokens were cached. No canvas attends to
    another canvas, and no clean token to a canvas.
    """
    device = lengths_B.device
    clean_BS = lengths_B[:, None] + torch.arange(clean_count, device=device)
    clean_keys_BK = torch.cat([keys_BT.expand(len(clean_BS), -1), clean_BS], dim=1)
    clean_BSK = causal(clean_BS, clean_keys_BK, window)
    starts_BJ = lengths_B[:, None] + after_J + 1
    behind_BJK = (clean_keys_BK[:, None, :] >= 0) & (clean_keys_BK[:, None, :] < starts_BJ[..., None])
    if window is not None:
        behind_BJK &= clean_keys_BK[:, None, :] >= starts_BJ[..., None] - (window - 1)
    canvases = len(after_J) * canvas_length
    canvas_index = torch.arange(canvases, device=device) // canvas_length
    same_canvas = canvas_index[:, None] == canvas_index
    upper = torch.cat([clean_BSK, clean_BSK.new_zeros(len(clean_BS), clean_count, canvases)], dim=2)
    behind = behind_BJK.repeat_interleave(canvas_length, dim=1)
    lower = torch.cat([behind, same_canvas.expand(len(clean_BS), -1, -1)], dim=2)
    return torch.cat([upper, lower], dim=1)


@dataclass(frozen=True)
class Layout:
    """Positions, canvases and documents of the tokens of packed training rows. All tensors are [B, L].

    `starts` is the position at which a token's canvas begins, -1 where a token is never noised (prompt, padding).
    `documents` numbers the documents of a row, -1 for padding.
    """

    positions: Tensor
    starts: Tensor
    documents: Tensor

    def to(self, device: torch.device | str) -> "Layout":
        """Copies the layout to another device."""
        return Layout(*(t.to(device, non_blocking=True) for t in (self.positions, self.starts, self.documents)))


@dataclass(frozen=True)
class Spans:
    """The training mask in compact form: the keys that each query of [noisy | clean] attends to.

    A query attends to the clean tokens with index `low` <= index < `high`, and to the noisy tokens of its own `block`.
    All tensors are [B, 2L]. Indices count from the start of the row. A block is numbered by the index of its first token;
    a token outside every block has a negative number of its own.
    """

    low: Tensor
    high: Tensor
    block: Tensor


def spans(layout: Layout, window: int | None) -> Spans:
    """The mask of one training forward over [noisy | clean].

    Clean tokens attend causally, as in `causal`. A noisy token attends to its whole noisy block and to the clean tokens
    before that block, as `canvas` allows after everything before has been committed. The clean copy of its own block must
    stay hidden, or the model would copy the answer. No token attends to another document. A token that is never noised,
    or that is padding, attends on the noisy side only to itself.
    """
    length = layout.positions.shape[1]
    index_L = torch.arange(length, device=layout.positions.device)
    document_start_BL = index_L - layout.positions
    noised_BL = (layout.starts >= 0) & (layout.documents >= 0)
    block_BL = torch.where(noised_BL, document_start_BL + layout.starts, -1 - index_L)
    noisy_high_BL = torch.where(noised_BL, block_BL, 0)
    clean_high_BL = torch.where(layout.documents >= 0, index_L + 1, 0)
    high_BS = torch.cat([noisy_high_BL, clean_high_BL], dim=1)
    low_BS = document_start_BL.repeat(1, 2)
    if window is not None:
        # A canvas attends to the last window - 1 tokens before it; a clean token counts itself as part of its window.
        window_low_BS = torch.cat([noisy_high_BL - (window - 1), clean_high_BL - window], dim=1)
        low_BS = torch.maximum(low_BS, window_low_BS)
    clean_block_BL = (-1 - length - index_L).expand_as(block_BL)
    return Spans(low_BS, high_BS, torch.cat([block_BL, clean_block_BL], dim=1))


MaskFunction = Callable[[Tensor, Tensor, Tensor], Tensor]  # row, query index, key index (0 .. 2L - 1) -> may attend


def training(spans: Spans) -> MaskFunction:
    """Spans as a mask function. `dense` evaluates it everywhere; FlexAttention compiles it into its kernel."""
    low = spans.low
    high = spans.high
    block = spans.block
    length = low.shape[1] // 2

    def may_attend(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        clean_index = k - length  # negative for noisy keys, and no span begins below zero
        is_in_span = (clean_index >= low[b, q]) & (clean_index < high[b, q])
        return is_in_span | (block[b, q] == block[b, k])

    return may_attend


def dense(mask_function: MaskFunction, rows: int, size: int, device: torch.device) -> Tensor:
    """Evaluates a mask function at all indices, bool [B, size, size]."""
    b = torch.arange(rows, device=device)[:, None, None]
    index = torch.arange(size, device=device)
    return mask_function(b, index[None, :, None], index[None, None, :])
