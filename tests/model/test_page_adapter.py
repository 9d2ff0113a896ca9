"""Page adapters of left-to-right models: canvases are denoised, and the causal half stays as it was."""

import json

import llama_models
import pytest
import torch
import torch.nn.functional as F
from test_drafter import CONFIG, PROMPT
from test_drafter import make_model as make_drafting

import redraft
from redraft import checkpoint
from redraft.config import SamplerConfig
from redraft.diffusion.autoregressive import generate_autoregressive
from redraft.diffusion.generate import generate
from redraft.engine import Engine
from redraft.model.backbone import CausalOnlyError
from redraft.model.llama import Llama
from redraft.model.lora import AdapterError
from redraft.model.masks import Layout
from redraft.model.page import PageConfig, new_page_adapter
from redraft.train.loss import Batch, dense_masks
from redraft.train.page_task import PageObjective, begin_canvases

PAGE = PageConfig(rank=4, alpha=8.0, canvas_lengths=(4, 8))
CANVASES = SamplerConfig(canvas_length=8, max_new_tokens=16, max_steps=6, eos_token_ids=(2,))


def make_model(seed: int = 0, page: bool = True) -> Llama:
    model = make_drafting(seed, drafts=False)
    if page:
        model.page = new_page_adapter(PAGE, CONFIG, torch.zeros(CONFIG.hidden_size), seed)
        for p in model.page.parameters():
            torch.nn.init.normal_(p, std=0.2)
    return model.eval().requires_grad_(False)


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory):
    """A folder with a random Llama with a byte vocabulary in `base`, and a page adapter for it in `page`."""
    return llama_models.save_with_page(tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_causal_half_is_that_of_the_model_to_the_bit(dtype):
    ids_BS = torch.tensor([PROMPT, PROMPT[::-1]])
    logits = []
    for page in (False, True):
        model = make_model(page=page).to(dtype)
        logits.append(model.head(model.encode(ids_BS, model.new_cache(2, 16))))
    assert torch.equal(*logits)


def test_canvases_go_through_the_pairs():
    model = make_model()
    canvas_1C = torch.tensor([[7, 30, 4, 99]])
    cache = model.new_cache(1, 16)
    model.encode(torch.tensor([PROMPT]), cache)
    soft_1CD = model.soft_embed(torch.ones(1, 4, CONFIG.vocab_size))
    assert torch.equal(soft_1CD, torch.zeros(1, 4, CONFIG.hidden_size))  # not self-conditioned
    adapted = model.denoise(canvas_1C, soft_1CD, cache)
    merged = make_model(page=False)
    for _, name, pair in model.page.adapter.pairs():
        merged.get_submodule(name).weight += pair.delta()
    merged.page = new_page_adapter(PAGE, CONFIG, model.page.begin_D)  # its pairs add nothing
    assert torch.allclose(adapted, merged.denoise(canvas_1C, None, cache), atol=1e-4)


def test_no_clean_token_of_a_canvas_or_behind_it_leaks_into_it():
    """The training forward: clean tokens in a canvas, but its first, and behind it change nothing in the canvas."""
    model = make_model()
    noisy_1L = torch.tensor([[1, 5, 9, CONFIG.vocab_size, 33, 98, 8, CONFIG.vocab_size, 97, 96, 53]])
    positions_1L = torch.arange(11)[None]
    starts_1L = torch.tensor([[-1] * 3 + [3] * 4 + [7] * 4])
    layout = Layout(positions=positions_1L, starts=starts_1L, documents=torch.zeros_like(positions_1L))
    batch, _ = begin_canvases(Batch(noisy_1L, layout), noisy_1L, CONFIG.vocab_size)
    mask_of = dense_masks(CONFIG, batch.layout)

    def first_canvas(clean: list[int], noisy_1L: torch.Tensor = noisy_1L) -> torch.Tensor:
        hidden_1LD = model.forward_train(noisy_1L, torch.tensor([clean]), None, layout.positions, mask_of)[0]
        return hidden_1LD[0, 3:7]

    found = first_canvas([1, 5, 9, 60, 33, 7, 8, 50, 51, 52, 53])
    assert torch.equal(found, first_canvas([1, 5, 9, 60, 99, 98, 97, 96, 95, 94, 93]))
    assert not torch.allclose(found, first_canvas([1, 5, 10, 60, 33, 7, 8, 50, 51, 52, 53]), atol=1e-3)
    other_1L = noisy_1L.clone()
    other_1L[0, 6] = 9  # inside a canvas, the first position sees the last
    assert not torch.allclose(found[0], first_canvas([1, 5, 9, 60, 33, 7, 8, 50, 51, 52, 53], other_1L)[0], atol=1e-3)


def test_drafts_behind_verified_tokens_need_a_drafter():
    """A page adapter is not trained for such canvases. Checked mode may still draft whole canvases with it."""
    engine = Engine(make_model())
    with pytest.raises(CausalOnlyError, match=r"draft_length=4\) needs a diffusion model"):
        engine.add(PROMPT, CANVASES.changed(check="checked", draft_length=4), seed=1)
    request = engine.add(PROMPT, CANVASES.changed(check="checked", draft_length=0), seed=1)
    assert engine.run([request])[request].ids_BT.shape[1] > 0


@pytest.mark.parametrize("prompt", [3, 0])
def test_the_training_forward_is_encode_and_denoise(prompt):
    """A row of some prompt tokens and two canvases of four, whose first position is the begin vector.

    Each sees the clean text before it, the clean token of its first position, and itself.
    """
    model = make_model()
    ids_1L = torch.tensor([[1, 5, 9, 60, 33, 7, 8, 50, 51, 52, 53]])[:, 3 - prompt :]
    noisy_1L = torch.tensor([[1, 5, 9, 99, 33, 98, 8, 50, 97, 96, 53]])[:, 3 - prompt :]
    starts_1L = torch.tensor([[-1] * prompt + [prompt] * 4 + [prompt + 4] * 4])
    positions_1L = torch.arange(prompt + 8)[None]
    layout = Layout(positions=positions_1L, starts=starts_1L, documents=torch.zeros_like(positions_1L))
    batch, begun_1L = begin_canvases(Batch(ids_1L, layout), noisy_1L, CONFIG.vocab_size)
    mask_of = dense_masks(CONFIG, batch.layout)
    noisy_1LD, clean_1LD, _ = model.forward_train(begun_1L, ids_1L, None, layout.positions, mask_of)
    assert torch.allclose(clean_1LD, model.encode(ids_1L, model.new_cache(1, 16)), atol=1e-5)
    losses = []
    for start in (prompt, prompt + 4):
        cache = model.new_cache(1, 16)
        model.encode(ids_1L[:, : start + 1], cache)
        logits_1CV = model.denoise(noisy_1L[:, start + 1 : start + 4], None, cache)
        assert torch.allclose(model.head(noisy_1LD[:, start : start + 3]), logits_1CV, atol=1e-4)
        losses.append(F.cross_entropy(logits_1CV[0], ids_1L[0, start + 1 : start + 4]))
    loss = PageObjective(model)(batch, begun_1L, mask_of).total
    assert float(loss) == pytest.approx(float(sum(losses)) / 2, abs=1e-5)


def test_beside_a_drafter_each_has_its_own_canvases():
    """Draft canvases go through the drafter's pairs, other canvases through the page adapter's."""
    both = make_model()
    drafting = make_drafting()
    both.drafter = drafting.drafter
    clean_1S, blank_1JC = torch.tensor([PROMPT]), torch.full((1, 2, 6), CONFIG.vocab_size)
    hidden = [model.joint(clean_1S, blank_1JC, [0, 3], model.new_cache(1, 16)) for model in (both, drafting)]
    assert all(map(torch.equal, *hidden))
    logits = []
    for model in (both, make_model()):
        cache = model.new_cache(1, 16)
        model.encode(clean_1S, cache)
        logits.append(model.denoise(torch.tensor([[7, 30, 4, 99]]), None, cache))
    assert torch.equal(*logits)


def test_the_engine_denoises_what_the_plain_loop_does():
    model = make_model()
    engine = Engine(model)
    request = engine.add(PROMPT, CANVASES, seed=3)
    *_, expected = generate(model, [PROMPT], CANVASES, seeds=[3])
    assert torch.equal(engine.run([request])[request].ids_BT, expected.ids_BT)


def test_without_a_page_adapter_there_is_no_denoiser():
    assert make_model().has_denoiser
    model = make_model(page=False)
    assert not model.has_denoiser
    with pytest.raises(CausalOnlyError, match=r"infill needs a diffusion model; .*, and redraft adapt --page teaches it"):
        model.require_denoiser("infill")
    with pytest.raises(RuntimeError, match="soft_embed"):
        model.soft_embed(torch.zeros(1, 4, CONFIG.vocab_size))


def save(model: Llama, folder, base: str = "some model"):
    return checkpoint.save_drafter(model.page, folder, base=base, fingerprint=checkpoint.fingerprint(model))


def test_a_page_adapter_comes_back_from_its_files(tmp_path):
    model = make_model()
    loaded = checkpoint.load_drafter(save(model, tmp_path), make_model(page=False))
    assert loaded.cfg == PAGE
    for name, tensor in model.page.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float())
    with pytest.raises(AdapterError, match="trained for another model, 'some model'"):
        checkpoint.load_drafter(tmp_path, make_model(seed=1))
    with pytest.raises(checkpoint.CheckpointError, match="is a page adapter, not a model: give its base, some model"):
        checkpoint.load_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "drafter", "format": 3}, "has the format 3, and redraft reads 2: train it again with redraft adapt"),
        ({"format": None}, "has the format 1, and redraft reads 2: train it again with redraft adapt"),
        ({"kind": "drafter"}, "head_size must be a number"),
        ({"canvas_lengths": 32}, "canvas_lengths must be a list"),
        ({"canvas_lengths": []}, "canvas_lengths must be at least one length"),
        ({"canvas_lengths": [32, 10**6]}, "canvas_lengths must be at least one length, from 2 to 4096"),
        ({"rank": 0}, "rank must be between"),
        ({"alpha": float("inf")}, "alpha must be above 0 and at most 1,000,000, got inf"),
        ({"rank": 3}, "says"),
    ],
)
def test_damaged_settings_are_one_sentence(tmp_path, change, message):
    model = make_model()
    path = save(model, tmp_path) / "adapter.json"
    settings = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    with pytest.raises(AdapterError, match=message):
        checkpoint.load_drafter(tmp_path, model)


def test_a_model_with_a_page_adapter_is_saved_without_it(tmp_path):
    checkpoint.save(make_model(), tmp_path / "model")
    loaded = checkpoint.load_model(tmp_path / "model", dtype=torch.float32)
    assert loaded.page is None
    assert loaded.state_dict().keys() == make_model(page=False).state_dict().keys()


def test_the_model_still_writes_left_to_right(models):
    """The settings of canvases change nothing about what it writes."""
    alone = redraft.load(models / "base", dtype="float32")
    writer = redraft.load(models / "page", dtype="float32")
    found = writer.write("Once upon", max_tokens=12, seed=1)
    assert found.ids == alone.write("Once upon", max_tokens=12, seed=1).ids
    prompt = writer.tokenizer.encode_prompt("Once upon")
    assert list(found.ids) == list(generate_autoregressive(alone.model, prompt, 12, alone.sampler, seed=1))
    assert writer.sampler.canvas_lengths == (8, 16)
