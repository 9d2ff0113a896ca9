"""An answer taken apart: text, reasoning and tool calls, as Gemma's marks divide it. Knows strings only.

<|channel>thought
the reasoning<channel|>the text<|tool_call>call:NAME{key:<|"|>value<|"|>,n:3}<tool_call|><turn|>
"""

import json
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A function the model wants called."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Parsed:
    """An answer taken apart."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


_OPENING = re.compile(r"<\|channel>|<\|tool_call>")
_CALL = re.compile(r"call:([\w.\-]+)(?=\{)")
_MARK = re.compile(r"<(?:eos|bos|pad|\|turn|turn\||\|tool_response|tool_response\||channel\||\|think\|)>")
_UNFINISHED = re.compile(r"<\|?[a-z_]*\|?\Z")


def parse(answer: str, *, final: bool = True) -> Parsed:
    """Text, reasoning and tool calls of an answer decoded with its marks. A call that cannot be read stays in the text.

    With `final=False` the answer is still being written: what may yet turn out to be a call or a mark is held back, so
    that each part of a growing answer only ever grows.
    """
    text, thoughts, calls, at = "", [], [], 0
    if not final:
        answer = _UNFINISHED.sub("", answer)
    while opening := _OPENING.search(answer, at):
        text += answer[at : opening.start()]
        close = "<channel|>" if opening[0] == "<|channel>" else "<tool_call|>"
        end = answer.find(close, opening.end())
        inside = answer[opening.end() : end if end >= 0 else len(answer)]
        at = end + len(close) if end >= 0 else len(answer)
        if close == "<channel|>":
            held = not final and end < 0 and "thought\n".startswith(inside)
            thoughts.append("" if held else inside.removeprefix("thought").strip())
        elif call := _call(inside) if end >= 0 else None:
            calls.append(call)
        elif end >= 0 or final:
            text += answer[opening.start() : at]
    text = _MARK.sub("", text + answer[at:]).strip()
    return Parsed(text, "\n".join(filter(None, thoughts)), tuple(calls))


def _call(source: str) -> ToolCall | None:
    """`call:NAME{...}`, or None if it is not that."""
    named = _CALL.match(source)
    try:
        arguments, end = _value(source, named.end()) if named else ({}, -1)
    except (ValueError, RecursionError):
        return None
    return ToolCall(named[1], arguments) if named and end == len(source) else None


_QUOTE = '<|"|>'
_ATOM = re.compile(r"[^,\[\]{}]*")


def _value(source: str, at: int) -> tuple[Any, int]:
    """One value of the call notation, and where it ends: {key:value}, [value], <|"|>text<|"|>, 3, true, null."""
    if source.startswith(_QUOTE, at):
        end = source.index(_QUOTE, at + len(_QUOTE))
        return source[at + len(_QUOTE) : end], end + len(_QUOTE)
    if source.startswith("{", at):
        return _members(source, at + 1)
    if source.startswith("[", at):
        return _items(source, at + 1)
    atom = _ATOM.match(source, at)
    assert atom is not None
    try:
        return json.loads(atom[0], parse_constant=_no_constant), atom.end()
    except ValueError:
        return atom[0].strip(), atom.end()


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _members(source: str, at: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while not source.startswith("}", at):
        colon = source.index(":", at)
        key = source[at:colon].replace(_QUOTE, "").strip()
        found[key], at = _value(source, colon + 1)
        at = _separator(source, at, "}")
    return found, at + 1


def _items(source: str, at: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while not source.startswith("]", at):
        item, at = _value(source, at)
        found.append(item)
        at = _separator(source, at, "]")
    return found, at + 1


def _separator(source: str, at: int, close: str) -> int:
    if source.startswith(",", at):
        return at + 1
    if source.startswith(close, at):
        return at
    raise ValueError(f"expected ',' or {close!r} at {at} of {source!r}")
