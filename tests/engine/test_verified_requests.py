"""Checked and exact requests in the engine: another verifier, deadlines, the prefix cache, top probabilities, best of N."""

import pytest
import tiny
import torch

from redraft.config import EngineConfig
from redraft.constraints.constraints import ConstraintEdit
from redraft.diffusion.autoregressive import generate_autoregressive
from redraft.diffusion.generate import Committed, Draft, Finished
from redraft.diffusion.verified import generate_verified
from redraft.engine import Engine, Replay, RequestError
from redraft.engine.replay import Intervention
from redraft.model.kv_cache import KVCache
from redraft.tasks import best_of
from redraft.tasks.infill import sequence_logprobs

MODEL = tiny.decided(tiny.BASE, 4)
VERIFIER = tiny.decided(tiny.CONFIGS["short window"], 7)
EXACT = tiny.sampler(check="exact", temperature=1.0, max_new_tokens=20, draft_length=3)
CHECKED = tiny.sampler(check="checked", max_new_tokens=20, canvas_length=8, draft_length=3, draft_steps=2, tolerance=1.0)
PROMPT = [2, *range(30, 60)]


@pytest.mark.soak
@pytest.mark.parametrize("cfg", [EXACT, CHECKED])
def test_another_verifier_in_the_engine_gives_the_tokens_of_the_story(cfg):
    engine = Engine(MODEL, EngineConfig(max_running=2), verifier=VERIFIER)
    requests = [engine.add(PROMPT[: 4 + seed], cfg, seed=seed) for seed in range(3)]
    found = engine.run(requests)
    for seed, request in enumerate(requests):
        *_, expected = generate_verified(MODEL, PROMPT[: 4 + seed], cfg, seed=seed, verifier=VERIFIER)
        assert torch.equal(found[request].ids_BT, expected.ids_BT)
    if cfg is EXACT:
        answer = list(generate_autoregressive(VERIFIER, PROMPT[:4], 20, cfg, seed=0))
        assert found[requests[0]].ids_BT[0].tolist() == answer


def test_a_verified_answer_stays_in_the_prefix_cache():
    """The cache holds prompt and answer but the last token; a longer prompt takes it over and gets the right tokens."""
    engine = Engine(MODEL)
    for cfg in (EXACT, CHECKED):
        request = engine.add(PROMPT, cfg, seed=1)
        answer = engine.run([request])[request].ids_BT[0].tolist()
        longer = [*PROMPT, *[token for token in answer if token not in (1, 5)], 99]
        follow_up = engine.add(longer, EXACT, seed=2)
        finished = engine.run([follow_up])[follow_up]
        assert finished.stats[0].reused >= len(PROMPT)
        assert finished.ids_BT[0].tolist() == list(generate_autoregressive(MODEL, longer, 20, EXACT, seed=2))


def test_a_deadline_keeps_the_verified_tokens(monkeypatch):
    """Whenever it comes, the answer is a beginning of the whole one, but for a draft that nothing was verified of."""
    now = [0.0]
    monkeypatch.setattr("redraft.engine.engine.time.monotonic", lambda: now[0])
    whole = list(generate_verified(MODEL, PROMPT, CHECKED, seed=3))
    for steps in range(1, 12):
        now[0] = 0.0
        engine = Engine(MODEL)
        engine.add(PROMPT, CHECKED, seed=3, seconds=1.0)
        events = []
        for _ in range(steps):
            events += [event for _, event in engine.step()]
        now[0] = 2.0
        while not engine.is_idle:
            events += [event for _, event in engine.step()]
        finished = events[-1]
        assert isinstance(finished, Finished)
        ids = finished.ids_BT[0].tolist()
        committed = [token for event in events if isinstance(event, Committed) for token in event.ids_BC[0].tolist()]
        assert ids == committed
        if finished.stats[0].rounds:
            assert ids == whole[-1].ids_BT[0].tolist()[: len(ids)]
        assert finished.reasons[0] in ("deadline", "stop", "length")


