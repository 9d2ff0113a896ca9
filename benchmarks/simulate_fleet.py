"""A plan for many users, in figures: a discrete-event simulation of a fleet of GPUs, fed with measured milliseconds.

    python benchmarks/simulate_fleet.py [--users 1000 1000000] [--quant none fp8] [--first-ms fp8:4096=73]
        [--table FILE.json ...] [--trace FILE.csv] [--requests-per-hour 10] [--steps 16] [--goal-ms 1000]
        [--goal-finish-ms MS] [--most-load 0.8] [--price 3.5] [--answers 256] [--no-padding] [--check-pods] [--out FILE.json]
    python benchmarks/simulate_fleet.py --validate [--loads 0.3 0.6] [--requests 80] [--out FILE.json]
    python benchmarks/simulate_fleet.py --draw FILE.json

Requests arrive as a Poisson process; a router gives each to the GPU with the fewest requests. Out come percentiles of the
times until the first frame and until the end, utilisation, the GPUs that keep the goal, and the cost of a million tokens.

Measured: the milliseconds of a step by canvases and context, of a prompt and of a commit, on one H200 at the released
26B-A4B shape (`--table`: last lines of bench_engine.py and bench_curve.py). Between measured points they are interpolated.
Published: the lengths, from a trace (fleet_model.py names it). Assumed, each with a flag: the requests that a user sends in
an hour; the steps of a canvas (random weights never settle, so 16 forced ones were measured); the price of a GPU hour (H200s
were rented for 2.5 to 7 dollars in May 2026, says mercatus-ai.com/blog/cloud-gpu-pricing); the part of its most requests
that a GPU gets. Not simulated: a prefix cache, the memory of KV caches, the network, GPUs that fail, and hours with more
users than others.

The autoregressive server is the same simulation with one token for a canvas, in bf16: a forward of as many tokens as there
are requests, measured at this shape by bench_joint.py, and the KV caches of all requests, read at the memory's bandwidth.

More GPUs than `--pod` are not simulated one by one. A Poisson process that is split by chance gives Poisson processes, so
one pod with its share of the requests stands for all. `--check-pods` compares that with simulations of a whole fleet.

`--validate` starts `redraft serve` with the story model on this machine, measures its milliseconds, sends requests at chance
times, and simulates the same arrivals. It fails if a simulated median is more than 20% from the measured one. The last line
is JSON.
"""

import argparse
import json
import math
import platform
import shlex
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fleet_model import (
    AZURE_CONVERSATION,
    EngineRules,
    Lengths,
    StepTable,
    make_jobs,
    read_engine_table,
    read_json,
    read_trace,
    simulate,
)
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
TABLE = HERE / "results" / "engine_h200_202611c.json"
# Milliseconds of a forward by its tokens, 26B-A4B, bf16, one H200: bench_joint.py in results/verified_h200_202611.md.
FORWARD_MS = {1: 3.46, 8: 6.62, 16: 9.65, 32: 12.25, 72: 14.35, 256: 15.82}
FORWARD_CONTEXT = 512
BANDWIDTH = 4.3e9  # bytes of one H200 in a millisecond, as in bench_engine.py
KV_MB = {512: 115.3, 1536: 241.0, 4096: 293.4, 16384: 545.1}  # KVCache.count_bytes(ModelConfig(), context, bf16, 0)
AUTOREGRESSIVE = "autoregressive bf16"
ADVICE = {  # whether other programs disturbed the validation
    True: ", but other programs took the processor meanwhile: run --validate again on an idle machine",
    False: ": the simulation is wrong for this server",
}


def autoregressive_table(diffusion: StepTable) -> StepTable:
    """One token of every request in a forward. Prompts take as long as those of the diffusion engine."""
    step_ms = {}
    for context, megabytes in KV_MB.items():
        read_ms = 1e6 * megabytes / BANDWIDTH
        had_ms = 1e6 * KV_MB[FORWARD_CONTEXT] / BANDWIDTH  # the measured forward read the cache of one request
        step_ms[context] = {rows: ms + rows * read_ms - had_ms for rows, ms in FORWARD_MS.items()}
    return StepTable(step_ms=step_ms, prefill_ms=diffusion.prefill_ms)


