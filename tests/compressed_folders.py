"""Tiny checkpoints in every quantized layout, made with compressed-tensors' own compressors and with ModelOpt's rule."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import compressed_reference as reference
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redraft import checkpoint
from redraft.config import FULL, SLIDING
from redraft.kernels.fp8 import quantize
from redraft.kernels.nibbles import pack_pairs
from redraft.model.quant.quantizers import e2m1_codes

COMPACT = replace(
    tiny.BASE,
    hidden_size=64,
    moe_intermediate_size=32,
    intermediate_size=64,
    head_dim=16,
    global_head_dim=16,
    num_experts=9,  # conversions take a few experts at a time; the last time fewer remain
    layer_types=(SLIDING, FULL),
)
Compress = Callable[[Tensor], dict[str, Tensor]]
NVFP4 = "nvfp4-pack-quantized"
INT4 = "pack-quantized"
FP8 = "float-quantized"
EXPERTS = r".*\.experts\.\d+\.\w+_proj"
ATTENTION = r".*\.decoder\.layers\.\d+\.self_attn\.[qkvo]_proj"
DENSE = r".*\.decoder\.layers\.\d+\.mlp\.\w+_proj"


def compress_nvfp4(weight: Tensor) -> dict[str, Tensor]:
    """NVFP4 with max scaling, by compressed-tensors."""
    global_scale = (448 * 6 / weight.abs().max().float()).reshape(1)
    amax = weight.float().unflatten(-1, (-1, 16)).abs().amax(dim=-1)
    scale = (global_scale * (amax / 6)).to(torch.float8_e4m3fn).float()
    tensors = {"weight": weight.float(), "weight_scale": scale, "weight_global_scale": global_scale}
    return reference.compress("nvfp4-pack-quantized", tensors)


def compress_modelopt(weight: Tensor) -> dict[str, Tensor]:
    """NVFP4 with max scaling, by ModelOpt's rule, with a scale for activations as in NVIDIA's file."""
    scale_2 = weight.abs().max().float() / (6 * 448)
    amax = weight.float().unflatten(-1, (-1, 16)).abs().amax(dim=-1)
    scale = (amax / (6 * scale_2)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    step = (scale.float() * scale_2).repeat_interleave(16, dim=-1)
    packed = pack_pairs(e2m1_codes(weight.float() / step))
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": scale_2, "input_scale": torch.tensor(0.5)}


def compress_int4(group: int | None, *, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16) -> Compress:
    """4-bit integers with max scaling, by compressed-tensors. Without a group a row has one scale."""

    def compress(weight: Tensor) -> dict[str, Tensor]:
        blocks = weight.float().unflatten(-1, (-1, group or weight.shape[-1]))
        low = blocks.amin(dim=-1).clamp(max=0)
        high = blocks.amax(dim=-1).clamp(min=0)
        tensors = {"weight": weight.float()}
        if symmetric:
            tensors["weight_scale"] = (torch.maximum(-low, high) / 7.5).to(dtype)
        else:
            tensors["weight_scale"] = ((high - low) / 15).to(dtype)
            tensors["weight_zero_point"] = (-8 - low / tensors["weight_scale"]).round().clamp(-8, 7).to(torch.int8)
        strategy = {"group_size": group} if group else {"strategy": "channel", "group_size": None}
        return reference.compress("pack-quantized", tensors, symmetric=symmetric, **strategy)

    return compress


def compress_fp8(weight: Tensor) -> dict[str, Tensor]:
    """fp8 by channel."""
    rounded = quantize(weight.float(), torch.bfloat16)
    return {"weight": rounded.qdata, "weight_scale": rounded.scale.bfloat16()}


def save_compressed(
    folder: Path, rules: dict[str, Compress], config: dict | None, seed: int = 0
) -> dict[str, dict[str, Tensor]]:
    """Saves a model in bf16, with experts apart, and compresses the modules that match a rule. Returns those modules."""
    checkpoint.save(
        tiny.build(COMPACT, seed).bfloat16(), folder, tokenizer=tiny.byte_tokenizer(), sampler=tiny.sampler(), force=True
    )
    tiny.remove_manifest(folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            prefix, _, stack = name.rpartition(".")
            for expert, matrix in enumerate(tensor):
                parts = ("gate_proj", "up_proj") if stack == "gate_up_proj" else ("down_proj",)
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    tensors[f"{prefix}.{expert}.{part}.weight"] = rows.clone()
        else:
            tensors[name] = tensor
    compressed = {}
    for name in list(tensors):
        module = name.removesuffix(".weight")
        rule = next((rules[pattern] for pattern in rules if re.fullmatch(pattern, module)), None)
        if rule is not None:
            compressed[module] = {kind: tensor.contiguous() for kind, tensor in rule(tensors.pop(name)).items()}
            tensors |= {f"{module}.{kind}": tensor for kind, tensor in compressed[module].items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    if config is not None:
        raw["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(raw))
    return compressed


def describe(file_format: str, *, own: bool = False, **changes) -> dict:
    """A config group of compressed-tensors; `own`: with its format."""
    weights = {"symmetric": True, "dynamic": False} | reference.SCHEMES[file_format] | changes
    return {"targets": ["Linear"], "weights": weights} | ({"format": file_format} if own else {})


def compressed_config(*groups: dict, file_format: str) -> dict:
    """A `quantization_config` of compressed-tensors."""
    named = {f"group_{index}": group for index, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": file_format, "config_groups": named, "ignore": ["lm_head"]}


MODELOPT_CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}


def int4_layout(group, **options):
    changes = {"group_size": group} if group else {"strategy": "channel", "group_size": None}
    changes["symmetric"] = options.get("symmetric", True)
    return {EXPERTS: compress_int4(group, **options)}, compressed_config(describe(INT4, **changes), file_format=INT4)


LAYOUTS = {  # name -> (which modules are compressed how, quantization_config)
    "ModelOpt": ({EXPERTS: compress_modelopt}, MODELOPT_CONFIG),
    "NVFP4": ({EXPERTS: compress_nvfp4, DENSE: compress_nvfp4}, compressed_config(describe(NVFP4), file_format=NVFP4)),
    "int4": int4_layout(32),
    "int4, zero points": int4_layout(32, symmetric=False),
    "int4, float16": int4_layout(32, dtype=torch.float16),
    "int4, groups of 16": int4_layout(16),
    "int4, channels": int4_layout(None),
    "fp8": ({EXPERTS: compress_fp8, ATTENTION: compress_fp8}, compressed_config(describe(FP8), file_format=FP8)),
    "mixed": (
        {EXPERTS: compress_nvfp4, ATTENTION: compress_fp8, DENSE: compress_int4(32)},
        compressed_config(
            describe(NVFP4, own=True), describe(FP8, own=True), describe(INT4, own=True), file_format="mixed-precision"
        ),
    ),
}


def logits(model) -> torch.Tensor:
    """Logits of a canvas after a prompt."""
    ids = torch.arange(16, 40).view(2, 12)
    cache = model.new_cache(2, 12)
    with torch.inference_mode():
        model.encode(ids, cache)
        return model.denoise(ids.flip(1), None, cache)
