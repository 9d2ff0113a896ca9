"""Autoregressive generation: one token after another, each from a causal forward. The definition that exact mode must equal.

The engine runs it as exact mode without drafts, in batches and faster.
Shapes: one row, S tokens, V vocabulary, D model size.
"""

from collections.abc import Iterator, Sequence

import torch

from redraft.config import SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.constraints.next_token import NextToken
from redraft.diffusion import pick, rng
from redraft.kernels.threads import adapt_threads
from redraft.model.backbone import Backbone
from redraft.model.lora import Adapter


@torch.inference_mode()
def generate_autoregressive(
    model: Backbone,
    ids: Sequence[int],
    max_tokens: int,
    cfg: SamplerConfig | None = None,
    *,
    seed: int = 0,
    constraints: Constraints | None = None,
    adapter: Adapter | None = None,
) -> Iterator[int]:
    """Yields at most `max_tokens` tokens after the prompt `ids`; a stop token ends it and is yielded too.

    Without `cfg` it takes the argmax. A prompt that does not fit the context together with `max_tokens` loses its beginning.
    """
    context = model.config.max_position_embeddings
    cfg = cfg or SamplerConfig(temperature=0.0, eos_token_ids=model.config.eos_token_ids)
    if max_tokens >= context:
        raise ValueError(
            f"max_tokens is {max_tokens}, but the model's context of {context} tokens must also hold the prompt: "
            f"ask for at most {context - 1}"
        )
    if not ids:
        raise ValueError("a prompt needs at least one token")
    ids = ids[-(context - max_tokens) :]
    constraints = constraints or Constraints()
    next_token = NextToken(constraints, max_tokens, cfg.eos_token_ids, model.config.vocab_size)
    state = constraints.initial_state
    seed_1 = torch.tensor([rng.wrap_seed(seed)], device=model.device)
    seen_1V = torch.zeros(1, model.config.vocab_size, dtype=torch.bool, device=model.device)
    seen_1V[:, list(ids)] = True
    cache = model.new_cache(1, len(ids) + max_tokens, rewind=0, adapter=adapter)
    hidden_1SD = model.encode(torch.tensor([ids], device=model.device), cache)
    for position in range(max_tokens):
        if model.device.type == "cpu":
            adapt_threads()
        logits_1V = pick.adjust_logits(model.head(hidden_1SD[0, -1:]), cfg, seen_1V)
        logits_1V = next_token.mask_logits(logits_1V, position, state, ())
        token = int(pick.pick_tokens(logits_1V, cfg, seed_1, torch.tensor([position], device=model.device)))
        yield token
        if token in cfg.eos_token_ids:
            return
        next_state = next_token.advance(state, token)
        assert next_state is not None, "only tokens that fit the pattern are picked"
        state = next_state
        seen_1V[:, token] = True
        hidden_1SD = model.encode(torch.tensor([[token]], device=model.device), cache)
