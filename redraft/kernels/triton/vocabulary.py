"""One pass over the vocabulary: softcap, temperature, argmax, entropy, a sample. Reference: `kernels/vocabulary.py`.

    raw logits -> [1 _reduce_chunks] -> statistics of chunks -> [2 _combine_chunks] -> argmax, entropy, sample, normaliser
    raw logits -> [3 _compute_probs] -> probabilities, in the same memory -> one product with the embedding
    raw logits, statistics of chunks -> [4 _find_top_probs] -> the most probable tokens, for watched requests

The kernels read the raw logits of the output projection. A sample needs the cumulative weight up to a token: kernel 1 sums
chunks and the blocks inside them, and kernel 2 reads again only the one block that contains the target. Kernel 4 takes the
best of all chunks' best tokens, reads that one chunk again for its next best, and so on.

Shapes: N positions, V vocabulary, J chunks, I blocks per chunk, K candidates.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.triton.pdl import _pdl_wait, pdl_options
from redraft.kernels.vocabulary import BLOCK, TopProbs

CHUNK = 4096  # entries per program


class VocabularyResult(NamedTuple):
    """The prediction at each position, and the statistics that `compute_probs_` and `find_top_probs` need."""

    best_N: Tensor  # int64
    entropy_N: Tensor  # float32
    sampled_N: Tensor  # int64
    top_N: Tensor  # the largest logit after softcap and temperature, float32
    mass_N: Tensor  # the softmax normaliser relative to the largest logit, both rounded to the dtype of the raw logits
    stats_NJ4: Tensor  # of every chunk: see `_reduce_chunks`
    argmax_NJ: Tensor  # int32, the best token of every chunk


def argmax_entropy_sample(raw_NV: Tensor, cap: float, temperature_N: Tensor, uniform_N: Tensor) -> VocabularyResult:
    """Returns argmax, entropy and a sample of softmax(softcap(raw) / temperature)."""
    n, vocab = raw_NV.shape
    device = raw_NV.device
    chunk = min(CHUNK, max(BLOCK, triton.next_power_of_2(vocab)))
    chunks = triton.cdiv(vocab, chunk)
    blocks = chunk // BLOCK
    stats_NJ4 = torch.empty(n, chunks, 4, dtype=torch.float32, device=device)
    argmax_NJ = torch.empty(n, chunks, dtype=torch.int32, device=device)
    sums_NJI = torch.empty(n, chunks, blocks, dtype=torch.float32, device=device)
    _reduce_chunks[(n, chunks)](
        raw_NV, temperature_N, stats_NJ4, argmax_NJ, sums_NJI,
        vocab, chunks, cap, chunk, blocks, BLOCK, num_warps=4, **pdl_options(),
    )  # fmt: skip
    best_N, sampled_N = (torch.empty(n, dtype=torch.int64, device=device) for _ in range(2))
    entropy_N, top_N, mass_N = (torch.empty(n, dtype=torch.float32, device=device) for _ in range(3))
    _combine_chunks[(n,)](
        raw_NV, temperature_N, uniform_N, stats_NJ4, argmax_NJ, sums_NJI,
        best_N, entropy_N, sampled_N, top_N, mass_N,
        vocab, chunks, cap, triton.next_power_of_2(chunks), blocks, BLOCK, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return VocabularyResult(best_N, entropy_N, sampled_N, top_N, mass_N, stats_NJ4, argmax_NJ)


def find_top_probs(
    raw_NV: Tensor, cap: float, temperature_N: Tensor, result: VocabularyResult, ids_N: Tensor, count: int
) -> TopProbs:
    """Returns the probabilities of the tokens `ids_N`, of the best tokens, and of the `count` most probable tokens.

    All tensors have one axis for the positions. The raw logits must not be overwritten yet.
    """
    n, vocab = raw_NV.shape
    chunks = result.argmax_NJ.shape[1]
    chunk = min(CHUNK, max(BLOCK, triton.next_power_of_2(vocab)))
    count = min(count, vocab)
    own_N, draft_N = (torch.empty(n, dtype=torch.float32, device=raw_NV.device) for _ in range(2))
    ids_NK = torch.empty(n, count, dtype=torch.int64, device=raw_NV.device)
    probs_NK = torch.empty(n, count, dtype=torch.float32, device=raw_NV.device)
    _find_top_probs[(n,)](
        raw_NV, temperature_N, result.stats_NJ4, result.argmax_NJ, result.best_N, ids_N, own_N, draft_N, ids_NK, probs_NK,
        vocab, chunks, cap, count, triton.next_power_of_2(count), triton.next_power_of_2(chunks), chunk,
        num_warps=4, **pdl_options(),
    )  # fmt: skip
    return TopProbs(own_N, draft_N, ids_NK, probs_NK)


def compute_probs_(
    raw_NV: Tensor, cap: float, temperature_N: Tensor, result: VocabularyResult, scale_V: Tensor | None = None
) -> Tensor:
    """Overwrites raw logits with their probabilities, the weights of the soft embedding.

    The logits are rounded to this dtype after softcap and temperature, as in the reference. Each probability is multiplied
    by the scale of its token, if there are scales: those of an fp8 embedding's rows.
    """
    n, vocab = raw_NV.shape
    chunk = min(CHUNK, triton.next_power_of_2(vocab))
    grid = (n, triton.cdiv(vocab, chunk))
    has_scales = scale_V is not None
    scale = scale_V if has_scales else temperature_N  # without scales the kernel does not read the argument
    _compute_probs[grid](
        raw_NV, temperature_N, result.top_N, result.mass_N, scale, vocab, cap, has_scales, chunk,
        num_warps=4, **pdl_options(),
    )  # fmt: skip
    return raw_NV


@triton.jit
def _softcap_and_scale(raw, cap, temperature):
    """Softcap and temperature, with tanh(y) = 2 sigmoid(2 y) - 1."""
    return (2.0 * tl.sigmoid(raw * (2.0 / cap)) - 1.0) * (cap / temperature)


@triton.jit
def _reduce_chunks(
    raw, temperatures, stats, argmaxes, sums, V, J, cap,
    CHUNK: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of one position. Stores four statistics: max, sum(exp(z)), sum(exp(z) z), sum(exp(rounded z))."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    offs = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = offs < V
    raw_logit = tl.load(raw + row * V + offs, mask=mask, other=0.0)
    logit = _softcap_and_scale(raw_logit.to(tl.float32), cap, tl.load(temperatures + row))
    logit = tl.where(mask, logit, -float("inf"))
    top, argmax = tl.max(logit, axis=0, return_indices=True)
    below = tl.where(mask, logit - top, 0.0)
    weight = tl.where(mask, tl.exp(below), 0.0)
    rounded = tl.exp(logit.to(raw_logit.dtype).to(tl.float32) - top.to(raw_logit.dtype).to(tl.float32))
    index = row * J + chunk
    tl.store(stats + index * 4, top)
    tl.store(stats + index * 4 + 1, tl.sum(weight, axis=0))
    tl.store(stats + index * 4 + 2, tl.sum(weight * below, axis=0))
    tl.store(stats + index * 4 + 3, tl.sum(tl.where(mask, rounded, 0.0), axis=0))
    tl.store(argmaxes + index, chunk * CHUNK + argmax)
    block_sums = tl.sum(tl.reshape(weight, (BLOCKS, BLOCK)), axis=1)
    tl.store(sums + index * BLOCKS + tl.arange(0, BLOCKS), block_sums)


@triton.jit
def _combine_chunks(
    raw, temperatures, uniform, stats, argmaxes, sums,
    best_out, entropy_out, sampled_out, top_out, mass_out,
    V, J, cap, J_PADDED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One position: combines its chunks, rescaled to the largest logit, and draws the sample."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, J_PADDED)
    mask = chunk < J
    index = row * J + chunk
    tops = tl.load(stats + index * 4, mask=mask, other=-float("inf"))
    top, best_chunk = tl.max(tops, axis=0, return_indices=True)
    below = tl.where(mask, tops - top, -1e30)
    rescale = tl.where(mask, tl.exp(below), 0.0)
    weight_sum = tl.load(stats + index * 4 + 1, mask=mask, other=0.0)
    product_sum = tl.load(stats + index * 4 + 2, mask=mask, other=0.0)
    total = tl.sum(rescale * weight_sum, axis=0)
    expected = tl.where(mask, rescale * (product_sum + below * weight_sum), 0.0)
    tl.store(entropy_out + row, tl.log(total) - tl.sum(expected, axis=0) / total)
    tl.store(best_out + row, tl.load(argmaxes + row * J + best_chunk).to(tl.int64))
    tl.store(top_out + row, top)
    dtype = raw.dtype.element_ty
    rounded_below = tops.to(dtype).to(tl.float32) - top.to(dtype).to(tl.float32)
    rounded_sum = tl.load(stats + index * 4 + 3, mask=mask, other=0.0)
    tl.store(mass_out + row, tl.sum(tl.where(mask, tl.exp(rounded_below) * rounded_sum, 0.0), axis=0))
    # The sample: first the block that contains the target, then the entry inside the block.
    block = tl.arange(0, J_PADDED * BLOCKS)
    block_chunk = block // BLOCKS
    mask_block = block_chunk < J
    block_rescale = tl.exp(tl.load(stats + (row * J + block_chunk) * 4, mask=mask_block, other=-float("inf")) - top)
    block_sum = tl.load(sums + row * J * BLOCKS + block, mask=mask_block, other=0.0)
    block_sum = block_sum * tl.where(mask_block, block_rescale, 0.0)
    cumulative = tl.cumsum(block_sum.to(tl.float64), axis=0)
    target = tl.load(uniform + row).to(tl.float64) * tl.max(cumulative, axis=0)
    chosen = tl.sum((cumulative <= target).to(tl.int32), axis=0)
    chosen = tl.minimum(chosen, J * BLOCKS - 1)
    start = tl.sum(tl.where(block == chosen - 1, cumulative, 0.0), axis=0)
    end = tl.sum(tl.where(block == chosen, cumulative, 0.0), axis=0)
    offs = chosen * BLOCK + tl.arange(0, BLOCK)
    raw_logit = tl.load(raw + row * V + offs, mask=offs < V, other=0.0).to(tl.float32)
    logit = _softcap_and_scale(raw_logit, cap, tl.load(temperatures + row))
    inside = tl.cumsum(tl.where(offs < V, tl.exp(logit - top), 0.0).to(tl.float64), axis=0)
    # The target's fraction of the block is scaled to the sum inside the block, so rounding cannot leave the block.
    inside_target = (target - start) / (end - start) * tl.max(inside, axis=0)
    entry = tl.minimum(tl.sum((inside <= inside_target).to(tl.int32), axis=0), BLOCK - 1)
    tl.store(sampled_out + row, tl.minimum(chosen * BLOCK + entry, V - 1).to(tl.int64))


@triton.jit
def _compute_probs(
    raw, temperatures, tops, masses, scale, V, cap, HAS_SCALES: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """One chunk of one position."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    mask = column < V
    offs = row * V + column
    raw_logit = tl.load(raw + offs, mask=mask, other=0.0)
    dtype = raw_logit.dtype
    logit = _softcap_and_scale(raw_logit.to(tl.float32), cap, tl.load(temperatures + row)).to(dtype).to(tl.float32)
    top = tl.load(tops + row).to(dtype).to(tl.float32)
    prob = tl.exp(logit - top) / tl.load(masses + row)
    if HAS_SCALES:
        prob = prob * tl.load(scale + column, mask=mask, other=0.0)
    tl.store(raw + offs, prob.to(dtype), mask=mask)


