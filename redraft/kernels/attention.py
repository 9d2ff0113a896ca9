"""Attention of a few queries over many keys, with grouped heads and no 1/sqrt(K): Gemma 4 norms q and k instead.

Shapes: B rows, S queries, T keys, H query heads, G key-value heads (H a multiple of G), K head size.
"""

import torch.nn.functional as F
from torch import Tensor


def attend(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask_BST: Tensor | None) -> Tensor:
    """Softmax(q k) v as [B, S, H * K]. The mask may have one query row for all; None lets everyone see everything."""
    mask = mask_BST[:, None] if mask_BST is not None else None
    out_BHSK = F.scaled_dot_product_attention(
        q_BSHK.transpose(1, 2),
        k_BTGK.transpose(1, 2),
        v_BTGK.transpose(1, 2),
        attn_mask=mask,
        scale=1.0,
        enable_gqa=q_BSHK.shape[2] != k_BTGK.shape[2],
    )
    return out_BHSK.transpose(1, 2).flatten(2)
