"""The references of quantized files: compressed-tensors' own compressors, ModelOpt's rule, and transformers' loader.

transformers 5.22.2 does not load DiffusionGemma with quantized experts by itself. Its experts are parameters, and it has no
conversion from experts stored apart for this architecture; its conversion for compressed-tensors leaves out the global scale
of NVFP4; and it ties the encoder's weights to the decoder's before they have scales. `load_in_transformers` adds a
conversion, with compressed-tensors' own decompressor, and ties the weights again.
"""

import functools
import warnings
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch import Tensor
from transformers import CompressedTensorsConfig, DiffusionGemmaForBlockDiffusion
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter

SCHEMES = {
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    "nvfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "pack-quantized": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
}


@functools.cache
def scheme(file_format: str, **changes) -> QuantizationScheme:
    """compressed-tensors' record of a format."""
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**SCHEMES[file_format] | changes))


def compress(file_format: str, tensors: dict[str, Tensor], **changes) -> dict[str, Tensor]:
    """The tensors of a module as compressed-tensors writes them, from `weight`, `weight_scale` and the like."""
    return BaseCompressor.get_value_from_registry(file_format).compress(tensors, scheme(file_format, **changes))


def decompress(file_format: str, tensors: dict[str, Tensor], **changes) -> Tensor:
    """The weight of a module as compressed-tensors reads it."""
    compressor = BaseCompressor.get_value_from_registry(file_format)
    return compressor.decompress(tensors, scheme(file_format, **changes))["weight"]


def modelopt_weight(packed: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    """ModelOpt's published rule, in float32: the scale of a block first, then the number. Low nibble first."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()
    numbers = table[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    block_scale = scale.float() * scale_2
    return numbers * block_scale.repeat_interleave(16, dim=-1)


class DecompressNvfp4Experts(ConversionOps):
    """Experts stored apart in NVFP4 -> the stacked parameter."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        stacks = {}
        for name in [name for name in input_dict if name.endswith("weight_packed")]:
            kinds = ("weight_packed", "weight_scale", "weight_global_scale")
            lists = [input_dict[name.replace("weight_packed", kind)] for kind in kinds]
            experts = [dict(zip(kinds, tensors, strict=True)) for tensors in zip(*lists, strict=True)]
            stacks[name] = torch.stack([decompress("nvfp4-pack-quantized", expert) for expert in experts])
        return {target_patterns[0]: torch.cat(list(stacks.values()), dim=1)}


def load_in_transformers(folder: Path, experts_format: str) -> DiffusionGemmaForBlockDiffusion:
    """A quantized checkpoint in transformers, dequantized, in float32."""
    parts = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
    converters = []
    for target, sources in parts.items():
        if experts_format == "nvfp4":
            kinds = ("weight_packed", "weight_scale", "weight_global_scale")
            names = [f"experts.*.{source}.{kind}" for source in sources for kind in kinds]
            converters.append(WeightConverter(names, target, [DecompressNvfp4Experts()]))
        else:
            merge = [MergeModulelist(dim=0), *([Concatenate(dim=1)] if len(sources) > 1 else [])]
            converters.append(WeightConverter([f"experts.*.{source}.weight" for source in sources], target, merge))
    register_checkpoint_conversion_mapping("diffusion_gemma", converters, overwrite=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = DiffusionGemmaForBlockDiffusion.from_pretrained(
            folder,
            dtype=torch.float32,
            quantization_config=CompressedTensorsConfig(dequantize=True),
            output_loading_info=True,
        )
    assert not info["unexpected_keys"], info
    assert all(name.startswith("model.encoder.language_model.") for name in info["missing_keys"]), info
    model.tie_weights()
    for parameter in model.parameters():  # converted experts keep the precision of the decompressor
        parameter.data = parameter.data.float()
    return model.eval()
