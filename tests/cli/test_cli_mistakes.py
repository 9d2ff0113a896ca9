"""Mistakes on the command line: each is one sentence that names the flag, before anything long begins."""

import os
import signal
import socket
import stat
import subprocess
import sys

import pytest
import test_cli
import tiny

import redraft
from redraft.cli import edit as cli_edit
from redraft.cli.serve import bind_address
from redraft.diffusion.autoregressive import generate_autoregressive

run = test_cli._run  # the fixture


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return str(tiny.save_folder(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("args", "stdin", "sentence"),
    [
        (["-", "-m", "{model}"], b"a\xff", "stdin is not UTF-8 text: byte 1 is 0xff"),
        (["fill", "-", "-m", "{model}"], b"a\xff [[ ]]", "stdin is not UTF-8 text: byte 1 is 0xff"),
        (["hi", "-m", "{model}", "--record", "out.gif"], None, "--record writes an animated SVG picture"),
        (["hi", "-m", "{model}", "--record", ""], None, "--record writes an animated SVG picture"),
        (["hi", "-m", "{model}", "--record", "no/such/out.svg"], None, "--record: there is no folder 'no/such'"),
        (["hi", "-m", "sudoku"], None, "this model solves Sudoku and knows no words: try redraft sudoku PUZZLE"),
        (["chat", "-m", "sudoku"], "hi\n", "this model solves Sudoku"),
        (["fill", "-", "-m", "sudoku"], "a [[ ]]", "this model solves Sudoku"),
        (["edit", "-", "-m", "sudoku"], "a", "this model solves Sudoku"),
        (["chat"], "hi\n", "the model in the package continues stories and does not chat: run redraft pull smollm2"),
        (["chat", "-m", "tiny"], "hi\n", "tiny cannot chat, it only continues texts"),
        (["fill", "-", "-m", "{model}", "--longest", "100000"], "a [[ ]]", "--longest must be from 1 to 511"),
        (["fill", "-", "-m", "{model}", "--longest", "0"], "a [[ ]]", "--longest must be from 1 to 511"),
        (["fill", "-", "-m", "{model}", "--count", "0"], "a [[ ]]", "--count must be at least 1, got 0"),
        (["hi", "-m", "{model}", "-n", "0"], None, "--max-tokens must be a whole number"),
        (["hi", "-m", "{model}", "--steps", "0"], None, "--steps must be a whole number"),
        (["hi", "-m", "{model}", "--temp", "-1"], None, "--temperature scales the checkpoint's schedule"),
        (["hi", "-m", "{model}", "--check", "exact", "--temp", "1e30"], None, "--temperature must be a number from 0"),
        (["hi", "-m", "{model}", "--check", "maybe"], None, "--check must be off, checked or exact"),
        (["hi", "-m", "{model}", "--check", "exact", "--top-p", "2"], None, "--top-p must be a number from 0 to 1"),
        (["hi", "-m", "{model}", "--best-of", "0"], None, "--best-of must be a whole number from 1 to 64"),
        (["hi", "-m", "{model}", "--left-to-right", "--check", "off"], None, "--left-to-right drafts nothing"),
        (
            ["hi", "-m", "{model}", "--left-to-right", "--steps", "3"],
            None,
            "--steps is for a canvas, and --left-to",
        ),
    ],
)
def test_a_mistake_names_the_flag(run, folder, args, stdin, sentence):
    code, out, err = run(*[arg.format(model=folder) for arg in args], stdin=stdin)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"redraft: {sentence}")


def test_pickles_are_refused_by_name(run, tmp_path):
    tiny.remove_manifest(tiny.save_folder(tmp_path / "model"))
    weights = tmp_path / "model" / "pytorch_model.bin"
    (tmp_path / "model" / "model.safetensors").rename(weights)
    reason = "pytorch_model.bin is a pickle of torch.save, which can run any code when it is loaded"
    code, _, err = run("hi", "-m", str(tmp_path / "model"))
    assert (code, err.split("; ")[0]) == (
        2,
        f"redraft: {tmp_path / 'model'} holds its weights as a pickle: {reason}",
    )
    assert run("hi", "-m", str(weights))[2].startswith(f"redraft: {reason}")


