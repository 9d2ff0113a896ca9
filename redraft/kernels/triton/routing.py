"""The router's top-k, and the sort of tokens by expert. References: `Router` in `model/moe.py`, `kernels/experts.py`.

Shapes: N tokens, D model size, K experts per token, E experts, M = N * K (token, expert) pairs, J slices of D.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.triton.pdl import _pdl_wait, pdl_options

BLOCK_PAIRS = 8192  # pairs per iteration of the sort
SLICE = 256  # of the model size, per program of the score product


def route(x_ND: Tensor, weight_ED: Tensor, scale_E: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """Returns experts_NK (int32) and weights_NK (float32): softmax, top K, renormalised, scaled per expert."""
    n, size = x_ND.shape
    experts = len(weight_ED)
    experts_padded = max(16, triton.next_power_of_2(experts))
    chosen_padded = triton.next_power_of_2(chosen)
    slices = triton.cdiv(size, SLICE)
    scores_JNE = torch.empty(slices, n, experts, dtype=torch.float32, device=x_ND.device)
    _score[(triton.cdiv(n, 16), slices)](
        x_ND, weight_ED, scores_JNE, n, size, experts, experts_padded, 16, SLICE, min(SLICE, 128), **pdl_options()
    )
    experts_NK = torch.empty(n, chosen, dtype=torch.int32, device=x_ND.device)
    weights_NK = torch.empty(n, chosen, dtype=torch.float32, device=x_ND.device)
    _route[(n,)](
        scores_JNE, scale_E, experts_NK, weights_NK, n, experts, slices, chosen, experts_padded, chosen_padded,
        num_warps=1, **pdl_options(),
    )  # fmt: skip
    return experts_NK, weights_NK


@triton.jit
def _score(
    x, weight, scores, N, D, E,
    E_PADDED: tl.constexpr, BLOCK_T: tl.constexpr, SLICE: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A slice of some tokens' product with the router's weight. Without slices there would be too few programs for a GPU."""
    _pdl_wait(PDL)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1)
    expert = tl.arange(0, E_PADDED)
    acc = tl.zeros((BLOCK_T, E_PADDED), tl.float32)
    for k in tl.static_range(0, SLICE, BLOCK_K):
        offs_k = part * SLICE + k + tl.arange(0, BLOCK_K)
        mask_k = offs_k < D
        x_ptr = x + token[:, None].to(tl.int64) * D + offs_k[None, :]
        w_ptr = weight + expert[None, :] * D + offs_k[:, None]
        t = tl.load(x_ptr, mask=(token < N)[:, None] & mask_k[None, :], other=0.0)
        w = tl.load(w_ptr, mask=(expert < E)[None, :] & mask_k[:, None], other=0.0)
        acc = tl.dot(t, w, acc, input_precision="ieee")
    offs = (part * N + token)[:, None].to(tl.int64) * E + expert[None, :]
    tl.store(scores + offs, acc, mask=(token < N)[:, None] & (expert < E)[None, :])


@triton.jit
def _route(
    scores, scale, experts_out, weights_out, N, E,
    J: tl.constexpr, K: tl.constexpr, E_PADDED: tl.constexpr, K_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The top K experts of one token."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs_e = tl.arange(0, E_PADDED)
    offs_k = tl.arange(0, K_PADDED)
    score = tl.zeros((E_PADDED,), tl.float32)
    for part in tl.static_range(J):  # unrolled: all loads are issued together
        score += tl.load(scores + (part * N + row) * E + offs_e, mask=offs_e < E, other=0.0)
    score = tl.where(offs_e < E, score, -float("inf"))
    prob = tl.exp(score - tl.max(score, axis=0))
    prob = tl.where(offs_e < E, prob / tl.sum(prob, axis=0), -1.0)
    experts = tl.zeros((K_PADDED,), tl.int32)
    weights = tl.zeros((K_PADDED,), tl.float32)
    for k in tl.static_range(K):
        best_prob, best_expert = tl.max(prob, axis=0, return_indices=True)
        experts = tl.where(offs_k == k, best_expert, experts)
        weights = tl.where(offs_k == k, best_prob, weights)
        prob = tl.where(offs_e == best_expert, -1.0, prob)
    expert_scale = tl.load(scale + experts, mask=offs_k < K, other=0.0).to(tl.float32)
    weights = weights / tl.sum(weights, axis=0) * expert_scale
    tl.store(experts_out + row * K + offs_k, experts, mask=offs_k < K)
    tl.store(weights_out + row * K + offs_k, weights, mask=offs_k < K)


def sort_by_expert(experts_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sorts the (token, expert) pairs by expert, stably, as int32.

    Returns order_M, the index of each sorted pair in experts_NK, and ends_E, where each expert's pairs end in it.
    """
    pairs = experts_NK.numel()
    order_M = torch.empty(pairs, dtype=torch.int32, device=experts_NK.device)
    ends_E = torch.empty(experts, dtype=torch.int32, device=experts_NK.device)
    block = min(BLOCK_PAIRS, triton.next_power_of_2(pairs))
    warps = 4 if block <= 2048 else 8
    _sort_by_expert[(experts,)](experts_NK, order_M, ends_E, pairs, block, num_warps=warps, **pdl_options())
    return order_M, ends_E


@triton.jit
def _sort_by_expert(experts, order, ends, M, BLOCK_PAIRS: tl.constexpr, PDL: tl.constexpr):
    """One expert: counts the pairs of the experts before it, then stores its own pairs behind them."""
    _pdl_wait(PDL)
    this_expert = tl.program_id(0)
    offs = tl.arange(0, BLOCK_PAIRS)
    position = 0
    count = 0
    for start in range(0, M, BLOCK_PAIRS):
        expert = tl.load(experts + start + offs, mask=start + offs < M, other=2147483647)
        position += tl.sum((expert < this_expert).to(tl.int32), axis=0)
        count += tl.sum((expert == this_expert).to(tl.int32), axis=0)
    tl.store(ends + this_expert, position + count)
    if count > 0:
        for start in range(0, M, BLOCK_PAIRS):
            expert = tl.load(experts + start + offs, mask=start + offs < M, other=2147483647)
            is_own = expert == this_expert
            rank = tl.cumsum(is_own.to(tl.int32), axis=0) - 1
            tl.store(order + position + rank, start + offs, mask=is_own)
            position += tl.sum(is_own.to(tl.int32), axis=0)
