"""Dense products with fp8 weights, widened weights and the fp8 soft embedding: Triton kernels equal their references.

Without a GPU the kernels run in Triton's interpreter, which truncates where a GPU rounds to fp8 or bf16.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE, GPU

from redraft.kernels import gated_experts, scaled_mm
from redraft.kernels import vocabulary as reference_vocabulary
from redraft.kernels.backend import KIB, Card
from redraft.kernels.fp8 import FP8_DTYPE, Fp8Tensor, dequantize, matmul_fp8, quantize
from redraft.kernels.triton import experts, linear_fp8, vocabulary

RTX_3090 = Card(86, 99 * KIB)
H200 = Card(90, 227 * KIB)

# Of the largest sum: the tensor cores of an H200 add products of fp8 numbers with about 13 bits.
PRECISION = 2**-10 if GPU else 1e-6
SHAPES = [(1, 40, 48), (17, 70, 300), (70, 130, 80)]  # tokens, features, summed axis

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns when an exponential overflows


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.fixture(params=[False, True], ids=["whole", "split"])
def splits(request, monkeypatch):
    """Whether the summed axis is split among programs."""
    if request.param:
        monkeypatch.setattr(linear_fp8, "choose_num_splits", lambda *arguments: 3)
    return request.param


@pytest.mark.parametrize(("tokens", "features", "size"), SHAPES)
def test_the_fp8_product_is_that_of_the_dequantized_factors(tokens, features, size, splits):
    x, weight = quantize(randn(tokens, size)), quantize(randn(features, size, seed=1))
    exact = dequantize(x).double() @ dequantize(weight).double().T
    result = linear_fp8.matmul_fp8(x, weight, torch.float32)
    assert (result - exact).abs().max() <= PRECISION * exact.abs().max()
    rounded = linear_fp8.matmul_fp8(x, weight)
    assert rounded.dtype == torch.bfloat16
    assert torch.allclose(rounded.float(), result, rtol=2**-7)


@pytest.mark.parametrize(("tokens", "features", "size"), SHAPES)
def test_widened_weights_give_the_product_of_the_dequantized_weights(tokens, features, size, splits):
    x, weight = randn(tokens, size), quantize(randn(features, size, seed=1))
    expected = F.linear(x, dequantize(weight))
    assert torch.allclose(linear_fp8.matmul_widened(x, weight), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("tokens", "features", "size"), SHAPES)
def test_rows_of_an_fp8_table_are_summed_with_factors(tokens, features, size, splits):
    table = quantize(randn(size, features, seed=1))
    factors = randn(tokens, size).softmax(dim=-1)
    expected = factors @ table.qdata.float()
    error = linear_fp8.sum_rows(factors, table, torch.float32) - expected
    assert error.abs().max() <= 1e-6 * expected.abs().max()


def test_every_fp8_number_is_widened_exactly():
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(FP8_DTYPE)
    numbers = numbers[~numbers.float().isnan()][:, None]
    ones = torch.ones(len(numbers), 1, device=DEVICE)
    assert torch.equal(linear_fp8.matmul_widened(ones[:1], Fp8Tensor(numbers, ones)), numbers.float().T)


def test_the_summed_axis_is_split_where_tiles_are_fewer_than_processors():
    for features, inner, expected in ((8192, 2816, 1), (4224, 2816, 1), (2816, 4096, 1), (1024, 4096, 4), (1024, 2112, 4)):
        tiles = linear_fp8.select_tiles(256, H200, 1)
        assert linear_fp8.choose_num_splits(tiles, 256, features, inner, H200) == expected
    assert linear_fp8.choose_num_splits(tiles, 4096, 2816, 4096, H200) == 1


def test_experts_widen_fp8_weights_on_a_card_without_fp8(monkeypatch):
    monkeypatch.setattr(experts, "select_card", lambda device: RTX_3090)
    x, weights = randn(21, 48), randn(21, 2).abs()
    chosen = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(n))[:2] for n in range(21)]).to(DEVICE)
    up, down = quantize(randn(6, 64, 48, seed=1)), quantize(randn(6, 48, 32, seed=2))
    actual = experts.gated_experts(x, chosen.int(), weights, up, down).sum(dim=1)
    expected = gated_experts(x, chosen, weights, dequantize(up), dequantize(down))
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("vocab", [112, 5000])
def test_soft_embeddings_of_an_fp8_embedding_equal_the_reference(vocab):
    raw = randn(6, vocab) * 20
    rows = randn(vocab, 16, seed=1) * (1 + 9 * torch.rand(vocab, 1, generator=torch.Generator().manual_seed(2))).to(DEVICE)
    embedding = quantize(rows)
    temperature, uniform = torch.full((6,), 0.7, device=DEVICE), torch.full((6,), 0.5, dtype=torch.float64, device=DEVICE)
    result = vocabulary.argmax_entropy_sample(raw, 30.0, temperature, uniform)
    shaped = reference_vocabulary.softcap_(raw.clone(), 30.0) / 0.7
    factors = vocabulary.compute_probs_(raw, 30.0, temperature, result, embedding.scale)
    actual = linear_fp8.sum_rows(factors, embedding, torch.float32)
    expected = reference_vocabulary.soft_embed_fp8(shaped[:, None], embedding)[:, 0]
    assert torch.allclose(actual, expected, atol=2e-5, rtol=1e-4)
    exact = shaped.softmax(dim=-1) @ dequantize(embedding)
    assert torch.allclose(expected, exact, atol=2e-5, rtol=1e-4)


@pytest.fixture
def select_product(monkeypatch):
    """The choice on an H200, whose torch._scaled_mm is the reference of a CPU."""
    monkeypatch.setattr(scaled_mm, "select_card", lambda device: H200)
    scaled_mm.select_product.cache_clear()
    yield lambda: scaled_mm.select_product(torch.device("cpu"))
    scaled_mm.select_product.cache_clear()


def fail(*factors: Fp8Tensor) -> torch.Tensor:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


@pytest.mark.parametrize(
    ("product", "expected"),
    [
        (matmul_fp8, "torch._scaled_mm (sm_90, where torch._scaled_mm is right)"),
        (fail, "Triton (sm_90, where torch._scaled_mm fails)"),
        (lambda x, weight: 1.1 * matmul_fp8(x, weight), "Triton (sm_90, where torch._scaled_mm is wrong)"),
        (lambda x, weight: matmul_fp8(x, weight) * math.nan, "Triton (sm_90, where torch._scaled_mm is wrong)"),
    ],
)
def test_scaled_mm_is_chosen_where_it_is_right(product, expected, select_product, monkeypatch):
    """By its result alone: the choice reads no clock, so every process makes the same one."""
    monkeypatch.setattr(scaled_mm, "matmul_fp8", product)
    assert str(select_product()) == expected
    monkeypatch.setattr(scaled_mm, "matmul_fp8", None)  # a second call tries nothing
    assert str(select_product()) == expected
    is_chosen = expected.startswith("torch")
    assert scaled_mm.uses_scaled_mm(torch.empty(4224, 48), 2048) == is_chosen
    assert not scaled_mm.uses_scaled_mm(torch.empty(4224, 40), 2048)  # torch._scaled_mm takes multiples of 16
    assert not scaled_mm.uses_scaled_mm(torch.empty(4224, 48), 256)  # few tiles: our kernel is faster


@pytest.mark.parametrize("card", [RTX_3090, Card(89, 99 * KIB), Card(120, 99 * KIB)])
def test_our_product_is_chosen_on_other_cards(card, select_product, monkeypatch):
    monkeypatch.setattr(scaled_mm, "select_card", lambda device: card)
    monkeypatch.setattr(scaled_mm, "matmul_fp8", None)  # nothing is tried
    assert str(select_product()) == f"Triton (sm_{card.architecture})"


def test_the_environment_overrides_the_choice(select_product, monkeypatch):
    monkeypatch.setattr(scaled_mm, "matmul_fp8", None)
    for value, name in (("scaled_mm", "torch._scaled_mm"), ("triton", "Triton")):
        monkeypatch.setenv(scaled_mm.ENV_VARIABLE, value)
        scaled_mm.select_product.cache_clear()
        assert str(select_product()) == f"{name} (REDRAFT_FP8_PRODUCT={value})"
    monkeypatch.setenv(scaled_mm.ENV_VARIABLE, "cublas")
    scaled_mm.select_product.cache_clear()
    with pytest.raises(ValueError, match="REDRAFT_FP8_PRODUCT may be triton or scaled_mm, got 'cublas'"):
        select_product()
