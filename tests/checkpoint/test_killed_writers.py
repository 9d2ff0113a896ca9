"""Every writer of files, killed at random moments, leaves the old content or the new one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_writers.py")


KILLS = 100


@pytest.mark.soak
def test_a_killed_writer_leaves_the_old_content_or_the_new_one(tmp_path):
    """The moments depend on the machine; the result must not."""
    one_thread = {"OMP_NUM_THREADS": "1"}  # a pool of threads does not survive a fork
    environment = {**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(PROGRAM), str(tmp_path), str(KILLS), "1"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    outcomes = json.loads(run.stdout.splitlines()[-1])
    assert sum(len(of_writer) for of_writer in outcomes.values()) == KILLS
    assert len(outcomes) == 11
