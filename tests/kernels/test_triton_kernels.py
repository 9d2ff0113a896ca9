"""Every Triton kernel equals its reference: odd lengths, one row, masked tails, experts without tokens or with all of them.

Without a GPU the kernels run in Triton's interpreter.
"""

import json
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from interpreted import DEVICE, GPU

from redraft.config import SamplerConfig
from redraft.constraints.constraints import Constraints, forward_backward_viterbi_on_gpu
from redraft.constraints.errors import PatternError
from redraft.constraints.token_automaton import AutomatonCompiler
from redraft.diffusion import rng, sampler
from redraft.kernels import Prediction, apply_rope, attend, gated_experts, rms_norm, rope_frequencies, rope_table
from redraft.kernels import fp8 as reference_fp8
from redraft.kernels import vocabulary as reference_vocabulary
from redraft.kernels.backend import SIMULATED_CARD
from redraft.kernels.triton import (
    attention,
    attention_wide,
    experts,
    fp8,
    mlp,
    norm,
    qkv_rope,
    routing,
    sampler_step,
    token_automaton,
    vocabulary,
)
from redraft.kernels.triton.tiles import Tiles
from redraft.model import masks

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns when an exponential overflows


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def is_close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> bool:
    return torch.allclose(actual, expected, atol=atol, rtol=1e-4)


@pytest.mark.parametrize(("tokens", "number", "chosen"), [(13, 10, 3), (1, 4, 1), (70, 5, 5), (3, 40, 2)])
def test_routing_selects_the_top_experts_and_sorts_by_expert(tokens, number, chosen):
    x, weight, scale = randn(tokens, 300), randn(number, 300, seed=2) * 0.05, randn(number, seed=1).abs()
    experts_NK, weights = routing.route(x, weight, scale, chosen)
    top_probs, top_experts = F.linear(x, weight).softmax(dim=-1).topk(chosen)
    assert torch.equal(experts_NK.long(), top_experts)
    assert is_close(weights, top_probs / top_probs.sum(dim=-1, keepdim=True) * scale[top_experts])
    order, ends = routing.sort_by_expert(experts_NK, number)
    by_expert, expected = experts_NK.flatten().sort(stable=True)
    assert torch.equal(order.long(), expected)
    assert torch.equal(ends.long(), torch.searchsorted(by_expert, torch.arange(number, device=DEVICE), right=True))


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("case", ["spread", "one token", "all to one", "more than a tile", "a tile and a rest"])
def test_experts_equal_the_reference(is_fp8, case, monkeypatch):
    if case == "a tile and a rest":  # experts with one tile, with a part of it, with a tile and some more, and with two
        tiles = Tiles(32, 32, 32, 2, 4, rest=16)
        monkeypatch.setattr(experts, "select_tiles", lambda *arguments: (tiles, tiles))
    tokens = {"one token": 1, "more than a tile": 150, "a tile and a rest": 80}.get(case, 21)
    size, inner, number = (48, 32, 6) if is_fp8 else (40, 24, 6)
    x = randn(tokens, size)
    experts_NK = torch.stack([torch.randperm(number, generator=torch.Generator().manual_seed(n))[:2] for n in range(tokens)])
    if case == "a tile and a rest":  # of the first column, 7, 25, 48 tokens
        experts_NK = torch.stack([torch.tensor([0] * 7 + [1] * 25 + [2] * 48), torch.tensor([3] * 30 + [4] * 50)], dim=1)
    if case == "all to one":
        experts_NK = torch.tensor([[5, 0]]).repeat(tokens, 1)
    weights, up, down = randn(tokens, 2).abs(), randn(number, 2 * inner, size, seed=1), randn(number, size, inner, seed=2)
    experts_NK = experts_NK.to(DEVICE)
    if is_fp8:
        up = reference_fp8.quantize(up)
        down = reference_fp8.quantize(down)
        if not GPU:  # the interpreter rounds to fp8 differently
            monkeypatch.setattr(experts, "quantize_rows", reference_fp8.quantize)
    actual = experts.gated_experts(x, experts_NK.int(), weights, up, down).sum(dim=1)
    expected = gated_experts(x, experts_NK, weights, up, down)
    assert (actual - expected).abs().max() <= (4e-2 if is_fp8 and GPU else 1e-5) * expected.abs().max()


