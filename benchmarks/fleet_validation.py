"""`simulate_fleet.py --validate`: a real server with the story model, and the simulation of the same arrivals.

The server has one thread, so that clients and other programs find a free core. Its milliseconds come from bursts of equal
requests: with n requests at once, T = overhead + n * prefill + steps * step(n) + (canvases - 1) * commit(n). Bursts are sent
before and after every part of a load, because other programs on the machine change what a step takes. Between them,
requests of one to three canvases arrive at chance times. The simulation gets their arrivals and the steps that the server
counted.
Stop tokens are banned, so that every answer has all its canvases.
"""

import argparse
import itertools
import random
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from typing import Any

import httpx
import numpy as np
from bench_server import free_port, start_server
from fleet_model import EngineRules, Job, StepTable, simulate
from rich.console import Console

CANVAS = 32
STEPS = 6
BURSTS = (1, 2, 4, 8)
KINDS = ((1, 2), (1, 8), (3, 2))  # canvases and steps of each, in a burst
PART = 20  # requests between two measurements of bursts
NO_END = {"1": -100, "5": -100}  # a logit_bias that bans the stop tokens of the story model
TOLERANCE = 0.2
DISTURBED = 1.5  # parts of a load whose steps differ by more say that other programs took the processor
NAMES = ("Lily", "Tom", "Mia", "Ben", "Sue", "Max", "Anna", "Tim", "Sam", "Lucy", "Jack", "Amy")


