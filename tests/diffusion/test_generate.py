"""The loop: its events, its counter, its refusals; batched = alone, and the same seed = the same text."""

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


def test_events_tell_the_story_in_order():
    events = run(max_new_tokens=40)
    pages = [e for e in events if isinstance(e, Committed)]
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(e, Finished) for e in events) == 1
    for block, page in enumerate(pages):
        drafts = [e for e in events if isinstance(e, Draft) and e.block == block]
        assert [e.step for e in drafts] == list(range(1, len(drafts) + 1))
        assert page.block == block
        assert int(page.steps_B.max()) == len(drafts)
        for draft in drafts:
            assert draft.entropy_BC.shape == draft.ids_BC.shape == draft.canvas_BC.shape == draft.accepted_BC.shape
    assert torch.equal(torch.cat([p.ids_BC for p in pages], dim=1), events[-1].ids_BT)


def test_batched_equals_alone():
    together = run(max_new_tokens=64, max_steps=5)
    for row, prompt in enumerate(PROMPTS):
        alone = run([prompt], max_new_tokens=64, max_steps=5, seeds=[11 + row])
        width = alone[-1].ids_BT.shape[1]
        assert torch.equal(together[-1].ids_BT[row, :width], alone[-1].ids_BT[0])
        assert (together[-1].ids_BT[row, width:] == 0).all()
        mine, other = together[-1].stats[row], alone[-1].stats[0]
        for name in ("prompt_tokens", "new_tokens", "canvases", "settled", "steps", "forwards", "tokens_per_forward"):
            assert getattr(mine, name) == getattr(other, name), name


def test_the_same_seed_gives_the_same_text_and_another_does_not():
    first, again, other = (run(seeds=seeds)[-1].ids_BT for seeds in ([1, 2, 3], [1, 2, 3], [4, 5, 6]))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_unsettled_page_says_so():
    restless = tiny.build(tiny.BASE, 4)  # undamped: never sure
    events = run(model=restless, max_new_tokens=32, confidence_threshold=1e-9, eos_token_ids=())
    assert not any(bool(e.settled_B.any()) for e in events if isinstance(e, Committed))
    assert [s.settled for s in events[-1].stats] == [0, 0, 0]
    calm = run(max_new_tokens=16, max_steps=20)
    assert all(bool(e.settled_B.all()) for e in calm if isinstance(e, Committed))
    assert all(s.settled == s.canvases for s in calm[-1].stats)


def test_a_row_that_had_ended_does_not_look_unsettled():
    for seed in range(20):
        events = run(max_new_tokens=64, seeds=[seed, seed + 50, seed + 90], max_steps=30)
        pages = [e for e in events if isinstance(e, Committed)]
        over = [row for row in range(3) if len(pages) > 1 and int(pages[-1].steps_B[row]) == 0]
        if over:
            assert all(bool(pages[-1].settled_B[row]) for row in over)
            assert all((pages[-1].ids_BC[row] == 0).all() for row in over)
            return
    pytest.fail("no row ended before the others")


def test_sliding_layers_take_no_more_memory_than_their_window(monkeypatch):
    made = []
    original = MODEL.new_cache
    monkeypatch.setattr(MODEL, "new_cache", lambda *args, **kwargs: made.append(original(*args, **kwargs)) or made[-1])
    run([[2] * 200], max_new_tokens=16)
    assert made[0]._keys[0].shape[1] == tiny.BASE.sliding_window - 1


def test_the_bill():
    events = run([[2, 3, 4]], max_new_tokens=40, eos_token_ids=(), max_steps=3, confidence_threshold=1e-9)
    stats = events[-1].stats[0]
    assert (stats.prompt_tokens, stats.new_tokens, stats.canvases) == (3, 40, 3)
    assert (stats.steps, stats.commits, stats.forwards) == (9, 2, 11)  # the last canvas is not encoded
    assert stats.tokens_per_forward == 40 / 11
    assert 0 < stats.prefill_seconds < stats.seconds
    assert events[-1].reasons == ("length",)
    assert stats.seed == 11


def test_cost_is_linear_in_steps(monkeypatch):
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
    pins, forbidden = {0: 100, 20: 101, 39: 102}, tuple(range(120, 200))
    for _ in range(3):
        last = run(max_new_tokens=40, constraints=[Constraints(pins=pins, forbidden=forbidden)] * 3)[-1]
        for row in last.ids_BT.tolist():
            assert all(row[position] == token for position, token in pins.items())
            assert not set(row) & set(forbidden)


def test_a_preset_canvas_is_where_the_first_page_starts():
    page = torch.full((1, 16), 77)
    calm = tiny.decided(tiny.BASE, 4)
    drafts = [e for e in run([[2, 3]], model=calm, first_canvas_BC=page) if isinstance(e, Draft)]
    assert int((drafts[0].ids_BC == 77).sum()) >= 8  # the damped model keeps most of what it reads
    noise = [e for e in run([[2, 3]], model=calm) if isinstance(e, Draft)]
    assert int((noise[0].ids_BC == 77).sum()) < 8


def test_a_long_prompt_is_read_in_chunks(monkeypatch):
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
def test_the_impossible_is_refused_before_anything_runs(changes, words):
    with pytest.raises(ValueError, match=words):
        run(**changes)
