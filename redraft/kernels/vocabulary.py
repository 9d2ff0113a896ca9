"""What is read off the vocabulary at each canvas position: best token, entropy, a sample, and the expected embedding.

Everything is float32: in bf16 the sum over the vocabulary loses the small terms that the entropy bound is made of.
Shapes: B rows, C canvas positions, N positions at once, V vocabulary, J blocks of K vocabulary entries, D model size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # vocabulary entries summed at once when sampling
AT_ONCE = {"cpu": 2**18, "cuda": 2**24}  # logits worked on at once: what stays in a CPU's cache; on a GPU, few launches
# Nats below the best at which a token no longer counts. It is far under the rounding of any sum, and further down the
# exponentials become denormal numbers, with which a CPU is fifty times slower.
FAINT = 80.0


class Prediction(NamedTuple):
    """What the model believes about each position."""

    best_BC: Tensor  # argmax
    entropy_BC: Tensor  # nats
    sampled_BC: Tensor


class TopProbs(NamedTuple):
    """Probabilities at each position."""

    own_BC: Tensor  # of the token that stands there
    draft_BC: Tensor  # of the draft's
    ids_BCK: Tensor  # of the likeliest tokens, which they are
    probs_BCK: Tensor


def compute_top_probs(logits_BCV: Tensor, ids_BC: Tensor, draft_BC: Tensor, most: int) -> TopProbs:
    """How likely each token of a canvas and of its draft is, and so many of the likeliest, the first of them first."""
    logits_BCV = logits_BCV.float()
    total_BC1 = logits_BCV.logsumexp(dim=-1, keepdim=True)
    top_BCK, best_BCK = logits_BCV.topk(min(most, logits_BCV.shape[-1]), dim=-1)
    own_BC, likely_BC = (
        logits_BCV.gather(-1, one_BC[..., None]).sub(total_BC1).exp()[..., 0] for one_BC in (ids_BC, draft_BC)
    )
    return TopProbs(own_BC, likely_BC, best_BCK, (top_BCK - total_BC1).exp())


def softcap_(logits: Tensor, cap: float) -> Tensor:
    """Logits squeezed into (-cap, cap), float32. Overwrites what it is given unless gradients are wanted."""
    if logits.requires_grad:
        return torch.tanh(logits.float() / cap) * cap
    return logits.float().div_(cap).tanh_().mul_(cap)


def argmax_entropy_sample(logits_BCV: Tensor, uniform_BC: Tensor) -> Prediction:
    """Argmax, entropy and a sample of softmax(logits), the sample chosen by uniform numbers."""
    positions = max(1, AT_ONCE[logits_BCV.device.type] // logits_BCV.shape[-1])
    chunks = zip(logits_BCV.float().flatten(0, -2).split(positions), uniform_BC.flatten().split(positions), strict=True)
    parts = [_read(logits_NV, uniform_N) for logits_NV, uniform_N in chunks]
    return Prediction(*(torch.cat(column).view(uniform_BC.shape) for column in zip(*parts, strict=True)))


def _read(logits_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With z the logits below the largest and s the sum of exp(z), entropy is log s - sum(exp(z) z) / s.

    Neither term is ever negative, so nothing cancels when a position is nearly certain.
    """
    best_N, below_NV, weights_NV = _weigh(logits_NV)
    sum_N = weights_NV.sum(dim=-1)
    entropy_N = sum_N.log() - torch.linalg.vecdot(weights_NV, below_NV) / sum_N
    return best_N, entropy_N, sample_from(weights_NV, uniform_N)


def _weigh(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Argmax, logits below the largest, and their exponentials: softmax before it is divided by its sum.

    What is too faint weighs exactly 0, so that a forbidden token cannot be sampled.
    """
    top, best = logits.max(dim=-1)
    below = (logits - top[..., None]).clamp_(min=-FAINT)
    return best, below, F.threshold_(below.exp(), 2e-35, 0.0)  # exp(-FAINT) is 1.8e-35


def sample_from(weights_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The token at which the summed weight passes the uniform share of the total, ids_N.

    Summed by block of the vocabulary first, then inside the one block that matters. Sums are float64: in float32 they
    cannot resolve a token that is rarer than the rounding of the sum so far.
    """
    vocab = weights_NV.shape[-1]
    blocks_NJK = F.pad(weights_NV, (0, -vocab % BLOCK)).unflatten(-1, (-1, BLOCK))
    upto_NJ = F.pad(blocks_NJK.sum(dim=-1).double().cumsum(dim=-1), (1, 0))
    target_N1 = uniform_N[:, None] * upto_NJ[:, -1:]
    block_N1 = (torch.searchsorted(upto_NJ, target_N1, right=True) - 1).clamp_(max=blocks_NJK.shape[1] - 1)
    inside_NK = blocks_NJK.take_along_dim(block_N1[..., None], dim=1).squeeze(1).double().cumsum(dim=-1)
    # The share of the block is stretched over the block's own float64 sum: rounding cannot lead outside of it.
    start_N1, end_N1 = upto_NJ.gather(-1, block_N1), upto_NJ.gather(-1, block_N1 + 1)
    share_N1 = (target_N1 - start_N1) / (end_N1 - start_N1)
    within_N1 = torch.searchsorted(inside_NK, share_N1 * inside_NK[:, -1:], right=True).clamp_(max=BLOCK - 1)
    return (block_N1 * BLOCK + within_N1).squeeze(-1).clamp_(max=vocab - 1)


def soft_embed(logits_BCV: Tensor, embedding_VD: Tensor) -> Tensor:
    """The embedding one expects under softmax(logits), the probabilities rounded to the embedding's own precision."""
    logits_BCV = logits_BCV.float()
    floor_BC1 = logits_BCV.amax(dim=-1, keepdim=True) - FAINT
    probs_BCV = torch.softmax(torch.maximum(logits_BCV, floor_BC1), dim=-1)
    return probs_BCV.to(embedding_VD.dtype) @ embedding_VD
