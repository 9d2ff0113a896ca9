"""Engine: for every mix of requests the tokens are those of `generate`, and the memory budget is never exceeded."""

import threading
import time
from dataclasses import replace

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redraft.config import FULL, SLIDING, ConfigError, EngineConfig
from redraft.constraints.constraints import Constraints
from redraft.constraints.token_automaton import AutomatonCompiler
from redraft.diffusion import rng
from redraft.diffusion.generate import Committed, Draft, Finished, generate
from redraft.diffusion.verified import generate_verified
from redraft.engine import Engine, RequestStatus, StopEvent
from redraft.engine.prefix_cache import PrefixCache
from redraft.model.kv_cache import KVCache
from redraft.tasks.best_of import choose_likeliest
from redraft.tasks.text_events import EncodedPrompt

CONFIG = replace(tiny.BASE, sliding_window=7, layer_types=(SLIDING, FULL))
MODEL = tiny.decided(CONFIG, 4)
PATIENCE = 120  # seconds after which a wait that should have ended fails the test
BUDGET = 4 * KVCache.count_bytes(CONFIG, 200, torch.float32)


def engine(**changes) -> Engine:
    return Engine(MODEL, EngineConfig(**{"cache_bytes": BUDGET, "prefill_chunk": 5, "rewind": 6, **changes}))


@st.composite
def asked(draw):
    """One request, as `generate` and `Engine.add` take it."""
    beginning = draw(st.sampled_from([[2], [2, 30, 40, 50], [2, *range(60, 90)]]))
    prompt = beginning + draw(st.lists(st.integers(20, 200), max_size=6))
    length = draw(st.sampled_from([8, 16]))
    cfg = tiny.sampler(
        canvas_length=length,
        max_new_tokens=draw(st.integers(1, 2 * length + 1)),
        max_steps=draw(st.integers(1, 4)),
        entropy_bound=draw(st.sampled_from([0.1, 1.0, 5.0])),
        quota=draw(st.booleans()),
        spread=draw(st.sampled_from([0, 3])),
        check=draw(st.sampled_from(["off", "off", "checked", "exact"])),
        draft_length=draw(st.sampled_from([0, 2, 4])),
        draft_steps=draw(st.integers(1, 2)),
        tolerance=draw(st.sampled_from([0.0, 3.0])),
        temperature=draw(st.sampled_from([0.0, 1.0])),
    )
    has_first = cfg.check == "off" and draw(st.booleans())
    first = rng.draws([draw(st.integers(0, 99))], 0).noise(0, length, tiny.VOCAB) if has_first else None
    pins = {0: draw(st.integers(20, 200))} if draw(st.booleans()) else {}
    return prompt, cfg, draw(st.integers(0, 2**40)), Constraints(pins=pins), first


def alone(prompt, cfg, seed, constraints, first):
    if cfg.check != "off":
        policy = tiny.engine_policy(cfg)
        return list(generate_verified(MODEL, prompt, cfg, seed=seed, constraints=constraints, policy=policy))
    return list(generate(MODEL, [prompt], cfg, seeds=[seed], constraints=[constraints], first_canvas_BC=first))


def same(ours, theirs) -> None:
    """Event for event, all that is tokens."""
    assert [type(event) for event in ours] == [type(event) for event in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, Finished):
            assert torch.equal(mine.ids_BT, other.ids_BT)
            assert mine.reasons == other.reasons
            costs = [replace(end.stats[0], seconds=0, prefill_seconds=0, reused=0, logprob=0) for end in (mine, other)]
            assert costs[0] == costs[1]
            assert mine.stats[0].logprob == pytest.approx(other.stats[0].logprob, abs=1e-3)
        else:
            assert torch.equal(mine.ids_BC, other.ids_BC)
        if isinstance(mine, Draft):
            assert torch.equal(mine.canvas_BC, other.canvas_BC)
            assert torch.equal(mine.accepted_BC, other.accepted_BC)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_mix_of_requests_gives_the_tokens_of_generate(data):
    check_mix(data)


