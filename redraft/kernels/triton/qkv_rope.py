"""Queries, keys and values from one product: norms of every head, and rotary positions. References: `norm.py`, `rope.py`.

Shapes: N tokens, H query heads, G key-value heads, K head size, P = K / 2 pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.triton.pdl import pdl_options, pdl_wait

AT_ONCE = 8  # heads of a token that one program turns: they share the angles


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
    """q_NHK, k_NGK and v_NGK. Without columns for values, the raw keys are the values."""
    n, size = len(qkv_NX), len(q_weight_K)
    all_NHK = torch.empty(n, heads + 2 * groups, size, dtype=qkv_NX.dtype, device=qkv_NX.device)
    own_values = qkv_NX.shape[1] == (heads + 2 * groups) * size
    half = triton.next_power_of_2(size // 2)
    _split_qkv_rope[(n, triton.cdiv(heads + 2 * groups, AT_ONCE))](
        qkv_NX, all_NHK, q_weight_K, k_weight_K, positions_N, frequencies_P,
        qkv_NX.shape[1], heads, groups, own_values, eps, size // 2, half, AT_ONCE, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return all_NHK[:, :heads], all_NHK[:, heads : heads + groups], all_NHK[:, heads + groups :]


@triton.jit
def _split_qkv_rope(
    qkv, out, q_weight, k_weight, positions, frequencies,
    X, H, G, OWN_VALUES: tl.constexpr, EPS: tl.constexpr, P, HALF: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: the first half of each is paired with the second."""
    pdl_wait(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    at = tl.arange(0, HALF)
    here, is_value = at < P, (head >= H + G)[:, None]
    column = head
    if not OWN_VALUES:
        column = tl.where(head >= H + G, head - G, head)
    valid = (head < H + 2 * G)[:, None] & here[None, :]
    base = qkv + token * X + column[:, None] * 2 * P + at[None, :]
    first = tl.load(base, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(base + P, mask=valid, other=0.0).to(tl.float32)
    mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * P)
    scale = (1.0 / tl.sqrt(mean + EPS))[:, None]
    first, second = first * scale, second * scale
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + at, mask=here, other=0.0)
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    of_q = (head < H)[:, None]
    one = first * tl.where(of_q, _weight(q_weight + at, here)[None, :], _weight(k_weight + at, here)[None, :])
    other = second * tl.where(of_q, _weight(q_weight + P + at, here)[None, :], _weight(k_weight + P + at, here)[None, :])
    first, second = (
        tl.where(is_value, first, one * cos - other * sin),
        tl.where(is_value, second, other * cos + one * sin),
    )
    place = out + (token * (H + 2 * G) + head[:, None]) * 2 * P + at[None, :]
    tl.store(place, first.to(out.dtype.element_ty), mask=valid)
    tl.store(place + P, second.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _weight(place, here):
    return tl.load(place, mask=here, other=0.0).to(tl.float32)
