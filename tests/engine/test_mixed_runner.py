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
from redraft.engine import AdaptedEngine, Engine, RequestStatus
from redraft.engine.mixed_runner import MixedRunner
from redraft.engine.runner import Runner
from redraft.kernels import backend
from redraft.model.vision import ImageSpan

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


def image_prompt() -> tuple[list[int], list[ImageSpan]]:
    """Text, an image that is longer than a chunk and than the window, text of a chunk, an image, a token."""
    features = torch.randn(11, SMALL.hidden_size, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ids = [30, 31, 32, *[7] * 9, *range(41, 50), *[7] * 2, 61]
    return ids, [ImageSpan(3, features[:9]), ImageSpan(21, features[9:])]


def test_image_chunks_give_the_cache_of_the_reference(engine, model):
    """Text goes through the kernels, chunks with an image through the reference. No chunk divides an image."""
    ids, images = image_prompt()
    request = engine.add(ids, CFG, seed=1, images=images)
    with torch.inference_mode():
        cache = model.new_cache(1, request.capacity, engine.config.rewind)
        request.start(cache, [])
        lengths = []
        while request.status is RequestStatus.PREFILLING:
            lengths.append(engine.runner.prefill(request, is_alone=True))
        assert lengths == [3, 9, 8, 4]
        assert not engine.runner.pending_encodes  # a chunk with an image is encoded at once
        expected = model.new_cache(1, len(ids))
        model.encode(torch.tensor([ids], device=DEVICE), expected, images=[images])
        for layer in range(len(model.layers)):
            for mine, theirs in zip(cache.view(layer), expected.view(layer), strict=True):
                assert torch.allclose(mine, theirs, atol=3e-5)


@pytest.mark.soak
def test_images_beside_text_and_adapters_equal_each_alone(engine, adapters):
    ids, images = image_prompt()
    requests = []
    expected = []
    for cfg, adapter in ((CFG, None), (EXACT, None), (CFG, adapters[0])):
        requests.append(AdaptedEngine(engine, adapter).add(ids, cfg, seed=1, images=images))
        if cfg.check == "off":
            *_, end = generate(engine.model, [ids], cfg, seeds=[1], adapter=adapter, images=[images])
        else:
            *_, end = generate_verified(engine.model, ids, cfg, seed=1, images=images)
        expected.append(end)
    requests.append(engine.add([9, 10, 11], CFG, seed=2))
    expected.append(list(generate(engine.model, [[9, 10, 11]], CFG, seeds=[2]))[-1])
    found = engine.run(requests)
    for request, end in zip(requests, expected, strict=True):
        assert torch.equal(found[request].ids_BT, end.ids_BT)
