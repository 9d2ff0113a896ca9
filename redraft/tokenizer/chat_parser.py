"""ChatParser: splits the tokens of a chat answer into text, reasoning and tool calls.

An answer of a Gemma 4 model has this shape (line break after "thought" included):

    <|channel>thought
    the reasoning<channel|>the text<|tool_call>call:NAME{key:<|"|>value<|"|>,n:3}<tool_call|><turn|>

Qwen's models have other tokens, and calls in JSON:

    <think>
    the reasoning
    </think>

    the text<tool_call>
    {"name": "NAME", "arguments": {"key": "value"}}
    </tool_call><|im_end|>

Mistral's models have calls as a list in JSON or, the newer ones, as a name and its arguments:

    [TOOL_CALLS] [{"name": "NAME", "arguments": {"key": "value"}}]</s>
    [TOOL_CALLS]NAME[ARGS]{"key": "value"}[TOOL_CALLS]NAME[ARGS]{}</s>

Some templates open the channel themselves: the prompt ends with <think>, and the answer begins inside it.

The parser recognises special tokens by their ids. Text that merely looks like a special token stays text. The parser is
incremental: each of the three parts only ever grows, so streamed pieces add up to the parse of the whole answer.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

from redraft.config import MAX_DEPTH, parse_json
from redraft.tokenizer.chat_tokens import (
    CALL_START,
    CALLS,
    CHANNELS,
    JSON_CALL_START,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALLS,
    MISTRAL_ID,
    QUOTE,
)
from redraft.tokenizer.tokenizer import Decoder, Tokenizer

# Shown where they are not part of a valid call, so that a broken call is visible.
CALL_TOKENS = (*filter(None, (*CALLS, *CALLS.values())), QUOTE, MISTRAL_ARGUMENTS, MISTRAL_ID)
CHANNEL_NAME = "thought"  # the first line of a reasoning channel
MOST_OPENING = 16  # tokens at the end of a prompt that may open a channel: its token, its name, white space


@dataclass(frozen=True)
class ToolCall:
    """A function that the model wants to call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Parsed:
    """The parts of an answer, or the parts that some tokens add to an answer."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def parse_chat(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> Parsed:
    """Parses a whole answer to a prompt."""
    return ChatParser(tokenizer, prompt).feed(ids, final=True)


def find_opening(tokenizer: Tokenizer, prompt: Sequence[int]) -> Sequence[int]:
    """The end of a prompt that opens a reasoning channel, from the channel's first token on; empty if none is open."""
    channels = {tokenizer.vocabulary.token_to_id(name) for name in CHANNELS} - {None}
    end = prompt[-MOST_OPENING:]
    start = max((position for position, token in enumerate(end) if token in channels), default=len(end))
    is_open = tokenizer.decode(end[start + 1 :], keep_special=True).strip() in ("", CHANNEL_NAME)
    return end[start:] if is_open else ()


