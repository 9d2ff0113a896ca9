"""Loads a checkpoint: published tensors become a model.

The model is built on the "meta" device, without memory, and takes the tensors one by one. On a CPU they stay views of the
mapped file. To a GPU each is copied from the mapped file in pieces and converted there, so the host never holds a second
copy. Nothing is copied before the placement is known.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.checkpoint.compressed import QuantizedTensors
from redraft.checkpoint.drafter_files import refuse_drafter
from redraft.checkpoint.gguf import is_gguf, open_gguf
from redraft.checkpoint.manifest import verify_files
from redraft.checkpoint.names import (
    CONFIG,
    DECODER,
    ENCODER,
    CheckpointError,
    Layout,
    find_layout,
    is_ignored,
    published_name,
    tied_name,
)
from redraft.checkpoint.placement import Place, Placement, plan_bytes
from redraft.checkpoint.published_config import read_model_config
from redraft.checkpoint.quantization import read_quantization
from redraft.checkpoint.tensors import CheckpointTensors
from redraft.config import BackboneConfig, ModelConfig, read_json
from redraft.kernels.fp8 import Fp8Tensor
from redraft.kernels.packed import FORMATS
from redraft.model.architectures import build_model
from redraft.model.backbone import Backbone
from redraft.model.embedding import PackedEmbedding
from redraft.model.quant.conversion import Converter, log_conversions, plain_dtype, stored_format
from redraft.model.quant.layers import PackedExperts, PackedLinear
from redraft.model.quant.policy import EXPERTS, QUANT_FORMATS, QuantPolicy, part_of
from redraft.model.quant.stored import StoredWeight

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    policy: QuantPolicy | None = None,
) -> Backbone:
    """Loads the model of a folder or of a GGUF file. Without a dtype, weights keep the precision of the stored embedding.

    Quantized ones and float16 become bf16.
    """
    config, tensors = open_weights(folder, device)
    return from_state_dict(config, tensors, dtype=dtype, device=device, policy=policy)


def open_weights(
    folder: str | Path, device: torch.device | str = "cpu"
) -> tuple[BackboneConfig, Mapping[str, Tensor | StoredWeight]]:
    """The shape of a checkpoint and its weights under the names of the bf16 layout. Only headers are read.

    Tensors are views of the mapped file. StoredWeights are converted on the device.
    """
    if is_gguf(folder):
        file = open_gguf(folder)
        return file.config, file.tensors(device)
    refuse_drafter(folder)
    with verify_files(folder):
        config = read_model_config(folder)
        stored = CheckpointTensors(Path(folder))
        quantization = read_quantization(Path(folder), read_json(Path(folder) / CONFIG), str(Path(folder) / CONFIG))
    _compare_sizes(config, stored)
    return config, QuantizedTensors(stored, quantization, device) if quantization else stored


def _compare_sizes(config: BackboneConfig, tensors: CheckpointTensors) -> None:
    """Compares config.json with the headers of the weights, before a model is built: 9,999 layers would take a minute.

    Other differences are found later, where each tensor is fetched.
    """
    layout = find_layout(tensors, config)
    layer_name = re.compile(re.escape(layout.text) + r"layers\.(\d{1,9})\.")
    layer_numbers = [int(match[1]) for name in tensors if (match := layer_name.match(name))]
    stored = {"num_hidden_layers": max(layer_numbers, default=-1) + 1}
    for name, fields in (
        ("embed_tokens.weight", ("vocab_size", "hidden_size")),
        ("layers.0.router.proj.weight", ("num_experts", "hidden_size")),
    ):
        published = published_name(name, layout)
        if published in tensors:
            stored |= zip(fields, tensors.shape(published), strict=False)
    for field, number in stored.items():
        configured = getattr(config, field, 0)  # a Llama has no experts
        if configured != number:
            raise CheckpointError(
                f"config.json and the weights in {tensors.folder} are not of the same model: {field} is {configured} in "
                f"config.json and {number} in the weights"
            )


def lay_out_for_cpu(model: Backbone) -> Backbone:
    """Stores the matrices of a float32 model column by column, which a CPU without bf16 multiplies fastest.

    The numbers stay the same. The embedding keeps its layout, because it is used both by rows (lookup) and by columns
    (logits). So do experts that are so few that all of them are used at once.
    """
    expert_size = model.config.moe_intermediate_size if isinstance(model.config, ModelConfig) else 0
    for name, weight in model.named_parameters():
        has_few_experts = weight.dim() == 3 and len(weight) * expert_size <= model.config.hidden_size
        is_float32_matrix = weight.dim() >= 2 and weight.dtype == torch.float32
        if is_float32_matrix and not has_few_experts and name != "embed_tokens.weight":
            weight.data = weight.data.mT.contiguous().mT
    return model


def from_state_dict(
    config: BackboneConfig,
    tensors: Mapping[str, Tensor | StoredWeight],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    policy: QuantPolicy | None = None,
    place: Place | None = None,
) -> Backbone:
    """Makes a model whose weights are these published tensors. Without a dtype, it has that of `default_dtype`.

    The policy says which weights are packed, and how; by default, as the device runs them best. Each weight is read,
    converted and put in its place before the next one is read. `place` is asked where the weights go and how they are
    packed, once their sizes are known; without it, all of them go to the device.
    """
    with torch.device("meta"):
        model = build_model(config)
    expected = model.state_dict()
    available = set(tensors)  # asking a Mapping `name in tensors` may read the whole tensor
    layout = find_layout(available, config)
    refuse_unknown_tensors(tensors, available, {published_name(name, layout) for name in expected}, layout)
    # Tensors of files are views of the mapped file: nothing is read or copied yet.
    stored = {
        name: fetch_weight(tensors, available, published_name(name, layout), placeholder)
        for name, placeholder in expected.items()
    }
    formats = {name: stored_format(weight) for name, weight in stored.items()}
    policy = policy or QuantPolicy.for_device(device)
    check_quant(config, policy.quant)
    if not isinstance(config, ModelConfig):
        policy = QuantPolicy()  # a Llama is dequantized: an answer should be that of the file's numbers
    dtype = dtype or default_dtype(stored["embed_tokens.weight"])
    placement = Placement(torch.device(device), policy)
    if place is not None:
        sizes = {each: plan_bytes(expected, formats, each, dtype) for each in policy.alternatives}
        placement = place(config, sizes, dtype)
    targets = placement.policy.targets(formats)
    converter = Converter(device)
    weights: dict[str, Tensor] = {}
    experts: dict[str, Any] = {}  # the packed ones of a layer, until both are there
    for name in expected:
        weight = converter.convert(targets[name], name, stored.pop(name), dtype, placement.device_of(name))
        module_name, _, last = name.rpartition(".")
        if isinstance(weight, Tensor):
            weights[name] = weight
        elif part_of(name) in EXPERTS:
            experts[last] = weight
            if len(experts) == 2:
                model.set_submodule(module_name, PackedExperts(experts["gate_up_proj"], experts["down_proj"]))
                experts = {}
        elif name == "embed_tokens.weight":
            assert isinstance(weight, Fp8Tensor)
            model.embed_tokens = PackedEmbedding(weight, dtype)
        else:
            model.set_submodule(module_name, PackedLinear(weight))
    _, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    assert not unexpected, unexpected
    model.config = replace(config, quant=packed_formats(model))
    model.conversions = converter.describe()
    log_conversions(model.conversions)
    return model.eval().requires_grad_(False)


def check_quant(config: BackboneConfig, quant: str | None, name: str = "this model") -> None:
    """Refuses to round a Llama. For callers whose weights come later: the settings of a checkpoint are enough."""
    policy = QuantPolicy(quant=quant)  # refuses a format that does not exist
    if policy.quant is not None and not isinstance(config, ModelConfig):
        raise CheckpointError(
            f"quant {quant} rounds the weights of DiffusionGemma and Gemma 4; {name} runs in full precision: leave it out"
        )


def default_dtype(embedding: Tensor | StoredWeight) -> torch.dtype:
    """The precision of a model whose embedding is stored so. The GPU kernels are made for bf16, not for float16."""
    dtype = plain_dtype(embedding)
    return torch.bfloat16 if dtype is None or dtype == torch.float16 else dtype


def packed_formats(model: Backbone) -> str | None:
    """The formats of a model's packed weights in one word, "nvfp4+fp8"; None if it has none."""
    layers = (module for module in model.modules() if isinstance(module, PackedLinear | PackedExperts))
    formats = {FORMATS[kind] for layer in layers for kind in layer.formats}
    return "+".join(name for name in QUANT_FORMATS if name in formats) or None