@triton.jit
def _find_top_probs(
    raw, temperatures, stats, argmaxes, best, ids, own_out, draft_out, ids_out, probs_out, V, J, cap,
    K: tl.constexpr, K_PADDED: tl.constexpr, J_PADDED: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One position. Found tokens are excluded by their number: a recomputed logit may differ by rounding."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, J_PADDED)
    mask = chunk < J
    index = row * J + chunk
    temperature = tl.load(temperatures + row)
    tops = tl.load(stats + index * 4, mask=mask, other=-float("inf"))
    argmax = tl.load(argmaxes + index, mask=mask, other=0)
    top = tl.max(tops, axis=0)
    weight_sum = tl.load(stats + index * 4 + 1, mask=mask, other=0.0)
    total = tl.sum(tl.where(mask, tl.exp(tops - top) * weight_sum, 0.0), axis=0)
    own = tl.load(raw + row * V + tl.load(ids + row)).to(tl.float32)
    draft = tl.load(raw + row * V + tl.load(best + row)).to(tl.float32)
    tl.store(own_out + row, tl.exp(_softcap_and_scale(own, cap, temperature) - top) / total)
    tl.store(draft_out + row, tl.exp(_softcap_and_scale(draft, cap, temperature) - top) / total)
    offs_k = tl.arange(0, K_PADDED)
    found = tl.full((K_PADDED,), -1, tl.int32)
    found_logit = tl.zeros((K_PADDED,), tl.float32)
    for k in range(K):
        logit, best_chunk = tl.max(tops, axis=0, return_indices=True)
        token = tl.sum(tl.where(chunk == best_chunk, argmax, 0), axis=0)
        found = tl.where(offs_k == k, token, found)
        found_logit = tl.where(offs_k == k, logit, found_logit)
        offs = best_chunk * CHUNK + tl.arange(0, CHUNK)
        is_found = tl.sum((offs[:, None] == found[None, :]).to(tl.int32), axis=1) > 0
        left = tl.load(raw + row * V + offs, mask=offs < V, other=0.0).to(tl.float32)
        left = tl.where((offs < V) & (is_found == 0), _softcap_and_scale(left, cap, temperature), -float("inf"))
        next_logit, next_index = tl.max(left, axis=0, return_indices=True)
        tops = tl.where(chunk == best_chunk, next_logit, tops)
        argmax = tl.where(chunk == best_chunk, best_chunk * CHUNK + next_index, argmax)
    offs_out = row * K + offs_k
    tl.store(ids_out + offs_out, found.to(tl.int64), mask=offs_k < K)
    tl.store(probs_out + offs_out, tl.exp(found_logit - top) / total, mask=offs_k < K)
