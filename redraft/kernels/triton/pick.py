"""Gumbel picks: argmax(logits / temperature + Gumbel(seed, position, token)) over the vocabulary, one row per position.

Reference: `diffusion/pick.py`, without filters. A temperature of 0 takes the argmax of the logits.
The vocabulary is cut into parts, each the work of one program; a second kernel merges what they found.
Shapes: N rows, B requests, V vocabulary, P parts, R ranks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels import splitmix
from redraft.kernels.triton.sampler_step import _mix

BLOCK = 1024
PART = 8192  # vocabulary entries of one program at most
PROGRAMS = 256  # few rows have smaller parts, so that about so many programs share the work


def pick_gumbel(logits_NV: Tensor, temperature_N: Tensor, seeds_N: Tensor, positions_N: Tensor) -> Tensor:
    """Token ids int64_N. Temperatures are float64; of equal sums, the lowest id is taken."""
    rows, vocab_size = logits_NV.shape
    part = min(PART, max(BLOCK, triton.next_power_of_2(rows * vocab_size // PROGRAMS)))
    parts = triton.cdiv(vocab_size, part)
    best_NP = torch.empty(rows, parts, dtype=torch.float64, device=logits_NV.device)
    ids_NP = torch.empty(rows, parts, dtype=torch.int64, device=logits_NV.device)
    _pick_parts[(rows, parts)](
        logits_NV.contiguous(), temperature_N.contiguous(), seeds_N.contiguous(), positions_N.contiguous(),
        best_NP, ids_NP, vocab_size, parts,
        splitmix.VERIFY, BLOCK, part, num_warps=8,
    )  # fmt: skip
    if parts == 1:
        return ids_NP[:, 0]
    return _merge(best_NP, ids_NP, 1, vocab_size)[:, 0]


@triton.jit
def _pick_parts(
    logits, temperatures, seeds, positions, best_out, ids_out, V, P,
    VERIFY: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The best sum of one part of one row, and its token: the numbers of `rng.gumbel`."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    best = tl.load(temperatures + row) * 0 - float("inf")
    best_id = part * 0 + V
    for begin in range(0, PART, BLOCK):
        token = part * PART + begin + tl.arange(0, BLOCK).to(tl.int64)
        value = _gumbel_sums(logits, temperatures, seeds, positions, row, row, token, V, VERIFY)
        block_best = tl.max(value, axis=0)
        block_id = tl.min(tl.where((token < V) & (value == block_best), token, V), axis=0)
        is_better = block_best > best
        best_id = tl.where(is_better, block_id, best_id)
        best = tl.where(is_better, block_best, best)
    tl.store(best_out + row * P + part, best)
    tl.store(ids_out + row * P + part, tl.minimum(best_id, V - 1))  # rows of padding may be NaN: any token, but a token


def rank_gumbel(logits_NV: Tensor, temperature_B: Tensor, seeds_B: Tensor, positions_B: Tensor, count: int) -> Tensor:
    """The `count` tokens with the largest sums, ids_NR, the largest first: rank 0 is what `pick_gumbel` picks.

    Each request has N / B rows, one behind the other, at the same position.
    """
    rows, vocab_size = logits_NV.shape
    parts = triton.cdiv(vocab_size, BLOCK)
    sums_NP = torch.empty(rows, parts * count, dtype=torch.float64, device=logits_NV.device)
    ids_NP = torch.empty(rows, parts * count, dtype=torch.int64, device=logits_NV.device)
    _rank_parts[(rows, parts)](
        logits_NV.contiguous(), temperature_B.contiguous(), seeds_B.contiguous(), positions_B.contiguous(),
        sums_NP, ids_NP, vocab_size, parts, rows // len(seeds_B), splitmix.VERIFY, BLOCK, count, num_warps=4,
    )  # fmt: skip
    return _merge(sums_NP, ids_NP, count, vocab_size)


@triton.jit
def _rank_parts(
    logits, temperatures, seeds, positions, sums_out, ids_out, V, P, N,
    VERIFY: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The best sums of one part of one row, and their tokens. A request has N rows."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    token = part * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    request = row // N
    value = _gumbel_sums(logits, temperatures, seeds, positions, row, request, token, V, VERIFY)
    for rank in tl.static_range(COUNT):
        best = tl.max(value, axis=0)
        best_id = tl.min(tl.where(value == best, token, V), axis=0)
        tl.store(sums_out + (row * P + part) * COUNT + rank, best)
        tl.store(ids_out + (row * P + part) * COUNT + rank, tl.minimum(best_id, V - 1))
        value = tl.where(token == best_id, float("-inf"), value)


def _merge(sums_NP: Tensor, ids_NP: Tensor, count: int, vocab_size: int) -> Tensor:
    """The tokens with the `count` largest of these sums, ids_NR."""
    rows, found = sums_NP.shape
    out_NR = torch.empty(rows, count, dtype=torch.int64, device=sums_NP.device)
    _merge_parts[(rows,)](sums_NP, ids_NP, out_NR, found, vocab_size, count, triton.next_power_of_2(found), num_warps=4)
    return out_NR


@triton.jit
def _merge_parts(sums, ids, out, P, V, COUNT: tl.constexpr, P_PADDED: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, P_PADDED)
    value = tl.load(sums + row * P + column, mask=column < P, other=float("-inf"))
    token = tl.load(ids + row * P + column, mask=column < P, other=0)
    for rank in tl.static_range(COUNT):
        best_id = tl.min(tl.where(value == tl.max(value, axis=0), token, V), axis=0)
        tl.store(out + row * COUNT + rank, tl.minimum(best_id, V - 1))
        value = tl.where(token == best_id, float("-inf"), value)


@triton.jit
def _gumbel_sums(logits, temperatures, seeds, positions, row, request, token, V, VERIFY: tl.constexpr):
    """Logits over the temperature and the numbers of `rng.gumbel`, for some tokens of a row; -inf behind the vocabulary.

    `request` is the index of the row's temperature, seed and position.
    """
    seed = tl.load(seeds + request).to(tl.uint64, bitcast=True)
    temperature = tl.load(temperatures + request)
    zero = seed ^ seed
    state = _mix(zero, seed)
    state = _mix(state, zero.to(tl.int64) + VERIFY)
    state = _mix(state, zero.to(tl.int64))
    state = _mix(state, tl.load(positions + request).to(tl.int64))
    mask = token < V
    value = tl.load(logits + row * V + token, mask=mask, other=float("-inf")).to(tl.float64)
    if temperature > 0:
        bits = _mix(state + token.to(tl.uint64) * 0, token)
        two_to_minus_52: tl.constexpr = 2.220446049250313e-16
        uniform = ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * two_to_minus_52
        value = value / temperature - tl.log(-tl.log(uniform))
    return tl.where(mask, value, float("-inf"))
