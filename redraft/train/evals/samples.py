"""Samples: texts by diffusion against autoregressive texts of the same weights, under a judge model.

Perplexity under a judge can be lowered by repeating usual phrases, so samples are compared at equal entropy. Everything is
seeded. Shapes: B rows, D hidden size.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from redraft.config import SamplerConfig
from redraft.diffusion import generate
from redraft.kernels import argmax_entropy_sample
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.tokenizer.tokenizer import Tokenizer

BATCH_ROWS = 16
WINDOW = 100  # tokens of each text that entropy is computed over: entropy grows with length, and lengths differ
TEMPERATURES = (1.2, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1)  # of the autoregressive samples

Judge = Callable[[Sequence[str]], float]  # texts -> perplexity


@dataclass(frozen=True)
class Samples:
    """Texts and their cost."""

    texts: list[str]
    ids: list[list[int]]
    tokens_per_forward: float

    @property
    def entropy(self) -> float | None:
        """Unigram entropy in nats of the first WINDOW tokens, over all texts of that length together.

        It falls when a text repeats itself and when all texts are alike. Inside one text it hardly falls with the
        temperature, because a story at low temperature is an ordinary story, not a repetitive one.
        """
        counts = Counter(token for ids in self.ids if len(ids) >= WINDOW for token in ids[:WINDOW])
        total = counts.total()
        return -sum(count / total * math.log(count / total) for count in counts.values()) if total else None

    @property
    def length(self) -> float:
        """Mean number of tokens."""
        return sum(map(len, self.ids)) / len(self.ids)


def sample_diffusion(
    model: DiffusionGemma, tokenizer: Tokenizer, prompt: str, count: int, sampler: SamplerConfig, seed: int = 0
) -> Samples:
    """Samples texts by diffusion, as users get them."""
    rows = []
    forwards = 0
    tokens = 0
    for begin in range(0, count, BATCH_ROWS):
        seeds = [seed + number for number in range(begin, min(begin + BATCH_ROWS, count))]
        *_, finished = generate.generate(model, [tokenizer.encode_prompt(prompt)] * len(seeds), sampler, seeds=seeds)
        for row, stats in enumerate(finished.stats):
            rows.append(finished.ids_BT[row, : stats.new_tokens].tolist())
            forwards += stats.forwards
            tokens += stats.new_tokens
    return _to_samples(tokenizer, rows, sampler, tokens / forwards)


@torch.inference_mode()
def sample_autoregressive(
    model: DiffusionGemma,
    tokenizer: Tokenizer,
    prompt: str,
    count: int,
    sampler: SamplerConfig,
    temperature: float,
    seed: int = 0,
) -> Samples:
    """Samples texts with the encoder of the same weights, one token after another."""
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode_prompt(prompt)
    cache = model.new_cache(count, len(ids) + sampler.max_new_tokens)
    last_B1D = model.encode(torch.tensor([ids] * count, device=model.device), cache)[:, -1:]
    rows: list[list[int]] = [[] for _ in range(count)]
    has_ended = [False] * count
    for _ in range(sampler.max_new_tokens):
        uniform_B1 = torch.rand(count, 1, generator=generator, dtype=torch.float64).to(model.device)
        next_B1 = argmax_entropy_sample(model.head(last_B1D) / temperature, uniform_B1).sampled_BC
        for row, token in enumerate(next_B1.flatten().tolist()):
            if not has_ended[row]:
                rows[row].append(token)
                has_ended[row] = token in sampler.eos_token_ids
        if all(has_ended):
            break
        last_B1D = model.encode(next_B1, cache)
    return _to_samples(tokenizer, rows, sampler, 1.0)


def _to_samples(tokenizer: Tokenizer, rows: list[list[int]], sampler: SamplerConfig, tokens_per_forward: float) -> Samples:
    rows = [[token for token in row if token not in sampler.eos_token_ids] for row in rows]
    return Samples([tokenizer.decode(row) for row in rows], rows, tokens_per_forward)


@dataclass(frozen=True)
class Comparison:
    """Diffusion samples against autoregressive samples of the same entropy."""

    diffusion: float  # perplexity under the judge
    autoregressive: float | None  # perplexity at the same entropy; None if no temperature reaches it
    curve: list[
        tuple[float, float | None, float, float]
    ]  # temperature, entropy, perplexity, length of autoregressive samples

    @property
    def ratio(self) -> float | None:
        """Above 1: diffusion costs quality."""
        return self.diffusion / self.autoregressive if self.autoregressive is not None else None


def compare(samples: Samples, prompt: str, judge: Judge, sample_at: Callable[[float], Samples]) -> Comparison:
    """Compares the perplexity of diffusion samples with that of autoregressive samples at equal entropy.

    Autoregressive samples at falling temperatures give a curve of entropy and log perplexity, which is interpolated
    linearly.
    """
    curve = []
    for temperature in TEMPERATURES:
        autoregressive = sample_at(temperature)
        perplexity = judge([prompt + text for text in autoregressive.texts])
        curve.append((temperature, autoregressive.entropy, perplexity, autoregressive.length))
    points = sorted((entropy, math.log(perplexity)) for _, entropy, perplexity, _ in curve if entropy is not None)
    log_perplexity = _interpolate(points, samples.entropy) if samples.entropy is not None else None
    diffusion = judge([prompt + text for text in samples.texts])
    return Comparison(diffusion, math.exp(log_perplexity) if log_perplexity is not None else None, curve)


def _interpolate(points: list[tuple[float, float]], x: float) -> float | None:
    """Interpolates linearly between neighbours; None outside the points."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / max(x1 - x0, 1e-9)
    return None
