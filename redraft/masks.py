"""Who may look at whom. Pure functions of positions; True means "may look".

Knows nothing of the cache, which hands in the positions its keys hold (negative where a slot holds nothing), nor of heads.
Shapes: B rows (1 where all rows agree), S queries, T cached keys, C canvas positions.

A causal query at position q sees keys k <= q, on a sliding layer only the last `window` of them, itself included.
A canvas query sees the whole canvas and the cache, on a sliding layer only the last `window - 1` cached tokens: the same
ones for every position of the canvas. With window 4 and 10 cached tokens, a canvas at positions 10, 11, 12 sees 7, 8, 9
and 10, 11, 12, from each of its positions.
"""

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
