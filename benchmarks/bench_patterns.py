"""What a pattern costs: one step of the model that ships, without one and with one, on this machine. The last line is JSON.

python benchmarks/bench_patterns.py [--steps 16] [--rounds 3]
"""

import argparse
import json
import statistics
import time
from itertools import pairwise
from typing import Any

import redraft

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
}
CASES: dict[str, dict[str, Any]] = {"none": {}, "choices": {"choices": ["yes", "no"]}, "schema": {"schema": SCHEMA}}


def steps(writer: redraft.Writer, count: int, options: dict[str, Any]) -> list[float]:
    """Milliseconds between the drafts of one page that never settles."""
    events = writer.stream(
        "A boy named Tom:\n", seed=1, max_tokens=256, max_steps=count, confidence_threshold=1e-9, **options
    )
    at = [time.perf_counter() for event in events if isinstance(event, redraft.Draft)]
    return [1e3 * (b - a) for a, b in pairwise(at)]


def main() -> None:
    """Rounds alternate between the cases; the figures are medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    writer, taken = redraft.load(dtype="float32"), {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, asked in CASES.items():
            taken[name] += steps(writer, options.steps, asked)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    for name, median in medians.items():
        print(f"{name:8} {median:6.1f} ms a step, {median / medians['none'] - 1:+.0%}")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
