"""Weights in fewer bits: what is packed, how a packed layer computes, how published files name it. Knows no files."""

from redraft.model.quant.fp8 import FP8, StackedExpertTensors, is_scale, quantization_config, quantize_fp8, split_experts

__all__ = ["FP8", "StackedExpertTensors", "is_scale", "quantization_config", "quantize_fp8", "split_experts"]
