"""Grouped-query attention. Gemma 4 normalises q and k and has a scale of 1; Llama scales by 1/sqrt(K).

Shapes: B rows, S queries, T keys, H query heads, G key-value heads (H is a multiple of G), K head size.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

# Scores that are computed at once, by kind of device. Torch keeps all of them where none of its kernels fits, as with the
# large heads of full layers; on a GPU they could fill the memory.
SCORES_AT_ONCE = {"cuda": 2**26}


def attend(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Tensor | BlockMask | None, scale: float = 1.0) -> Tensor:
    """Returns softmax(scale q k) v as [B, S, H * K].

    A dense mask is [B, S, T]; [B, 1, T] applies to every query. A BlockMask selects FlexAttention, which skips masked
    blocks. Without a mask every query attends to every key.
    """
    q, k, v = (t.transpose(1, 2) for t in (q_BSHK, k_BTGK, v_BTGK))
    is_grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        flex: Any = _compiled_flex() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
        out_BHSK = flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=is_grouped)
    else:
        out_BHSK = _attend_densely(q, k, v, mask[:, None] if mask is not None else None, scale)
    return out_BHSK.transpose(1, 2).flatten(2)


def _attend_densely(q_BHSK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask_B1ST: Tensor | None, scale: float) -> Tensor:
    """Torch's own attention. On a GPU, its kernels that need little memory take groups or a mask, not both."""
    shape = q_BHSK.shape
    group = shape[1] // k_BGTK.shape[1]
    if group > 1 and mask_B1ST is not None and has_no_grouped_kernel(q_BHSK):
        if mask_B1ST.shape[2] == 1:  # all queries see the same keys: those of a group are queries of one head
            q_BHSK, group = q_BHSK.reshape(shape[0], k_BGTK.shape[1], -1, shape[3]), 1
        elif q_BHSK.requires_grad:
            k_BGTK, v_BGTK = (t.repeat_interleave(group, dim=1) for t in (k_BGTK, v_BGTK))
            group = 1
    parts = []
    for begin, end in _split_queries(q_BHSK, k_BGTK):
        mask = mask_B1ST if mask_B1ST is None or mask_B1ST.shape[2] == 1 else mask_B1ST[:, :, begin:end]
        part = q_BHSK[:, :, begin:end]
        parts.append(F.scaled_dot_product_attention(part, k_BGTK, v_BGTK, attn_mask=mask, scale=scale, enable_gqa=group > 1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).reshape(shape)


def has_no_grouped_kernel(q: Tensor) -> bool:
    """Whether torch would copy the keys and values of a group for each of its heads, to apply a mask."""
    return q.is_cuda


def _split_queries(q_BHSK: Tensor, k_BGTK: Tensor) -> list[tuple[int, int]]:
    """Which queries attend together: (first, end) of each group. With gradients, all of them."""
    rows, heads, count, _ = q_BHSK.shape
    limit = SCORES_AT_ONCE.get(q_BHSK.device.type)
    if limit is None or q_BHSK.requires_grad or not count:
        return [(0, count)]
    at_once = max(1, limit // (rows * heads * max(1, k_BGTK.shape[2])))
    return [(begin, min(begin + at_once, count)) for begin in range(0, count, at_once)]


@cache
def _compiled_flex() -> Callable[..., Any]:
    """Compiles FlexAttention into one kernel, at the first call. Uncompiled it would store all scores."""
    return torch.compile(flex_attention)