@pytest.mark.skipif(not GPU, reason="the interpreter rounds to fp8 differently")
def test_rows_are_quantized_as_in_the_reference():
    x = randn(5, 300).bfloat16()
    mine, theirs = fp8.quantize_rows(x), reference_fp8.quantize(x)
    assert torch.equal(mine.scale, theirs.scale)
    assert (mine.qdata.float() != theirs.qdata.float()).float().mean() < 1e-3  # a tie may go either way


@pytest.mark.parametrize("has_values", [True, False])
@pytest.mark.parametrize("size", [8, 24])
def test_qkv_is_split_normed_and_rotated(has_values, size):
    tokens, number, groups = 5, 4, 2
    product = randn(tokens, (number + (2 if has_values else 1) * groups) * size)
    q_weight, k_weight = randn(size, seed=1), randn(size, seed=2)
    positions = torch.arange(1000, 1000 + tokens, device=DEVICE)
    frequencies = rope_frequencies(size, 10_000.0, 0.5, DEVICE)
    q, k, v = qkv_rope.split_qkv_rope(product, q_weight, k_weight, positions, frequencies, number, groups, 1e-6)
    rope = rope_table(positions[None], size, 10_000.0, 0.5, torch.float32)
    parts = product.view(1, tokens, -1, size)
    assert is_close(q, apply_rope(rms_norm(parts[:, :, :number], q_weight, 1e-6), *rope)[0])
    assert is_close(k, apply_rope(rms_norm(parts[:, :, number : number + groups], k_weight, 1e-6), *rope)[0])
    assert is_close(v, rms_norm(parts[:, :, -groups:], None, 1e-6)[0])


def test_residuals_and_norms_equal_the_reference():
    x, answer, dense, experts_NKD = randn(7, 40), randn(7, 40, seed=1), randn(7, 40, seed=2), randn(7, 3, 40, seed=3)
    w = [randn(40, seed=seed) for seed in range(4, 9)]
    actual = norm.add_attention_and_norm(x, answer, *w[:4], 1e-6)
    residual = x + rms_norm(answer, w[0], 1e-6)
    router_in = rms_norm(residual, None, 1e-6) * w[3] * 40**-0.5
    expected = (residual, rms_norm(residual, w[1], 1e-6), rms_norm(residual, w[2], 1e-6), router_in)
    assert all(is_close(*tensors) for tensors in zip(actual, expected, strict=True))
    scalars = [torch.tensor([value], device=DEVICE) for value in (0.7, 1.3)]
    mine, following = norm.add_mlp_and_norm(x, dense, experts_NKD, tuple(w[:3]), scalars, 4, w[3], 1e-6)
    both = rms_norm(dense, w[0], 1e-6) + rms_norm(experts_NKD.sum(dim=1), w[1], 1e-6)
    theirs = (x + rms_norm(both, w[2], 1e-6)) * torch.tensor([0.7] * 4 + [1.3] * 3, device=DEVICE)[:, None]
    assert is_close(mine, theirs)
    assert is_close(following, rms_norm(theirs, w[3], 1e-6))
    _, next_fp8 = norm.add_mlp_and_norm(x, dense, experts_NKD, tuple(w[:3]), scalars, 4, w[3], 1e-6, to_fp8=True)
    _, mlp_fp8, experts_in, _ = norm.add_attention_and_norm(x, answer, *w[:4], 1e-6, mlp_to_fp8=True)
    assert torch.equal(experts_in, actual[2])
    mlp_in, experts_fp8 = norm.add_attention_and_norm(x, answer, *w[:4], 1e-6, experts_to_fp8=True)[1:3]
    assert torch.equal(mlp_in, actual[1])
    for mine, theirs in ((next_fp8, following), (mlp_fp8, actual[1]), (experts_fp8, actual[2])):
        assert is_close(mine.scale[:, 0] * 448, theirs.abs().amax(dim=1))
        assert is_close(
            reference_fp8.dequantize(mine), theirs, atol=0.13 * float(theirs.abs().max())
        )  # the interpreter truncates
    assert is_close(norm.rms_norm(x, None, 1e-6), rms_norm(x, None, 1e-6))
    assert is_close(norm.rms_norm(x, w[0], 1e-6), rms_norm(x, w[0], 1e-6))
    gate, up = answer.chunk(2, dim=-1)
    assert is_close(mlp.gelu_and_mul(answer), F.gelu(gate, approximate="tanh") * up)


