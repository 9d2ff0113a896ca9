"""Pick: how the causal half chooses a token. Autoregressive, exact and checked mode use these functions and no others.

    token = argmax(shaped log p + Gumbel(seed, position, token)), a sample of the shaped p; temperature 0: argmax(log p)

Shaping: logit bias, repetition penalty, constraints, temperature, then top-k, top-p and min-p, as in transformers.
Shapes: S rows (consecutive answer positions), V vocabulary.
"""

import math

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.diffusion import rng

COLDEST = 1e-6  # a temperature below this takes the likeliest token: logits divided by it would overflow


def needs_shaping(cfg: SamplerConfig) -> bool:
    """Whether logits need more than a temperature."""
    is_filtered = cfg.top_k > 0 or cfg.top_p < 1 or cfg.min_p > 0
    return is_filtered or cfg.repetition_penalty != 1 or bool(cfg.logit_bias)


def gumbel_temperature(cfg: SamplerConfig) -> float:
    """The temperature that a kernel picks with; 0 takes the likeliest token."""
    return cfg.temperature if cfg.temperature >= COLDEST else 0.0


def adjust_logits(logits_SV: Tensor, cfg: SamplerConfig, seen_SV: Tensor | None) -> Tensor:
    """Adds the logit bias and applies the repetition penalty to the tokens seen before each position, bool_SV."""
    if cfg.logit_bias:
        tokens, numbers = zip(*cfg.logit_bias, strict=True)
        logits_SV = logits_SV.clone()
        logits_SV[:, list(tokens)] += torch.tensor(numbers, dtype=logits_SV.dtype, device=logits_SV.device)
    if cfg.repetition_penalty != 1 and seen_SV is not None:
        penalty = cfg.repetition_penalty
        penalized_SV = torch.where(logits_SV > 0, logits_SV / penalty, logits_SV * penalty)
        logits_SV = torch.where(seen_SV, penalized_SV, logits_SV)
    return logits_SV


def pick_tokens(logits_SV: Tensor, cfg: SamplerConfig, seeds_S: Tensor, positions_S: Tensor) -> Tensor:
    """The causal half's tokens ids_S, from adjusted logits. `positions_S` count from the first token of the answer."""
    if cfg.temperature < COLDEST:
        return logits_SV.argmax(dim=-1)
    shaped_SV = filter_logits(logits_SV.double() / cfg.temperature, cfg)
    return (shaped_SV + rng.gumbel(seeds_S, positions_S, logits_SV.shape[-1])).argmax(dim=-1)


def filter_logits(logits_SV: Tensor, cfg: SamplerConfig) -> Tensor:
    """Removes unlikely tokens (-inf): all but the top_k likeliest, then the tail beyond top_p, then below min_p."""
    vocab_size = logits_SV.shape[-1]
    if 0 < cfg.top_k < vocab_size:
        kth_S1 = logits_SV.topk(cfg.top_k, dim=-1).values[:, -1:]
        logits_SV = logits_SV.masked_fill(logits_SV < kth_S1, -math.inf)
    if cfg.top_p < 1:
        sorted_SV, order_SV = logits_SV.sort(dim=-1, descending=True, stable=True)
        probs_SV = sorted_SV.softmax(dim=-1)
        is_tail_SV = probs_SV.cumsum(dim=-1) - probs_SV >= cfg.top_p  # the token that reaches top_p is kept
        is_removed_SV = torch.zeros_like(is_tail_SV).scatter(-1, order_SV, is_tail_SV)
        logits_SV = logits_SV.masked_fill(is_removed_SV, -math.inf)
    if cfg.min_p > 0:
        top_S1 = logits_SV.amax(dim=-1, keepdim=True)
        logits_SV = logits_SV.masked_fill(logits_SV < top_S1 + math.log(cfg.min_p), -math.inf)
    return logits_SV
