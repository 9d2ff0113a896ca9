"""Packs the embedding of a model that is in memory already. Those of checkpoints are packed while they are loaded."""

from redraft.kernels.fp8 import Fp8Tensor
from redraft.model.backbone import Backbone
from redraft.model.embedding import PackedEmbedding
from redraft.model.quant.conversion import Converter
from redraft.model.quant.policy import Target


def pack_embedding(model: Backbone) -> Backbone:
    """Replaces a model's embedding by one in 8 bits, in place, and frees the old one. A second call changes nothing."""
    if not isinstance(model.embed_tokens, PackedEmbedding):
        converter = Converter(model.device)
        table_VD = converter.convert(Target("fp8"), "embed_tokens.weight", model.embed_tokens.weight.detach(), model.dtype)
        assert isinstance(table_VD, Fp8Tensor)
        model.embed_tokens = PackedEmbedding(table_VD, model.dtype)
    return model
