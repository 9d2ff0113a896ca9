"""Likelihood and repair: how well a model predicts text, as a language model and as a denoiser.

    autoregressive   next-token loss of the encoder, in nats per token and bits per byte
    nelbo            the denoiser's bound on the same texts (negative evidence lower bound)
    repair           by noise level: the share of clean tokens kept, and of noised tokens repaired

Everything is seeded. Shapes: B rows, L tokens of a row, V vocabulary, N tokens.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.model.backbone import Backbone
from redraft.model.masks import Layout
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.loss import IGNORED, Batch, Masks, dense_masks

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)  # noise levels of `repair`
BATCH_ROWS = 16


# 1. Texts to rows, rows to logits


def to_rows(texts: Sequence[list[int]], canvas_length: int, device: torch.device) -> Batch:
    """Makes one row per text: the first token is prompt, the rest is split into canvases; the last one may be short."""
    longest = max(map(len, texts))
    shape = (len(texts), longest)
    ids_BL = torch.zeros(shape, dtype=torch.long)
    positions_BL = torch.arange(longest).expand(shape)
    documents_BL = torch.full(shape, -1)
    for row, ids in enumerate(texts):
        ids_BL[row, : len(ids)] = torch.tensor(ids)
        documents_BL[row, : len(ids)] = 0
    starts_BL = torch.where(positions_BL == 0, -1, 1 + (positions_BL - 1) // canvas_length * canvas_length)
    starts_BL = torch.where(documents_BL == 0, starts_BL, -1)
    return Batch(ids_BL.to(device), Layout(positions_BL, starts_BL, documents_BL).to(device))


def denoise_steps(model: Backbone, batch: Batch, noisy_BL: Tensor, mask_of: Masks, steps: int) -> Iterator[Tensor]:
    """Yields the denoiser's logits at every position, step by step; each step is conditioned on the one before."""
    soft_BLD = None
    for _ in range(steps):
        hidden_BLD, _, _ = model.forward_train(noisy_BL, batch.ids_BL, soft_BLD, batch.layout.positions, mask_of)
        logits_BLV = model.head(hidden_BLD)
        yield logits_BLV
        soft_BLD = model.soft_embed(logits_BLV) * batch.canvas_BL[..., None]


def add_noise(batch: Batch, t: float, vocab: int, generator: torch.Generator) -> Tensor:
    """Returns the ids with every canvas token replaced by a uniform random one with probability t."""
    shape = batch.ids_BL.shape
    noised_BL = (torch.rand(shape, generator=generator) < t).to(batch.ids_BL.device) & batch.canvas_BL
    noise_BL = torch.randint(vocab, shape, generator=generator).to(batch.ids_BL.device)
    return torch.where(noised_BL, noise_BL, batch.ids_BL)


def _split_rows(rows: list[list[int]]) -> Iterator[list[list[int]]]:
    """Yields batches of rows of similar length."""
    rows = sorted(rows, key=len)
    for begin in range(0, len(rows), BATCH_ROWS):
        yield rows[begin : begin + BATCH_ROWS]


# 2. Likelihood


@dataclass(frozen=True)
class Likelihood:
    """Summed nats over a number of tokens and bytes."""

    nats: float
    tokens: int
    size: int  # bytes

    @property
    def nats_per_token(self) -> float:
        """Mean over tokens; the start token is not counted."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Comparable between vocabularies."""
        return self.nats / math.log(2) / self.size


@torch.inference_mode()
def autoregressive(model: Backbone, tokenizer: Tokenizer, texts: Sequence[str]) -> Likelihood:
    """Computes the encoder's next-token loss, each text alone after the start token."""
    nats = 0.0
    tokens = 0
    for rows in _split_rows([tokenizer.encode_prompt(text) for text in texts]):
        batch = to_rows(rows, 1, model.device)
        counts = [len(ids) for ids in rows]
        hidden_BLD = model.encode(batch.ids_BL, model.new_cache(len(rows), max(counts)), counts)
        logits_BLV = model.head(hidden_BLD[:, :-1])
        targets_BL = torch.where(batch.next_BL, batch.ids_BL.roll(-1, dims=1), IGNORED)[:, :-1]
        nats += float(F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="sum"))
        tokens += sum(counts) - len(rows)
    return Likelihood(nats, tokens, sum(len(text.encode()) for text in texts))


