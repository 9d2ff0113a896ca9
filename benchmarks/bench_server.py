"""The server under load, over HTTP: many clients at once, some of which disconnect midway. The last line is JSON.

Every completion is compared with the same request sent alone; weights are loaded as float32, because in bf16 a batch rounds
differently. Memory is the resident memory of the server process, after a quarter of the time and at the end.

    python benchmarks/bench_server.py [--clients 64] [--seconds 300 | --requests 120] [--leave 0.3] [--model tiny]
                                      [--tokens 64] [--steps 8] [--rounds 20]
"""

import argparse
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

PROMPTS = ("Once upon a time", "The little dog", "def area(r):", "One day, Lily", "Tom and his mom", "There was a big")


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_server(model: str, port: int, requests: int, *flags: str) -> subprocess.Popen[bytes]:
    """Starts a server process and waits until it is well. With replicas, Ray's proxy answers 404 before that."""
    command = [sys.executable, "-m", "redraft", "serve", "--port", str(port), "--requests", str(requests)]
    command += ["--dtype", "float32", *flags]
    server = subprocess.Popen([*command, *(["-m", model] if model else [])], stderr=subprocess.DEVNULL)
    for _ in range(3000):
        with suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                return server
        if server.poll() is not None:
            raise RuntimeError("the server did not start")
        time.sleep(0.1)
    server.terminate()
    raise RuntimeError("the server did not start")


def memory_mib(process: int) -> float:
    """Returns the resident memory of a process."""
    for line in Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def text_of(response: httpx.Response) -> str:
    """Returns the text of the first choice."""
    return response.json()["choices"][0]["text"]


class Load:
    """Clients that send requests until the time is over, or until all of a number of requests are taken."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.url = url
        self.options = options
        self.began = time.monotonic()
        self.taken = 0  # requests that a client has begun
        self.latencies: list[float] = []
        self.texts: dict[tuple[str, int], set[str]] = {}
        self.disconnected = 0
        self.rejected = 0  # with 429
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def body(self, prompt: str, seed: int) -> dict[str, Any]:
        """Returns a request body."""
        settings = {"max_tokens": self.options.tokens, "diffusion_max_steps": self.options.steps}
        return {"prompt": prompt, "seed": seed, "diffusion_canvas_length": self.options.tokens, **settings}

    def client(self, number: int) -> None:
        """Sends requests one after another, and sometimes disconnects midway."""
        rng = random.Random(number)
        with httpx.Client(base_url=self.url, timeout=600) as http:
            while self._take():
                prompt = rng.choice(PROMPTS)
                seed = rng.randrange(4)
                body = self.body(prompt, seed)
                began = time.perf_counter()
                if rng.random() < self.options.leave:
                    self._disconnect_midway(http, body, rng.randrange(3))
                    continue
                response = http.post("/v1/completions", json=body)
                with self._lock:
                    if response.status_code == 429:
                        self._refuse()
                    elif response.status_code == 200:
                        self.latencies.append(time.perf_counter() - began)
                        self.texts.setdefault((prompt, seed), set()).add(text_of(response))
                    else:
                        self.failures.append(f"{response.status_code}: {response.text[:200]}")

    def progress(self) -> float:
        """The part of the time, or of the requests, that is over."""
        if self.options.requests:
            return self.taken / self.options.requests
        return (time.monotonic() - self.began) / self.options.seconds

    def _take(self) -> bool:
        """Counts one more request, if there is one."""
        with self._lock:
            if self.progress() >= 1:
                return False
            self.taken += 1
            return True

    def _refuse(self) -> None:
        """Counts a request that the server was too busy for; it is sent again."""
        self.rejected += 1
        self.taken -= 1

    def _disconnect_midway(self, http: httpx.Client, body: dict[str, Any], lines: int) -> None:
        """Asks for frames of every step, and leaves after some lines of the answer."""
        with http.stream("POST", "/v1/completions", json={**body, "stream": True, "diffusing": True}) as response:
            received = response.iter_lines()
            if response.status_code == 429:
                with self._lock:
                    self._refuse()
                return
            for _ in range(lines):
                next(received, None)
        with self._lock:
            self.disconnected += 1

    def run(self, server: int) -> dict[str, Any]:
        """Runs all clients and returns the figures."""
        threads = [threading.Thread(target=self.client, args=(number,)) for number in range(self.options.clients)]
        for thread in threads:
            thread.start()
        while self.progress() < 0.25:
            time.sleep(0.05)
        memory_before = memory_mib(server)
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - self.began
        with httpx.Client(base_url=self.url, timeout=600) as http:
            stuck = self._stuck(http)
            memory_after = memory_mib(server)
            alone = {
                key: http.post("/v1/completions", json=self.body(*key)).json()["choices"][0]["text"] for key in self.texts
            }
        different = [key for key, texts in self.texts.items() if texts != {alone[key]}]
        latencies = sorted(self.latencies) or [0.0]
        return {
            "clients": self.options.clients,
            "seconds": seconds,
            "completions": len(self.latencies),
            "disconnected": self.disconnected,
            "rejected_429": self.rejected,
            "failed": self.failures[:5],
            "different_from_alone": different,
            "stuck": stuck,
            "p50_seconds": statistics.median(latencies),
            "p99_seconds": latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))],
            "completions_per_second": len(self.latencies) / seconds,
            "memory_mib": [memory_before, memory_after],
        }

    def _stuck(self, http: httpx.Client) -> float:
        """Returns the number of requests that are still active after all clients have ended."""
        name = "redraft_active_requests "
        for _ in range(100):
            lines = http.get("/metrics").text.splitlines()
            if not (active := float(next(line.removeprefix(name) for line in lines if line.startswith(name)))):
                break
            time.sleep(0.1)
        return active


def measure_latency(url: str, count: int) -> dict[str, float]:
    """Returns milliseconds of a request that computes nothing, and until the first frame and the first text."""
    body = {"prompt": PROMPTS[0], "max_tokens": 64, "diffusion_canvas_length": 64, "stream": True, "diffusing": True}
    empty: list[float] = []
    frames: list[float] = []
    texts: list[float] = []
    with httpx.Client(base_url=url, timeout=60) as http:
        for number in range(count):
            began = time.perf_counter()
            http.post("/infill", json={"n_predict": 0}).raise_for_status()
            empty.append(1e3 * (time.perf_counter() - began))
            began = time.perf_counter()
            has_frame = False
            with http.stream("POST", "/v1/completions", json={**body, "seed": number}) as response:
                for line in response.iter_lines():
                    if "diffusion_frame" in line and not has_frame:
                        frames.append(1e3 * (time.perf_counter() - began))
                        has_frame = True
                    elif has_frame and '"text":"' in line and "diffusion_frame" not in line:
                        texts.append(1e3 * (time.perf_counter() - began))
                        break
    return {
        name: statistics.median(values)
        for name, values in (("overhead", empty), ("first_frame", frames), ("first_text", texts))
    }


def main() -> None:
    """Starts a server, puts it under load, stops it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--requests", type=int, default=0, help="end after so many, whatever their time")
    parser.add_argument("--leave", type=float, default=0.3)
    parser.add_argument("--model", default="")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20, help="requests of the latency measurement without load")
    options = parser.parse_args()
    port = free_port()
    server = start_server(options.model, port, options.clients + 8)
    try:
        url = f"http://127.0.0.1:{port}"
        figures: dict[str, Any] = {"ms": measure_latency(url, options.rounds)}
        figures |= Load(url, options).run(server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        figures["exit_code"] = server.wait(60)
    for name, value in figures.items():
        print(f"{name:22} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
