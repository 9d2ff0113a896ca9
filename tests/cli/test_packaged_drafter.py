"""A drafter in the package: the model that it was trained for drafts with it, by every door, and writes the same text."""

import json
import shutil

import llama_gguf
import llama_models
import pytest
from test_cli import _run as _run  # the fixture `run`

import redraft
from redraft import checkpoint
from redraft.checkpoint import drafter_files
from redraft.cli import serve
from redraft.model.lora import AdapterError
from redraft.server.model_card import ModelCard
from redraft.train import own_answers


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return llama_models.save_with_drafter(tmp_path_factory.mktemp("packaged")).parent


@pytest.fixture(name="base")
def _base(folder, monkeypatch):
    """A small random Llama. The package has a drafter for it."""
    monkeypatch.setattr(drafter_files, "PACKAGED", folder)
    return folder / "base"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_that_of_the_model_alone(base, temperature):
    drafting = redraft.load(base)
    alone = redraft.load(base, drafter=False)
    assert (drafting.sampler.check, drafting.sampler.draft_length) == ("exact", 4)
    assert alone.model.drafter is None
    for seed in (1, 2):
        options = {"max_tokens": 8, "temperature": temperature, "seed": seed}
        found = drafting.write("Once", **options)
        expected = alone.write("Once", **options)
        assert found.ids == expected.ids
        assert found.stats.drafted > expected.stats.drafted == 0


def test_another_model_has_no_drafter(base, tmp_path):
    llama_models.save_reference(tmp_path, "smollm2", seed=1, vocab_size=260, max_position_embeddings=128)
    checkpoint.open_checkpoint(base).tokenizer.save(tmp_path)
    writer = redraft.load(tmp_path)
    assert writer.model.drafter is None
    assert writer.sampler.draft_length == 0
    assert ModelCard.from_checkpoint(tmp_path).drafter is None


def test_another_quantization_of_the_model_drafts_too(base, tmp_path):
    path = tmp_path / "model.gguf"
    reference = llama_models.make_reference("smollm2", vocab_size=260, max_position_embeddings=128)
    llama_gguf.make_file(path, reference, "F16")
    assert checkpoint.find_drafters(*checkpoint.open_weights(path)) == [base.parent / "drafter"]
    loaded = checkpoint.fingerprint(checkpoint.load_model(path))
    assert drafter_files.find_by_fingerprint(None, loaded) == [base.parent / "drafter"]


def test_the_folder_of_a_drafter_can_be_loaded_without_it(folder):
    assert redraft.load(folder / "drafter").model.drafter is not None
    assert redraft.load(folder / "drafter", drafter=False).model.drafter is None


def test_the_command_line_drafts_unless_it_is_told_not_to(run, base):
    prompt = ("write", "Once", "-m", str(base), "--raw", "--seed", "3", "-n", "8", "--json")
    drafted, alone = (json.loads(run(*prompt, *flags)[1]) for flags in ((), ("--left-to-right",)))
    assert drafted["text"] == alone["text"]
    assert drafted["stats"]["drafted"] > alone["stats"]["drafted"] == 0


def test_info_shows_it(run, base):
    text = run("info", str(base))[1]
    assert "the text of autoregressive sampling, in fewer forwards" in text
    assert "longest draft  4 tokens" in text


def test_a_server_drafts_and_says_so(base):
    source = serve.on_demand("llama", str(base), device="cpu")
    assert source.card.drafter == source.load().model.drafter.cfg
    assert serve.load_warm(str(base), device="cpu").model.drafter is not None


@pytest.fixture(name="both", scope="module")
def _both(tmp_path_factory):
    """The same, with a page adapter in the package too."""
    base = llama_models.save_with_drafter(tmp_path_factory.mktemp("both"))
    llama_models.save_page(base.parent, checkpoint.load_model(base))
    return base.parent


@pytest.mark.parametrize("name", ["base", "drafter", "page"])
def test_a_page_adapter_in_the_package_comes_with_the_drafter(both, name, monkeypatch):
    """The base, its drafter or its page adapter is named: the text is the model's own, and the page adapter fills gaps."""
    alone = redraft.load(both / "base", drafter=False)
    with monkeypatch.context() as nothing:
        nothing.setattr(drafter_files, "PACKAGED", both / "no package")
        page_alone = redraft.load(both / "page")
        drafter_alone = redraft.load(both / "drafter")
    monkeypatch.setattr(drafter_files, "PACKAGED", both)
    writer = redraft.load(both / name)
    options = {"max_tokens": 8, "temperature": 1.0, "seed": 2}
    written = writer.write("Once", **options)
    assert written.ids == alone.write("Once", **options).ids
    expected = drafter_alone.write("Once", **options).stats
    assert (written.stats.drafted, written.stats.accepted) == (expected.drafted, expected.accepted)
    assert written.stats.drafted > 0
    assert writer.fill("Once [[4]] time", seed=1).text == page_alone.fill("Once [[4]] time", seed=1).text
    card = ModelCard.from_checkpoint(both / name)
    assert card.is_diffusion
    assert card.drafter == writer.model.drafter.cfg


def test_a_given_drafter_comes_before_the_one_in_the_package(both, tmp_path, monkeypatch):
    monkeypatch.setattr(drafter_files, "PACKAGED", both)
    given = tmp_path / "mine"
    shutil.copytree(both / "drafter", given)
    model = checkpoint.load_model(both / "base")
    assert drafter_files.find_by_fingerprint(given, checkpoint.fingerprint(model)) == [given, both / "page"]


def test_a_drafter_of_a_diffusion_model_is_refused(both, tmp_path):
    shutil.copytree(both / "drafter", tmp_path / "mine")
    settings = json.loads((tmp_path / "mine" / "adapter.json").read_text())
    (tmp_path / "mine" / "adapter.json").write_text(json.dumps(settings | {"base": "tiny"}))
    with pytest.raises(AdapterError, match="was trained for another model, 'tiny'"):
        redraft.load(tmp_path / "mine")


def test_info_shows_both(run, both, monkeypatch):
    monkeypatch.setattr(drafter_files, "PACKAGED", both)
    text = run("info", str(both / "base"))[1]
    assert "longest draft  4 tokens" in text
    assert "canvas lengths  8, 16" in text


def test_its_base_can_be_adapted_again(run, base, tmp_path, monkeypatch):
    """A new drafter learns from the model alone."""

    def stop(model, *_):
        assert model.drafter is None
        raise ValueError("the model writes its answers now")

    monkeypatch.setattr(own_answers, "write_own_answers", stop)
    code, _, log = run("adapt", str(base), "--out", str(tmp_path), "--device", "cpu", "--tokens", "3k")
    assert (code, log) == (2, "redraft: the model writes its answers now\n")
    code, _, log = run("adapt", str(base.parent / "drafter"), "--out", str(tmp_path), "--device", "cpu")
    assert code == 2
    assert "is a drafter already: adapt its base, ../base" in log
