"""Hostile requests against a server, while two honest clients write: what the honest clients notice.

Starts `redraft serve`, lets two clients write alone, then again while the catalogue of tests/adversary.py and generated
schemas and regular expressions are fired at the server. Prints how much longer the honest answers took, how fast /health
answered, how much memory the server and its helper processes took, how each attack ended, and how long the server took to
end after SIGTERM with attacks under way. The last line is JSON.

    python benchmarks/bench_adversary.py [--model FOLDER] [--generated 2000] [--tokens 256] [--answers 4]
        [--attackers 1] [--pause 0.5]

The model computes in float32, in which an answer does not depend on the other requests to the bit. The attackers are a
process of their own, at a low priority: on real machines they would have cores of their own.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, settings

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import adversary
import hostile

WATCHER = "127.0.0.13"
DRAIN_SECONDS = 10
AT_ONCE = 8  # attacks
# Bytes of bodies that the server receives at a time, for all attacks alike: a larger one may be refused while it is sent,
# and its client sees a connection that was closed.
SHARE = 4 * 8 * 2**20 // AT_ONCE


@contextmanager
def serve(model: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server process and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--port", str(port), "--body-seconds", "10", "--drain-seconds", str(DRAIN_SECONDS), "--dtype", "float32"]
    command = [sys.executable, "-m", "redraft", "serve", *(["-m", model] if model else []), *flags]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with suppress(httpx.TransportError):
                httpx.get(f"{url}/health")
                break
            assert server.poll() is None, "the server has ended"
            time.sleep(0.1)
        yield url, server
    finally:
        server.kill()
        server.wait()


def memory_of(pid: int, *, with_children: bool = True) -> int:
    """Bytes that a process and its children hold in memory. What several of them share, such as libraries, counts once."""
    children = set()
    for thread in Path(f"/proc/{pid}/task").iterdir() if with_children else ():
        with suppress(OSError):
            children |= set((thread / "children").read_text().split())
    own_command = Path(f"/proc/{pid}/cmdline").read_bytes()
    total = 0
    for process in (str(pid), *children):
        with suppress(OSError, StopIteration):
            is_just_forked = process != str(pid) and Path(f"/proc/{process}/cmdline").read_bytes() == own_command
            if not is_just_forked:  # until it runs its own program, it shares the memory of its parent
                total += proportional_bytes(process)
    return total


def proportional_bytes(process: str) -> int:
    """The memory of a process; a page that n processes share counts as a part of n."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


class Watch:
    """Asks /health ten times a second, and notes the server's memory."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid
        self.seconds: list[float] = []
        self.memory: list[tuple[int, int]] = []  # all processes; the server alone
        self.failures: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        with adversary.client(WATCHER, self.url, 60) as client:
            while not self._is_over.is_set():
                began = time.perf_counter()
                try:
                    response = client.get("/health")
                    if response.status_code != 200:
                        self.failures.append(response.text)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                self.seconds.append(time.perf_counter() - began)
                self.memory.append((memory_of(self.pid), memory_of(self.pid, with_children=False)))
                self._is_over.wait(0.1)


def generated_attacks(count: int, attackers: int) -> dict[str, Callable[[str], str]]:
    """Requests of some clients under generated schemas and regular expressions. Some leave after a moment."""
    patterns: list[dict[str, Any]] = []

    def collect(strategy: Any, name: str, most: int) -> None:
        @settings(max_examples=most, phases=[Phase.generate], database=None, derandomize=True, deadline=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(strategy)
        def add(pattern: Any) -> None:
            patterns.append({name: pattern})

        add()

    collect(hostile.hostile_schemas(), "guided_json", count // 2)
    collect(hostile.hostile_regexes(), "guided_regex", count - count // 2)

    def attack(number: int, pattern: dict[str, Any]) -> Callable[[str], str]:
        body = {**adversary.SMALL, **pattern}
        seconds = 0.2 if number % 5 == 0 else 600
        address = adversary.ATTACKERS[number % attackers]
        return lambda url: adversary.post(url, "/v1/completions", body, seconds=seconds, address=address)

    def name(number: int, pattern: dict[str, Any]) -> str:
        size = "" if len(json.dumps(pattern)) < SHARE else f" {adversary.TOO_LARGE}"
        return f"{'impatient' if number % 5 == 0 else 'generated'}{size} {number}"

    return {name(number, pattern): attack(number, pattern) for number, pattern in enumerate(patterns)}


def time_answers(url: str, body: dict[str, Any], answers: int) -> tuple[list[float], dict[int, str]]:
    """Seconds of every answer of two clients that write at the same time, and the text of each seed."""
    seconds: list[float] = []
    texts: dict[int, str] = {}

    def write(address: str) -> None:
        client = adversary.HonestClient(url, address, body)
        for seed in range(answers):
            began = time.perf_counter()
            texts[seed] = client.ask(seed)
            seconds.append(time.perf_counter() - began)

    threads = [threading.Thread(target=write, args=(address,)) for address in adversary.HONEST]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seconds, texts


class TimedClient(adversary.HonestClient):
    """An honest client that notes its seconds."""

    def ask(self, seed: int) -> str:
        """One completion."""
        began = time.perf_counter()
        text = super().ask(seed)
        self.errors += [] if text == EXPECTED[seed] else [f"seed {seed}: {text[:80]!r}"]
        SECONDS.append(time.perf_counter() - began)
        return text


EXPECTED: dict[int, str] = {}
SECONDS: list[float] = []


def write_beside(
    url: str, body: dict[str, Any], seeds: range, generated: int, attackers_count: int, pause: float
) -> tuple[list[str], Counter[str]]:
    """Lets the honest clients write while the attackers' process runs. Returns what went wrong, and the attacks' ends."""
    counts = ["--generated", str(generated), "--attackers", str(attackers_count)]
    command = [sys.executable, "-W", "ignore", __file__, *counts, "--attack", url]
    attackers = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert attackers.stdin is not None
    assert attackers.stdout is not None
    attackers.stdout.readline()  # the attacks are prepared
    clients = [TimedClient(url, address, body, pause) for address in adversary.HONEST]
    is_over = threading.Event()
    threads = [threading.Thread(target=client.ask_until, args=(is_over, seeds)) for client in clients]
    for thread in threads:
        thread.start()
    output, _ = attackers.communicate("go\n")
    is_over.set()
    for thread in threads:
        thread.join()
    wrong, outcomes = json.loads(output.splitlines()[-1])
    return [*wrong, *(error for client in clients for error in client.errors)], Counter(outcomes)


def attack(url: str, generated: int, attackers: int) -> None:
    """The attackers' process: prepares all attacks, waits for a line, runs them, prints their ends as JSON."""
    os.nice(10)
    sys.set_int_max_str_digits(0)  # for hostile integers
    phases = (adversary.catalogue(), generated_attacks(generated, attackers))
    print("prepared", flush=True)
    sys.stdin.readline()
    wrong: list[str] = []
    outcomes: Counter[str] = Counter()
    for attacks in phases:
        ends, errors = adversary.run_all(url, attacks, at_once=AT_ONCE)
        outcomes.update(ends.values())
        wrong += errors
    print(json.dumps([wrong, outcomes]))


