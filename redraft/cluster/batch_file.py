"""OpenAI's batch format: lines of requests in, lines of answers out.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    {"id": "batch_req_...", "custom_id": "a", "response": {"status_code": 200, "body": {...}, ...}, "error": null}

Every line of the input gets one line of the output. A request that the server refuses has the server's status and error
body as its response. A line that is no request has `"response": null` and an error with a code, a message and the line's
number. OpenAI refuses a whole file for such a line, and has these errors in the batch's list; codes that OpenAI has too
(invalid_json_line, missing_required_parameter, duplicate_custom_id) have its names.

The id of an answer is a hash of the line that it answers. A resumed job finds by it what has been answered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from redraft.cluster.jobs import Item, OutputFile, Result, to_line, whole_lines
from redraft.config import parse_json, show_value

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/fim/completions",
    "/v1/apply/completions",
    "/v1/edit/completions",
    "/v1/canvas",
    "/v1/canvas/edit",
    "/v1/canvas/decide",
    "/v1/canvas/sudoku",
    "/v1/canvas/autoregressive",
    "/completion",
    "/infill",
)
ID_PREFIX = "batch_req_"


class BatchLineError(ValueError):
    """A line that is no request. `param` names the field that is wrong."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True)
class BatchRequest:
    """A request of a batch, with its body as JSON."""

    id: str
    custom_id: str
    url: str
    body: str

    def to_text(self) -> str:
        """As the text of an item. The body stays JSON: it may be nested as deeply as Python can parse."""
        return json.dumps([self.id, self.custom_id, self.url]) + "\n" + self.body

    @classmethod
    def from_text(cls, text: str) -> BatchRequest:
        """The request of an item."""
        head, _, body = text.partition("\n")
        identifier, custom_id, url = json.loads(head)
        return cls(identifier, custom_id, url, body)


@dataclass(frozen=True)
class BatchLine:
    """A line of the input: a request, or an error."""

    number: int  # from 1
    id: str
    custom_id: str | None  # None where the line has none of its own
    request: BatchRequest | None
    error: BatchLineError | None


# 1. The input


def read_batch(path: Path) -> list[BatchLine]:
    """Reads all lines of a batch, except for empty ones."""
    lines = list(parse_lines(path.read_bytes()))
    if not lines:
        raise ValueError(f"{path} has no requests")
    return lines


def parse_lines(content: bytes) -> Iterator[BatchLine]:
    """Parses the lines of a batch. The second line with a custom_id is an error."""
    first_lines: dict[str, int] = {}
    for number, raw in enumerate(content.split(b"\n"), 1):  # not splitlines: JSON strings may hold other line ends
        raw = raw.strip()
        if not raw:
            continue
        custom_id = None
        try:
            record = _parse_json(raw)
            custom_id = _parse_custom_id(record, first_lines)
            first_lines[custom_id] = number
            identifier = _make_id(raw)
            request = BatchRequest(identifier, custom_id, *_parse_request(record))
            yield BatchLine(number, identifier, custom_id, request, None)
        except BatchLineError as error:
            # With its number: such lines may be equal.
            yield BatchLine(number, _make_id(b"%d %s" % (number, raw)), custom_id, None, error)


def _make_id(content: bytes) -> str:
    return ID_PREFIX + hashlib.sha256(content).hexdigest()[:24]


