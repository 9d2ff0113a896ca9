"""fp8 KV caches: entries rounded to e4m3 to the bit; chunks, prefixes and rewinding change nothing; kernels = reference."""

from dataclasses import replace

import pytest
import tiny
import torch
from interpreted import DEVICE

from redraft.config import FULL, SLIDING, ConfigError, EngineConfig
from redraft.diffusion.generate import generate
from redraft.diffusion.verified import generate_verified
from redraft.engine.cache_table import CacheTable
from redraft.engine.engine import Engine
from redraft.engine.fused_layers import FusedLayers
from redraft.kernels import attend, backend
from redraft.kernels.backend import KIB, Card
from redraft.kernels.fp8 import FP8_DTYPE
from redraft.kernels.triton import attention
from redraft.model import masks
from redraft.model.kv_cache import KVCache

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, where an exponential overflows

SMALL = replace(
    tiny.BASE, layer_types=(SLIDING, FULL), sliding_window=5, canvas_length=4, num_attention_heads=2, num_key_value_heads=1,
    num_global_key_value_heads=1, global_head_dim=24, num_experts=3,
)  # fmt: skip
CFG = replace(tiny.sampler(), canvas_length=4, max_new_tokens=8, max_steps=2, eos_token_ids=(1,))
PROMPT = [2, *range(30, 48)]


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(FP8_DTYPE).to(x.dtype)


def fp8_model(config=tiny.BASE, seed: int = 0):
    model = tiny.decided(config, seed).to(DEVICE)
    model.kv_dtype = FP8_DTYPE
    return model


def numbers() -> torch.Tensor:
    """All finite e4m3 numbers, the midpoints between neighbours and numbers beside them, and numbers beyond the range."""
    codes = torch.arange(127, dtype=torch.uint8).view(FP8_DTYPE).float()
    middles = (codes[1:] + codes[:-1]) / 2
    beside = torch.cat([middles * (1 - 2**-20), middles * (1 + 2**-20), torch.tensor([1e-30, 460.0, 1e6])])
    positive = torch.cat([codes, middles, beside, torch.randn(200, generator=torch.Generator().manual_seed(0)).abs() * 50])
    return torch.cat([positive, -positive])


@pytest.mark.parametrize("rewind", [None, 3])
def test_an_fp8_cache_equals_a_cache_of_rounded_entries(rewind):
    """To the bit: appended in chunks, past the ring, rewound, moved to another capacity, rows copied."""
    fp8, plain = (KVCache(SMALL, 2, 60, stored=stored, rewind=rewind) for stored in (FP8_DTYPE, None))
    assert fp8.nbytes * 4 == plain.nbytes
    assert 2 * KVCache.count_bytes(SMALL, 60, FP8_DTYPE, rewind) == fp8.nbytes
    generator = torch.Generator().manual_seed(0)
    for counts in ([3, 3], [9, 2], [4, 4]):
        for layer in range(2):
            k, v = (torch.randn(2, 9, *SMALL.layer_heads(layer), generator=generator) * 200 for _ in range(2))
            fp8.append(layer, k, v, counts)
            plain.append(layer, rounded(k), rounded(v), counts)
        for cache in (fp8, plain):
            cache.advance(counts)
    pairs = [(fp8, plain), (fp8.select_rows([1, 0]), plain.select_rows([1, 0]))]
    pairs.append(tuple(cache.select_rows([1, 0]).with_capacity(40) for cache in (fp8, plain)))
    for cache in pairs[2]:
        cache.rewind([length - 1 for length in cache.lengths])
    for first, second in pairs:
        for layer in range(2):
            assert all(torch.equal(a, b) for a, b in zip(first.view(layer), second.view(layer), strict=True))


def test_chunks_of_a_prompt_change_nothing():
    """Tokens of a chunk attend to one another's rounded keys, so that a chunk's end is nowhere to be seen."""
    model = fp8_model()
    ids = torch.tensor([PROMPT], device=DEVICE)
    whole, chunked, plain = (model.new_cache(1, 40, rewind=0) for _ in range(3))
    expected = model.encode(ids, whole)
    found = torch.cat([model.encode(part, chunked) for part in ids.split([7, 1, 11], dim=1)], dim=1)
    assert torch.allclose(found, expected, atol=2e-5)
    model.kv_dtype = None
    plain = model.new_cache(1, 40, rewind=0)
    assert not torch.allclose(model.encode(ids, plain), expected, atol=1e-4)  # fp8 is not free


@pytest.mark.parametrize("chunk", [5, 64])
def test_the_engine_equals_generate(chunk):
    """Also through the prefix cache, whose entry is cut back."""
    model = fp8_model()
    engine = Engine(model, EngineConfig(max_running=3, prefill_chunk=chunk, cache_bytes=2**22))
    cfg = tiny.sampler(max_new_tokens=20, max_steps=3)
    for prompt in (PROMPT, [*PROMPT[:18], 99, 98]):
        requests = [engine.add(prompt, cfg, seed=5), engine.add(PROMPT[3:9], cfg, seed=6)]
        found = engine.run(requests)
        for request, ids in zip(requests, (prompt, PROMPT[3:9]), strict=True):
            *_, expected = generate(model, [ids], cfg, seeds=[request.seed])
            assert torch.equal(found[request].ids_BT, expected.ids_BT)


