"""Drafters of left-to-right models: the causal half stays as it was, and drafts are verified by it."""

import json
from dataclasses import replace

import pytest
import torch

from redraft import checkpoint
from redraft.config import LlamaConfig, SamplerConfig
from redraft.diffusion.autoregressive import generate_autoregressive
from redraft.diffusion.draft_policy import TRIED
from redraft.diffusion.verified import generate_verified
from redraft.engine import Engine
from redraft.engine.runner import Runner
from redraft.model.backbone import CausalOnlyError
from redraft.model.drafter import DrafterConfig, new_drafter, shift_rows
from redraft.model.llama import Llama
from redraft.model.lora import AdapterError
from redraft.model.masks import Layout
from redraft.train.loss import dense_masks

CONFIG = LlamaConfig(
    vocab_size=120,
    hidden_size=32,
    intermediate_size=48,
    layer_types=("full_attention",) * 3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_ids=(2,),
    has_tied_head=True,
)
DRAFTER = DrafterConfig(rank=4, alpha=8.0, head_size=16, canvas_length=6)
PROMPT = [1, 5, 9, 60, 33, 7]


def make_model(seed: int = 0, drafts: bool = True) -> Llama:
    torch.manual_seed(seed)
    model = Llama(CONFIG)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    if drafts:
        drafter = new_drafter(DRAFTER, CONFIG, model.embed_tokens.weight.detach().mean(dim=0), seed)
        for p in drafter.parameters():
            torch.nn.init.normal_(p, std=0.2)
        model.drafter = drafter
    return model.eval().requires_grad_(False)


def sampler(**changes) -> SamplerConfig:
    settings = {
        "canvas_length": 16,
        "check": "exact",
        "draft_length": 5,
        "draft_token": CONFIG.vocab_size,
        "max_new_tokens": 40,
    }
    return SamplerConfig(eos_token_ids=(2,), **settings | changes)


def test_the_engine_leaves_out_drafts_that_are_slow(monkeypatch):
    """As if a round with drafts took a hundred times as long as one without them."""
    monkeypatch.setattr(Runner, "measures_drafts", True)
    engine = Engine(make_model())
    speed = engine.runner.draft_speed
    record = speed.record
    monkeypatch.setattr(speed, "record", lambda drafts, tokens, *_: record(drafts, tokens, 100.0 if drafts else 1.0))
    request = engine.add(PROMPT, sampler(), seed=1)
    found = engine.run([request])[request]
    *_, expected = generate_verified(make_model(drafts=False), PROMPT, sampler(draft_length=0, draft_token=None), seed=1)
    assert found.ids_BT.tolist() == expected.ids_BT.tolist()
    assert 0 < found.stats[0].drafted < TRIED * 5  # in the rounds that tried them
    assert sum(speed.rounds) > 2 * TRIED
    assert not speed.pays


def test_a_measurement_changes_no_canvas_in_the_middle_of_a_step(monkeypatch):
    """Six requests are two batches of a step, and every round changes whether drafts pay, and how many are drafted."""
    monkeypatch.setattr(Runner, "measures_drafts", True)
    engine = Engine(make_model())
    speed = engine.runner.draft_speed
    monkeypatch.setattr(speed, "record", lambda *_: setattr(speed, "rounds", [TRIED - speed.rounds[0], 0]))
    requests = [engine.add([*PROMPT, number], sampler(max_new_tokens=12), seed=number) for number in range(3, 9)]
    for number, request in enumerate(requests):
        request.verification.policy.max_length = 1 + number % 3
    found = engine.run(requests)
    without = sampler(max_new_tokens=12, draft_length=0, draft_token=None)
    for number, request in enumerate(requests, 3):
        *_, expected = generate_verified(make_model(drafts=False), [*PROMPT, number], without, seed=number)
        assert found[request].ids_BT.tolist() == expected.ids_BT.tolist()


def test_only_requests_that_may_draft_are_measured(monkeypatch):
    monkeypatch.setattr(Runner, "measures_drafts", True)
    engine = Engine(make_model())
    speed = engine.runner.draft_speed
    engine.run([engine.add(PROMPT, sampler(draft_length=0, max_new_tokens=6), seed=1)])
    assert speed.rounds == [0, 0]
    speed.rounds = [TRIED, 0]
    request = engine.add(PROMPT, sampler(max_new_tokens=12), seed=1)
    assert engine.run([request])[request].stats[0].drafted > 0
    assert speed.rounds[0] == TRIED  # rounds that only verify drafts count as rounds with drafts