def test_steering_is_refused_with_one_sentence():
    engine = Engine(MODEL)
    replay = Replay(interventions=(Intervention(0, 1, ConstraintEdit(pins={0: 40})),))
    with pytest.raises(RequestError, match="steered or resumed canvas needs check 'off', got 'exact'"):
        engine.add(PROMPT, EXACT, seed=1, replay=replay)
    with pytest.raises(RequestError, match="takes no draft"):
        engine.add(PROMPT, EXACT, seed=1, first_canvas_1C=torch.zeros(1, EXACT.canvas_length, dtype=torch.long))


def test_top_probabilities_are_those_of_the_causal_half():
    engine = Engine(MODEL)
    request = engine.add(PROMPT, EXACT, seed=1, candidates=4)
    events = list(engine.stream(request))
    committed = [event for event in events if isinstance(event, Committed)]
    ids = [token for event in committed for token in event.ids_BC[0].tolist()]
    logprobs = [number for event in committed for number in event.logprobs]
    with torch.inference_mode():
        whole = torch.tensor([[*PROMPT, *ids]])
        hidden = MODEL.encode(whole, MODEL.new_cache(1, whole.shape[1]))[0, len(PROMPT) - 1 : -1]
        expected_SV = MODEL.head(hidden).log_softmax(dim=-1)
    assert logprobs == pytest.approx(expected_SV.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist(), abs=1e-3)
    top = torch.cat([event.top_probs.ids_BCK[0] for event in committed])
    assert torch.equal(top, expected_SV.topk(4).indices)
    assert not any(isinstance(event, Draft) for event in events)


def test_best_of_returns_the_answer_that_the_causal_half_finds_likeliest():
    writer = tiny.writer()
    for check in ("off", "exact"):
        answers = [
            writer.write("abc", seed=seed, check=check, max_tokens=12, temperature=1.0) for seed in best_of.seeds_of(5, 4)
        ]
        prompt = writer.encode_prompt("abc")
        totals = sequence_logprobs(writer.engine, prompt, [answer_ids(writer, answer) for answer in answers])
        means = [total / answer.stats.new_tokens for total, answer in zip(totals, answers, strict=True)]
        best = writer.write("abc", seed=5, check=check, max_tokens=12, temperature=1.0, best_of=4)
        assert best.text == answers[means.index(max(means))].text
        assert best.seed == answers[means.index(max(means))].seed


def answer_ids(writer, answer) -> list[int]:
    """The tokens of an answer with its stop token."""
    request = writer.engine.add(
        writer.encode_prompt("abc"),
        writer.sampler.changed(check=answer.stats.check, max_new_tokens=12, temperature=1.0),
        seed=answer.seed,
    )
    finished = writer.engine.run([request])[request]
    return finished.ids_BT[0, : finished.stats[0].new_tokens].tolist()


def test_best_of_above_the_memory_budget_is_refused():
    tokens = 100
    nbytes = KVCache.count_bytes(tiny.BASE, tokens, torch.float32, 512)
    engine = Engine(MODEL, EngineConfig(cache_bytes=3 * nbytes))
    best_of.check_memory(engine, tokens, 3)
    with pytest.raises(RequestError, match="best_of is 4, but only 3 answers of this length fit"):
        best_of.check_memory(engine, tokens, 4)


def test_a_draft_that_the_caches_cannot_take_back_is_refused():
    engine = Engine(MODEL, EngineConfig(rewind=4))
    engine.add(PROMPT, EXACT.changed(draft_length=2), seed=1)
    with pytest.raises(RequestError, match=r"draft_length is 3, .* lower draft_length to 2"):
        engine.add(PROMPT, EXACT, seed=1)


def test_a_prefix_at_the_limit_of_the_rewind_is_taken_over():
    """The first round cuts one token more than the prefix cache did."""
    model = tiny.decided(tiny.CONFIGS["short window"], 4)
    cfg = EXACT.changed(max_new_tokens=6, eos_token_ids=(), draft_length=2)
    prompt = list(range(20, 61))
    for rewind in range(4, 9):
        engine = Engine(model, EngineConfig(rewind=rewind))
        answers = []
        for _ in range(2):
            request = engine.add(prompt, cfg, seed=1)
            answers.append(engine.run([request])[request].ids_BT.tolist())
        assert answers[0] == answers[1]
