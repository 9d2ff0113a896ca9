"""Attention of a few queries over many keys, with grouped heads and no 1/sqrt(K): Gemma 4 norms q and k instead.

Shapes: B rows, S queries, T keys, H query heads, G key-value heads (H a multiple of G), K head size.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention


def attend(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """Softmax(q k) v as [B, S, H * K].

    A dense mask is [B, S, T] and may have one query row for all; a BlockMask goes through FlexAttention, which skips what
    is masked altogether; None lets everyone see everything.
    """
    q, k, v = (t.transpose(1, 2) for t in (q_BSHK, k_BTGK, v_BTGK))
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        flex = _compiled_flex() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
        out_BHSK = flex(q, k, v, block_mask=mask, scale=1.0, enable_gqa=grouped)
    else:
        dense = mask[:, None] if mask is not None else None
        out_BHSK = F.scaled_dot_product_attention(q, k, v, attn_mask=dense, scale=1.0, enable_gqa=grouped)
    return out_BHSK.transpose(1, 2).flatten(2)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """Uncompiled, FlexAttention would write out all scores; compiled, it is a kernel. Compiled once, when first needed."""
    return torch.compile(flex_attention)
