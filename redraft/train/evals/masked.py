"""Masked diffusion, the other school, for comparison only: noise is one extra token, and what is written stays written.

Train with `--set loss.noise=mask`; the mask is the last id of a vocabulary that has one to spare. Shapes as in `sampler.py`.
"""

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.constraints.constraints import NEVER
from redraft.diffusion import rng
from redraft.diffusion.generate import prefill
from redraft.diffusion.sampler import accept_by_entropy, temperature
from redraft.kernels import argmax_entropy_sample
from redraft.model.diffusion_gemma import DiffusionGemma


@torch.inference_mode()
def fill_masks(model: DiffusionGemma, prompts: list[list[int]], cfg: SamplerConfig, seeds: list[int]) -> tuple[Tensor, int]:
    """One canvas for every prompt, ids_BC, and the steps it took: each step commits the surest masks, for good."""
    mask, length = model.config.vocab_size - 1, cfg.canvas_length
    cache = model.new_cache(len(prompts), max(map(len, prompts)), rewind=0)
    prefill(model, prompts, cache)
    draws = rng.draws(seeds, 0, model.device)
    canvas_BC = torch.full((len(prompts), length), mask, device=model.device)
    soft_BCD = None
    for step in range(cfg.max_steps):
        open_BC = canvas_BC == mask
        if not open_BC.any():
            return canvas_BC, step
        logits_BCV = model.denoise(canvas_BC, soft_BCD, cache)
        logits_BCV[..., mask] = NEVER
        shaped_BCV = logits_BCV / temperature(step, cfg)
        belief = argmax_entropy_sample(shaped_BCV, draws.uniform(step + 1, length))
        doubt_BC = torch.where(open_BC, belief.entropy_BC, torch.inf)
        least_B = -(-open_BC.sum(dim=-1) // (cfg.max_steps - step))  # shared out over the steps left
        chosen_BC = accept_by_entropy(doubt_BC, cfg.entropy_bound, least_B) & open_BC
        canvas_BC = torch.where(chosen_BC, belief.sampled_BC, canvas_BC)
        soft_BCD = model.soft_embed(shaped_BCV)
    return canvas_BC, cfg.max_steps
