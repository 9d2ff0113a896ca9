"""Text to ids and back, messages to a prompt, an answer to its parts. Knows nothing of the model.

The vocabulary is the checkpoint's tokenizer.json, through the `tokenizers` library; the chat template is the checkpoint's
own, or ours (chat.jinja), rendered in jinja2's sandbox: a template comes with the weights and is not to be trusted.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Vocabulary

FILE, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
DEFAULT_TEMPLATE = Path(__file__).with_name("chat.jinja")
ROLES = ("system", "developer", "user", "assistant", "model", "tool")

Message = Mapping[str, Any]


class TokenizerError(ValueError):
    """A tokenizer or conversation that cannot be used; the message says why."""


class Tokenizer:
    """A vocabulary with a chat template."""

    def __init__(self, vocabulary: Vocabulary, *, template: str | None = None, bos: str = "<bos>") -> None:
        self.vocabulary, self.template, self.bos = vocabulary, template, bos

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, and beside it the chat template and the start token where there are any."""
        folder = Path(folder)
        if not (folder / FILE).exists():
            raise TokenizerError(f"{folder / FILE} does not exist; a checkpoint folder needs it")
        try:
            vocabulary = Vocabulary.from_file(str(folder / FILE))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{folder / FILE} is not a readable tokenizer: {error}") from None
        try:
            settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8")) if (folder / SETTINGS).exists() else {}
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise TokenizerError(f"{folder / SETTINGS} is not readable JSON: {error}") from None
        template = settings.get("chat_template")
        if (folder / TEMPLATE).exists():
            template = (folder / TEMPLATE).read_text(encoding="utf-8")
        bos = settings.get("bos_token") or "<bos>"
        return cls(vocabulary, template=template, bos=bos["content"] if isinstance(bos, dict) else bos)

    @classmethod
    def of_bytes(cls, marks: Sequence[str]) -> "Tokenizer":
        """A vocabulary of these marks and then one token for every byte: what a toy model needs."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = Vocabulary(models.BPE(vocab={token: i for i, token in enumerate([*marks, *alphabet])}, merges=[]))
        vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        vocabulary.decoder = decoders.ByteLevel()
        vocabulary.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
        return cls(vocabulary)

    def save(self, folder: str | Path) -> None:
        """Writes what `from_folder` reads, as transformers reads it too."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.vocabulary.save(str(folder / FILE))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": self.bos}
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if self.template is not None:
            (folder / TEMPLATE).write_text(self.template, encoding="utf-8")

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.vocabulary.get_vocab().values()) + 1

    @property
    def bos_id(self) -> int | None:
        """The start token, None where the vocabulary has none."""
        return self.vocabulary.token_to_id(self.bos)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are marks, not text."""
        return frozenset(i for i, token in self.vocabulary.get_added_tokens_decoder().items() if token.special)

    @property
    def can_chat(self) -> bool:
        """Whether the checkpoint is made for conversation: it brings a template, or at least has the turn marks of ours."""
        return self.template is not None or self.vocabulary.token_to_id("<|turn>") is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, marks such as <|turn> recognised, nothing added."""
        return self.vocabulary.encode(text, add_special_tokens=False).ids

    def prompt(self, text: str) -> list[int]:
        """Ids of a text to be continued: the start token, then the text as it stands."""
        return [*([self.bos_id] if self.bos_id is not None else []), *self.encode(text)]

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        ids = self.encode("a")
        return ids, self.decode(ids)

    def spell(self, ids: Sequence[int]) -> str:
        """Text of ids that stand in the middle of something, marks included: a leading space stays."""
        before, text = self._anchor
        return self.decode([*before, *ids], keep_special=True)[len(text) :]

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Text of ids; marks are dropped unless asked for. Bytes that are no character become U+FFFD."""
        return self.vocabulary.decode(list(ids), skip_special_tokens=not keep_special)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool = False,
    ) -> list[int]:
        """Ids of a conversation up to where the model's turn begins."""
        return self.encode(self.render(messages, tools=tools, think=think))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool = False,
    ) -> str:
        """A conversation as the template writes it."""
        check_messages(messages)
        if not self.can_chat:
            raise TokenizerError("this tokenizer has no turn marks (<|turn>), so it cannot chat; continue a text instead")
        source = self.template if self.template is not None else DEFAULT_TEMPLATE.read_text(encoding="utf-8")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
        try:
            return environment.from_string(source).render(
                messages=_prepared(messages),
                tools=list(tools) if tools else None,
                enable_thinking=think,
                add_generation_prompt=True,
                bos_token=self.bos,
            )
        except Exception as error:  # a template is a program, and may fail in every way a program can
            raise TokenizerError(f"the chat template refuses this conversation: {error}") from None


