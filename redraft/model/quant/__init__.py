"""Weights in fewer bits: what is packed, how a packed layer computes, how published files name it. Knows no files."""

from redraft.model.quant.fp8 import FP8, StackedTensors, apply_fp8, is_scale, published, unfused

__all__ = ["FP8", "StackedTensors", "apply_fp8", "is_scale", "published", "unfused"]
