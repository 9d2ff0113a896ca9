"""Requests with adapters: batched with other adapters = alone, token for token; without one, the base to the bit."""

import pytest
import tiny
import torch

from redraft import Constraints
from redraft.checkpoint.merge import merge_into
from redraft.config import EngineConfig
from redraft.diffusion.generate import generate
from redraft.diffusion.verified import generate_verified
from redraft.engine import AdaptedEngine, Engine
from redraft.engine.prefix_cache import PrefixCache
from redraft.model.lora import DENOISE, AdapterError
from redraft.writer import Writer

MODEL = tiny.decided(tiny.BASE)
PROMPT = [2, *range(30, 60)]
ROBUST_SEEDS = (3, 56)  # the tokens stay if all weights change by a millionth: they do not depend on how sums are rounded
ADAPTERS = {
    "none": None,
    "all": tiny.trained(tiny.BASE, seed=1),
    "attention": tiny.trained(tiny.BASE, seed=2, targets=("attention",), rank=2),
    "denoiser": tiny.trained(tiny.BASE, seed=3, halves=DENOISE),
}


def alone(prompt, cfg, seed, adapter, constraints=None):
    """The tokens that the specification gives a request."""
    if cfg.check == "off":
        given = [constraints] if constraints is not None else None
        *_, end = generate(MODEL, [prompt], cfg, seeds=[seed], constraints=given, adapter=adapter)
    else:
        policy = tiny.engine_policy(cfg)
        options = {"constraints": constraints, "policy": policy, "adapter": adapter}
        *_, end = generate_verified(MODEL, prompt, cfg, seed=seed, **options)
    return end.ids_BT[0].tolist()


def run_together(engine, requests):
    ends = engine.run(requests)
    return [ends[request].ids_BT[0].tolist() for request in requests]


@pytest.mark.parametrize("check", ["off", *(pytest.param(check, marks=pytest.mark.soak) for check in ("checked", "exact"))])
def test_requests_with_different_adapters_equal_each_alone(check):
    engine = Engine(MODEL, EngineConfig(prefill_chunk=8))
    cfg = tiny.sampler(max_new_tokens=24, check=check, draft_steps=3)
    jobs = [(name, seed) for seed in ROBUST_SEEDS for name in ADAPTERS]
    requests = [AdaptedEngine(engine, ADAPTERS[name]).add(PROMPT, cfg, seed=seed) for name, seed in jobs]
    expected = [alone(PROMPT, cfg, seed, ADAPTERS[name]) for name, seed in jobs]
    assert run_together(engine, requests) == expected
    assert len({tuple(ids) for ids in expected[: len(ADAPTERS)]}) >= 3  # the adapters are felt


@pytest.mark.soak
def test_requests_of_all_modes_and_adapters_share_an_engine():
    """Constraints, other canvas lengths, checked and exact requests, some of which commit in the same step."""
    engine = Engine(MODEL)
    pinned = Constraints(pins={3: 70, 18: 71})
    jobs = []
    for number, adapter in enumerate([*ADAPTERS.values()] * 3):
        check = ("off", "checked", "exact")[number % 3]
        cfg = tiny.sampler(max_new_tokens=20, check=check, draft_steps=2, max_steps=2 + number % 4)
        constraints = pinned if number % 4 == 0 else None
        if number % 5 == 0 and check == "off":
            cfg = cfg.changed(canvas_length=8)
        jobs.append((PROMPT[: 20 + number % 3], cfg, number, adapter, constraints))
    requests = [
        AdaptedEngine(engine, adapter).add(prompt, cfg, seed=seed, constraints=constraints)
        for prompt, cfg, seed, adapter, constraints in jobs
    ]
    assert run_together(engine, requests) == [alone(*job) for job in jobs]


