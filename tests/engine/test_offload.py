"""Offloaded experts: the same tokens to the bit, in every format; never more device memory than the planned slots."""

from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreted import DEVICE
from packed_models import FORMATS, pack_experts

from redraft.config import FULL, SLIDING, EngineConfig
from redraft.diffusion.generate import generate
from redraft.engine import offload
from redraft.engine.cuda_graph_runner import LayerBucket
from redraft.engine.engine import Engine
from redraft.engine.fused_layers import FusedLayers
from redraft.engine.offload import (
    ExpertStream,
    HostExperts,
    StreamedExperts,
    choose_offloaded,
    copied_layers,
    offload_experts,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, where an exponential overflows

CONFIG = replace(tiny.BASE, layer_types=(SLIDING, SLIDING, SLIDING, SLIDING, FULL), hidden_size=64, moe_intermediate_size=64)
PROMPT = [2, *range(30, 40)]


class DeviceBudget:
    """Device memory that refuses to give more than was planned."""

    def __init__(self, planned: int) -> None:
        self.left = planned

    def allocate(self, size: int) -> torch.Tensor:
        assert size <= self.left, f"{size} bytes asked for, {self.left} of the planned bytes left"
        self.left -= size
        return torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)  # NaN, unless it is overwritten


def layer_bytes(model, layer: int = 0) -> int:
    return HostExperts(offload.expert_weights(model.layers[layer].experts), pins=False).nbytes


@given(st.integers(1, 60).flatmap(lambda layers: st.tuples(st.just(layers), st.integers(1, layers))))
def test_offloaded_layers_are_spread_evenly(numbers):
    layers, count = numbers
    chosen = choose_offloaded(layers, count)
    assert len(set(chosen)) == count
    assert chosen[0] == 0
    distances = [b - a for a, b in zip(chosen, [*chosen[1:], layers], strict=True)]
    assert max(distances) - min(distances) <= 1


@pytest.mark.parametrize(("count", "slots"), [(1, 2), (2, 2), (3, 2), (4, 2), (7, 2), (3, 1), (1, 1)])
def test_copies_of_a_forward_are_counted(count, slots, monkeypatch):
    """A layer that has its slot to itself is never copied again."""
    weights = (torch.zeros(2, 4, 3), torch.zeros(2, 3, 2))
    stream = ExpertStream([HostExperts(weights, pins=False) for _ in range(count)], torch.device("cpu"), slots)
    copies = []
    copy = stream._copy
    monkeypatch.setattr(stream, "_copy", lambda number: (copies.append(number), copy(number)))
    for number in range(count):
        with stream.use(number):
            pass
    stream.prepare()
    assert sorted(copies) == copied_layers(count, slots)


@pytest.mark.parametrize(
    ("format", "count", "slots"),
    [*((format, 5, 2) for format in FORMATS), *((None, *counts) for counts in [(5, 2), (4, 2), (2, 2), (4, 1), (1, 2)])],
)
def test_tokens_equal_those_without_offloading(format, count, slots):
    """To the bit, through the engine. The slots are all the device memory that offloaded experts get."""
    model, other = (tiny.decided(CONFIG) for _ in range(2))
    if format:
        pack_experts(model, format)
        pack_experts(other, format)
    budget = DeviceBudget(min(count, slots) * layer_bytes(other))
    stream = offload_experts(other, choose_offloaded(5, count), slots, budget.allocate)
    assert budget.left == 0
    assert stream.step_bytes == len(copied_layers(count, slots)) * layer_bytes(model)
    assert sum(isinstance(layer.experts, StreamedExperts) for layer in other.layers) == count
    ids = torch.tensor([PROMPT])
    caches = [model.new_cache(1, 40) for _ in range(2)]
    assert torch.equal(model.encode(ids, caches[0]), other.encode(ids, caches[1]))
    cfg = tiny.sampler(max_new_tokens=20, max_steps=2)
    engine = Engine(other, EngineConfig(cache_bytes=2**22))
    request = engine.add(PROMPT, cfg, seed=1)
    *_, expected = generate(model, [PROMPT], cfg, seeds=[1])
    assert torch.equal(engine.run([request])[request].ids_BT, expected.ids_BT)


def test_a_forward_that_failed_leaves_no_wrong_weights(monkeypatch):
    model, other = (tiny.decided(CONFIG) for _ in range(2))
    stream = offload_experts(other, range(5))
    ids = torch.tensor([PROMPT])
    for failing in (1, 2, 4):
        with monkeypatch.context() as patch:
            patch.setattr(other.layers[failing].experts, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                other.encode(ids, other.new_cache(1, 40))
        assert torch.equal(other.encode(ids, other.new_cache(1, 40)), model.encode(ids, model.new_cache(1, 40)))

    def fail_at_capture(body, *_) -> None:
        """A capture records copies and does not make them."""
        before = [buffer.clone() for buffer in stream._buffers]
        body()
        for buffer, content in zip(stream._buffers, before, strict=True):
            buffer.copy_(content)
        raise ZeroDivisionError

    def use_two() -> None:
        for number in range(2):
            with stream.use(number):
                pass

    monkeypatch.setattr(offload, "capture_graph", fail_at_capture)
    with pytest.raises(ZeroDivisionError):
        stream.capture(use_two, torch.device("cpu"), None)
    stream.prepare()
    assert torch.equal(other.encode(ids, other.new_cache(1, 40)), model.encode(ids, model.new_cache(1, 40)))


def test_layers_of_different_formats_share_the_slots():
    model, other = (tiny.decided(CONFIG) for _ in range(2))
    for each in (model, other):
        for layer, format in enumerate(FORMATS):
            pack_experts(each, format, [layer])
    sizes = [layer_bytes(other, layer) for layer in range(5)]
    assert len(set(sizes)) > 2
    stream = offload_experts(other, range(5))
    assert stream.device_bytes == 2 * max(sizes)
    assert stream.step_bytes == sum(sizes)
    ids = torch.tensor([PROMPT])
    assert torch.equal(other.encode(ids, other.new_cache(1, 40)), model.encode(ids, model.new_cache(1, 40)))


def test_captured_layers_stream_experts():
    """A replay begins and ends with filled slots, also after a forward that failed."""
    config = replace(
        CONFIG, layer_types=(SLIDING, SLIDING, FULL), canvas_length=4, hidden_size=32, num_experts=3, num_attention_heads=2
    )
    model, other = (tiny.decided(config).to(DEVICE) for _ in range(2))
    stream = offload_experts(other, range(3))
    ids = torch.arange(4, device=DEVICE)[None] * 13
    cache = model.new_cache(1, 8)
    expected = LayerBucket(FusedLayers(model), (1, 4, 2048), None).run(ids, None, [cache])
    bucket = LayerBucket(FusedLayers(other), (1, 4, 2048), None)
    for number in range(2):
        with stream.use(number):
            pass
    assert stream._held == [2, 1]
    assert torch.equal(bucket.run(ids, None, [cache]), expected)
    assert stream._held == [0, 1]
