"""Two threads are what the tests' machine has, a thread each where two processes test. No example has a deadline."""

import functools
import importlib.util
import json
import os
import ssl
import sys
import tempfile
from collections import Counter
from pathlib import Path

# What the user of this machine has pulled changes no test.
os.environ["REDRAFT_HOME"] = os.path.join(tempfile.gettempdir(), f"redraft-tests-{os.getpid()}-empty")
if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported; processes that tests start inherit it
    os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from redraft.engine.runner import Runner

Runner.measures_drafts = False  # what a test does depends on no clock
# httpx reads every certificate of the machine for every client, also for those of local servers: 40 ms each.
ssl.create_default_context = functools.cache(ssl.create_default_context)
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: tests/interpreted.py
if importlib.util.find_spec("hypothesis"):  # tests/test_gpu.py runs on machines that have pytest alone
    from hypothesis import settings

    settings.register_profile("redraft", deadline=None)
    settings.load_profile("redraft")


def pytest_runtest_logreport(report):
    """Says at once what failed: a run that is stopped before its end prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext}", file=sys.__stderr__, flush=True)


GROUPS = {  # tests of a group run one after another in one worker; other groups are files
    "tests/browser/": "browser",
    "tests/cluster/": "ray",
    "tests/test_benchmarks.py::test_a_replica": "ray",
}


def group_of(nodeid: str) -> str:
    return next((group for start, group in GROUPS.items() if nodeid.startswith(start)), nodeid.split("::")[0])


def pytest_collection_modifyitems(items):
    """Puts the longest groups first, so that no worker works alone at the end."""
    seconds = json.loads((Path(__file__).parent / "durations.json").read_text(encoding="utf-8"))
    total = Counter()
    for item in items:
        total[group_of(item.nodeid)] += seconds.get(item.nodeid, 0.02)
    items.sort(key=lambda item: (-total[group_of(item.nodeid)], group_of(item.nodeid)))


if importlib.util.find_spec("xdist"):
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        """Gives whole groups to workers. xdist's own loadgroup has no effect with pytest 9.2, whose nodes keep their ids."""

        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(config, log):
        return GroupScheduling(config, log)
