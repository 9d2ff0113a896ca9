"""Adapters on the command line: --adapter, serve, merge, info; mistakes are one sentence."""

import json
from dataclasses import replace

import pytest
import test_cli
import tiny
import torch

import redraft
from redraft.checkpoint import fingerprint, load_model, save_adapter
from redraft.cli import serve
from redraft.model.lora import DENOISE
from redraft.writer import SUDOKU_MODEL

run = test_cli._run  # the fixture
METADATA = {
    "data": ["chats.jsonl", "more.jsonl"],
    "records": 1200,
    "steps": 300,
    "tokens": 65_000,
    "scores": {"held_out": {"denoiser": 1.23456, "causal": 2}},
}


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return str(tiny.save_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(name="adapter", scope="module")
def _adapter(tmp_path_factory, folder):
    metadata = METADATA | {"fingerprint": fingerprint(load_model(folder))}
    adapter = tiny.trained(tiny.BASE, alpha=2.0, layers=(0, 2))
    target = tmp_path_factory.mktemp("adapters") / "style"
    return str(save_adapter(adapter, target, base="owner/base", metadata=metadata, dtype=torch.float32))


def test_commands_use_the_adapter(run, folder, adapter):
    writer = redraft.load(folder, adapter=adapter)
    assert writer.adapter.name == "style"
    common = ("-m", folder, "--adapter", adapter, "--seed", "3")
    base = run("Once upon", "-m", folder, "--seed", "3", "--raw")[1]
    out = run("Once upon", *common, "--raw")[1]
    assert out == writer.write("Once upon", seed=3).text + "\n" != base
    out = run("chat", *common, "-n", "20", stdin="hello\n")[1]
    assert out == writer.chat("hello", seed=3, max_tokens=20).text + "\n"
    text = "Once [[ 4 ]] a time"
    assert run("fill", "-", *common, stdin=text)[1] == writer.fill(text, seed=3).text
    text = "Once upon a time"
    assert run("edit", "-", *common, "--strength", "0.5", stdin=text)[1] == writer.edit(text, strength=0.5, seed=3).text


@pytest.mark.soak
def test_sudoku_uses_the_adapter(run, tmp_path):
    config = load_model(SUDOKU_MODEL).config
    adapter = save_adapter(tiny.trained(config, targets=("attention",)), tmp_path / "adapter", base="sudoku")
    puzzle = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
    options = ("--seed", "1", "--json", "--canvases", "1")
    plain, adapted = (json.loads(run("sudoku", puzzle, *options, *more)[1]) for more in ((), ("--adapter", str(adapter))))
    assert plain["board"] != adapted["board"]


def test_info_tells_what_an_adapter_is(run, folder, adapter, tmp_path):
    for arguments in ((adapter,), ("-m", adapter)):
        code, out, _ = run("info", *arguments)
        assert code == 0
        rows = dict(line.strip().split(None, 1) for line in out.splitlines()[2:])
        assert rows["base"] == "owner/base"
        assert rows["rank"] == "4, alpha 2"
        assert rows["targets"] == "attention, dense, experts, self_conditioning"
        assert rows["layers"] == "0, 2"
        assert rows["halves"] == "both, with the same pairs"
        assert rows["data"] == "chats.jsonl, more.jsonl"
        assert (rows["records"], rows["steps"], rows["tokens"]) == ("1,200", "300", "65,000")
        assert "held out denoiser  1.2346" in out
        assert "held out causal    2" in out
        count = tiny.trained(tiny.BASE, layers=(0, 2)).parameter_count
        assert rows["parameters"] == f"{count / 1e3:.2f} k"
    half = save_adapter(tiny.trained(tiny.BASE, halves=DENOISE), tmp_path / "half", base="b", metadata={"scores": 5})
    out = run("info", str(half))[1]
    assert "halves      denoise" in out
    assert "layers      0-2" in out
    assert run("info", folder, "-m", folder)[0] == 2
    assert "vocabulary" in run("info", folder)[1]


def test_merge_writes_a_model_that_needs_no_adapter(run, folder, adapter, tmp_path):
    out = str(tmp_path / "merged")
    assert run("merge", folder, adapter, "--out", out)[:2] == (0, f"{out}\n")
    answers = [
        redraft.load(out).write("Once upon", seed=3),
        redraft.load(folder, adapter=adapter).write("Once upon", seed=3),
    ]
    assert answers[0].ids == answers[1].ids
    code, _, err = run("merge", folder, adapter, "--out", out)
    assert (code, "exists already" in err) == (2, True)
    assert run("merge", folder, adapter, "--out", out, "--force")[0] == 0


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["hi", "-m", "{model}", "--adapter", "no/such"], "no/such holds no adapter: it has no adapter_config.json"),
        (["hi", "-m", "{model}", "--adapter", "{model}"], "holds no adapter"),
        (["hi", "-m", "{adapter}"], "holds an adapter, not a model: give its base with --model and --adapter"),
        (["hi", "-m", "{other}", "--adapter", "{adapter}"], "was trained for another model, 'owner/base'"),
        (["hi", "-m", "tiny", "--adapter", "{adapter}"], "was trained for another model, 'owner/base'"),
        (["hi", "-m", "{wide}", "--adapter", "{shapeless}"], "another shape"),
        (
            ["hi", "-m", "{model}", "--adapter", "{adapter}", "--verify-with", "{other}"],
            "verify_with decides what is written",
        ),
        (["merge", "{model}", "{model}", "-o", "x"], "holds no adapter"),
        (["merge", "{adapter}", "{adapter}", "-o", "x"], "holds an adapter, not a model"),
        (["merge", "{other}", "{adapter}", "-o", "x"], "was trained for another model"),
        (["serve", "-m", "{model}", "--adapter", "style"], "--adapter is a name and a folder, NAME=DIR, got 'style'"),
        (["serve", "-m", "{model}", "--adapter", "style="], "--adapter is a name and a folder, NAME=DIR, got 'style='"),
        (["serve", "-m", "{model}", "--adapter", "=x"], "--adapter is a name and a folder"),
        (["serve", "-m", "{model}", "--name", "a", "--adapter", "a=x"], "has the name of a model that the server has"),
        (["serve", "-m", "{model}", "--adapter", "a=x", "--adapter", "a=y"], "gives the name a twice, for x and y"),
        (["serve", "-m", "{model}", "--adapter", "a=no/such"], "no/such holds no adapter"),
    ],
)
def test_mistakes_are_one_sentence(run, folder, adapter, tmp_path_factory, monkeypatch, args, sentence):
    monkeypatch.setattr(serve, "bind_address", lambda host, port: [])
    folders = tmp_path_factory.getbasetemp() / "folders"
    if not folders.exists():
        tiny.save_folder(folders / "other", seed=1)
        tiny.save_folder(folders / "wide", replace(tiny.BASE, hidden_size=40))
        save_adapter(tiny.trained(tiny.BASE), folders / "shapeless", base="b")
    names = {name: str(folders / name) for name in ("other", "wide", "shapeless")}
    code, out, err = run(*[arg.format(model=folder, adapter=adapter, **names) for arg in args])
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert sentence in err


def test_serve_loads_the_named_adapters(run, folder, adapter, monkeypatch):
    """The app that serve would run knows them."""
    import uvicorn

    served = []
    monkeypatch.setattr(serve, "bind_address", lambda host, port: [])
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: served.append(self.config.app))
    code, _, err = run("serve", "-m", folder, "--name", "base", "--adapter", f"style={adapter}", "--adapter", f"b={adapter}")
    assert code == 0, err
    assert len(served) == 1


def test_load_takes_adapters_by_name(folder, adapter):
    writer = redraft.load(folder, adapters={"one": adapter, "two": adapter})
    assert writer.adapter is None
    assert list(writer.adapters) == ["one", "two"]
    assert writer.with_adapter("two").adapter.name == "two"
    assert writer.with_adapter("one").write("Once", seed=3).ids == writer.with_adapter(adapter).write("Once", seed=3).ids
