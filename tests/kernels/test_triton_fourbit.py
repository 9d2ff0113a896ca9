"""The 4-bit experts in Triton's interpreter equal the reference, for every format and every mix of formats.

Without a GPU the kernels convert weights plainly. With one they convert them in PTX, and both ways are compared.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE, GPU

from redraft.kernels import backend, gated_experts
from redraft.kernels import fp8 as reference_fp8
from redraft.kernels.int4 import Int4Tensor
from redraft.kernels.nibbles import pack_e2m1, pack_nibbles, unpack_e2m1, unpack_nibbles
from redraft.kernels.nvfp4 import Nvfp4Tensor
from redraft.kernels.packed import dequantize_packed
from redraft.kernels.triton import experts, experts_fourbit

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns when an exponential overflows

FORMATS = ("nvfp4", "int4", "int4 with minimum")


def randint(high: int, *shape: int, seed: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weight(kind: str, number: int, rows: int, size: int, parts: int = 1, seed: int = 0):
    """A stack of matrices of any format, about as large as weights are. All 16 codes occur, -0 too."""
    blocks = -(-size // 64)
    if kind in ("bf16", "fp8"):
        weight = randn(number, rows, size, seed=seed) * 0.2
        tensor = weight if kind == "bf16" else reference_fp8.quantize(weight)
        return tensor.to(DEVICE) if kind == "bf16" else type(tensor)(*(field.to(DEVICE) for field in tensor))
    codes = randint(16, number, rows, size, seed=seed).to(torch.uint8)
    if kind == "nvfp4":
        # every e4m3 number that is not negative, subnormals and 0 among them
        scale = randint(127, number, rows, 4 * blocks, seed=seed + 1).to(torch.uint8).view(torch.float8_e4m3fn)
        scale.view(torch.uint8)[..., -(-size // 16) :] = 0
        fields = (pack_e2m1(codes), scale, 1e-4 + randn(number, parts, seed=seed + 2).abs() * 1e-3)
        return Nvfp4Tensor(*(field.to(DEVICE) for field in fields))
    scale = (randn(number, rows, 2 * blocks, seed=seed + 1) * 0.03).bfloat16()
    scale[:, 0] = 0
    scale[..., -(-size // 32) :] = 0
    minimum = (randn(number, rows, 2 * blocks, seed=seed + 2) * 0.2).bfloat16().to(DEVICE) if kind != "int4" else None
    return Int4Tensor(pack_nibbles(codes).to(DEVICE), scale.to(DEVICE), minimum)


def route(tokens: int, number: int, chosen: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Random experts, the last one without tokens, and the router's weights."""
    order = randn(tokens, number - 1, seed=tokens).argsort(dim=1)[:, :chosen]
    return order.to(DEVICE), randn(tokens, chosen, seed=3).abs().to(DEVICE)


def assert_equal_to_reference(x, experts_NK, weights, gate_up, down):
    """Compares the error against float64 with the reference's."""
    actual = experts_fourbit.gated_experts(x, experts_NK.int(), weights, gate_up, down).sum(dim=1)
    expected = gated_experts(x, experts_NK, weights, gate_up, down)
    inner = (gate_up if isinstance(gate_up, torch.Tensor) else gate_up[0]).shape[-2] // 2
    sizes = ((gate_up, x.shape[1]), (down, inner))
    dense = [w if isinstance(w, torch.Tensor) else dequantize_packed(w, size) for w, size in sizes]
    exact = gated_experts(x.double(), experts_NK, weights.double(), *(w.double() for w in dense))
    error = (actual.double() - exact).abs().max()
    assert actual.isfinite().all()
    assert error <= 2 * (expected.double() - exact).abs().max() + 2e-7 * exact.abs().max()


@pytest.mark.parametrize(("tokens", "size", "inner"), [(21, 64, 128), (1, 40, 24), (37, 144, 80)])
@pytest.mark.parametrize("kind", FORMATS)
def test_experts_equal_the_reference(kind, tokens, size, inner):
    """Whole and partial blocks of inputs, gate and up with global scales of their own, an expert without tokens."""
    gate_up = random_weight(kind, 5, 2 * inner, size, parts=2)
    down = random_weight(kind, 5, size, inner, seed=10)
    assert_equal_to_reference(randn(tokens, size, seed=7).to(DEVICE), *route(tokens, 5), gate_up, down)


