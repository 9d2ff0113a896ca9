"""What Ray Serve costs: one replica behind it against the plain server, over HTTP. The last line is JSON.

Both servers run at the same time and are asked in turns, so that a busy machine is busy for both. Milliseconds of a request
that computes nothing, until the first text of a stream, and of a whole answer; p50 and p99. Every answer of the replica is
compared with the plain server's.

    python benchmarks/bench_replicas.py [--rounds 200] [--tokens 16] [--steps 4] [--model tiny]
"""

import argparse
import json
import signal
import statistics
import subprocess
import time
from importlib.metadata import version
from typing import Any

import httpx
from bench_server import PROMPTS, free_port, start_server, text_of

KINDS = ("nothing", "first_text", "answer")
WARM_UP = 5


def time_request(http: httpx.Client, kind: str, body: dict[str, Any]) -> tuple[float, str]:
    """Milliseconds of one request, and the text of its answer."""
    began = time.perf_counter()
    text = ""
    if kind == "nothing":
        http.post("/infill", json={"n_predict": 0}).raise_for_status()
    elif kind == "answer":
        text = text_of(http.post("/v1/completions", json=body).raise_for_status())
    else:
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if '"text":"' in line:
                    return 1e3 * (time.perf_counter() - began), ""
    return 1e3 * (time.perf_counter() - began), text


def percentile(values: list[float], share: float) -> float:
    """A percentile of the values: one of them."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(urls: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Asks the servers in turns and returns the figures."""
    taken: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in urls}
    different = 0
    settings = {"max_tokens": options.tokens, "diffusion_max_steps": options.steps}
    clients = {name: httpx.Client(base_url=url, timeout=600) for name, url in urls.items()}
    for number in range(-WARM_UP, options.rounds):
        body = {"prompt": PROMPTS[number % len(PROMPTS)], "seed": number % 7, **settings}
        for kind in KINDS:
            texts = set()
            names = list(clients) if number % 2 else list(reversed(clients))
            for name in names:
                milliseconds, text = time_request(clients[name], kind, body)
                texts.add(text)
                if number >= 0:
                    taken[name][kind].append(milliseconds)
            different += len(texts) > 1
    for client in clients.values():
        client.close()
    figures: dict[str, Any] = {"rounds": options.rounds, "different_answers": different}
    for kind in KINDS:
        rows = {name: taken[name][kind] for name in urls}
        p50 = {name: round(statistics.median(values), 2) for name, values in rows.items()}
        p99 = {name: round(percentile(values, 0.99), 2) for name, values in rows.items()}
        more = [replica - plain for replica, plain in zip(rows["replica"], rows["plain"], strict=True)]
        figures[kind] = {"p50_ms": p50, "p99_ms": p99, "p50_more_ms": round(statistics.median(more), 2)}
    return figures


def find_commit() -> str:
    """The commit that was measured."""
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return run.stdout.strip()


def main() -> None:
    """Starts both servers, measures, stops them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    urls: dict[str, str] = {}
    servers = []
    try:
        for name, flags in (("plain", ()), ("replica", ("--replicas", "1"))):
            port = free_port()
            servers.append(start_server(options.model, port, 72, "--threads", "1", *flags))
            urls[name] = f"http://127.0.0.1:{port}"
        figures = measure(urls, options)
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
        for server in servers:
            server.wait(120)
    figures |= {"commit": find_commit(), "versions": {name: version(name) for name in ("ray", "torch", "redraft")}}
    print(f"{'':12} {'plain p50':>10} {'p99':>9} {'replica p50':>12} {'p99':>9} {'p50 more':>9}   (ms)")
    for kind in KINDS:
        p50, p99 = figures[kind]["p50_ms"], figures[kind]["p99_ms"]
        more = figures[kind]["p50_more_ms"]
        print(f"{kind:12} {p50['plain']:10} {p99['plain']:9} {p50['replica']:12} {p99['replica']:9} {more:9}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
