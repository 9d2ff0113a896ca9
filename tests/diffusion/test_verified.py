"""Checked and exact mode: exact equals autoregressive, joint equals encode and denoise, drafts change nothing."""

import math
import random
from dataclasses import replace

import pytest
import tiny
import torch

from redraft.config import FULL, SLIDING, SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.constraints.next_token import NextToken
from redraft.constraints.token_automaton import AutomatonCompiler
from redraft.diffusion import pick, rng
from redraft.diffusion.autoregressive import generate_autoregressive
from redraft.diffusion.draft_policy import TRIED, TRIED_AGAIN, DraftPolicy, DraftSpeed
from redraft.diffusion.generate import Committed, Draft, Finished
from redraft.diffusion.verified import (
    Round,
    Verdict,
    Verification,
    check_steering,
    generate_verified,
    verify,
)
from redraft.model import masks

CONFIG = replace(tiny.CONFIGS["short window"], draft_head_size=24, layer_types=(SLIDING, FULL))
MODEL = tiny.decided(CONFIG, 4)
FLAT = tiny.build(CONFIG, 4)  # its probabilities are nearly even, so shared Gumbel numbers decide, and drafts are accepted
FLAT.embed_tokens.weight.data *= 0.05
OTHER = tiny.decided(tiny.BASE, 7)
COMPILER = AutomatonCompiler([None] * 16 + [bytes([byte]) for byte in range(256)], (1, 5))


# 1. The joint forward


@pytest.mark.parametrize("name", list(tiny.CONFIGS))
def test_a_joint_forward_equals_encode_then_denoise(name):
    """For every canvas, and for rows with contexts of different lengths; the cache holds the same keys afterwards."""
    model = tiny.build(tiny.CONFIGS[name])
    rows = [list(range(20, 20 + 9)), list(range(40, 40 + 4))]
    clean_BS = torch.tensor([[70, 71, 72, 73], [80, 81, 82, 83]])
    after = (0, 2, 3)
    canvas_BJC = torch.randint(20, 200, (2, 3, 5), generator=torch.Generator().manual_seed(1))

    def prefilled(row_ids):
        cache = model.new_cache(len(row_ids), 40, rewind=8)
        longest = max(map(len, row_ids))
        padded = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in row_ids])
        model.encode(padded, cache, [len(ids) for ids in row_ids])
        return cache

    with torch.inference_mode():
        cache = prefilled(rows)
        hidden_BSD, hidden_BJCD = model.joint(clean_BS, canvas_BJC, after, cache, [4, 3])
        assert cache.lengths == [13, 7]
        for row, ids in enumerate(rows):
            alone = prefilled([ids])
            expected_SD = model.encode(clean_BS[row : row + 1], alone)[0]
            assert torch.allclose(hidden_BSD[row], expected_SD, atol=2e-5)
            for number, behind in reversed(list(enumerate(after))):
                alone.rewind([len(ids) + behind + 1])
                logits = model.denoise(canvas_BJC[row, number][None], None, alone)
                assert torch.allclose(model.head(hidden_BJCD[row, number]), logits[0], atol=5e-5)