def test_no_clock_chooses_a_text_in_bf16():
    """On a CPU, where a clock would say whether drafts pay, they are left out."""
    engine = Engine(make_model().bfloat16())
    request = engine.add(PROMPT, sampler(max_new_tokens=12), seed=1)
    assert engine.runner.draft_speed is None
    assert engine.run([request])[request].stats[0].drafted == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_causal_half_is_that_of_the_model_to_the_bit(dtype):
    ids_BS = torch.tensor([PROMPT, PROMPT[::-1]])
    logits = []
    for drafts in (False, True):
        model = make_model(drafts=drafts).to(dtype)
        logits.append(model.head(model.encode(ids_BS, model.new_cache(2, 16))))
    assert torch.equal(*logits)


def test_a_joint_forward_is_encode_and_denoise():
    """Canvases behind any token see the tokens up to it and themselves, and the clean tokens see no canvas."""
    model = make_model()
    clean_1S = torch.tensor([PROMPT])
    blank_1JC = torch.full((1, 2, 6), CONFIG.vocab_size)
    hidden_1SD, canvases_1JCD = model.joint(clean_1S, blank_1JC, [1, 5], model.new_cache(1, 32))
    assert torch.allclose(hidden_1SD, model.encode(clean_1S, model.new_cache(1, 32)), atol=1e-5)
    for number, after in enumerate((1, 5)):
        context = [*PROMPT[: after + 1]]
        found = model.joint(torch.tensor([context]), blank_1JC[:, :1], [after], model.new_cache(1, 32))[1]
        assert torch.allclose(canvases_1JCD[:, number], found[:, 0], atol=1e-5)
    other = model.joint(torch.tensor([[*PROMPT[:2], 99, 98, 97, 96]]), blank_1JC, [1, 5], model.new_cache(1, 32))[1]
    assert torch.allclose(canvases_1JCD[:, 0], other[:, 0], atol=1e-6)  # what comes behind its token cannot reach a canvas
    assert not torch.allclose(canvases_1JCD[:, 1], other[:, 1], atol=1e-2)


def test_a_draft_comes_from_the_position_before_it():
    """As every token of a left-to-right model does. The first comes from the token before the canvas."""
    model = make_model()
    blank_1JC = torch.full((1, 2, 6), CONFIG.vocab_size)
    clean_1SD, canvases_1JCD = model.joint(torch.tensor([PROMPT]), blank_1JC, [1, 5], model.new_cache(1, 32))
    assert torch.equal(canvases_1JCD[0, :, 0], clean_1SD[0, [1, 5]])


def test_training_sees_what_a_joint_forward_sees():
    """Canvases of a training row equal those behind the same tokens in a joint forward."""
    model = make_model()
    ids_1L = torch.tensor([[*PROMPT, *range(40, 58)]])
    positions_1L = torch.arange(24)[None]
    starts_1L = torch.where(positions_1L >= 3, positions_1L - (positions_1L - 3) % 7, -1)
    layout = Layout(positions_1L, starts_1L, torch.zeros_like(ids_1L))
    noisy_1L = torch.where(starts_1L >= 0, CONFIG.vocab_size, ids_1L)
    noisy_1LD, clean_1LD, _ = model.forward_train(noisy_1L, ids_1L, None, positions_1L, dense_masks(CONFIG, layout))
    shifted_1LD = shift_rows(noisy_1LD, clean_1LD, positions_1L == starts_1L)
    blank_1JC = torch.full((1, 3, 7), CONFIG.vocab_size)
    _, canvases_1JCD = model.joint(ids_1L, blank_1JC, [2, 9, 16], model.new_cache(1, 32))
    assert torch.allclose(shifted_1LD[:, 3:].unflatten(1, (3, 7)), canvases_1JCD, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exact_mode_writes_the_text_of_the_model_alone(temperature):
    alone = make_model(drafts=False)
    drafting = make_model()
    for seed in range(4):
        cfg = sampler(temperature=temperature)
        expected = list(generate_autoregressive(alone, PROMPT, 40, replace(cfg, draft_token=None), seed=seed))
        *_, found = generate_verified(drafting, PROMPT, cfg, seed=seed)
        assert found.ids_BT[0].tolist() == expected
        assert found.stats[0].drafted > 0


def test_a_drafter_comes_back_from_its_files(tmp_path):
    model = make_model()
    base = checkpoint.fingerprint(model)
    checkpoint.save_drafter(model.drafter, tmp_path, base="some model", fingerprint=base, metadata={"steps": 7})
    loaded = checkpoint.load_drafter(tmp_path, make_model(drafts=False))
    assert loaded.metadata["steps"] == 7
    assert loaded.cfg == DRAFTER
    for name, tensor in model.drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float())