@pytest.mark.parametrize(("up_kind", "down_kind"), [*itertools.permutations(("nvfp4", "int4 with minimum", "bf16", "fp8"), 2)])
def test_the_two_weights_may_have_different_formats(up_kind, down_kind, monkeypatch):
    if not GPU:  # the interpreter rounds to fp8 differently
        monkeypatch.setattr(experts, "quantize_rows", reference_fp8.quantize)
    gate_up = random_weight(up_kind, 4, 32, 48)
    down = random_weight(down_kind, 4, 48, 16, seed=10)
    assert_equal_to_reference(randn(9, 48, seed=7).to(DEVICE), *route(9, 4), gate_up, down)


@pytest.mark.parametrize("limit", experts_fourbit.TILES)
@pytest.mark.parametrize("kind", FORMATS)
def test_many_tiles_equal_the_reference(kind, limit, monkeypatch):
    """Several tiles of tokens, rows and inputs, and programs that share an expert's tokens, as eight canvases have them."""
    monkeypatch.setenv(backend.SHARED_MEMORY_VARIABLE, str(limit))
    tiles = tuple(replace(tile, tokens=16, features=16, inner=64) for tile in experts_fourbit.TILES[limit][experts.NO_LIMIT])
    monkeypatch.setitem(experts_fourbit.TILES, limit, {experts.NO_LIMIT: tiles})
    assert tiles[0].concurrent > 1
    gate_up = random_weight(kind, 3, 48, 100, parts=2)
    down = random_weight(kind, 3, 100, 24, seed=10)
    assert_equal_to_reference(randn(45, 100, seed=7).to(DEVICE), *route(45, 3), gate_up, down)


@pytest.mark.parametrize("limit", [99, 227])
def test_tiles_follow_the_shared_memory_and_the_number_of_tokens(limit, monkeypatch):
    monkeypatch.setenv(backend.SHARED_MEMORY_VARIABLE, str(limit))
    table = experts_fourbit.TILES[99 if limit == 99 else 200]
    found = [experts_fourbit.select_tiles(backend.shared_memory_limit("cpu"), 8 * tokens, 128) for tokens in (256, 512, 9999)]
    assert found == [table[24], table[48], table[experts.NO_LIMIT]]
    monkeypatch.setenv(backend.SHARED_MEMORY_VARIABLE, "64")
    with pytest.raises(ValueError, match="at least 99, got '64'"):
        backend.shared_memory_limit("cpu")


@pytest.mark.parametrize("size", [1, 63, 64, 200])
@pytest.mark.parametrize(("pack", "unpack"), [(pack_nibbles, unpack_nibbles), (pack_e2m1, unpack_e2m1)])
def test_codes_are_packed_into_units(pack, unpack, size):
    codes = randint(16, 3, size, seed=size).to(torch.uint8)
    packed = pack(codes)
    assert packed.shape == (3, -(-size // 64) * 32)
    assert torch.equal(unpack(packed, size), codes)


def test_a_unit_has_the_documented_bits():
    """Inputs 1, 17, 33 and 49 share the second unit of a block: nibbles from the lowest up; signs, then magnitudes."""
    codes = torch.zeros(64, dtype=torch.uint8)
    codes[[1, 17, 33, 49]] = torch.tensor([1, 2, 12, 15], dtype=torch.uint8)
    assert pack_nibbles(codes).view(torch.int16).tolist()[:3] == [0, 0xFC21 - 0x10000, 0]
    assert pack_e2m1(codes).view(torch.int16).tolist()[:3] == [0, (0b11 << 14 | 7 << 9 | 4 << 6 | 2 << 3 | 1) - 0x10000, 0]


@pytest.mark.skipif(not GPU, reason="the interpreter cannot run PTX")
@pytest.mark.parametrize("kind", FORMATS)
def test_the_conversion_in_ptx_equals_the_plain_one(kind):
    """NVFP4 weights are exact in bf16, so the sums differ by their order alone."""
    x = randn(300, 2816, seed=1).bfloat16().to(DEVICE)
    chosen, weights = route(300, 9, 4)
    order, ends = experts_fourbit.sort_by_expert(chosen.int(), 9)
    gate_up = random_weight(kind, 9, 2 * 704, 2816, parts=2)
    down = random_weight(kind, 9, 2816, 704, seed=10)
    inner, other = (
        experts_fourbit.multiply_gate_up(x, order, ends, gate_up, 4, uses_ptx=uses_ptx).float() for uses_ptx in (True, False)
    )
    assert (inner - other).abs().max() <= 2**-7 * other.abs().max()
    out, other = (
        experts_fourbit.multiply_down(inner.bfloat16(), order, ends, down, weights, uses_ptx=uses_ptx).float()
        for uses_ptx in (True, False)
    )
    assert (out - other).abs().max() <= 2**-7 * other.abs().max()
