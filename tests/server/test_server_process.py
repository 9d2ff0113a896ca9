"""The server as a process: killed clients do not disturb others, SIGTERM lets running requests finish."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
import tiny
from serving import NO_END, wait_until

LONG = {"prompt": "ab", "max_tokens": 400, "seed": 3, "logit_bias": NO_END, "diffusion_max_steps": 24}
CLIENT = """
import httpx, json, sys
with httpx.stream("POST", sys.argv[1] + "/v1/completions", json=json.loads(sys.argv[2]), timeout=600) as answer:
    for line in answer.iter_lines():
        print(line, flush=True)
"""


@contextmanager
def process(folder):
    """Starts a server; yields its address and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "redraft", "serve", "-m", str(folder), "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert server.poll() is None, server.stderr.read()
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield url, server
    finally:
        server.kill()
        server.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_folder(tmp_path_factory.mktemp("served"))


def completion(url, **changes):
    return httpx.post(f"{url}/v1/completions", json={**LONG, **changes}, timeout=600).json()["choices"][0]["text"]


def active(url):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("redraft_active_requests "))


@pytest.mark.soak
def test_a_killed_client_does_not_disturb_others(folder):
    with process(folder) as (url, _):
        alone = completion(url)
        texts = []
        body = json.dumps({**LONG, "seed": 4, "stream": True, "diffusing": True})
        clients = [
            subprocess.Popen([sys.executable, "-c", CLIENT, url, body], stdout=subprocess.PIPE, text=True) for _ in range(3)
        ]
        for client in clients:
            assert client.stdout.readline().startswith("data: ")  # its completion is running
        other = threading.Thread(target=lambda: texts.append(completion(url)))
        other.start()
        for client in clients:
            client.send_signal(signal.SIGKILL)
            client.communicate()
        other.join()
        assert texts == [alone]
        assert wait_until(lambda: active(url) == 0)
        assert completion(url) == alone


@pytest.mark.soak
def test_sigterm_lets_running_requests_finish_and_accepts_nothing_new(folder):
    with process(folder) as (url, server):
        alone = completion(url)
        texts = []
        running = threading.Thread(target=lambda: texts.append(completion(url)))
        running.start()
        while not active(url):
            time.sleep(0.005)
        server.send_signal(signal.SIGTERM)
        running.join()
        assert texts == [alone]
        assert server.wait(600) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")
