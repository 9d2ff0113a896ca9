"""Faults: a user's mistake differs from a fault of the engine, and either ends only the requests it belongs to."""

import gc
import logging
import threading
import weakref
from collections import deque
from dataclasses import fields
from unittest.mock import Mock

import pytest
import tiny
import torch

from redraft.config import EngineConfig
from redraft.constraints.constraints import Constraints
from redraft.constraints.errors import PatternError
from redraft.diffusion import sampler
from redraft.diffusion.generate import Finished, generate
from redraft.engine import Engine, EngineError, RequestError, RequestStatus, StopEvent
from redraft.engine.request import LOG
from redraft.engine.scheduler import Scheduler, Turn

MODEL = tiny.decided(tiny.BASE)
CFG = tiny.sampler(max_new_tokens=32)
LONG = tiny.sampler(max_new_tokens=32, eos_token_ids=())
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


# Parts of the engine's loop: where they are and what they are called.
PARTS = [
    (lambda engine: engine, "_has_work"),
    (lambda engine: Scheduler, "can_admit"),
    (lambda engine: engine, "_grant_turns"),
    (lambda engine: engine.scheduler, "next_turn"),
    (lambda engine: engine.scheduler, "admit"),
    (lambda engine: engine.scheduler, "choose_for_step"),
    (lambda engine: engine.scheduler.fair_share, "choose"),
    (lambda engine: engine.scheduler.fair_share, "charge"),
    (lambda engine: engine.scheduler, "remove"),
    (lambda engine: engine.scheduler.prefix_cache, "take"),
    (lambda engine: engine.runner, "prefill"),
    (lambda engine: engine.runner, "encode_canvases"),
    (lambda engine: engine.runner, "step"),
    (lambda engine: engine.runner, "denoise"),
    (lambda engine: engine, "_verify"),
    (lambda engine: engine, "_emit"),
    (lambda engine: engine, "_settle"),
    (lambda engine: engine, "_release_failed"),
    (lambda engine: engine, "_release"),
    (lambda engine: engine, "_step"),
    (lambda engine: engine, "step"),
    (lambda engine: engine, "_step_for_streams"),
    (lambda engine: engine, "wake"),
]
ASKED_WHILE_PAUSED = ("_has_work", "can_admit")
ASKED_AT_ADMISSION = ("take", "prefill")


@pytest.mark.parametrize(("place_of", "name"), PARTS, ids=[name for _, name in PARTS])
def test_a_fault_anywhere_in_the_loop_ends_every_stream(monkeypatch, place_of, name):
    """One request runs and two wait when a part begins to fail. When it works again, so does the engine."""
    engine = Engine(MODEL, EngineConfig(cache_bytes=2**24, max_running=1))
    has_fault = threading.Event()

    def failing(function):
        def fail(*arguments, **keywords):
            if has_fault.is_set() and threading.current_thread().name == "redraft-engine":
                raise SystemExit("an inner fault") if name == "step" else RuntimeError("an inner fault")
            return function(*arguments, **keywords)

        return fail

    place = place_of(engine)
    part = getattr(place, name)
    monkeypatch.setattr(place, name, property(failing(part.fget)) if isinstance(part, property) else failing(part))
    with engine.run_in_background(max_unread=2):
        requests = [engine.add([2, 30 + seed], LONG, seed=seed, stop=StopEvent("a")) for seed in range(3)]
        streams = [engine.stream(request) for request in requests]
        assert tiny.wait_until(lambda: len(requests[0].events) >= 2)  # it pauses, and the others wait
        has_fault.set()
        engine.notify()
        if name in ASKED_WHILE_PAUSED:
            assert tiny.wait_until(lambda: engine.is_idle)
        if name in ASKED_AT_ADMISSION:
            assert isinstance(list(streams.pop(0))[-1], Finished)
        for stream in streams:
            with pytest.raises(EngineError, match="an inner fault"):
                list(stream)
        assert "an inner fault" in engine.fault
        assert tiny.wait_until(lambda: engine.is_idle)
        has_fault.clear()
        assert isinstance(list(engine.stream(engine.add([2, 40], SHORT, seed=1)))[-1], Finished)
        assert tiny.wait_until(lambda: engine.fault == "")


def test_a_fault_of_the_scheduler_does_not_come_again_at_every_step(engine, monkeypatch):
    """Without a thread of the engine: it ends the requests that wait, which would bring it about again."""
    calls = []
    monkeypatch.setattr(engine.scheduler, "admit", lambda: 1 / len(calls.append(1) or []))
    streams = [engine.stream(engine.add([2, 30], CFG, seed=seed)) for seed in (1, 2)]
    for stream in streams:
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            next(stream)
    assert len(calls) == 1


