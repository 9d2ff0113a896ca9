"""The same weights the ordinary way: one token after another, each from a causal pass of its own. For comparison.

Shapes: S tokens, D model size.
"""

from collections.abc import Iterator, Sequence

import torch

from redraft.diffusion import rng
from redraft.kernels import argmax_entropy_sample
from redraft.kernels.threads import adapt_threads
from redraft.model.diffusion_gemma import DiffusionGemma


@torch.inference_mode()
def generate_autoregressive(
    model: DiffusionGemma, ids: Sequence[int], most: int, *, temperature: float = 0.0, seed: int = 0
) -> Iterator[int]:
    """Tokens behind these, at most so many, a stop token the last; the likeliest, or drawn at a temperature.

    Of what is longer than the context, the end is read.
    """
    ids = ids[-(model.config.max_position_embeddings - most) :]
    cache, draws = model.new_cache(1, len(ids) + most, rewind=0), rng.draws([seed], 0, model.device)
    hidden_1SD = model.encode(torch.tensor([ids], device=model.device), cache)
    for step in range(most):
        if model.device.type == "cpu":
            adapt_threads()
        logits_11V = model.head(hidden_1SD[:, -1:])
        drawn = argmax_entropy_sample(logits_11V / temperature, draws.uniform(step, 1)).sampled_BC if temperature else None
        token = int(drawn if drawn is not None else logits_11V.argmax())
        yield token
        if token in model.config.eos_token_ids:
            return
        hidden_1SD = model.encode(torch.tensor([[token]], device=model.device), cache)
