"""The benchmark runs, ends with JSON, and keeps the promise it measures: a step no slower than transformers'."""

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
