"""Quantizers: plain scaling = the reference packers' codes, a search is never worse, rounding twice = rounding once."""

import compressed_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.kernels.nibbles import pack_pairs, unpack_e2m1, unpack_nibbles
from redraft.kernels.packed import dequantize_packed
from redraft.model.quant.quantizers import e2m1_codes, measure_error, quantize_int4, quantize_nvfp4, quantize_weight

QUANTIZERS = {
    "nvfp4": quantize_nvfp4,
    "int4": quantize_int4,
    "int4 with a minimum": lambda weight, **options: quantize_int4(weight, with_minimum=True, **options),
}


def random_weight(*shape: int, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size


def test_ties_go_to_even_codes():
    numbers = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 100.0, 0.0, 0.26, 4.99])
    codes = [0, 2, 2, 4, 4, 6, 6, 7, 7, 0, 1, 6]
    assert e2m1_codes(numbers).tolist() == codes
    assert e2m1_codes(-numbers[:9]).tolist() == [code | 8 for code in codes[:9]]
    assert pack_pairs(e2m1_codes(torch.tensor([0.5, -1, 6, 0]))).tolist() == [0xA1, 0x07]


@pytest.mark.parametrize("inputs", [16, 64, 176])
def test_plain_codes_of_nvfp4_are_the_reference_packers(inputs):
    weight = random_weight(24, inputs)
    packed = quantize_nvfp4(weight, search=False)
    tensors = {
        "weight": weight,
        "weight_scale": packed.scale[:, : inputs // 16].float(),
        "weight_global_scale": (448 * 6 / weight.abs().max()).reshape(1),
    }
    expected = reference.compress("nvfp4-pack-quantized", tensors)
    assert torch.equal(pack_pairs(unpack_e2m1(packed.codes, inputs)), expected["weight_packed"])
    assert (packed.scale[:, inputs // 16 :].float() == 0).all()
    amax = weight.unflatten(-1, (-1, 16)).abs().amax(dim=-1)
    assert torch.equal(
        tensors["weight_scale"], (tensors["weight_global_scale"] * (amax / 6)).to(torch.float8_e4m3fn).float()
    )


def test_plain_codes_of_int4_are_the_reference_packers():
    weight = random_weight(24, 96).bfloat16().float()
    packed = quantize_int4(weight, search=False)
    tensors = {"weight": weight, "weight_scale": packed.scale[:, :3].float()}
    expected = reference.compress("pack-quantized", tensors)["weight_packed"]
    assert torch.equal(pack_pairs(unpack_nibbles(packed.codes, 96)).contiguous().view(torch.int32), expected)
    amax = weight.unflatten(-1, (-1, 32)).abs().amax(dim=-1)
    assert torch.equal(packed.scale[:, :3], (amax / 7.5).bfloat16())


def block_errors(weight: torch.Tensor, packed) -> torch.Tensor:
    errors = (dequantize_packed(packed, weight.shape[-1]) - weight).square()
    return errors.unflatten(-1, (-1, 32)).sum(dim=-1)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-6, 1.0, 1e4]), st.sampled_from(list(QUANTIZERS)))
def test_a_search_is_never_worse(seed, size, name):
    weight = random_weight(2, 8, 96, seed=seed, size=size)
    weight[0, 0] = 0
    searched, plain = (QUANTIZERS[name](weight, search=search) for search in (True, False))
    least, largest = block_errors(weight, searched), block_errors(weight, plain)
    assert (least <= largest * (1 + 1e-5)).all()
    assert measure_error(weight, searched).relative < measure_error(weight, plain).relative
    assert (dequantize_packed(searched, 96)[0, 0] == 0).all()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_rounding_twice_is_rounding_once(name):
    """The scale that gave these numbers is among the candidates, and its error is zero."""
    for search in (True, False):
        weight = dequantize_packed(QUANTIZERS[name](random_weight(16, 64), search=search), 64)
        again = dequantize_packed(QUANTIZERS[name](weight), 64)
        if search is False or name == "int4":
            assert torch.allclose(again, weight, rtol=1e-5, atol=1e-6)
        assert measure_error(weight, QUANTIZERS[name](weight)).relative < 0.03


@pytest.mark.parametrize("to", ["nvfp4", "int4", "fp8"])
def test_stacks_are_quantized_matrix_by_matrix(to):
    """A matrix has its own global scale; gate and up share it. Inputs that fill no block of 64 are padded."""
    weight = random_weight(3, 8, 80) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    stack = quantize_weight(weight, to, parts=2)
    for index, matrix in enumerate(weight):
        for ours, alone in zip(stack.select(index), quantize_weight(matrix, to, parts=2), strict=True):
            assert ours is alone is None or torch.equal(ours.float(), alone.float())
    if to == "nvfp4":
        assert stack.global_scale.shape == (3, 2)
        assert torch.equal(stack.global_scale[:, 0], stack.global_scale[:, 1])
    assert dequantize_packed(stack, 80).shape == weight.shape


def test_errors_are_those_of_the_formats():
    """Relative errors of Gaussian weights, as tables of the formats give them."""
    weight = random_weight(32, 704)
    errors = {name: measure_error(weight, quantizer(weight)).relative for name, quantizer in QUANTIZERS.items()}
    errors["fp8"] = measure_error(weight, quantize_weight(weight, "fp8")).relative
    expected = {"nvfp4": 0.082, "int4": 0.087, "int4 with a minimum": 0.076, "fp8": 0.0265}
    assert errors == pytest.approx(expected, rel=0.03)
    packed = quantize_nvfp4(weight)
    halves = [
        measure_error(weight[rows], packed._replace(codes=packed.codes[rows], scale=packed.scale[rows]))
        for rows in (slice(20), slice(20, None))
    ]
    assert (halves[0] + halves[1]).relative == pytest.approx(errors["nvfp4"])