def fetch_weight(
    tensors: Mapping[str, Tensor | StoredWeight], available: set[str], name: str, placeholder: Tensor
) -> Tensor | StoredWeight:
    """Returns a published tensor, checked against the shape and kind of the model's."""
    if name not in available and name.startswith(ENCODER):
        name = DECODER + name.removeprefix(ENCODER)  # some trainers drop the encoder's scalars; released ones are equal
    try:
        tensor = tensors[name]
    except KeyError:
        raise CheckpointError(f"the checkpoint has no tensor {name}") from None
    if tuple(tensor.shape) != tuple(placeholder.shape):
        expected = list(placeholder.shape)
        raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, config.json describes {expected}")
    if isinstance(tensor, Tensor) and tensor.dtype not in PRECISIONS:
        raise CheckpointError(f"tensor {name} is {tensor.dtype}; redraft reads {', '.join(map(str, PRECISIONS))}")
    return tensor


def refuse_unknown_tensors(
    tensors: Mapping[str, Tensor | StoredWeight], available: set[str], expected: set[str], layout: Layout
) -> None:
    """Refuses tensors that the model has no place for, and duplicates that differ from the tensor they are tied to.

    Duplicates are compared in full, which reads both tensors once more; checkpoints saved by transformers have none.
    """
    for name in sorted(available):
        if name in expected or is_ignored(name, layout):
            continue
        original = tied_name(name, layout)
        if original is None or original not in expected:
            raise CheckpointError(f"the checkpoint has a tensor that this model does not have: {name[:200]}")
        if original in available and not _is_equal(tensors[name], tensors[original]):
            raise CheckpointError(f"{name} differs from {original}, which it should repeat; redraft runs tied weights only")


def _is_equal(weight: Tensor | StoredWeight, other: Tensor | StoredWeight) -> bool:
    numbers = (each if isinstance(each, Tensor) else each.dequantize().cpu() for each in (weight, other))
    return torch.equal(*numbers)