def test_the_joint_mask_cell_by_cell():
    """Five cached tokens, three clean ones, canvases of two behind the first and the last; window 4."""
    lengths, keys = torch.tensor([5]), torch.arange(5)[None]
    for window in (None, 4):
        mask = masks.joint(lengths, keys, 3, torch.tensor([0, 2]), 2, window)[0]
        positions = [*range(8)]  # cached and clean
        for clean in range(3):
            causal = [position <= 5 + clean and (window is None or 5 + clean - position < window) for position in positions]
            assert mask[clean].tolist() == [*causal, *[False] * 4]
        for canvas, after in enumerate((0, 2)):
            start = 5 + after + 1
            seen = [position < start and (window is None or position >= start - (window - 1)) for position in positions]
            own = [number // 2 == canvas for number in range(4)]
            for position in range(2):
                assert mask[3 + 2 * canvas + position].tolist() == [*seen, *own]


# 2. Exact mode


def random_case(number: int):
    """Prompt, settings, seed and constraints of case `number`."""
    dice = random.Random(number)
    prompt = [2, *(dice.randrange(20, 250) for _ in range(dice.choice([0, 1, 3, 12])))]
    cfg = tiny.sampler(
        check="exact",
        max_new_tokens=dice.randint(1, 14),
        draft_length=dice.choice([0, 1, 2, 3, 5, 7]),
        draft_token=dice.choice([None, 0]),
        temperature=dice.choice([0.0, 0.3, 0.7, 1.0, 2.0]),
        top_k=dice.choice([0, 0, 1, 5, 40]),
        top_p=dice.choice([1.0, 1.0, 0.5, 0.9]),
        min_p=dice.choice([0.0, 0.0, 0.05]),
        repetition_penalty=dice.choice([1.0, 1.0, 1.3]),
        logit_bias=dice.choice([(), ((30, 5.0), (31, -100.0))]),
    )
    kind = dice.randrange(6)
    if kind == 0 and cfg.max_new_tokens >= 5:
        constraints = Constraints(automaton=COMPILER.compile(dice.choice(["[a-c]{2,5}", "(foo|bar)+", "[0-9]+x?"])))
    elif kind == 1:
        constraints = Constraints(pins={dice.randrange(cfg.max_new_tokens): dice.randrange(20, 250)})
    elif kind == 2:
        constraints = Constraints(forbidden=tuple(range(20, 120)), banned={0: (150, 151)})
    else:
        constraints = Constraints()
    return prompt, cfg, dice.randrange(2**64), constraints


def run(prompt, cfg, seed, constraints=None, model=MODEL, **options) -> Finished:
    *_, finished = generate_verified(model, prompt, cfg, seed=seed, constraints=constraints, **options)
    return finished


def check_exact(number: int) -> int:
    """One case: exact mode equals autoregressive sampling. Returns the accepted drafts."""
    prompt, cfg, seed, constraints = random_case(number)
    model = FLAT if number % 3 else MODEL
    limit = cfg.max_new_tokens
    expected = list(generate_autoregressive(model, prompt, limit, cfg, seed=seed, constraints=constraints))
    policy = DraftPolicy(random.Random(number).choice([0.0, 0.1, 1.0]), cfg.draft_length) if number % 2 else None
    finished = run(prompt, cfg, seed, constraints, model, policy=policy)
    assert finished.ids_BT[0].tolist() == expected, f"case {number}"
    assert finished.stats[0].rounds <= len(expected)
    return finished.stats[0].accepted


def test_exact_mode_equals_autoregressive_sampling():
    """Whatever the prompt, seed, temperature, filter, draft length, policy and constraint."""
    assert sum(check_exact(number) for number in range(24)) > 5


@pytest.mark.soak
def test_exact_mode_equals_autoregressive_sampling_in_a_thousand_cases():
    """With those above."""
    assert sum(check_exact(number) for number in range(24, 1000)) > 200


def test_drafts_are_accepted_and_save_forwards():
    """With the same Gumbel numbers, drafts agree with the causal half far more often than by chance."""
    cfg = tiny.sampler(check="exact", max_new_tokens=60, draft_length=4, temperature=1.0, eos_token_ids=(1,))
    finished = run([2, 40, 41], cfg, 3, Constraints(forbidden=(1,)), FLAT)
    stats = finished.stats[0]
    assert stats.accepted > 0
    assert stats.new_tokens == 60
    assert stats.forwards == stats.rounds < 60
    assert stats.accepted + stats.rounds in (60, 61)  # a round gives its accepted drafts and a token; the last needs none
    assert stats.corrected <= stats.rounds
    assert stats.check == "exact"


def test_another_models_exact_answer_is_that_models():
    for number in range(12):
        prompt, cfg, seed, constraints = random_case(number)
        expected = list(generate_autoregressive(OTHER, prompt, cfg.max_new_tokens, cfg, seed=seed, constraints=constraints))
        assert run(prompt, cfg, seed, constraints, verifier=OTHER).ids_BT[0].tolist() == expected


def test_exact_answers_are_samples_of_the_models_distribution():
    """The first token of many seeds has the frequencies of softmax(logits / T)."""
    cfg = tiny.sampler(temperature=0.8)
    with torch.inference_mode():
        logits_1V = MODEL.head(MODEL.encode(torch.tensor([[2, 50]]), MODEL.new_cache(1, 4))[0, -1:])
        seeds = torch.arange(20_000)
        expected_V = (logits_1V[0].double() / 0.8).softmax(dim=0)
        picks = pick.pick_tokens(logits_1V.expand(len(seeds), -1), cfg, seeds, torch.zeros_like(seeds))
    found_V = torch.bincount(picks, minlength=tiny.VOCAB) / len(seeds)
    assert (found_V - expected_V).abs().sum() / 2 < 0.05  # total variation


def test_gumbel_numbers_are_finite_and_differ_by_seed_position_and_token():
    seeds, positions = torch.tensor([1, 1, 2]), torch.tensor([0, 1, 0])
    numbers_SV = rng.gumbel(seeds, positions, 1000)
    assert numbers_SV.isfinite().all()
    assert len(numbers_SV.flatten().unique()) == 3000
    assert torch.equal(numbers_SV[0], rng.gumbel(seeds[:1], positions[:1], 1000)[0])
    assert abs(float(numbers_SV.mean()) - 0.5772) < 0.1  # Euler's constant


# 3. Filters


def test_filters_keep_what_transformers_keeps():
    from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(5, 60, generator=torch.Generator().manual_seed(0)) * 3
    for cfg, warper in (
        (tiny.sampler(top_k=7), TopKLogitsWarper(7)),
        (tiny.sampler(top_p=0.8), TopPLogitsWarper(0.8)),
        (tiny.sampler(min_p=0.1), MinPLogitsWarper(0.1)),
    ):
        kept = pick.filter_logits(logits.double(), cfg) > -math.inf
        assert torch.equal(kept, warper(None, logits.double()) > -math.inf)
    ids = torch.randint(60, (5, 9), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(5, 60, dtype=torch.bool).scatter(1, ids, True)
    found = pick.adjust_logits(logits, tiny.sampler(repetition_penalty=1.7), seen)
    assert torch.equal(found, RepetitionPenaltyLogitsProcessor(1.7)(ids, logits))


# 4. Checked mode


def state_of(cfg: SamplerConfig, constraints: Constraints | None = None) -> Verification:
    return Verification.start([2, 30], cfg, 5, constraints or Constraints(), 50)


def test_checked_mode_accepts_up_to_the_tolerance_and_replaces_the_first_token_beyond_it():
    cfg = tiny.sampler(check="checked", tolerance=2.0, temperature=0.0, draft_length=3, max_new_tokens=20)
    state = state_of(cfg)
    state.set_canvas([40, 41, 42, 43, 44])
    logits_SV = torch.full((4, 50), -5.0)
    for row, (likeliest, gap) in enumerate(((7, 1.9), (8, 2.0), (9, 2.1), (10, 0.0))):
        logits_SV[row, likeliest] = 3.0
        logits_SV[row, 40 + row] = max(3.0 - gap, float(logits_SV[row, 40 + row]))
    work = state.next_round()
    assert work == Round((30, 40, 41, 42), (40, 41, 42, 43), (0, 1, 2, 3), 4)
    verdict = verify(state, work, logits_SV)
    assert (verdict.accepted, verdict.token) == (2, 9)
    state.apply(work, verdict, [20, 21])
    assert state.tokens == [40, 41, 9]
    assert state.drafts == [20, 21]
    assert (state.drafted, state.accepted, state.corrected, state.rounds) == (4, 2, 1, 1)
    assert state.logprobs == pytest.approx(
        [float(logits_SV[row].log_softmax(0)[token]) for row, token in enumerate((40, 41, 9))]
    )


def test_fresh_drafts_replace_old_ones_and_the_rest_of_the_canvas_stays():
    state = state_of(tiny.sampler(check="checked", draft_length=2, max_new_tokens=20))
    state.set_canvas([40, 41, 42, 43, 44, 45])
    state.apply(state.next_round(), Verdict(1, 9, (0.0, 0.0)), [20, 21])
    assert state.tokens == [40, 9]
    assert state.drafts == [20, 21, 44, 45]
    state.apply(state.next_round(), Verdict(3, None, (0.0,) * 3), [])
    assert state.tokens == [40, 9, 20, 21, 44]
    assert state.drafts == [45]
    assert state.corrected == 1
    assert not state.is_canvas_done
    work = state.next_round()
    assert (work.clean, work.drafts) == ((44,), (45,))  # nothing behind the canvas is drafted
    state.apply(work, Verdict(1, None, (0.0,)), [])
    assert state.is_canvas_done


def test_a_stop_token_ends_the_answer_and_what_was_drafted_behind_it_is_dropped():
    state = state_of(tiny.sampler(check="checked", draft_length=5, max_new_tokens=20))
    state.set_canvas([40, 5, 42, 43])
    work = state.next_round()
    assert (work.clean, work.drafts) == ((30, 40), (40, 5))
    state.apply(work, Verdict(2, None, (0.0, 0.0)), [])
    assert state.has_ended
    assert state.tokens == [40, 5]


@pytest.mark.parametrize("tolerance", [0.0, 1.0, 50.0])
def test_checked_answers_are_within_the_tolerance_everywhere(tolerance):
    """Every token is at most `tolerance` nats below the causal half's likeliest one; a tolerance of 50 accepts all."""
    cfg = tiny.sampler(
        check="checked", tolerance=tolerance, temperature=0.0, max_new_tokens=24, canvas_length=8, draft_length=3
    )
    prompt = [2, 60, 61]
    *events, finished = generate_verified(MODEL, prompt, cfg, seed=11)
    ids = finished.ids_BT[0].tolist()
    with torch.inference_mode():
        whole = torch.tensor([[*prompt, *ids]])
        logits_SV = MODEL.head(MODEL.encode(whole, MODEL.new_cache(1, whole.shape[1]))[0, len(prompt) - 1 : -1])
    gaps = logits_SV.amax(dim=-1) - logits_SV.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert float(gaps.max()) <= tolerance + 1e-4
    drafts = [event for event in events if isinstance(event, Draft)]
    committed = [event for event in events if isinstance(event, Committed)]
    assert [token for event in committed for token in event.ids_BC[0].tolist()] == ids
    assert len(committed) == 3 or finished.reasons == ("stop",)
    sweep = [event for event in drafts if event.verified is not None and event.block == 0]
    cursors = [event.verified for event in sweep]
    assert cursors == sorted(set(cursors))
    for event in sweep:  # what is behind the cursor does not change any more
        assert event.ids_BC[0, : event.verified].tolist() == ids[: event.verified]
        assert event.accepted_BC[0].tolist() == [index < event.verified for index in range(event.ids_BC.shape[1])]
    if tolerance == 50.0:
        assert finished.stats[0].corrected == 0
    if tolerance == 0.0:
        assert ids == list(generate_autoregressive(MODEL, prompt, 24))


@pytest.mark.parametrize("check", ["checked", "exact"])
def test_a_pattern_is_obeyed_from_left_to_right(check):
    automaton = COMPILER.compile("[a-c]{3}-[0-9]{2,4}")
    cfg = tiny.sampler(check=check, max_new_tokens=12, canvas_length=12, temperature=1.0, draft_length=3)
    for seed in range(5):
        finished = run([2, 30], cfg, seed, Constraints(automaton=automaton))
        text = bytes(token - 16 for token in finished.ids_BT[0].tolist() if token >= 16).decode()
        assert text[3] == "-"
        assert set(text[:3]) <= set("abc")
        assert text[4:].isdigit()
        assert 2 <= len(text[4:]) <= 4


def test_a_pattern_with_pins_leaves_room_for_the_pins():
    automaton = COMPILER.compile("[a-z]*!")
    constraints = Constraints(automaton=automaton, pins={4: 16 + ord("q"), 6: 16 + ord("!")})
    finished = run([2], tiny.sampler(check="exact", max_new_tokens=9, temperature=1.0), 1, constraints)
    text = bytes(token - 16 for token in finished.ids_BT[0].tolist() if token >= 16).decode()
    assert (text[4], text[6:]) == ("q", "!")


def test_allowed_tokens_are_those_after_which_the_pattern_can_end_in_time():
    following = NextToken(Constraints(automaton=COMPILER.compile("ab|a{5}")), 2, (1, 5), tiny.VOCAB)
    start = following.constraints.initial_state
    after_a = following.advance(start, 16 + ord("a"))
    assert following.allowed(0, start).nonzero().flatten().tolist() == [16 + ord("a")]
    assert following.allowed(1, after_a).nonzero().flatten().tolist() == [16 + ord("b")]  # five of "a" do not fit
    assert following.advance(start, 16 + ord("z")) is None


# 5. Policy and steering


def test_the_policy_drafts_more_where_drafts_are_accepted_and_forwards_are_expensive():
    def choice(token_cost: float, accepted: int) -> tuple[int, bool]:
        policy = DraftPolicy(token_cost, 7)
        for _ in range(50):
            policy.record(7, accepted)
        return policy.choose()

    assert choice(0.0, 7) == (7, True)
    assert choice(0.012, 0)[0] == 1
    assert 2 <= choice(0.012, 3)[0] <= 4
    assert choice(0.3, 3)[1] is False  # tokens are dear: verify first, then draft once


@pytest.mark.parametrize(("seconds", "pays"), [(1.0, True), (3.0, False)])
def test_drafts_that_do_not_pay_are_left_out(seconds, pays):
    """Rounds without drafts take a second and give one token; rounds with drafts give two."""
    speed = DraftSpeed()
    chosen = []
    for _ in range(TRIED_AGAIN + 2 * TRIED):
        chosen.append(speed.pays)
        speed.record(speed.pays, 2 if speed.pays else 1, seconds if speed.pays else 1.0)
    both = [False] * TRIED + [True] * TRIED
    assert chosen == both + [pays] * (TRIED_AGAIN - 2 * TRIED) + both
    assert (DraftPolicy(0.012, 7, speed).choose()[0] > 0) == pays


def test_rounds_of_one_request_are_not_compared_with_those_of_four():
    """One request: 0.10 s a round. Four: 0.12 s, and 0.30 s with drafts, which give a fifth token."""
    speed = DraftSpeed()
    for _ in range(TRIED):
        speed.record(False, 1, 0.10, 1)
    with_drafts = 0
    for _ in range(TRIED_AGAIN):
        with_drafts += speed.pays
        speed.record(speed.pays, 5 if speed.pays else 4, 0.30 if speed.pays else 0.12, 4)
    assert with_drafts == TRIED


def test_steered_canvases_need_check_off():
    for check, options, message in (
        ("exact", {"is_steered": True, "has_draft": False}, "needs check 'off', got 'exact'"),
        ("checked", {"is_steered": True, "has_draft": False}, "needs check 'off', got 'checked'"),
        ("exact", {"is_steered": False, "has_draft": True}, "takes no draft"),
    ):
        with pytest.raises(ValueError, match=message):
            check_steering(tiny.sampler(check=check), Constraints(), **options)
    check_steering(tiny.sampler(check="off"), Constraints(), is_steered=True, has_draft=True)
    check_steering(tiny.sampler(check="checked"), Constraints(), is_steered=False, has_draft=True)
    with pytest.raises(ValueError, match="bans together with a pattern need check 'off', got 'exact'"):
        run([2], EXACT, 1, Constraints(automaton=COMPILER.compile("ab|cd"), banned={1: (16 + ord("b"),)}))


# 6. Answers obey, independently of how the causal half computes it


EXACT = tiny.sampler(check="exact", temperature=1.0, max_new_tokens=12, draft_length=3)


def test_answers_have_no_banned_or_forbidden_token_and_begin_as_allowed():
    for seed in range(6):
        free = run([2, 30], EXACT, seed, model=FLAT).ids_BT[0].tolist()
        constraints = Constraints(banned={0: (free[0],), 1: (free[1],)}, forbidden=tuple(free[2:4]))
        found = run([2, 30], EXACT, seed, constraints, FLAT).ids_BT[0].tolist()
        assert found[0] != free[0]
        assert not set(found) & set(free[2:4])
        begun = run([2, 30], EXACT, seed, Constraints(allowed_first=(70, 71)), FLAT).ids_BT[0].tolist()
        assert begun[0] in (70, 71)


def test_no_stop_token_cuts_off_a_pin():
    likely_stop = EXACT.changed(logit_bias=((1, 100.0),), temperature=0.0)
    assert run([2, 30], likely_stop, 1, model=FLAT).ids_BT[0].tolist() == [1]
    found = run([2, 30], likely_stop, 1, Constraints(pins={5: 90}), FLAT).ids_BT[0].tolist()
    assert found[5] == 90
    assert 1 not in found[:5]
    assert found[6] == 1


def test_a_match_may_need_every_remaining_token():
    following = NextToken(Constraints(automaton=COMPILER.compile("ab|aaa")), 3, (1, 5), tiny.VOCAB)
    after_a = following.advance(following.constraints.initial_state, 16 + ord("a"))
    allowed = {16 + ord("a"), 16 + ord("b")}
    assert set(following.allowed(1, after_a).nonzero().flatten().tolist()) == allowed
    shorter = NextToken(following.constraints, 2, (1, 5), tiny.VOCAB)
    assert set(shorter.allowed(1, after_a).nonzero().flatten().tolist()) == {16 + ord("b")}


def test_the_tolerance_and_the_penalty_see_the_adjusted_logits_and_the_drafts_before():
    """A bias makes an unlikely draft likely; a draft accepted in this round is penalized at the next position."""
    cfg = tiny.sampler(check="checked", tolerance=1.0, temperature=0.0, draft_length=3, max_new_tokens=20)
    logits_SV = torch.zeros(3, 50)
    logits_SV[:, 7] = 4.0
    state = state_of(cfg.changed(logit_bias=((40, 3.5),)))
    state.set_canvas([40, 41])
    assert verify(state, state.next_round(), logits_SV[:2]).accepted == 1
    state = state_of(cfg.changed(repetition_penalty=8.0))
    state.set_canvas([7, 41])
    verdict = verify(state, state.next_round(), logits_SV[:2])  # 7 is the best token, then 4 / 8 = 0.5: 41 is near enough
    assert (verdict.accepted, verdict.token) == (2, None)


def test_a_model_that_cannot_draft_is_refused():
    causal = tiny.build(replace(tiny.BASE, is_causal_only=True))
    assert run([2, 30], EXACT.changed(draft_length=0, max_new_tokens=3), 1, model=causal).stats[0].new_tokens
    for cfg in (EXACT, EXACT.changed(check="checked", draft_length=0)):
        with pytest.raises(ValueError, match="needs a diffusion model"):
            run([2, 30], cfg, 1, model=causal)


def test_a_temperature_near_zero_takes_the_likeliest_token():
    logits_SV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    zeros = torch.zeros(3, dtype=torch.long)
    for temperature in (0.0, 1e-310, 1e-7):
        picks = pick.pick_tokens(logits_SV, tiny.sampler(temperature=temperature), zeros, zeros)
        assert torch.equal(picks, logits_SV.argmax(dim=-1))
