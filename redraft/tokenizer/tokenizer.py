"""Text to ids and back, and messages to a prompt. Knows nothing of the model.

The vocabulary is the checkpoint's tokenizer.json, through the `tokenizers` library; the chat template is the checkpoint's
own, or ours (chat.jinja), rendered in jinja2's sandbox: a template comes with the weights and is not to be trusted.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Vocabulary

from redraft.config import read_json

FILE, SETTINGS, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
DEFAULT_TEMPLATE = Path(__file__).with_name("chat.jinja")
ROLES = ("system", "developer", "user", "assistant", "model", "tool")

Message = Mapping[str, Any]


class TokenizerError(ValueError):
    """A tokenizer or conversation that cannot be used; the message says why."""


class Tokenizer:
    """A vocabulary with a chat template."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        template: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`settings` are those of tokenizer_config.json; of them, the special tokens are used, and all are saved again."""
        vocabulary.no_truncation()  # a file may ask for either; a prompt must arrive whole and bare
        vocabulary.no_padding()
        self.vocabulary, self.template = vocabulary, template
        self._known: dict[int, str] = {}
        self.settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", **(settings or {})}
        self.specials = {name: _content(value) for name, value in self.settings.items() if name.endswith("_token")}

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, and beside it the chat template and the special tokens where there are any."""
        folder = Path(folder)
        if not (folder / FILE).exists():
            raise TokenizerError(f"{folder / FILE} does not exist; a checkpoint folder needs it")
        try:
            vocabulary = Vocabulary.from_file(str(folder / FILE))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{folder / FILE} is not a readable tokenizer: {error}") from None
        settings = read_json(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
        template = _template(settings.pop("chat_template", None))
        if (folder / TEMPLATE).exists():
            template = (folder / TEMPLATE).read_text(encoding="utf-8", errors="replace")
        return cls(vocabulary, template=template, settings={k: v for k, v in settings.items() if v is not None})

    @classmethod
    def byte_level(cls, marks: Sequence[str]) -> "Tokenizer":
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
        (folder / SETTINGS).write_text(json.dumps(self.settings, indent=2) + "\n", encoding="utf-8")
        if self.template is not None:
            (folder / TEMPLATE).write_text(self.template, encoding="utf-8")
        else:
            (folder / TEMPLATE).unlink(missing_ok=True)

    @cached_property
    def size(self) -> int:
        """One more than the largest id. Cached: `get_vocab` builds a dictionary of the whole vocabulary at every call."""
        return max(self.vocabulary.get_vocab().values()) + 1

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """The text of every special token, by id."""
        added = self.vocabulary.get_added_tokens_decoder()
        return {token: entry.content for token, entry in added.items() if entry.special}

    @cached_property
    def token_bytes(self) -> tuple[bytes | None, ...]:
        """The bytes every token stands for in a text; None for marks and for ids that no token has."""
        raw = json.loads(self.vocabulary.to_str())
        kinds = str(raw.get("decoder"))
        if "ByteLevel" not in kinds and "ByteFallback" not in kinds:
            raise TokenizerError(
                "this tokenizer's tokens are not the bytes of a text, so patterns cannot be held against them"
            )
        marks = {added["id"]: added for added in raw.get("added_tokens", [])}
        found: list[bytes | None] = [None] * self.size
        for token, number in self.vocabulary.get_vocab().items():
            if number in marks:
                found[number] = None if marks[number]["special"] else token.encode()
            elif "ByteLevel" in kinds:
                found[number] = bytes(_BYTES[c] for c in token) if all(c in _BYTES for c in token) else None
            else:
                byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
                found[number] = bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()
        return tuple(found)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token; none for marks and for ids that only the model has."""
        return (self.token_bytes[token] if token < self.size else None) or b""

    def ids_without_text(self, vocab_size: int) -> tuple[int, ...]:
        """Ids of a model's vocabulary that stand for no text."""
        return (*(token for token, letters in enumerate(self.token_bytes) if not letters), *range(self.size, vocab_size))

    @property
    def bos_id(self) -> int | None:
        """The start token, None where the vocabulary has none."""
        return self.vocabulary.token_to_id(self.specials["bos_token"])

    @property
    def can_chat(self) -> bool:
        """Whether the checkpoint is made for conversation: it brings a template, or at least has the turn marks of ours."""
        return self.template is not None or self.vocabulary.token_to_id("<|turn>") is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, marks such as <|turn> recognised, nothing added. Bytes that were no character become "?"."""
        return self.vocabulary.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text to be continued: the start token, then the text as it stands."""
        return [*([self.bos_id] if self.bos_id is not None else []), *self.encode(text)]

    @cached_property
    def _anchor(self) -> tuple[list[int], str]:
        ids = self.encode("a")
        return ids, self.decode(ids)

    def decode_fragment(self, ids: Sequence[int]) -> str:
        """Text of ids that stand in the middle of something, marks included: a leading space stays."""
        before, text = self._anchor
        return self.decode([*before, *ids], keep_special=True)[len(text) :]

    def token_text(self, token: int) -> str:
        """What `spell` says of one token, which is kept."""
        if token not in self._known:
            self._known[token] = self.decode_fragment([token])
        return self._known[token]

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Text of ids; marks are dropped unless asked for. Bytes that are no character become U+FFFD."""
        return self.vocabulary.decode(list(ids), skip_special_tokens=not keep_special)

    def encode_chat(
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
        check_tools(tools)
        if not self.can_chat:
            raise TokenizerError("this tokenizer has no turn marks (<|turn>), so it cannot chat; continue a text instead")
        from redraft.tokenizer.chat_template import compile_template  # jinja2 takes long to import

        source = self.template if self.template is not None else DEFAULT_TEMPLATE.read_text(encoding="utf-8")
        known = {"tools": list(tools) if tools else None, "enable_thinking": think, "add_generation_prompt": True}
        try:
            return compile_template(source).render(messages=_prepared(messages), **known, **self.specials)
        except Exception as error:  # a template is a program, and may fail in every way a program can
            raise TokenizerError(f"the chat template refuses this conversation: {error}") from None


def _byte_letters() -> dict[str, int]:
    """The letters in which byte-level vocabularies write bytes: printable ones as they are, the others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_letters()


