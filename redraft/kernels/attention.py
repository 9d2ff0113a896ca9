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
        dense = mask[:, None] if mask is not None else None
        if is_grouped and dense is not None and q.is_cuda and q.requires_grad:
            # The kernel that needs little memory takes no groups; without it all scores would be stored.
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
            is_grouped = False
        parts = []
        for begin, end in _split_queries(q, k):
            own = dense if dense is None or dense.shape[2] == 1 else dense[:, :, begin:end]
            part = q[:, :, begin:end]
            parts.append(F.scaled_dot_product_attention(part, k, v, attn_mask=own, scale=scale, enable_gqa=is_grouped))
        out_BHSK = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out_BHSK.transpose(1, 2).flatten(2)


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