class GoalError(ValueError):
    """Even a GPU for each request misses the goal."""


class Fleet:
    """A table with the rules of its engine, and the requests that it gets."""

    def __init__(self, table: StepTable, rules: EngineRules, lengths: Lengths, options: argparse.Namespace) -> None:
        self.table = table
        self.rules = rules
        self.lengths = lengths
        self.options = options
        self.steps = options.steps if rules.canvas > 1 else (1, 1)

    def run(self, rate: float, gpus: int, pods: int = 1, first_seed: int = 0) -> dict[str, float]:
        """Simulates `pods` pods of so many GPUs, all of which get `rate` requests a second together: means over seeds."""
        runs = []
        for number in range(self.options.seeds):
            seed = self.options.seed + first_seed + number
            count = self.options.requests * gpus * pods
            jobs = make_jobs(count, rate, self.lengths, self.steps, self.rules.canvas, seed)
            runs.append(simulate(jobs, self.table, self.rules, gpus, pods, seed))
        figures = {name: statistics.mean(run[name] for run in runs) for name in runs[0]}
        for name in ("first_p50_ms", "first_p99_ms", "finish_p50_ms", "finish_p99_ms", "finish_mean_ms"):
            figures[name] += self.options.overhead_ms
        return figures

    def keeps_goal(self, figures: dict[str, float]) -> bool:
        """Whether 99 of 100 first frames, and 99 of 100 answers if they have a goal, come in time."""
        return figures["first_p99_ms"] <= self.options.goal_ms and figures["finish_p99_ms"] <= self.options.goal_finish_ms

    def most_requests(self) -> float:
        """Requests a second that one GPU finishes when there are always more."""
        jobs = make_jobs(self.options.requests, 1e6, self.lengths, self.steps, self.rules.canvas, self.options.seed)
        simulate(jobs, self.table, self.rules, 1)
        return len(jobs) / (max(job.finish for job in jobs if job.finish is not None) / 1e3)

    def plan(self, rate: float) -> dict[str, float]:
        """The fewest GPUs that keep the goal at `rate` requests a second, and the figures of their users.

        No GPU gets more than `most_load` of the requests that it can finish. Nearer to all of them a queue grows so slowly
        that a simulation of minutes does not see where it ends.

        The search tries a number of GPUs with the same seeds. Other seeds give the figures and must keep the goal too:
        otherwise the plan would be the one that the first seeds happen to favour.
        """
        alone = self.run(1e-3, 1)
        if not self.keeps_goal(alone):
            first, finish = alone["first_p99_ms"], alone["finish_p99_ms"]
            raise GoalError(
                f"no number of GPUs keeps the goal: alone, 99 of 100 requests have a first frame within {first:.0f} ms "
                f"and end within {finish:.0f} ms: raise --goal-ms or --goal-finish-ms"
            )
        most = self.most_requests()
        least = max(1, math.ceil(rate / (most * self.options.most_load)))
        unit = 1 if least < self.options.pod else self.options.pod  # a few GPUs, or whole pods
        low = -(-least // unit)
        high = low
        while not self.keeps_goal(self.try_units(rate, high, unit)):
            low = high + 1
            high = math.ceil(1.25 * high)
            high = max(high, low)
        units = search_least(low, high, lambda count: self.keeps_goal(self.try_units(rate, count, unit)))
        while not self.keeps_goal(figures := self.try_units(rate, units, unit, self.options.seeds)):
            units += 1
        gpus = units * unit
        tokens = rate * self.mean_answer()
        price = self.options.price * gpus
        figures |= {
            "gpus": gpus,
            "requests_per_second": rate,
            "tokens_per_second": tokens,
            "load": rate / (gpus * most),
            "most": most,
        }
        return figures | {"cost_per_hour": price, "cost_per_million_tokens": price / (tokens * 3600) * 1e6}

    def try_units(self, rate: float, units: int, unit: int, first_seed: int = 0) -> dict[str, float]:
        """Figures of so many GPUs behind one router, or of one of so many pods."""
        gpus, share = (units, rate) if unit == 1 else (unit, rate / units)
        return self.run(share, gpus, first_seed=first_seed)

    def mean_answer(self) -> float:
        """Tokens of an answer, on average."""
        jobs = make_jobs(20_000, 1.0, self.lengths, self.steps, 10**9, self.options.seed)
        return sum(job.answer for job in jobs) / len(jobs)


def search_least(low: int, high: int, is_enough: Any) -> int:
    """The least number from `low` to `high` that is enough; `high` is."""
    while low < high:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle + 1
    return high


def read_fleets(options: argparse.Namespace) -> dict[str, Fleet]:
    """A fleet for each weight format, and an autoregressive one."""
    lengths = read_trace(options.trace) if options.trace else AZURE_CONVERSATION
    if options.answers:
        lengths = Lengths(tuple((weight, prompts, (options.answers,)) for weight, prompts, _ in lengths.classes))
    fleets = {}
    for quant in options.quant:
        name = "bf16" if quant == "none" else quant
        tables = [
            read_engine_table(path, None if quant == "none" else quant, options.first_ms.get(name)) for path in options.table
        ]
        table = tables[0] if len(tables) == 1 else join_tables(tables)
        if options.no_padding:
            table = StepTable(step_ms=table.step_ms, prefill_ms=table.prefill_ms, commit_ms=table.commit_ms)
        fleets[f"diffusion {name}"] = Fleet(table, EngineRules(max_running=options.running), lengths, options)
        if quant == "none" and options.ar_running:
            rules = EngineRules(max_running=options.ar_running, canvas=1, has_own_clients=False)
            fleets[AUTOREGRESSIVE] = Fleet(autoregressive_table(table), rules, lengths, options)
    return fleets


def join_tables(tables: list[StepTable]) -> StepTable:
    """One table of several. Of a point that several have, the first counts; so do the first prompts and commits."""
    step_ms: dict[int, dict[int, float]] = {}
    for table in tables:
        for context, counts in table.step_ms.items():
            step_ms[context] = counts | step_ms.get(context, {})
    with_prompts = next((table for table in tables if len(table.prefill_ms) > 1), tables[0])
    return StepTable(
        step_ms=step_ms, prefill_ms=with_prompts.prefill_ms, commit_ms=with_prompts.commit_ms, sizes=tables[0].sizes
    )


def check_pods(fleet: Fleet, rate: float, gpus: int) -> dict[str, dict[str, float]]:
    """A pod that stands for four, four pods, and one router over all GPUs, at the same rate for each GPU."""
    return {
        "one pod": fleet.run(rate * gpus, gpus),
        "four pods": fleet.run(4 * rate * gpus, gpus, 4),
        "one router": fleet.run(4 * rate * gpus, 4 * gpus),
    }


def describe_run() -> dict[str, str]:
    """Command, commit and versions."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    arguments = [Path(argument).name if Path(argument).is_absolute() else argument for argument in sys.argv[1:]]
    versions = [f"Python {platform.python_version()}", f"simpy {version('simpy')}", f"numpy {version('numpy')}"]
    return {
        "command": shlex.join(["python", "benchmarks/simulate_fleet.py", *arguments]),
        "commit": git.stdout.strip() or "unknown",
        "versions": ", ".join(versions),
    }


COLUMNS = (
    "server",
    "users",
    "GPUs",
    "load",
    "busy",
    "first frame p50",
    "p99",
    "finish p50",
    "p99",
    "tokens/s",
    "$ a million tokens",
)


def to_cells(row: dict[str, Any]) -> list[str]:
    """A row of the plan as text. Times are seconds."""
    times = (row[name] / 1e3 for name in ("first_p50_ms", "first_p99_ms", "finish_p50_ms", "finish_p99_ms"))
    counts = (f"{row['users']:,}", f"{row['gpus']:,}", f"{row['load']:.0%}", f"{row['utilisation']:.0%}")
    ends = (f"{row['tokens_per_second']:,.0f}", f"{row['cost_per_million_tokens']:.2f}")
    return [row["server"], *counts, *(f"{seconds:.2f}" for seconds in times), *ends]


def to_markdown(result: dict[str, Any]) -> str:
    """The plan as a table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(to_cells(row)) + " |" for row in result["plan"])])


