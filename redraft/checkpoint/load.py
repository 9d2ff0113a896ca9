"""Loads a checkpoint: published tensors become a model, used from the mapped file where that is possible."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from redraft.checkpoint.names import DECODER, ENCODER, VISION, CheckpointError, published_name, tied_name
from redraft.checkpoint.published_config import read_model_config
from redraft.checkpoint.tensors import Tensors
from redraft.config import ModelConfig
from redraft.kernels.fp8 import FP8_DTYPE
from redraft.model import quant
from redraft.model.diffusion_gemma import DiffusionGemma

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_model(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> DiffusionGemma:
    """The model in a folder. Without a dtype, weights stay as stored and, on a CPU, are used from the mapped file."""
    config = read_model_config(folder)
    tensors: Mapping[str, Tensor] = Tensors(Path(folder))
    return from_state_dict(
        config, quant.StackedExpertTensors(tensors) if config.quant else tensors, dtype=dtype, device=device
    )


def lay_out_for_cpu(model: DiffusionGemma) -> DiffusionGemma:
    """A float32 model's matrices with their columns together, as a CPU without bf16 multiplies fastest: the same numbers.

    The embedding is read both ways and stays, as do experts that are so few that all of them are read at once.
    """
    for name, weight in model.named_parameters():
        few = weight.dim() == 3 and len(weight) * model.config.moe_intermediate_size <= model.config.hidden_size
        if weight.dim() >= 2 and weight.dtype == torch.float32 and not few and name != "embed_tokens.weight":
            weight.data = weight.data.mT.contiguous().mT
    return model


def from_state_dict(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> DiffusionGemma:
    """A model whose weights are these published tensors; built without memory of its own."""
    with torch.device("meta"):
        model = DiffusionGemma(config)
        model = quant.quantize_fp8(model) if config.quant else model
    table = {ours: published_name(ours) for ours in model.state_dict()}
    _refuse_strangers(tensors, set(table.values()))
    weights: dict[str, Tensor] = {}
    for ours, wanted in model.state_dict().items():
        weights[ours] = _fetch(tensors, table[ours], wanted)
        packed = wanted.dtype == FP8_DTYPE or quant.is_scale(ours)
        kind = wanted.dtype if packed else dtype or weights["embed_tokens.weight"].dtype
        weights[ours] = weights[ours].to(device=device, dtype=kind)
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def _fetch(tensors: Mapping[str, Tensor], name: str, wanted: Tensor) -> Tensor:
    if name not in tensors and name.startswith(ENCODER):
        name = DECODER + name.removeprefix(ENCODER)  # some trainers drop the encoder's scalars; they were released equal
    if name not in tensors:
        raise CheckpointError(f"the checkpoint has no tensor {name}")
    tensor = tensors[name]
    if tensor.shape != wanted.shape:
        asked = list(wanted.shape)
        raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, the configuration asks for {asked}")
    if (tensor.dtype == FP8_DTYPE) != (wanted.dtype == FP8_DTYPE) or tensor.dtype not in (*PRECISIONS, FP8_DTYPE):
        raise CheckpointError(f"tensor {name} is {tensor.dtype}; redraft reads {', '.join(map(str, PRECISIONS))}")
    return tensor


def _refuse_strangers(tensors: Mapping[str, Tensor], known: set[str]) -> None:
    for name in tensors:
        if name in known or name.startswith(VISION):
            continue
        twin = tied_name(name)
        if twin not in known:
            raise CheckpointError(f"the checkpoint has a tensor that this model does not: {name}")
        if twin in tensors and not torch.equal(tensors[name], tensors[twin]):
            raise CheckpointError(f"{name} differs from {twin}, which it should repeat; redraft runs tied weights only")
