"""Quantizes a model that is in memory already. Checkpoints are quantized while they are loaded: see `conversion`."""

from dataclasses import replace

import torch
from torch import nn

from redraft.model.diffusion_gemma import DiffusionGemma, Layer
from redraft.model.moe import Experts
from redraft.model.quant.layers import PackedExperts, PackedLinear
from redraft.model.quant.quantizers import quantize_weight

FP8 = "fp8"


@torch.no_grad()
def quantize_fp8(model: DiffusionGemma) -> DiffusionGemma:
    """Quantizes attention, dense MLP and experts in place. A layer's weights are freed before the next one is quantized."""
    for layer in model.layers:
        assert isinstance(layer, Layer)
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, PackedLinear(quantize_weight(child.weight, FP8)))
        if isinstance(layer.experts, Experts):
            gate_up = quantize_weight(layer.experts.gate_up_proj, FP8)
            layer.experts = PackedExperts(gate_up, quantize_weight(layer.experts.down_proj, FP8))
    model.config = replace(model.config, quant=FP8)
    return model