def draw(path: Path) -> None:
    """Plots the time until the first frame and the end by requests of one GPU; writes the picture beside the file."""
    import matplotlib
    from matplotlib import pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "redraft"
    result = read_json(path)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharex=True)
    for name, curve in result["curves"].items():
        for axis, kind in zip(axes, ("first", "finish"), strict=True):
            rates = [point["rate"] for point in curve]
            (line,) = axis.plot(rates, [point[f"{kind}_p50_ms"] / 1e3 for point in curve], marker="o", label=f"{name}, p50")
            slowest = [point[f"{kind}_p99_ms"] / 1e3 for point in curve]
            axis.plot(rates, slowest, marker="o", linestyle="--", color=line.get_color(), label=f"{name}, p99")
    for axis, title in zip(axes, ("seconds until the first frame", "seconds until the end"), strict=True):
        axis.set_xlabel("requests a second on one GPU")
        axis.set_ylabel(title)
        axis.set_yscale("log")
    axes[0].axhline(result["goal_ms"] / 1e3, color="#999999", linewidth=1)
    axes[1].legend(fontsize="small")
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})  # the same file from the same figures


def measure_curve(fleet: Fleet, options: argparse.Namespace) -> list[dict[str, float]]:
    """Figures of one GPU by requests a second, until the goal is missed by far."""
    curve: list[dict[str, float]] = []
    rate = 1.0
    while not curve or (curve[-1]["first_p99_ms"] < 4 * options.goal_ms and len(curve) < 40):
        curve.append({"rate": rate, **fleet.run(rate, 1)})
        rate = math.ceil(rate * 1.2 * 2) / 2
    return curve


