"""Engine.reserve: work beside the engine takes its KV caches from the engine's memory budget."""

import threading
from dataclasses import replace

import pytest
import tiny
import torch
from tiny import wait_until

from redraft.config import FULL, SLIDING, EngineConfig
from redraft.diffusion.generate import Finished
from redraft.engine import Engine, RequestError, Stopped
from redraft.model.kv_cache import KVCache
from redraft.tasks import edit, infill

CONFIG = replace(tiny.BASE, sliding_window=7, layer_types=(SLIDING, FULL))
MODEL = tiny.decided(CONFIG, 4)
CFG = tiny.sampler(max_new_tokens=16)


def cache_bytes(tokens: int, rewind: int = 6) -> int:
    return KVCache.count_bytes(CONFIG, tokens, torch.float32, rewind)


def make_engine(budget: int, **changes) -> Engine:
    return Engine(MODEL, EngineConfig(**{"cache_bytes": budget, "prefill_chunk": 64, "rewind": 6, **changes}))


def test_a_reservation_counts_as_used_and_keeps_only_the_window():
    engine = make_engine(cache_bytes(100))
    with engine.reserve(80) as cache:
        assert engine.scheduler.used == cache.nbytes == cache_bytes(80, rewind=0)
        assert cache.nbytes < KVCache.count_bytes(CONFIG, 80, torch.float32)  # which keeps every token of sliding layers
    assert engine.scheduler.used == 0


def test_a_reservation_that_can_never_fit_is_refused():
    engine = make_engine(cache_bytes(50))
    with pytest.raises(RequestError, match=r"this text needs .* KV cache for 5,000 tokens"), engine.reserve(5000):
        pass
    assert not engine.scheduler.reservations


def test_a_reservation_evicts_prefix_cache_entries():
    engine = make_engine(cache_bytes(100))
    engine.run([engine.add([2, *range(20, 90)], CFG, seed=1)])
    assert len(engine.scheduler.prefix_cache) == 1
    with engine.reserve(90):
        assert len(engine.scheduler.prefix_cache) == 0


def test_without_a_thread_the_waiting_caller_makes_the_steps_that_free_memory():
    engine = make_engine(cache_bytes(80))
    request = engine.add([2] * 70, CFG, seed=1)
    events = engine.stream(request)
    next(events)
    with engine.reserve(60):
        assert request.is_over
    assert isinstance(list(events)[-1], Finished)


def test_requests_wait_for_a_reservation_and_do_not_overtake_one_that_waits():
    engine = make_engine(cache_bytes(100))
    with engine.run_in_background(), engine.reserve(90):
        stop = threading.Event()
        waits = threading.Thread(target=reserve_until_stopped, args=(engine, 90, stop))
        waits.start()
        assert wait_until(lambda: len(engine.scheduler.reservations) == 2)
        small = engine.add([2], CFG, seed=1)  # fits, but came later than the second reservation
        finished = threading.Event()
        reader = threading.Thread(target=lambda: (list(engine.stream(small)), finished.set()))
        reader.start()
        assert not finished.wait(0.3)
        stop.set()
        waits.join()
        assert finished.wait(600)
        reader.join()


def reserve_until_stopped(engine: Engine, tokens: int, stop: threading.Event) -> None:
    with pytest.raises(Stopped), engine.reserve(tokens, stop=stop):
        pass


@pytest.mark.parametrize("in_background", [False, True])
def test_a_client_that_leaves_while_it_waits_for_memory_is_let_go(in_background):
    """Nobody has to notify the engine: the stop event alone ends the wait."""
    engine, stop, stopped = make_engine(cache_bytes(100)), threading.Event(), threading.Event()

    def wait_for_memory() -> None:
        reserve_until_stopped(engine, 90, stop)
        stopped.set()

    def hold_memory() -> None:
        with engine.reserve(90):
            thread = threading.Thread(target=wait_for_memory)
            thread.start()
            assert wait_until(lambda: len(engine.scheduler.reservations) == 2)
            assert not stopped.is_set()
            stop.set()
            thread.join(600)
            assert stopped.is_set()

    if in_background:
        with engine.run_in_background():
            hold_memory()
    else:
        hold_memory()
    assert engine.scheduler.used == 0


def test_infill_ranking_edits_and_decide_take_their_caches_from_the_budget(monkeypatch):
    """No KV cache is made that the budget does not count, and each is freed."""
    writer = tiny.writer()
    reserved, make_cache = [], writer.model.new_cache

    def new_cache(rows, capacity, rewind=None, adapter=None):
        cache = make_cache(rows, capacity, rewind=rewind, adapter=adapter)
        used = writer.engine.scheduler.used
        assert used >= cache.nbytes
        reserved.append(used)
        return cache

    monkeypatch.setattr(writer.model, "new_cache", new_cache)
    infill.sequence_logprobs(writer.engine, [2, 30, 31], [[40], [41, 42]])
    edit.score_canvas(writer.engine, [2, *range(30, 60)], [61, 62])
    writer.decide("to be or", ["not", "to be"])
    writer.fill("a [[ 3 ]] b", seed=1)
    writer.edit("some text", seed=1)
    assert len(reserved) >= 5
    assert writer.engine.scheduler.used == 0


def test_side_work_stops_when_its_client_has_left():
    writer, stop = tiny.writer(), threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        infill.sequence_logprobs(writer.engine, [2, 30], [[40]], stop)
    with pytest.raises(Stopped):
        edit.score_canvas(writer.engine, [2], [30, 31], stop)
    assert writer.engine.scheduler.used == 0


def test_a_verified_request_evicts_the_entry_that_it_only_copies():
    """It takes the prompt without its last token over: the entry of the whole prompt would stay beside the copy."""
    engine = make_engine(2**26)
    prompt = [2, *range(30, 90)]
    with engine.lend_prompt(prompt):
        pass
    request = engine.add(prompt, tiny.sampler(max_new_tokens=16, check="exact", draft_length=2, eos_token_ids=()), seed=1)
    engine.scheduler.budget = max(request.nbytes, engine.scheduler.prefix_cache.nbytes)  # for one of them
    stream = engine.stream(request)
    engine.step()
    assert engine.scheduler.running == [request]
    assert engine.scheduler.used + engine.scheduler.prefix_cache.nbytes <= engine.scheduler.budget
    stream.close()
