"""The embedding in 8 bits: lookup, logits and soft embeddings equal the dequantized embedding's, up to fp8 rounding."""

from dataclasses import replace

import pytest
import tiny
import torch
import torch.nn.functional as F

from redraft.diffusion.generate import generate
from redraft.kernels.fp8 import FP8_DTYPE, dequantize, quantize
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.embedding import PackedEmbedding
from redraft.model.quant import conversion, pack_embedding, quantize_fp8

CONFIG = replace(tiny.BASE, final_logit_softcapping=30.0)


@pytest.fixture(scope="module")
def models() -> tuple[DiffusionGemma, DiffusionGemma]:
    """A model with a packed embedding, and the same model with the numbers that the packed embedding stands for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "ROWS_AT_ONCE", 100)
        packed = pack_embedding(tiny.decided(CONFIG))
    plain = tiny.decided(CONFIG)
    plain.embed_tokens.weight.copy_(dequantize(quantize(plain.embed_tokens.weight, torch.bfloat16)))
    return packed, plain


def test_embeddings_are_the_dequantized_rows(models):
    packed, plain = models
    ids = torch.arange(CONFIG.vocab_size).view(2, -1)
    assert packed.embed_tokens.weight.dtype == FP8_DTYPE
    assert torch.equal(packed.embed(ids), plain.embed(ids))


def test_logits_differ_by_the_rounding_of_the_activations(models):
    packed, plain = models
    hidden = torch.randn(7, CONFIG.hidden_size, generator=torch.Generator().manual_seed(1))
    raw = packed.embed_tokens.project(hidden)
    rounded = dequantize(quantize(hidden))
    assert torch.allclose(raw, F.linear(rounded, plain.embed_tokens.weight), atol=1e-4)
    # e4m3 has three bits of fraction; numbers below 2^-6 of its range are on a fixed grid
    bound = F.linear(hidden.abs() / 16 + hidden.abs().amax(dim=-1, keepdim=True) / 2**18, plain.embed_tokens.weight.abs())
    assert ((raw - plain.embed_tokens.project(hidden)).abs() <= bound + 1e-5).all()
    assert not torch.allclose(raw, plain.embed_tokens.project(hidden), atol=1e-4)


def test_soft_embeddings_are_those_of_the_dequantized_embedding(models):
    packed, plain = models
    logits = torch.randn(2, 5, CONFIG.vocab_size, generator=torch.Generator().manual_seed(1)) * 4
    assert torch.allclose(packed.soft_embed(logits), plain.soft_embed(logits), atol=1e-5)


def test_a_certain_prediction_has_the_embedding_of_its_token(models):
    packed, _ = models
    ids = torch.tensor([[3, 40, 111]])
    logits = F.one_hot(ids, CONFIG.vocab_size) * 100.0
    assert torch.allclose(packed.soft_embed(logits), packed.embed(ids), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_model_generates_and_keeps_its_dtype(dtype):
    model = quantize_fp8(pack_embedding(tiny.decided(CONFIG).to(dtype)))
    assert isinstance(model.embed_tokens, PackedEmbedding)
    assert pack_embedding(model) is model
    assert (model.dtype, model.device.type) == (dtype, "cpu")
    assert model.embed(torch.tensor([1])).dtype == dtype
    assert model.soft_embed(torch.zeros(1, 2, CONFIG.vocab_size)).dtype == dtype
    *_, last = generate(model, [[2, 30, 40]], tiny.sampler(max_new_tokens=16), seeds=[1])
    assert last.ids_BT.shape[1] == 16


def test_the_tokens_are_those_of_the_dequantized_embedding(models):
    """The models of the tests damp rounding errors, so whole generations agree."""
    answers = [list(generate(model, [[2, 30, 40]], tiny.sampler(max_new_tokens=32), seeds=[5]))[-1] for model in models]
    assert torch.equal(answers[0].ids_BT, answers[1].ids_BT)
