"""MixedRunner in Triton's interpreter: requests with and without adapters in one batch equal the story, each alone."""

from dataclasses import replace

import pytest
import tiny
import torch
from interpreted import DEVICE
from test_cuda_graph_runner import CFG, SMALL

from redraft.config import EngineConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import generate
from redraft.diffusion.verified import generate_verified
from redraft.engine import AdaptedEngine, Engine
from redraft.engine.mixed_runner import MixedRunner
from redraft.engine.runner import Runner
from redraft.kernels import backend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, where an exponential overflows
EXACT = replace(CFG, check="exact", max_new_tokens=3, draft_length=1, temperature=1.0)


@pytest.fixture(scope="module")
def model():
    return tiny.decided(replace(SMALL, draft_head_size=8), 3).to(DEVICE)


@pytest.fixture(scope="module")
def adapters(model):
    return [tiny.trained(model.config, seed=seed, alpha=2.0, rank=2).to(DEVICE) for seed in (1, 2)]


@pytest.fixture
def engine(model, monkeypatch):
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    return Engine(model, EngineConfig(max_running=8, prefill_chunk=8))


def check_batch(engine, jobs):
    """Runs (prompt, cfg, adapter, constraints) together and compares each with the specification."""
    requests = [
        AdaptedEngine(engine, adapter).add(prompt, cfg, seed=seed, constraints=constraints)
        for seed, (prompt, cfg, adapter, constraints) in enumerate(jobs)
    ]
    found = engine.run(requests)
    for seed, (request, (prompt, cfg, adapter, constraints)) in enumerate(zip(requests, jobs, strict=True)):
        if cfg.check == "off":
            given = [constraints or Constraints()]
            *_, expected = generate(engine.model, [prompt], cfg, seeds=[seed], constraints=given, adapter=adapter)
        else:
            options = {"seed": seed, "constraints": constraints, "adapter": adapter}
            *_, expected = generate_verified(engine.model, prompt, cfg, **options)
        assert torch.equal(found[request].ids_BT, expected.ids_BT), (cfg.check, seed)


@pytest.mark.soak
def test_a_batch_of_base_and_adapted_requests_equals_each_alone(engine, adapters):
    first, second = adapters
    assert type(engine.runner) is MixedRunner
    assert type(engine.runner.reference) is Runner
    prompts = [[2, 3, 4, 5], [6, 7], list(range(2, 21))]
    pinned = Constraints(pins={1: 40})
    jobs = [
        (prompts[0], CFG, None, None),
        (prompts[0], CFG, first, None),
        (prompts[1], CFG, second, None),
        (prompts[2], CFG, first, None),
        (prompts[1], CFG, None, pinned),
        (prompts[1], CFG, second, pinned),
    ]
    check_batch(engine, jobs)
    assert not engine.runner.pending_encodes


@pytest.mark.soak
def test_rounds_of_base_and_adapted_requests_equal_each_alone(engine, adapters):
    first, second = adapters
    checked = replace(EXACT, check="checked", tolerance=0.3, draft_steps=1, max_new_tokens=6)
    jobs = [
        ([2, 3, 4], EXACT, None, None),
        ([2, 3, 4], EXACT, first, None),
        ([9, 10], checked, second, None),
        ([9, 10], checked, None, None),
        ([9, 10], CFG, second, None),
    ]
    check_batch(engine, jobs)
