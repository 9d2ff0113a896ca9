"""The sampler: invariants under random logits, and each definition of the reference by name."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.config import SamplerConfig
from redraft.constraints.constraints import Constraints, build_canvas_constraints
from redraft.diffusion import rng, sampler
from redraft.kernels import Prediction

VOCAB = 23
LENGTH = 9


@st.composite
def situations(draw):
    """Settings, constraints of each row, the logits of each step, and seeds."""
    rows = draw(st.integers(1, 3))
    cfg = SamplerConfig(
        canvas_length=LENGTH,
        max_steps=draw(st.integers(1, 6)),
        entropy_bound=draw(st.floats(1e-3, 30.0)),
        t_min=draw(st.floats(0.05, 0.5)),
        t_max=draw(st.floats(0.5, 2.0)),
        stability_threshold=draw(st.integers(0, 2)),
        confidence_threshold=draw(st.sampled_from([1e-6, 0.1, 2.0])),
        eos_token_ids=(1, 5),
        quota=draw(st.booleans()),
        accept_at_end=draw(st.booleans()),
        spread=draw(st.sampled_from([0, 0, 1, 2, 20])),
        stops_last=draw(st.booleans()),
    )
    pins = st.dictionaries(st.integers(0, LENGTH - 1), st.integers(0, VOCAB - 1), max_size=4)
    forbidden = st.lists(st.integers(0, VOCAB - 1), max_size=5)
    constraints = []
    for _ in range(rows):
        pinned = draw(pins)
        # Constraints.validate refuses a pinned stop token before the last pin.
        pinned = {p: t for p, t in pinned.items() if t not in (1, 5) or p == max(pinned)}
        constraints.append(Constraints(pins=pinned, forbidden=tuple(set(draw(forbidden)) - set(pinned.values()))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.0, 1.0, 8.0, 30.0]))
    drift = draw(st.booleans())
    base = scale * torch.randn(rows, LENGTH, VOCAB, generator=generator)
    logits = [base + (scale * torch.randn(base.shape, generator=generator) if drift else 0) for _ in range(cfg.max_steps)]
    return cfg, constraints, logits, list(range(rows))


def run(situation):
    """All canvases of the loop, the draws, and the constraints on the canvas."""
    cfg, constraints, logits, seeds = situation
    draws = rng.draws(seeds, 0)
    on_canvas = build_canvas_constraints(constraints, 0, LENGTH, VOCAB, cfg.eos_token_ids, "cpu")
    canvases = [sampler.start(draws.noise(0, LENGTH, VOCAB), on_canvas)]
    while not sampler.is_finished(canvases[-1], cfg):
        canvas, _ = sampler.step(logits[canvases[-1].step], canvases[-1], cfg, draws, on_canvas)
        canvases.append(canvas)
    return canvases, draws, on_canvas


def sampled(situation, before, draws, on_canvas) -> torch.Tensor:
    """The tokens that a step samples from its logits, computed from the definition in float64."""
    cfg, _, logits, _ = situation
    shaped = logits[before.step] if on_canvas is None else on_canvas.mask_logits(logits[before.step])
    probs = (shaped.double() / sampler.temperature(before.step, cfg)).softmax(-1)
    uniform = draws.uniform(before.step + 1, LENGTH)
    return torch.searchsorted(probs.cumsum(-1), uniform[..., None], right=True).squeeze(-1).clamp(max=VOCAB - 1)


@settings(max_examples=120)
@given(situations())
def test_invariants_of_the_loop(situation):
    cfg, constraints, _, _ = situation
    states, draws, on_canvas = run(situation)
    assert len(states) - 1 <= cfg.max_steps  # cost is linear in steps
    for before, state in itertools.pairwise(states):
        assert state.accepted_BC.any(dim=-1).all()
        live = ~before.frozen_B
        noise = draws.noise(state.step, LENGTH, VOCAB)
        # Every position is either renoised or holds this step's sample.
        renoised = ~state.accepted_BC & live[:, None]
        assert torch.equal(state.ids_BC[renoised], noise[renoised])
        accepted = state.accepted_BC & live[:, None]
        assert torch.equal(state.ids_BC[accepted], sampled(situation, before, draws, on_canvas)[accepted])
        for name in ("ids_BC", "best_BC", "entropy_BC", "accepted_BC", "steps_B", "settled_B"):
            assert torch.equal(getattr(state, name)[~live], getattr(before, name)[~live])
        assert torch.equal(state.steps_B[live], before.steps_B[live] + 1)
        for row, row_constraints in enumerate(constraints):
            for position, token in row_constraints.pins.items():
                assert state.ids_BC[row, position] == token
                assert state.best_BC[row, position] == token
                assert state.entropy_BC[row, position] == 0
            assert not set(state.best_BC[row].tolist()) & set(row_constraints.forbidden)
            accepted_tokens = state.ids_BC[row, state.accepted_BC[row]].tolist()
            assert not set(accepted_tokens) & set(row_constraints.forbidden)
        is_last_step = state.step == cfg.max_steps
        if (cfg.quota and (is_last_step or not cfg.spread)) or (cfg.accept_at_end and is_last_step):
            required = sampler.count_required(before, cfg)
            assert (state.accepted_BC.sum(-1)[live] >= required[live]).all()
    last = states[-1]
    if (cfg.quota or cfg.accept_at_end) and last.step == cfg.max_steps:
        assert last.accepted_BC[~states[-2].frozen_B].all()
    ids, lengths, ended = sampler.commit(last, cfg)
    for row in range(len(constraints)):
        stops = [i for i, t in enumerate(last.best_BC[row].tolist()) if t in cfg.eos_token_ids]
        assert bool(ended[row]) == bool(stops)
        end = stops[0] + 1 if stops else LENGTH
        assert ids[row, :end].tolist() == last.best_BC[row, :end].tolist()
        assert (ids[row, end:] == cfg.pad_token_id).all()
        assert lengths[row] == end
        assert all(position < end for position in constraints[row].pins)  # no stop token cuts off a pin


def prediction_of(entropies, best):
    """A prediction with these entropies and these argmax tokens."""
    entropy = torch.tensor([entropies])
    return Prediction(torch.tensor([best]), entropy, torch.tensor([best]))


def test_spread_accepts_the_surest_of_unsure_neighbours():
    cfg = SamplerConfig(canvas_length=8, max_steps=4, entropy_bound=100.0, spread=3)
    state = sampler.start(torch.zeros(1, 8, dtype=torch.long))
    entropies = [1.0, 0.9, 1.1, 1.2, 0.1, 0.15, 2.0, 0.8]
    first = sampler.select_accepted(prediction_of(entropies, [7] * 8), state, cfg)
    # Position 1 has the lowest entropy around it; 4 and 5 are below SURE; 7 has 5 within its distance, which is lower.
    assert first.tolist() == [[False, True, False, False, True, True, False, False]]
    # An accepted token that is still predicted no longer keeps its neighbours from being accepted.
    state = replace(state, ids_BC=torch.full((1, 8), 7), accepted_BC=first)
    second = sampler.select_accepted(prediction_of(entropies, [7] * 8), state, cfg)
    assert second.tolist() == [[True, True, False, False, True, True, False, True]]
    changed = sampler.select_accepted(prediction_of(entropies, [7, 8, *[7] * 6]), state, cfg)
    assert changed.tolist() == [[False, True, False, False, True, True, False, True]]  # position 1 changed
    full = sampler.select_accepted(
        prediction_of(entropies, [7] * 8), replace(state, step=3), replace(cfg, accept_at_end=True)
    )
    assert full.all()


def test_a_quota_respects_spread():
    cfg = SamplerConfig(canvas_length=8, max_steps=2, entropy_bound=1e-3, spread=8, quota=True)
    state = sampler.start(torch.zeros(1, 8, dtype=torch.long))
    accepted = sampler.select_accepted(prediction_of([2.0, 1.0, *[3.0] * 6], [7] * 8), state, cfg)
    assert accepted.nonzero().tolist() == [[0, 1]]


def test_stops_last_accepts_stop_tokens_after_the_others():
    cfg = SamplerConfig(canvas_length=4, max_steps=4, entropy_bound=5.0, stops_last=True, eos_token_ids=(1, 5))
    state = sampler.start(torch.zeros(1, 4, dtype=torch.long))
    prediction = prediction_of([0.1, 4.0, 3.0, 0.2], [1, 7, 8, 5])
    assert sampler.select_accepted(prediction, state, cfg).tolist() == [[False, True, True, False]]
    last_step = replace(cfg, quota=True, max_steps=1)
    assert sampler.select_accepted(prediction, state, last_step).all()
    only_stops = prediction_of([0.3, 0.1, 0.2, 0.4], [1, 1, 5, 5])
    assert sampler.select_accepted(only_stops, state, cfg).tolist() == [[False, True, False, False]]  # always at least one


@settings(max_examples=40)
@given(situations())
def test_batched_rows_equal_rows_alone(situation):
    cfg, constraints, logits, seeds = situation
    together = run(situation)[0][-1]
    for row in range(len(seeds)):
        row_alone = (cfg, [constraints[row]], [step[row : row + 1] for step in logits], [seeds[row]])
        alone = run(row_alone)[0][-1]
        for name in ("ids_BC", "best_BC", "accepted_BC", "steps_B", "settled_B"):
            assert torch.equal(getattr(together, name)[row], getattr(alone, name)[0])


def naive_accept(entropy: list[float], bound: float) -> list[bool]:
    order = sorted(range(len(entropy)), key=entropy.__getitem__)
    accepted = [False] * len(entropy)
    total = 0.0
    for position in order:
        if total > bound:
            break
        accepted[position] = True
        total += entropy[position]
    return accepted


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=12), st.sampled_from([0.1, 0.5, 1.25, 9]))
def test_acceptance_equals_a_plain_loop(entropy, bound):
    got = sampler.accept_by_entropy(torch.tensor([entropy]), bound)[0].tolist()
    expected = naive_accept(entropy, bound)
    assert sum(got) == sum(expected)
    assert max(e for e, k in zip(entropy, got, strict=True) if k) == max(
        e for e, k in zip(entropy, expected, strict=True) if k
    )


def test_temperature_falls_linearly_and_stays_above_t_min():
    cfg = SamplerConfig()
    assert float(sampler.temperature(0, cfg)) == pytest.approx(0.8)
    assert float(sampler.temperature(47, cfg)) == pytest.approx(0.4 + 0.4 / 48)


def certain(tokens: list[int], sharpness: float = 40.0) -> torch.Tensor:
    logits = torch.zeros(1, len(tokens), VOCAB)
    return logits.scatter(-1, torch.tensor([tokens])[..., None], sharpness)


def settle_steps(argmaxes: list[list[int]], sharpness: float = 40.0, **changes: object) -> tuple[int, bool]:
    """Steps until a loop with these argmax canvases stops, and whether it settled."""
    cfg = SamplerConfig(canvas_length=3, max_steps=len(argmaxes), **changes)
    draws = rng.draws([0], 0)
    state = sampler.start(draws.noise(0, 3, VOCAB))
    while not sampler.is_finished(state, cfg):
        state, _ = sampler.step(certain(argmaxes[state.step], sharpness), state, cfg, draws)
    return state.step, bool(state.settled_B[0])


A = [7, 8, 9]
B = [7, 8, 10]


def test_stable_means_that_the_argmax_is_unchanged_for_stability_threshold_steps():
    assert settle_steps([A, A, A, A]) == (2, True)
    assert settle_steps([A, B, B, B]) == (3, True)
    assert settle_steps([A, B, A, B]) == (4, False)
    assert settle_steps([A, A, A, A], stability_threshold=0) == (1, True)
    assert settle_steps([A, A, B, B, B, B], stability_threshold=2) == (5, True)


def test_confident_is_strictly_below_the_threshold():
    assert settle_steps([A, A], sharpness=0.5) == (2, False)
    cfg = SamplerConfig(canvas_length=3)
    draws = rng.draws([0], 0)
    state, _ = sampler.step(certain(A, 5.0), sampler.start(draws.noise(0, 3, VOCAB)), cfg, draws)
    mean = float(state.entropy_BC.mean())
    for threshold, settled in ((mean * 1.001, True), (mean, False)):
        now = cfg.changed(confidence_threshold=threshold, stability_threshold=0)
        state, _ = sampler.step(certain(A, 5.0), sampler.start(draws.noise(0, 3, VOCAB)), now, draws)
        assert bool(state.settled_B) == settled


def test_pinned_positions_do_not_count_in_the_mean_entropy():
    """Two of three positions are pinned: the entropy of the third decides, not its mean with two zeros."""
    constraints = build_canvas_constraints([Constraints(pins={0: 7, 1: 8})], 0, 3, VOCAB, (), "cpu")
    draws = rng.draws([0], 0)
    logits = certain(A, 5.0)
    start = sampler.start(draws.noise(0, 3, VOCAB), constraints)
    own = float(sampler.step(logits, start, SamplerConfig(canvas_length=3), draws, constraints)[0].entropy_BC[0, 2])
    for threshold, settled in ((own * 1.01, True), (own * 0.99, False)):
        cfg = SamplerConfig(canvas_length=3, stability_threshold=0, confidence_threshold=threshold)
        state, _ = sampler.step(logits, start, cfg, draws, constraints)
        assert bool(state.settled_B) == settled


def test_commit_takes_the_argmax_not_the_sample():
    cfg = SamplerConfig(canvas_length=4, max_steps=1, entropy_bound=1e-9)
    draws = rng.draws([3], 0)
    logits = torch.randn(1, 4, VOCAB, generator=torch.Generator().manual_seed(0))
    state, _ = sampler.step(logits, sampler.start(draws.noise(0, 4, VOCAB)), cfg, draws)
    assert int(state.accepted_BC.sum()) == 1
    assert sampler.commit(state, cfg.changed(eos_token_ids=()))[0].tolist() == logits.argmax(-1).tolist()


def test_self_conditioning_takes_the_logits_after_temperature():
    cfg = SamplerConfig(canvas_length=4, max_steps=4, t_min=0.2, t_max=1.0)
    draws = rng.draws([3], 0)
    logits = torch.randn(1, 4, VOCAB)
    state, shaped = sampler.step(logits, sampler.start(draws.noise(0, 4, VOCAB)), cfg, draws)
    assert torch.equal(shaped, logits)
    _, shaped = sampler.step(logits, state, cfg, draws)
    assert torch.allclose(shaped, logits / 0.8)


def test_quota_shares_the_open_positions_over_the_steps_left():
    cfg = SamplerConfig(canvas_length=10, max_steps=4, entropy_bound=1e-9, quota=True)
    draws = rng.draws([0], 0)
    counts = []
    state = sampler.start(draws.noise(0, 10, VOCAB))
    while not sampler.is_finished(state, cfg):
        state, _ = sampler.step(torch.randn(1, 10, VOCAB), state, cfg, draws)
        counts.append(int(state.accepted_BC.sum()))
    assert counts == [3, 6, 8, 10]


def test_a_row_that_ended_before_is_skipped():
    state = sampler.start(torch.tensor([[1, 2]]), None, torch.tensor([True]))
    assert math.isinf(state.entropy_BC[0, 0])
    assert sampler.is_finished(state, SamplerConfig())
    ids, lengths, ended = sampler.commit(state, SamplerConfig(pad_token_id=4))
    assert lengths.tolist() == [0]
    assert ids.tolist() == [[4, 4]]
    assert bool(ended)
