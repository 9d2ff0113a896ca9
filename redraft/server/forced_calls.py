"""Forced tool calls: the client wants a call of one tool, or of any (`tool_choice`).

The completion is JSON under the schema of the tool's parameters, so the call is valid whatever the model writes:

    one tool       {"city": "Ulm"}
    several tools  {"name": "weather", "arguments": {"city": "Ulm"}}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redraft.constraints.errors import shorten
from redraft.server.errors import BadRequestError
from redraft.tokenizer.chat_parser import ToolCall

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
DESCRIPTIONS = ("title", "description", "$schema", "$id", "$comment")


@dataclass(frozen=True)
class ForcedCall:
    """A call that the completion must be: the schema of the arguments, by the name of the tool."""

    parameters: Mapping[str, Mapping[str, Any]]

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the completion."""
        if len(self.parameters) == 1:
            (parameters,) = self.parameters.values()
            return dict(parameters)
        # Numbers name the tools: a name may hold characters that have a meaning in a reference.
        definitions = {}
        for number, parameters in enumerate(self.parameters.values()):
            definitions[str(number)] = move_references(parameters, f"#/$defs/{number}")
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{number}"}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for number, name in enumerate(self.parameters)
        ]
        return {"$defs": definitions, "anyOf": calls}

    def parse(self, text: str) -> ToolCall:
        """The call of a completion, which matches the schema."""
        value = json.loads(text)
        if len(self.parameters) == 1:
            (name,) = self.parameters
            return ToolCall(name, value)
        return ToolCall(value["name"], value["arguments"])


def choose_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any
) -> tuple[Sequence[Mapping[str, Any]] | None, ForcedCall | None]:
    """The tools that the model sees, and the call that it must make, for OpenAI's `tool_choice`."""
    match choice:
        case None | "auto":
            return tools, None
        case "none":
            return None, None
        case "required":
            return tools, force_call(tools, None)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return tools, force_call(tools, name)
    message = f"tool_choice can be none, auto, required or a function by its name, got {shorten(choice)}"
    raise BadRequestError(message, "tool_choice")


def force_call(tools: Sequence[Mapping[str, Any]] | None, name: str | None) -> ForcedCall:
    """The call of the tool with this name, or of any tool."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    parameters = {
        str(function.get("name")): NO_PARAMETERS if takes_nothing(function.get("parameters")) else function["parameters"]
        for function in functions
        if isinstance(function, Mapping)
    }
    if not parameters:
        raise BadRequestError("tool_choice forces a call, but there are no tools: send tools too", "tool_choice")
    if name is not None and name not in parameters:
        known = ", ".join(map(shorten, parameters))
        raise BadRequestError(f"tool_choice names {shorten(name)}; the tools are {known}", "tool_choice")
    chosen = parameters if name is None else {name: parameters[name]}
    for tool, schema in chosen.items():
        if not isinstance(schema, Mapping) or (schema.get("type") != "object" and "properties" not in schema):
            raise BadRequestError(f"the parameters of {shorten(tool)} must be a JSON schema of an object", "tools")
    return ForcedCall(chosen)


def takes_nothing(parameters: Any) -> bool:
    """Whether a tool has no parameters: there is no schema, or it is an object about which nothing more is said."""
    if not parameters:
        return True
    is_object = isinstance(parameters, Mapping) and parameters.get("type") == "object"
    return is_object and set(parameters) <= {"type", *DESCRIPTIONS}


def move_references(schema: Any, root: str) -> Any:
    """A schema whose references (#/...) still hold when it stands at `root` of another schema."""
    if isinstance(schema, Mapping):
        moved = {name: move_references(value, root) for name, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = root + reference.removeprefix("#")
        return moved
    return [move_references(value, root) for value in schema] if isinstance(schema, list) else schema
