"""Quantized weights: formats, quantizers, the layers that compute with them. Reads and writes no files.

stored      a quantized weight as its file stores it
quantizers  a weight -> NVFP4, int4, fp8, with a search for scales
policy      which format each weight gets in memory
conversion  brings a weight into that format and keeps count
layers      linear layers and experts with packed weights
embedding   the embedding in 8 bits
fp8         quantizes a model that is in memory
"""

from redraft.model.quant.embedding import pack_embedding
from redraft.model.quant.fp8 import FP8, quantize_fp8
from redraft.model.quant.policy import QUANT_FORMATS, QuantPolicy

__all__ = ["FP8", "QUANT_FORMATS", "QuantPolicy", "pack_embedding", "quantize_fp8"]
