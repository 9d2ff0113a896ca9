"""Llama and its relatives: ours = transformers in float32, chunked = whole, batched = alone, adapters by half."""

import pytest
import torch
from llama_models import FAMILIES, VOCAB, make_reference, random_ids, save_reference

from redraft import checkpoint
from redraft.config import LlamaConfig, SamplerConfig
from redraft.diffusion.autoregressive import generate_autoregressive
from redraft.engine import Engine
from redraft.engine.make_runner import make_runner
from redraft.engine.runner import Runner
from redraft.kernels.backend import Backend
from redraft.model.architectures import build_model
from redraft.model.backbone import CausalOnlyError
from redraft.model.llama import Llama
from redraft.model.lora import ENCODE, AdapterConfig, adaptable_matrices, new_adapter

TOLERANCE = 2e-5
PROMPT = 40  # more than the windows and the context that llama3's RoPE scales from
NO_STOP = SamplerConfig(temperature=0.0, eos_token_ids=(VOCAB - 1,), check="exact", draft_length=0, max_new_tokens=12)


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request, tmp_path_factory):
    """A model of transformers and ours, loaded from its folder."""
    folder = tmp_path_factory.mktemp("llama")
    reference = save_reference(folder, request.param)
    return reference, checkpoint.load_model(folder)


def logits(model, ids_BS, chunk=None, adapter=None):
    cache = model.new_cache(len(ids_BS), ids_BS.shape[1], adapter=adapter)
    hidden = torch.cat([model.encode(part, cache) for part in ids_BS.split(chunk or ids_BS.shape[1], dim=1)], dim=1)
    return model.head(hidden)


def test_logits_equal_those_of_transformers(pair):
    reference, model = pair
    ids = random_ids(2, PROMPT)
    with torch.no_grad():
        expected = reference(ids).logits
    found = logits(model, ids)
    assert expected.std() > 0.3
    assert (found - expected).abs().max() < TOLERANCE


def test_greedy_generation_equals_transformers(pair):
    reference, model = pair
    settings = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": VOCAB - 1, "pad_token_id": 0}
    prompt = random_ids(1, 12, seed=2)
    with torch.no_grad():
        expected = reference.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0, 12:].tolist()
    assert list(generate_autoregressive(model, prompt[0].tolist(), 10, NO_STOP)) == expected


@pytest.mark.parametrize("chunk", [3, 9])
def test_chunked_encode_equals_whole_encode(pair, chunk):
    _, model = pair
    ids = random_ids(1, PROMPT)
    assert (logits(model, ids, chunk) - logits(model, ids)).abs().max() < TOLERANCE


def test_rows_of_different_lengths_equal_rows_alone(pair):
    _, model = pair
    ids = random_ids(2, PROMPT)
    counts = [PROMPT, 23]
    cache = model.new_cache(2, PROMPT + 2)
    model.encode(ids, cache, counts)
    both = model.head(model.encode(random_ids(2, 2, seed=5), cache))
    for row, count in enumerate(counts):
        whole = torch.cat([ids[row : row + 1, :count], random_ids(2, 2, seed=5)[row : row + 1]], dim=1)
        assert (both[row] - logits(model, whole)[0, -2:]).abs().max() < TOLERANCE


def test_a_bf16_model_stays_near_float32(pair):
    _, model = pair
    ids = random_ids(1, 20)
    rounded = build_model(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded = rounded.to(torch.bfloat16)
    found = logits(rounded, ids)
    assert found.dtype == torch.float32
    assert (found - logits(model, ids)).abs().max() < 0.25


def test_parameter_counts_add_up(pair):
    _, model = pair
    counts = model.config.parameter_counts()
    assert counts["total"] == counts["active"] == sum(p.numel() for p in model.parameters())


def test_a_causal_only_model_refuses_to_denoise(pair):
    _, model = pair
    with pytest.raises(CausalOnlyError, match="infilling needs a diffusion model"):
        model.require_denoiser("infilling")
    with pytest.raises(RuntimeError, match="require_denoiser"):
        model.denoise(random_ids(1, 4), None, model.new_cache(1, 8))


def test_an_adapter_reaches_all_matrices_of_the_layers(pair):
    _, model = pair
    cfg = AdapterConfig(rank=2, halves="encode")
    matrices = adaptable_matrices(model.config)
    weights = {name: p for name, p in model.named_parameters() if name.endswith("_proj.weight")}
    assert {f"{name}.weight" for name in matrices} == set(weights)
    adapter = new_adapter(cfg, model.config)
    ids = random_ids(1, 12)
    assert torch.equal(logits(model, ids, adapter=adapter), logits(model, ids))  # b is zero
    with torch.no_grad():
        for pair_ in adapter.parameters():
            pair_.copy_(torch.randn(pair_.shape, generator=torch.Generator().manual_seed(len(pair_))) * 0.1)
    merged = build_model(model.config)
    merged.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name in matrices:
            merged.get_submodule(name).weight += adapter.pair(ENCODE, name).delta()
    adapted = logits(model, ids, adapter=adapter)
    assert (adapted - logits(merged, ids)).abs().max() < 1e-4
    assert (adapted - logits(model, ids)).abs().max() > 0.1


def test_the_joint_pass_encodes_clean_tokens_as_encode_does():
    """A drafting adapter will need it: a Llama that is not causal-only denoises with the same layers."""
    model = checkpoint_model("qwen3")
    config = LlamaConfig(**{**vars(model.config), "is_causal_only": False})
    denoiser = Llama(config)
    denoiser.load_state_dict(model.state_dict())
    clean = random_ids(1, 6)
    canvas = random_ids(1, 4, seed=3)
    cache = denoiser.new_cache(1, 32)
    denoiser.encode(random_ids(1, 10, seed=4), cache)
    hidden, canvases = denoiser.joint(clean, canvas[:, None], [5], cache)
    apart = denoiser.new_cache(1, 32)
    denoiser.encode(random_ids(1, 10, seed=4), apart)
    assert (hidden - denoiser.encode(clean, apart)).abs().max() < TOLERANCE
    assert (denoiser.head(canvases[:, 0]) - denoiser.denoise(canvas, None, apart)).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["llama 3", "mistral"])
def test_the_engine_generates_what_the_plain_loop_does(family):
    model = checkpoint_model(family)
    prompts = [random_ids(1, length, seed=length)[0].tolist() for length in (5, 17, 30)]
    engine = Engine(model)
    requests = [engine.add(prompt, NO_STOP, seed=0) for prompt in prompts]
    finished = engine.run(requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert finished[request].ids_BT[0].tolist() == list(generate_autoregressive(model, prompt, 12, NO_STOP))


def checkpoint_model(family):
    """Our model with the weights of transformers', without files."""
    reference = make_reference(family)
    config = checkpoint.parse_model_config(reference.config.to_dict())
    return checkpoint.from_state_dict(config, reference.state_dict())


def test_heads_that_no_kernel_takes_run_on_the_reference(monkeypatch):
    monkeypatch.setattr("redraft.engine.make_runner.select_backend", lambda device: Backend(True, "a GPU"))
    assert type(make_runner(checkpoint_model("qwen2"), prefill_chunk=64)) is Runner  # heads of 8
