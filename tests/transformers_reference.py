"""The reference: transformers' DiffusionGemma with our weights, and its generate fed with our random numbers."""

from collections.abc import Sequence
from contextlib import contextmanager

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, EntropyBoundSamplerConfig
from transformers.models.diffusion_gemma import generation_diffusion_gemma as reference

from redraft import checkpoint
from redraft.config import SamplerConfig
from redraft.diffusion import rng
from redraft.kernels.vocabulary import sample_from
from redraft.model.diffusion_gemma import DiffusionGemma


def same_weights(ours: DiffusionGemma) -> DiffusionGemmaForBlockDiffusion:
    """transformers' model with our weights."""
    dtype = str(ours.dtype).removeprefix("torch.")
    config = DiffusionGemmaConfig.from_dict(checkpoint.publish_model_config(ours.config, dtype))
    # Not .to(dtype): it would also round the RoPE frequencies, which loading a checkpoint does not do.
    model = DiffusionGemmaForBlockDiffusion._from_config(config, dtype=ours.dtype).eval()
    tensors = {checkpoint.published_name(name): tensor for name, tensor in ours.state_dict().items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    model.tie_weights()
    assert all("vision" in n or n.startswith(("lm_head", "model.encoder.language_model")) for n in missing), missing
    return model


@contextmanager
def our_draws(monkeypatch, seeds: Sequence[int]):
    """Makes transformers start, sample and renoise with the random numbers that `diffusion.rng` gives these seeds.

    Its loop draws a canvas of noise when a canvas starts; each step draws a sample and then a canvas of noise.
    """
    at = {"block": -1, "step": 0}

    def canvas(self, batch_size: int, device: torch.device) -> torch.Tensor:
        if at["starting"]:
            at["block"] += 1
            at["step"] = 0
            at["starting"] = False
        draws = rng.draws(list(seeds), at["block"], device)
        return draws.noise(at["step"], self.canvas_length, self.vocab_size)

    def multinomial(probs: torch.Tensor, num_samples: int) -> torch.Tensor:
        at["step"] += 1
        draws = rng.draws(list(seeds), at["block"], probs.device)
        return sample_from(probs, draws.uniform(at["step"], probs.shape[0] // len(seeds)).flatten())[:, None]

    prepare = reference.DiffusionGemmaGenerationMixin._prepare_denoiser_inputs

    def begin(self, **kwargs):
        at["starting"] = True
        return prepare(self, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(reference.EntropyBoundSampler, "initialize_canvas", canvas)
        patch.setattr(reference.DiffusionGemmaGenerationMixin, "_prepare_denoiser_inputs", begin)
        patch.setattr(reference.torch, "multinomial", multinomial)
        yield


def generate(
    model: DiffusionGemmaForBlockDiffusion,
    prompts_BS: torch.Tensor,
    cfg: SamplerConfig,
    **options: object,
) -> reference.DiffusionGemmaGenerationOutput:
    """transformers' generate with our sampler settings."""
    model.config.canvas_length = cfg.canvas_length
    return model.generate(
        prompts_BS,
        max_new_tokens=cfg.max_new_tokens,
        max_denoising_steps=cfg.max_steps,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=float(cfg.entropy_bound)),
        t_min=cfg.t_min,
        t_max=cfg.t_max,
        stability_threshold=cfg.stability_threshold,
        confidence_threshold=cfg.confidence_threshold,
        eos_token_id=list(cfg.eos_token_ids) or None,
        pad_token_id=cfg.pad_token_id,
        **options,
    )