class Client:
    """Sends requests to the server and times them."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=600, limits=httpx.Limits(max_connections=200))
        self._numbers = itertools.count()
        self.rng = random.Random(5)

    def body(self, canvases: int, steps: int) -> dict[str, Any]:
        """A request whose prompt no other request has, so that the prefix cache does not hold it."""
        number = next(self._numbers)
        names = self.rng.sample(NAMES, 3)
        settings = {"max_tokens": canvases * CANVAS, "diffusion_canvas_length": CANVAS, "diffusion_max_steps": steps}
        prompt = f"{names[0]} had {number} red balls. {names[1]} and {names[2]}"
        return {"prompt": prompt, "seed": number, "check": "off", "logit_bias": NO_END, **settings}

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Milliseconds of a request, and what the server says of it."""
        began = time.perf_counter()
        response = self.http.post("/v1/completions", json=body)
        ms = 1e3 * (time.perf_counter() - began)
        response.raise_for_status()
        answer = response.json()
        timings = answer["timings"]
        counts = {"steps": timings["diffusion_steps"], "canvases": timings["diffusion_blocks"]}
        return {
            "ms": ms,
            **counts,
            "prompt": answer["usage"]["prompt_tokens"],
            "tokens": answer["usage"]["completion_tokens"],
        }

    def burst(self, count: int, canvases: int, steps: int) -> float | None:
        """Milliseconds until the last of so many requests at once is answered; None if one took other steps than asked."""
        answers = self.ask_at([(0.0, self.body(canvases, steps)) for _ in range(count)])
        if any((one["canvases"], one["steps"]) != (canvases, canvases * steps) for one in answers):
            return None
        return max(one["ms"] for one in answers)

    def ask_at(self, planned: Iterable[tuple[float, dict[str, Any]]]) -> list[dict[str, Any]]:
        """Sends each body at its second, in a thread of its own. `at` is when it was sent, in milliseconds."""
        answers: list[dict[str, Any]] = []
        began = time.perf_counter()

        def send(body: dict[str, Any]) -> None:
            at = 1e3 * (time.perf_counter() - began)
            answers.append({"at": at, **self.ask(body)})

        threads = []
        for second, body in planned:
            time.sleep(max(0.0, began + second - time.perf_counter()))
            threads.append(threading.Thread(target=send, args=(body,)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        if len(answers) != len(threads):
            raise RuntimeError("the server did not answer all requests: its log says why")
        return sorted(answers, key=lambda one: one["at"])


def measure_bursts(client: Client) -> dict[tuple[int, int, int], list[float]]:
    """Milliseconds of bursts by requests, canvases and steps."""
    found: dict[tuple[int, int, int], list[float]] = {}
    for count in BURSTS:
        for canvases, steps in KINDS:
            ms = client.burst(count, canvases, steps)
            if ms is not None:
                found.setdefault((count, canvases, steps), []).append(ms)
    return found


def fit_table(bursts: dict[tuple[int, int, int], list[float]]) -> tuple[StepTable, float]:
    """The table of the server, and the overhead of a request: least squares over the medians of the bursts.

    The unknowns are the overhead, the prefill of a prompt, and for each number of requests a step and a commit. Errors are
    weighed relative to the time, because other programs disturb a long burst more.
    """
    points = sorted(bursts)
    unknowns = 2 + 2 * len(BURSTS)
    rows = np.zeros((len(points), unknowns))
    times = np.array([statistics.median(bursts[point]) for point in points])
    for at, (count, canvases, steps) in enumerate(points):
        size = BURSTS.index(count)
        rows[at, :2] = 1, count
        rows[at, 2 + size] = canvases * steps
        rows[at, 2 + len(BURSTS) + size] = canvases - 1
    solution, _, rank, _ = np.linalg.lstsq(rows / times[:, None], np.ones(len(points)), rcond=None)
    if rank < unknowns:
        raise RuntimeError("too few bursts took the steps they were asked for: the server's milliseconds are unknown")
    overhead, prefill = (max(0.0, float(value)) for value in solution[:2])
    steps_ms = dict(zip(BURSTS, solution[2 : 2 + len(BURSTS)].tolist(), strict=True))
    commits = solution[2 + len(BURSTS) :] / np.array(BURSTS)
    commit = max(0.0, float(np.mean(commits)))
    return StepTable(step_ms={0: steps_ms}, prefill_ms=((0, 0.0), (1, prefill)), commit_ms=commit), overhead


def join_bursts(*several: dict[tuple[int, int, int], list[float]]) -> dict[tuple[int, int, int], list[float]]:
    """All times of the same kind of burst."""
    keys = {key for one in several for key in one}
    return {key: [ms for one in several for ms in one.get(key, [])] for key in keys}


def simulate_answers(answers: list[dict[str, Any]], table: StepTable, overhead: float) -> list[float]:
    """Milliseconds of the same arrivals and steps, simulated. A prompt counts as one token: all are about equally long."""
    jobs = []
    for one in answers:
        each, more = divmod(one["steps"], one["canvases"])
        steps = tuple(each + (number < more) for number in range(one["canvases"]))
        jobs.append(Job(one["at"], 1, one["tokens"], steps))
    simulate(jobs, table, EngineRules(max_running=8, canvas=CANVAS, has_own_clients=False), 1)
    return [job.finish - job.arrival + overhead for job in jobs if job.finish is not None]


def percentiles(times: list[float]) -> dict[str, float]:
    """The median and the 99th of 100."""
    return {"finish_p50_ms": float(np.percentile(times, 50)), "finish_p99_ms": float(np.percentile(times, 99))}


def measure_load(client: Client, load: float, options: argparse.Namespace) -> dict[str, Any]:
    """One load in parts, with bursts between them; every part is simulated with the bursts before and after it."""
    bursts = [measure_bursts(client)]
    rate = load * 1e3 / busy_ms(fit_table(bursts[0])[0])
    rng = random.Random(options.seed + round(1000 * load))
    measured: list[float] = []
    simulated: list[float] = []
    tables = []
    while len(measured) < options.requests:
        seconds = itertools.accumulate(rng.expovariate(rate) for _ in range(min(PART, options.requests - len(measured))))
        answers = client.ask_at([(second, client.body(rng.randint(1, 3), STEPS)) for second in seconds])
        bursts.append(measure_bursts(client))
        table, overhead = fit_table(join_bursts(*bursts[-2:]))
        tables.append(table)
        measured += [one["ms"] for one in answers]
        simulated += simulate_answers(answers, table, overhead)
    table, overhead = fit_table(join_bursts(*bursts))
    alone = [table.step(1, 0) for table in tables]
    run: dict[str, Any] = {"load": load, "requests_per_second": rate, "requests": len(measured)}
    run |= {"step_ms": table.step_ms[0], "prefill_ms": table.prefill(0, 1), "commit_ms": table.commit_ms}
    run |= {"overhead_ms": overhead, "step_ms_by_part": alone}
    run |= {"measured": percentiles(measured), "simulated": percentiles(simulated)}
    run["ratio"] = {name: run["simulated"][name] / ms for name, ms in run["measured"].items()}
    return run


def busy_ms(table: StepTable) -> float:
    """What a request of two canvases takes of a full server."""
    return table.step(8, 0) / 8 * STEPS * 2 + table.prefill(0, 1) + table.commit_ms


def validate(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Runs all loads against one server. `is_valid` says whether all medians agree."""
    port = free_port()
    server = start_threaded_server(port)
    runs = []
    try:
        client = Client(f"http://127.0.0.1:{port}")
        client.burst(2, 1, 2)
        for load in options.loads:
            run = measure_load(client, load, options)
            runs.append(run)
            for name, ratio in run["ratio"].items():
                figures = f"measured {run['measured'][name]:,.0f}, simulated {run['simulated'][name]:,.0f}"
                console.print(f"load {load:.0%}, {name}: {figures}, ratio {ratio:.2f}")
            console.print("a step of one canvas, part by part:", ", ".join(f"{ms:.1f} ms" for ms in run["step_ms_by_part"]))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    is_valid = all(abs(run["ratio"]["finish_p50_ms"] - 1) <= TOLERANCE for run in runs)
    alone = [ms for run in runs for ms in run["step_ms_by_part"]]
    return {"runs": runs, "is_valid": is_valid, "is_disturbed": max(alone) > DISTURBED * min(alone)}


def start_threaded_server(port: int) -> subprocess.Popen[bytes]:
    """A server with one thread for its forwards."""
    return start_server("", port, 512, "--threads", "1")
