"""Writes checkpoints in the published layout, which transformers loads. The folder is replaced as a whole."""

import json
import re
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.checkpoint.atomic_folder import replace_folder
from redraft.checkpoint.manifest import FILES, describe_files, verify_files
from redraft.checkpoint.names import (
    CONFIG,
    DRAFT_HEAD,
    DRAFT_HEAD_PREFIX,
    DRAFTER_PREFIXES,
    GENERATION_CONFIG,
    INDEX,
    PROCESSOR_FILES,
    REDRAFT_CONFIG,
    VISION,
    WEIGHTS,
    CheckpointError,
    Layout,
    find_layout,
    published_name,
)
from redraft.checkpoint.publish_packed import choose_scale_dtype, publish_packed, publish_quantization
from redraft.checkpoint.published_config import (
    parse_sampler_config,
    publish_model_config,
    publish_sampler_config,
    read_model_config,
)
from redraft.checkpoint.tensor_file import save_tensors
from redraft.checkpoint.tensors import CheckpointTensors
from redraft.config import SMALLEST_VISION, ModelConfig, SamplerConfig, read_file, write_text
from redraft.kernels.fp8 import dequantize
from redraft.kernels.int4 import Int4Tensor
from redraft.kernels.packed import FORMATS, PackedTensor
from redraft.model.architectures import build_model
from redraft.model.backbone import Backbone
from redraft.model.embedding import PackedEmbedding
from redraft.model.quant.layers import PackedExperts, PackedLinear
from redraft.model.quant.policy import QUANTIZED_PARTS, part_of
from redraft.tokenizer.tokenizer import Tokenizer

SHARD_BYTES = 5 * 10**9


def save(
    model: Backbone,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    sampler: SamplerConfig | None = None,
    vision_from: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    force: bool = False,
) -> Path:
    """Writes a checkpoint that transformers loads. A folder that holds one already is replaced with `force` only.

    Vision weights and the settings of the image processor are copied from the checkpoint `vision_from`, which may be the
    folder that is replaced; without it, an empty vision tower is written. A causal-only model becomes a Gemma4ForCausalLM,
    LlamaForCausalLM or the like, which has no vision weights. A killed save leaves the old folder or the new one.
    """
    if model.config.is_causal_only and vision_from is not None:
        raise ValueError("a causal-only model is saved without vision weights: leave out vision_from")
    with replace_folder(folder, force=force) as part:
        config, tensors = _publish(model, vision_from)
        _write_weights(tensors, part, shard_bytes)
        if vision_from is not None:
            copy_processor(Path(vision_from), part)
        sampler = sampler or parse_sampler_config({}, model.config)
        write_settings(part, config, sampler, tokenizer, is_causal_only=model.config.is_causal_only)
    return Path(folder)


def write_settings(
    folder: Path, config: dict[str, Any], sampler: SamplerConfig, tokenizer: Tokenizer | None, *, is_causal_only: bool
) -> None:
    """Writes everything but the weights, which are there already: the manifest comes last and describes all files."""
    generation, ours = publish_sampler_config(sampler, is_causal_only=is_causal_only)
    write_json(folder / CONFIG, config)
    write_json(folder / GENERATION_CONFIG, generation)
    if tokenizer is not None:
        tokenizer.save(folder)
    write_json(folder / REDRAFT_CONFIG, ours | {FILES: describe_files(folder)})


