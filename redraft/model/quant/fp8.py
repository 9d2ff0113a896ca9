"""fp8 as published: attention, dense MLP and experts in 8 bits; embedding, router, norms and self-conditioning unchanged.

Published files (compressed-tensors, format "float-quantized") store the gate, up and down weights of each expert as separate
tensors. In memory they are stacked as in the bf16 layout. Shapes: E experts, F expert size, D model size.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from redraft.config import ModelConfig
from redraft.kernels.fp8 import FP8_DTYPE, Fp8Tensor, quantize
from redraft.model.diffusion_gemma import DiffusionGemma, Layer
from redraft.model.moe import Experts
from redraft.model.quant.layers import PackedExperts, PackedLinear

FP8 = "fp8"
SCALE_DTYPE = torch.bfloat16  # as published
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # stacked name -> published names
STACKED_NAME = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_scale)?")
PER_EXPERT_NAME = re.compile(r"(.*\.experts)\.(\d{1,9})\.(gate_proj|up_proj|down_proj)\.(weight|weight_scale)")


def quantize_fp8(model: DiffusionGemma) -> DiffusionGemma:
    """Quantizes a model's layers in place. Each layer's bf16 weights are freed before the next layer is quantized.

    On the "meta" device it creates the quantized layers without values, for a checkpoint to fill.
    """
    for layer in model.layers:
        assert isinstance(layer, Layer)
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, PackedLinear(_quantize_weight(child.weight)))
        if isinstance(layer.experts, Experts):
            gate_up = _quantize_weight(layer.experts.gate_up_proj)
            layer.experts = PackedExperts(gate_up, _quantize_weight(layer.experts.down_proj))
    model.config = replace(model.config, quant=FP8)
    return model


def _quantize_weight(weight: Tensor) -> Fp8Tensor:
    with torch.no_grad():
        if weight.device.type == "meta":
            scale = weight.new_empty(*weight.shape[:-1], 1, dtype=torch.float32)
            return Fp8Tensor(torch.empty_like(weight, dtype=FP8_DTYPE, requires_grad=False), scale)
        return quantize(weight, SCALE_DTYPE)


def is_scale(name: str) -> bool:
    """Whether a tensor of this name holds the scales of a quantized weight."""
    return name.endswith(("weight_scale", "proj_scale"))


class StackedExpertTensors(Mapping[str, Tensor]):
    """Published tensors under the names of the bf16 layout: each stack of experts is built when it is looked up."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.other_names: list[str] = []  # tensors that are no expert's
        self.expert_counts: dict[str, int] = {}  # by the name of the stack
        for name in tensors:
            match = PER_EXPERT_NAME.fullmatch(name)
            if match is None:
                self.other_names.append(name)
                continue
            prefix, expert, part, kind = match.groups()
            stack = "down_proj" if part == "down_proj" else "gate_up_proj"
            stacked_name = f"{prefix}.{stack}" + ("_scale" if kind == "weight_scale" else "")
            self.expert_counts[stacked_name] = max(self.expert_counts.get(stacked_name, 0), int(expert) + 1)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.expert_counts:
            return self.tensors[name]
        match = STACKED_NAME.fullmatch(name)
        assert match is not None  # __init__ builds names of this form
        prefix, stack, scale = match.groups()
        kind = "weight_scale" if scale else "weight"
        experts = [
            torch.cat([self.tensors[f"{prefix}.{expert}.{part}.{kind}"] for part in EXPERT_PARTS[stack]])
            for expert in range(self.expert_counts[name])
        ]
        return torch.stack(experts)

    def __iter__(self) -> Iterator[str]:
        yield from self.other_names
        yield from self.expert_counts

    def __len__(self) -> int:
        return len(self.other_names) + len(self.expert_counts)


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of StackedExpertTensors: one tensor per expert and part, scales in their published dtype."""
    published = {}
    for name, tensor in tensors.items():
        tensor = tensor.to(SCALE_DTYPE) if is_scale(name) else tensor
        match = STACKED_NAME.fullmatch(name)
        if match is None:
            published[name] = tensor
            continue
        prefix, stack, scale = match.groups()
        kind = "weight_scale" if scale else "weight"
        for expert, weight in enumerate(tensor):
            parts = zip(EXPERT_PARTS[stack], weight.chunk(len(EXPERT_PARTS[stack])), strict=True)
            published |= {f"{prefix}.{expert}.{part}.{kind}": rows.clone() for part, rows in parts}
    return published


def quantization_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the `quantization_config` of config.json. A causal-only model is published as Gemma4ForCausalLM."""
    halves = ("model",) if config.is_causal_only else ("model.encoder.language_model", "model.decoder")
    routers = [f"{half}.layers.{n}.router.proj" for half in halves for n in range(config.num_hidden_layers)]
    others = ["lm_head"]
    if not config.is_causal_only:
        conditioning = [f"model.decoder.self_conditioning.{part}_proj" for part in ("gate", "up", "down")]
        others = [*conditioning, "re:.*vision_tower.*", "re:.*embed_vision.*", "lm_head"]
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**fp8, "strategy": "channel", "dynamic": False},
        "input_activations": {**fp8, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "ignore": [*routers, *others],
    }
