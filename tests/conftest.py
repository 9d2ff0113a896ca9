"""Two threads are what the tests' machine has, a thread each where two processes test. No example has a deadline."""

import importlib.util
import os
import tempfile

# What the user of this machine has pulled changes no test.
os.environ["REDRAFT_HOME"] = os.path.join(tempfile.gettempdir(), f"redraft-tests-{os.getpid()}-empty")
if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported; processes that tests start inherit it
    os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: tests/interpreted.py
if importlib.util.find_spec("hypothesis"):  # tests/test_gpu.py runs on machines that have pytest alone
    from hypothesis import settings

    settings.register_profile("redraft", deadline=None)
    settings.load_profile("redraft")
