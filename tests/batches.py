"""Batches for tests: a small model in a folder, files of requests, and what their answers say."""

import json
from pathlib import Path

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "seed": 1}
TEXT = {"prompt": "abc", "max_tokens": 4, "seed": 1}


def request(custom_id: str, url: str = "/v1/completions", **body) -> dict:
    """A line of a batch."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body or TEXT}


def write_batch(path: Path, lines: list[dict | str | bytes]) -> Path:
    """A file of requests. Texts and bytes are lines as they are."""
    raw = [
        line if isinstance(line, bytes) else line.encode() if isinstance(line, str) else json.dumps(line).encode()
        for line in lines
    ]
    path.write_bytes(b"".join(line + b"\n" for line in raw))
    return path


def read_answers(path: Path) -> list[dict]:
    """The lines of an output file."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def choices_by_id(path: Path) -> dict[str, object]:
    """What was answered to each custom_id. Refuses a file that answers one twice."""
    answers = read_answers(path)
    choices = {answer["custom_id"]: answer["response"]["body"]["choices"] for answer in answers}
    assert len(choices) == len(answers)
    return choices
