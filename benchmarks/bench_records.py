"""Records under a JSON schema without limits: prints them, and the lengths of their values.

    python benchmarks/bench_records.py --count 20

Every record is valid by construction; the lengths show whether its values make sense. Ends with a line of JSON.
"""

import argparse
import json
import time

import redraft

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "email": {"type": "string", "format": "email"},
        "height": {"type": "number"},
        "pet": {"type": "string"},
    },
    "required": ["name", "age", "email", "height", "pet"],
}
PROMPT = "Once upon a time, there was a little girl named Lily. She had a dog. This is what we know of her:\n"


def main() -> None:
    """Prints the records, then the longest value of each field as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--check", default=None)
    arguments = parser.parse_args()
    writer = redraft.load(dtype="float32")
    longest: dict[str, int] = {}
    tokens = 0
    begin = time.perf_counter()
    for seed in range(arguments.count):
        answer = writer.write(
            PROMPT,
            schema=SCHEMA,
            seed=seed,
            max_tokens=arguments.max_tokens,
            check=arguments.check,
        )
        print(answer.text, flush=True)
        tokens += len(answer.ids)
        for name, value in json.loads(answer.text).items():
            longest[name] = max(longest.get(name, 0), len(str(value)))
    seconds = round(time.perf_counter() - begin, 1)
    print(json.dumps({"records": arguments.count, "tokens": tokens, "seconds": seconds, "longest": longest}))


if __name__ == "__main__":
    main()