def test_exact_mode_equals_its_definition():
    model = fp8_model()
    cfg = tiny.sampler(max_new_tokens=24, check="exact")
    engine = Engine(model, EngineConfig(cache_bytes=2**22))
    request = engine.add(PROMPT, cfg, seed=3)
    found = engine.run([request])[request]
    *_, expected = generate_verified(model, PROMPT, cfg, seed=3, policy=tiny.engine_policy(cfg))
    assert torch.equal(found.ids_BT, expected.ids_BT)


def test_the_budget_counts_fp8_bytes():
    engine = Engine(fp8_model(), EngineConfig(cache_bytes=2**22))
    request = engine.add(PROMPT, tiny.sampler(), seed=0)
    assert request.nbytes == KVCache.count_bytes(tiny.BASE, request.capacity, FP8_DTYPE, 512)


def test_engine_config_sets_the_cache():
    model = tiny.decided(tiny.BASE)
    Engine(model, EngineConfig(kv="fp8", cache_bytes=2**22))
    assert model.cache_dtype == FP8_DTYPE
    with pytest.raises(ConfigError, match="'int3'"):
        EngineConfig(kv="int3")


# Kernels


def test_encoding_and_decoding_equal_torch():
    """Every code, every tie, subnormal numbers and numbers out of range, in float32 and as bf16."""
    for dtype in (torch.float32, torch.bfloat16):
        x = numbers().to(DEVICE).to(dtype)
        k = x[None, None, None].clone()
        v = -k
        attention.round_kv_(k, v)
        assert torch.equal(k[0, 0, 0], rounded(x))
        assert torch.equal(v[0, 0, 0], rounded(-x))


@pytest.mark.parametrize("has_type", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("new", "length", "window", "splits"), [(5, 9, None, 1), (33, 40, 6, 1), (1, 70, None, 2)])
def test_attention_over_an_fp8_cache(causal, new, length, window, splits, has_type, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(attention, "select_card", lambda device: Card(89 if has_type else 86, 99 * KIB))
    size, groups = 16, 2
    generator = torch.Generator().manual_seed(length)
    keys, values, q, k, v = (
        torch.randn(1, count, heads, size, generator=generator).to(DEVICE)
        for count, heads in ((length, groups), (length, groups), (new, 4), (new, groups), (new, groups))
    )
    stored = [part[0].to(FP8_DTYPE) for part in (keys, values)]
    base = torch.zeros(16, dtype=torch.uint8, device=DEVICE)
    offsets = [torch.tensor([part.data_ptr() - base.data_ptr()], device=DEVICE) for part in stored]
    counts = [torch.tensor([number], dtype=torch.int32, device=DEVICE) for number in (length, length, 0)]
    past = attention.KVLocations(base, *offsets, *counts)
    found = attention.attend(q, k, v, past, window=window, causal=causal, splits=splits)
    positions = torch.arange(length + new, device=DEVICE)[None]
    if causal:
        mask = masks.causal(positions[:, length:], positions, window)
    else:
        mask = masks.canvas(torch.tensor([length], device=DEVICE), positions[:, :length], new, window)
    both = [torch.cat([rounded(old), fresh], dim=1) for old, fresh in ((keys, k), (values, v))]
    assert torch.allclose(found, attend(q, *both, mask), atol=1e-5, rtol=1e-4)


def test_fused_layers_equal_the_models_layers():
    """The bytes that the kernels write are those of the reference, but where a rounding error decides a tie."""
    model, other = (fp8_model(SMALL) for _ in range(2))
    fused = FusedLayers(other)
    with torch.inference_mode():
        cache, own = (model.new_cache(1, 40, rewind=9) for _ in range(2))
        table = CacheTable.empty(other, 1)
        assert table.base.dtype == torch.uint8
        for ids in torch.tensor([PROMPT[:10]], device=DEVICE).split([7, 3], dim=1):
            model.encode(ids, cache)
            table.fill([own])
            fused.encode(ids, table, 30)
            own.advance([ids.shape[1]])
        for layer in range(2):
            for a, b in zip(cache.view(layer), own.view(layer), strict=True):
                assert (a == b).float().mean() > 0.98
                assert torch.allclose(a, b, rtol=0.13, atol=2**-8)
        canvas = torch.arange(4, device=DEVICE)[None] * 13
        table.fill([cache])
        expected = model.denoise(canvas, None, cache)
        assert torch.allclose(other.head(fused.denoise(canvas, None, table, 30)).view_as(expected), expected, atol=3e-4)


@pytest.mark.soak
def test_the_triton_engine_equals_generate(monkeypatch):
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    model = fp8_model(SMALL)
    engine = Engine(model, EngineConfig(max_running=2, prefill_chunk=8))
    prompt = PROMPT[:11]
    request = engine.add(prompt, CFG, seed=1)
    found = engine.run([request])[request]
    *_, expected = generate(model, [prompt], CFG, seeds=[1])
    assert torch.equal(found.ids_BT, expected.ids_BT)
