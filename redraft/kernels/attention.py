"""Grouped-query attention without the 1/sqrt(K) scale: Gemma 4 normalises q and k instead.

Shapes: B rows, S queries, T keys, H query heads, G key-value heads (H is a multiple of G), K head size.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention


def attend(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """Returns softmax(q k) v as [B, S, H * K].

    A dense mask is [B, S, T]; [B, 1, T] applies to every query. A BlockMask selects FlexAttention, which skips masked
    blocks. Without a mask every query attends to every key.
    """
    q, k, v = (t.transpose(1, 2) for t in (q_BSHK, k_BTGK, v_BTGK))
    is_grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        flex: Any = _compiled_flex() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
        out_BHSK = flex(q, k, v, block_mask=mask, scale=1.0, enable_gqa=is_grouped)
    else:
        dense = mask[:, None] if mask is not None else None
        if is_grouped and dense is not None and q.is_cuda and q.requires_grad:
            # The kernel that needs little memory takes no groups; without it all scores would be stored.
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
            is_grouped = False
        out_BHSK = F.scaled_dot_product_attention(q, k, v, attn_mask=dense, scale=1.0, enable_gqa=is_grouped)
    return out_BHSK.transpose(1, 2).flatten(2)


@cache
def _compiled_flex() -> Callable[..., Any]:
    """Compiles FlexAttention into one kernel, at the first call. Uncompiled it would store all scores."""
    return torch.compile(flex_attention)
