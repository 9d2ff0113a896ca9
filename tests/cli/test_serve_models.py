"""redraft serve with several models: their names, mistakes in one sentence, downloads, cards, keep-alive times."""

import os

import huggingface_hub
import llama_models
import pytest
import tiny
import uvicorn

import redraft
from redraft import checkpoint
from redraft.cli import serve
from redraft.server.keep_alive import FOREVER, parse_keep_alive
from redraft.server.model_card import ModelCard
from redraft.tasks.sudoku.solve import is_sudoku_model


@pytest.fixture(name="llama", scope="module")
def _llama(tmp_path_factory):
    return llama_models.save_with_drafter(tmp_path_factory.mktemp("llama"))


@pytest.fixture(name="app_of")
def _app_of(monkeypatch):
    """Runs the command up to the moment when the server would listen, and returns its app."""
    apps = []
    monkeypatch.setattr(serve, "bind_address", lambda host, port: [])
    monkeypatch.setattr(serve, "log_to", lambda console: None)
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: apps.append(self.config.app))

    def run(*models, **options):
        serve.serve(models=list(models), device="cpu", **options)
        return apps[-1]

    return run


def test_models_are_named_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFT_MODEL", "own folder/model")
    assert serve.parse_models([]) == {"model": "own folder/model"}
    assert serve.parse_models(["tiny", "mine=OWNER/NAME", "OWNER/NAME:Q4_K_M"]) == {
        "tiny": "tiny",
        "mine": "OWNER/NAME",
        "NAME:Q4_K_M": "OWNER/NAME:Q4_K_M",
    }
    assert serve.parse_models(["a=tiny", "sudoku"], "first") == {"first": "tiny", "sudoku": "sudoku"}
    folder = tmp_path / "step=5"
    folder.mkdir()
    assert serve.parse_models([str(folder)]) == {"step=5": str(folder)}
    monkeypatch.chdir(folder)
    assert serve.parse_models(["."]) == {"step=5": "."}
    assert serve.parse_models(["[a/b] c=x=y"]) == {"[a/b] c": "x=y"}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"models": ["tiny", "x/tiny"]}, "--model gives the name tiny twice, for tiny and x/tiny: put another name"),
        ({"models": ["tiny", "b=tiny"], "name": "b"}, "--model gives the name b twice"),
        ({"models": ["tiny", ""]}, "--model gives the name tiny twice, for tiny and tiny: put another name"),
        ({"models": ["tiny", "=x"]}, "NAME=MODEL, got '=x'"),
        ({"models": ["/"]}, "--model gives '/' the name '': a name has 1 to 200 printable characters"),
        ({"models": ["tiny", " =sudoku"]}, "the name ' ': a name has"),
        ({"models": ["tiny", "a\x1b[31m=sudoku"]}, r"the name 'a\\x1b\[31m': a name has"),
        ({"models": ["tiny", "\udcff=sudoku"]}, r"the name '\\udcff': a name has"),
        ({"models": ["tiny", "x" * 5000]}, "the name 'xxxx"),
        ({"models": ["tiny", "b:latest=sudoku"]}, "--model gives the name b:latest: leave out :latest"),
        ({"models": ["tiny"], "name": "a\n"}, r"--name gives 'tiny' the name 'a\\n': a name has"),
        ({"models": ["tiny"], "adapters": ["a\n=x"]}, r"--adapter gives 'x' the name 'a\\n': a name has"),
        ({"models": ["tiny", "sudoku"], "quant": "int5"}, "there is no quantization 'int5'; try nvfp4, int4, fp8"),
        (
            {"models": ["tiny"], "aliases": ["gpt=nobody"]},
            "'gpt' is for 'nobody', a model that is not served: choose one of tiny",
        ),
        ({"models": ["tiny"], "aliases": ["*=gpt", "gpt=tiny"]}, r"the alias '\*' is for 'gpt', a model that is not served"),
        ({"models": ["tiny", "sudoku"], "aliases": ["sudoku=tiny"]}, "the alias 'sudoku' is the name of a model already"),
        ({"models": ["tiny"], "aliases": ["a=tiny", "a=tiny"]}, "--alias gives the name a twice, for tiny and tiny"),
        ({"models": ["tiny"], "aliases": ["tiny"]}, "--alias is a name and a model, NAME=MODEL, got 'tiny'"),
        ({"models": ["tiny"], "aliases": ["a:latest=tiny"]}, "--alias gives the name a:latest: leave out :latest"),
        ({"models": ["tiny", "sudoku"], "adapters": ["sudoku=x"]}, "has the name of a model that the server has already"),
        ({"models": ["tiny", "sudoku"], "max_models": 1}, "--max-models 1 leaves no room beside tiny"),
        *[({"models": ["tiny"], "max_models": n}, f"--max-models must be above 0, got {n}") for n in (0, -2)],
        ({"models": ["tiny", "sudoku"], "gpu_memory": "8GB"}, "--gpu-memory plans the memory of one model"),
        ({"models": ["tiny"], "keep_alive": "soon"}, "such as 10m or 1h30m, got 'soon'"),
        ({"models": ["tiny", "no/such/folder"]}, "there is no folder 'no/such/folder'"),
    ],
)
def test_mistakes_are_one_sentence(monkeypatch, options, sentence):
    monkeypatch.setattr(serve, "bind_address", lambda host, port: [])
    monkeypatch.setattr(serve, "load_warm", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=sentence) as error:
        serve.serve(**options)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700


