"""The router's choice and the order it puts tokens in: `moe.Router` behind its norm, and the sort of `gated_experts`.

Shapes: N tokens, D model size, K experts chosen per token, E experts, M = N * K pairs, J slices of D.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.triton.pdl import pdl_options, pdl_wait

PAIRS = 2048  # looked through at once
SLICE = 256  # of the model size that one program multiplies


def route(x_ND: Tensor, weight_ED: Tensor, scale_E: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """experts_NK (int32) and weights_NK (float32): scores, softmax, the best K, renormalised, scaled per expert."""
    (n, size), experts, device = x_ND.shape, len(weight_ED), x_ND.device
    wide, few = max(16, triton.next_power_of_2(experts)), triton.next_power_of_2(chosen)
    slices = triton.cdiv(size, SLICE)
    scores_JNE = torch.empty(slices, n, experts, dtype=torch.float32, device=device)
    _score[(triton.cdiv(n, 16), slices)](
        x_ND, weight_ED, scores_JNE, n, size, experts, wide, 16, SLICE, min(SLICE, 128), **pdl_options()
    )
    experts_NK = torch.empty(n, chosen, dtype=torch.int32, device=device)
    weights_NK = torch.empty(n, chosen, dtype=torch.float32, device=device)
    _route[(n,)](
        scores_JNE, scale_E, experts_NK, weights_NK, n, experts, slices, chosen, wide, few, num_warps=1, **pdl_options()
    )
    return experts_NK, weights_NK


@triton.jit
def _score(
    x, weight, scores, N, D, E,
    WIDE: tl.constexpr, BT: tl.constexpr, SLICE: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A slice of the product of some tokens: there are too few tokens and experts to keep a GPU busy otherwise."""
    pdl_wait(PDL)
    token, part, expert = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1), tl.arange(0, WIDE)
    total = tl.zeros((BT, WIDE), tl.float32)
    for k in tl.static_range(0, SLICE, BK):
        at = part * SLICE + k + tl.arange(0, BK)
        here = at < D
        x_ptr, w_ptr = x + token[:, None].to(tl.int64) * D + at[None, :], weight + expert[None, :] * D + at[:, None]
        t = tl.load(x_ptr, mask=(token < N)[:, None] & here[None, :], other=0.0)
        w = tl.load(w_ptr, mask=(expert < E)[None, :] & here[:, None], other=0.0)
        total = tl.dot(t, w, total, input_precision="ieee")
    place = (part * N + token)[:, None].to(tl.int64) * E + expert[None, :]
    tl.store(scores + place, total, mask=(token < N)[:, None] & (expert < E)[None, :])


@triton.jit
def _route(
    scores, scale, experts_out, weights_out, N, E,
    J: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, at, place = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE), tl.arange(0, FEW)
    score = tl.zeros((WIDE,), tl.float32)
    for part in tl.static_range(J):  # all loads at once
        score += tl.load(scores + (part * N + row) * E + at, mask=at < E, other=0.0)
    score = tl.where(at < E, score, -float("inf"))
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


def sort_by_expert(experts_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """order_M, the pairs sorted by expert (the earlier token first), and ends_E, where each expert's end. Both int32."""
    order_M = torch.empty(experts_NK.numel(), dtype=torch.int32, device=experts_NK.device)
    ends_E = torch.empty(experts, dtype=torch.int32, device=experts_NK.device)
    at_once = min(PAIRS, triton.next_power_of_2(experts_NK.numel()))
    _sort_by_expert[(experts,)](experts_NK, order_M, ends_E, experts_NK.numel(), at_once, num_warps=4, **pdl_options())
    return order_M, ends_E


@triton.jit
def _sort_by_expert(experts, order, ends, M, AT_ONCE: tl.constexpr, PDL: tl.constexpr):
    """One program for each expert: how many pairs go to those before it, then the places of its own."""
    pdl_wait(PDL)
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
