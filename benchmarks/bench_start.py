"""From the start of the process: help, a usage error, first frame, finished story, a Sudoku; beside `import torch` alone.

Every row is a process of its own, the best of some. A ratio is the row's time over that of `import torch` in the same run.
The last line is JSON.

    python benchmarks/bench_start.py [--repeat 3] [--chat]

`--chat` also starts `redraft chat` with SmolLM2, which `redraft pull smollm2` has fetched, and waits for its first answer;
the most memory of such a process is printed too.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

FIRST_FRAME = """
import sys
from redraft.cli import main
from redraft.writer import Writer
stream = Writer.stream
def watched(self, *args, **options):
    for number, event in enumerate(stream(self, *args, **options)):
        if number == 0:
            print("frame", file=sys.stderr, flush=True)
        yield event
Writer.stream = watched
sys.argv = ["redraft", "Once upon a time", "--seed", "1", "--json"]
main.main()
"""
PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes
QUESTION = "What is the capital of France?\n"


def process_seconds(*arguments: str, code: int = 0, text: str | None = None) -> float:
    """Wall time of one Python process, which reads this text and ends with this exit code."""
    began = time.perf_counter()
    process = subprocess.run([sys.executable, *arguments], capture_output=True, input=text.encode() if text else None)
    seconds = time.perf_counter() - began
    if process.returncode != code:
        raise SystemExit(f"{arguments} ended with {process.returncode}: {process.stderr.decode()}")
    return seconds


def story_seconds() -> tuple[float, float]:
    """Seconds to the first frame, and to the end of the story."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", FIRST_FRAME], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    while line := process.stderr.readline():
        if line == "frame\n":
            break
    else:
        raise SystemExit("the story did not begin")
    first = time.perf_counter() - began
    process.stderr.read()
    if process.wait():
        raise SystemExit("the story failed")
    return first, time.perf_counter() - began


def main() -> None:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--chat", action="store_true", help="an answer of SmolLM2 too")
    options = parser.parse_args()
    repeat = options.repeat
    process_seconds("-c", "import torch")  # the files are in memory
    chats = [process_seconds("-m", "redraft", "chat", text=QUESTION) for _ in range(repeat)] if options.chat else []
    chat_gb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * MAXRSS_UNIT / 1e9  # no process before them is larger
    stories = [story_seconds() for _ in range(repeat)]
    sudoku = ("-m", "redraft", "sudoku", PUZZLE, "--json", "--seed", "1")
    seconds = {
        "import torch": min(process_seconds("-c", "import torch") for _ in range(repeat)),
        "redraft --version": min(process_seconds("-m", "redraft", "--version") for _ in range(repeat)),
        "redraft --help": min(process_seconds("-m", "redraft", "--help") for _ in range(repeat)),
        "a usage error": min(process_seconds("-m", "redraft", "--steps", "x", code=2) for _ in range(repeat)),
        "first frame": min(first for first, _ in stories),
        "finished story": min(whole for _, whole in stories),
        "redraft sudoku": min(process_seconds(*sudoku) for _ in range(repeat)),
    }
    if chats:
        seconds["redraft chat"] = min(chats)
        print(f"redraft chat: {chat_gb:.2f} GB at most")
    for name, value in seconds.items():
        print(f"{name:<20}{value:7.2f} s {value / seconds['import torch']:6.1f}x")
    print(json.dumps({"bench": "start", "seconds": {name: round(value, 2) for name, value in seconds.items()}}))


if __name__ == "__main__":
    main()