@pytest.mark.parametrize("waits_for", ["turn", "memory"])
def test_a_fault_in_the_loop_ends_work_beside_the_engine_that_waits(engine, monkeypatch, waits_for):
    monkeypatch.setattr(engine, "_grant_turns" if waits_for == "turn" else "_step_for_streams", lambda: 1 / 0)
    waiting = engine.take_turn(1) if waits_for == "turn" else engine.reserve(8)
    with engine.run_in_background(), pytest.raises(EngineError, match="ZeroDivisionError"), waiting:
        pytest.fail("it was granted")
    assert not engine.scheduler.waiting_turns
    assert "ZeroDivisionError" in engine.fault


def test_a_turn_may_be_withdrawn_while_it_is_granted(engine, monkeypatch):
    """Its client leaves after it was chosen."""
    choose = engine.scheduler.fair_share.choose
    turn = Turn("a", 1)
    engine.scheduler.turns.append(turn)

    def leave_and_choose(clients):
        turn.is_done = True
        if turn in engine.scheduler.turns:
            engine.scheduler.turns.remove(turn)
        return choose(clients)

    monkeypatch.setattr(engine.scheduler.fair_share, "choose", leave_and_choose)
    engine._grant_turns()
    assert engine.scheduler.next_turn() is None


def test_a_lack_of_memory_is_known_by_its_type(engine, monkeypatch):
    class LackOfMemory(torch.OutOfMemoryError):
        """A name that says nothing."""

    named = ValueError("OutOfMemoryError")
    for error, message in ((LackOfMemory("2 GiB"), "^out of GPU memory: "), (named, "OutOfMemoryError$")):
        monkeypatch.setattr(engine.runner, "step", Mock(side_effect=error))
        with pytest.raises(EngineError, match=message):
            list(engine.stream(engine.add([2, 30], CFG, seed=1)))
        with pytest.raises(EngineError, match=message), engine.take_turn(1):
            raise error


@pytest.mark.parametrize("check", ["off", "checked", "exact"])
def test_a_request_that_is_over_keeps_no_tensor(engine, check):
    """But for those of events that its stream has not read yet."""
    cfg = tiny.sampler(max_new_tokens=32, check=check, draft_length=2)
    draft = None if check == "exact" else torch.full((1, 16), 40)
    pins = Constraints(pins={0: 40})
    finished, cancelled = (
        engine.add([2, 30], cfg, seed=1, candidates=2, constraints=pins, first_canvas_1C=draft) for _ in range(2)
    )
    engine.step()
    engine.step()
    assert any(holds_tensor(getattr(cancelled, field.name)) for field in fields(cancelled))
    engine.cancel(cancelled)
    engine.run([finished])
    for request in (finished, cancelled):
        kept = [field.name for field in fields(request) if holds_tensor(getattr(request, field.name))]
        assert [name for name in kept if name != "events"] == []


def holds_tensor(value, depth: int = 0) -> bool:
    """Whether there is a tensor in a value, or in its attributes and elements."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 6 or isinstance(value, str | int | float | type | None):
        return False
    if isinstance(value, dict):
        return any(holds_tensor(each, depth + 1) for each in value.values())
    if isinstance(value, tuple | list | deque | frozenset | set):
        return any(holds_tensor(each, depth + 1) for each in value)
    return any(holds_tensor(each, depth + 1) for each in getattr(value, "__dict__", {}).values())


def test_a_fault_while_a_round_is_chosen_ends_only_its_request(engine):
    exact = tiny.sampler(max_new_tokens=16, check="exact", draft_length=2)
    failing, checked, plain = (engine.add([2, 30], cfg, seed=seed) for seed, cfg in ((1, exact), (2, exact), (3, CFG)))
    streams = [engine.stream(request) for request in (failing, checked, plain)]
    failing.verification.next_round = Mock(side_effect=IndexError("an inner fault"))
    with pytest.raises(EngineError, match="IndexError: an inner fault"):
        list(streams[0])
    assert [list(stream)[-1].reasons for stream in streams[1:]] == [("length",), ("length",)]


@pytest.mark.parametrize("lend", [lambda engine: engine.reserve(8), lambda engine: engine.lend_prompt([2] * 20)])
def test_a_lack_of_memory_for_work_beside_the_engine_says_what_to_do(engine, monkeypatch, lend):
    monkeypatch.setattr(MODEL, "new_cache", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried")))
    with pytest.raises(EngineError, match="out of GPU memory: try a smaller model"), lend(engine):
        pass
    assert engine.scheduler.used == 0


def test_a_lack_of_memory_of_one_request_is_no_fault_of_the_engine(engine, monkeypatch):
    request = engine.add([2, 30], CFG, seed=1)
    monkeypatch.setattr(MODEL, "new_cache", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried")))
    with pytest.raises(EngineError, match="out of GPU memory"):
        list(engine.stream(request))
    assert engine.fault == ""


def test_an_engine_whose_thread_cannot_start_goes_on_without(engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start"), engine.run_in_background():
            pass
    assert_unharmed(engine, engine.add([2, 30], CFG, seed=1))
