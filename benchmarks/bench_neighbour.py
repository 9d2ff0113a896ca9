"""A story on the CPU beside other programs: seconds, and how many times the idle time.

Each row starts `redraft "Once upon a time"` in a process of its own: on an idle machine, beside one busy single-threaded
program, beside one busy program for each core. "fixed" keeps PyTorch's thread count, as --threads does; "adaptive" is the
default. The last line is JSON.

    python benchmarks/bench_neighbour.py [--repeat 3] [--tokens 256]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from redraft.kernels.threads import core_count

SPIN = "x = 0\nwhile True:\n    x += 1"
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


def story_seconds(tokens: int, *flags: str) -> float:
    """Wall time of one whole process."""
    command = [sys.executable, "-m", "redraft", "Once upon a time", "--seed", "1", "--device", "cpu", "-n", str(tokens)]
    began = time.perf_counter()
    subprocess.run([*command, *flags], check=True, capture_output=True, env=ENVIRONMENT)
    return time.perf_counter() - began


def measure(tokens: int, repeat: int, neighbours: int, *flags: str) -> float:
    """Median seconds of a story beside some busy programs."""
    busy = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(neighbours)]
    try:
        return statistics.median(story_seconds(tokens, *flags) for _ in range(repeat))
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    cores = core_count()
    ways = {"adaptive": (), "fixed": ("--threads", str(cores)), "one thread": ("--threads", "1")}
    story_seconds(8)  # the files are in memory
    result: dict[str, dict[str, float]] = {}
    print(f"{'threads':<12}{'idle':>10}{'1 busy':>16}{f'{cores} busy':>16}")
    for name, flags in ways.items():
        seconds = {count: measure(options.tokens, options.repeat, count, *flags) for count in sorted({0, 1, cores})}
        result[name] = {f"{count} neighbours": round(value, 2) for count, value in seconds.items()}
        cells = [f"{value:7.1f} s {value / seconds[0]:4.1f}x" for value in seconds.values()]
        print(f"{name:<12}" + "".join(f"{cell:>16}" for cell in cells), flush=True)
    print(json.dumps({"bench": "neighbour", "cores": cores, "tokens": options.tokens, "seconds": result}))


if __name__ == "__main__":
    main()