def make_plan(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Simulates all fleets and prints their table."""
    result: dict[str, Any] = describe_run()
    settings = (
        "requests_per_hour",
        "answers",
        "no_padding",
        "steps",
        "goal_ms",
        "goal_finish_ms",
        "most_load",
        "price",
        "running",
        "ar_running",
        "pod",
        "requests",
        "overhead_ms",
        "seeds",
        "seed",
    )
    result |= {name: getattr(options, name) for name in settings}
    result |= {
        "tables": [path.name for path in options.table],
        "first_ms": options.first_ms,
        "plan": [],
        "curves": {},
        "missed": {},
    }
    result["trace"] = options.trace.name if options.trace else "a minute of AzureLLMInferenceTrace_conv.csv"
    table = Table(*COLUMNS)
    for name, fleet in read_fleets(options).items():
        result["curves"][name] = measure_curve(fleet, options)
        try:
            rows = [
                {"server": name, "users": users, **fleet.plan(users * options.requests_per_hour / 3600)}
                for users in options.users
            ]
        except GoalError as error:
            result["missed"][name] = str(error)
            continue
        result["plan"] += rows
        for row in rows:
            table.add_row(*to_cells(row))
        if options.check_pods and fleet.rules.canvas > 1:
            last = rows[-1]
            result.setdefault("pods", {})[name] = check_pods(fleet, last["requests_per_second"] / last["gpus"], options.pod)
    if not result["plan"]:
        raise GoalError(next(iter(result["missed"].values())))
    console.print(table)
    for name, reason in result["missed"].items():
        console.print(f"{name}: {reason}")
    for name, kinds in result.get("pods", {}).items():
        for kind, figures in kinds.items():
            times = (
                f"{key} {figures[key]:,.0f} ms" for key in ("first_p50_ms", "first_p99_ms", "finish_p50_ms", "finish_p99_ms")
            )
            console.print(f"{name}, {kind}: {', '.join(times)}")
    return result


def parse_steps(text: str) -> tuple[int, int]:
    """16, or 12-20."""
    low, _, high = text.partition("-")
    try:
        steps = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"steps are a number or LOW-HIGH, got {text!r}: give 16 or 12-20") from None
    if not 1 <= steps[0] <= steps[1]:
        raise argparse.ArgumentTypeError(f"a canvas takes at least one step, got {text!r}: give 16 or 12-20")
    return steps


def parse_first(text: str) -> tuple[str, int, float]:
    """fp8:4096=73."""
    try:
        place, ms = text.split("=")
        quant, context = place.split(":")
        return quant, int(context), float(ms)
    except ValueError:
        message = f"milliseconds until a first step are QUANT:CONTEXT=MS, got {text!r}: give fp8:4096=73"
        raise argparse.ArgumentTypeError(message) from None


def positive(text: str) -> float:
    """A number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def parse_part(text: str) -> float:
    """A number above 0, at most 1."""
    part = positive(text)
    if part > 1:
        raise argparse.ArgumentTypeError(f"must be at most 1, got {text!r}")
    return part


def count(text: str) -> int:
    """A whole number above zero."""
    if positive(text) != int(positive(text)):
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}")
    return int(positive(text))


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", nargs="+", type=count, default=[1000, 1_000_000], help="that use the service at once")
    parser.add_argument("--requests-per-hour", type=positive, default=10.0, help="of one user (assumed)")
    parser.add_argument("--quant", nargs="+", choices=("none", "fp8"), default=["none", "fp8"])
    parser.add_argument("--table", nargs="+", type=Path, default=[TABLE], help="measured steps; of a point the first counts")
    parser.add_argument("--first-ms", nargs="+", type=parse_first, default=[], help="newer times until a first step")
    parser.add_argument("--trace", type=Path, help="CSV with ContextTokens and GeneratedTokens")
    parser.add_argument("--answers", type=count, help="tokens of every answer, instead of the trace's")
    parser.add_argument(
        "--no-padding", action="store_true", help="as if there were a CUDA graph for every number of canvases"
    )
    parser.add_argument("--steps", type=parse_steps, default=(16, 16), help="of a canvas: 16, or 12-20 by chance")
    parser.add_argument("--running", type=count, default=8, help="canvases denoised together")
    parser.add_argument("--ar-running", type=int, default=64, help="requests of the autoregressive server; 0: none")
    parser.add_argument("--goal-ms", type=positive, default=1000.0, help="for 99 of 100 first frames")
    parser.add_argument("--goal-finish-ms", type=positive, default=1e12, help="for 99 of 100 answers [none]")
    parser.add_argument(
        "--most-load", type=parse_part, default=0.8, help="part of a GPU's most requests to plan for (assumed)"
    )
    parser.add_argument("--price", type=positive, default=3.5, help="dollars of a GPU hour (assumed)")
    parser.add_argument("--overhead-ms", type=float, default=3.1, help="of HTTP: results/server_cpu2_202611.md")
    parser.add_argument("--pod", type=count, default=8, help="GPUs behind one router")
    parser.add_argument("--requests", type=count, default=None, help="for each GPU [1000]; of a load with --validate [80]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=count, default=2, help="simulations of each case, with other arrivals")
    parser.add_argument("--check-pods", action="store_true")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--loads", nargs="+", type=positive, default=[0.3, 0.6], help="parts of what the server can do")
    parser.add_argument("--out", type=Path, help="a file for the last line")
    parser.add_argument("--draw", type=Path)
    options = parser.parse_args()
    options.requests = options.requests or (80 if options.validate else 1000)
    first_ms: dict[str, dict[int, float]] = {}
    for quant, context, ms in options.first_ms:
        first_ms.setdefault(quant, {})[context] = ms
    options.first_ms = first_ms
    return options


def main() -> None:
    """Runs the simulation."""
    options, console = read_options(), Console(width=130, highlight=False)
    try:
        if options.draw:
            draw(options.draw)
            return
        if options.validate:
            from fleet_validation import validate

            result = describe_run() | validate(options, console)
        else:
            result = make_plan(options, console)
    except ValueError as error:
        sys.exit(str(error))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    if options.validate and not result["is_valid"]:
        sys.exit("a simulated median is more than 20% from the measured one" + ADVICE[result["is_disturbed"]])


if __name__ == "__main__":
    main()
