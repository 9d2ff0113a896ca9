"""Tiles: every kernel has some that fit every card, the backend follows measured limits, small tiles compute the same."""

import io
import itertools
from types import SimpleNamespace

import pytest
import torch
from interpreted import DEVICE
from rich.console import Console

from redraft.cli import info
from redraft.kernels import attend, backend, gated_experts, scaled_mm
from redraft.kernels.backend import KIB, Card
from redraft.kernels.scaled_mm import Fp8Product
from redraft.kernels.triton import attention, experts, experts_fourbit, linear_fp8
from redraft.kernels.triton.tiles import NO_LIMIT, TileError, Tiles, describe_tiles, select_table

CARDS = {
    "A100": Card(80, 163 * KIB),
    "RTX 3090": Card(86, 99 * KIB),
    "RTX 4090": Card(89, 99 * KIB),
    "H200": Card(90, 227 * KIB),
    "H200 with REDRAFT_SHARED_MEMORY=99": Card(90, 99 * KIB),
    "B200": Card(100, 227 * KIB),
    "RTX 5090": Card(120, 99 * KIB),
}
SMALL = CARDS["RTX 4090"]
PAIRS = (1, 128 * 24, 128 * 48, 128 * 80, 2**20)  # of tokens and 128 experts: the limits of the tables
FOURBIT = experts_fourbit.WEIGHT_BYTES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns when an exponential overflows


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_every_tile_fits_every_card(card):
    for weight_bytes, token_bytes in ((4, 4), (2, 2), (1, 1) if card.has_fp8 else (1, 2)):
        for pairs in PAIRS:
            for tiles in experts.select_tiles(weight_bytes, pairs, 128, card, token_bytes):
                assert tiles.shared_memory(card, weight_bytes, token_bytes) <= card.shared_memory
                assert tiles.stages >= 3
    for tokens in (1, 64, 256, 4096):
        for token_bytes in (2, 4) if not card.has_fp8 else (1, 4):
            tiles = linear_fp8.select_tiles(tokens, card, token_bytes)
            assert tiles.shared_memory(card, 1, token_bytes) <= card.shared_memory
    for size, tokens, token_bytes in itertools.product((16, 256, 512), (256, 2048), (2, 4)):
        tiles = attention.select_tiles(size, tokens, card, token_bytes)
        assert attention.shared_memory(tiles, card, token_bytes) <= card.shared_memory
    for (quant, weight_bytes), pairs, token_bytes in itertools.product(FOURBIT.items(), PAIRS, (2, 4)):
        for tiles in experts_fourbit.select_tiles(quant, pairs, 128, card, token_bytes):
            assert tiles.shared_memory(card, weight_bytes, token_bytes) <= card.shared_memory
            assert tiles.stages >= (3 if token_bytes == 2 else 2)


def test_which_tables_a_card_takes():
    names = {name: select_table(card, "large", "small") for name, card in CARDS.items()}
    assert {name for name, table in names.items() if table == "large"} == {"H200", "B200"}
    assert describe_tiles(SMALL) == "small: sm_89 with 99 KiB of shared memory per block, less than 200"
    assert describe_tiles(CARDS["H200"]) == "large: sm_90 with 227 KiB of shared memory per block, at least 200"


def test_info_says_which_tiles_and_fp8_product_a_gpu_takes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "RTX 4090")
    monkeypatch.setattr(backend, "select_device", torch.device)
    monkeypatch.setattr(backend, "select_backend", lambda place: backend.Backend(True, "RTX 4090"))
    monkeypatch.setattr(backend, "select_card", lambda device: SMALL)
    monkeypatch.setattr(scaled_mm, "select_product", lambda device: Fp8Product(False, "sm_89"))
    console = Console(file=io.StringIO(), width=200)
    console.print(info._machine_table())
    assert describe_tiles(SMALL) in console.file.getvalue()
    assert "Triton (sm_89)" in console.file.getvalue()


def test_the_formula_of_a_product():
    """Numbers of the compiler, from `tests/compiled.py`: with mma.sync one stage is in registers."""
    tiles = Tiles(32, 128, 128, 5, 8)
    assert tiles.shared_memory(CARDS["H200"], 2, 2) == 204_800
    assert tiles.shared_memory(CARDS["A100"], 2, 2) == 163_840
    assert Tiles(64, 64, 128, 4, 4).shared_memory(SMALL, 1, 1) == 49_152
    assert Tiles(128, 128, 64, 3, 8).shared_memory(SMALL, 1, 1) == 65_536  # the result is larger than the buffers
    assert attention.shared_memory(Tiles(32, 512, 32, 2, 8, 2), SMALL, 2) == 100_352
    assert attention.shared_memory(Tiles(64, 512, 32, 2, 8), CARDS["H200"], 2) == 196_608


