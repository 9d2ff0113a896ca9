"""What a pattern costs: one step of the model that ships, without one and with one, on this machine. The last line is JSON.

    python benchmarks/bench_patterns.py [--steps 16] [--rounds 3] [--released]

`--released`: instead, what is added to a step at the released vocabulary of 262,144 tokens (random words here) and canvas of
256, under a schema of about 200 states, on a GPU if there is one.
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
from redraft.constraints import json_schema
from redraft.constraints.constraints import Constraints, build_canvas_constraints
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


def steps(writer: redraft.Writer, count: int, options: dict[str, Any]) -> list[float]:
    """Milliseconds between the drafts of one page that never settles."""
    events = writer.stream(
        "A boy named Tom:\n", seed=1, max_tokens=256, max_steps=count, confidence_threshold=1e-9, **options
    )
    at = [time.perf_counter() for event in events if isinstance(event, redraft.Draft)]
    return [1e3 * (b - a) for a, b in pairwise(at)]


def released(rounds: int) -> dict[str, float]:
    """Milliseconds that the sums over matching texts take, median, and how large the automaton is."""
    lots = random.Random(0)
    letters = b'etaoinshrdlucmfwypvbgkjqxz0123456789{}[]":,.-_'
    lengths = [min(1 + int(lots.expovariate(0.25)), 12) for _ in range(262_142)]
    words = [lots.choice((b"", b" ")) + bytes(lots.choices(letters, k=length)) for length in lengths]
    fields = {f"field_{number}": {"type": kind} for number, kind in enumerate(("string", "integer", "boolean") * 3)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    automaton = AutomatonCompiler([None, b"", *words], (1,)).compile(json_schema.build_regex(schema))
    device, taken = torch.device("cuda" if torch.cuda.is_available() else "cpu"), []
    page = Constraints(automaton=automaton).canvas_automaton(automaton.start, 0, 256, 256)
    constraints = build_canvas_constraints([Constraints(automaton=automaton)], 0, 256, 262_144, (1,), device, [page])
    logits = torch.randn(1, 256, 262_144, generator=torch.Generator().manual_seed(0)).to(device) * 5
    for _ in range(rounds + 1):
        began = time.perf_counter()
        constraints.apply_automata(logits)
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - began))
    return {"states": automaton.states, "pairs": len(automaton.from_R), "ms": statistics.median(taken[1:])}


def main() -> None:
    """Rounds alternate between the cases; the figures are medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--released", action="store_true")
    options = parser.parse_args()
    if options.released:
        found = released(options.rounds)
        print(f"{found['states']} states, {found['pairs']} pairs: {found['ms']:.2f} ms a step")
        print(json.dumps(found))
        return
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
