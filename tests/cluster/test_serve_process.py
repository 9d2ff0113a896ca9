"""`redraft serve --replicas 2` as a process: it answers, drains at SIGTERM, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import psutil
import pytest
import ray_cluster
import tiny

from redraft.cli import replicas
from redraft.cluster import deploy
from redraft.cluster.cluster_config import ServedModel


@pytest.mark.soak
def test_serve_with_replicas_drains_at_sigterm_and_leaves_no_process(tmp_path):
    folder = tiny.save_folder(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    flags = ["--replicas", "2", "-m", f"b={folder}", "--port", str(port), "--drain-seconds", "600"]
    command = [sys.executable, "-m", "redraft", "serve", *flags]
    server = subprocess.Popen(
        command, cwd=ray_cluster.ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
    )
    reader = threading.Thread(target=server.stderr.read)  # a full pipe would hold the server up
    reader.start()
    try:
        assert tiny.wait_until(lambda: server.poll() is not None or is_ready(url), 10**6)
        assert server.poll() is None
        children = psutil.Process(server.pid).children(recursive=True)
        body = {"prompt": "ab", "max_tokens": 400, "seed": 3, "logit_bias": {"1": -100, "5": -100}, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert server.wait(600) == 0
        assert tiny.wait_until(lambda: not any(child.is_running() for child in children))
    finally:
        server.kill()
        server.wait()
        reader.join()
        server.stderr.close()


def test_a_signal_while_replicas_start_lets_requests_finish(monkeypatch):
    """The first replica may answer requests before all have started."""
    done = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr("redraft.cluster.ray_connection.import_ray", lambda address: None)
    monkeypatch.setattr(deploy, "local_ray", lambda **counts: nullcontext())
    monkeypatch.setattr(deploy, "deploy", lambda config: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(deploy, "take_down", lambda: done.append("taken down"))
    try:
        replicas.serve_replicas((ServedModel(name="a", model="a"),), opens_page=False)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert done == ["taken down"]


def test_requests_may_drain_longer_than_ray_waits(monkeypatch):
    """Ray's own call gives up after a minute."""
    delete = Mock(side_effect=[TimeoutError, TimeoutError, None])
    serve = SimpleNamespace(delete=delete, status=lambda: SimpleNamespace(applications=[deploy.APPLICATION]))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
    assert deploy.take_down()
    assert delete.call_count == 3


def is_ready(url):
    try:
        return len(httpx.get(f"{url}/health", timeout=10).json()["replicas"]) == 2
    except (httpx.HTTPError, ValueError, KeyError):
        return False
