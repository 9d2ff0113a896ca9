"""Faults: a user's mistake differs from a fault of the engine, and either ends only the requests it belongs to."""

import gc
import logging
import weakref

import pytest
import tiny
import torch

from redraft.config import EngineConfig
from redraft.constraints.errors import PatternError
from redraft.diffusion import sampler
from redraft.diffusion.generate import Finished, generate
from redraft.engine import Engine, EngineError, RequestError, RequestStatus
from redraft.engine.request import LOG

MODEL = tiny.decided(tiny.BASE)
CFG = tiny.sampler(max_new_tokens=32)
SHORT = tiny.sampler(max_new_tokens=16, canvas_length=8)


@pytest.fixture
def engine():
    return Engine(MODEL, EngineConfig(cache_bytes=2**24, prefill_chunk=8))


def failing_for(seed: int, function, error: Exception):
    """The sampler's step, but it raises for the request with this seed."""

    def step(logits, state, cfg, draws, *rest):
        if int(draws.seeds_B[0]) == seed:
            raise error
        return function(logits, state, cfg, draws, *rest)

    return step


def assert_unharmed(engine, request):
    *_, expected = generate(MODEL, [list(request.prompt)], request.cfg, seeds=[request.seed])
    assert torch.equal(list(engine.stream(request))[-1].ids_BT, expected.ids_BT)


@pytest.mark.parametrize("error", [ValueError("an inner fault"), IndexError("an inner fault")])
def test_a_fault_in_one_sampler_ends_only_its_request(engine, monkeypatch, caplog, error):
    """A ValueError inside a step is not the user's mistake."""
    monkeypatch.setattr(sampler, "step", failing_for(2, sampler.step, error))
    requests = [engine.add([2, 30 + seed], CFG, seed=seed) for seed in (1, 2, 3)]
    streams = [engine.stream(request) for request in requests]
    with caplog.at_level(logging.ERROR), pytest.raises(EngineError, match=f"{type(error).__name__}: an inner fault"):
        list(streams[1])
    assert len(caplog.records) == 1  # logged once,
    assert caplog.records[0].exc_info is not None  # with its trace
    assert requests[1].status is RequestStatus.FAILED
    assert "an inner fault" in engine.fault
    monkeypatch.undo()
    for request in (requests[0], requests[2]):
        assert_unharmed(engine, request)
    assert engine.fault == ""
    assert engine.is_idle


@pytest.mark.parametrize("kind", [RequestError, PatternError])
def test_a_users_mistake_keeps_its_type_and_is_not_logged(engine, monkeypatch, caplog, kind):
    monkeypatch.setattr(sampler, "step", failing_for(2, sampler.step, kind("cannot be obeyed")))
    wrong, right = engine.add([2, 30], CFG, seed=2), engine.add([2, 31], CFG, seed=3)
    with pytest.raises(kind, match=r"^cannot be obeyed$"):
        list(engine.stream(wrong))
    assert not caplog.records
    assert engine.fault == ""
    assert_unharmed(engine, right)


def test_a_fault_in_a_joint_forward_ends_its_batch_and_no_other(engine, monkeypatch, caplog):
    """Requests with another canvas length have a forward of their own."""
    denoise = MODEL.denoise
    monkeypatch.setattr(MODEL, "denoise", lambda ids, *rest: 1 / 0 if ids.shape[1] == 16 else denoise(ids, *rest))
    batch = [engine.add([2, 30 + seed], CFG, seed=seed) for seed in (1, 2)]
    other = engine.add([2, 40], SHORT, seed=3)
    streams = [engine.stream(request) for request in (*batch, other)]
    for stream in streams[:2]:
        with pytest.raises(EngineError, match="ZeroDivisionError: division by zero"):
            list(stream)
    assert len(caplog.records) == 1
    assert isinstance(list(streams[2])[-1], Finished)
    assert len(engine.scheduler.prefix_cache) == 1  # contexts of failed requests may be half written


def test_a_fault_in_prefill_ends_only_its_request(engine, monkeypatch):
    encode = MODEL.encode
    monkeypatch.setattr(MODEL, "encode", lambda ids, *rest: 1 / 0 if 77 in ids else encode(ids, *rest))
    wrong, right = engine.add([2, 77], CFG, seed=1), engine.add([2, 30], CFG, seed=2)
    streams = [engine.stream(request) for request in (wrong, right)]
    with pytest.raises(EngineError):
        list(streams[0])
    assert isinstance(list(streams[1])[-1], Finished)


def test_a_failed_request_does_not_keep_the_frames_of_its_exception(engine, monkeypatch):
    class Large:
        """Stands for the tensors of a step."""

    alive = []

    def step(*arguments):
        large = Large()
        alive.append(weakref.ref(large))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sampler, "step", step)
    monkeypatch.setattr(LOG, "disabled", True)  # pytest keeps log records with their exceptions
    request = engine.add([2, 30], CFG, seed=1)
    stream = engine.stream(request)
    for _ in range(2):  # a stream that is read again raises again
        with pytest.raises(EngineError, match="out of memory"):
            next(stream)
    gc.collect()
    assert len(alive) == 1
    assert alive[0]() is None
    assert request.failure.message.endswith("RuntimeError: out of memory")
    assert (request.cache, request.canvas) == (None, None)


def test_what_add_refuses_is_a_request_error(engine):
    with pytest.raises(RequestError, match="outside the vocabulary"):
        engine.add([2, 10**6], CFG, seed=0)
    with pytest.raises(RequestError, match="a deadline must be ahead"):
        engine.add([2], CFG, seed=0, seconds=0)
