"""The 4-bit experts in Triton's interpreter equal the reference, for every format and every mix of formats.

Without a GPU the kernels convert weights plainly. With one they convert them in PTX, and both ways are compared.
"""

import importlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from interpreted import DEVICE, GPU
from packed_weights import randint, randn, random_weight

from redraft.kernels import fp8 as reference_fp8
from redraft.kernels import gated_experts
from redraft.kernels.backend import KIB, SMALLEST_LIMIT, Card
from redraft.kernels.nibbles import pack_e2m1, pack_nibbles, unpack_e2m1, unpack_nibbles
from redraft.kernels.nvfp4 import E2M1
from redraft.kernels.packed import dequantize_packed
from redraft.kernels.triton import experts, experts_fourbit
from redraft.kernels.triton.routing import sort_by_expert
from redraft.kernels.triton.tiles import NO_LIMIT, Tiles

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns when an exponential overflows

FORMATS = ("nvfp4", "int4", "int4 with minimum")


def route(tokens: int, number: int, chosen: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Random experts, the last one without tokens, and the router's weights."""
    order = randn(tokens, number - 1, seed=tokens).argsort(dim=1)[:, :chosen]
    return order.to(DEVICE), randn(tokens, chosen, seed=3).abs().to(DEVICE)


def assert_equal_to_reference(x, experts_NK, weights, gate_up, down):
    """Compares the error against float64 with the reference's."""
    actual = experts.gated_experts(x, experts_NK.int(), weights, gate_up, down).sum(dim=1)
    expected = gated_experts(x, experts_NK, weights, gate_up, down)
    inner = (gate_up if isinstance(gate_up, torch.Tensor) else gate_up[0]).shape[-2] // 2
    sizes = ((gate_up, x.shape[1]), (down, inner))
    dense = [w if isinstance(w, torch.Tensor) else dequantize_packed(w, size) for w, size in sizes]
    exact = gated_experts(x.double(), experts_NK, weights.double(), *(w.double() for w in dense))
    error = (actual.double() - exact).abs().max()
    assert actual.isfinite().all()
    assert error <= 2 * (expected.double() - exact).abs().max() + 2e-7 * exact.abs().max()


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(
    ("tokens", "size", "inner"),
    [(21, 64, 128), (1, 40, 24), (17, 144, 36)],
)
@pytest.mark.parametrize("kind", FORMATS)
def test_experts_equal_the_reference(kind, tokens, size, inner, joins, monkeypatch):
    """Whole and partial blocks of inputs, gate and up with global scales of their own, an expert without tokens."""
    monkeypatch.setattr(experts_fourbit, "select_card", lambda device: Card(90 if joins else 89, SMALLEST_LIMIT))
    gate_up = random_weight(kind, 5, 2 * inner, size, parts=2)
    down = random_weight(kind, 5, size, inner, seed=10)
    assert_equal_to_reference(randn(tokens, size, seed=7).to(DEVICE), *route(tokens, 5), gate_up, down)


@pytest.mark.parametrize(
    ("up_kind", "down_kind"), [*itertools.permutations(("nvfp4", "int4 with minimum", "bf16", "fp8"), 2)]
)
def test_the_two_weights_may_have_different_formats(up_kind, down_kind, monkeypatch):
    if not GPU:  # the interpreter rounds to fp8 differently
        monkeypatch.setattr(experts, "quantize_rows", reference_fp8.quantize)
    gate_up = random_weight(up_kind, 4, 32, 48)
    down = random_weight(down_kind, 4, 48, 16, seed=10)
    assert_equal_to_reference(randn(9, 48, seed=7).to(DEVICE), *route(9, 4), gate_up, down)


@pytest.mark.parametrize("kind", ["nvfp4", "int4 with minimum"])
def test_many_tiles_equal_the_reference(kind, monkeypatch):
    """Several tiles of tokens, rows and inputs, and programs that share an expert's tokens, as eight canvases have them."""
    monkeypatch.setattr(experts_fourbit, "FLOAT32_TILES", Tiles(16, 64, 128, 2, 4, concurrent=2))
    gate_up = random_weight(kind, 3, 72, 136, parts=2)
    down = random_weight(kind, 3, 136, 36, seed=10)
    assert_equal_to_reference(randn(35, 136, seed=7).to(DEVICE), *route(35, 3), gate_up, down)


@pytest.mark.parametrize("limit", [99, 163, 227])
def test_tiles_follow_the_number_of_tokens_and_fit_every_card(limit):
    table = experts_fourbit.TILES
    found = [experts_fourbit.select_tiles(0, 8 * tokens, 128, Card(90, limit * KIB)) for tokens in (256, 512, 9999)]
    assert found == [table[24], table[48], table[NO_LIMIT]]


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


def run_ptx(assembly: str, results: int, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Runs the instructions of a conversion on registers of 32 bits, int64 tensors."""
    registers = {f"${results + index}": tensor for index, tensor in enumerate(inputs)}
    for line in assembly.strip("{} \n").split(";"):
        name, *operands = line.replace(",", " ").split() or [".reg"]
        if name == ".reg":
            continue
        target, *sources = operands
        values = [registers[source] if source in registers else int(source, 0) for source in sources]
        registers[target] = {
            "mov.b32": lambda a: torch.tensor(a),
            "and.b32": lambda a, b: a & b,
            "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
            "shr.b32": lambda a, b: a >> b,
            "lop3.b32": lambda a, b, c, table: a & b | c if table == 0xEA else None,
            "fma.rn.bf16x2": lambda a, b, c: sum(fma_bf16(*(x >> half for x in (a, b, c))) << half for half in (0, 16)),
        }[name](*values)
    return [registers[f"${index}"] for index in range(results)]


def float_of_bf16(bits: torch.Tensor) -> torch.Tensor:
    return (bits & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16).double()


def fma_bf16(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    number = (float_of_bf16(a) * float_of_bf16(b) + float_of_bf16(c)).bfloat16()
    return number.view(torch.int16).long() & 0xFFFF


def twice(half: torch.Tensor) -> torch.Tensor:
    """A register with the same number in both halves."""
    return (half & 0xFFFF) * 0x10001


def units_of(packed: torch.Tensor) -> torch.Tensor:
    """The first two units of each row as a register."""
    return packed[:, :4].contiguous().view(torch.int32)[:, 0].long() & 0xFFFFFFFF


def halves_equal(register: torch.Tensor, expected: torch.Tensor) -> bool:
    return all(torch.equal(float_of_bf16(register >> half), expected[:, half // 16]) for half in (0, 16))


def test_nvfp4_conversion_in_ptx_is_exact():
    """Every code with every scale, at each of the four places of a unit."""
    pairs = torch.tensor([*itertools.product(range(16), range(127))], dtype=torch.uint8)
    others = pairs.roll(5, dims=0)
    codes = torch.zeros(len(pairs), 64, dtype=torch.uint8)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    for place in range(4):
        codes[:, 16 * place : 16 * place + 2] = torch.stack([pairs[:, 0], others[:, 0]], dim=1).roll(place, dims=0)
    for place, assembly in enumerate(("_NVFP4_0", "_NVFP4_1", "_NVFP4_2", "_NVFP4_3")):
        scales = torch.stack([pairs[:, 1].roll(other) for other in range(4)], dim=1)
        word = scales.contiguous().view(torch.int32)[:, 0].long() & 0xFFFFFFFF
        first, second = run_ptx(experts_fourbit._SCALES_NVFP4.value, 2, word)
        scale = twice((first, second, first >> 16, second >> 16)[place])
        (weight,) = run_ptx(getattr(experts_fourbit, assembly).value, 1, units_of(pack_e2m1(codes)), scale)
        numbers = values[codes[:, 16 * place : 16 * place + 2].long()]
        expected = numbers * scales[:, place].view(torch.float8_e4m3fn).double()[:, None] * 2.0**-119
        assert halves_equal(weight, expected)


@pytest.mark.parametrize("has_minimum", [False, True])
def test_int4_conversion_in_ptx_rounds_once(has_minimum):
    codes = torch.zeros(512, 64, dtype=torch.uint8)
    codes[:, [0, 1, 16, 17, 32, 33, 48, 49]] = randint(16, 512, 8, seed=1).to(torch.uint8)
    scale, minimum = ((randn(512, 2, seed=seed) * 0.02).bfloat16() for seed in (2, 3))
    words = [number.view(torch.int32)[:, 0].long() & 0xFFFFFFFF for number in (scale, minimum)]
    (low,) = run_ptx(experts_fourbit._TIMES_2_100.value, 1, words[0])
    (high,) = run_ptx(experts_fourbit._TIMES_2_MINUS_4.value, 1, low)
    if has_minimum:
        (least,) = run_ptx(experts_fourbit._TIMES_2_MINUS_33.value, 1, words[1])
    else:
        (least,) = run_ptx(experts_fourbit._TIMES_MINUS_2_MINUS_130.value, 1, low)
    for place, assembly in enumerate(("_INT4_0", "_INT4_1", "_INT4_2", "_INT4_3")):
        half = 16 * (place // 2)
        factors = twice((low if place % 2 == 0 else high) >> half), twice(least >> half)
        (weight,) = run_ptx(getattr(experts_fourbit, assembly).value, 1, units_of(pack_nibbles(codes)), *factors)
        group = scale[:, place // 2, None].double()
        offset = minimum[:, place // 2, None].double() if has_minimum else -8 * group
        expected = codes[:, 16 * place : 16 * place + 2].double() * group + offset
        assert halves_equal(weight, (expected * 2.0**-33).bfloat16().double())


@pytest.mark.skipif(not GPU, reason="the interpreter cannot run PTX")
@pytest.mark.parametrize("kind", FORMATS)
def test_the_conversion_in_ptx_equals_the_plain_one(kind):
    """NVFP4 weights are exact in bf16, so the sums differ by their order alone."""
    x = randn(300, 2816, seed=1).bfloat16().to(DEVICE)
    chosen, weights = route(300, 9, 4)
    order, ends = sort_by_expert(chosen.int(), 9)
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


def test_the_benchmark_compares_formats_and_searches_tiles(monkeypatch, capsys):
    """At a tiny shape; the times of the interpreter mean nothing."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    bench = importlib.import_module("bench_experts")
    bench.main(["--shape", "tiny", "--layers", "1", "--tiles", "--formats", "nvfp4"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["formats"]) >= {*bench.FORMATS, "nvfp4, plain", "int4, 99 KiB"}
    assert all(set(products) == {"gate_up", "down"} for products in result["formats"].values())
    assert result["formats"]["nvfp4"]["down"]["difference"] <= 2**-7
    assert result["tiles"]["nvfp4"]["gate_up"]["99"]
