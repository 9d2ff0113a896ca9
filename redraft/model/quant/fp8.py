"""fp8 as published: attention, dense MLP and experts in 8 bits; embedding, router, norms and self-conditioning left alone.

Published files (compressed-tensors, "float-quantized") have every expert's gate, up and down apart; in memory they are the
stacks of the bf16 layout. Shapes: E experts, F expert size, D model size.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from redraft.kernels import gated_experts
from redraft.kernels.fp8 import FP8_DTYPE, Fp8Tensor, linear_fp8, quantize
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.moe import Experts

FP8 = "fp8"
SCALES = torch.bfloat16  # as published
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_scale)?")
ALONE = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|weight_scale)")


# 1. Packed layers


class Fp8Linear(nn.Module):
    """A product with a packed weight."""

    def __init__(self, packed: Fp8Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", packed.qdata)
        self.register_buffer("weight_scale", packed.scale)

    def forward(self, x: Tensor) -> Tensor:
        """Same as the layer it replaces, but for rounding."""
        return linear_fp8(x, Fp8Tensor(self.weight, self.weight_scale))


class Fp8Experts(nn.Module):
    """All experts of a layer, packed."""

    def __init__(self, gate_up: Fp8Tensor, down: Fp8Tensor) -> None:
        super().__init__()
        for name, packed in (("gate_up_proj", gate_up), ("down_proj", down)):
            self.register_buffer(name, packed.qdata)
            self.register_buffer(f"{name}_scale", packed.scale)

    def forward(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Same as the experts they replace, but for rounding."""
        gate_up = Fp8Tensor(self.gate_up_proj, self.gate_up_proj_scale)
        return gated_experts(x_ND, experts_NK, weights_NK, gate_up, Fp8Tensor(self.down_proj, self.down_proj_scale))


def quantize_fp8(model: DiffusionGemma) -> DiffusionGemma:
    """Packs a model's layers in place, one after another: what was is let go before the next. On "meta" only the shapes."""
    for layer in model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for name, child in list(owner.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(owner, name, Fp8Linear(_packed(child.weight)))
        if isinstance(layer.experts, Experts):
            layer.experts = Fp8Experts(_packed(layer.experts.gate_up_proj), _packed(layer.experts.down_proj))
    model.config = replace(model.config, quant=FP8)
    return model


def _packed(weight: Tensor) -> Fp8Tensor:
    with torch.no_grad():
        if weight.device.type == "meta":
            scale = weight.new_empty(*weight.shape[:-1], 1, dtype=torch.float32)
            return Fp8Tensor(torch.empty_like(weight, dtype=FP8_DTYPE, requires_grad=False), scale)
        return quantize(weight, SCALES)


# 2. Published names


def is_scale(name: str) -> bool:
    """Whether a tensor holds the scales of a packed weight."""
    return name.endswith(("weight_scale", "proj_scale"))


class StackedExpertTensors(Mapping[str, Tensor]):
    """Published tensors under the names of the bf16 layout: each stack is put together when it is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.experts = tensors, {}
        self.plain = []
        for name in tensors:
            if (match := ALONE.fullmatch(name)) is None:
                self.plain.append(name)
                continue
            stem, expert, part, kind = match.groups()
            stack = "down_proj" if part == "down_proj" else "gate_up_proj"
            key = f"{stem}.{stack}" + ("_scale" if kind == "weight_scale" else "")
            self.experts[key] = max(self.experts.get(key, 0), int(expert) + 1)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.experts:
            return self.tensors[name]
        stem, stack, scale = STACK.fullmatch(name).groups()
        kind = "weight_scale" if scale else "weight"
        rows = [
            torch.cat([self.tensors[f"{stem}.{expert}.{part}.{kind}"] for part in PARTS[stack]])
            for expert in range(self.experts[name])
        ]
        return torch.stack(rows)

    def __iter__(self) -> Iterator[str]:
        yield from self.plain
        yield from self.experts

    def __len__(self) -> int:
        return len(self.plain) + len(self.experts)


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The other way: every expert's parts apart, and scales in the precision they are published in."""
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.to(SCALES) if is_scale(name) else tensor
        match = STACK.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        stem, stack, scale = match.groups()
        kind = "weight_scale" if scale else "weight"
        for expert, rows in enumerate(tensor):
            parts = zip(PARTS[stack], rows.chunk(len(PARTS[stack])), strict=True)
            found |= {f"{stem}.{expert}.{part}.{kind}": half.clone() for part, half in parts}
    return found


def quantization_config(layers: int) -> dict[str, Any]:
    """The `quantization_config` of config.json."""
    routers = [
        f"model.{half}.layers.{n}.router.proj" for half in ("encoder.language_model", "decoder") for n in range(layers)
    ]
    conditioning = [f"model.decoder.self_conditioning.{part}_proj" for part in ("gate", "up", "down")]
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        "ignore": [*routers, *conditioning, "re:.*vision_tower.*", "re:.*embed_vision.*", "lm_head"],
    }
