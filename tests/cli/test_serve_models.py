"""redraft serve with several models: their names, mistakes in one sentence, keep-alive times."""

import pytest
import tiny
import uvicorn

from redraft.cli import serve
from redraft.server.keep_alive import FOREVER, parse_keep_alive
from redraft.server.model_card import ModelCard
from redraft.tasks.sudoku.solve import is_sudoku_model


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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"models": ["tiny", "x/tiny"]}, "--model gives the name tiny twice, for tiny and x/tiny: put another name"),
        ({"models": ["tiny", "b=tiny"], "name": "b"}, "--model gives the name b twice"),
        ({"models": ["tiny", "=x"]}, "NAME=MODEL, got '=x'"),
        ({"models": ["tiny", "mercury-coder-local=sudoku"]}, "choose another one"),
        ({"models": ["tiny", "sudoku"], "adapters": ["sudoku=x"]}, "has the name of a model that the server has already"),
        ({"models": ["tiny", "sudoku"], "max_models": 1}, "--max-models 1 leaves no room beside tiny"),
        ({"models": ["tiny"], "max_models": 0}, "--max-models must be above 0, got 0"),
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


def test_the_command_loads_other_models_on_demand(tmp_path, monkeypatch):
    apps = []
    monkeypatch.setattr(serve, "bind_address", lambda host, port: [])
    monkeypatch.setattr(serve, "log_to", lambda console: None)
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: apps.append(self.config.app))
    folder = tiny.save_folder(tmp_path / "first")
    serve.serve(models=[str(folder), "digits=sudoku"], device="cpu", keep_alive="-1")
    models = apps[0].state.models
    assert (list(models.cards), models.config.keep_seconds) == (["first", "digits"], FOREVER)
    assert is_sudoku_model(models.sources["digits"].load().model)


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