def close_channel(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The prompt without an open reasoning channel, for an answer that is text from its first token on."""
    opening = find_opening(tokenizer, prompt)
    ends = {tokenizer.vocabulary.token_to_id(start): end for start, end in CHANNELS.items()}
    end = tokenizer.vocabulary.token_to_id(ends[opening[0]]) if opening else None
    return [*prompt, end] if end is not None else list(prompt)


class ChatParser:
    """Parses one answer to a prompt, which arrives in any number of pieces.

    Text and reasoning lose their leading and trailing whitespace: trailing whitespace is held back until more text follows.
    A tool call appears when it is complete. A call that cannot be parsed becomes text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._special_tokens = dict(tokenizer.special_tokens)
        for name in (*CHANNELS, *CHANNELS.values(), *CALL_TOKENS):  # even if the vocabulary does not flag them as special
            token = tokenizer.vocabulary.token_to_id(name)
            if token is not None:
                self._special_tokens[token] = name
        self._decoder = Decoder(tokenizer, keep_special=True)
        self._text = _StrippedText()
        self._reasoning = _Reasoning()
        self._state = "text"  # or "channel", or "call"
        self._start = ""  # the token with which the channel or the call began
        self._call_source: list[str] = []
        self.feed(find_opening(tokenizer, prompt))

    def fork(self) -> "ChatParser":
        """A parser that continues from here on its own."""
        forked = copy(self)
        forked._decoder = self._decoder.fork()
        forked._text, forked._reasoning, forked._call_source = deepcopy((self._text, self._reasoning, self._call_source))
        return forked

    def feed(self, ids: Iterable[int], *, final: bool = False) -> Parsed:
        """Parses more tokens and returns what they add to each part. `final` marks the end of the answer."""
        added = _Added()
        run: list[int] = []
        for token in ids:
            if token in self._special_tokens:
                self._add_text(self._decoder.feed(run) + self._decoder.flush(), added)
                self._add_special(self._special_tokens[token], added)
                self._decoder.feed([token])  # the text of later tokens may depend on it
                run = []
            else:
                run.append(token)
        self._add_text(self._decoder.feed(run), added)
        if final:
            self._add_text(self._decoder.flush(), added)
            self._close(added)
        return Parsed("".join(added.text), "".join(added.reasoning), tuple(added.tool_calls))

    def _add_text(self, piece: str, added: "_Added") -> None:
        if self._state == "call":
            self._call_source.append(piece)
        elif self._state == "channel":
            added.reasoning.append(self._reasoning.feed(piece))
        else:
            added.text.append(self._text.feed(piece))

    def _add_special(self, name: str, added: "_Added") -> None:
        if self._state == "call":
            if name == CALLS[self._start]:
                self._end_call(name, added)
            elif self._start == MISTRAL_CALLS and name not in (MISTRAL_ARGUMENTS, MISTRAL_ID):
                self._end_call("", added)  # the next call ends the one before it, and so does the end of the answer
                self._state = "call" if name == MISTRAL_CALLS else "text"
            else:
                self._call_source.append(_QUOTE_MARK if name == QUOTE else name)
        elif self._state == "channel":
            if name == CHANNELS[self._start]:
                added.reasoning.append(self._reasoning.end_channel())
                self._state = "text"
        elif name in CHANNELS:
            self._state = "channel"
            self._start = name
        elif name in CALLS:
            self._state = "call"
            self._start = name
        elif name in CALL_TOKENS:
            added.text.append(self._text.feed(name))

    def _end_call(self, end: str, added: "_Added") -> None:
        source = "".join(self._call_source)
        calls = PARSERS[self._start](source) if end == CALLS[self._start] else ()
        added.tool_calls += calls
        if not calls:
            added.text.append(self._text.feed(self._start + source.replace(_QUOTE_MARK, QUOTE) + end))
        self._call_source = []
        self._state = "text"

    def _close(self, added: "_Added") -> None:
        """The answer ends: an open channel is reasoning, an open call is text."""
        if self._state == "channel":
            added.reasoning.append(self._reasoning.end_channel())
        elif self._state == "call":
            self._end_call("", added)


class _Added:
    """Collects what one call of `feed` adds."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: list[ToolCall] = []


class _StrippedText:
    """`str.strip` of a text that arrives in pieces."""

    def __init__(self) -> None:
        self.has_started = False
        self._held: list[str] = []  # whitespace that counts only if more text follows

    def feed(self, piece: str) -> str:
        """What this piece adds to the stripped text."""
        content = piece.rstrip()
        trailing = piece[len(content) :]
        if not content:
            if self.has_started:
                self._held.append(trailing)
            return ""
        added = "".join(self._held) + content if self.has_started else content.lstrip()
        self.has_started = True
        self._held = [trailing]
        return added


class _Reasoning:
    """The contents of all reasoning channels: each without its name and stripped, joined by line breaks."""

    def __init__(self) -> None:
        self._has_earlier_channel = False
        self._start_channel()

    def _start_channel(self) -> None:
        self._content = _StrippedText()
        self._name: str | None = ""  # the beginning of the channel, while it may still be the channel's name

    def feed(self, piece: str) -> str:
        """What this piece of a channel adds."""
        if self._name is not None:
            self._name += piece
            if CHANNEL_NAME.startswith(self._name):
                return ""
            piece = self._name.removeprefix(CHANNEL_NAME)
            self._name = None
        separator = "\n" if self._has_earlier_channel and not self._content.has_started else ""
        added = self._content.feed(piece)
        return separator + added if added else ""

    def end_channel(self) -> str:
        """What the end of a channel adds: the beginning that turned out not to be the channel's name."""
        unfinished_name = self._name or ""
        self._name = None
        added = self.feed(unfinished_name.removeprefix(CHANNEL_NAME))
        self._has_earlier_channel = self._has_earlier_channel or self._content.has_started
        self._start_channel()
        return added


# The notation of tool calls. A quote token is written as a lone surrogate, which no decoded text contains.

_QUOTE_MARK = "\udc00"
_CALL = re.compile(r"call:([\w.\-]+)(?=\{)")
_ATOM = re.compile(r"[^,\[\]{}]*")


def _parse_call(source: str) -> Sequence[ToolCall]:
    """Parses `call:NAME{...}`; empty if the source is anything else."""
    head = _CALL.match(source)
    if head is None:
        return ()
    try:
        arguments, end = _parse_value(source, head.end(), MAX_DEPTH)
    except ValueError:
        return ()
    return [ToolCall(head[1], arguments)] if end == len(source) else ()


def _parse_json_calls(source: str) -> Sequence[ToolCall]:
    """Parses `{"name": NAME, "arguments": {...}}`, or a list of those; empty if the source is anything else."""
    try:
        value = parse_json(source, parse_constant=_refuse_constant)
    except ValueError:
        return ()
    calls = []
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return ()
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            return ()
        calls.append(ToolCall(call["name"], arguments))
    return calls


def _parse_mistral_calls(source: str) -> Sequence[ToolCall]:
    """Parses `[{"name": NAME, "arguments": {...}}]` or `NAME[ARGS]{...}`; empty if the source is anything else."""
    name, has_arguments, arguments = source.partition(MISTRAL_ARGUMENTS)
    if not has_arguments:
        return _parse_json_calls(source)
    name = name.partition(MISTRAL_ID)[0].strip()
    return _parse_json_calls(f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}') if name else ()


PARSERS: dict[str, Callable[[str], Sequence[ToolCall]]] = {
    CALL_START: _parse_call,
    JSON_CALL_START: _parse_json_calls,
    MISTRAL_CALLS: _parse_mistral_calls,
}


def _parse_value(source: str, at: int, depth: int) -> tuple[Any, int]:
    """Parses one value and returns it with its end: {key:value}, [value], <|"|>text<|"|>, 3, true, null.

    Values are nested in one another `depth` times at most.
    """
    if not depth:
        raise ValueError("the arguments are nested too deeply")
    if source.startswith(_QUOTE_MARK, at):
        end = source.index(_QUOTE_MARK, at + 1)
        return source[at + 1 : end], end + 1
    if source.startswith("{", at):
        return _parse_members(source, at + 1, depth - 1)
    if source.startswith("[", at):
        return _parse_items(source, at + 1, depth - 1)
    atom = _ATOM.match(source, at)
    assert atom is not None
    text = atom[0].replace(_QUOTE_MARK, QUOTE)
    try:
        return json.loads(text, parse_constant=_refuse_constant), atom.end()
    except ValueError:
        return text.strip(), atom.end()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _parse_members(source: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    while not source.startswith("}", at):
        colon = source.index(":", at)
        key = source[at:colon].replace(_QUOTE_MARK, "").strip()
        members[key], at = _parse_value(source, colon + 1, depth)
        at = _skip_comma(source, at, "}")
    return members, at + 1


def _parse_items(source: str, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    while not source.startswith("]", at):
        item, at = _parse_value(source, at, depth)
        items.append(item)
        at = _skip_comma(source, at, "]")
    return items, at + 1


def _skip_comma(source: str, at: int, close: str) -> int:
    """The position behind a comma, or of the closing bracket."""
    if source.startswith(",", at):
        return at + 1
    if source.startswith(close, at):
        return at
    raise ValueError(f"expected ',' or {close!r} at {at} of {source!r}")
