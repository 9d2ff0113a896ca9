"""Records the runs that the web page plays before the user has made one: redraft/server/static/recorded_*.json.

Each file is a list of runs of one mode: the request, every event of the server's answer, and the time of each event in
milliseconds since the first. A request is sent three times; the run of median length is kept. The Sudoku file has two
runs of the same puzzle: by diffusion, then cell after cell.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import httpx

STATIC = Path(__file__).parent.parent / "redraft" / "server" / "static"
REPEATS = 3
PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
STORY = {"prompt": "Once upon a time", "max_tokens": 96, "canvas_length": 96, "seed": 1, "candidates": 3}
GAPS = "Tom was very [[ 1 ]] because he lost his ball."
FAULTY = "The cat sat on the mat and looked at the bird. It wanted to sleep the bird."
QUESTION = "Lily lost her favorite doll. She looked everywhere but could not find it. She was very"
ANSWERS = [" sad", " happy", " hungry"]
REQUESTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "sudoku": [
        ("/v1/canvas/sudoku", {"puzzle": PUZZLE, "seed": 1}),
        ("/v1/canvas/sudoku", {"puzzle": PUZZLE, "seed": 1, "autoregressive": True}),
    ],
    "write": [("/v1/canvas", STORY)],
    "fill": [("/v1/canvas", {"text": GAPS, "seed": 1, "candidates": 3})],
    "edit": [("/v1/canvas/edit", {"text": FAULTY, "strength": 0.1, "seed": 1, "candidates": 3})],
    "decide": [
        (
            "/v1/canvas/decide",
            {"messages": [{"role": "user", "content": QUESTION}], "choices": ANSWERS},
        )
    ],
}


def record(address: str, kind: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Sends a request and returns its run: events, with the time of each since the first."""
    events = []
    times = []
    with httpx.stream("POST", address + path, json=body, timeout=600) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            event = json.loads(line.removeprefix("data: "))
            event.pop("memory", None)  # of the server, not of the run
            events.append(event)
            times.append(now)
    if events[-1]["type"] != "end":
        raise SystemExit(f"{path} did not end: {events[-1]}")
    return {
        "kind": kind,
        "request": {"path": path, "body": body},
        "events": events,
        "times": [round(1000 * (moment - times[0])) for moment in times],
    }


def main() -> None:
    """Writes the files and prints what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="of a server with the model that ships: redraft serve")
    address = parser.parse_args().address
    summary = {}
    for kind, requests in REQUESTS.items():
        runs = []
        for path, body in requests:
            repeats = [record(address, kind, path, body) for _ in range(REPEATS)]
            runs.append(sorted(repeats, key=lambda run: run["times"][-1])[REPEATS // 2])
        text = json.dumps(runs, ensure_ascii=False, separators=(",", ":"))
        (STATIC / f"recorded_{kind}.json").write_text(text + "\n", encoding="utf-8")
        ends = [run["events"][-1]["text"] for run in runs]
        summary[kind] = {"milliseconds": [run["times"][-1] for run in runs], "bytes": len(text), "texts": ends}
    print(json.dumps(summary, ensure_ascii=False))


if __name__ == "__main__":
    main()
