"""The embedding in 8 bits: half the memory of the embedding and of the head, which are one tensor."""

import torch

from redraft.kernels.fp8 import quantize
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.embedding import PackedEmbedding


def pack_embedding(model: DiffusionGemma) -> DiffusionGemma:
    """Replaces a model's embedding by one in 8 bits, in place, and frees the old one. A second call changes nothing."""
    if not isinstance(model.embed_tokens, PackedEmbedding):
        with torch.no_grad():
            table_VD = quantize(model.embed_tokens.weight)
        model.embed_tokens = PackedEmbedding(table_VD, model.dtype)
    return model
