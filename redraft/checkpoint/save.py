"""Writes checkpoints in the published layout, which transformers loads. Files are replaced as a whole, config.json last."""

import json
import os
import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from redraft.checkpoint.names import CONFIG, GENERATION_CONFIG, INDEX, REDRAFT_CONFIG, VISION, WEIGHTS, published_name
from redraft.checkpoint.published_config import (
    parse_sampler_config,
    publish_model_config,
    publish_sampler_config,
    read_model_config,
)
from redraft.checkpoint.tensors import CheckpointTensors
from redraft.config import SMALLEST_VISION, SamplerConfig
from redraft.model import quant
from redraft.model.diffusion_gemma import DiffusionGemma

SHARD_BYTES = 5 * 10**9


def save(
    model: DiffusionGemma,
    folder: str | Path,
    *,
    sampler: SamplerConfig | None = None,
    vision_from: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes a checkpoint that transformers loads.

    Vision weights are copied from the checkpoint `vision_from`; without it, an empty vision tower is written. A file is
    written under another name and renamed, so it is never half there; config.json comes last.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {published_name(name): tensor for name, tensor in model.state_dict().items()}
    tensors = quant.split_experts(tensors) if model.config.quant else tensors
    config = publish_model_config(model.config, str(model.dtype).removeprefix("torch."))
    if model.config.quant:
        config["quantization_config"] = quant.quantization_config(model.config.num_hidden_layers)
    if vision_from is not None:
        source = CheckpointTensors(Path(vision_from))
        tensors |= {name: source[name] for name in source if name.startswith(VISION)}
        config["vision_config"] = dict(read_model_config(vision_from).vision)
    else:
        config["vision_config"] = dict(SMALLEST_VISION)
        tensors |= _smallest_vision(model.config.hidden_size, model.dtype)
    _write_weights(tensors, folder, shard_bytes)
    sampler = sampler or parse_sampler_config({}, model.config)
    generation, ours = publish_sampler_config(sampler)
    for file_name, content in ((GENERATION_CONFIG, generation), (REDRAFT_CONFIG, ours), (CONFIG, config)):
        write_text(folder / file_name, json.dumps(content, indent=2) + "\n")
    return folder


def _smallest_vision(hidden: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The three tensors of a vision tower without layers; without them transformers reports missing weights."""
    size = SMALLEST_VISION["hidden_size"]
    tower, projection = VISION
    return {
        projection + "embedding_projection.weight": torch.zeros(hidden, size, dtype=dtype),
        tower + "patch_embedder.input_proj.weight": torch.zeros(size, 3 * 16 * 16, dtype=dtype),
        tower + "patch_embedder.position_embedding_table": torch.zeros(2, 1, size, dtype=dtype),
    }


def _write_weights(tensors: dict[str, Tensor], folder: Path, shard_bytes: int) -> None:
    """Writes the shards one after another: the host holds one of them at a time."""
    shards = _plan_shards(tensors, shard_bytes)
    file_names = [WEIGHTS]
    if len(shards) > 1:
        file_names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file_name, names in zip(file_names, shards, strict=True):
        shard = {name: tensors[name].detach().cpu().contiguous() for name in names}
        save_file(shard, folder / (file_name + ".part"), metadata={"format": "pt"})
        os.replace(folder / (file_name + ".part"), folder / file_name)
    weight_map = {name: file_name for file_name, names in zip(file_names, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    if len(shards) > 1:
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors"):
        if old.name not in file_names and re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", old.name):
            old.unlink()  # a shard of an earlier save, which no index lists any more


def _plan_shards(tensors: dict[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """The tensor names of each shard file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in sorted(tensors.items()):
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.nbytes
    return shards


def write_text(path: Path, text: str) -> None:
    """Replaces a file as a whole: it has the old or the new content, never a part."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
