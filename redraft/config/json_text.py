"""JSON text from users and files: parsed only as deep as it may be nested.

The parser of Python goes deeper until no stack is left. If Python collects garbage at that moment, the finalizers of other
objects fail with a RecursionError. So the depth is counted before the text is parsed.
"""

import json
import re
from typing import Any

MAX_DEPTH = (
    200  # of arrays and objects inside one another; pydantic, which parses the bodies of requests, has the same limit
)
STRINGS_AND_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)  # the last string may have no end


class JSONDepthError(ValueError):
    """JSON that is nested too deeply."""


def parse_json(text: str, **options: Any) -> Any:
    """The value of JSON text. A mistake in the text is a ValueError. `options` are those of `json.loads`."""
    check_depth(text)
    return json.loads(text, **options)


def check_depth(text: str) -> None:
    """Refuses JSON that is nested deeper than MAX_DEPTH."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return  # the usual case; what follows does not count what stands in strings
    depth = 0
    for match in STRINGS_AND_BRACKETS.finditer(text):
        if match[0] in "[{":
            depth += 1
        elif match[0] in "]}":
            depth -= 1
        if depth > MAX_DEPTH:
            raise JSONDepthError(f"it is nested too deeply: more than {MAX_DEPTH} arrays and objects inside one another")
