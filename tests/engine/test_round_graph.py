"""Rounds of checked and exact mode on the kernels, in Triton's interpreter: the same tokens as `generate_verified`."""

from dataclasses import replace

import pytest
import tiny
import torch
from interpreted import DEVICE
from test_cuda_graph_runner import CFG, SMALL

from redraft.config import EngineConfig, SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion import pick, rng
from redraft.diffusion.verified import generate_verified
from redraft.engine.cache_table import CacheTable
from redraft.engine.cuda_graph_runner import CudaGraphRunner
from redraft.engine.engine import Engine
from redraft.engine.round_graph import uses_round_graph
from redraft.engine.runner import verification_of
from redraft.kernels import backend
from redraft.kernels.triton import pick as triton_pick
from redraft.kernels.triton.pick import pick_gumbel

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, where an exponential overflows
EXACT = replace(CFG, check="exact", max_new_tokens=4, draft_length=1, temperature=1.0)


@pytest.fixture(scope="module")
def model():
    """Its probabilities are nearly even, so drafts are accepted now and then."""
    flat = tiny.build(replace(SMALL, draft_head_size=8), 3).to(DEVICE)
    flat.embed_tokens.weight.data *= 0.1
    return flat


@pytest.fixture
def engine(model, monkeypatch):
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    return Engine(model, EngineConfig(max_running=4, prefill_chunk=8))


@pytest.mark.soak
def test_rounds_equal_those_of_the_story(engine, model):
    """Exact, checked and autoregressive requests, with blanks and with noise; the last two need the reference's picks."""
    asked = [
        ([2, 3, 4, 5, 6, 7, 8], replace(EXACT, draft_length=2), 1, Constraints()),
        ([9, 10], replace(EXACT, draft_token=0, temperature=0.5), 2, Constraints()),
        ([9, 10, 11], replace(EXACT, draft_length=0), 3, Constraints()),
        ([12], replace(EXACT, check="checked", tolerance=0.3, draft_steps=1), 4, Constraints()),
        ([13, 14], replace(EXACT, top_k=9), 5, Constraints()),
        ([13, 14], replace(EXACT, temperature=0.0), 6, Constraints(pins={1: 40})),
    ]
    assert isinstance(engine.runner, CudaGraphRunner)
    requests = [engine.add(prompt, cfg, seed=seed, constraints=constraints) for prompt, cfg, seed, constraints in asked]
    assert [uses_round_graph(verification_of(request)) for request in requests] == [True, True, True, True, False, False]
    found = engine.run(requests)
    for request, (prompt, cfg, seed, constraints) in zip(requests, asked, strict=True):
        *_, expected = generate_verified(model, prompt, cfg, seed=seed, constraints=constraints)
        assert torch.equal(found[request].ids_BT, expected.ids_BT)
        ours, theirs = found[request].stats[0], expected.stats[0]
        assert (ours.rounds, ours.steps, ours.drafted, ours.accepted, ours.corrected) == (
            theirs.rounds, theirs.steps, theirs.drafted, theirs.accepted, theirs.corrected,
        )  # fmt: skip
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
    assert sum(found[request].stats[0].accepted for request in requests) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
@pytest.mark.parametrize(("vocab_size", "programs"), [(100, 256), (9000, 256), (9000, 1)])
def test_picks_equal_the_reference(vocab_size, programs, temperature, monkeypatch):
    """In small parts of the vocabulary, as for few rows, and in large ones."""
    monkeypatch.setattr(triton_pick, "PROGRAMS", programs)
    logits_NV = (torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0)) * 4).to(DEVICE)
    seeds_N = torch.tensor([1, -5, rng.wrap_seed(2**63 + 5), 7], device=DEVICE)
    positions_N = torch.tensor([0, 1, 50_000, 3], device=DEVICE)
    temperature_N = torch.full((4,), temperature, dtype=torch.float64, device=DEVICE)
    expected = pick.pick_tokens(logits_NV, SamplerConfig(temperature=temperature), seeds_N, positions_N)
    assert torch.equal(pick_gumbel(logits_NV, temperature_N, seeds_N, positions_N), expected)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_ranks_are_those_of_the_reference_sums(temperature):
    """Two requests of two rows each."""
    logits_NV = (torch.randn(4, 2500, generator=torch.Generator().manual_seed(0)) * 4).to(DEVICE)
    seeds_B, positions_B = torch.tensor([1, -5], device=DEVICE), torch.tensor([50_000, 3], device=DEVICE)
    temperature_B = torch.full((2,), temperature, dtype=torch.float64, device=DEVICE)
    sums_NV = logits_NV.double()
    if temperature:
        noise_BV = rng.gumbel(seeds_B, positions_B, 2500)
        sums_NV = sums_NV / temperature + noise_BV.repeat_interleave(2, dim=0)
    expected = sums_NV.topk(5, dim=1).indices
    assert torch.equal(triton_pick.rank_gumbel(logits_NV, temperature_B, seeds_B, positions_B, 5), expected)


def test_picks_take_expanded_tensors():
    """One seed for all rows is a tensor with stride 0."""
    logits_NV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    seeds_N = torch.tensor([[9, 8]], device=DEVICE)[:, :1].expand(1, 3).flatten()
    positions_N = torch.arange(3, device=DEVICE)
    temperature_N = torch.ones(1, 1, dtype=torch.float64, device=DEVICE).expand(1, 3).flatten()
    expected = pick.pick_tokens(logits_NV, SamplerConfig(temperature=1.0), seeds_N, positions_N)
    assert torch.equal(pick_gumbel(logits_NV, temperature_N, seeds_N, positions_N), expected)


def test_of_equal_logits_the_lowest_id_is_picked():
    logits_NV = torch.zeros(1, 9000, device=DEVICE)
    zero = torch.zeros(1, device=DEVICE)
    assert int(pick_gumbel(logits_NV, zero.double(), zero.long(), zero.long())) == 0


def test_a_canvas_reads_no_more_slots_than_its_row_has():
    """Rows without a request have one slot; a canvas behind eight tokens of it would read other memory."""
    model = tiny.build(tiny.BASE).to(DEVICE)
    cache = model.new_cache(1, 32)
    cache.advance([7])
    table = CacheTable.empty(model, 2)
    table.fill([cache], [2])
    canvas_table = CacheTable.empty(model, 2 * 4, table.base)
    canvas_table.behind_each_(table)
    assert canvas_table.lengths_B.tolist() == [6, 7, 7, 7, 0, 0, 0, 0]
