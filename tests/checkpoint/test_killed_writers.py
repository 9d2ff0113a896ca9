"""Every writer of files, killed before every change it makes to the file system, leaves the old content or the new one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("killed_writers.py")


KILLS = 10  # of each writer that appends
APPENDING = {"metrics.jsonl", "redraft augment", "redraft batch"}


@pytest.mark.soak
def test_a_killed_writer_leaves_the_old_content_or_the_new_one(tmp_path):
    """Writers that append are killed at random moments; the rule for what they leave holds at every moment."""
    one_thread = {"OMP_NUM_THREADS": "1"}  # a pool of threads does not survive a fork
    environment = {**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(PROGRAM), str(tmp_path), str(KILLS), "1"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    outcomes = json.loads(run.stdout.splitlines()[-1])
    assert len(outcomes) == 11
    for name, of_writer in outcomes.items():
        if name in APPENDING:
            assert len(of_writer) == KILLS
        else:  # killed before each change: the old content, then from one change on the new one
            assert len(of_writer) >= (3 if name == "write_text" else 6), name
            if name != "redraft pull":  # it waits for pip: its changes vary in number
                assert of_writer == sorted(of_writer), name
            assert set(of_writer) == {0, 1}, name