def _content(value: Any) -> str:
    """A special token's text, which may be wrapped in an object."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise TokenizerError(f"{SETTINGS} has a special token that is no text: {value!r}")
    return text


def _template(value: Any) -> str | None:
    """The chat template in tokenizer_config.json: a text, or a list of named ones of which we take the default."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{SETTINGS} has a chat_template that is no text: {value!r}")
    return value


def check_messages(messages: Sequence[Message]) -> None:
    """Refuses what is not a conversation, and what would be dropped silently."""
    if not messages or isinstance(messages, str | Mapping):
        raise TokenizerError("a conversation needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else message
            raise TokenizerError(f"message {index} has the role {role!r}; known are {', '.join(ROLES)}")
        content, calls = message.get("content"), message.get("tool_calls")
        if content is None and not calls:
            raise TokenizerError(f"message {index} ({message['role']}) has neither content nor tool_calls")
        if isinstance(content, Mapping) and message["role"] == "tool":
            continue
        for part in content if isinstance(content, list | tuple) else [content or ""]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if not isinstance(text, str):
                raise TokenizerError(f"message {index} holds something that is not text: {part!r}")
        if calls is not None and not isinstance(calls, list | tuple):
            raise TokenizerError(f"message {index}: tool_calls must be a list, got {calls!r}")
        for call in calls or []:
            _function_name(call, f"message {index}: a tool call")


def check_tools(tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Refuses what is not a list of named functions."""
    if tools is not None and not isinstance(tools, list | tuple):
        raise TokenizerError(f"tools must be a list of declarations, got {tools!r}")
    for tool in tools or []:
        _function_name(tool, "a tool")


def _function_name(entry: Any, what: str) -> str:
    function = entry.get("function", entry) if isinstance(entry, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise TokenizerError(f"{what} has no name: {entry!r}")
    return name


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