@pytest.mark.parametrize(
    ("tiles", "name", "expected"),
    [
        (Tiles(32, 128, 128, 4, 4), "RTX 3090", [52_224, 52_224, 55_296]),
        (Tiles(64, 128, 128, 4, 4), "RTX 3090", [76_800, 76_800, 79_872]),
        (Tiles(32, 128, 128, 4, 4), "H200", [60_416, 60_416, 63_488]),
        (Tiles(128, 128, 128, 3, 8), "H200", [116_736, 116_736, 118_784]),
    ],
)
def test_the_formula_of_a_product_with_4_bit_weights(tiles, name, expected):
    """Numbers of the compiler, as above: NVFP4, int4, int4 with a minimum. The weights in use are in registers."""
    assert [tiles.shared_memory(CARDS[name], weight_bytes, 2) for weight_bytes in FOURBIT.values()] == expected


def test_a_tile_that_is_too_large_is_refused_before_its_launch(monkeypatch):
    assert Tiles(32, 128, 64, 5, 8).fit(CARDS["H200 with REDRAFT_SHARED_MEMORY=99"], 2, 2).stages == 4
    with pytest.raises(TileError, match="needs 262,144 bytes of shared memory per block, the card has 101,376"):
        Tiles(256, 256, 128, 5, 8).fit(SMALL, 2, 2)
    with pytest.raises(TileError, match=r"features=1024.* needs 198,656 bytes .* the card has 101,376"):
        attention.select_tiles(1024, 256, SMALL, 2)
    monkeypatch.setattr(experts_fourbit, "TILES", {NO_LIMIT: (Tiles(64, 128, 512, 5, 8),) * 2})
    assert [tiles.stages for tiles in experts_fourbit.select_tiles(2, 2048, 128, CARDS["A100"])] == [2, 2]
    with pytest.raises(TileError, match="needs 106,496 bytes of shared memory per block, the card has 101,376"):
        experts_fourbit.select_tiles(2, 2048, 128, SMALL)


@pytest.mark.parametrize(("value", "expected"), [("", 227), ("99", 99), ("163", 163), ("500", 227)])
def test_the_environment_lowers_the_limit_and_never_raises_it(monkeypatch, value, expected):
    monkeypatch.setenv(backend.SHARED_MEMORY_VARIABLE, value)
    assert backend.shared_memory_limit("cpu") == expected * KIB


@pytest.mark.parametrize("value", ["98", "0", "-99", "99KiB", "1e2", "x", "²"])
def test_bad_limits_are_refused(monkeypatch, value):
    monkeypatch.setenv(backend.SHARED_MEMORY_VARIABLE, value)
    with pytest.raises(ValueError, match=f"REDRAFT_SHARED_MEMORY is a number of KiB, at least 99, got '{value}'"):
        backend.shared_memory_limit("cpu")


@pytest.mark.parametrize(
    ("name", "capability", "kib", "reason"),
    [
        ("RTX 4090", (8, 9), 99, ""),
        ("RTX 5090", (12, 0), 99, ""),
        ("A100", (8, 0), 163, ""),
        ("T4", (7, 5), 64, "T4 is sm_75 with 64 KiB of shared memory per block; the Triton kernels need sm_80 and 99 KiB"),
    ],
)
def test_the_backend_is_chosen_by_the_limits_of_the_card(monkeypatch, name, capability, kib, reason):
    properties = SimpleNamespace(shared_memory_per_block_optin=kib * KIB, multi_processor_count=128)
    monkeypatch.delenv(backend.ENV_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    backend.select_card.cache_clear()
    assert backend.select_backend("cuda") == (not reason, reason or name)
    assert backend.select_card(torch.device("cuda")).processors == 128
    backend.select_card.cache_clear()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_small_tiles_compute_the_same(monkeypatch):
    """The experts and attention with the tables for 99 KiB."""
    monkeypatch.setattr(experts, "select_card", lambda device: SMALL)
    monkeypatch.setattr(attention, "select_card", lambda device: SMALL)
    x, weights, up, down = randn(9, 40), randn(9, 2).abs(), randn(5, 48, 40, seed=1), randn(5, 40, 24, seed=2)
    chosen = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(n))[:2] for n in range(9)]).to(DEVICE)
    actual = experts.gated_experts(x, chosen.int(), weights, up, down).sum(dim=1)
    assert torch.allclose(actual, gated_experts(x, chosen, weights, up, down), atol=1e-4)
    q, k, v = randn(1, 9, 4, 24), randn(1, 9, 2, 24, seed=1), randn(1, 9, 2, 24, seed=2)
    empty = [torch.zeros(1, dtype=dtype, device=DEVICE) for dtype in (torch.int64, torch.int64, torch.int32)]
    lengths = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    places = attention.KVLocations(torch.zeros(48, device=DEVICE), empty[0], empty[1], empty[2] + 1, lengths, lengths)
    assert attention.select_tiles(24, 9, SMALL, 4).tokens == 16
    mine = attention.attend(q, k, v, places, window=None, causal=False, splits=1)
    assert torch.allclose(mine, attend(q, k, v, None), atol=1e-5)
