"""The loop of `generate`: events, statistics, refusals; batched = alone, and the same seed = the same tokens."""

import pytest
import tiny
import torch

from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import PREFILL_CHUNK, Committed, Draft, Finished, generate, prefill

MODEL = tiny.decided(tiny.BASE, 4)
PROMPTS = [[2, 30, 40, 50], [2, *range(60, 100)], [2, 7]]


def run(prompts=PROMPTS, model=MODEL, **changes):
    options = {k: changes.pop(k) for k in ("constraints", "first_canvas_BC") if k in changes}
    seeds = changes.pop("seeds", [11 + row for row in range(len(prompts))])
    return list(generate(model, prompts, tiny.sampler(**changes), seeds=seeds, **options))


def test_events_come_in_order():
    events = run(max_new_tokens=40)
    canvases = [e for e in events if isinstance(e, Committed)]
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(e, Finished) for e in events) == 1
    for block, committed in enumerate(canvases):
        drafts = [e for e in events if isinstance(e, Draft) and e.block == block]
        assert [e.step for e in drafts] == list(range(1, len(drafts) + 1))
        assert committed.block == block
        assert int(committed.steps_B.max()) == len(drafts)
        for draft in drafts:
            assert draft.entropy_BC.shape == draft.ids_BC.shape == draft.canvas_BC.shape == draft.accepted_BC.shape
    assert torch.equal(torch.cat([committed.ids_BC for committed in canvases], dim=1), events[-1].ids_BT)


def test_batched_equals_alone():
    together = run(max_new_tokens=64, max_steps=5)
    for row, prompt in enumerate(PROMPTS):
        alone = run([prompt], max_new_tokens=64, max_steps=5, seeds=[11 + row])
        width = alone[-1].ids_BT.shape[1]
        assert torch.equal(together[-1].ids_BT[row, :width], alone[-1].ids_BT[0])
        assert (together[-1].ids_BT[row, width:] == 0).all()
        batched_stats = together[-1].stats[row]
        alone_stats = alone[-1].stats[0]
        for name in ("prompt_tokens", "new_tokens", "canvases", "settled", "steps", "forwards", "tokens_per_forward"):
            assert getattr(batched_stats, name) == getattr(alone_stats, name), name


def test_the_same_seed_gives_the_same_tokens_and_another_does_not():
    seeds = ([1, 2, 3], [1, 2, 3], [4, 5, 6])
    first, again, other = (run(seeds=row_seeds, max_new_tokens=48)[-1].ids_BT for row_seeds in seeds)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_canvas_that_did_not_settle_is_reported():
    undamped = tiny.build(tiny.BASE, 4)  # its entropies stay high
    events = run(model=undamped, max_new_tokens=32, confidence_threshold=1e-9, eos_token_ids=())
    assert not any(bool(e.settled_B.any()) for e in events if isinstance(e, Committed))
    assert [s.settled for s in events[-1].stats] == [0, 0, 0]
    damped = run(max_new_tokens=16, max_steps=20)
    assert all(bool(e.settled_B.all()) for e in damped if isinstance(e, Committed))
    assert all(s.settled == s.canvases for s in damped[-1].stats)


def test_a_row_that_ended_earlier_counts_as_settled():
    for seed in range(20):
        events = run(max_new_tokens=64, seeds=[seed, seed + 50, seed + 90], max_steps=30)
        canvases = [e for e in events if isinstance(e, Committed)]
        last = canvases[-1]
        ended_rows = [row for row in range(3) if len(canvases) > 1 and int(last.steps_B[row]) == 0]
        if ended_rows:
            assert all(bool(last.settled_B[row]) for row in ended_rows)
            assert all((last.ids_BC[row] == 0).all() for row in ended_rows)
            return
    pytest.fail("no row ended before the others")


def test_sliding_layers_take_no_more_memory_than_their_window(monkeypatch):
    caches = []
    original = MODEL.new_cache
    monkeypatch.setattr(MODEL, "new_cache", lambda *args, **kwargs: caches.append(original(*args, **kwargs)) or caches[-1])
    run([[2] * 200], max_new_tokens=16)
    assert caches[0]._keys[0].shape[1] == tiny.BASE.sliding_window - 1


