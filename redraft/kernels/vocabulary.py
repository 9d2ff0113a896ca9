"""Operations over the vocabulary at each canvas position: argmax, entropy, a sample, and the soft embedding.

All of it is float32: a sum over the vocabulary in bf16 loses the small probabilities that the entropy bound depends on.
Shapes: B rows, C canvas positions, N positions, V vocabulary, J blocks of I vocabulary entries, K candidates, D model size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.kernels.backend import uses_triton
from redraft.kernels.fp8 import Fp8Tensor

BLOCK = 128  # vocabulary entries per partial sum when sampling
# Logits per chunk. On a CPU a chunk fits in the cache; on a GPU large chunks mean few launches.
CHUNK_LOGITS = {"cpu": 2**18, "cuda": 2**24}
CHUNK_ROWS = 2**14  # rows of an fp8 embedding that are widened at a time
# A token this many nats below the best has probability 0. The cutoff is far below the rounding error of any sum. Below it
# the exponentials are denormal numbers, with which a CPU is fifty times slower.
MAX_NATS_BELOW = 80.0


class Prediction(NamedTuple):
    """What the model predicts at each position."""

    best_BC: Tensor  # argmax
    entropy_BC: Tensor  # nats
    sampled_BC: Tensor


class TopProbs(NamedTuple):
    """Probabilities at each position."""

    own_BC: Tensor  # of the token on the canvas
    draft_BC: Tensor  # of the token in the draft
    ids_BCK: Tensor  # the most probable tokens, best first
    probs_BCK: Tensor  # and their probabilities


def compute_top_probs(logits_BCV: Tensor, ids_BC: Tensor, draft_BC: Tensor, count: int) -> TopProbs:
    """Returns the probabilities of the canvas's tokens, of the draft's tokens, and of the `count` most probable tokens."""
    logits_BCV = logits_BCV.float()
    logsumexp_BC1 = logits_BCV.logsumexp(dim=-1, keepdim=True)
    top_BCK, best_BCK = logits_BCV.topk(min(count, logits_BCV.shape[-1]), dim=-1)

    def probs_of(tokens_BC: Tensor) -> Tensor:
        return logits_BCV.gather(-1, tokens_BC[..., None]).sub(logsumexp_BC1).exp()[..., 0]

    return TopProbs(probs_of(ids_BC), probs_of(draft_BC), best_BCK, (top_BCK - logsumexp_BC1).exp())


def softcap_(logits: Tensor, cap: float) -> Tensor:
    """Squashes logits into (-cap, cap), in float32. Overwrites its input unless the input requires gradients."""
    if logits.requires_grad:
        return torch.tanh(logits.float() / cap) * cap
    return logits.float().div_(cap).tanh_().mul_(cap)


def argmax_entropy_sample(logits_BCV: Tensor, uniform_BC: Tensor) -> Prediction:
    """Returns argmax, entropy and a sample of softmax(logits). The sample is a function of the uniform numbers."""
    positions = max(1, CHUNK_LOGITS[logits_BCV.device.type] // logits_BCV.shape[-1])
    chunks = zip(logits_BCV.float().flatten(0, -2).split(positions), uniform_BC.flatten().split(positions), strict=True)
    parts = [_argmax_entropy_sample_chunk(logits_NV, uniform_N) for logits_NV, uniform_N in chunks]
    return Prediction(*(torch.cat(column).view(uniform_BC.shape) for column in zip(*parts, strict=True)))


def _argmax_entropy_sample_chunk(logits_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With z = logits - max(logits) and s = sum(exp(z)), the entropy is log s - sum(exp(z) z) / s.

    Both terms are at least 0, so nothing cancels when a position is nearly certain.
    """
    best_N, below_NV, weights_NV = _exp_below_max(logits_NV)
    sum_N = weights_NV.sum(dim=-1)
    entropy_N = sum_N.log() - torch.linalg.vecdot(weights_NV, below_NV) / sum_N
    return best_N, entropy_N, sample_from(weights_NV, uniform_N)