def test_checked_and_unchecked_requests_may_commit_in_the_same_step():
    """The last verified token of one is encoded beside the whole canvas of the other."""
    engine = Engine(MODEL)
    cfg = tiny.sampler(max_new_tokens=24, draft_steps=2, max_steps=2)
    requests = [engine.add(PROMPT, cfg.changed(check=check), seed=1) for check in ("off", "checked")]
    for request in requests:  # each makes steps without the other until its first canvas is done
        engine.scheduler.choose_for_step = lambda *_, chosen=request, **__: [chosen]
        while request.committed is None:
            engine.step()
    del engine.scheduler.choose_for_step
    assert [request.committed.ids_BC.shape[1] for request in requests] == [16, 1]
    expected = [alone(PROMPT, request.cfg, 1, None) for request in requests]
    assert run_together(engine, requests) == expected


@pytest.mark.parametrize("order", [("all", "none"), ("none", "all"), ("all", "attention")])
def test_the_prefix_cache_never_hands_a_context_to_another_adapter(order):
    engine = Engine(MODEL)
    cfg = tiny.sampler(max_new_tokens=20)
    for turn in range(2):
        for name in order:
            request = AdaptedEngine(engine, ADAPTERS[name]).add(PROMPT, cfg, seed=4)
            (ids,) = run_together(engine, [request])
            assert ids == alone(PROMPT, cfg, 4, ADAPTERS[name])
            reused = request.counter.reused[0]
        assert (reused > 0) == (turn == 1)  # the second time each finds its own context
    longer = [*PROMPT, 61, 62]
    request = AdaptedEngine(engine, ADAPTERS["denoiser"]).add(longer, cfg, seed=4)
    assert run_together(engine, [request]) == [alone(longer, cfg, 4, ADAPTERS["denoiser"])]
    assert request.counter.reused[0] == 0


@pytest.mark.parametrize("order", [("all", "none"), ("none", "all"), ("all", "attention")])
def test_a_prompt_is_lent_with_the_context_of_its_own_adapter(order):
    """Whatever the prefix cache has of the prompt for others: the canvas behind it is that of an engine of its own."""
    canvas_1C = torch.tensor([[70, 71, 72, 73]])

    def score(engine, name):
        with torch.inference_mode(), AdaptedEngine(engine, ADAPTERS[name]).lend_prompt(PROMPT) as cache:
            assert cache.adapter is ADAPTERS[name]
            return MODEL.denoise(canvas_1C, None, cache)

    shared = Engine(MODEL)
    for name in order * 2:
        assert torch.equal(score(shared, name), score(Engine(MODEL), name))
    assert len(shared.scheduler.prefix_cache) == 2


def test_eviction_spares_the_entry_of_the_same_adapter():
    def entry(adapter):
        cache = MODEL.new_cache(1, 40, adapter=adapter)
        MODEL.encode(torch.tensor([PROMPT]), cache)
        return cache

    own, other = ADAPTERS["all"], ADAPTERS["attention"]
    for adapter, spared in ((own, own), (other, other), (None, None)):
        cache = PrefixCache(4)
        for each in (own, other, None):
            cache.put(PROMPT, entry(each))
        assert cache.evict([*PROMPT, 70], adapter)
        assert cache.evict([*PROMPT, 70], adapter)
        assert not cache.evict([*PROMPT, 70], adapter)
        context, taken = cache.take([*PROMPT, 70], 50, spared)
        assert context == PROMPT
        assert taken.adapter is spared
        assert cache.take([*PROMPT, 70], 50, adapter) is None


def test_an_engine_without_memory_for_both_evicts_the_other_adapters_context():
    cfg = tiny.sampler(max_new_tokens=20)
    probe = Engine(MODEL)
    nbytes = probe._cache_bytes(probe.add(PROMPT, cfg, seed=0))
    engine = Engine(MODEL, EngineConfig(cache_bytes=int(1.5 * nbytes)))
    for name in ("all", "none", "all", "attention"):
        request = AdaptedEngine(engine, ADAPTERS[name]).add(PROMPT, cfg, seed=4)
        assert run_together(engine, [request]) == [alone(PROMPT, cfg, 4, ADAPTERS[name])]
        assert request.counter.reused[0] == 0


