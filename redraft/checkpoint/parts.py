"""The parts of a checkpoint that generation needs: model, tokenizer and sampler settings, loaded onto a device."""

from pathlib import Path
from typing import Any

import torch

from redraft.checkpoint.find import find
from redraft.checkpoint.load import PRECISIONS, lay_out_for_cpu, load_model
from redraft.checkpoint.manifest import verify_files
from redraft.checkpoint.placement import Place
from redraft.checkpoint.published_config import read_model_config, read_sampler_config
from redraft.config import SamplerConfig
from redraft.kernels.backend import has_bf16, select_device, select_dtype
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.quant import FP8, quantize_fp8
from redraft.tokenizer.tokenizer import Tokenizer, TokenizerError, check_same_vocabulary


def load_checkpoint(
    path_or_id: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    quant: str | None = None,
    place: Place | None = None,
) -> tuple[DiffusionGemma, Tokenizer, SamplerConfig]:
    """The parts of a Writer, for a caller that wants no engine. `place` is asked where weights go."""
    if quant not in (None, FP8):
        raise ValueError(f"there is no quantization {quant!r}; try {FP8}")
    device = select_device(device)
    folder = find(path_or_id)
    with verify_files(folder):
        config = read_model_config(folder)
        tokenizer = Tokenizer.from_folder(folder)
        if tokenizer.size > config.vocab_size:
            raise TokenizerError(
                f"the tokenizer in {folder} has ids up to {tokenizer.size - 1}, but the model has a vocabulary of "
                f"{config.vocab_size}: use the tokenizer of this checkpoint"
            )
        sampler = read_sampler_config(folder, config)
        model = load_model(folder, dtype=select_dtype(device, _dtype(dtype)), device=device, place=place)
    if quant == FP8 and not model.config.quant:
        model = quantize_fp8(model)
    elif not has_bf16(device):
        model = lay_out_for_cpu(model)
    return model, tokenizer, sampler


def load_verifier(
    path_or_id: str | Path, drafter: DiffusionGemma, tokenizer: Tokenizer, drafter_name: str, **options: Any
) -> DiffusionGemma:
    """Loads the model that verifies what another one drafts. Refuses another vocabulary."""
    drafter.require_denoiser("drafting")
    verifier, verifier_tokenizer, _ = load_checkpoint(path_or_id, **options)
    check_same_vocabulary(tokenizer, verifier_tokenizer, drafter_name, str(path_or_id))
    if verifier.config.vocab_size != drafter.config.vocab_size:
        raise ValueError(
            f"{drafter_name} has {drafter.config.vocab_size} tokens and {path_or_id} {verifier.config.vocab_size}: "
            "one cannot verify the other's tokens"
        )
    return verifier


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and resolved not in PRECISIONS:
        raise ValueError(f"{dtype!r} is not a precision to compute in; try float32 or bfloat16")
    return resolved
