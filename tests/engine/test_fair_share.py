"""Clients share the engine evenly, and a reader that is slow pauses its own request only."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.config import EngineConfig
from redraft.diffusion.generate import Draft, Finished, generate
from redraft.engine import Engine, Replay, StopEvent, Stopped
from redraft.engine.fair_share import FairShare
from redraft.engine.request import Request, RequestStatus
from redraft.engine.scheduler import CHECKED_PER_STEP
from redraft.kernels.backend import use_device
from redraft.model.kv_cache import KVCache
from redraft.tasks.infill import sequence_logprobs

CFG = tiny.sampler(canvas_length=16, max_new_tokens=16, max_steps=6, entropy_bound=1e-6, confidence_threshold=1e-9)
MODEL = tiny.decided(tiny.BASE)


def engine(**changes) -> Engine:
    return Engine(MODEL, EngineConfig(**{"cache_bytes": 2**26, "max_running": 4, **changes}))


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=2, max_size=6), st.integers(1, 200))
def test_clients_with_unequal_steps_get_equal_work(costs, steps):
    share = FairShare()
    clients = {str(number): cost for number, cost in enumerate(costs)}
    done = Counter()
    for _ in range(steps):
        chosen = share.choose(clients)
        assert chosen
        for client in chosen:
            share.charge(client, clients[client])
            done[client] += clients[client]
    assert max(done[client] for client in clients) - min(done[client] for client in clients) <= max(costs)


def test_work_of_a_client_that_was_alone_is_no_debt():
    share = FairShare()
    for _ in range(100):
        assert share.choose({"early"}) == {"early"}
        share.charge("early", 256)
    assert share.choose({"late", "early"}) == {"late"}  # early's last step
    share.charge("late", 256)
    assert share.choose({"late", "early"}) == {"late", "early"}


def test_leaving_and_coming_back_does_not_help():
    share = FairShare()
    share.choose({"greedy", "honest"})
    share.charge("greedy", 1000)
    share.charge("honest", 10)
    assert share.choose({"honest"}) == {"honest"}
    assert share.choose({"greedy", "honest"}) == {"honest"}


def test_many_requests_of_one_client_take_half_of_the_work():
    """Rows are counted while the honest request runs: the other client had at most one row more than it."""
    subject = engine()
    greedy = [subject.add([2, 30 + n], CFG, seed=n, stop=StopEvent("greedy")) for n in range(8)]
    subject.step()
    honest = subject.add([2, 99], CFG, seed=7, stop=StopEvent("honest"))
    rows = Counter()
    while not honest.is_over:
        for request, event in subject.step():
            rows[request.client] += isinstance(event, Draft)
    assert rows["honest"] == CFG.max_steps
    assert rows["greedy"] <= rows["honest"] + subject.config.max_running
    assert not all(request.is_over for request in greedy)
    subject.run(greedy)


def test_a_client_without_a_slot_gets_one_at_once():
    subject = engine(max_running=2)
    for number in range(6):
        subject.add([2, 30 + number], CFG, seed=number, stop=StopEvent("greedy"))
    subject.step()
    assert len(subject.scheduler.running) == 2
    honest = subject.add([2, 99], CFG, seed=7, stop=StopEvent("honest"))
    subject.step()
    assert honest in subject.scheduler.running
    steps = [[request for request, _ in subject.step()] for _ in range(8)]
    assert all(len(set(requests)) <= 2 for requests in steps)


def test_a_full_gpu_step_rotates_among_clients():
    """Without `by_share` no client waits while rows are free; with more requests than rows, every client has a row."""
    subject = engine(max_running=2)
    requests = [subject.add([2, 30 + n], CFG, seed=n, stop=StopEvent(client)) for n, client in enumerate("aabc")]
    subject._admit()
    assert [request.client for request in subject.scheduler.running] == ["a", "b", "c"]
    seen = Counter()
    for _ in range(6):
        chosen = subject.scheduler.choose_for_step(None, by_share=False)
        assert len(chosen) == 2
        for request in chosen:
            seen[request.client] += 1
            subject.scheduler.fair_share.charge(request.client, 16)
    assert max(seen.values()) - min(seen.values()) <= 1
    for request in requests:
        subject.cancel(request)


def test_an_unread_stream_pauses_its_request_and_no_other():
    subject = engine()
    slow_cfg = CFG.changed(max_new_tokens=64)
    with subject.run_in_background(max_unread=3):
        slow = subject.add([2, 40], slow_cfg, seed=1, stop=StopEvent("slow"))
        stream = subject.stream(slow)
        quick = subject.add([2, 50], CFG, seed=2, stop=StopEvent("quick"))
        quick_end = [event for event in subject.stream(quick) if isinstance(event, Finished)]
        assert tiny.wait_until(lambda: len(slow.events) >= 3)
        threading.Event().wait(0.1)
        assert len(slow.events) <= 5  # a step adds at most a draft, a canvas and the end
        assert not slow.is_over
        slow_end = [event for event in stream if isinstance(event, Finished)]
    for (end,), prompt, cfg, seed in ((quick_end, [2, 50], CFG, 2), (slow_end, [2, 40], slow_cfg, 1)):
        *_, expected = generate(MODEL, [prompt], cfg, seeds=[seed])
        assert torch.equal(end.ids_BT, expected.ids_BT)


def test_a_paused_request_can_be_stopped():
    subject = engine()
    stop = StopEvent("slow")
    with subject.run_in_background(max_unread=2):
        request = subject.add([2, 40], CFG.changed(max_new_tokens=64), seed=1, stop=stop)
        assert tiny.wait_until(lambda: len(request.events) >= 2)
        stop.set()
        subject.notify()
        assert tiny.wait_until(lambda: request.is_over)
        assert subject.is_idle


def test_replayed_canvases_count_as_work():
    """A long replay makes no denoising step, but its canvases are encoded: it must not hold the other client back."""
    subject = engine()
    cfg = CFG.changed(canvas_length=4, max_new_tokens=400)
    replay = Replay(canvases=((30, 31, 32, 33),) * 90)
    subject.add([2, 40], cfg, seed=1, stop=StopEvent("replayer"), replay=replay)
    subject.step()
    honest = subject.add([2, 99], CFG, seed=7, stop=StopEvent("honest"))
    steps = 0
    while not honest.is_over:
        subject.step()
        steps += 1
    assert steps <= 3 * CFG.max_steps


def test_one_client_cannot_take_all_memory():
    request_bytes = KVCache.count_bytes(MODEL.config, 100, torch.float32, EngineConfig().rewind)
    subject = engine(cache_bytes=3 * request_bytes, max_running=8)
    cfg = CFG.changed(max_new_tokens=16)
    prompt = [2, *range(30, 129)]
    greedy = [subject.add(prompt, cfg, seed=n, stop=StopEvent("greedy")) for n in range(4)]
    subject.step()
    assert len(subject.scheduler.running) == 2
    honest = subject.add(prompt, cfg, seed=9, stop=StopEvent("honest"))
    subject.step()
    assert honest in subject.scheduler.running
    assert len(subject.run([*greedy, honest])) == 5


def test_a_stopped_turn_does_not_run():
    subject = engine()
    stop = StopEvent()
    stop.set()
    with pytest.raises(Stopped), subject.take_turn(1, stop):
        pytest.fail("the turn ran")


def test_turns_of_many_threads_leave_steps_between_them(monkeypatch):
    """Forwards beside the engine over as many tokens as a canvas has: after each of them a step follows."""
    subject = engine()
    assert subject.config.prefill_chunk > MODEL.config.canvas_length
    order = []
    step = subject.step
    monkeypatch.setattr(subject, "step", lambda: (order.append("step"), step()))

    def work() -> None:
        for _ in range(10):
            with subject.take_turn(MODEL.config.canvas_length, StopEvent("a")):
                order.append("turn")

    with subject.run_in_background():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
    assert order.count("turn") == 40
    assert ("turn", "turn") not in list(pairwise(order))


class Reads:
    """Counts attributes of requests that are read."""

    def __init__(self, monkeypatch):
        self.names = Counter()
        read = Request.__getattribute__
        monkeypatch.setattr(
            Request, "__getattribute__", lambda request, name: (self.add(request, name), read(request, name))[1]
        )

    def add(self, request, name):
        status = object.__getattribute__(request, "__dict__").get("status")
        if status is RequestStatus.WAITING:
            self.names[name] += 1


@pytest.mark.parametrize("clients", [1, 16], ids=["one client", "many clients"])
def test_a_step_costs_the_same_however_many_requests_wait(monkeypatch, clients):
    """Counted is how often anything is read of requests that wait, and how often bytes of KV caches are computed."""
    cfg = CFG.changed(max_new_tokens=160, eos_token_ids=())
    count_bytes = KVCache.count_bytes
    costs, computed = [], []
    monkeypatch.setattr(KVCache, "count_bytes", lambda *arguments: (computed.append(1), count_bytes(*arguments))[1])
    for waiting in (16, 256):
        subject = engine(max_running=2)
        requests = [subject.add([2, 30], cfg, seed=n, stop=StopEvent(f"client {n % clients}")) for n in range(4 + waiting)]
        subject.step()
        subject.step()
        running = subject.scheduler.running
        assert (len(running), len(subject.scheduler.waiting)) in ((2, 2 + waiting), (4, waiting))
        computed.clear()
        with monkeypatch.context() as patched:
            reads = Reads(patched)
            for _ in range(10):
                subject.step()
        assert not computed
        costs.append(reads.names.total())
        for request in requests:
            subject.cancel(request)
    few, many = costs
    assert 0 < many <= few


def test_a_change_reads_every_waiting_request_a_few_times(monkeypatch):
    """When a request has ended, the choice of the next one reads neither the running requests' bytes nor the layers."""
    costs = []
    for waiting in (16, 64):
        subject = engine(max_running=2)
        requests = [subject.add([2, 30], CFG, seed=n, stop=StopEvent("a")) for n in range(2 + waiting)]
        subject.step()
        subject.cancel(requests[0])
        with monkeypatch.context() as patched:
            reads = Reads(patched)
            subject.step()
        costs.append(reads.names.total() / waiting)
        assert requests[2] in subject.scheduler.running
        for request in requests:
            subject.cancel(request)
    assert max(costs) <= 24


