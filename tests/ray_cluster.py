"""A Ray cluster of two nodes on this machine, in a process of its own, for tests of what runs on Ray.

The test process never imports Ray. As a script it starts the cluster, prints its address, and ends with its stdin.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import commands

ROOT = Path(__file__).parent.parent
CPUS = 2  # of a node, as Ray counts them
KEY = "a key for tests"  # of what is served


@dataclass(frozen=True)
class RayCluster:
    """A running cluster."""

    address: str
    env: dict[str, str]
    pid: int  # the process that started it; its nodes are its children

    def redraft(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        """Runs a command of redraft beside the cluster."""
        command = [*commands.redraft(), *arguments]
        run = subprocess.run(command, env=self.env, cwd=ROOT, capture_output=True, text=True)
        assert not check or run.returncode == 0, run.stderr
        return run


def environment() -> dict[str, str]:
    """Variables for a cluster that binds to the loopback address, asks for a token and reports nothing."""
    own = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",  # 5 of its own: less than a busy machine takes to import
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **own}


@contextmanager
def two_nodes(**variables: str) -> Iterator[RayCluster]:
    """A cluster of two nodes. `variables` are those of its environment."""
    folder = tempfile.mkdtemp(prefix="ray-")  # a short path: that of a socket has at most 107 characters
    Path(folder, "ray").mkdir()  # where Ray notes the address; Cluster does not create it
    env = {**environment(), "RAY_TMPDIR": folder, **variables}
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd=ROOT, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line, "the Ray cluster did not start"
            yield RayCluster(json.loads(line)["address"], env, process.pid)
        finally:
            process.stdin.close()
            process.wait(600)
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Starts the cluster and waits until stdin is closed."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": CPUS, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    try:
        cluster.add_node(**options)
        print(json.dumps({"address": cluster.address}), flush=True)
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