def test_a_view_is_the_same_engine():
    engine = Engine(MODEL)
    view = AdaptedEngine(engine, ADAPTERS["all"])
    assert engine.adapter is None
    assert AdaptedEngine(view, None).adapter is None
    with view.run_in_background():
        assert engine.has_thread
        cfg = tiny.sampler(max_new_tokens=20)
        requests = [view.add(PROMPT, cfg, seed=1), engine.add(PROMPT, cfg, seed=1)]
        assert run_together(engine, requests) == [alone(PROMPT, cfg, 1, a) for a in (ADAPTERS["all"], None)]
    assert not engine.has_thread
    with view.reserve(8) as adapted, engine.reserve(8) as plain:
        assert adapted.adapter is ADAPTERS["all"]
        assert plain.adapter is None
    assert not engine.scheduler.running


def test_an_adapter_and_another_verifier_are_refused_together():
    engine = Engine(MODEL, verifier=tiny.decided(tiny.BASE, seed=1))
    with pytest.raises(AdapterError, match="verify_with decides what is written"):
        AdaptedEngine(engine, ADAPTERS["all"])


# The Writer


GENTLE = tiny.trained(tiny.BASE, seed=1, alpha=1.5)  # rounding errors vanish under it, as in a model that is decided


def new_writer(model=MODEL):
    """A Writer with an engine of its own."""
    return Writer(model, tiny.byte_tokenizer(), tiny.sampler(max_new_tokens=40))


TASKS = {
    "write": lambda w: w.write("Once upon a", seed=3).ids,
    "several": lambda w: [answer.ids for answer in w.write(["Once upon a", "There was"], seed=3)],
    "chat": lambda w: w.chat("hello there", seed=3, max_tokens=20).ids,
    "checked": lambda w: w.write("Once upon a", seed=3, check="checked").ids,
    "exact": lambda w: w.write("Once upon a", seed=3, check="exact", temperature=1.0).ids,
    "left to right": lambda w: w.write("Once", seed=3, check="exact", draft_length=0).ids,
    "best of": lambda w: w.write("Once upon a", seed=3, best_of=3, max_tokens=20).ids,
    "pattern": lambda w: w.write("Once upon a", seed=3, regex="[a-z ]{5,20}").ids,
    "fill": lambda w: [f.text for f in w.fill("Once [[ 4 ]] a time", seed=3, count=2)],
    "edit": lambda w: w.edit("Once upon a time there was", strength=0.4, seed=3).text,
    "decide": lambda w: [round(p, 4) for p in w.decide("Is it so?", ["yes", "no"]).values()],
    "suggest": lambda w: [
        (s.start, [(text, round(p, 3)) for text, p in s.alternatives])
        for s in w.suggest("Once upon a time teh dog", least=1.01)
    ],
    "streamer": lambda w: w.write("Once upon a", seed=3, streamer=Recorder()).ids,
    "checked streamer": lambda w: w.write("Once", seed=3, check="checked", streamer=Recorder()).ids,
}


class Recorder:
    def put(self, ids):
        pass

    def end(self):
        pass


def merged_model():
    """A model whose weights hold what the adapter adds."""
    model = tiny.decided(tiny.BASE)
    list(merge_into(model, GENTLE))
    return model


LONG_TASKS = ("checked", "checked streamer")


@pytest.mark.parametrize("task", [pytest.param(t, marks=[pytest.mark.soak] if t in LONG_TASKS else []) for t in TASKS])
def test_every_task_uses_the_adapter_and_only_in_its_writer(task):
    """Equal to a Writer whose model has the adapter in its weights; the base beside it is as without one."""
    run = TASKS[task]
    base = new_writer()
    before = run(base)
    adapted = base.with_adapter(GENTLE)
    found = run(adapted)
    assert run(base) == before == run(new_writer())
    assert found != before
    assert found == run(new_writer(merged_model()))
    assert run(adapted.with_adapter(None)) == before


def test_a_writer_names_its_adapter():
    assert "adapter" not in repr(new_writer())
    assert "adapter='adapter'" in repr(new_writer().with_adapter(GENTLE))
