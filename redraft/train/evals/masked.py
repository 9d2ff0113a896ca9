"""Masked diffusion, for comparison only: the noise is one extra token, and an accepted token is never renoised.

Train with `--set loss.noise=mask`; the mask is the vocabulary's last id, which must be unused. Shapes as in
`diffusion/sampler.py`.
"""

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.constraints.constraints import NEVER
from redraft.diffusion import rng
from redraft.diffusion.generate import prefill
from redraft.diffusion.sampler import accept_by_entropy, temperature
from redraft.kernels import argmax_entropy_sample
from redraft.model.backbone import Backbone


@torch.inference_mode()
def fill_masks(model: Backbone, prompts: list[list[int]], cfg: SamplerConfig, seeds: list[int]) -> tuple[Tensor, int]:
    """Generates one canvas per prompt; each step accepts the positions of lowest entropy for good.

    Returns ids_BC and steps.
    """
    mask_id = model.config.vocab_size - 1
    length = cfg.canvas_length
    cache = model.new_cache(len(prompts), max(map(len, prompts)), rewind=0)
    prefill(model, prompts, cache)
    draws = rng.draws(seeds, 0, model.device)
    canvas_BC = torch.full((len(prompts), length), mask_id, device=model.device)
    soft_BCD = None
    for step in range(cfg.max_steps):
        open_BC = canvas_BC == mask_id
        if not open_BC.any():
            return canvas_BC, step
        logits_BCV = model.denoise(canvas_BC, soft_BCD, cache)
        logits_BCV[..., mask_id] = NEVER
        scaled_BCV = logits_BCV / temperature(step, cfg)
        prediction = argmax_entropy_sample(scaled_BCV, draws.uniform(step + 1, length))
        entropy_BC = torch.where(open_BC, prediction.entropy_BC, torch.inf)
        min_accepted_B = -(-open_BC.sum(dim=-1) // (cfg.max_steps - step))  # open positions spread over the steps left
        accepted_BC = accept_by_entropy(entropy_BC, cfg.entropy_bound, min_accepted_B) & open_BC
        canvas_BC = torch.where(accepted_BC, prediction.sampled_BC, canvas_BC)
        soft_BCD = model.soft_embed(scaled_BCV)
    return canvas_BC, cfg.max_steps
