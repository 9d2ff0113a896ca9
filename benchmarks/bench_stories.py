"""Stories of the small model that ships with redraft: seconds for one alone and for several at once. The last line is JSON.

python benchmarks/bench_stories.py [--counts 1 4 16] [--tokens 256]
"""

import argparse
import json
import time

import torch

import redraft

PROMPT = "Once upon a time"
RUNS = 3  # after a warm-up run, which builds kernels and captures graphs; the fastest counts


def main() -> None:
    """Prints the seconds for each number of stories."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    writer = redraft.load("tiny", device=device)
    result = {}
    for count in options.counts:
        seconds = []
        for _ in range(1 + RUNS):
            began = time.perf_counter()
            answers = writer.write([PROMPT] * count, seed=1, max_tokens=options.tokens)
            seconds.append(time.perf_counter() - began)
        steps = [answer.stats.steps for answer in answers]
        tokens = sum(answer.stats.new_tokens for answer in answers)
        result[count] = {"seconds": min(seconds[1:]), "first_seconds": seconds[0], "tokens": tokens, "steps": max(steps)}
        print(f"{count} stories: {min(seconds[1:]):.3f} s, {tokens} tokens, at most {max(steps)} steps", flush=True)
    print(json.dumps({"device": device.type, "stories": result}))


if __name__ == "__main__":
    main()