def test_statistics():
    events = run([[2, 3, 4]], max_new_tokens=40, eos_token_ids=(), max_steps=3, confidence_threshold=1e-9)
    stats = events[-1].stats[0]
    assert (stats.prompt_tokens, stats.new_tokens, stats.canvases) == (3, 40, 3)
    assert (stats.steps, stats.commits, stats.forwards) == (9, 2, 11)  # the last canvas is not encoded
    assert stats.tokens_per_forward == 40 / 11
    assert 0 < stats.prefill_seconds < stats.seconds
    assert events[-1].reasons == ("length",)
    assert stats.seed == 11


def test_forwards_are_linear_in_steps(monkeypatch):
    calls = {"encode": 0, "denoise": 0, "soft_embed": 0}
    for name in calls:
        method = getattr(MODEL, name)

        def counted(*args, name=name, method=method):
            calls[name] += 1
            return method(*args)

        monkeypatch.setattr(MODEL, name, counted)
    for steps in (1, 2, 5):
        calls.update(dict.fromkeys(calls, 0))
        run([[2, 3]], max_new_tokens=48, max_steps=steps, eos_token_ids=(), confidence_threshold=1e-9)
        assert calls == {"encode": 3, "denoise": 3 * steps, "soft_embed": 3 * (steps - 1)}


def test_pins_are_in_the_text_and_forbidden_tokens_are_not():
    pins = {0: 100, 20: 101, 39: 102}
    forbidden = tuple(range(120, 200))
    for seeds in ([11, 12, 13], [4, 5, 6]):
        last = run(max_new_tokens=40, seeds=seeds, constraints=[Constraints(pins=pins, forbidden=forbidden)] * 3)[-1]
        for row in last.ids_BT.tolist():
            assert all(row[position] == token for position, token in pins.items())
            assert not set(row) & set(forbidden)


def test_the_first_canvas_can_be_given():
    given = torch.full((1, 16), 77)
    drafts = [e for e in run([[2, 3]], max_new_tokens=16, first_canvas_BC=given) if isinstance(e, Draft)]
    assert int((drafts[0].ids_BC == 77).sum()) >= 8  # the damped model repeats most of its input
    from_noise = [e for e in run([[2, 3]], max_new_tokens=16) if isinstance(e, Draft)]
    assert int((from_noise[0].ids_BC == 77).sum()) < 8


def test_a_long_prompt_is_prefilled_in_chunks(monkeypatch):
    monkeypatch.setattr("redraft.diffusion.generate.PREFILL_CHUNK", 7)
    prompts = [list(range(20, 60)), list(range(20, 34)), [20]]
    chunked, whole = (MODEL.new_cache(3, 64) for _ in range(2))
    prefill(MODEL, prompts, chunked)
    monkeypatch.setattr("redraft.diffusion.generate.PREFILL_CHUNK", PREFILL_CHUNK)
    prefill(MODEL, prompts, whole)
    assert chunked.lengths == whole.lengths == [40, 14, 1]
    canvas = torch.arange(48).view(3, 16)
    assert torch.allclose(MODEL.denoise(canvas, None, chunked), MODEL.denoise(canvas, None, whole), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": []}, "at least one token"),
        ({"prompts": [[2], []]}, "at least one token"),
        ({"prompts": [[2, tiny.VOCAB]]}, str(tiny.VOCAB)),
        ({"prompts": [[2, -1]]}, "-1"),
        ({"prompts": [[2] * 500]}, "500 tokens"),
        ({"max_new_tokens": 513}, "context is 512"),
        ({"seeds": [1]}, "3 prompts, 1 seeds"),
        ({"constraints": [Constraints(pins={99: 5})] * 3, "max_new_tokens": 16}, "99"),
        ({"constraints": [Constraints(pins={17: 5})] * 3, "max_new_tokens": 17}, "17"),
        ({"seeds": [1, 2.5, 3]}, "2.5"),
        ({"pad_token_id": tiny.VOCAB}, "pad token"),
        ({"canvas_length": 1000}, "canvases of 1000"),
        ({"first_canvas_BC": torch.zeros(3, 5, dtype=torch.long)}, r"\(3, 5\)"),
        ({"first_canvas_BC": torch.full((3, 16), tiny.VOCAB)}, "first canvas"),
    ],
)
def test_impossible_inputs_are_refused_before_anything_runs(changes, words):
    with pytest.raises(ValueError, match=words):
        run(**changes)