def _publish(model: Backbone, vision_from: str | Path | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of config.json, and the tensors by their published names."""
    layout = find_layout((), model.config)
    config = publish_model_config(model.config, str(model.dtype).removeprefix("torch."))
    tensors, quantization = _publish_weights(model, layout)
    if quantization:
        config["quantization_config"] = quantization
    if model.config.is_causal_only:
        return config, tensors
    if vision_from is None:
        config["vision_config"] = dict(SMALLEST_VISION)
        return config, tensors | smallest_vision(model.config.hidden_size, model.dtype)
    with verify_files(vision_from):
        source = CheckpointTensors(Path(vision_from))
        source_config = read_model_config(vision_from)
        assert isinstance(source_config, ModelConfig)  # else it has no vision weights
        config["vision_config"] = dict(source_config.vision)
    return config, tensors | {name: source[name] for name in source if name.startswith(VISION)}


def _publish_weights(model: Backbone, layout: Layout) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The text weights by their published names, and `quantization_config` if some are packed."""
    packed: dict[str, PackedTensor] = {}
    for module_name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            packed[f"{module_name}.weight"] = module.packed("weight")
        elif isinstance(module, PackedExperts):
            packed |= {f"{module_name}.{name}": module.packed(name) for name in ("gate_up_proj", "down_proj")}
    is_buffer = re.compile("|".join(rf"{re.escape(name)}(_\w+)?" for name in packed)) if packed else re.compile("$^")
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(DRAFTER_PREFIXES)}
    plain = {name: tensor for name, tensor in own.items() if not is_buffer.fullmatch(name)}
    if isinstance(model.embed_tokens, PackedEmbedding):  # published embeddings are in full precision
        del plain["embed_tokens.weight_scale"]
        plain["embed_tokens.weight"] = dequantize(model.embed_tokens.table_VD, model.dtype)
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in build_model(model.config).state_dict().items()}
    missing = sorted(shapes.keys() - plain.keys() - packed.keys())
    if missing:
        raise ValueError(f"the model holds no {missing[0]}: load it without gpu_memory, which offloads experts, to save it")
    tensors = {published_name(name, layout): tensor for name, tensor in plain.items()}
    if not packed:
        return tensors, None
    for name, weight in packed.items():
        scale_dtype = choose_scale_dtype(weight)
        tensors |= publish_packed(published_name(name, layout), weight, shapes[name][-1], scale_dtype=scale_dtype)
    formats = {
        name: FORMATS[type(packed[name])] if name in packed else None for name in shapes if part_of(name) in QUANTIZED_PARTS
    }
    with_minimum = {weight.minimum is not None for weight in packed.values() if isinstance(weight, Int4Tensor)}
    if len(with_minimum) == 2:
        raise CheckpointError(
            "some 4-bit weights have a minimum and some have none: compressed-tensors has one kind for all"
        )
    assert isinstance(model.config, ModelConfig)  # no other architecture has packed weights
    return tensors, publish_quantization(model.config, formats, has_zero_points=True in with_minimum)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file of JSON as a whole."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def copy_processor(source: Path, target: Path) -> None:
    """Copies the settings of the image processor, which transformers needs to take images, if there are any."""
    for name in PROCESSOR_FILES:
        if (source / name).exists():
            (target / name).write_bytes(read_file(source / name))


def smallest_vision(hidden: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The three tensors of a vision tower without layers; without them transformers reports missing weights."""
    size = SMALLEST_VISION["hidden_size"]
    tower, projection = VISION
    return {
        projection + "embedding_projection.weight": torch.zeros(hidden, size, dtype=dtype),
        tower + "patch_embedder.input_proj.weight": torch.zeros(size, 3 * 16 * 16, dtype=dtype),
        tower + "patch_embedder.position_embedding_table": torch.zeros(2, 1, size, dtype=dtype),
    }


def _write_weights(tensors: dict[str, Tensor], folder: Path, shard_bytes: int) -> None:
    """Writes the shards one after another: the host holds one of them at a time. The draft head has a file of its own."""
    draft_head = {name: tensor for name, tensor in tensors.items() if name.startswith(DRAFT_HEAD_PREFIX)}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in draft_head}
    shards = _plan_shards(tensors, shard_bytes)
    file_names = [WEIGHTS]
    if len(shards) > 1:
        file_names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    save_id = secrets.token_hex(16)  # tells the headers of two saves apart: see manifest.py
    for file_name, names in zip(file_names, shards, strict=True):
        _write_tensors({name: tensors[name] for name in names}, folder / file_name, save_id)
    if draft_head:
        _write_tensors(draft_head, folder / DRAFT_HEAD, save_id)
    weight_map = {name: file_name for file_name, names in zip(file_names, shards, strict=True) for name in names}
    if len(shards) > 1:
        total_size = sum(tensor.nbytes for tensor in tensors.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _write_tensors(tensors: dict[str, Tensor], path: Path, save_id: str) -> None:
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_tensors(on_host, path, {"format": "pt", "save_id": save_id})


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
