"""Splits the qkv product into heads, norms them, and applies RoPE. References: `kernels/norm.py`, `kernels/rope.py`.

Gemma norms every head. Llama norms none, or queries and keys, and its queries are scaled.

Shapes: N tokens, X columns of the product, H query heads, G key-value heads, K head size, P = K / 2 rotated pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.triton.pdl import _pdl_wait, pdl_options

BLOCK_HEADS = 8  # heads of a token per program: they share the angles


def split_qkv_rope(
    qkv_NX: Tensor,
    q_weight_K: Tensor,
    k_weight_K: Tensor,
    positions_N: Tensor,
    frequencies_P: Tensor,
    heads: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q_NHK, k_NGK and v_NGK. If the product has no columns for the values, the raw keys are the values."""
    n = len(qkv_NX)
    size = len(q_weight_K)
    all_heads = heads + 2 * groups
    out_NHK = torch.empty(n, all_heads, size, dtype=qkv_NX.dtype, device=qkv_NX.device)
    has_values = qkv_NX.shape[1] == all_heads * size
    _split_qkv_rope[(n, triton.cdiv(all_heads, BLOCK_HEADS))](
        qkv_NX, out_NHK, q_weight_K, k_weight_K, positions_N, frequencies_P,
        qkv_NX.shape[1], heads, groups, has_values, eps, size // 2, triton.next_power_of_2(size // 2), BLOCK_HEADS,
        num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out_NHK[:, :heads], out_NHK[:, heads : heads + groups], out_NHK[:, heads + groups :]


def split_llama_rope(
    qkv_NX: Tensor,
    norm_weights: tuple[Tensor, Tensor] | None,
    positions_N: Tensor,
    frequencies_P: Tensor,
    heads: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q_NHK, scaled by 1 / sqrt(K), k_NGK and v_NGK. `norm_weights`: of queries and keys, if they are normed."""
    n = len(qkv_NX)
    size = 2 * len(frequencies_P)
    all_heads = heads + 2 * groups
    out_NHK = torch.empty(n, all_heads, size, dtype=qkv_NX.dtype, device=qkv_NX.device)
    q_weight_K, k_weight_K = norm_weights if norm_weights is not None else (qkv_NX, qkv_NX)  # not read without norms
    _split_llama_rope[(n, triton.cdiv(all_heads, BLOCK_HEADS))](
        qkv_NX, out_NHK, q_weight_K, k_weight_K, positions_N, frequencies_P,
        heads, groups, norm_weights is not None, size**-0.5, eps, size // 2, triton.next_power_of_2(size // 2), BLOCK_HEADS,
        num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out_NHK[:, :heads], out_NHK[:, heads : heads + groups], out_NHK[:, heads + groups :]


@triton.jit
def _split_llama_rope(
    qkv, out, q_weight, k_weight, positions, frequencies, H, G, HAS_NORMS: tl.constexpr, Q_SCALE: tl.constexpr,
    EPS: tl.constexpr, P, P_PADDED: tl.constexpr, BLOCK_HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some heads of one token. The first half of each head is paired with the second half."""
    _pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, P_PADDED)
    mask_p = pair < P
    mask = (head < H + 2 * G)[:, None] & mask_p[None, :]
    offset = (token * (H + 2 * G) + head[:, None]) * 2 * P + pair[None, :]
    raw_1 = tl.load(qkv + offset, mask=mask, other=0.0).to(tl.float32)
    raw_2 = tl.load(qkv + offset + P, mask=mask, other=0.0).to(tl.float32)
    first = raw_1
    second = raw_2
    is_query = (head < H)[:, None]
    if HAS_NORMS:
        mean_square = (tl.sum(raw_1 * raw_1, axis=1) + tl.sum(raw_2 * raw_2, axis=1)) / (2 * P)
        scale = (1.0 / tl.sqrt(mean_square + EPS))[:, None]
        q_weight_1 = _load_f32(q_weight + pair, mask_p)[None, :]
        q_weight_2 = _load_f32(q_weight + P + pair, mask_p)[None, :]
        first = raw_1 * scale * tl.where(is_query, q_weight_1, _load_f32(k_weight + pair, mask_p)[None, :])
        second = raw_2 * scale * tl.where(is_query, q_weight_2, _load_f32(k_weight + P + pair, mask_p)[None, :])
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + pair, mask=mask_p, other=0.0)
    cos = tl.cos(angle)[None, :]
    sin = tl.sin(angle)[None, :]
    factor = tl.where(is_query, Q_SCALE, 1.0)
    is_value = (head >= H + G)[:, None]
    turned_1 = tl.where(is_value, raw_1, (first * cos - second * sin) * factor)
    turned_2 = tl.where(is_value, raw_2, (second * cos + first * sin) * factor)
    tl.store(out + offset, turned_1.to(out.dtype.element_ty), mask=mask)
    tl.store(out + offset + P, turned_2.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _split_qkv_rope(
    qkv, out, q_weight, k_weight, positions, frequencies, X, H, G, HAS_VALUES: tl.constexpr, EPS: tl.constexpr,
    P, P_PADDED: tl.constexpr, BLOCK_HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some heads of one token. The first half of each head is paired with the second half."""
    _pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, P_PADDED)
    mask_p = pair < P
    is_value = (head >= H + G)[:, None]
    column = head
    if not HAS_VALUES:
        column = tl.where(head >= H + G, head - G, head)
    mask = (head < H + 2 * G)[:, None] & mask_p[None, :]
    in_ptr = qkv + token * X + column[:, None] * 2 * P + pair[None, :]
    first = tl.load(in_ptr, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(in_ptr + P, mask=mask, other=0.0).to(tl.float32)
    mean_square = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * P)
    scale = (1.0 / tl.sqrt(mean_square + EPS))[:, None]
    first = first * scale
    second = second * scale
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + pair, mask=mask_p, other=0.0)
    cos = tl.cos(angle)[None, :]
    sin = tl.sin(angle)[None, :]
    is_query = (head < H)[:, None]
    weight_1 = tl.where(is_query, _load_f32(q_weight + pair, mask_p)[None, :], _load_f32(k_weight + pair, mask_p)[None, :])
    normed_1 = first * weight_1
    q_weight_2 = _load_f32(q_weight + P + pair, mask_p)[None, :]
    weight_2 = tl.where(is_query, q_weight_2, _load_f32(k_weight + P + pair, mask_p)[None, :])
    normed_2 = second * weight_2
    first = tl.where(is_value, first, normed_1 * cos - normed_2 * sin)
    second = tl.where(is_value, second, normed_2 * cos + normed_1 * sin)
    out_ptr = out + (token * (H + 2 * G) + head[:, None]) * 2 * P + pair[None, :]
    tl.store(out_ptr, first.to(out.dtype.element_ty), mask=mask)
    tl.store(out_ptr + P, second.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_f32(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
