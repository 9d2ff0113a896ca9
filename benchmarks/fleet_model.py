"""The parts of simulate_fleet.py: measured milliseconds, lengths of requests, and simulated GPUs (SimPy, discrete events).

A GPU runs one engine. A simulated engine makes the decisions of `engine/engine.py` and `engine/scheduler.py`: requests wait
for a slot, a step prefills about one chunk of prompt tokens, and all canvases in work are denoised together. What a step
takes comes from a StepTable. Times are milliseconds.
"""

import csv
import itertools
import json
import random
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import simpy

GRAPH_SIZES = (1, 2, 4, 8)  # canvases of a captured CUDA graph; batches are padded to these (docs/engine.md)
CANVAS = 256  # tokens of a canvas of the released model


def interpolate(x: float, points: Sequence[tuple[float, float]]) -> float:
    """Piecewise linear through measured points. Constant below the first; the last slope goes on above the last."""
    at = bisect_left(points, (x,))
    if at < len(points) and points[at][0] == x:
        return points[at][1]
    if at == 0 or len(points) == 1:
        return points[0][1]
    (x0, y0), (x1, y1) = points[at - 1 : at + 1] if at < len(points) else points[-2:]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Milliseconds of one engine: a step by canvases and context, a prompt by its tokens, a commit beside a step.

    `step_ms[context][canvases]` holds what was measured. A context may lack counts of canvases that the smallest context
    has. Then each canvas adds what one canvas adds, because attention reads each request's KV cache separately.
    """

    step_ms: dict[int, dict[int, float]]
    prefill_ms: tuple[tuple[float, float], ...] = ((0, 0.0),)  # tokens, and milliseconds of all of them
    commit_ms: float = 0.0  # what encoding a committed canvas adds to a step
    sizes: tuple[int, ...] | None = None  # a batch is padded to one of these, and never larger; None: any number of canvases
    rows: tuple[tuple[float, tuple[tuple[float, float], ...]], ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.step_ms or not self.step_ms[min(self.step_ms)]:
            raise ValueError("a table needs milliseconds of a step for at least one context: run benchmarks/bench_curve.py")
        for context, by_canvases in self.step_ms.items():
            for canvases, ms in by_canvases.items():
                if context < 0 or canvases < 1 or not ms > 0:
                    raise ValueError(f"a step of {canvases} canvases behind {context} tokens took {ms} ms: measure it again")
        base = self.step_ms[min(self.step_ms)]
        fewest = min(base)
        filled = []
        for context, by_canvases in sorted(self.step_ms.items()):
            alone = by_canvases.get(fewest, base[fewest])
            guesses = {count: ms + count / fewest * (alone - base[fewest]) for count, ms in base.items()}
            filled.append((context, tuple(sorted((guesses | by_canvases).items()))))
        object.__setattr__(self, "rows", tuple(filled))

    def step(self, canvases: int, context: float) -> float:
        """A step of so many canvases, which have this context on average."""
        if self.sizes is None:
            return self._batch(canvases, context)
        whole, rest = divmod(canvases, self.sizes[-1])
        ms = whole * self._batch(self.sizes[-1], context) if whole else 0.0
        return ms + (self._batch(self.sizes[bisect_left(self.sizes, rest)], context) if rest else 0.0)

    def _batch(self, canvases: int, context: float) -> float:
        at = bisect_right(self.rows, context, key=lambda row: row[0])
        near = self.rows[max(0, at - 1) : at + 1] if at < len(self.rows) else self.rows[-2:]
        return interpolate(context, [(known, interpolate(canvases, points)) for known, points in near])

    def prefill(self, begin: int, end: int) -> float:
        """The tokens of a prompt from `begin` to `end`."""
        return interpolate(end, self.prefill_ms) - interpolate(begin, self.prefill_ms)


def read_engine_table(path: Path, quant: str | None, first_ms: dict[int, float] | None = None) -> StepTable:
    """The table in the last lines of bench_engine.py or bench_curve.py, saved to a file.

    Contexts and canvases of all runs of this weight format count; of the same point, the first run does. `first_ms`
    replaces milliseconds until the first step behind a prompt of so many tokens.
    """
    result = read_json(path)
    step_ms: dict[int, dict[int, float]] = {}
    firsts: dict[int, float] = {}
    turns: list[float] = []
    for part in (result, *(part for part in result.values() if isinstance(part, dict))):
        for one in part.get("ours", []):
            for run in one["runs"] if one["quant"] == quant else []:
                step_ms.setdefault(run["context"], {}).setdefault(run["canvases"], run["step_ms"])
                if run["canvases"] == 1:
                    firsts.setdefault(run["context"], run["first_ms"])
                    turns += [run["turn_ms"] - run["step_ms"]] if run["turn_ms"] else []
        for curve in part.get("curves", []) if part.get("quant", "none") == (quant or "none") else []:
            for canvases, ms in curve["step_ms"].items():
                step_ms.setdefault(curve["context"], {}).setdefault(int(canvases), ms)
    if not step_ms:
        raise ValueError(
            f"{path} has no steps with {quant or 'bf16'} weights: give a result of bench_engine.py or bench_curve.py"
        )
    firsts |= first_ms or {}
    prefill = [(tokens, ms - interpolate(tokens, steps_alone(step_ms))) for tokens, ms in sorted(firsts.items())]
    return StepTable(
        step_ms=step_ms, prefill_ms=((0, 0.0), *prefill), commit_ms=turns[0] if turns else 0.0, sizes=GRAPH_SIZES
    )


def steps_alone(step_ms: dict[int, dict[int, float]]) -> list[tuple[float, float]]:
    """Context and milliseconds of a step of one canvas."""
    return [(context, counts[1]) for context, counts in sorted(step_ms.items()) if 1 in counts]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file: the whole file, or its last line."""
    try:
        text = path.read_text(encoding="utf-8").strip()
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            found = json.loads(text.splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is not a file of JSON ({error}): give a saved last line of a benchmark") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object: give a saved last line of a benchmark")
    return found


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and of answers, drawn together."""

    classes: tuple[tuple[float, tuple[int, ...], tuple[int, ...]], ...]  # weight, quantiles of prompts, and of answers

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """A prompt and its answer."""
        _, prompts, answers = rng.choices(self.classes, weights=[one[0] for one in self.classes])[0]
        return draw_quantile(prompts, rng), draw_quantile(answers, rng)


def draw_quantile(values: Sequence[int], rng: random.Random) -> int:
    """A number from the distribution with these quantiles, which are equally spaced."""
    at = rng.random() * (len(values) - 1)
    below = int(at)
    above = min(below + 1, len(values) - 1)
    return max(1, round(values[below] + (at - below) * (values[above] - values[below])))


# Lengths of conversations in the Azure LLM inference trace 2023 (CC-BY; Patel et al., Splitwise, ISCA 2024):
# github.com/Azure/AzurePublicDataset, data/AzureLLMInferenceTrace_conv.csv, 19,366 requests. These are deciles of the 434
# requests from 18:42:31.6 to 18:43:30.5, by length of the prompt: one minute, not the whole hour. `--trace` reads the file.
AZURE_CONVERSATION = Lengths(
    (
        (22, (9, 27, 91, 122, 181, 181, 181, 197, 200, 206, 215), (11, 91, 111, 132, 158, 168, 183, 183, 195, 217, 217)),
        (198, (303, 374, 376, 382, 386, 391, 396, 403, 407, 418, 480), (7, 57, 68, 78, 85, 89, 92, 98, 105, 123, 162)),
        (
            83,
            (867, 900, 954, 1014, 1028, 1047, 1070, 1085, 1152, 1244, 1337),
            (35, 76, 181, 388, 394, 396, 403, 415, 429, 459, 939),
        ),
        (
            38,
            (1611, 1753, 2022, 2088, 2221, 2284, 2339, 2390, 2584, 2641, 2966),
            (34, 45, 50, 55, 60, 70, 86, 101, 109, 127, 192),
        ),
        (
            93,
            (3747, 4074, 4077, 4079, 4081, 4083, 4085, 4087, 4091, 4104, 4356),
            (24, 30, 39, 42, 49, 53, 57, 65, 74, 95, 535),
        ),
    )
)


def read_trace(path: Path) -> Lengths:
    """The lengths in a trace with the columns ContextTokens and GeneratedTokens, as the Azure traces have them."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is not a trace ({error!r}): give a CSV file with the columns ContextTokens and GeneratedTokens"
        ) from None
    if not rows:
        raise ValueError(f"{path} has no requests: give a CSV file with the columns ContextTokens and GeneratedTokens")
    return Lengths(tuple((1, (prompt,), (answer,)) for prompt, answer in rows))