def test_the_command_loads_other_models_on_demand(tmp_path, app_of):
    folder = tiny.save_folder(tmp_path / "first")
    models = app_of(str(folder), "[/digits]=sudoku", keep_alive="-1").state.models  # no markup of the terminal
    assert (list(models.cards), models.config.keep_seconds) == (["first", "[/digits]"], FOREVER)
    assert is_sudoku_model(models.sources["[/digits]"].load().model)


def test_a_format_that_does_not_fit_a_later_model_is_refused_at_start(monkeypatch, llama):
    monkeypatch.setattr(serve, "bind_address", lambda host, port: [])
    monkeypatch.setattr(serve, "load_warm", lambda *_, **__: pytest.fail("a model was loaded"))
    for model in (llama, llama.parent / "drafter"):
        sentence = "quant int4 rounds the weights of DiffusionGemma and Gemma 4; b runs in full precision: leave it out"
        with pytest.raises(ValueError, match=sentence):
            serve.serve(models=["tiny", f"b={model}"], quant="int4")


def test_a_later_model_of_the_hub_is_downloaded_at_start(tmp_path, monkeypatch, app_of, capsys):
    first = tiny.save_folder(tmp_path / "first")
    snapshot = tiny.save_folder(tmp_path / "snapshot")
    downloads = []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        downloads.append((name, "*.safetensors" in allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    source = app_of(str(first), "OWNER/NAME").state.models.sources["NAME"]
    assert downloads == [("OWNER/NAME", False), ("OWNER/NAME", True)]
    assert "downloading NAME, unless it is here" in capsys.readouterr().err
    downloads.clear()
    assert source.load().write("a", max_tokens=4, seed=1).text is not None
    assert downloads == []  # the revision that was there at start is the one that is loaded
    with pytest.raises(ValueError, match="there is no folder 'nowhere'"):
        app_of("nowhere", "OWNER/NAME")
    with pytest.raises(ValueError, match="there is no folder 'nowhere'"):
        app_of(str(first), "OWNER/NAME", "nowhere")
    (snapshot / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    with pytest.raises(ValueError, match="Mamba"):
        app_of(str(first), "OWNER/NAME")
    assert set(downloads) == {("OWNER/NAME", False)}  # no weights


def test_a_later_model_that_is_not_complete_is_refused_at_start(tmp_path, monkeypatch, app_of):
    broken = tiny.remove_manifest(tiny.save_folder(tmp_path / "broken"))
    os.truncate(broken / "model.safetensors", 1000)
    monkeypatch.setattr(serve, "load_warm", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(checkpoint.CheckpointError, match=r"model\.safetensors"):
        app_of("tiny", str(broken))


def test_a_drafter_is_served_with_its_base(tmp_path, app_of, llama):
    models = app_of(str(tiny.save_folder(tmp_path / "first")), str(llama), str(llama.parent / "drafter")).state.models
    assert models.cards["base"].drafter is None
    card = models.cards["drafter"]
    writer = models.sources["drafter"].load()
    assert card.drafter == writer.model.drafter.cfg == ModelCard.from_writer(writer).drafter
    assert (card.family, card.is_diffusion, card.context_length) == ("llama", False, 128)
    assert writer.write("a", max_tokens=6, seed=1).ids == redraft.load(llama).write("a", max_tokens=6, seed=1).ids


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *[(0, 0), (90, 90), (1.5, 1.5), (-1, FOREVER), ("0", 0), ("300", 300), ("10m", 600), ("1h30m", 5400)],
        *[("500ms", 0.5), ("-1", FOREVER), ("-5m", FOREVER), ("1.5h", 5400), (" 5m ", 300)],
    ],
)
def test_keep_alive_times(value, seconds):
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize("value", ["", "m", "5 m", "5x", "nan", "inf", "1e9", "--5m", "٣m", "9" * 5000])
def test_other_keep_alive_times_are_refused(value):
    with pytest.raises(ValueError, match="a keep-alive time is seconds"):
        parse_keep_alive(value)


def test_a_card_is_read_without_the_weights(tmp_path):
    folder = tiny.save_folder(tmp_path / "model")
    card = ModelCard.from_checkpoint(str(folder))
    loaded = ModelCard.from_writer(tiny.writer())
    assert (card.context_length, card.can_chat, card.can_think) == (512, loaded.can_chat, loaded.can_think)
    assert card.parameters == pytest.approx(loaded.parameters, rel=1e-3)  # some scalars are buffers
    assert card.nbytes == sum(file.stat().st_size for file in folder.glob("*.safetensors")) > 0
