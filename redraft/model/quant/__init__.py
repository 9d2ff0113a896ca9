"""Quantized weights: the layers that compute with them, and their names in published files. Reads and writes no files.

stored     a quantized weight as its file stores it
layers     linear layers and experts with packed weights
embedding  the embedding in 8 bits
fp8        8-bit floats, in the compressed-tensors layout
"""

from redraft.model.quant.embedding import pack_embedding
from redraft.model.quant.fp8 import (
    FP8,
    StackedExpertTensors,
    is_scale,
    quantization_config,
    quantize_fp8,
    split_experts,
)

__all__ = [
    "FP8",
    "StackedExpertTensors",
    "is_scale",
    "pack_embedding",
    "quantization_config",
    "quantize_fp8",
    "split_experts",
]