def test_a_step_wakes_the_readers_of_its_own_requests_only(monkeypatch):
    subject = engine(max_running=1)
    woken = Counter()
    is_over = Request.is_over
    monkeypatch.setattr(
        Request,
        "is_over",
        property(lambda request: (woken.update([threading.current_thread().name]), is_over.fget(request))[1]),
    )
    with subject.run_in_background(max_unread=1):
        requests = [subject.add([2, 30 + n], CFG.changed(max_new_tokens=64), seed=n, stop=StopEvent("a")) for n in range(4)]
        streams = [subject.stream(request) for request in requests]
        readers = [threading.Thread(target=lambda s=stream: list(s), name=f"reader {n}") for n, stream in enumerate(streams)]
        for reader in readers[1:]:
            reader.start()
        steps = len(list(streams[0]))
        assert steps > 10
        assert all(woken[reader.name] <= 3 for reader in readers[2:])
        for reader in readers[1:]:
            reader.join()
    assert subject.is_idle


def test_all_waiting_requests_are_checked_in_turn():
    """A caller may set its stop event without a word to the engine."""
    subject = engine(max_running=1)
    cfg = CFG.changed(max_new_tokens=160, eos_token_ids=())
    stops = [threading.Event() for _ in range(2 * CHECKED_PER_STEP + 5)]
    requests = [subject.add([2, 30], cfg, seed=n, stop=stop) for n, stop in enumerate(stops)]
    subject.step()
    subject.step()
    for stop in stops[1:]:
        stop.set()
    for _ in range(3):
        subject.step()
    assert [request.is_over for request in requests] == [False, *[True] * (len(requests) - 1)]
    subject.cancel(requests[0])


