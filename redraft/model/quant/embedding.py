"""The embedding in 8 bits: half the memory of the embedding and of the head, which are one tensor."""

import torch
from torch import Tensor

from redraft.kernels.fp8 import FP8_DTYPE, Fp8Tensor, quantize
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.embedding import PackedEmbedding

CHUNK_ROWS = 2**14  # quantized at a time: in float32 the whole embedding would take twice its memory


def pack_embedding(model: DiffusionGemma) -> DiffusionGemma:
    """Replaces a model's embedding by one in 8 bits, in place, and frees the old one. A second call changes nothing."""
    if not isinstance(model.embed_tokens, PackedEmbedding):
        model.embed_tokens = PackedEmbedding(_quantize_rows(model.embed_tokens.weight.detach()), model.dtype)
    return model


def _quantize_rows(table_VD: Tensor) -> Fp8Tensor:
    qdata_VD = torch.empty_like(table_VD, dtype=FP8_DTYPE)
    scale_V1 = torch.empty(len(table_VD), 1, dtype=torch.float32, device=table_VD.device)
    for start in range(0, len(table_VD), CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        quantized = quantize(table_VD[rows])
        qdata_VD[rows] = quantized.qdata
        scale_V1[rows] = quantized.scale
    return Fp8Tensor(qdata_VD, scale_V1)