def cached(lengths, groups: int, size: int, window: int | None, counts=(99, 99)):
    """Returns ring buffers with NaN in empty slots, and the keys and values in order."""
    rings, ordered = [], []
    for row, length in enumerate(lengths):
        slots = length + 2 if window is None else min(length + 2, window + 1)
        pair = [randn(length, groups, size, seed=10 * row + part) for part in range(2)]
        held = torch.arange(max(0, length - slots), length, device=DEVICE)
        ring = [torch.full((slots, groups, size), float("nan"), device=DEVICE) for _ in pair]
        for target, values in zip(ring, pair, strict=True):
            target[held % slots] = values[held]
        rings.append(ring)
        ordered.append(pair)
    base = torch.zeros(16, device=DEVICE)
    places = torch.tensor([[ring[part].data_ptr() - base.data_ptr() for ring in rings] for part in range(2)], device=DEVICE)
    columns = [base, *(places // base.element_size())]
    sizes = torch.tensor([len(ring[0]) for ring in rings], dtype=torch.int32, device=DEVICE)
    numbers = [torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in (lengths, counts)]
    past = attention.KVLocations(*columns, sizes, *numbers)
    return past, rings, ordered


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize(
    ("new", "lengths", "size", "splits"),
    [(5, (9, 0), 16, 1), (33, (3, 40), 24, 4), (1, (70, 2), 16, 2)],
)
def test_attention_over_caches_in_place(causal, window, new, lengths, size, splits):
    groups = 2
    past, _rings, ordered = cached(lengths, groups, size, window)
    q, k, v = randn(2, new, 4, size, seed=5), randn(2, new, groups, size, seed=6), randn(2, new, groups, size, seed=7)
    mine = attention.attend(q, k, v, past, window=window, causal=causal, splits=splits)
    for row, (length, (keys, values)) in enumerate(zip(lengths, ordered, strict=True)):
        positions = torch.arange(length + new, device=DEVICE)[None]
        if causal:
            mask = masks.causal(positions[:, length:], positions, window)
        else:
            mask = masks.canvas(torch.tensor([length], device=DEVICE), positions[:, :length], new, window)
        both = [torch.cat([old, fresh[row]])[None] for old, fresh in ((keys, k), (values, v))]
        assert is_close(mine[row : row + 1], attend(q[row : row + 1], *both, mask))


SMALL_WIDE = attention_wide.WideTiles(rows=16, keys=32, inner=16, columns=32, stages=2, warps=4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("new", "lengths", "max_weights"),
    [
        (5, (9, 0), 2**20),
        (21, (3, 70), 2**20),
        (9, (3, 70), 1024),
        (1, (70, 2), 128),
    ],
)
def test_attention_of_wide_heads_equals_the_reference(causal, new, lengths, max_weights, monkeypatch):
    """Whole, in slices of the tokens, and in splits of the keys, all at once and one after another."""
    monkeypatch.setattr(attention_wide, "PROGRAMS", 1 if new == 21 else 8)
    monkeypatch.setattr(attention_wide, "MIN_SLICE", 6)
    monkeypatch.setattr(attention_wide, "MIN_SPLIT_BLOCKS", 1 if new == 5 else 16)
    monkeypatch.setattr(attention_wide, "MAX_KEY_TILES", 2)
    groups, size = 2, 32
    past, _rings, ordered = cached(lengths, groups, size, None)
    q, k, v = randn(2, new, 4, size, seed=5), randn(2, new, groups, size, seed=6), randn(2, new, groups, size, seed=7)
    mine = attention_wide.attend_wide(
        q, k, v, past, causal=causal, context=max(lengths) + 60, tiles=SMALL_WIDE, max_weights=max_weights
    )
    for row, (length, (keys, values)) in enumerate(zip(lengths, ordered, strict=True)):
        positions = torch.arange(length + new, device=DEVICE)[None]
        if causal:
            mask = masks.causal(positions[:, length:], positions, None)
        else:
            mask = masks.canvas(torch.tensor([length], device=DEVICE), positions[:, :length], new, None)
        both = [torch.cat([old, fresh[row]])[None] for old, fresh in ((keys, k), (values, v))]
        assert is_close(mine[row : row + 1], attend(q[row : row + 1], *both, mask))


@pytest.mark.parametrize("counts", [(99, 99), (7, 1), (0, 2)])
def test_new_keys_and_values_are_written_to_their_slots(counts):
    """Of the first `counts` tokens a ring stores the last that fit. Every other slot stays unchanged."""
    past, rings, _ = cached((9, 0), 2, 16, 4, counts)
    expected = [[part.clone() for part in ring] for ring in rings]
    k, v = randn(2, 7, 2, 16, seed=6), randn(2, 7, 2, 16, seed=7)
    attention.write_kv(k, v, past)
    for row, (length, ring, before) in enumerate(zip((9, 0), rings, expected, strict=True)):
        slots, count = len(ring[0]), min(counts[row], 7)
        for token in range(max(0, count - slots), count):
            before[0][(length + token) % slots], before[1][(length + token) % slots] = k[row, token], v[row, token]
        for mine, theirs in zip(ring, before, strict=True):
            assert torch.equal(mine.nan_to_num(77.0), theirs.nan_to_num(77.0))


@pytest.mark.parametrize("vocab", [112, 300, 9000])
def test_vocabulary_kernels_equal_the_reference(vocab):
    raw, embedding = randn(12, vocab) * 20, randn(vocab, 16, seed=1)
    generator = torch.Generator().manual_seed(2)
    temperature, uniform = (
        torch.rand(12, generator=generator) * 0.6 + 0.4,
        torch.rand(12, generator=generator, dtype=torch.float64),
    )
    temperature, uniform = temperature.to(DEVICE), uniform.to(DEVICE)
    uniform[0], uniform[1] = 0.0, 1 - 2**-53
    shaped = reference_vocabulary.softcap_(raw.clone(), 30.0) / temperature[:, None]
    theirs = reference_vocabulary.argmax_entropy_sample(shaped[:, None], uniform[:, None])
    mine = vocabulary.argmax_entropy_sample(raw, 30.0, temperature, uniform)
    assert torch.equal(mine.best_N, theirs.best_BC[:, 0])
    assert torch.equal(mine.sampled_N, theirs.sampled_BC[:, 0])
    assert is_close(mine.entropy_N, theirs.entropy_BC[:, 0])
    for count in (1, 5, 20):
        found = vocabulary.find_top_probs(raw, 30.0, temperature, mine, mine.sampled_N, count)
        expected = reference_vocabulary.compute_top_probs(shaped[:, None], theirs.sampled_BC, theirs.best_BC, count)
        assert torch.equal(found.ids_BCK, expected.ids_BCK[:, 0])
        for name in ("own_BC", "draft_BC", "probs_BCK"):
            assert is_close(getattr(found, name), getattr(expected, name)[:, 0])
    soft = vocabulary.compute_probs_(raw, 30.0, temperature, mine) @ embedding
    assert is_close(soft, reference_vocabulary.soft_embed(shaped[:, None], embedding)[:, 0], atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quota": True},
        {"accept_at_end": True},
        {"spread": 3},
        {"stops_last": True},
        {"quota": True, "spread": 5, "stops_last": True},
    ],
    ids="+".join,
)
def test_canvas_steps_equal_the_sampler(settings):
    assert (sampler_step.SURE, sampler_step.BEHIND) == (sampler.SURE, sampler.BEHIND)
    rows, length, vocab, steps = 3, 21, 1000, 7
    stops = tuple(range(0, 1000, 70))
    cfg = SamplerConfig(
        canvas_length=length, max_steps=steps, entropy_bound=0.8, confidence_threshold=0.25, eos_token_ids=stops, **settings
    )
    seeds = [5, -3, 2**63 + 11]
    blocks = [0, 2, 1]
    draws = [rng.draws([seed], block, DEVICE) for seed, block in zip(seeds, blocks, strict=True)]
    mine = sampler_step.CanvasBatch.empty(rows, length, steps, DEVICE)
    states = [sampler.start(draw.noise(0, length, vocab)) for draw in draws]
    mine.seeds_B.copy_(torch.cat([draw.seeds_B for draw in draws]))
    mine.blocks_B.copy_(torch.tensor(blocks))
    for name, value in (("limit", steps), ("bound", 0.8), ("confidence", 0.25), ("stability", 1), ("settled", False)):
        getattr(mine, f"{name}_B").fill_(value)
    small = (cfg.quota, cfg.accept_at_end, cfg.spread, cfg.stops_last)
    for name, value in zip(("quota", "at_end", "spread", "last"), small, strict=True):
        getattr(mine, f"{name}_B").fill_(value)
    mine.stops_BE[:, : len(stops)] = torch.tensor(stops)
    mine.temperatures_BS.copy_(torch.stack([sampler.temperature(step, cfg) for step in range(steps)]))
    stable = torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(9)).to(DEVICE)
    for step in range(steps):
        uniform, noise, temperature = sampler_step.draw_step_inputs(mine, vocab)
        generator = torch.Generator().manual_seed(step)
        best = torch.randint(vocab, (rows, length), generator=generator).to(DEVICE)
        best[0] = stable  # the first row settles at its second step
        best[2, ::3] = torch.where(mine.accepted_BC[2, ::3], mine.ids_BC[2, ::3], best[2, ::3])  # some are confirmed
        entropy = (torch.rand(rows, length, generator=generator) * 0.4).to(DEVICE)
        sampled = torch.randint(vocab, (rows, length), generator=generator).to(DEVICE)
        sampler_step.step_canvases_(mine, best, entropy, sampled, noise)
        for row, (draw, state) in enumerate(zip(draws, states, strict=True)):
            if not state.settled_B[0]:
                assert torch.equal(uniform[row], draw.uniform(step + 1, length)[0])
                assert torch.equal(noise[row], draw.noise(step + 1, length, vocab)[0])
                assert (temperature[row] == sampler.temperature(step, cfg)).all()
                prediction = Prediction(*(tensor[row : row + 1] for tensor in (best, entropy, sampled)))
                accepted = sampler.select_accepted(prediction, state, cfg)
                done, unchanged = sampler.settled(prediction, state, cfg, None)
                ids = torch.where(accepted, prediction.sampled_BC, noise[row : row + 1])
                states[row] = replace(
                    state,
                    ids_BC=ids,
                    best_BC=prediction.best_BC,
                    entropy_BC=prediction.entropy_BC,
                    accepted_BC=accepted,
                    unchanged_B=unchanged,
                    steps_B=state.steps_B + 1,
                    settled_B=done,
                    step=step + 1,
                )
            state = states[row]
            for name in ("ids_BC", "best_BC", "accepted_BC", "unchanged_B", "steps_B", "settled_B"):
                assert torch.equal(getattr(mine, name)[row], getattr(state, name)[0].to(getattr(mine, name).dtype)), name
    assert [bool(state.settled_B[0]) for state in states] == [True, False, False]


