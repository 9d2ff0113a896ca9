"""Replay: without an intervention a replayed run equals the original; with one, its constraints hold from that step on."""

import re
from dataclasses import replace

import pytest
import tiny
import torch

from redraft.config import FULL, SLIDING, EngineConfig
from redraft.constraints.constraints import ConstraintEdit, Constraints, build_canvas_constraints
from redraft.constraints.token_automaton import AutomatonCompiler
from redraft.diffusion import rng, sampler
from redraft.diffusion.generate import Committed, Draft, Finished, generate
from redraft.engine import Engine, Intervention, Replay
from redraft.kernels import compute_top_probs

CONFIG = replace(tiny.BASE, sliding_window=7, layer_types=(SLIDING, FULL))
MODEL = tiny.decided(CONFIG, 4)
PROMPT = [2, 30, 40, 50, 61, 62, 63]
CFG = tiny.sampler(canvas_length=16, max_new_tokens=48, max_steps=8, entropy_bound=0.3, confidence_threshold=0.05)
UNENDING, NOTHING = Constraints(forbidden=(1, 5)), ConstraintEdit()


def run(replay=None, constraints=UNENDING, cfg=CFG, seed=3, **options):
    engine = Engine(MODEL, EngineConfig(cache_bytes=2**24, prefill_chunk=5, rewind=6))
    return list(engine.stream(engine.add(PROMPT, cfg, seed=seed, constraints=constraints, replay=replay, **options)))


def summarize(events):
    """Tokens, flags and steps of everything that happened."""
    found = []
    for event in events:
        match event:
            case Draft():
                tensors = (event.ids_BC, event.canvas_BC, event.accepted_BC)
                found.append(("draft", event.block, event.step, *(tensor.tolist() for tensor in tensors)))
            case Committed():
                found.append(("page", event.block, event.ids_BC.tolist(), event.settled_B.tolist()))
            case Finished():
                found.append(("end", event.ids_BT.tolist(), event.reasons))
    return found


def pages(events):
    return tuple(tuple(event.ids_BC[0].tolist()) for event in events if isinstance(event, Committed))


def test_the_run_without_a_replay_is_that_of_generate():
    alone = list(generate(MODEL, [PROMPT], CFG, seeds=[3], constraints=[UNENDING]))
    assert summarize(run()) == summarize(alone)
    assert len({event.step for event in alone if isinstance(event, Draft)}) > 2
    assert len(pages(alone)) == 3


@pytest.mark.parametrize(("given", "block", "step"), [(0, 0, 1), (0, 0, 2), (1, 1, 1), (2, 2, 3), (1, 2, 2)])
def test_a_replay_without_a_change_equals_the_original_run(given, block, step):
    whole = run()
    again = run(Replay(pages(whole)[:given], (Intervention(block, step, NOTHING),)))
    ours, theirs = ([one for one in summarize(events) if one[0] == "end" or one[1] >= given] for events in (again, whole))
    assert ours == theirs
    retold = [event for event in again if isinstance(event, Committed)][:given]
    assert pages(retold) == pages(whole)[:given]
    assert all(bool(event.settled_B) and int(event.steps_B) == 0 for event in retold)


def denoise_by_hand(intervention, seed=3):
    """The first canvas step by step, with new constraints after one step: `Request.apply_intervention` must equal it."""
    cache = MODEL.new_cache(1, 64)
    MODEL.encode(torch.tensor([PROMPT]), cache)
    draws, vocab = rng.draws([seed], 0), CONFIG.vocab_size
    fixed = build_canvas_constraints([UNENDING], 0, 16, vocab, CFG.eos_token_ids, "cpu")
    state, soft, found = sampler.start(draws.noise(0, 16, vocab), fixed), None, []
    while not sampler.is_finished(state, CFG):
        logits = MODEL.denoise(state.ids_BC, soft, cache)
        state, shaped = sampler.step(logits, state, CFG, draws, fixed)
        found.append((state.best_BC.tolist(), state.ids_BC.tolist()))
        soft = MODEL.soft_embed(shaped)
        if state.step == intervention.step:
            fixed = build_canvas_constraints(
                [UNENDING.apply_edit(intervention.edit)], 0, 16, vocab, CFG.eos_token_ids, "cpu"
            )
            state = sampler.apply_constraints(state, fixed, draws, vocab)
    return found


