"""The router's choice and the order it puts tokens in: `moe.Router` from its scores on, and the sort of `gated_experts`.

Shapes: N tokens, K experts chosen per token, E experts, M = N * K pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS = 2048  # looked through at once


def route(scores_NE: Tensor, scale_E: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """experts_NK (int32) and weights_NK (float32): softmax, the best K, renormalised, scaled per expert."""
    n, experts = scores_NE.shape
    experts_NK = torch.empty(n, chosen, dtype=torch.int32, device=scores_NE.device)
    weights_NK = torch.empty(n, chosen, dtype=torch.float32, device=scores_NE.device)
    wide, few = triton.next_power_of_2(experts), triton.next_power_of_2(chosen)
    _route[(n,)](scores_NE, scale_E, experts_NK, weights_NK, experts, chosen, wide, few, num_warps=1)
    return experts_NK, weights_NK


@triton.jit
def _route(scores, scale, experts_out, weights_out, E, K: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr):
    row, at, place = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE), tl.arange(0, FEW)
    score = tl.load(scores + row * E + at, mask=at < E, other=-float("inf")).to(tl.float32)
    prob = tl.exp(score - tl.max(score, axis=0))
    prob = tl.where(at < E, prob / tl.sum(prob, axis=0), -1.0)
    experts, weights = tl.zeros((FEW,), tl.int32), tl.zeros((FEW,), tl.float32)
    for k in tl.static_range(K):
        best, expert = tl.max(prob, axis=0, return_indices=True)
        experts, weights = tl.where(place == k, expert, experts), tl.where(place == k, best, weights)
        prob = tl.where(at == expert, -1.0, prob)
    factor = tl.load(scale + experts, mask=place < K, other=0.0).to(tl.float32)
    weights = weights / tl.sum(weights, axis=0) * factor
    tl.store(experts_out + row * K + place, experts, mask=place < K)
    tl.store(weights_out + row * K + place, weights, mask=place < K)


def deal(experts_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """order_M, the pairs sorted by expert (the earlier token first), and ends_E, where each expert's end. Both int32."""
    order_M = torch.empty(experts_NK.numel(), dtype=torch.int32, device=experts_NK.device)
    ends_E = torch.empty(experts, dtype=torch.int32, device=experts_NK.device)
    at_once = min(PAIRS, triton.next_power_of_2(experts_NK.numel()))
    _deal[(experts,)](experts_NK, order_M, ends_E, experts_NK.numel(), at_once, num_warps=4)
    return order_M, ends_E


@triton.jit
def _deal(experts, order, ends, M, AT_ONCE: tl.constexpr):
    """One program for each expert: how many pairs go to those before it, then the places of its own."""
    mine, at = tl.program_id(0), tl.arange(0, AT_ONCE)
    before, own = 0, 0
    for start in range(0, M, AT_ONCE):
        expert = tl.load(experts + start + at, mask=start + at < M, other=2147483647)
        before += tl.sum((expert < mine).to(tl.int32), axis=0)
        own += tl.sum((expert == mine).to(tl.int32), axis=0)
    tl.store(ends + mine, before + own)
    if own > 0:
        for start in range(0, M, AT_ONCE):
            expert = tl.load(experts + start + at, mask=start + at < M, other=2147483647)
            is_mine = expert == mine
            rank = tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
            tl.store(order + before + rank, start + at, mask=is_mine)
            before += tl.sum(is_mine.to(tl.int32), axis=0)
