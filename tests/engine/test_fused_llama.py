"""FusedLlama in Triton's interpreter: its layers equal the model's, its rounds give the text of the model alone."""

from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE

from redraft.config import FULL, SLIDING, EngineConfig, LlamaConfig, SamplerConfig
from redraft.diffusion.generate import generate
from redraft.diffusion.verified import generate_verified
from redraft.engine.cache_table import CacheTable
from redraft.engine.cuda_graph_runner import CudaGraphRunner
from redraft.engine.engine import Engine
from redraft.engine.fused_llama import FusedLlama
from redraft.engine.mixed_runner import MixedRunner
from redraft.kernels import backend
from redraft.model.drafter import DrafterConfig, new_drafter
from redraft.model.llama import Llama
from redraft.model.page import PageConfig, new_page_adapter
from redraft.train.own_text import FusedEncoder, OwnTextConfig, OwnTextSampler

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, where an exponential overflows

SMALL = LlamaConfig(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    layer_types=(FULL, FULL),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_ids=(2,),
    has_tied_head=True,
)
CONFIGS = {
    "llama": SMALL,
    "biases": replace(SMALL, has_qkv_bias=True, has_tied_head=False),
    "norms": replace(SMALL, has_qk_norm=True, head_dim=24),
    "windows": replace(SMALL, layer_types=(SLIDING, FULL), sliding_window=4, num_attention_heads=3),
}


def make_model(config: LlamaConfig, drafts: bool = True) -> Llama:
    generator = torch.Generator().manual_seed(0)
    model = Llama(config)
    if drafts:
        cfg = DrafterConfig(rank=2, alpha=4.0, head_size=8, canvas_length=3)
        model.drafter = new_drafter(cfg, config, torch.zeros(config.hidden_size))
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.2 * noise)
    return model.eval().requires_grad_(False).to(DEVICE)


LONG = [(name, drafts) for name in CONFIGS for drafts in (False, True)]
SHORT = [("biases", True), ("norms", False)]


@pytest.mark.parametrize(
    ("name", "drafts"), [pytest.param(*case, marks=[] if case in SHORT else [pytest.mark.soak]) for case in LONG]
)
def test_the_layers_are_those_of_the_model(name, drafts):
    """Behind a context: clean tokens, and a canvas behind each of them."""
    model = make_model(CONFIGS[name], drafts)
    context = torch.tensor([[1, 5, 9, 30, 21, 7]], device=DEVICE)
    clean = torch.tensor([[11, 12]], device=DEVICE)
    canvas = torch.full((1, 2, 3), CONFIGS[name].vocab_size if drafts else 8, device=DEVICE)
    expected_cache = model.new_cache(1, 16)
    model.encode(context, expected_cache)
    expected = model.joint(clean, canvas, [0, 1], expected_cache)
    fused = FusedLlama(model)
    cache = model.new_cache(1, 16)
    cache.advance([6])
    table = CacheTable.empty(model, 1)
    table.fill([cache], [6])
    fused.encode(context, table, 6)
    cache.advance([2])
    table.fill([cache], [2])
    canvas_table = CacheTable.empty(model, 2, table.base)
    canvas_table.behind_each_(table)
    found = fused.joint(clean, table, canvas, canvas_table, 6)
    assert torch.allclose(found[0].view_as(expected[0]), expected[0], atol=1e-4)
    assert torch.allclose(found[1].view_as(expected[1]), expected[1], atol=1e-4)
    for layer in range(2):
        for mine, theirs in zip(cache.view(layer), expected_cache.view(layer), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("name", CONFIGS)
def test_rounds_write_the_text_of_the_model_alone(name, monkeypatch):
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    config = CONFIGS[name]
    model = make_model(config)
    alone = make_model(config, drafts=False)
    engine = Engine(model, EngineConfig(max_running=4, prefill_chunk=4))
    assert isinstance(engine.runner, CudaGraphRunner)
    settings = {"check": "exact", "draft_length": 2, "draft_token": config.vocab_size, "canvas_length": 4}
    cfg = SamplerConfig(max_new_tokens=6, eos_token_ids=(2,), temperature=1.0, **settings)
    prompts = [[1, 5, 9, 30, 21, 7], [1, 8]]
    requests = [engine.add(prompt, cfg, seed=seed) for seed, prompt in enumerate(prompts)]
    found = engine.run(requests)
    for seed, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        *_, expected = generate_verified(alone, prompt, replace(cfg, draft_length=0, draft_token=None), seed=seed)
        assert found[request].ids_BT.tolist() == expected.ids_BT.tolist()
        assert found[request].stats[0].drafted > 0


def test_a_page_adapter_denoises_beside_the_graphs(monkeypatch):
    """What is written left to right runs on the graphs, canvases in the reference forwards; both as the model says."""
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    model = make_model(SMALL, drafts=False)
    model.page = new_page_adapter(PageConfig(rank=2, alpha=4.0, canvas_lengths=(4,)), SMALL)
    for p in model.page.parameters():
        torch.nn.init.normal_(p, std=0.2)
    model.page.to(DEVICE).requires_grad_(False)
    engine = Engine(model, EngineConfig(max_running=4, prefill_chunk=4))
    assert isinstance(engine.runner, MixedRunner)
    canvases = SamplerConfig(canvas_length=4, max_new_tokens=4, max_steps=2, eos_token_ids=(2,))
    written = replace(canvases, check="exact", draft_length=0, max_new_tokens=2)
    prompt = [1, 5, 9]
    requests = [engine.add(prompt, cfg, seed=3) for cfg in (canvases, written)]
    found = engine.run(requests)
    *_, expected = generate(model, [prompt], canvases, seeds=[3])
    assert found[requests[0]].ids_BT.tolist() == expected.ids_BT.tolist()
    *_, expected = generate_verified(model, prompt, written, seed=3)
    assert found[requests[1]].ids_BT.tolist() == expected.ids_BT.tolist()
    assert engine.runner.round_buckets
    assert not engine.runner.step_buckets


def test_own_texts_are_those_of_encode(monkeypatch):
    """The sampler of own texts, whose cache the kernels read and write in place."""
    model = make_model(SMALL, drafts=False)
    settings = OwnTextConfig(rows=3, length=9, longest_beginning=3, most_repeats=9, ended_share=1.0)
    found = []
    for kernels in ("reference", "triton"):
        monkeypatch.setenv(backend.ENV_VARIABLE, kernels)
        sampler = OwnTextSampler(model, settings)
        assert isinstance(sampler.encode, FusedEncoder) == (kernels == "triton")
        torch.manual_seed(0)
        found.append(sampler.sample_rows([[1, 5, 9], [1], [1, 30]], [1.0, 0.5, 1.0]))
    assert found[0] == found[1]
    assert len({tuple(row) for row in found[0]}) == 3