@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_intervention_changes_later_steps_and_no_earlier_one(step):
    before = run()
    steps = [event for event in before if isinstance(event, Draft) and event.block == 0]
    old = steps[-1].ids_BC[0].tolist()
    constraints = ConstraintEdit(pins={4: 77}, bans=((6, old[6]), (9, old[9]), (9, 100)))
    after = run(Replay((), (Intervention(0, step, constraints),)))
    drafts = [event for event in after if isinstance(event, Draft) and event.block == 0]
    assert [one.ids_BC.tolist() for one in drafts[:step]] == [one.ids_BC.tolist() for one in steps[:step]]
    assert [(one.ids_BC.tolist(), one.canvas_BC.tolist()) for one in drafts] == denoise_by_hand(
        Intervention(0, step, constraints)
    )
    page = pages(after)[0]
    assert page[4] == 77
    assert page[6] != old[6]
    assert page[9] not in (old[9], 100)


def test_a_settled_canvas_is_denoised_further_when_its_draft_violates_the_new_constraints():
    before = run()
    drafts = [event for event in before if isinstance(event, Draft) and event.block == 0]
    last = drafts[-1]
    assert bool(last.settled_B)
    assert last.step < CFG.max_steps
    kept = run(Replay((), (Intervention(0, last.step, ConstraintEdit(pins={3: int(last.ids_BC[0, 3])})),)))
    assert pages(kept)[0] == pages(before)[0]  # it said so already
    assert sum(isinstance(event, Draft) and event.block == 0 for event in kept) == len(drafts)
    changed = run(Replay((), (Intervention(0, last.step, ConstraintEdit(pins={3: 99})),)))
    assert pages(changed)[0][3] == 99
    assert sum(isinstance(event, Draft) and event.block == 0 for event in changed) > len(drafts)


def test_interventions_on_several_canvases():
    first, second = ConstraintEdit(pins={2: 90}), ConstraintEdit(pins={20: 91})
    both = Replay((), (Intervention(0, 1, first), Intervention(1, 2, second)))
    whole = run(both)
    assert (pages(whole)[0][2], pages(whole)[1][4]) == (90, 91)
    again = run(Replay(pages(whole)[:1], both.interventions))  # the first intervention lies before the replayed canvas ends
    assert summarize(again)[1:] == [one for one in summarize(whole) if one[0] == "end" or one[1] >= 1]


def test_a_replay_in_a_batch_equals_the_replay_alone():
    replay = Replay((), (Intervention(0, 2, ConstraintEdit(pins={4: 77})),))
    engine = Engine(MODEL, EngineConfig(cache_bytes=2**24, prefill_chunk=5, rewind=6))
    requests = [engine.add(PROMPT, CFG, seed=3, constraints=UNENDING, replay=replay, candidates=3)]
    requests += [engine.add(PROMPT[:4], CFG, seed=seed, constraints=UNENDING) for seed in (3, 4)]
    ends = engine.run(requests)
    assert ends[requests[0]].ids_BT.tolist() == run(replay)[-1].ids_BT.tolist()
    for request in requests[1:]:
        alone = list(generate(MODEL, [PROMPT[:4]], CFG, seeds=[request.seed], constraints=[UNENDING]))[-1]
        assert ends[request].ids_BT.tolist() == alone.ids_BT.tolist()


def test_drafts_have_top_probabilities_only_when_candidates_are_asked_for():
    assert all(event.top_probs is None for event in run() if isinstance(event, Draft))
    for event in run(candidates=4):
        if isinstance(event, Draft):
            assert event.top_probs.ids_BCK.shape == (1, 16, 4)
            assert torch.equal(event.top_probs.ids_BCK[..., 0], event.ids_BC)
            assert (event.top_probs.probs_BCK.diff(dim=-1) <= 0).all()
            assert (event.top_probs.own_BC <= event.top_probs.probs_BCK[..., 0] + 1e-6).all()


