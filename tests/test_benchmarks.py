"""Benchmarks run, end with JSON, and keep the promises they measure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.timed
def test_a_step_is_no_slower_than_transformers():
    command = [sys.executable, "benchmarks/bench_step.py", "--rounds", "3", "--steps", "6"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(run.stdout.strip().splitlines()[-1])
    assert 29e6 < result["parameters"] < 31e6
    assert result["ratio"] >= 1.0, result


def test_the_server_bears_many_clients_some_of_which_leave():
    """A minute of what `bench_server.py` does for five: nothing stuck, nothing lost, answers as if asked alone."""
    options = {"seconds": 60, "clients": 64, "tokens": 16, "steps": 2, "rounds": 1}
    command = [sys.executable, "benchmarks/bench_server.py", *(f"--{name}={value}" for name, value in options.items())]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout.strip().splitlines()[-1])
    assert found["failed"] == found["different_from_alone"] == []
    assert found["stuck"] == 0
    assert min(found["answers"], found["left_midway"]) > 20
    before, after = found["memory_mib"]
    assert after < 1.1 * before