def test_a_used_port_is_refused_before_anything_is_loaded_or_announced(run, monkeypatch):
    monkeypatch.setattr("redraft.cli.serve.load_warm", lambda *_, **__: pytest.fail("a model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, out, err = run("serve", "--port", str(port))
    assert (code, out) == (2, "")
    assert err == f"redraft: port {port} of 127.0.0.1 is in use: name another one with --port\n"


def test_a_port_that_another_server_is_loading_on_is_refused():
    """That one has bound the port and does not listen yet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (loading,) = bind_address("127.0.0.1", port)
    with loading, pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 is in use"):
        bind_address("127.0.0.1", port)
    with pytest.raises(ValueError, match=r"--host nowhere\.invalid is no address of this machine"):
        bind_address("nowhere.invalid", port)


def test_ctrl_c_while_the_command_line_is_imported_is_quiet(tmp_path):
    """Modules that the command line imports are replaced by one that sends the signal."""
    for name in ("torch", "typer"):
        (tmp_path / f"{name}.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "redraft", "hi"]
    handle = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # a background shell ignores it
    ended = subprocess.run(command, capture_output=True, env=environment, **handle)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


def test_fill_and_edit_report_a_seed_that_reproduces_them(capsys, folder, tmp_path):
    file = tmp_path / "story.txt"
    file.write_text("Once upon a time there was a [[ 2 ]] named Lily.")
    results = []
    for seed in (None, "reported"):
        cli_edit.fill(str(file), model=folder, seed=seed and int(results[0].err.removeprefix("seed ")))
        results.append(capsys.readouterr())
    assert results[0] == results[1]
    file.write_text("Once upon a time there was a girl girl.")
    cli_edit.edit(str(file), model=folder, seed=5)
    assert capsys.readouterr().err == "seed 5\n"


def test_quantize_replaces_only_with_force_and_writes_ordinary_permissions(run, folder, tmp_path):
    before = os.umask(0o022)
    try:
        assert run("quantize", folder, str(tmp_path / "small"))[0] == 0
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "small").iterdir()}
    assert (stat.S_IMODE((tmp_path / "small").stat().st_mode), modes) == (0o755, {0o644})
    code, _, err = run("quantize", folder, str(tmp_path / "small"))
    assert (code, "replace it with --force" in err) == (2, True)
    assert run("quantize", folder, str(tmp_path / "small"), "--force")[0] == 0


@pytest.mark.parametrize(
    "command", ["write", "chat", "fill", "edit", "augment", "batch", "sudoku", "serve", "train", "eval", "quantize"]
)
def test_every_command_that_computes_takes_threads(run, command):
    assert "--threads" in run(command, "--help")[1]


def test_left_to_right_is_autoregressive_and_temperature_0_takes_the_likeliest_token(run, folder):
    writer = redraft.load(folder)
    ids = list(generate_autoregressive(writer.model, writer.encode_prompt("Hello"), 12))
    expected = writer.tokenizer.decode([token for token in ids if token not in writer.sampler.eos_token_ids])
    flags = ["-m", folder, "--raw", "--seed", "3", "-n", "12", "--left-to-right", "--temp", "0"]
    code, out, err = run("Hello", *flags)
    assert (code, out) == (0, expected + "\n")
    assert f"{len(ids)} forwards" in err


@pytest.mark.parametrize("command", [["train", "tiny"], ["eval", "{model}", "--task", "stories", "--data", "nowhere"]])
def test_missing_data_is_named_with_where_it_comes_from(run, folder, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDRAFT_DATA", "nowhere")
    code, out, err = run(*[word.format(model=folder) for word in command])
    assert (code, out) == (2, "")
    assert err.startswith("redraft: nowhere/stories/")
    assert "is missing: redraft ships no data. docs/training.md says where it comes from" in err
