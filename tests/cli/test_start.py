"""Help, version and usage errors come at once: what takes long to import is imported when it is needed."""

import json
import signal
import subprocess
import sys

import commands
import pytest

SCRIPT = """
import contextlib, io, json, sys
from redraft.cli import main

HEAVY = set("torch numpy transformers triton fastapi uvicorn safetensors jinja2 huggingface_hub tokenizers".split())
results = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["redraft", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main.main()
            code = None
        except SystemExit as stop:
            code = stop.code
    results.append([code, err.getvalue(), sorted(HEAVY & sys.modules.keys())])
print(json.dumps(results))
"""
COMMANDS = "write chat demo fill edit augment batch sudoku serve warm train eval data pull models rm info quantize".split()
USAGE_ERRORS = {
    ("--nonsense",): "No such option",
    ("write", "x", "--max-tokens", "many"): "'many' is not a whole number",
    ("x", "--canvas-length", "short"): "'short' is not a whole number, nor auto",
    ("chat", "--top-p", "x"): "'x' is not a number",
    ("",): "the prompt is empty",
    ("fill", "no such file"): "No such file",
    ("fill", "-", "--write"): "name a file",
    ("edit", __file__, "--suggest", "--write"): "--suggest changes nothing",
    ("augment", __file__, "-o", "x", "--share", "x"): "--share is a share of words",
    ("augment", __file__, "-o", "x"): "is not JSON",
    ("batch", "no such file", "-o", "x"): "No such file",
    ("batch", __file__, "-o", "x", "--workers", "2"): "--workers 2 needs --ray",
    ("batch", __file__, "-o", "x", "--ray", "there"): "--ray is local or the HOST:PORT",
    ("batch", __file__, "-o", __file__): "exists already",
    ("sudoku", "123"): "81 cells",
    ("sudoku",): "Missing argument",
    ("serve", "--host", "0.0.0.0"): "--api-key",
    ("serve", "--port", "0"): "a port is between",
    ("serve", "--requests", "0"): "--requests must be above 0",
    ("quantize", "x"): "name the folder to write",
}


def test_help_and_usage_errors_import_neither_pytorch_nor_a_server():
    helps = [["--version"], ["--help"], [], *([command, "--help"] for command in COMMANDS)]
    lines = [*helps, *map(list, USAGE_ERRORS)]
    process = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(lines)], capture_output=True, text=True, check=True)
    results = json.loads(process.stdout)
    assert [(line, heavy) for line, (_, _, heavy) in zip(lines, results, strict=True)] == [(line, []) for line in lines]
    assert [code for code, _, _ in results[: len(helps)]] == [0] * len(helps)
    for (line, sentence), (code, error, _) in zip(USAGE_ERRORS.items(), results[len(helps) :], strict=True):
        assert (line, code) == (line, 2)
        assert sentence in error
        assert error.startswith("redraft: ")
        assert error.count("\n") == 1


@pytest.mark.soak
def test_a_forked_command_answers_as_a_real_one(tmp_path):
    """Other tests start their commands with `commands.redraft()`."""
    lines = [["--version"], ["sudoku", "123"], ["info", "-m", str(tmp_path)]]
    for line in lines:
        real, forked = (
            subprocess.run([*start, *line], capture_output=True, cwd=tmp_path, check=False)
            for start in ([sys.executable, "-m", "redraft"], commands.redraft())
        )
        assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr), line
    command = [*commands.redraft(), "Once upon a time", "--seed", "1", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as killed:
        assert killed.stdout.read(1)
        killed.send_signal(commands.KILL)
    assert killed.returncode == -signal.SIGKILL