@torch.inference_mode()
def nelbo(
    model: Backbone, tokenizer: Tokenizer, texts: Sequence[str], canvas_length: int, levels: int = 16, steps: int = 2
) -> Likelihood:
    """Computes the denoiser's bound on the same texts, canvas by canvas, over stratified noise levels."""
    generator = torch.Generator().manual_seed(0)
    nats = 0.0
    tokens = 0
    for rows in _split_rows([tokenizer.encode_prompt(text) for text in texts]):
        batch = to_rows(rows, canvas_length, model.device)
        canvas_BL = batch.canvas_BL
        mask_of = dense_masks(model.config, batch.layout)
        for level in range(levels):
            t = (level + float(torch.rand(1, generator=generator))) / levels
            t = min(max(t, 1e-3), 1 - 1e-3)
            noisy_BL = add_noise(batch, t, model.config.vocab_size, generator)
            *_, logits_BLV = denoise_steps(model, batch, noisy_BL, mask_of, steps)
            bound_N = nelbo_integrand(logits_BLV[canvas_BL], noisy_BL[canvas_BL], batch.ids_BL[canvas_BL], t)
            nats += float(bound_N.sum()) / levels
        tokens += sum(map(len, rows)) - len(rows)
    return Likelihood(nats, tokens, sum(len(text.encode()) for text in texts))


def nelbo_integrand(logits_NV: Tensor, noisy_N: Tensor, clean_N: Tensor, t: float) -> Tensor:
    """Returns the integrand of the continuous-time bound at noise level t, in nats per token.

    The denoiser's logits give p(clean | all tokens, the noisy one included); the bound needs a model that has not seen the
    token itself. The two differ by what the token says about itself, log(1 + V a / (1 - a)), which is subtracted from the
    logit of the noisy token.
    """
    vocab = logits_NV.shape[-1]
    a = 1.0 - t
    logits_NV = logits_NV.double()
    noisy_N1 = noisy_N[:, None]
    clean_N1 = clean_N[:, None]
    own_evidence = torch.full_like(noisy_N1, -math.log1p(vocab * a / t), dtype=torch.double)
    logits_NV = logits_NV.scatter_add(-1, noisy_N1, own_evidence)
    model_NV = vocab * a * torch.softmax(logits_NV, dim=-1) + t  # V times the model's marginal at this level
    log_model_NV = model_NV.log()
    true_at_clean = vocab * a + t  # V times the true marginal at the clean token; it is t at every other token
    true_N = torch.where(noisy_N == clean_N, true_at_clean, t)
    model_N, log_model_N = (values.gather(-1, noisy_N1).squeeze(-1) for values in (model_NV, log_model_NV))
    negative_entropy = true_at_clean * math.log(true_at_clean) + (vocab - 1) * t * math.log(t)
    cross_N = vocab * a * log_model_NV.gather(-1, clean_N1).squeeze(-1) + t * log_model_NV.sum(dim=-1)
    ratios_N = (vocab * (log_model_N - true_N.log()) + negative_entropy - cross_N) / true_N
    return -(vocab / true_N - vocab / model_N - ratios_N) / (vocab * a)


# 3. Repair


@torch.inference_mode()
def repair(
    model: Backbone, tokenizer: Tokenizer, texts: Sequence[str], canvas_length: int, steps: int = 2
) -> dict[float, tuple[float, float]]:
    """Returns by noise level: the share of clean tokens the model keeps, and of noised tokens it repairs."""
    generator = torch.Generator().manual_seed(0)
    batches = list(_split_rows([tokenizer.encode_prompt(text) for text in texts]))
    shares = {}
    for t in LEVELS:
        clean = noised = kept = repaired = 0
        for rows in batches:
            batch = to_rows(rows, canvas_length, model.device)
            noisy_BL = add_noise(batch, t, model.config.vocab_size, generator)
            *_, logits_BLV = denoise_steps(model, batch, noisy_BL, dense_masks(model.config, batch.layout), steps)
            is_right_BL = logits_BLV.argmax(dim=-1) == batch.ids_BL
            is_clean_BL = (noisy_BL == batch.ids_BL) & batch.canvas_BL
            is_noised_BL = noisy_BL != batch.ids_BL
            clean += int(is_clean_BL.sum())
            noised += int(is_noised_BL.sum())
            kept += int((is_right_BL & is_clean_BL).sum())
            repaired += int((is_right_BL & is_noised_BL).sum())
        shares[t] = (kept / max(1, clean), repaired / max(1, noised))
    return shares
