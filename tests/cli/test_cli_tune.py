"""`redraft tune` as users call it: a file of records in, an adapter that the command line, peft and `info` read out."""

import json
import os
import subprocess
import time
from pathlib import Path

import commands
import peft
import pytest
import test_tuning
import tiny
import torch
import transformers_reference
from safetensors.torch import load_file
from test_cli import _run as _run  # the fixture `run`

from redraft import checkpoint

ROOT = Path(__file__).parents[2]
SMALL = ["--length", "96", "--batch", "4", "--rank", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base and a file of records."""
    folder = tmp_path_factory.mktemp("tune")
    tiny.save_folder(folder / "base")
    test_tuning.write_chats(folder / "chats.jsonl")
    return folder


def test_a_file_of_records_becomes_an_adapter(run, folder):
    out = folder / "run"
    base = str(folder / "base")
    command = ["tune", base, "--data", str(folder / "chats.jsonl"), "--out", str(out), "--steps", "4", *SMALL]
    code, text, log = run(*command)
    assert code == 0, log
    assert text == f"{out}\n"
    assert "40 records (8 with completion, 24 with messages, 8 with text); 2 held out, 0 skipped" in log
    assert "the best so far" in log
    assert f"try it: redraft -m {base} --adapter {out} PROMPT" in log
    assert (out / "curves.png").read_bytes()[:4] == b"\x89PNG"
    model = checkpoint.load_model(folder / "base")
    peft.PeftModel.from_pretrained(transformers_reference.same_weights(model), out)
    assert run("write", "-m", base, "--adapter", str(out), "say 3", "--seed", "1")[0] == 0
    code, described, _ = run("info", str(out))
    assert code == 0
    assert "chats.jsonl" in described
    assert "rank" in described
    assert run(*command)[0] == 0  # a finished run has nothing left to do


@pytest.mark.soak
def test_bad_records_stop_the_command_with_their_line(run, folder, tmp_path):
    lines = [
        b'{"messages": [{"role": "wizard", "content": "hi"}, {"role": "assistant", "content": "x"}]}',
        b'{"prompt": "a", "completion": ""}',
        b'{"text": "caf\xe9"}',
        b"[1]",
        b"{",
    ]
    for line in lines:
        data = tmp_path / "bad.jsonl"
        data.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": "fine"}\n' * 30)
        paths = [str(path) for path in (folder / "base", data, tmp_path / "out")]
        command = ["tune", paths[0], "--data", paths[1], "--out", paths[2], "--steps", "1", *SMALL]
        code, _, complaint = run(*command)
        assert code == 2
        assert complaint.count("\n") == 1
        assert "bad.jsonl:2: " in complaint
        assert "--skip-bad" in complaint
        assert not (tmp_path / "out").exists()
    code, _, log = run(*command, "--skip-bad")
    assert code == 0, log
    assert "skipped " in log
    assert "bad.jsonl:2: " in log


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rank", "0"], "--rank must be between 1"),
        (["--targets", "attention,router"], "no target 'router'"),
        (["--layers", "1-x"], "--layers takes numbers and ranges"),
        (["--layers", "9"], "no layer 9"),
        (["--held-out", "2"], "--held-out is a share"),
        (["--batch", "3", "--rows", "2"], "--batch 3 is no multiple"),
        (["--length", "20"], "--length 20 has no room"),
        (["--from", "nowhere"], "nowhere holds no adapter"),
        (["--from", "tiny-sudoku"], "tiny-sudoku was trained for another model, 'tiny'"),
        (["--data", "nothing.jsonl"], "there is no file nothing.jsonl"),
    ],
)
def test_mistakes_get_a_sentence(run, folder, tmp_path, arguments, complaint):
    paths = [str(path) for path in (folder / "base", folder / "chats.jsonl", tmp_path / "out")]
    code, _, log = run("tune", paths[0], "--data", paths[1], "--out", paths[2], *SMALL, *arguments)
    assert code == 2
    assert complaint in log
    assert "Traceback" not in log


@pytest.mark.soak
def test_a_killed_run_loses_at_most_the_steps_since_its_last_checkpoint(folder, tmp_path):
    """kill -9 in the middle of it, then the same command: the adapter is that of a run that was never killed."""
    flags = ["--steps", "24", "--save-every", "2", "--held-out", "0", *SMALL]
    command = [*commands.redraft(), "tune", str(folder / "base"), "--data", str(folder / "chats.jsonl"), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"cwd": ROOT, "env": environment, "stderr": subprocess.PIPE, "stdout": subprocess.PIPE}
    run = subprocess.Popen([*command, "--out", str(tmp_path / "killed")], **options)
    while not any((tmp_path / "killed").glob("step-*/state.json")):
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.05)
    run.send_signal(commands.KILL)
    run.communicate()
    for name in ("killed", "unbroken"):
        done = subprocess.run([*command, "--out", str(tmp_path / name)], **options)
        assert done.returncode == 0, done.stderr[-2000:]
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("killed", "unbroken")]
    killed, unbroken = (load_file(file) for file in files)  # the header of a file may list the same metadata in any order
    assert killed.keys() == unbroken.keys()
    assert all(torch.equal(killed[name], unbroken[name]) for name in killed)
    assert checkpoint.read_adapter_metadata(files[0].parent) == checkpoint.read_adapter_metadata(files[1].parent)
    steps = [json.loads(line)["step"] for line in (tmp_path / "killed/metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_an_adapter_that_ships_is_named(run):
    code, described, _ = run("info", "tiny-sudoku")
    assert code == 0
    assert "base        tiny" in described
    size = (checkpoint.find_adapter("tiny-sudoku") / "adapter_model.safetensors").stat().st_size
    assert size <= 4 * 2**20


@pytest.mark.soak
def test_the_story_model_solves_sudoku_with_its_adapter(run):
    """The example of the adapter's card. Without the adapter the answer is no board."""
    rows = "530070000 600195000 098000060 800060003 400803001 700020006 060000280 000419005 000080079".split()
    prompt = "\n".join(["Sudoku:", *(" " + " ".join(row) for row in rows), "Solution:"])
    solution = "534678912 672195348 198342567 859761423 426853791 713924856 961537284 287419635 345286179".split()
    board = "\n".join(" " + " ".join(row) for row in solution)
    settings = ["--max-tokens", "96", "--check", "off", "--canvas-length", "96", "--seed", "2", "--device", "cpu"]
    settings += ["--temperature", "2", "--entropy-bound", "0.05"]
    assert run("write", prompt, "-m", "tiny", "--adapter", "tiny-sudoku", *settings)[1].strip("\n") == board
    assert run("write", prompt, "-m", "tiny", *settings)[1].strip("\n") != board
