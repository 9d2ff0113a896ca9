"""One pass over the vocabulary: softcap, temperature, best token, entropy, a sample. Reference: `kernels/vocabulary.py`.

    raw logits -> [1 read] -> figures of every chunk -> [2 pick] -> best, entropy, sample, and the sum to divide by
    raw logits -> [3 believe] -> probabilities, in the same memory -> one product with the embedding

Logits are read as the product left them. A sample needs the summed weight up to a token: chunks, and blocks inside of them,
are summed on the way, and only the block that the draw falls into is looked at again.

Shapes: N positions, V vocabulary, J chunks, I blocks of a chunk, D model size.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.triton.pdl import pdl_options, pdl_wait

BLOCK = 128  # entries summed at once when sampling, as in the reference
CHUNK = 4096  # entries a program reads


class VocabularyResult(NamedTuple):
    """What was read off the vocabulary."""

    best_N: Tensor  # int64
    entropy_N: Tensor  # float32
    sampled_N: Tensor  # int64
    top_N: Tensor  # the largest logit, shaped, float32
    mass_N: Tensor  # sum of exponentials of the rounded logits below the rounded top


def argmax_entropy_sample(raw_NV: Tensor, cap: float, temperature_N: Tensor, uniform_N: Tensor) -> VocabularyResult:
    """Best token, entropy and a sample of softmax(softcap(raw) / temperature)."""
    n, vocab = raw_NV.shape
    device, chunk = raw_NV.device, min(CHUNK, max(BLOCK, triton.next_power_of_2(vocab)))
    chunks, inside = triton.cdiv(vocab, chunk), chunk // BLOCK
    figures_NJ4 = torch.empty(n, chunks, 4, dtype=torch.float32, device=device)
    arg_NJ = torch.empty(n, chunks, dtype=torch.int32, device=device)
    sums_NJI = torch.empty(n, chunks, inside, dtype=torch.float32, device=device)
    _reduce_chunks[(n, chunks)](
        raw_NV, temperature_N, figures_NJ4, arg_NJ, sums_NJI,
        vocab, chunks, cap, chunk, inside, BLOCK, num_warps=4, **pdl_options(),
    )  # fmt: skip
    best_N, sampled_N = (torch.empty(n, dtype=torch.int64, device=device) for _ in range(2))
    entropy_N, top_N, mass_N = (torch.empty(n, dtype=torch.float32, device=device) for _ in range(3))
    wide = triton.next_power_of_2(chunks)
    _combine_chunks[(n,)](
        raw_NV, temperature_N, uniform_N, figures_NJ4, arg_NJ, sums_NJI, best_N, entropy_N, sampled_N, top_N, mass_N,
        vocab, chunks, cap, wide, inside, BLOCK, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return VocabularyResult(best_N, entropy_N, sampled_N, top_N, mass_N)


def compute_probs_(raw_NV: Tensor, cap: float, temperature_N: Tensor, read: VocabularyResult) -> Tensor:
    """The probabilities, written over the raw logits: of shaped logits rounded to this precision, as the reference does."""
    n, vocab = raw_NV.shape
    chunk = min(CHUNK, triton.next_power_of_2(vocab))
    grid = (n, triton.cdiv(vocab, chunk))
    _compute_probs[grid](raw_NV, temperature_N, read.top_N, read.mass_N, vocab, cap, chunk, num_warps=4, **pdl_options())
    return raw_NV


@triton.jit
def _shaped(raw, cap, temperature):
    """Softcap and temperature; tanh(y) = 2 sigmoid(2 y) - 1."""
    return (2.0 * tl.sigmoid(raw * (2.0 / cap)) - 1.0) * (cap / temperature)


@triton.jit
def _reduce_chunks(
    raw, temperatures, figures, args, sums, V, J, cap,
    CHUNK: tl.constexpr, INSIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    here = at < V
    given = tl.load(raw + row * V + at, mask=here, other=0.0)
    logit = _shaped(given.to(tl.float32), cap, tl.load(temperatures + row))
    logit = tl.where(here, logit, -float("inf"))
    top, arg = tl.max(logit, axis=0, return_indices=True)
    below = tl.where(here, logit - top, 0.0)
    weight = tl.where(here, tl.exp(below), 0.0)
    rounded = tl.exp(logit.to(given.dtype).to(tl.float32) - top.to(given.dtype).to(tl.float32))
    place = row * J + chunk
    tl.store(figures + place * 4, top)
    tl.store(figures + place * 4 + 1, tl.sum(weight, axis=0))
    tl.store(figures + place * 4 + 2, tl.sum(weight * below, axis=0))
    tl.store(figures + place * 4 + 3, tl.sum(tl.where(here, rounded, 0.0), axis=0))
    tl.store(args + place, chunk * CHUNK + arg)
    inside = tl.sum(tl.reshape(weight, (INSIDE, BLOCK)), axis=1)
    tl.store(sums + place * INSIDE + tl.arange(0, INSIDE), inside)


@triton.jit
def _combine_chunks(
    raw, temperatures, uniform, figures, args, sums, best_out, entropy_out, sampled_out, top_out, mass_out,
    V, J, cap, WIDE: tl.constexpr, INSIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, WIDE)
    here, place = chunk < J, row * J + chunk
    tops = tl.load(figures + place * 4, mask=here, other=-float("inf"))
    top, which = tl.max(tops, axis=0, return_indices=True)
    gap = tl.where(here, tops - top, -1e30)
    fade = tl.where(here, tl.exp(gap), 0.0)
    mass = tl.load(figures + place * 4 + 1, mask=here, other=0.0)
    spread = tl.load(figures + place * 4 + 2, mask=here, other=0.0)
    total = tl.sum(fade * mass, axis=0)
    inner = tl.where(here, fade * (spread + gap * mass), 0.0)
    tl.store(entropy_out + row, tl.log(total) - tl.sum(inner, axis=0) / total)
    tl.store(best_out + row, tl.load(args + row * J + which).to(tl.int64))
    tl.store(top_out + row, top)
    kind = raw.dtype.element_ty
    round_gap = tops.to(kind).to(tl.float32) - top.to(kind).to(tl.float32)
    rounded = tl.load(figures + place * 4 + 3, mask=here, other=0.0)
    tl.store(mass_out + row, tl.sum(tl.where(here, tl.exp(round_gap) * rounded, 0.0), axis=0))
    # The sample: which block the draw falls into, then which entry of it.
    block = tl.arange(0, WIDE * INSIDE)
    owner = block // INSIDE
    known = owner < J
    fades = tl.exp(tl.load(figures + (row * J + owner) * 4, mask=known, other=-float("inf")) - top)
    each = tl.load(sums + row * J * INSIDE + block, mask=known, other=0.0) * tl.where(known, fades, 0.0)
    upto = tl.cumsum(each.to(tl.float64), axis=0)
    draw = tl.load(uniform + row).to(tl.float64) * tl.max(upto, axis=0)
    found = tl.sum((upto <= draw).to(tl.int32), axis=0)
    found = tl.minimum(found, J * INSIDE - 1)
    start = tl.sum(tl.where(block == found - 1, upto, 0.0), axis=0)
    end = tl.sum(tl.where(block == found, upto, 0.0), axis=0)
    at = found * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(raw + row * V + at, mask=at < V, other=0.0).to(tl.float32)
    logit = _shaped(given, cap, tl.load(temperatures + row))
    inside = tl.cumsum(tl.where(at < V, tl.exp(logit - top), 0.0).to(tl.float64), axis=0)
    share = (draw - start) / (end - start) * tl.max(inside, axis=0)
    within = tl.minimum(tl.sum((inside <= share).to(tl.int32), axis=0), BLOCK - 1)
    tl.store(sampled_out + row, tl.minimum(found * BLOCK + within, V - 1).to(tl.int64))


@triton.jit
def _compute_probs(raw, temperatures, tops, masses, V, cap, CHUNK: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    here, place = at < V, row * V + at
    given = tl.load(raw + place, mask=here, other=0.0)
    kind = given.dtype
    logit = _shaped(given.to(tl.float32), cap, tl.load(temperatures + row)).to(kind).to(tl.float32)
    top = tl.load(tops + row).to(kind).to(tl.float32)
    tl.store(raw + place, (tl.exp(logit - top) / tl.load(masses + row)).to(kind), mask=here)