@pytest.mark.soak
@settings(max_examples=375, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_four_hundred_mixes_of_requests_give_the_tokens_of_generate(data):
    """With those above."""
    check_mix(data)


def check_mix(data) -> None:
    """Requests of two clients come at any step and some are cancelled; the events of the others are those of a run alone."""
    subject = engine(max_running=data.draw(st.integers(1, 4)), prefix_cache_entries=data.draw(st.sampled_from([0, 1, 4])))
    wanted = data.draw(st.lists(asked(), min_size=1, max_size=4))
    waiting, running, cancelled, events = list(wanted), {}, set(), {}
    while waiting or not subject.is_idle:
        if waiting and (subject.is_idle or data.draw(st.booleans())):
            one = waiting.pop()
            prompt, cfg, seed, constraints, first = one
            stop = StopEvent(data.draw(st.sampled_from(["", "another"])))
            request = subject.add(prompt, cfg, seed=seed, constraints=constraints, first_canvas_1C=first, stop=stop)
            running[request], events[request] = one, []
        if running and data.draw(st.integers(0, 19)) == 0:
            gone = data.draw(st.sampled_from(sorted(running, key=lambda request: request.number)))
            if not gone.is_over:
                cancelled.add(gone)
            subject.cancel(gone)
        for whose, event in subject.step():
            assert whose not in cancelled
            events[whose].append(event)
        assert subject.scheduler.used + subject.scheduler.prefix_cache.nbytes <= BUDGET
    for request, one in running.items():
        expected = alone(*one)
        same(events[request], expected[: len(events[request])])
        assert request in cancelled or len(events[request]) == len(expected)


def test_a_prefix_in_the_cache_is_not_prefilled_again(monkeypatch):
    subject, read = engine(prefill_chunk=100), []
    usual = MODEL.encode
    monkeypatch.setattr(MODEL, "encode", lambda ids, *rest: read.append(ids.shape[1]) or usual(ids, *rest))
    cfg = tiny.sampler(max_new_tokens=16)
    prompt = [2, *range(30, 60)]
    first = subject.add(prompt, cfg, seed=1)
    subject.run([first])
    longer = subject.add([*prompt, 99, 98], cfg, seed=2)
    found = subject.run([longer])[longer]
    assert read == [31, 2]
    assert found.stats[0].reused == 31
    again = subject.add([*prompt[:-3], 77], cfg, seed=3)
    cut = subject.run([again])[again]
    assert read[2:] == [1]
    assert cut.stats[0].reused == 28
    monkeypatch.undo()
    for request, seed in ((longer, 2), (again, 3)):
        expected = alone(list(request.prompt), cfg, seed, Constraints(), None)[-1]
        assert torch.equal((found if request is longer else cut).ids_BT, expected.ids_BT)


def put(kept: PrefixCache, context: list[int], rewind: int | None = None) -> None:
    cache = KVCache(CONFIG, 1, 60, rewind=rewind)
    cache.advance([len(context)])
    kept.put(context, cache)


def test_the_prefix_cache_evicts_its_oldest_entry_first():
    kept = PrefixCache(2)
    first, second, third = (list(range(start, start + 30)) for start in (0, 100, 200))
    for context in (first, second, third):
        put(kept, context)
    assert len(kept) == 2
    assert kept.take(first) is None
    assert kept.take([*second[:15], 9]) is None  # not worth it
    context, cache = kept.take([*second[:20], 9])
    assert (context, cache.lengths) == (second[:20], [20])
    assert len(kept) == 2  # another may want the rest of it
    context, _ = kept.take([*second, 9])
    assert (context, len(kept)) == (second, 1)
    put(kept, first)
    assert kept.evict(sparing=[*third, 1])  # the oldest is about to be taken over
    assert kept.take(first) is None
    assert not kept.evict(sparing=[*third, 1])
    assert kept.evict(sparing=[*third[:20], 1])
    assert not kept.evict()


def test_an_entry_that_cannot_be_cut_back_is_passed_over():
    kept, prompt = PrefixCache(4), list(range(40))
    put(kept, [*prompt[:30], *range(100, 125)], rewind=2)  # its windows do not reach back to 30
    put(kept, prompt[:20], rewind=2)
    context, cache = kept.take(prompt)
    assert (context, cache.lengths) == (prompt[:20], [20])


def test_an_interrupt_ends_running_requests_and_leaves_no_half_written_cache(monkeypatch):
    """Ctrl-C during prefill leaves a half-written KV cache, which must not reach the prefix cache."""
    subject, cfg, prompt = engine(), tiny.sampler(max_new_tokens=32), [2, *range(60, 100)]
    usual, calls = MODEL.encode, []

    def interrupted(ids, cache, *rest):
        calls.append(ids)
        if len(calls) == 6:
            usual(ids, cache, *rest)
            raise KeyboardInterrupt
        return usual(ids, cache, *rest)

    monkeypatch.setattr(MODEL, "encode", interrupted)
    one, other = subject.add(prompt, cfg, seed=1), subject.add([2, 30], cfg, seed=2)
    beside = subject.stream(other)
    with pytest.raises(KeyboardInterrupt):
        list(subject.stream(one))
    assert one.is_over
    assert other.is_over
    assert subject.is_idle
    assert len(subject.scheduler.prefix_cache) == 0
    list(beside.request.events)
    beside.request.events.clear()
    with pytest.raises(RuntimeError, match="failed while this request ran"):
        next(beside)
    monkeypatch.undo()
    again = subject.add(prompt, cfg, seed=1)
    assert torch.equal(subject.run([again])[again].ids_BT, alone(prompt, cfg, 1, Constraints(), None)[-1].ids_BT)


def test_a_stream_that_was_never_read_is_cancelled_when_closed():
    subject = engine()
    request = subject.add([2, 30], tiny.sampler(), seed=1)
    subject.stream(request).close()
    assert request.is_over
    assert subject.is_idle
    request = subject.add([2, 30], tiny.sampler(), seed=1)
    subject.stream(request)  # and let go
    assert request.is_over


def test_threads_may_share_an_engine():
    subject, cfg = engine(max_running=3), tiny.sampler(max_new_tokens=32)
    found = {}

    def write(seed: int) -> None:
        request = subject.add([2, 30, 40 + seed], cfg, seed=seed)
        found[seed] = subject.run([request])[request]

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(6):
        assert torch.equal(found[seed].ids_BT, alone([2, 30, 40 + seed], cfg, seed, Constraints(), None)[-1].ids_BT)


def test_a_resized_cache_holds_the_same():
    for window in (4, 7):
        config = replace(CONFIG, sliding_window=window)
        model = tiny.decided(config, 1)
        for before, after in ((12, 40), (40, 12), (12, 12)):
            cache = model.new_cache(1, before, rewind=3)
            model.encode(torch.tensor([[2, *range(30, 41)]]), cache)
            cache.rewind([10])
            views = [[t.clone() for t in cache.view(layer)] for layer in range(config.num_hidden_layers)]
            other = cache.with_capacity(after)
            assert other.capacity == after
            for layer, pair in enumerate(views):
                assert all(torch.equal(a, b) for a, b in zip(pair, other.view(layer), strict=True))
            whole = before == 12 and window - 1 + 3 >= 12
            oldest = 0 if whole else 12 - (window - 1 + 3) + window - 1  # what the rings lost with 12 tokens stays lost
            other.rewind([max(oldest, 1)])
            if not whole:
                with pytest.raises(ValueError, match="cannot be cut"):
                    other.rewind([oldest - 1])


def test_requests_that_can_never_fit_are_refused_with_the_numbers():
    subject = engine(cache_bytes=KVCache.count_bytes(CONFIG, 50, torch.float32, 6))
    with pytest.raises(ValueError, match=r"this request needs 0\.0 MiB of KV cache for 116 tokens"):
        subject.add([2] * 100, tiny.sampler(max_new_tokens=32), seed=0)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        subject.add([2, 10**6], tiny.sampler(), seed=0)
    with pytest.raises(ValueError, match="a deadline must be ahead, got -1"):
        subject.add([2], tiny.sampler(), seed=0, seconds=-1)
    assert subject.is_idle
    for wrong in ({"max_running": 0}, {"prefill_chunk": 0}, {"prefill_chunk_alone": 4}, {"rewind": -1}, {"cache_bytes": 0}):
        with pytest.raises(ConfigError):
            EngineConfig(**wrong)


def test_requests_wait_for_memory_and_are_not_overtaken():
    cfg = tiny.sampler(max_new_tokens=16)
    subject = engine(cache_bytes=2 * KVCache.count_bytes(CONFIG, 60, torch.float32, 6))
    large = [subject.add([2] * 60, cfg, seed=n) for n in range(3)]
    small = subject.add([2], cfg, seed=9)
    subject.step()
    assert subject.scheduler.running == large[:2]
    assert list(subject.scheduler.waiting) == [large[2], small]
    assert set(subject.run([*large, small])) == {*large, small}


@pytest.mark.parametrize("check", ["off", "checked", "exact"])
def test_an_answer_that_matches_its_pattern_is_complete_without_a_stop_token(check):
    """The reason of the engine is that of `generate`, alone and in a batch, also where max_tokens ends inside a canvas."""
    compiler = AutomatonCompiler(tiny.byte_tokenizer().token_bytes, (1, 5))
    patterns = ["[0-9]{12}", "a*", "[a-c]{2,5}", "(foo|bar)+"]
    rows = [Constraints(automaton=compiler.compile(pattern)) for pattern in patterns] + [Constraints(forbidden=(1, 5))]
    cfg = tiny.sampler(check=check, canvas_length=8, max_new_tokens=12, max_steps=2, draft_length=2, draft_steps=2)
    subject = engine(max_running=len(rows))
    requests = [subject.add([2, 30], cfg, seed=1, constraints=constraints) for constraints in rows]
    found = subject.run(requests)
    for request, constraints in zip(requests, rows, strict=True):
        same([found[request]], alone([2, 30], cfg, 1, constraints, None)[-1:])
    assert [found[request].reasons for request in requests] == [("stop",)] * 4 + [("length",)]
    assert found[requests[0]].stats[0].new_tokens == 12
    if check == "off":
        *_, end = generate(MODEL, [[2, 30]] * len(rows), cfg, seeds=[1] * len(rows), constraints=rows)
        assert end.reasons == ("stop",) * 4 + ("length",)


def test_a_deadline_commits_the_canvas_in_work(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("redraft.engine.engine.time.monotonic", lambda: now[0])
    cfg = tiny.sampler(max_new_tokens=48, max_steps=6, confidence_threshold=1e-9, eos_token_ids=())
    subject = engine()
    request, other = subject.add([2, 30], cfg, seed=1, seconds=5.0), subject.add([2, 30], cfg, seed=1)
    events = {request: [], other: []}
    for step in range(40):
        now[0] = 100.0 + (6.0 if step == 9 else 0.0)
        for whose, event in subject.step():
            events[whose].append(event)
    expected = alone([2, 30], cfg, 1, Constraints(), None)
    assert len(events[other]) == len(expected)
    same(events[other], expected)
    *drafts, page, end = events[request]
    same(drafts, expected[: len(drafts)])
    assert torch.equal(page.ids_BC, drafts[-1].ids_BC)
    assert end.reasons == ("deadline",)
    only = subject.add(
        [2, 30], tiny.sampler(max_new_tokens=16, confidence_threshold=1e-9, eos_token_ids=()), seed=1, seconds=1
    )
    now[0] = 200.0
    assert subject.run([only])[only].reasons == ("deadline",)
    assert end.stats[0].canvases == 2
    assert end.stats[0].commits == 1
    assert end.ids_BT.shape[1] == 32


@pytest.mark.parametrize("check", ["off", "checked", "exact"])
def test_a_deadline_ends_a_request_that_waits_or_is_prefilled(monkeypatch, check):
    """It has no tokens, and its memory and its slot are free."""
    now = [100.0]
    monkeypatch.setattr("redraft.engine.engine.time.monotonic", lambda: now[0])
    subject = Engine(MODEL, EngineConfig(cache_bytes=2**24, max_running=1, prefill_chunk=8))
    cfg = tiny.sampler(max_new_tokens=16, check=check, draft_length=2)
    prefilled, waiting = (subject.add([2, *range(30, 60)], cfg, seed=1, seconds=5.0) for _ in range(2))
    other = subject.add([2, 30], cfg, seed=1)
    subject.step()
    assert (prefilled.status, waiting.status) == (RequestStatus.PREFILLING, RequestStatus.WAITING)
    now[0] = 106.0
    ends = subject.run([prefilled, waiting, other])
    for request in (prefilled, waiting):
        assert (ends[request].ids_BT.shape, ends[request].reasons) == ((1, 0), ("deadline",))
        assert ends[request].stats[0].new_tokens == 0
    assert ends[other].ids_BT.shape[1] > 0
    assert subject.is_idle
    assert choose_likeliest(subject, EncodedPrompt((2, 30), is_chat=False), [ends[waiting], ends[other]]) == 1


def test_a_deadline_passes_while_the_engines_thread_has_nothing_else_to_do(monkeypatch):
    """The request waits for memory that work beside the engine holds. The thread sleeps when the deadline passes."""
    now = [100.0]
    subject = engine()
    sleeps = threading.Event()
    wait = subject._changed.wait
    monkeypatch.setattr(subject._changed, "wait", lambda seconds=None: (sleeps.set(), wait(seconds))[1])
    with subject.run_in_background(), subject.reserve(1):
        subject.scheduler.budget = subject.scheduler.used
        monkeypatch.setattr(subject.scheduler, "check", lambda *_: None)
        monkeypatch.setattr("redraft.engine.engine.time.monotonic", lambda: now[0])
        sleeps.wait()
        request = subject.add([2, 30], tiny.sampler(max_new_tokens=16), seed=1, seconds=5.0)
        sleeps.clear()
        assert sleeps.wait(PATIENCE)
        now[0] = 106.0
        with request.has_moved:
            assert request.has_moved.wait_for(lambda: request.is_over, PATIENCE)
        assert list(subject.stream(request))[-1].reasons == ("deadline",)


def test_a_deadline_ends_a_request_whose_reader_does_not_read(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("redraft.engine.engine.time.monotonic", lambda: now[0])
    subject = engine()
    with subject.run_in_background(max_unread=2):
        request = subject.add([2, 30], tiny.sampler(max_new_tokens=64, eos_token_ids=()), seed=1, seconds=5.0)
        with request.has_moved:
            assert request.has_moved.wait_for(lambda: request.has_unread(2), PATIENCE)
        now[0] = 106.0
        with request.has_moved:
            assert request.has_moved.wait_for(lambda: request.is_over, PATIENCE)
        assert list(subject.stream(request))[-1].reasons == ("deadline",)


def test_streams_that_are_read_together_do_not_wait_for_each_other():
    """One slot: the request that has it must not pause because the one that waits for it is read first."""
    subject, cfg = engine(max_running=1), tiny.sampler(max_new_tokens=48, eos_token_ids=())
    with subject.run_in_background(max_unread=2):
        first, second = (subject.add([2, 30], cfg, seed=seed) for seed in (1, 2))
        with first.has_moved:
            assert first.has_moved.wait_for(lambda: first.has_unread(2), PATIENCE)
        ends: dict = {}
        reader = threading.Thread(target=lambda: ends.update(subject.run([second, first])), daemon=True)
        reader.start()
        reader.join(PATIENCE)
    for request, seed in ((first, 1), (second, 2)):
        same([ends[request]], alone([2, 30], cfg, seed, Constraints(), None)[-1:])


def test_a_stream_closed_early_is_cancelled_and_others_continue():
    subject, cfg = engine(), tiny.sampler(max_new_tokens=48)
    kept, left = (subject.add([2, 30, n], cfg, seed=n) for n in (40, 41))
    for event in subject.stream(left):
        assert isinstance(event, Draft)
        break
    assert left.is_over
    assert subject.scheduler.running == [kept]
    events = list(subject.stream(kept))
    expected = alone([2, 30, 40], cfg, 40, Constraints(), None)
    same(events, expected[len(expected) - len(events) :])
    assert any(isinstance(event, Committed) for event in events)
    assert subject.is_idle


def test_a_background_thread_makes_the_steps_of_all_streams():
    """Streams in many threads, some stopped, some read late: the others get the tokens of `generate`; no request is left."""
    model = tiny.decided(tiny.BASE)
    engine, found, cfg = Engine(model, EngineConfig(max_running=3)), {}, tiny.sampler(max_new_tokens=32, max_steps=4)

    def ask(number: int) -> None:
        stop = threading.Event()
        if number % 3 == 2:
            stop.set()
        request = engine.add([2, 3 + number], cfg, seed=number, stop=stop)
        if number % 3 == 1:
            time.sleep(0.2)  # it may have run by now: what came of it is kept
        for event in engine.stream(request):
            if isinstance(event, Finished):
                found[number] = event.ids_BT

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(9)]
    with engine.run_in_background():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert engine.is_idle
        with pytest.raises(RuntimeError, match="in a thread already"), engine.run_in_background():
            pass
        left = engine.add([2, 3], cfg, seed=1)
    assert left.is_over
    assert sorted(found) == [0, 1, 3, 4, 6, 7]
    for number, ids in found.items():
        *_, expected = generate(model, [[2, 3 + number]], cfg, seeds=[number])
        assert torch.equal(ids, expected.ids_BT)


def test_a_fault_in_the_background_thread_reaches_the_streams_it_concerns(monkeypatch):
    engine = Engine(tiny.decided(tiny.BASE))
    with engine.run_in_background():
        monkeypatch.setattr(engine.runner, "step", lambda requests: 1 / 0)
        with pytest.raises(RuntimeError, match="division by zero"):
            list(engine.stream(engine.add([2, 3], tiny.sampler(), seed=1)))
        monkeypatch.undo()
        assert isinstance(list(engine.stream(engine.add([2, 3], tiny.sampler(), seed=1)))[-1], Finished)
