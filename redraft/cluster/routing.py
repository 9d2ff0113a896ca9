"""Routing: which model a request names, and to which conversation it belongs.

The session id of a conversation is what the client gives (`x-session-id`, `prompt_cache_key`), else a hash of its beginning:
the system message and the first message of the user, which stay while the conversation grows. Ray's ConsistentHashRouter
sends one session id to one replica. A request without a conversation has none, and Ray spreads such requests evenly.

Only these fields of the body are read; the replica parses and checks all of it. A body that is no JSON has no fields, and
the replica refuses it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

SESSION_HEADER = b"x-session-id"  # Ray's own name
SHOW = "/api/show"
LONGEST_SESSION = 256  # characters that count
LONGEST_VALUE = 4096  # characters of an image that count
MOST_VALUES = 300_000  # JSON values of a body; more are refused by the replica


class Fields(BaseModel):
    """The fields of a body that decide where it goes. They may be of any type here."""

    model_config = ConfigDict(extra="ignore")
    model: Any = None
    name: Any = None  # what older clients of Ollama call the model that they want to be shown
    prompt_cache_key: Any = None
    system: Any = None
    instructions: Any = None
    messages: Any = None
    input: Any = None

    def model_name(self, path: str) -> str:
        """The model that a request to this path names; empty if it names none."""
        named = (self.model, self.name) if path == SHOW else (self.model,)
        return next((value for value in named if isinstance(value, str) and value), "")


@dataclass(frozen=True)
class Beginning:
    """What stays of a conversation while it grows."""

    system: Any
    first: Any


def read_fields(body: bytes) -> Fields:
    """The fields of a body; none if it is not the JSON that a replica accepts."""
    from redraft.server.bodies import check_json_size

    try:
        check_json_size(body, MOST_VALUES)
        return Fields.model_validate_json(body)
    except (ValidationError, ValueError):
        return Fields()


def session_of(headers: Mapping[bytes, bytes], fields: Fields) -> str:
    """The session id of a request, or an empty text."""
    if given := headers.get(SESSION_HEADER, b"").decode("latin-1"):
        return given[:LONGEST_SESSION]
    if isinstance(fields.prompt_cache_key, str) and fields.prompt_cache_key:
        return fields.prompt_cache_key[:LONGEST_SESSION]
    beginning = find_beginning(fields)
    if beginning is None:
        return ""
    text = json.dumps([beginning.system, beginning.first], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def find_beginning(fields: Fields) -> Beginning | None:
    """The system message and the first message of the user; None where there is no conversation."""
    system: Any = fields.system or fields.instructions
    messages = fields.messages if fields.messages is not None else fields.input
    if isinstance(messages, str):
        return Beginning(system, messages) if messages else None
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            return None
        if message.get("role") in ("system", "developer"):
            system = message.get("content")
        elif message.get("role") == "user":
            return Beginning(system, plain_text(message.get("content")))
    return None


def plain_text(content: Any) -> Any:
    """The text of a content of one part, which a client may send as a text later; any other content with short images."""
    if not isinstance(content, list):
        return content
    if len(content) == 1 and isinstance(content[0], dict) and "text" in content[0]:
        return content[0]["text"]
    return [shorten_values(part) for part in content]


def shorten_values(part: Any) -> Any:
    """A part of a content, with long texts in the place of which stand their length and their ends.

    An image has megabytes, and hashing them all would hold up other requests.
    """
    if isinstance(part, dict):
        return {key: value if key == "text" else shorten_values(value) for key, value in part.items()}
    if isinstance(part, str) and len(part) > LONGEST_VALUE:
        return [len(part), part[: LONGEST_VALUE // 2], part[-LONGEST_VALUE // 2 :]]
    return part