def test_every_thread_that_makes_a_forward_uses_the_models_device(monkeypatch):
    """A thread begins with the first GPU, whatever the thread is in which the model was loaded."""
    inside = Counter()

    @contextmanager
    def use_device(device):
        assert device == MODEL.device
        inside[threading.get_ident()] += 1
        yield
        inside[threading.get_ident()] -= 1

    for module in ("engine", "work_beside"):
        monkeypatch.setattr(f"redraft.engine.{module}.use_device", use_device)
    forwards = []

    def watch(function):
        def forward(*arguments, **keywords):
            forwards.append(inside[threading.get_ident()])
            return function(*arguments, **keywords)

        return forward

    model = tiny.decided(tiny.BASE)
    for name in ("encode", "denoise", "head"):
        monkeypatch.setattr(model, name, watch(getattr(model, name)))
    subject = Engine(model, EngineConfig(cache_bytes=2**26))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: subject.run([subject.add([2, 30], CFG, seed=1)])).result()
        pool.submit(lambda: list(sequence_logprobs(subject, (2, 30), [[31, 32]]))).result()
        with subject.run_in_background():
            pool.submit(lambda: list(sequence_logprobs(subject, (2, 30), [[31, 32]]))).result()
            list(subject.stream(subject.add([2, 30], CFG, seed=1)))
    assert len(forwards) > 4
    assert set(forwards) == {1}


def test_the_device_is_the_current_one_inside_only(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(current.append(device)))
    for device in (torch.device("cpu"), torch.device("cuda:1")):
        with use_device(device):
            pass
    assert current == [torch.device("cuda:1")]