def _parse_json(raw: bytes) -> dict[str, Any]:
    try:
        record = parse_json(raw.decode("utf-8-sig"))
    except ValueError as error:  # from JSON or UTF-8 decoding
        raise BatchLineError("invalid_json_line", f"the line is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise BatchLineError("invalid_json_line", "the line is JSON, but not an object with custom_id, method, url and body")
    return record


def _require(record: dict[str, Any], field: str, kind: type, what: str) -> Any:
    """The value of a field of the line."""
    if record.get(field) is None:
        raise BatchLineError("missing_required_parameter", f"the line has no {field}", field)
    if not isinstance(record[field], kind):
        raise BatchLineError("invalid_type", f"{field} must be {what}, got {show_value(record[field])}", field)
    return record[field]


def _parse_custom_id(record: dict[str, Any], first_lines: dict[str, int]) -> str:
    custom_id: str = _require(record, "custom_id", str, "a text")
    if not custom_id:
        raise BatchLineError("missing_required_parameter", "the custom_id is empty", "custom_id")
    if custom_id in first_lines:
        message = f"line {first_lines[custom_id]} has the custom_id {show_value(custom_id)} already, and is the one answered"
        raise BatchLineError("duplicate_custom_id", message, "custom_id")
    return custom_id


def _parse_request(record: dict[str, Any]) -> tuple[str, str]:
    """The url of a request, and its body as JSON."""
    method = _require(record, "method", str, "POST")
    if method != "POST":
        raise BatchLineError("invalid_method", f"method must be POST, got {show_value(method)}", "method")
    url = _require(record, "url", str, "a path of the server")
    if url not in ENDPOINTS:
        message = f"url must be one of {', '.join(ENDPOINTS)}, got {show_value(url)}"
        raise BatchLineError("invalid_url", message, "url")
    body = _require(record, "body", dict, "an object")
    if body.get("stream") not in (None, False):
        message = f"a batch is not streamed: leave stream out, got {show_value(body['stream'])}"
        raise BatchLineError("unsupported_value", message, "body.stream")
    return url, json.dumps({**body, "stream": False})  # canvas routes would stream without it


# 2. The output


def answer_result(number: int, request: BatchRequest, status: int, body: Any) -> Result:
    """The result of a request that the server has answered, or refused."""
    response = {"status_code": status, "request_id": uuid4().hex, "body": body}
    record = {"id": request.id, "custom_id": request.custom_id, "response": response, "error": None}
    counts = {"answers": 1, "errors": int(status != 200), "tokens": count_tokens(body)}
    return Result(number, to_line(record), counts)


def error_result(line: BatchLine) -> Result:
    """The result of a line that is no request."""
    assert line.error is not None
    error = {"code": line.error.code, "message": str(line.error), "param": line.error.param, "line": line.number}
    record = {"id": line.id, "custom_id": line.custom_id, "response": None, "error": error}
    return Result(line.number, to_line(record), {"answers": 1, "errors": 1})


def count_tokens(body: Any) -> int:
    """The new tokens of a response of any of the endpoints."""
    if isinstance(body, list):  # of several completions
        return sum(map(count_tokens, body))
    if not isinstance(body, dict):
        return 0
    usage = body.get("usage")
    if isinstance(usage, dict):
        return usage.get("completion_tokens") or usage.get("output_tokens") or 0
    events = [event["timings"] for event in body.get("events", ()) if "timings" in event]
    timings = [*events, *([body["timings"]] if "timings" in body else [])]
    return sum(each.get("predicted_n", 0) for each in timings)


# 3. Resuming


def find_answered(output: OutputFile, lines: Sequence[BatchLine], source: str) -> tuple[set[int], int]:
    """The numbers of the lines that the output answers, and the bytes of these answers.

    Refuses an output with lines that this batch would not have produced.
    """
    lines_by_id = {line.id: line for line in lines}
    answered: set[int] = set()
    written = output.read()
    for number, raw in enumerate(whole_lines(written), 1):
        try:
            record = parse_json(raw.decode())
            identifier = str(record["id"])
            custom_id = record["custom_id"]
            is_ours = identifier.startswith(ID_PREFIX) and {"response", "error"} <= record.keys()
        except (ValueError, KeyError, TypeError):
            is_ours = False
        if not is_ours:
            raise ValueError(f"{output.path} was not written by redraft batch (line {number}): name another output")
        line = lines_by_id.get(identifier)
        if line is None or line.custom_id != custom_id:
            message = f"answers {show_value(custom_id)}, and {source} has no such request, or has changed it"
            raise ValueError(f"line {number} of {output.path} {message}: name another output")
        if line.number in answered:
            raise ValueError(f"line {number} of {output.path} answers {show_value(custom_id)} again: remove that line")
        answered.add(line.number)
    return answered, written.rfind(b"\n") + 1


def to_items(lines: Sequence[BatchLine]) -> list[Item]:
    """The requests among these lines, as items of a job."""
    return [Item(line.number, line.request.to_text()) for line in lines if line.request is not None]
