"""Gumbel picks: argmax(logits / temperature + Gumbel(seed, position, token)) over the vocabulary, one row per position.

Reference: `diffusion/pick.py`, without filters. A temperature of 0 takes the argmax of the logits.
Shapes: N rows, V vocabulary, P parts of the vocabulary, each the work of one program.
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
    """Token ids int64_N. Logits are float32, temperatures float64; of equal sums, the lowest id is taken."""
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
    return ids_NP.gather(1, best_NP.argmax(dim=1, keepdim=True))[:, 0]


@triton.jit
def _pick_parts(
    logits, temperatures, seeds, positions, best_out, ids_out, V, P,
    VERIFY: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The best sum of one part of one row, and its token: the numbers of `rng.gumbel`."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    temperature = tl.load(temperatures + row)
    zero = seed ^ seed
    state = _mix(zero, seed)
    state = _mix(state, zero.to(tl.int64) + VERIFY)
    state = _mix(state, zero.to(tl.int64))
    state = _mix(state, tl.load(positions + row).to(tl.int64))
    best = zero.to(tl.float64) - float("inf")
    best_id = zero.to(tl.int64) + V
    for begin in range(0, PART, BLOCK):
        token = part * PART + begin + tl.arange(0, BLOCK).to(tl.int64)
        mask = token < V
        value = tl.load(logits + row * V + token, mask=mask, other=float("-inf")).to(tl.float64)
        if temperature > 0:
            bits = _mix(state + token.to(tl.uint64) * 0, token)
            two_to_minus_52: tl.constexpr = 2.220446049250313e-16
            uniform = ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * two_to_minus_52
            value = value / temperature - tl.log(-tl.log(uniform))
        value = tl.where(mask, value, float("-inf"))
        block_best = tl.max(value, axis=0)
        block_id = tl.min(tl.where(mask & (value == block_best), token, V), axis=0)
        is_better = block_best > best
        best_id = tl.where(is_better, block_id, best_id)
        best = tl.where(is_better, block_best, best)
    tl.store(best_out + row * P + part, best)
    tl.store(ids_out + row * P + part, tl.minimum(best_id, V - 1))  # rows of padding may be NaN: any token, but a token
