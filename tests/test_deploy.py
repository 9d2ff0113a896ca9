"""The systemd unit and the Dockerfile: their files exist, and the command line knows the options they use."""

import configparser
import json
import shlex
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from typer.testing import CliRunner

from redraft.cli.main import app

ROOT = Path(__file__).parent.parent


def check_options(command):
    """Asserts that the command line knows all options of a command."""
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0, result.output
    options = [part for part in command if part.startswith("--")]
    assert all(option in result.output for option in options)


def test_the_unit_starts_the_server():
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read(ROOT / "deploy" / "redraft.service")
    program, *command = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("/.venv/bin/redraft")
    check_options(command)
    assert int(unit["Service"]["TimeoutStopSec"]) > 30  # running requests get at most 30 s to finish
    assert unit["Install"]["WantedBy"] == "default.target"


def instructions():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]


def test_the_image_contains_the_files_of_the_package():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [name for word, rest in instructions() if word == "COPY" for name in rest.split()[:-1]]
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(fnmatch(name, pattern) for pattern in kept), name
    assert {"pyproject.toml", "redraft", "README.md", "LICENSE"} <= set(copied)  # the build reads these
    program, *command = json.loads(dict(instructions())["ENTRYPOINT"])
    assert program == "redraft"
    check_options(command)


def test_every_data_file_is_part_of_the_package():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["redraft"]
    listed = subprocess.run(["git", "ls-files", "redraft"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [name.removeprefix("redraft/") for name in listed.splitlines() if not name.endswith(".py")]
    assert "server/static/index.html" in files
    assert [name for name in files if not any(fnmatch(name, pattern) for pattern in known)] == []
