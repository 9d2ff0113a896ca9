"""Tool calls: which ones a completion may or must make, the structure that its text obeys, and the calls in that text.

    tools, tool_choice -> ToolChoice -> [build_structure] -> the completion's text -> [CallReader] -> text, CallDelta

A call whose form is text obeys the schema of its tool whatever the model writes. Models whose calls begin with a special
token write them freely under `auto`: ChatParser reads those.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redraft.constraints.errors import BudgetError, shorten
from redraft.constraints.structure import text_without_start
from redraft.server.errors import BadRequestError
from redraft.tokenizer.chat_parser import Parsed, ToolCall
from redraft.tokenizer.tool_text import SEPARATOR, CallForm

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
DESCRIPTIONS = ("title", "description", "$schema", "$id", "$comment")
CHOICES = "none, auto, required, a function by its name or allowed_tools"
MAX_HEAD = 10_000  # characters of a call before its arguments

Tool = Mapping[str, Any]


@dataclass(frozen=True)
class ToolChoice:
    """The tools that the model is told of, the names of those that it may call, and how often it may."""

    tools: Sequence[Tool] | None = None
    names: tuple[str, ...] = ()
    is_forced: bool = False  # the completion is one call
    is_parallel: bool = True  # else it has one call at most

    def find_parameters(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The name of each tool that may be called, and the schema of its arguments."""
        for name, function in functions_of(self.tools).items():
            if name not in self.names:
                continue
            schema = function.get("parameters")
            if takes_nothing(schema):
                schema = NO_PARAMETERS
            if not isinstance(schema, Mapping) or (schema.get("type") != "object" and "properties" not in schema):
                raise BadRequestError(f"the parameters of {shorten(name)} must be a JSON schema of an object", "tools")
            yield name, schema


NO_TOOLS = ToolChoice()


@dataclass(frozen=True)
class CallDelta:
    """A part of a tool call. The arguments of all deltas with one index together are JSON."""

    index: int
    name: str
    arguments: str


def functions_of(tools: Sequence[Tool] | None) -> dict[str, Mapping[str, Any]]:
    """The functions by their names."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return {str(function.get("name")): function for function in functions if isinstance(function, Mapping)}


def choose_tools(tools: Sequence[Tool] | None, choice: Any, *, parallel: bool | None = None) -> ToolChoice:
    """The tools of a request, for OpenAI's `tool_choice` and `parallel_tool_calls`."""
    chosen = ToolChoice(tools or None, tuple(functions_of(tools)), is_parallel=parallel is not False)
    match choice:
        case None | "auto":
            return chosen
        case "none":
            return NO_TOOLS
        case "required":
            return force(chosen)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return force(restrict(chosen, [name]))
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*allowed]}} | {
            "type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed],
        } if all(isinstance(tool, Mapping) for tool in allowed):  # fmt: skip
            names = restrict(chosen, list(functions_of(allowed))).names
            own = [tool for tool in tools or () if functions_of([tool]).keys() <= set(names)]
            return choose_tools(own, mode, parallel=parallel)  # of the others, which it might call, the model is not told
    raise BadRequestError(f"tool_choice can be {CHOICES}, got {shorten(choice)}", "tool_choice")


def force(choice: ToolChoice) -> ToolChoice:
    """The completion is a call."""
    if not choice.names:
        raise BadRequestError("tool_choice forces a call, but there are no tools: send tools too", "tool_choice")
    return replace(choice, is_forced=True)


def restrict(choice: ToolChoice, names: Sequence[str]) -> ToolChoice:
    """Only the tools with these names may be called."""
    if not choice.names:
        raise BadRequestError("tool_choice names tools, but there are no tools: send tools too", "tool_choice")
    for name in names:
        if name not in choice.names:
            known = ", ".join(map(shorten, choice.names))
            raise BadRequestError(f"tool_choice names {shorten(name)}; the tools are {known}", "tool_choice")
    return replace(choice, names=tuple(names))


def takes_nothing(parameters: Any) -> bool:
    """Whether a tool has no parameters: there is no schema, or it is an object about which nothing more is said."""
    if not parameters:
        return True
    is_object = isinstance(parameters, Mapping) and parameters.get("type") == "object"
    return is_object and set(parameters) <= {"type", *DESCRIPTIONS}


# 1. The structure of the completion


def build_structure(choice: ToolChoice, form: CallForm, pattern: Mapping[str, Any]) -> dict[str, Any]:
    """The structure of a completion: calls or, unless one is forced, a text, which has to match the pattern if there is one.

    A schema's title names its tool: an error repeats it.
    """
    calls = []
    for name, schema in choice.find_parameters():
        begin, end = form.write(name, "\0").split("\0")
        titled = {**schema, "title": f"the parameters of {shorten(name)}"}
        parts = [text_node(begin), {"type": "json_schema", "json_schema": titled}, text_node(end)]
        calls.append({"type": "sequence", "elements": parts})
    call = {"type": "or", "elements": calls}
    if choice.is_forced:
        return call
    most = form.most if choice.is_parallel else 1
    some = {"type": "repeat", "content": call, "separator": SEPARATOR, "min": 1, "max": most}
    return {"type": "or", "elements": [pattern_node(pattern) if pattern else text_without_start(form.mark), some]}