def test_top_probabilities_are_those_of_the_softmax():
    logits, ids = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 3, 10], [1, 1, 2]])
    probs, found = logits.softmax(dim=-1), compute_top_probs(logits, ids, ids.flip(0), 20)
    torch.testing.assert_close(found.own_BC, probs.gather(-1, ids[..., None])[..., 0])
    torch.testing.assert_close(found.draft_BC, probs.gather(-1, ids.flip(0)[..., None])[..., 0])
    torch.testing.assert_close(found.probs_BCK, probs.sort(descending=True).values)
    assert torch.equal(found.ids_BCK, probs.argsort(descending=True))


def test_an_intervention_that_is_never_reached_fails_only_its_request():
    engine = Engine(MODEL, EngineConfig(cache_bytes=2**24, prefill_chunk=5, rewind=6))
    settled = max(event.step for event in run() if isinstance(event, Draft) and event.block == 0)
    assert settled < CFG.max_steps - 1
    late = engine.add(
        PROMPT, CFG, seed=3, constraints=UNENDING, replay=Replay((), (Intervention(0, CFG.max_steps - 1, NOTHING),))
    )
    twice = Replay((), (Intervention(0, settled, NOTHING), Intervention(0, settled + 1, NOTHING)))
    behind = engine.add(PROMPT, CFG, seed=3, constraints=UNENDING, replay=twice)
    other = engine.add(PROMPT, CFG, seed=3, constraints=UNENDING)
    streams = [engine.stream(request) for request in (late, behind, other)]
    for stream in streams[:2]:
        with pytest.raises(ValueError, match=f"canvas 0 settled at step {settled}: it has no step"):
            list(stream)
    assert summarize(list(streams[2])) == summarize(run())
    ends = Constraints(pins={3: 1})  # the text ends there
    with pytest.raises(ValueError, match="the text ended on canvas 0: there is no canvas 1"):
        run(Replay((), (Intervention(1, 1, NOTHING),)), constraints=ends)


def test_replayed_canvases_that_do_not_match_the_pattern_are_refused():
    spelled = tiny.byte_tokenizer().token_bytes
    constraints = Constraints(automaton=AutomatonCompiler(spelled, CFG.eos_token_ids).compile("[0-9]*"))
    with pytest.raises(ValueError, match="does not fit the pattern"):
        run(Replay(((70,) * 16,)), constraints=constraints)


def test_an_intervention_under_a_pattern_still_matches_the_pattern():
    words, letters = (
        AutomatonCompiler(tiny.byte_tokenizer().token_bytes, CFG.eos_token_ids),
        tiny.byte_tokenizer().encode("q0a"),
    )
    constraints = Constraints(automaton=words.compile("[a-z]{20,24}"))
    old = pages(run(constraints=constraints))[0]
    more = ConstraintEdit(pins={3: letters[0]}, bans=((5, old[5]), (18, letters[2])))
    for step in (1, 2):
        after = run(replay := Replay((), (Intervention(0, step, more),)), constraints=constraints)
        found = [token for page in pages(after) for token in page]
        assert found[3] == letters[0]
        assert found[5] != old[5]
        assert found[18] != letters[2]
        text = tiny.byte_tokenizer().decode(found)
        assert re.fullmatch("[a-z]{20,24}", text), text
        again = run(replace(replay, canvases=pages(after)[:1]), constraints=constraints)
        assert summarize(again)[1:] == [one for one in summarize(after) if one[0] == "end" or one[1] >= 1]
    with pytest.raises(ValueError, match="no answer of 48 tokens that has these pins matches"):
        run(Replay((), (Intervention(0, 1, ConstraintEdit(pins={3: letters[1]})),)), constraints=constraints)
    same = Constraints(automaton=words.compile("a{20,24}"))
    with pytest.raises(ValueError, match="no text of this length can match"):
        run(Replay((), (Intervention(0, 1, ConstraintEdit(bans=((4, letters[2]),))),)), constraints=same)