def _exp_below_max(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the argmax, z = logits - max(logits), and exp(z), which is the softmax before its division.

    exp(z) below the cutoff is exactly 0, so that a forbidden token cannot be sampled.
    """
    top, best = logits.max(dim=-1)
    below = (logits - top[..., None]).clamp_(min=-MAX_NATS_BELOW)
    return best, below, torch.threshold_(below.exp(), 2e-35, 0.0)  # exp(-80) is 1.8e-35


def sample_from(weights_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Samples ids_N by inverting the cumulative sum: the first token whose cumulative weight exceeds uniform * total.

    The sum runs over blocks of the vocabulary first, then inside the one block that contains the target. Cumulative sums are
    float64: float32 cannot resolve a token whose weight is below the rounding error of the sum before it.
    """
    vocab = weights_NV.shape[-1]
    blocks_NJI = F.pad(weights_NV, (0, -vocab % BLOCK)).unflatten(-1, (-1, BLOCK))
    cumulative_NJ = F.pad(blocks_NJI.sum(dim=-1).double().cumsum(dim=-1), (1, 0))
    target_N1 = uniform_N[:, None] * cumulative_NJ[:, -1:]
    block_N1 = (torch.searchsorted(cumulative_NJ, target_N1, right=True) - 1).clamp_(max=blocks_NJI.shape[1] - 1)
    inside_NI = blocks_NJI.take_along_dim(block_N1[..., None], dim=1).squeeze(1).double().cumsum(dim=-1)
    # The target's fraction of the block is scaled to the block's own float64 sum, so rounding cannot leave the block.
    start_N1 = cumulative_NJ.gather(-1, block_N1)
    end_N1 = cumulative_NJ.gather(-1, block_N1 + 1)
    fraction_N1 = (target_N1 - start_N1) / (end_N1 - start_N1)
    offset_N1 = torch.searchsorted(inside_NI, fraction_N1 * inside_NI[:, -1:], right=True).clamp_(max=BLOCK - 1)
    return (block_N1 * BLOCK + offset_N1).squeeze(-1).clamp_(max=vocab - 1)


def soft_embed(logits_BCV: Tensor, embedding_VD: Tensor) -> Tensor:
    """Returns the expected embedding under softmax(logits). The probabilities are rounded to the embedding's dtype."""
    return _softmax(logits_BCV).to(embedding_VD.dtype) @ embedding_VD


def soft_embed_fp8(logits_BCV: Tensor, embedding_VD: Fp8Tensor) -> Tensor:
    """Returns the expected embedding under softmax(logits), for an embedding in 8 bits, in float32.

    The sum runs over the vocabulary, so the scales of the embedding's rows multiply the probabilities. These factors are
    rounded to the dtype of the logits.
    """
    device = logits_BCV.device
    factors_NV = (_softmax(logits_BCV) * embedding_VD.scale[:, 0]).to(logits_BCV.dtype).flatten(0, -2)
    if device.type == "cuda" and uses_triton(device):
        from redraft.kernels.triton.linear_fp8 import sum_rows  # importing Triton takes long

        soft_ND = sum_rows(factors_NV, embedding_VD, torch.float32)
    else:
        soft_ND = torch.zeros(len(factors_NV), embedding_VD.qdata.shape[1], device=device)
        for start in range(0, factors_NV.shape[1], CHUNK_ROWS):  # the widened embedding would take four times its memory
            rows = slice(start, start + CHUNK_ROWS)
            soft_ND += factors_NV[:, rows].float() @ embedding_VD.qdata[rows].float()
    return soft_ND.view(*logits_BCV.shape[:-1], -1)


def _softmax(logits: Tensor) -> Tensor:
    """Probabilities in float32, without denormal numbers."""
    logits = logits.float()
    floor = logits.amax(dim=-1, keepdim=True) - MAX_NATS_BELOW
    return torch.softmax(torch.maximum(logits, floor), dim=-1)