FP8_KERNELS = {"_quantize_rows"}  # launched where the card has fp8 only
WIDE_KERNELS = {"_score_tiles", "_sum_values"}  # launched where the card has large tiles only
# Bytes. The tiles for heads of 512, and those for the experts of eight canvases, were chosen on an H200 by time.
SPILLS = {(90, "_attend"): 56, (90, "_gate_up"): 88, (90, "_down"): 80}
BINARIES = (89, 90, 120)


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="Triton comes with its compiler on Linux")
@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120])
def test_every_kernel_compiles_with_the_tiles_of_a_card(architecture, tmp_path, request):
    """Needs no GPU. The compiler checks types, shapes and shared memory, which the interpreter does not, and counts spills.

    Compiled kernels stay in pytest's cache, keyed by their source: a second run compiles only the kernels that changed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cache = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    environment["TRITON_CACHE_DIR"] = str(cache.mkdir("triton") if cache is not None else tmp_path)
    command = [sys.executable, str(Path(__file__).parents[1] / "compiled.py"), str(architecture)]
    command += ["--binaries"] if architecture in BINARIES else []
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    compiled = [json.loads(line) for line in run.stdout.splitlines()]
    source = "".join(path.read_text() for path in Path(experts.__file__).parent.glob("*.py"))
    written = set(re.findall(r"@triton\.jit\ndef (_\w+)", source))
    launched = written & set(re.findall(r"\b(_\w+)\[[(g]", source))  # the others are called by these
    assert len(launched) > 20
    others = FP8_KERNELS if architecture < 89 else set()
    if architecture not in (90, 100):
        others = others | WIDE_KERNELS
    assert {kernel["name"] for kernel in compiled} == launched - others
    limit = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}[architecture]
    assert all(kernel["shared"] <= limit * 1024 for kernel in compiled)
    for kernel in compiled:
        assert kernel["spilled"] <= SPILLS.get((architecture, kernel["name"]), 0), kernel


def test_keys_are_split_when_there_are_many_keys_and_few_tokens():
    few = torch.empty(1, 256, 16, 512)
    many = torch.empty(8, 256, 16, 512)
    most = attention.select_tiles(512, 256, SIMULATED_CARD, 4).concurrent
    assert attention.choose_num_splits(few, 100) == 1
    assert attention.choose_num_splits(few, 100_000) == most > 1
    assert attention.choose_num_splits(many, 100_000) == 1


@pytest.mark.parametrize("seed", range(12))
def test_token_automaton_equals_the_reference(seed, monkeypatch):
    """Equal marginals and most probable text, with peaked logits, tiny probabilities, forbidden tokens and small tiles."""
    monkeypatch.setattr(token_automaton, "BLOCK_PAIRS", 16)
    monkeypatch.setattr(token_automaton, "BLOCK_STATES", 4)
    dice = random.Random(seed)
    token_bytes = [None, b"", *(bytes(dice.choices(b"ab1", k=dice.randint(1, 3))) for _ in range(60)), b"a", b"b", b"1"]
    pattern = dice.choice(["(a|b1)*", "a{2,5}1?", "[ab]+1[ab]*", "(a1|b)(b|1){3,}", "1*", "a|b|ab1"])
    automaton = AutomatonCompiler(token_bytes, (1,)).compile(pattern)
    canvas = Constraints(automaton=automaton).canvas_automaton(automaton.start, 0, 7, 7)
    logits = randn(7, len(token_bytes), seed=seed) * dice.choice([1.0, 30.0, 400.0])
    logits[:, dice.randrange(2, 40)] = -1e9
    weights, ids = canvas.forward_backward_viterbi(logits[: canvas.room].cpu().numpy())
    mine, best = forward_backward_viterbi_on_gpu(logits[: canvas.room], canvas)
    expected = torch.from_numpy(weights)[:, automaton.classes_V].to(DEVICE)
    probs = [
        (logits[: canvas.room].double() + weights.double().clamp(min=-1e9)).softmax(dim=-1) for weights in (mine, expected)
    ]
    assert is_close(*probs, atol=1e-6)
    assert torch.equal(mine.isfinite(), expected.isfinite())
    assert best.tolist() == ids.tolist()


def test_a_pattern_that_cannot_match_raises_on_a_gpu_too():
    automaton = AutomatonCompiler([None, b"", b"a", b"b"], (1,)).compile("a*")
    canvas = Constraints(automaton=automaton).canvas_automaton(automaton.start, 0, 3, 3)
    with pytest.raises(PatternError, match="no text of this length can match"):
        forward_backward_viterbi_on_gpu(torch.tensor([[-1e9, -1e9, -1e9, 0.0]] * 3, device=DEVICE), canvas)
