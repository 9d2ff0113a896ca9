"""The cost of a constraint: a denoising step of the shipped model with and without one. The last line is JSON.

    python benchmarks/bench_patterns.py [--steps 16] [--rounds 3] [--released]

`--released` instead measures the time that a schema of about 200 states adds to a step, at the released vocabulary of
262,144 tokens (random words) and canvas of 256 positions, on a GPU if there is one.
"""

import argparse
import json
import random
import statistics
import time
from itertools import pairwise
from typing import Any

import torch

import redraft
from redraft.constraints.budget import Budget
from redraft.constraints.constraints import Constraints, build_canvas_constraints
from redraft.constraints.pattern_compiler import Pattern, compile_one
from redraft.constraints.token_automaton import AutomatonCompiler

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


def time_steps(writer: redraft.Writer, count: int, options: dict[str, Any]) -> list[float]:
    """Returns the milliseconds between the drafts of one canvas that never settles."""
    events = writer.stream(
        "A boy named Tom:\n", seed=1, max_tokens=256, max_steps=count, confidence_threshold=1e-9, **options
    )
    times = [time.perf_counter() for event in events if isinstance(event, redraft.Draft)]
    return [1e3 * (later - earlier) for earlier, later in pairwise(times)]


def time_released(rounds: int) -> dict[str, float]:
    """Returns the median milliseconds of forward-backward and Viterbi, and the size of the automaton."""
    dice = random.Random(0)
    letters = b'etaoinshrdlucmfwypvbgkjqxz0123456789{}[]":,.-_'
    lengths = [min(1 + int(dice.expovariate(0.25)), 12) for _ in range(262_142)]
    words = [dice.choice((b"", b" ")) + bytes(dice.choices(letters, k=length)) for length in lengths]
    fields = {f"field_{number}": {"type": kind} for number, kind in enumerate(("string", "integer", "boolean") * 3)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    automaton = compile_one(AutomatonCompiler([None, b"", *words], (1,)), Pattern(schema=schema), Budget())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times = []
    canvas = Constraints(automaton=automaton).canvas_automaton(automaton.start, 0, 256, 256)
    constraints = build_canvas_constraints([Constraints(automaton=automaton)], 0, 256, 262_144, (1,), device, [canvas])
    logits = torch.randn(1, 256, 262_144, generator=torch.Generator().manual_seed(0)).to(device) * 5
    for _ in range(rounds + 1):
        began = time.perf_counter()
        constraints.apply_automata(logits)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return {"states": automaton.states, "pairs": len(automaton.from_R), "ms": statistics.median(times[1:])}


def main() -> None:
    """Times every case in alternating rounds and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--released", action="store_true")
    options = parser.parse_args()
    if options.released:
        result = time_released(options.rounds)
        print(f"{result['states']} states, {result['pairs']} pairs: {result['ms']:.2f} ms a step")
        print(json.dumps(result))
        return
    writer = redraft.load(dtype="float32")
    taken: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, constraint in CASES.items():
            taken[name] += time_steps(writer, options.steps, constraint)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    for name, median in medians.items():
        print(f"{name:8} {median:6.1f} ms a step, {median / medians['none'] - 1:+.0%}")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