def test_a_settled_canvas_is_unsettled_when_a_later_pin_leaves_no_match():
    words, (a, b) = (
        AutomatonCompiler(tiny.byte_tokenizer().token_bytes, CFG.eos_token_ids),
        tiny.byte_tokenizer().encode("ab"),
    )
    constraints = Constraints(automaton=words.compile("a{20}|b{20}"))
    before = run(constraints=constraints)
    said = pages(before)[0][0]
    other = b if said == a else a
    last = max(event.step for event in before if isinstance(event, Draft) and event.block == 0)
    assert last < CFG.max_steps
    for step in (1, last):
        after = run(Replay((), (Intervention(0, step, ConstraintEdit(pins={18: other})),)), constraints=constraints)
        assert [token for page in pages(after) for token in page][:20] == [other] * 20
    again = run(Replay((), (Intervention(0, last, NOTHING),)), constraints=constraints)
    assert summarize(again) == summarize(before)


def test_constraint_edits_are_applied_once_when_the_request_is_added(monkeypatch):
    """Not in the thread that makes the steps of all requests."""
    folded, usual = [], Constraints.apply_edit
    monkeypatch.setattr(Constraints, "apply_edit", lambda self, more: folded.append(more) or usual(self, more))
    interventions = tuple(Intervention(block, 1, ConstraintEdit(bans=((40, 70), (40, 70 + block)))) for block in range(3))
    assert len(pages(run(Replay((), interventions)))) == 3
    assert folded == [intervention.edit for intervention in interventions]
    assert UNENDING.apply_edit(interventions[0].edit).apply_edit(interventions[1].edit).banned == {40: (70, 71)}


def test_replayed_canvases_do_not_count_in_the_statistics():
    whole = run()
    again = run(Replay(pages(whole)[:2]))
    first, second = whole[-1].stats[0], again[-1].stats[0]
    assert (second.new_tokens, second.canvases, second.commits) == (16, 1, 0)
    assert (first.new_tokens, first.canvases, first.commits) == (48, 3, 2)
    assert second.steps == int([event for event in whole if isinstance(event, Committed)][2].steps_B)


def test_a_stop_token_before_a_pin_violates_the_constraints():
    fixed = build_canvas_constraints([Constraints(pins={7: 5})], 0, 16, CONFIG.vocab_size, CFG.eos_token_ids, "cpu")
    ids = torch.full((1, 16), 70)
    ids[0, [3, 7, 9]] = 5
    assert fixed.find_violations(ids).nonzero()[:, 1].tolist() == [3]


@pytest.mark.parametrize(
    ("replay", "sentence"),
    [
        (Replay(((7,) * 16,) * 3), "the replay has 3 committed canvases and the answer has at most 3"),
        (Replay(((7,) * 15,)), "canvas 0 has 15 tokens, canvas_length is 16"),
        (Replay(((7,) * 15 + (999,),)), "canvas 0 has the token 999"),
        (Replay(((7,) * 15 + (5,),)), "canvas 0 contains a stop token"),
        (Replay((), (Intervention(3, 1, NOTHING),)), "there is no canvas 3, step 1 to intervene at"),
        (Replay((), (Intervention(0, 8, NOTHING),)), "the last possible is canvas 2, step 7"),
        (Replay((), (Intervention(0, 2, NOTHING), Intervention(0, 2, NOTHING))), "interventions must be in order"),
        (Replay((), (Intervention(0, 2, ConstraintEdit(pins={99: 3})),)), "a pin at 99 is beyond"),
        (Replay((), (Intervention(0, 2, ConstraintEdit(bans=((99, 3),))),)), "a ban at 99 is beyond"),
        (Replay((), (Intervention(0, 2, ConstraintEdit(bans=((1, 999),))),)), "token 999 is outside"),
        (
            Replay(((7,) * 16,), (Intervention(0, 2, ConstraintEdit(pins={3: 9})),)),
            "has the token 7 at 3, where 9 is pinned",
        ),
        (
            Replay(((7,) * 16,), (Intervention(0, 2, ConstraintEdit(bans=((3, 7),))),)),
            "has the token 7 at 3, where it may not stand",
        ),
        (
            Replay((), (Intervention(0, 2, ConstraintEdit(bans=tuple((1, token) for token in range(CONFIG.vocab_size)))),)),
            "every token is banned at 1",
        ),
    ],
)
def test_impossible_replays_are_refused(replay, sentence):
    with pytest.raises(ValueError, match=sentence):
        run(replay)