def text_node(text: str) -> dict[str, Any]:
    """The node of a text."""
    return {"type": "const_string", "value": text}


def pattern_node(pattern: Mapping[str, Any]) -> dict[str, Any]:
    """The node of a pattern: a regex, a schema or choices."""
    match pattern:
        case {"schema": schema}:
            return {"type": "json_schema", "json_schema": schema}
        case {"choices": [*choices]}:
            return {"type": "or", "elements": [text_node(choice) for choice in choices]}
    return {"type": "regex", "pattern": pattern.get("regex")}


def name_tools(choice: ToolChoice, error: BudgetError) -> BudgetError:
    """The error of tools whose schemas together take too much work, with the name of the tool with the largest one."""
    sizes = {name: len(json.dumps(schema, default=str)) for name, schema in choice.find_parameters()}
    if not sizes or any(shorten(name) in str(error) for name in sizes):
        return error
    largest = shorten(max(sizes, key=sizes.__getitem__))
    others = f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
    return BudgetError(f"the parameters of {largest}{others}: {error}")


# 2. The calls of the completion


class CallReader:
    """Reads the text of a completion that may be calls, piece by piece.

    With calls as text, `form` says how those look: an answer that begins as one of them is calls, any other one is text. The
    completion obeys `build_structure`, so what has begun as a call is one.
    """

    def __init__(self, form: CallForm | None, most: int | None) -> None:
        self.form = form
        self.most = most  # further calls are dropped
        self.calls = 0
        self.is_open = False  # in the arguments of a call
        self._is_text = form is None
        self._held = ""
        self._name = ""
        self._json = JSONEnd()

    def feed(self, parsed: Parsed) -> tuple[str, tuple[CallDelta, ...]]:
        """The text and the parts of calls that a piece adds. Calls that ChatParser has read are whole."""
        deltas = [delta for call in parsed.tool_calls for delta in self._add_call(call)]
        if self._is_text:
            return parsed.text, tuple(deltas)
        self._held += parsed.text
        while self._held and not self._is_text:
            if self.is_open:
                deltas.append(self._read_arguments())
            elif self._read_head():
                deltas.append(CallDelta(self.calls - 1, self._name, ""))
            else:
                break
        return self.flush() if self._is_text else "", tuple(deltas)

    def flush(self) -> str:
        """The text that was held back, at the end of the completion."""
        held = "" if self.calls else self._held
        self._held = ""
        return held

    def _add_call(self, call: ToolCall) -> Iterator[CallDelta]:
        if self.most is not None and self.calls >= self.most:
            return
        self.calls += 1
        yield CallDelta(self.calls - 1, call.name, json.dumps(call.arguments, ensure_ascii=False))

    def _read_head(self) -> bool:
        """Reads a call up to its arguments, behind the end of the call before it. False as long as that is incomplete."""
        form = self.form
        assert form is not None
        text = self._held.lstrip()
        if self.calls:
            if not text.startswith(form.end):
                return False
            text = text.removeprefix(form.end).lstrip()
        if not text.startswith(form.start):
            self._is_text = not form.start.startswith(text) and not self.calls
            return False
        try:
            name, end = json.JSONDecoder().raw_decode(text, len(form.start))
        except json.JSONDecodeError:
            self._is_text = len(text) > MAX_HEAD and not self.calls
            return False
        if not text.startswith(form.middle, end):
            self._is_text = not form.middle.startswith(text[end:]) and not self.calls
            return False
        self._name = str(name)
        self._held = text[end + len(form.middle) :]
        self._json = JSONEnd()
        self.calls += 1
        self.is_open = True
        return True

    def _read_arguments(self) -> CallDelta:
        end = self._json.find(self._held)
        arguments = self._held[:end]
        self._held = self._held[end:]
        self.is_open = not self._json.is_complete
        return CallDelta(self.calls - 1, self._name, arguments)


@dataclass
class JSONEnd:
    """Finds the end of a JSON object that comes in pieces."""

    depth: int = 0
    is_string: bool = False
    is_escaped: bool = False
    is_complete: bool = False

    def find(self, piece: str) -> int:
        """The characters of this piece that belong to the object."""
        for position, character in enumerate(piece):
            if self.is_escaped:
                self.is_escaped = False
            elif self.is_string:
                self.is_escaped = character == "\\"
                self.is_string = character != '"'
            elif character == '"':
                self.is_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if not self.depth:
                    self.is_complete = True
                    return position + 1
        return len(piece)


@dataclass(frozen=True)
class WrittenCall:
    """A whole tool call: its arguments are JSON text."""

    name: str
    arguments: str

    def parse(self) -> dict[str, Any]:
        """The arguments as an object."""
        arguments: dict[str, Any] = json.loads(self.arguments)
        return arguments


def join_calls(deltas: Sequence[CallDelta]) -> list[WrittenCall]:
    """The calls of all deltas of a completion."""
    calls: dict[int, WrittenCall] = {}
    for delta in deltas:
        earlier = calls.get(delta.index, WrittenCall(delta.name, ""))
        calls[delta.index] = replace(earlier, arguments=earlier.arguments + delta.arguments)
    return list(calls.values())
