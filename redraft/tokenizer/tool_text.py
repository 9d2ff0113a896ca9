"""Tools as text: for chat templates that know no tools, and for calls that are plain text.

    declarations                                     -> the system message
    an assistant's message with tool_calls           -> the same calls in its text
    messages with the results of calls (role tool)   -> a user's message

A CallForm says how a call is written. HERMES is the form of Hermes and Qwen, LLAMA that of Llama 3:

    <tool_call>                                                      {"name": "weather", "parameters": {"city": "Ulm"}}
    {"name": "weather", "arguments": {"city": "Ulm"}}
    </tool_call>
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from redraft.tokenizer.messages import Message, check_messages, check_tools, parse_arguments, text_parts

RESULT_START, RESULT_END = "<tool_response>\n", "\n</tool_response>"


@dataclass(frozen=True)
class CallForm:
    """The text of a call: `start`, its name in JSON, `middle`, its arguments in JSON, `end`."""

    mark: str  # the beginning of `start`: text that begins with it is a call
    start: str
    middle: str
    end: str
    most: int | None  # calls in one answer

    def write(self, name: str, arguments: str) -> str:
        """A call. The arguments are JSON."""
        return f"{self.start}{json.dumps(name, ensure_ascii=False)}{self.middle}{arguments}{self.end}"


HERMES = CallForm("<tool_call>", '<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", None)
LLAMA = CallForm('{"name": ', '{"name": ', ', "parameters": ', "}", 1)
SEPARATOR = "\n"  # between calls


def write_tools(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, takes_system: bool = True
) -> list[Message]:
    """The conversation with tools, calls and results as text. Without any of them it stays as it is.

    A template that `takes_system` messages is told of the tools in the first of them, another one in the first message.
    """
    check_messages(messages)
    check_tools(tools)
    written = list(_write_calls(messages)) if any(is_about_calls(message) for message in messages) else list(messages)
    if not tools:
        return written
    text = describe_tools(tools)
    if takes_system and written[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *written]
    return [add_text(written[0], text), *written[1:]]


def is_about_calls(message: Message) -> bool:
    """Whether a message has calls or is the result of one."""
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """What the model is told: the tools, one in each line, and the form of a call."""
    functions = [tool.get("function", tool) for tool in tools]
    fields = ("name", "description", "parameters")
    lines = [{name: function[name] for name in fields if function.get(name)} for function in functions]
    declarations = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    form = HERMES.write("NAME", "{...}")
    return (
        f"You have these tools:\n{declarations}\n\n"
        f"To call a tool, answer with the call alone, in this form:\n{form}\n"
        f"Several calls may follow each other. A result comes between {RESULT_START.strip()} and {RESULT_END.strip()}. "
        "If no tool helps, answer in plain text."
    )


def add_text(message: Message, text: str) -> Message:
    """A message with another paragraph."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": f"{content}\n\n{text}" if content else text}
    return {**message, "content": [*content, {"type": "text", "text": f"\n\n{text}"}]}


def _write_calls(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with calls and results as text. Results that follow each other become one message."""
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result:
            yield {"role": "user", "content": "\n".join(map(_write_result, group))}
            continue
        for message in group:
            calls = [_write_call(call.get("function", call)) for call in message.get("tool_calls") or ()]
            text = "".join(text_parts(message))
            written = {name: value for name, value in message.items() if name != "tool_calls"}
            yield {**written, "content": SEPARATOR.join(filter(None, [text, *calls]))} if calls else message


def _write_call(function: Mapping[str, Any]) -> str:
    return HERMES.write(function["name"], json.dumps(parse_arguments(function), ensure_ascii=False))


def _write_result(message: Message) -> str:
    content = message.get("content")
    is_value = isinstance(content, Mapping)
    text = json.dumps(content, ensure_ascii=False, default=str) if is_value else "".join(text_parts(message))
    return f"{RESULT_START}{text}{RESULT_END}"