@dataclass(eq=False)
class Job:
    """A request: when it comes and what it needs; then how far it is, and when its first frame and its end came."""

    arrival: float
    prompt: int
    answer: int  # tokens that the user receives
    steps: tuple[int, ...]  # of each canvas

    prefilled: int = 0
    canvas: int = 0
    step: int = 0
    has_commit: bool = False  # a committed canvas is encoded in the next step
    work: int = 0  # tokens through the model, by which clients share a GPU
    first_frame: float | None = None
    finish: float | None = None


@dataclass(frozen=True, kw_only=True)
class EngineRules:
    """What an engine decides by: EngineConfig, and whether every request comes from a client of its own."""

    max_running: int = 8
    prefill_chunk: int = 2048
    prefill_chunk_alone: int = 8192
    canvas: int = CANVAS
    has_own_clients: bool = True

    def __post_init__(self) -> None:
        for name in ("max_running", "prefill_chunk", "prefill_chunk_alone", "canvas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def most_running(self) -> int:
        """Requests that have a slot: a client without one gets one although all are taken, up to twice as many."""
        return 2 * self.max_running if self.has_own_clients else self.max_running


class SimulatedGpu:
    """One GPU with one engine."""

    def __init__(self, env: simpy.Environment, table: StepTable, rules: EngineRules) -> None:
        self.env = env
        self.table = table
        self.rules = rules
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.busy = 0.0
        self._clock = 0  # the least work of a running request
        self._arrived = env.event()
        env.process(self._work())

    @property
    def load(self) -> int:
        """Requests that wait or run here."""
        return len(self.waiting) + len(self.running)

    def add(self, job: Job) -> None:
        """A request arrives."""
        self.waiting.append(job)
        if not self._arrived.triggered:
            self._arrived.succeed()

    def _work(self) -> Generator[simpy.Event, None, None]:
        while True:
            if not self.load:
                self._arrived = self.env.event()
                yield self._arrived
            denoised, ms = self._begin_step()
            self.busy += ms
            yield self.env.timeout(ms)
            self._end_step(denoised)

    def _begin_step(self) -> tuple[list[Job], float]:
        """What the next step works on, and its milliseconds."""
        while self.waiting and len(self.running) < self.rules.most_running:
            job = self.waiting.popleft()
            job.work = self._clock
            self.running.append(job)
        chosen = self._choose()
        ms = self._prefill(chosen)
        denoised = [job for job in chosen if job.prefilled == job.prompt]
        for job in denoised:
            if job.has_commit:
                job.has_commit = False
                ms += self.table.commit_ms
            job.work += self.rules.canvas
        if denoised:
            context = sum(job.prompt + job.canvas * self.rules.canvas for job in denoised) / len(denoised)
            ms += self.table.step(len(denoised), context)
        return denoised, ms

    def _choose(self) -> list[Job]:
        """At most `max_running` requests: first those that had the least work, then by arrival."""
        self._clock = max(self._clock, min(job.work for job in self.running))
        if len(self.running) <= self.rules.max_running:
            return self.running
        order = sorted(range(len(self.running)), key=lambda at: (self.running[at].work > self._clock, at))
        return [self.running[at] for at in sorted(order[: self.rules.max_running])]

    def _prefill(self, chosen: Iterable[Job]) -> float:
        """About one chunk of prompt tokens a step, more for a request that is alone."""
        chunk = self.rules.prefill_chunk if len(self.running) > 1 else self.rules.prefill_chunk_alone
        tokens_left = self.rules.prefill_chunk
        ms = 0.0
        for job in chosen:
            if job.prefilled < job.prompt and tokens_left > 0:
                end = min(job.prompt, job.prefilled + chunk)
                ms += self.table.prefill(job.prefilled, end)
                tokens_left -= end - job.prefilled
                job.work += end - job.prefilled
                job.prefilled = end
        return ms

    def _end_step(self, denoised: Iterable[Job]) -> None:
        now = self.env.now
        for job in denoised:
            if job.first_frame is None:
                job.first_frame = now
            job.step += 1
            if job.step == job.steps[job.canvas]:
                job.step = 0
                job.canvas += 1
                job.has_commit = True
                if job.canvas == len(job.steps):
                    job.finish = now
                    self.running.remove(job)


def simulate(
    jobs: Sequence[Job], table: StepTable, rules: EngineRules, gpus: int, pods: int = 1, seed: int = 0
) -> dict[str, float]:
    """Runs all jobs on `gpus` GPUs in each of `pods` pods. Chance chooses the pod; in it the GPU with the fewest requests.

    Returns percentiles of milliseconds without the first tenth of the requests, which find the fleet empty. Utilisation and
    tokens are those until the last arrival: after it the fleet runs empty.
    """
    if gpus < 1 or pods < 1:
        raise ValueError(f"a fleet needs at least one GPU, got {pods} pods of {gpus}")
    if not jobs:
        raise ValueError("a simulation needs at least one request, got none")
    env = simpy.Environment()
    fleet = [[SimulatedGpu(env, table, rules) for _ in range(gpus)] for _ in range(pods)]
    rng = random.Random(seed)
    at_last_arrival: dict[str, float] = {}

    def arrive() -> Generator[simpy.Event, None, None]:
        for job in jobs:
            yield env.timeout(max(0.0, job.arrival - env.now))
            pod = fleet[rng.randrange(pods)] if pods > 1 else fleet[0]
            min(pod, key=lambda gpu: gpu.load).add(job)
        at_last_arrival["busy"] = sum(gpu.busy for pod in fleet for gpu in pod)
        at_last_arrival["tokens"] = sum(job.answer for job in jobs if job.finish is not None)

    env.process(arrive())
    env.run()
    counted = jobs[len(jobs) // 10 :]
    firsts = [job.first_frame - job.arrival for job in counted if job.first_frame is not None]
    finishes = [job.finish - job.arrival for job in counted if job.finish is not None]
    seconds = max(jobs[-1].arrival - jobs[0].arrival, 1e-9) / 1e3
    return {
        "requests": len(jobs),
        "finished": sum(job.finish is not None for job in jobs),
        "first_p50_ms": float(np.percentile(firsts, 50)),
        "first_p99_ms": float(np.percentile(firsts, 99)),
        "finish_p50_ms": float(np.percentile(finishes, 50)),
        "finish_p99_ms": float(np.percentile(finishes, 99)),
        "finish_mean_ms": float(np.mean(finishes)),
        "utilisation": at_last_arrival["busy"] / (1e3 * seconds * gpus * pods),
        "tokens_per_second": at_last_arrival["tokens"] / seconds,
    }


def make_jobs(
    count: int, rate: float, lengths: Lengths, steps: tuple[int, int], canvas: int = CANVAS, seed: int = 0
) -> list[Job]:
    """Requests of a Poisson process with `rate` arrivals a second. A canvas takes from `steps[0]` to `steps[1]` steps."""
    if not rate > 0:
        raise ValueError(f"requests must arrive at a positive rate, got {rate} a second")
    if not 1 <= steps[0] <= steps[1]:
        raise ValueError(f"a canvas takes at least one step, got {steps[0]} to {steps[1]}: give LOW-HIGH")
    rng = random.Random(seed)
    arrivals = itertools.accumulate(rng.expovariate(rate / 1e3) for _ in range(count))
    jobs = []
    for arrival in arrivals:
        prompt, answer = lengths.draw(rng)
        canvases = -(-answer // canvas)
        is_fixed = steps[0] == steps[1]
        counts = steps[:1] * canvases if is_fixed else tuple(rng.randint(*steps) for _ in range(canvases))
        jobs.append(Job(arrival, prompt, answer, counts))
    return jobs