def test_a_drafter_of_another_model_is_refused(tmp_path):
    model = make_model()
    checkpoint.save_drafter(model.drafter, tmp_path, base="some model", fingerprint=checkpoint.fingerprint(model))
    with pytest.raises(AdapterError, match="trained for another model, 'some model'"):
        checkpoint.load_drafter(tmp_path, make_model(seed=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "other"}, "kind 'other'; redraft reads 'drafter' and 'page'"),
        ({"rank": "4"}, "rank must be a number, got '4'"),
        ({"rank": True}, "rank must be a number"),
        ({"rank": -1}, "rank must be between"),
        ({"head_size": 2**20}, "head_size must be from 1"),
        ({"canvas_length": 1}, "canvas_length must be from 2"),
        ({"base": None}, "base must be a text"),
        ({"head_size": 8}, "tensor head.inner.weight"),
    ],
)
def test_damaged_settings_are_one_sentence(tmp_path, change, message):
    model = make_model()
    checkpoint.save_drafter(model.drafter, tmp_path, base="some model", fingerprint=checkpoint.fingerprint(model))
    path = tmp_path / "adapter.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(AdapterError, match=message):
        checkpoint.load_drafter(tmp_path, model)


def test_damaged_weights_are_one_sentence(tmp_path):
    model = make_model()
    checkpoint.save_drafter(model.drafter, tmp_path, base="some model", fingerprint=checkpoint.fingerprint(model))
    weights = tmp_path / "adapter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(AdapterError, match="cannot be read"):
        checkpoint.load_drafter(tmp_path, model)
    weights.unlink()
    with pytest.raises(AdapterError, match="cannot be read"):
        checkpoint.load_drafter(tmp_path, model)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_one_sentence(tmp_path, number):
    model = make_model()
    with torch.no_grad():
        model.drafter.head.inner.weight[0, 0] = number
    checkpoint.save_drafter(model.drafter, tmp_path, base="some model", fingerprint=checkpoint.fingerprint(model))
    message = rf"{tmp_path}/adapter.safetensors: tensor head.inner.weight has numbers that are not finite: train it again"
    with pytest.raises(AdapterError, match=f"^{message}$"):
        checkpoint.load_drafter(tmp_path, make_model(drafts=False))


def test_a_drafter_drafts_no_whole_canvases():
    model = make_model()
    with pytest.raises(CausalOnlyError, match="needs a diffusion model"):
        list(generate_verified(model, PROMPT, sampler(check="checked"), seed=0))
    with pytest.raises(CausalOnlyError, match="needs a diffusion model"):  # whatever its canvases would take
        Engine(model).add(PROMPT, sampler(check="checked", canvas_length=4096), seed=0)
    with pytest.raises(ValueError, match="draft_token 121 is outside"):
        list(generate_verified(model, PROMPT, sampler(draft_token=121), seed=0))
    with pytest.raises(ValueError, match="draft_token 120 is outside"):
        list(generate_verified(make_model(drafts=False), PROMPT, replace(sampler(), draft_length=0), seed=0))


def test_a_model_with_a_drafter_is_saved_without_it(tmp_path):
    checkpoint.save(make_model(), tmp_path / "model")
    loaded = checkpoint.load_model(tmp_path / "model", dtype=torch.float32)
    assert loaded.drafter is None
    assert loaded.state_dict().keys() == make_model(drafts=False).state_dict().keys()


def test_what_needs_a_model_names_the_base_of_a_drafter(tmp_path):
    model = make_model()
    checkpoint.save_drafter(model.drafter, tmp_path, base="some model", fingerprint=checkpoint.fingerprint(model))
    with pytest.raises(checkpoint.CheckpointError, match="is a drafter, not a model: give its base, some model"):
        checkpoint.load_model(tmp_path)
    with pytest.raises(checkpoint.CheckpointError, match="is a drafter for 'some model', which cannot be found"):
        checkpoint.load_checkpoint(tmp_path)


def test_a_base_may_be_named_relative_to_its_drafter(tmp_path):
    model = make_model()
    folder = tmp_path / "drafter"
    checkpoint.save(model, tmp_path / "base")
    checkpoint.save_drafter(model.drafter, folder, base="../base", fingerprint=checkpoint.fingerprint(model))
    assert checkpoint.parts.find_base(folder) == (folder / "../base", folder)
