"""The token embedding: lookup, logits (the head is tied to it) and soft embeddings; in full precision or in 8 bits.

Shapes: V vocabulary, D model size, B rows, C positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.kernels import soft_embed
from redraft.kernels.fp8 import FP8_DTYPE, Fp8Tensor, dequantize
from redraft.kernels.linear_fp8 import linear_fp8
from redraft.kernels.vocabulary import soft_embed_fp8


class Embedding(nn.Embedding):
    """An embedding in full precision."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embeddings."""
        return self.weight.dtype

    def project(self, hidden: Tensor) -> Tensor:
        """Returns the raw logits of hidden states."""
        return F.linear(hidden, self.weight)

    def expect(self, logits_BCV: Tensor) -> Tensor:
        """Returns the expected embedding under softmax(logits)."""
        return soft_embed(logits_BCV, self.weight)


class PackedEmbedding(nn.Module):
    """An embedding in 8 bits with a scale for each token. Logits and soft embeddings are products of fp8 numbers."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, table_VD: Fp8Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype  # of the embeddings and the logits
        self.register_buffer("weight", table_VD.qdata)
        self.register_buffer("weight_scale", table_VD.scale)

    @property
    def table_VD(self) -> Fp8Tensor:
        """The embedding as the kernels take it."""
        return Fp8Tensor(self.weight, self.weight_scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the embeddings of tokens, dequantized."""
        rows = self.weight.view(torch.uint8)[ids].view(FP8_DTYPE)  # some operations have no fp8 version
        return dequantize(Fp8Tensor(rows, self.weight_scale[ids]), self.dtype)

    def project(self, hidden: Tensor) -> Tensor:
        """Returns the raw logits of hidden states, which are quantized too."""
        return linear_fp8(hidden, self.table_VD)

    def expect(self, logits_BCV: Tensor) -> Tensor:
        """Returns the expected embedding under softmax(logits)."""
        return soft_embed_fp8(logits_BCV, self.table_VD).to(self.dtype)