def check_messages(messages: Sequence[Message]) -> None:
    """Refuses what is not a conversation."""
    if not messages:
        raise TokenizerError("a conversation needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else message
            raise TokenizerError(f"message {index} has the role {role!r}; known are {', '.join(ROLES)}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise TokenizerError(f"message {index} ({message['role']}) has neither content nor tool_calls")


def _prepared(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them. OpenAI clients send a call's arguments as a string of JSON, and a response with
    the id of its call in place of the function's name.
    """
    names: dict[str, str] = {}
    prepared = []
    for original in messages:
        message = dict(original)
        calls = []
        for call in message.get("tool_calls") or []:
            function = dict(call.get("function", call))
            function["arguments"] = _arguments(function)
            names[call.get("id", "")] = function.get("name", "")
            calls.append({**call, "function": function})
        if calls:
            message["tool_calls"] = calls
        if message["role"] == "tool" and "name" not in message:
            message["name"] = names.get(message.get("tool_call_id", ""), "tool")
        prepared.append(message)
    return prepared


def _arguments(function: Mapping[str, Any]) -> Mapping[str, Any]:
    given = function.get("arguments") or {}
    try:
        parsed = json.loads(given) if isinstance(given, str) else given
    except json.JSONDecodeError as error:
        raise TokenizerError(f"the arguments of the call to {function.get('name')!r} are not JSON: {error}") from None
    if not isinstance(parsed, Mapping):
        raise TokenizerError(f"the arguments of the call to {function.get('name')!r} are {parsed!r}, not an object")
    return parsed


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class Decoder:
    """Decodes a growing sequence: every call returns the new text, and never half a character.

    A character may be spread over several tokens (bytes). While the end of what was read is such a fragment, it is held
    back; `flush` gives it up at the end. Text may also depend on the token before (a leading space that is dropped at the
    start), so the tokens since the last whole piece are decoded together with the piece before them.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool = False) -> None:
        self.tokenizer, self.keep_special = tokenizer, keep_special
        self._ids: list[int] = []
        self._shown = 0  # ids whose text was returned
        self._before = 0  # where the piece before them begins

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these ids add."""
        self._ids.extend(ids)
        text = self._pending()
        if text.endswith("�"):
            text = self._whole_part()
        else:
            self._before, self._shown = self._shown, len(self._ids)
        return text

    def flush(self) -> str:
        """What was held back, broken characters as U+FFFD."""
        text = self._pending()
        self._before, self._shown = self._shown, len(self._ids)
        return text

    def _pending(self, end: int | None = None) -> str:
        head = self._decode(self._ids[self._before : self._shown])
        return self._decode(self._ids[self._before : end])[len(head) :]

    def _whole_part(self) -> str:
        """The pending text up to the last id after which no character is broken."""
        for end in range(len(self._ids) - 1, max(self._shown, len(self._ids) - 5), -1):
            text = self._pending(end)
            if not text.endswith("�"):
                self._before, self._shown = self._shown, end
                return text
        return ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, keep_special=self.keep_special)


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


_THOUGHT = re.compile(r"<\|channel>(?:thought\n?)?(.*?)(?:<channel\|>|\Z)", re.DOTALL)
_CALL = re.compile(r"<\|tool_call>call:([\w.\-]+)(\{.*?\})<tool_call\|>", re.DOTALL)
_MARK = re.compile(r"<(?:eos|bos|pad|\|turn|turn\||\|tool_response|tool_response\||\|channel|channel\||\|think\|)>")


def parse(answer: str) -> Parsed:
    """Text, reasoning and tool calls of an answer decoded with its marks. A call that cannot be read stays in the text."""
    thoughts = [thought.strip() for thought in _THOUGHT.findall(answer)]
    answer = _THOUGHT.sub("", answer)
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        try:
            arguments, end = _value(match[2], 0)
        except (ValueError, RecursionError):
            return match[0]
        if end != len(match[2]):
            return match[0]
        calls.append(ToolCall(match[1], arguments))
        return ""

    text = _CALL.sub(take, answer)
    return Parsed(_MARK.sub("", text).strip(), "\n".join(t for t in thoughts if t), tuple(calls))


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
        return json.loads(atom[0]), atom.end()
    except json.JSONDecodeError:
        return atom[0].strip(), atom.end()


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
