"""Loads a checkpoint: published tensors become a model.

The model is built on the "meta" device, without memory, and takes the tensors one by one. On a CPU they stay views of the
mapped file. On a GPU each is copied from the mapped file and converted there, so the host never holds a second copy.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from redraft.checkpoint.manifest import verify_files
from redraft.checkpoint.names import DECODER, ENCODER, CheckpointError, Layout, find_layout, published_name, tied_name
from redraft.checkpoint.placement import Place, Placement
from redraft.checkpoint.published_config import read_model_config
from redraft.checkpoint.tensors import CheckpointTensors
from redraft.config import ModelConfig
from redraft.kernels.fp8 import FP8_DTYPE
from redraft.model import quant
from redraft.model.diffusion_gemma import DiffusionGemma

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    place: Place | None = None,
) -> DiffusionGemma:
    """Loads the model of a folder. Without a dtype, weights keep the precision they are stored in.

    `place` is asked where the weights go, once their sizes are known; otherwise all of them go to the device.
    """
    with verify_files(folder):
        config = read_model_config(folder)
        stored = CheckpointTensors(Path(folder), device)
    _compare_sizes(config, stored)
    # Experts are stacked on the device already, where it is fast.
    tensors: Mapping[str, Tensor] = quant.StackedExpertTensors(stored) if config.quant else stored
    return from_state_dict(config, tensors, dtype=dtype, device=device, place=place)


def _compare_sizes(config: ModelConfig, tensors: CheckpointTensors) -> None:
    """Compares config.json with the headers of the weights, before a model is built: 9,999 layers would take a minute.

    Other differences are found later, where each tensor is fetched.
    """
    layout = find_layout(tensors, is_causal_only=config.is_causal_only)
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
        if getattr(config, field) != number:
            raise CheckpointError(
                f"config.json and the weights in {tensors.folder} are not of the same model: {field} is "
                f"{getattr(config, field)} in config.json and {number} in the weights"
            )


def lay_out_for_cpu(model: DiffusionGemma) -> DiffusionGemma:
    """Stores the matrices of a float32 model column by column, which a CPU without bf16 multiplies fastest.

    The numbers stay the same. The embedding keeps its layout, because it is used both by rows (lookup) and by columns
    (logits). So do experts that are so few that all of them are used at once.
    """
    for name, weight in model.named_parameters():
        has_few_experts = weight.dim() == 3 and len(weight) * model.config.moe_intermediate_size <= model.config.hidden_size
        is_float32_matrix = weight.dim() >= 2 and weight.dtype == torch.float32
        if is_float32_matrix and not has_few_experts and name != "embed_tokens.weight":
            weight.data = weight.data.mT.contiguous().mT
    return model


def from_state_dict(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    place: Place | None = None,
) -> DiffusionGemma:
    """Makes a model whose weights are these published tensors. Without a dtype, it has the precision of the embedding."""
    with torch.device("meta"):
        model = DiffusionGemma(config)
        model = quant.quantize_fp8(model) if config.quant else model
    expected = model.state_dict()
    available = set(tensors)  # asking a Mapping `name in tensors` may read the whole tensor
    layout = find_layout(available, is_causal_only=config.is_causal_only)
    _refuse_unknown_tensors(tensors, available, {published_name(name, layout) for name in expected}, layout)
    weights: dict[str, Tensor] = {}
    placement = Placement(torch.device(device))
    for name, placeholder in expected.items():
        # First to the device, then to the precision: a conversion on the way would be computed on the host.
        weight = _fetch(tensors, available, published_name(name, layout), placeholder).to(device)
        is_quantized = placeholder.dtype == FP8_DTYPE or quant.is_scale(name)
        model_dtype = dtype or (weights["embed_tokens.weight"].dtype if weights else weight.dtype)
        if place is not None and not weights:  # the embedding comes first, and its dtype is the model's
            placement = place(config, _count_bytes(expected, model_dtype), model_dtype)
        # Converted on the device, also if it does not stay there.
        weights[name] = weight.to(placeholder.dtype if is_quantized else model_dtype).to(placement.device_of(name))
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def _count_bytes(expected: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, int]:
    """Bytes of every weight of a model of this dtype, quantized weights and their scales in their own."""
    sizes = {}
    for name, placeholder in expected.items():
        is_quantized = placeholder.dtype == FP8_DTYPE or quant.is_scale(name)
        sizes[name] = placeholder.numel() * (placeholder.dtype if is_quantized else dtype).itemsize
    return sizes


def _fetch(tensors: Mapping[str, Tensor], available: set[str], name: str, placeholder: Tensor) -> Tensor:
    """Returns a published tensor, checked against the shape and kind of the model's."""
    if name not in available and name.startswith(ENCODER):
        name = DECODER + name.removeprefix(ENCODER)  # some trainers drop the encoder's scalars; released ones are equal
    try:
        tensor = tensors[name]
    except KeyError:  # it is missing, or one expert of a stack is
        raise CheckpointError(f"the checkpoint has no tensor {name}") from None
    if tensor.shape != placeholder.shape:
        expected = list(placeholder.shape)
        raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, config.json describes {expected}")
    is_fp8 = tensor.dtype == FP8_DTYPE
    if is_fp8 != (placeholder.dtype == FP8_DTYPE) or not (is_fp8 or tensor.dtype in PRECISIONS):
        raise CheckpointError(f"tensor {name} is {tensor.dtype}; redraft reads {', '.join(map(str, PRECISIONS))}")
    return tensor


def _refuse_unknown_tensors(tensors: Mapping[str, Tensor], available: set[str], expected: set[str], layout: Layout) -> None:
    """Refuses tensors that the model has no place for, and duplicates that differ from the tensor they are tied to.

    Duplicates are compared in full, which reads both tensors once more; checkpoints saved by transformers have none.
    """
    for name in sorted(available):
        if name in expected or name.startswith(layout.skipped):
            continue
        original = tied_name(name, layout)
        if original is None or original not in expected:
            raise CheckpointError(f"the checkpoint has a tensor that this model does not have: {name[:200]}")
        if original in available and not torch.equal(tensors[name], tensors[original]):
            raise CheckpointError(f"{name} differs from {original}, which it should repeat; redraft runs tied weights only")
