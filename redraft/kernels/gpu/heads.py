"""Queries, keys and values from one product: norms of every head, and rotary positions. References: `norm.py`, `rope.py`.

Shapes: N tokens, H query heads, G key-value heads, K head size, P = K / 2 pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def to_heads(
    qkv_NX: Tensor,
    q_weight_K: Tensor,
    k_weight_K: Tensor,
    positions_N: Tensor,
    frequencies_P: Tensor,
    heads: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q_NHK, k_NGK and v_NGK. Without columns for values, the raw keys are the values."""
    n, size = len(qkv_NX), len(q_weight_K)
    all_NHK = torch.empty(n, heads + 2 * groups, size, dtype=qkv_NX.dtype, device=qkv_NX.device)
    own_values = qkv_NX.shape[1] == (heads + 2 * groups) * size
    half = triton.next_power_of_2(size // 2)
    _to_heads[(n, heads + 2 * groups)](
        qkv_NX, all_NHK, q_weight_K, k_weight_K, positions_N, frequencies_P,
        qkv_NX.shape[1], heads, groups, own_values, eps, size // 2, half, num_warps=1 if half <= 128 else 2,
    )  # fmt: skip
    return all_NHK[:, :heads], all_NHK[:, heads : heads + groups], all_NHK[:, heads + groups :]


@triton.jit
def _weight(place, here):
    return tl.load(place, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _to_heads(
    qkv, out, q_weight, k_weight, positions, frequencies,
    X, H, G, OWN_VALUES: tl.constexpr, EPS: tl.constexpr, P, HALF: tl.constexpr,
):  # fmt: skip
    """One head of one token: the first half of it is paired with the second."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, HALF)
    here = at < P
    is_value = head >= H + G
    column = head
    if not OWN_VALUES:
        column = tl.where(is_value, head - G, head)
    base = qkv + token * X + column * 2 * P
    first = tl.load(base + at, mask=here, other=0.0).to(tl.float32)
    second = tl.load(base + P + at, mask=here, other=0.0).to(tl.float32)
    mean = (tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / (2 * P)
    scale = 1.0 / tl.sqrt(mean + EPS)
    first, second = first * scale, second * scale
    if not is_value:
        of_q, of_k = here & (head < H), here & (head >= H)
        first = first * (_weight(q_weight + at, of_q) + _weight(k_weight + at, of_k))
        second = second * (_weight(q_weight + P + at, of_q) + _weight(k_weight + P + at, of_k))
        angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + at, mask=here, other=0.0)
        cos, sin = tl.cos(angle), tl.sin(angle)
        first, second = first * cos - second * sin, second * cos + first * sin
    place = out + (token * (H + 2 * G) + head) * 2 * P
    tl.store(place + at, first.to(out.dtype.element_ty), mask=here)
    tl.store(place + P + at, second.to(out.dtype.element_ty), mask=here)
