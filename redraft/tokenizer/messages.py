"""Messages of a conversation and declarations of tools: checked, and brought into the form that templates expect."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from redraft.config import parse_json, show_value

ROLES = ("system", "developer", "user", "assistant", "model", "tool")
KEPT_ROLES = ("system", "developer", "user", "tool")  # a template may leave out parts of the others' messages: thoughts


Message = Mapping[str, Any]


class TokenizerError(ValueError):
    """A tokenizer or a conversation that cannot be used; the message says why."""


def check_messages(messages: Sequence[Message]) -> None:
    """Refuses a list that is not a conversation, and content that the template would drop silently."""
    if not messages or isinstance(messages, str | Mapping):
        raise TokenizerError("a conversation needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else message
            raise TokenizerError(f"message {index} has the role {role!r}; known are {', '.join(ROLES)}")
        content = message.get("content")
        calls = message.get("tool_calls")
        if content is None and not calls:
            raise TokenizerError(f"message {index} ({message['role']}) has neither content nor tool_calls")
        if isinstance(content, Mapping) and message["role"] == "tool" and not is_image(content):
            continue
        if is_image(content):
            raise TokenizerError(f"message {index} has an image as its content: put it into a list of parts")
        for part in content if isinstance(content, list | tuple) else [content or ""]:
            if is_image(part):
                _check_image(part, message["role"], index)
                continue
            text = part.get("text") if isinstance(part, Mapping) else part
            if not isinstance(text, str):
                raise TokenizerError(f"message {index} has content that is not text: {_describe_part(part)}")
        if calls is not None and not isinstance(calls, list | tuple):
            raise TokenizerError(f"message {index}: tool_calls must be a list, got {calls!r}")
        for call in calls or []:
            _check_function_name(call, f"message {index}: a tool call")


def _describe_part(part: Any) -> str:
    """A part that is no text, in a few words: it may hold the megabytes of a picture."""
    if isinstance(part, Mapping) and part.get("type") in ("image_url", "input_image"):
        return f'a part of type {part["type"]!r}; an image is {{"type": "image", "image": bytes, a data URL or a path}}'
    return show_value(part)


def is_image(part: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a part of a message's content is an image: {"type": "image", "image": bytes, a data URL or a path}."""
    return isinstance(part, Mapping) and part.get("type") == "image"


def _check_image(part: Mapping[str, Any], role: str, index: int) -> None:
    if role != "user":
        raise TokenizerError(f"message {index} ({role}) has an image; only user messages take images")
    if part.get("image") is None:
        keys = ", ".join(map(repr, part))[:200]
        raise TokenizerError(
            f'message {index} has content that is not text: an image needs the key "image" (bytes, a data URL or a path), '
            f"and this one has {keys}"
        )


def image_sources(messages: Sequence[Message]) -> list[Any]:
    """The images of a conversation, in order, as they were given."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return [part.get("image") for part in parts if is_image(part)]


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Refuses tools that are not a list of named functions."""
    if tools is not None and not isinstance(tools, list | tuple):
        raise TokenizerError(f"tools must be a list of declarations, got {tools!r}")
    for tool in tools or []:
        _check_function_name(tool, "a tool")


def _check_function_name(entry: Any, label: str) -> None:
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise TokenizerError(f"{label} has no name: {entry!r}")


def prepare_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in the form that templates expect.

    OpenAI clients send text in parts, the arguments of a call as JSON text, and a tool's response with the id of the call
    instead of the function's name.
    """
    function_names: dict[str, str] = {}  # by the id of the call
    prepared = []
    for original in messages:
        message = dict(original)
        content = message.get("content")
        if isinstance(content, list | tuple):
            has_image = any(map(is_image, content))
            message["content"] = _prepare_parts(content) if has_image else "".join(text_parts(message))
        calls = []
        for call in message.get("tool_calls") or []:
            function = dict(call.get("function", call))
            function["arguments"] = parse_arguments(function)
            function_names[call.get("id", "")] = function.get("name", "")
            calls.append({**call, "function": function})
        if calls:
            message["tool_calls"] = calls
        if message["role"] == "tool" and "name" not in message:
            message["name"] = function_names.get(message.get("tool_call_id", ""), "tool")
        prepared.append(message)
    return prepared


def number_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Prepared messages in which a call and its result have an id of nine letters and digits, as Mistral's templates ask.

    A result without an id belongs to the first call that has no result yet.
    """
    waiting: list[str] = []  # ids of the calls without a result
    numbered: list[dict[str, Any]] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            ids = [_short_id(call.get("id") or f"{len(numbered)}.{number}") for number, call in enumerate(calls)]
            waiting += ids
            calls = [{**call, "id": short} for call, short in zip(calls, ids, strict=True)]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            short = _short_id(given) if given else next(iter(waiting), _short_id(""))
            waiting = [other for other in waiting if other != short]
            message = {**message, "tool_call_id": short}
        numbered.append(dict(message))
    return numbered


def _short_id(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:9]


def split_calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Prepared messages of which each has one call at most, as Llama's templates ask."""
    return [
        {**message, **({"tool_calls": [call]} if call is not None else {})}
        for message in messages
        for call in message.get("tool_calls") or [None]
    ]


def _prepare_parts(content: Sequence[Any]) -> list[dict[str, str]]:
    """Parts of text and images, as templates for images expect them. A template needs no picture."""
    texts = (part if isinstance(part, str) else part.get("text", "") for part in content)
    pairs = zip(content, texts, strict=True)
    return [{"type": "image"} if is_image(part) else {"type": "text", "text": text} for part, text in pairs]


def parse_arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call, which may be JSON text."""
    arguments = function.get("arguments") or {}
    try:
        parsed = parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise TokenizerError(f"the arguments of the call to {function.get('name')!r} are not JSON: {error}") from None
    if not isinstance(parsed, Mapping):
        raise TokenizerError(f"the arguments of the call to {function.get('name')!r} are {parsed!r}, not an object")
    return parsed


def text_parts(message: Message) -> list[str]:
    """The text of a message, which may come in parts."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list | tuple) else [content]
    return [part if isinstance(part, str) else str(part.get("text", "")) for part in parts if not is_image(part)]


def content_size(message: Message) -> int:
    """The characters of a message's text."""
    return sum(map(len, text_parts(message)))
