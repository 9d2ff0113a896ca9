"""The server under load, over HTTP: many clients at once, some of which leave midway. The last line is JSON.

Every finished answer is compared with the same request asked alone (weights are read as float32: in bf16 a batch rounds
otherwise). Memory is that of the server's process, looked at when a quarter of the time is over and at the end.

    python benchmarks/bench_server.py [--clients 64] [--seconds 300] [--leave 0.3] [--model tiny] [--tokens 64] [--steps 8]
                                      [--rounds 20]
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
from pathlib import Path
from typing import Any

import httpx

PROMPTS = ("Once upon a time", "The little dog", "def area(r):", "One day, Lily", "Tom and his mom", "There was a big")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def started(model: str, port: int, requests: int) -> subprocess.Popen[bytes]:
    """A server of its own process, when it answers."""
    command = [sys.executable, "-m", "redraft.cli", "serve", "--port", str(port), "--requests", str(requests)]
    command += ["--dtype", "float32"]
    server = subprocess.Popen([*command, *(["-m", model] if model else [])], stderr=subprocess.DEVNULL)
    for _ in range(1200):
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
            return server
        except httpx.TransportError:
            if server.poll() is not None:
                raise RuntimeError("the server did not start") from None
            time.sleep(0.1)
    raise RuntimeError("the server did not start")


def memory_mib(process: int) -> float:
    """What a process holds."""
    for line in Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def text_of(response: httpx.Response) -> str:
    """Of the first choice."""
    return response.json()["choices"][0]["text"]


class Load:
    """Clients that ask again and again until the time is over."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.url, self.options, self.ends = url, options, time.monotonic() + options.seconds
        self.taken: list[float] = []
        self.answers: dict[tuple[str, int], set[str]] = {}
        self.left = self.told_to_wait = 0
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    def body(self, prompt: str, seed: int) -> dict[str, Any]:
        """One request."""
        settings = {"max_tokens": self.options.tokens, "diffusion_max_steps": self.options.steps}
        return {"prompt": prompt, "seed": seed, "diffusion_canvas_length": self.options.tokens, **settings}

    def client(self, number: int) -> None:
        """Asks, and sometimes leaves."""
        rng = random.Random(number)
        with httpx.Client(base_url=self.url, timeout=600) as http:
            while time.monotonic() < self.ends:
                prompt, seed = rng.choice(PROMPTS), rng.randrange(4)
                body, began = self.body(prompt, seed), time.perf_counter()
                if rng.random() < self.options.leave:
                    self._leave(http, body, rng.uniform(0.05, 1.0))
                    continue
                found = http.post("/v1/completions", json=body)
                with self._lock:
                    if found.status_code == 429:
                        self.told_to_wait += 1
                    elif found.status_code == 200:
                        self.taken.append(time.perf_counter() - began)
                        self.answers.setdefault((prompt, seed), set()).add(text_of(found))
                    else:
                        self.wrong.append(f"{found.status_code}: {found.text[:200]}")

    def _leave(self, http: httpx.Client, body: dict[str, Any], seconds: float) -> None:
        try:
            http.post("/v1/completions", json={**body, "stream": True}, timeout=seconds)
        except httpx.TimeoutException:
            with self._lock:
                self.left += 1

    def run(self, server: int) -> dict[str, Any]:
        """All clients; figures at the end."""
        threads = [threading.Thread(target=self.client, args=(number,)) for number in range(self.options.clients)]
        for thread in threads:
            thread.start()
        time.sleep(self.options.seconds / 4)
        warm = memory_mib(server)
        for thread in threads:
            thread.join()
        with httpx.Client(base_url=self.url, timeout=600) as http:
            stuck = self._stuck(http)
            after = memory_mib(server)
            alone = {
                key: http.post("/v1/completions", json=self.body(*key)).json()["choices"][0]["text"] for key in self.answers
            }
        different = [key for key, texts in self.answers.items() if texts != {alone[key]}]
        order = sorted(self.taken) or [0.0]
        return {
            "clients": self.options.clients,
            "seconds": self.options.seconds,
            "answers": len(self.taken),
            "left_midway": self.left,
            "told_to_wait": self.told_to_wait,
            "failed": self.wrong[:5],
            "different_from_alone": different,
            "stuck": stuck,
            "p50_seconds": statistics.median(order),
            "p99_seconds": order[min(len(order) - 1, int(0.99 * len(order)))],
            "answers_per_second": len(self.taken) / self.options.seconds,
            "memory_mib": [warm, after],
        }

    def _stuck(self, http: httpx.Client) -> float:
        """Requests that are still there when nobody asks any more."""
        name = "redraft_active_requests "
        for _ in range(100):
            lines = http.get("/metrics").text.splitlines()
            if not (active := float(next(line.removeprefix(name) for line in lines if line.startswith(name)))):
                break
            time.sleep(0.1)
        return active


def overhead(url: str, count: int) -> dict[str, float]:
    """Milliseconds: of a request that computes nothing, and until the first frame and the first text of a page."""
    body = {"prompt": PROMPTS[0], "max_tokens": 64, "diffusion_canvas_length": 64, "stream": True, "diffusing": True}
    plain, frames, texts = [], [], []
    with httpx.Client(base_url=url, timeout=60) as http:
        for number in range(count):
            began = time.perf_counter()
            http.post("/infill", json={"n_predict": 0}).raise_for_status()
            plain.append(1e3 * (time.perf_counter() - began))
            began, seen = time.perf_counter(), False
            with http.stream("POST", "/v1/completions", json={**body, "seed": number}) as response:
                for line in response.iter_lines():
                    if "diffusion_frame" in line and not seen:
                        frames.append(1e3 * (time.perf_counter() - began))
                        seen = True
                    elif seen and '"text":"' in line and "diffusion_frame" not in line:
                        texts.append(1e3 * (time.perf_counter() - began))
                        break
    return {
        name: statistics.median(found)
        for name, found in (("overhead", plain), ("first_frame", frames), ("first_text", texts))
    }


def main() -> None:
    """Starts a server, loads it, ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--leave", type=float, default=0.3)
    parser.add_argument("--model", default="")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20, help="of the measurement while nobody else asks")
    options = parser.parse_args()
    port = free_port()
    server = started(options.model, port, options.clients + 8)
    try:
        url = f"http://127.0.0.1:{port}"
        found: dict[str, Any] = {"ms": overhead(url, options.rounds)}
        found |= Load(url, options).run(server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        found["ended_with"] = server.wait(60)
    for name, value in found.items():
        print(f"{name:22} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
