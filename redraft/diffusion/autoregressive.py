"""Autoregressive generation with the same weights: one token after another, each from a causal forward. For comparison.

Shapes: one row, S tokens, V vocabulary, D model size.
"""

from collections.abc import Iterator, Sequence

import torch

from redraft.diffusion import rng
from redraft.kernels import argmax_entropy_sample
from redraft.kernels.threads import adapt_threads
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.kv_cache import KVCache


@torch.inference_mode()
def generate_autoregressive(
    model: DiffusionGemma,
    ids: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    cache: KVCache | None = None,
    cached: int = 0,
) -> Iterator[int]:
    """Yields at most `max_tokens` tokens after the prompt `ids`; a stop token ends it and is yielded too.

    Temperature 0 takes the argmax; above that, tokens are sampled. A prompt that does not fit the context together with
    `max_tokens` loses its beginning. `cache` is a KV cache for prompt and tokens that holds the first
    `cached` tokens of the prompt; without it, one is made.
    """
    context = model.config.max_position_embeddings
    if max_tokens >= context:
        raise ValueError(
            f"max_tokens is {max_tokens}, but the model's context of {context} tokens must also hold the prompt: "
            f"ask for at most {context - 1}"
        )
    if not ids:
        raise ValueError("a prompt needs at least one token")
    ids = ids[-(context - max_tokens) :]
    cache = cache if cache is not None else model.new_cache(1, len(ids) + max_tokens, rewind=0)
    draws = rng.draws([seed], 0, model.device)
    hidden_1SD = model.encode(torch.tensor([ids[cached:]], device=model.device), cache)
    for step in range(max_tokens):
        if model.device.type == "cpu":
            adapt_threads()
        logits_11V = model.head(hidden_1SD[:, -1:])
        if temperature:
            token_11 = argmax_entropy_sample(logits_11V / temperature, draws.uniform(step, 1)).sampled_BC
        else:
            token_11 = logits_11V.argmax(dim=-1)
        token = int(token_11)
        yield token
        if token in model.config.eos_token_ids:
            return
        hidden_1SD = model.encode(torch.tensor([[token]], device=model.device), cache)