def end_under_attack(url: str, server: subprocess.Popen[bytes]) -> float:
    """Seconds from SIGTERM to the end of the process, with a stalled body, a compilation and a long answer under way."""
    attacks = adversary.catalogue()
    names = ("60 bodies that stop", "a stream that nobody reads", "16 completions", "a pattern for each property")
    for name in names:
        threading.Thread(target=lambda name=name: suppress_all(attacks[name], url), daemon=True).start()
    time.sleep(1.0)
    server.send_signal(signal.SIGTERM)
    began = time.perf_counter()
    server.wait()
    return time.perf_counter() - began


def suppress_all(attack: Callable[[str], str], url: str) -> None:
    """Runs an attack, however it ends."""
    with suppress(Exception):
        attack(url)


def main() -> None:
    """Prints the figures and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--generated", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--attackers", type=int, default=1, choices=(1, 2))
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two answers of an honest client")
    parser.add_argument("--attack", metavar="URL", help="only attack this server")
    options = parser.parse_args()
    if options.attack:
        attack(options.attack, options.generated, options.attackers)
        return
    body = {"prompt": "Once upon a time", "max_tokens": options.tokens}
    with serve(options.model) as (url, server):
        alone, texts = time_answers(url, body, options.answers)
        EXPECTED.update(texts)
        memory = memory_of(server.pid)
        began = time.perf_counter()
        with Watch(url, server.pid) as watch:
            seeds = range(options.answers)
            wrong, outcomes = write_beside(url, body, seeds, options.generated, options.attackers, options.pause)
        lasted = time.perf_counter() - began
        end_seconds = end_under_attack(url, server)
    health = sorted(watch.seconds)
    result = {
        "bench": "adversary",
        "attacks": outcomes.total(),
        "outcomes": dict(outcomes),
        "wrong": wrong + watch.failures,
        "honest_answers": len(SECONDS),
        "seconds_alone": round(statistics.median(alone), 3),
        "seconds_attacked": round(statistics.median(SECONDS), 3),
        "slowest_attacked": round(max(SECONDS), 3),
        "ratio": round(statistics.median(SECONDS) / statistics.median(alone), 2),
        "health_p50": round(statistics.median(health), 4),
        "health_p99": round(health[int(0.99 * (len(health) - 1))], 4),
        "health_max": round(health[-1], 4),
        "memory_start_mb": round(memory / 1e6),
        "memory_more_mb": round((max(watch.memory)[0] - memory) / 1e6),
        "memory_server_alone_mb": round(max(server for _, server in watch.memory) / 1e6),
        "sigterm_seconds": round(end_seconds, 2),
        "attack_seconds": round(lasted, 1),
    }
    for name, value in result.items():
        print(f"{name:<20}{value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
