"""The parts of a checkpoint that generation needs: model, tokenizer and sampler settings, loaded onto a device.

They come from a folder or from a GGUF file.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redraft.checkpoint.adapter_files import fingerprint, hash_norms, is_norm
from redraft.checkpoint.drafter_files import NAMES, find_by_fingerprint, give_drafter, is_drafter, read_drafter_config
from redraft.checkpoint.find import find
from redraft.checkpoint.gguf import is_gguf, open_gguf
from redraft.checkpoint.load import PRECISIONS, fetch_weight, from_state_dict, lay_out_for_cpu, open_weights
from redraft.checkpoint.manifest import verify_files
from redraft.checkpoint.names import LLAMA, CheckpointError, published_name
from redraft.checkpoint.placement import Place
from redraft.checkpoint.published_config import read_model_config, read_sampler_config
from redraft.config import BackboneConfig, LlamaConfig, SamplerConfig
from redraft.kernels.backend import has_bf16, select_device, select_dtype
from redraft.model.architectures import build_model
from redraft.model.backbone import Backbone
from redraft.model.drafter import DrafterConfig
from redraft.model.page import PageConfig
from redraft.model.quant import QuantPolicy
from redraft.model.quant.stored import StoredWeight
from redraft.tokenizer.tokenizer import Tokenizer, TokenizerError, check_same_vocabulary

# How canvases of page adapters are denoised: as those of `tiny`, since small models exceed the released entropy bound, but
# colder: few tokens are right in a gap.
PAGE_SAMPLER: dict[str, Any] = {
    "max_steps": 32,
    "entropy_bound": 1.0,
    "t_min": 0.2,
    "t_max": 0.2,
    "confidence_threshold": 0.05,
    "quota": True,
    "accept_at_end": True,
    "spread": 8,
    "stops_last": True,
}


def load_checkpoint(
    path_or_id: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    quant: str | None = None,
    keep_bf16: bool = False,
    place: Place | None = None,
    drafter: bool = True,
) -> tuple[Backbone, Tokenizer, SamplerConfig]:
    """The parts of a Writer, for a caller that wants no engine.

    `quant` and `keep_bf16`: see QuantPolicy. `place` is asked where weights go, and in which formats, once their sizes are
    known. With `drafter=False` the model is loaded alone, without a drafter or page adapter.
    """
    device = select_device(device)
    policy = QuantPolicy.for_device(device, quant=quant, keep_bf16=keep_bf16)
    path, drafter_folder = find_base(path_or_id)
    opened = open_checkpoint(path, device)
    options: dict[str, Any] = {"dtype": select_dtype(device, _dtype(dtype)), "device": device}
    model = from_state_dict(opened.config, opened.tensors, policy=policy, place=place, **options)
    if not has_bf16(device):
        model = lay_out_for_cpu(model)
    sampler = opened.sampler
    if drafter and (drafter_folder is not None or isinstance(model.config, LlamaConfig)):
        for folder in find_by_fingerprint(drafter_folder, fingerprint(model)):
            sampler = drafting_sampler(sampler, model.config, give_drafter(folder, model))
    return model, opened.tokenizer, sampler


def find_base(path_or_id: str | Path, *, weights: bool = True) -> tuple[Path, Path | None]:
    """The folder or file of a checkpoint. The folder of a drafter stands for its base with it, and is returned beside it."""
    path = find(path_or_id, weights=weights)
    if not is_drafter(path):
        return path, None
    cfg, settings = read_drafter_config(path)
    beside = path / settings["base"]  # a base that is named relative to the drafter
    try:
        return find(beside if beside.exists() else settings["base"], weights=weights), path
    except CheckpointError as error:
        name = NAMES[type(cfg)]
        raise CheckpointError(f"{path} is a {name} for {settings['base']!r}, which cannot be found: {error}") from None


def find_drafters(
    config: BackboneConfig, tensors: Mapping[str, Tensor | StoredWeight], given: Path | None = None
) -> list[Path]:
    """The folders of the drafter and the page adapter that `load_checkpoint` adds to a checkpoint. Reads the norms only.

    `given` is the folder of a drafter or a page adapter for which the checkpoint was opened.
    """
    if not isinstance(config, LlamaConfig):
        return [] if given is None else [given]  # `load_checkpoint` refuses it: only Llamas have drafters
    with torch.device("meta"):
        expected = {name: tensor for name, tensor in build_model(config).state_dict().items() if is_norm(name)}
    available = set(tensors)
    norms: dict[str, Tensor] = {}
    for name, placeholder in expected.items():
        weight = fetch_weight(tensors, available, published_name(name, LLAMA), placeholder)
        norms[name] = weight if isinstance(weight, Tensor) else weight.dequantize()
    return find_by_fingerprint(given, hash_norms(norms))


def drafting_sampler(sampler: SamplerConfig, config: BackboneConfig, cfg: DrafterConfig | PageConfig) -> SamplerConfig:
    """The settings of a left-to-right model with a drafter: it writes its own text, verified draft by draft.

    With a page adapter it writes as it did; the settings of canvases, for infills and edits, are those of small models.
    """
    if isinstance(cfg, DrafterConfig):
        return sampler.changed(check="exact", draft_length=cfg.canvas_length - 1, draft_token=config.vocab_size)
    lengths = cfg.canvas_lengths
    return sampler.changed(canvas_length=lengths[-1], canvas_lengths=lengths, **PAGE_SAMPLER)


class OpenCheckpoint(NamedTuple):
    """A checkpoint of which nothing but headers, settings and tokenizer has been read."""

    config: BackboneConfig
    tensors: Mapping[str, Tensor | StoredWeight]  # under the names of the bf16 layout
    tokenizer: Tokenizer
    sampler: SamplerConfig


def open_checkpoint(path: Path, device: torch.device | str = "cpu") -> OpenCheckpoint:
    """Opens a folder or a GGUF file. Tensors are read onto the device when they are looked up."""
    if is_gguf(path):
        file = open_gguf(path)
        return OpenCheckpoint(file.config, file.tensors(device), file.tokenizer(), file.sampler)
    with verify_files(path):
        config, tensors = open_weights(path, device)
        tokenizer = Tokenizer.from_folder(path)
        sampler = read_sampler_config(path, config)
    if tokenizer.size > config.vocab_size:
        raise TokenizerError(
            f"the tokenizer in {path} has ids up to {tokenizer.size - 1}, but the model has a vocabulary of "
            f"{config.vocab_size}: use the tokenizer of this checkpoint"
        )
    if isinstance(config, LlamaConfig):  # files often name the end of a text only, and not that of a turn
        sampler = replace(sampler, eos_token_ids=tuple(dict.fromkeys((*sampler.eos_token_ids, *tokenizer.turn_ends))))
    return OpenCheckpoint(config, tensors, tokenizer, sampler)


def read_configs(path: Path) -> tuple[BackboneConfig, SamplerConfig]:
    """Reads the settings of a folder or of a GGUF file, without its weights. A drafter has those of its base."""
    path, _ = find_base(path, weights=False)
    if is_gguf(path):
        file = open_gguf(path)
        return file.config, file.sampler
    config = read_model_config(path)
    return config, read_sampler_config(path, config)


def load_verifier(
    path_or_id: str | Path, drafter: Backbone, tokenizer: Tokenizer, drafter_name: str, **options: Any
) -> Backbone:
    """Loads the model that verifies what another one drafts. Refuses another vocabulary."""
    drafter.require_denoiser("drafting")
    verifier, verifier_tokenizer, _ = load_checkpoint(path_or_id, **options, drafter=False)
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
