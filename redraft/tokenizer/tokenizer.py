"""Tokenizer: text to ids and back, and messages to the ids of a prompt. It does not know the model.

The vocabulary is the checkpoint's tokenizer.json, read by the `tokenizers` library. The chat template is the checkpoint's
own, or ours (chat.jinja). A checkpoint's template is not trusted: it is rendered in jinja2's sandbox, in a helper process.
"""

import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redraft.config import read_file, read_json, show_value, write_text
from redraft.tokenizer.chat_tokens import (
    CALL_WORDS,
    CALLS,
    DOCUMENT_END,
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    LLAMA_WORDS,
    MISTRAL_CALLS,
    TURN_ENDS,
)
from redraft.tokenizer.messages import (
    KEPT_ROLES,
    Message,
    TokenizerError,
    check_messages,
    check_tools,
    content_size,
    image_sources,
    number_calls,
    prepare_messages,
    split_calls,
)
from redraft.tokenizer.tool_text import HERMES, LLAMA, CallForm

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Vocabulary

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GEMMA_BOS = "<bos>"
DEFAULT_TEMPLATE = Path(__file__).with_name("chat.jinja")
LONG_TEXT = 20_000  # characters; a longer text is tokenized so that other threads can run meanwhile
MAX_OWN_VALUES = 20_000  # values and thousands of characters of a conversation; a larger one goes to the helper process


class Tokenizer:
    """A vocabulary and a chat template."""

    def __init__(
        self,
        vocabulary: "Vocabulary",
        *,
        template: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`settings` is the content of tokenizer_config.json: its special tokens are used, and `save` writes all of it."""
        vocabulary.no_truncation()  # a file may switch on either; a prompt must be neither cut nor padded
        vocabulary.no_padding()
        self.vocabulary = vocabulary
        self.template = template
        self._token_texts: dict[int, str] = {}
        has_gemma_bos = vocabulary.token_to_id(GEMMA_BOS) is not None
        defaults = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"bos_token": GEMMA_BOS} if has_gemma_bos else {})
        self.settings = {**defaults, **(settings or {})}
        self.template_tokens = {  # the special tokens that templates know by name, such as bos_token
            name: _read_special_token(value)
            for name, value in self.settings.items()
            if name.endswith("_token") and not name.startswith("add_")
        }

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Reads tokenizer.json, and the chat template and the settings beside it if they exist."""
        folder = Path(folder)
        if not (folder / FILE).exists():
            raise TokenizerError(f"{folder / FILE} does not exist; a checkpoint folder needs it")
        content = read_file(folder / FILE)
        from tokenizers import Tokenizer as Vocabulary  # not above: help and usage errors need no tokenizer

        try:
            vocabulary = Vocabulary.from_buffer(content)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{folder / FILE} is not a readable tokenizer: {error}") from None
        settings = read_json(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
        template = _read_template(settings.pop("chat_template", None))
        if (folder / TEMPLATE).exists():
            template = read_file(folder / TEMPLATE).decode("utf-8", errors="replace")
        return cls(vocabulary, template=template, settings={k: v for k, v in settings.items() if v is not None})

    @classmethod
    def byte_level(cls, special_tokens: Sequence[str]) -> "Tokenizer":
        """A vocabulary of these special tokens and then one token for every byte, for toy models and tests."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Vocabulary

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        ids = {token: number for number, token in enumerate([*special_tokens, *alphabet])}
        vocabulary = Vocabulary(models.BPE(vocab=ids, merges=[]))
        vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        vocabulary.decoder = decoders.ByteLevel()
        vocabulary.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
        return cls(vocabulary)

    def save(self, folder: str | Path) -> None:
        """Writes the files that `from_folder` reads; transformers reads them too.

        The old tokenizer.json goes first and the new one comes last: a killed save leaves the old files, the new ones, or a
        folder without tokenizer.json, which does not load. It never leaves a mixture.
        """
        folder = Path(folder)
        vocabulary = self.vocabulary.to_str(pretty=True)
        settings = json.dumps(self.settings, indent=2) + "\n"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).unlink(missing_ok=True)
        write_text(folder / SETTINGS, settings)
        if self.template is not None:
            write_text(folder / TEMPLATE, self.template)
        else:
            (folder / TEMPLATE).unlink(missing_ok=True)
        write_text(folder / FILE, vocabulary)

    @cached_property
    def _vocab(self) -> dict[str, int]:
        """The id of every token. Cached: `get_vocab` builds a dictionary of the whole vocabulary at every call."""
        return self.vocabulary.get_vocab()

    @cached_property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self._vocab.values()) + 1

    @cached_property
    def longest_token(self) -> int:
        """The most characters that one token stands for."""
        return max(map(len, self._vocab))

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """The text of every special token, by id."""
        added = self.vocabulary.get_added_tokens_decoder()
        return {token: entry.content for token, entry in added.items() if entry.special}

    @cached_property
    def _decoder_settings(self) -> Any:
        """The decoder section of tokenizer.json, from the decoder's pickle: the whole file would take seconds to write."""
        decoder = self.vocabulary.decoder
        return json.loads(decoder.__getstate__()) if decoder is not None else None

    @cached_property
    def token_bytes(self) -> tuple[bytes | None, ...]:
        """The bytes that every token adds to a text; None for special tokens and for ids without a token."""
        decoder = str(self._decoder_settings)
        if "ByteLevel" not in decoder and "ByteFallback" not in decoder:
            raise TokenizerError(
                "this tokenizer's tokens are not the bytes of a text, so a regular expression cannot constrain them"
            )
        added_tokens = self.vocabulary.get_added_tokens_decoder()
        token_bytes: list[bytes | None] = [None] * self.size
        for text, token in self._vocab.items():
            if token in added_tokens:
                token_bytes[token] = None if added_tokens[token].special else text.encode()
            elif "ByteLevel" in decoder:
                is_byte_level = all(character in _BYTE_OF_CHARACTER for character in text)
                token_bytes[token] = bytes(_BYTE_OF_CHARACTER[character] for character in text) if is_byte_level else None
            else:
                byte = re.fullmatch("<0x([0-9A-F]{2})>", text)
                token_bytes[token] = bytes.fromhex(byte[1]) if byte else text.replace("\u2581", " ").encode()
        return tuple(token_bytes)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token; empty for special tokens and for ids that only the model has."""
        return (self.token_bytes[token] if token < self.size else None) or b""

    def ids_without_text(self, vocab_size: int) -> tuple[int, ...]:
        """The ids of a model's vocabulary that add no text: special tokens, and ids that only the model has."""
        without_bytes = (token for token, text in enumerate(self.token_bytes) if not text)
        return (*without_bytes, *range(self.size, vocab_size))

    @cached_property
    def bos_id(self) -> int | None:
        """The id of the BOS token, with which a text begins; None if texts begin without one.

        The settings say so, or the post-processor of tokenizer.json; Gemma's texts always begin with it.
        """
        bos = self.template_tokens.get("bos_token")
        token = self.vocabulary.token_to_id(bos) if bos is not None else None
        adds_bos = self.settings.get("add_bos_token")
        if adds_bos is None:
            adds_bos = bos == GEMMA_BOS or self.vocabulary.encode("").ids[:1] == [token]
        return token if adds_bos else None

    @property
    def start_ids(self) -> list[int]:
        """The tokens before a text that has no prompt: the BOS token, or the token between documents; empty without both."""
        token = self.bos_id if self.bos_id is not None else self.vocabulary.token_to_id(DOCUMENT_END)
        return [token] if token is not None else []

    @property
    def can_chat(self) -> bool:
        """Whether the checkpoint is made for chat: it has a chat template, or the special token <|turn> of our template."""
        return self.template is not None or self.vocabulary.token_to_id("<|turn>") is not None

    @property
    def can_think(self) -> bool:
        """Whether the chat template can ask the model to reason before it answers."""
        if self.template is not None:
            return "enable_thinking" in self.template
        return self.can_chat and self.vocabulary.token_to_id("<|think|>") is not None

    @property
    def can_call(self) -> bool:
        """Whether the chat template tells the model about tools and asks for calls in a form that redraft reads."""
        return self.has_call_tokens or self.call_form is LLAMA

    @property
    def has_call_tokens(self) -> bool:
        """Whether the calls that the chat template asks for begin with a special token: ChatParser reads those."""
        if self.template is not None and "tools" not in self.template:
            return False
        return self.can_chat and any(self._has_calls(start) for start in CALLS)

    @property
    def call_form(self) -> CallForm:
        """How a call is written as text."""
        template = self.template or ""
        return LLAMA if "tools" in template and all(word in template for word in LLAMA_WORDS) else HERMES

    @cached_property
    def takes_system(self) -> bool:
        """Whether the chat template takes a system message."""
        try:
            self.render([{"role": "system", "content": "x"}, {"role": "user", "content": "x"}])
        except TokenizerError:
            return False
        return True

    def _has_calls(self, start: str) -> bool:
        """Whether the template and the vocabulary have the calls that begin with this token."""
        names = [name for name in (start, CALLS[start]) if name]
        if self.template is not None and not all(text in self.template for text in (*names, CALL_WORDS[start])):
            return False
        return all(self.vocabulary.token_to_id(name) is not None for name in names)

    @cached_property
    def turn_ends(self) -> tuple[int, ...]:
        """The special tokens with which the chat template ends a turn, of those that are known by name."""
        names = (name for name in TURN_ENDS if self.template is not None and name in self.template)
        ids = (self.vocabulary.token_to_id(name) for name in names)
        return tuple(token for token in ids if token in self.special_tokens)

    @cached_property
    def image_ids(self) -> tuple[int, int, int] | None:
        """The ids of the special tokens of images: begin, image, end. None if the vocabulary lacks one."""
        begin, image, end = (self.vocabulary.token_to_id(token) for token in (IMAGE_START, IMAGE, IMAGE_END))
        return None if begin is None or image is None or end is None else (begin, image, end)

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Ids of a text. Special tokens such as <|turn> are recognised, none is added. Lone surrogates become "?".

        A text that clearly has more than `limit` tokens is refused before all of it is tokenized; one that is longer than
        `limit` of the longest tokens, before any of it is.
        """
        if limit is not None:
            self.check_size(len(text), limit)
        text = text.encode("utf-8", "replace").decode()
        if len(text) <= LONG_TEXT:
            return self.vocabulary.encode(text, add_special_tokens=False).ids
        if limit is not None:
            self._refuse_longer(text, limit)
        return self._encode_long(text)

    def _encode_long(self, text: str) -> list[int]:
        """As a batch of one text, because `encode_batch_fast` releases the interpreter's lock and `encode` does not."""
        return self.vocabulary.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _refuse_longer(self, text: str, limit: int) -> None:
        """Counts tokens piece by piece. A cut between pieces changes a few tokens; twice the limit leaves room for them."""
        tokens = 0
        for start in range(0, len(text), LONG_TEXT):
            tokens += len(self._encode_long(text[start : start + LONG_TEXT]))
            if tokens > 2 * limit:
                raise _too_long(len(text), limit)

    def check_size(self, characters: int, limit: int) -> None:
        """Refuses a text of so many characters if `limit` tokens cannot hold it, however it is tokenized."""
        if characters > limit * self.longest_token:
            raise _too_long(characters, limit)

    def encode_prompt(self, text: str, limit: int | None = None) -> list[int]:
        """Ids of a text to be continued: the BOS token, if there is one, then the text. `limit` as in `encode`."""
        return [*([self.bos_id] if self.bos_id is not None else []), *self.encode(text, limit)]

    @cached_property
    def anchor(self) -> tuple[list[int], str]:
        """Some token and its text, to decode other tokens behind it."""
        ids = self.encode("a")
        return ids, self.decode(ids)

    def decode_fragment(self, ids: Iterable[int], *, keep_special: bool = True) -> str:
        """Text of ids that follow other text: a leading space is kept."""
        anchor_ids, anchor_text = self.anchor
        return self.decode([*anchor_ids, *ids], keep_special=keep_special)[len(anchor_text) :]

    def encode_fragment(self, text: str) -> list[int]:
        """Ids of a text that follows other text: SentencePiece begins every text with a space, which then is its own."""
        begins_with_space = self.decode_fragment(self.anchor[0]).startswith(" ")
        return self.encode(text.removeprefix(" ") if begins_with_space else text)

    def token_text(self, token: int) -> str:
        """`decode_fragment` of one token, cached."""
        if token not in self._token_texts:
            self._token_texts[token] = self.decode_fragment([token])
        return self._token_texts[token]

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Text of ids, without special tokens unless `keep_special`. Bytes that are not UTF-8 become U+FFFD."""
        return self.vocabulary.decode(list(ids), skip_special_tokens=not keep_special)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool = False,
        limit: int | None = None,
        stop: threading.Event | None = None,
        has_images: bool = False,
    ) -> list[int]:
        """Ids of a conversation, up to the start of the model's turn. `limit` as in `encode`, `stop` as in `render`.

        What users and tools say stands in the prompt as it is, so its size is checked before the template is rendered.
        With `has_images` one image token stands for each image: `expand_images` of images.py puts all of its tokens there.
        """
        check_messages(messages)
        if image_sources(messages) and not has_images:
            raise TokenizerError("the conversation has an image, and images are not read here: send text only")
        if limit is not None:
            self.check_size(sum(content_size(message) for message in messages if message["role"] in KEPT_ROLES), limit)
        return self.encode(self.render(messages, tools=tools, think=think, stop=stop), limit)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool = False,
        add_generation_prompt: bool = True,
        stop: threading.Event | None = None,
    ) -> str:
        """Text of a conversation, written by the chat template. Setting `stop` ends it early, with HelperStoppedError.

        The generation prompt is the start of the model's turn.
        """
        check_messages(messages)
        check_tools(tools)
        if not self.can_chat:
            raise TokenizerError("this tokenizer has no special token <|turn>, so it cannot chat; continue a text instead")
        if tools and not self.can_call:
            raise TokenizerError(
                "this model's chat template has no tool calls that redraft reads: "
                "leave tools out, or ask for JSON with a schema instead"
            )
        from redraft.tokenizer import chat_template  # jinja2 takes long to import

        variables = {
            "messages": self._prepare(messages),
            "tools": list(tools) if tools else None,
            "enable_thinking": think,
            "add_generation_prompt": add_generation_prompt,
            **self.template_tokens,
        }
        try:
            if self.template is not None:
                return chat_template.render_foreign(self.template, variables, stop)
            source = DEFAULT_TEMPLATE.read_text(encoding="utf-8")
            if chat_template.count_values(variables, MAX_OWN_VALUES) > MAX_OWN_VALUES:
                return chat_template.render_foreign(source, variables, stop)
            return chat_template.render_own(source, variables)
        except chat_template.TemplateError as error:
            raise TokenizerError(f"the chat template refuses this conversation: {error}") from None

    def _prepare(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as this template expects them."""
        prepared = prepare_messages(messages)
        if self.template is not None and MISTRAL_CALLS in self.template:
            return number_calls(prepared)
        return split_calls(prepared) if self.call_form is LLAMA else prepared


def _too_long(characters: int, limit: int) -> TokenizerError:
    return TokenizerError(
        f"the text of {characters:,} characters has more than {limit:,} tokens, the model's limit: "
        "shorten it, or take it in parts"
    )


def check_same_vocabulary(
    first: Tokenizer, second: Tokenizer, first_name: str = "the first model", second_name: str = "the second model"
) -> None:
    """Raises TokenizerError unless every id is the same token in both: the same bytes, or the same special token.

    An id above the largest one of a tokenizer has no token there. The message names the first id that differs.
    """
    meanings = []
    for tokenizer, name in ((first, first_name), (second, second_name)):
        try:
            token_bytes = tokenizer.token_bytes
        except TokenizerError:
            raise TokenizerError(
                f"the vocabulary of {name} cannot be compared: its tokens are not the bytes of a text"
            ) from None
        meanings.append([tokenizer.special_tokens.get(token, text) for token, text in enumerate(token_bytes)])
    for token, (own, other) in enumerate(zip_longest(*meanings)):
        if own != other:
            raise TokenizerError(
                f"{first_name} and {second_name} have different vocabularies, so one cannot verify the other's tokens: "
                f"id {token} is {_describe_token(own)} in {first_name} and {_describe_token(other)} in {second_name}"
            )


def _describe_token(meaning: str | bytes | None) -> str:
    if meaning is None:
        return "no token"
    return f"the special token {show_value(meaning)}" if isinstance(meaning, str) else show_value(meaning)


def _map_characters_to_bytes() -> dict[str, int]:
    """The characters that byte-level vocabularies write for bytes: printable bytes as themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _map_characters_to_bytes()


def _read_special_token(value: Any) -> str:
    """The text of a special token in tokenizer_config.json: a string, or an object with `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if not isinstance(text, str):
        raise TokenizerError(f"{SETTINGS} has a special token that is not a text: {show_value(value)}")
    return text


def _read_template(value: Any) -> str | None:
    """The chat template in tokenizer_config.json: a string, or a list of named templates, of which the default is taken."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, Mapping)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{SETTINGS} has a chat_template that is not a text: {show_value(value)}")
    return value


class Decoder:
    """Decodes a growing sequence: every call returns the new text, never half a character.

    A character may span several tokens (bytes). An incomplete character at the end is held back; `flush` returns it at the
    end of the sequence. The text of a token may also depend on the token before it (a leading space is dropped at the start
    of a text), so pending tokens are decoded together with the piece before them. If the sequence `continues` other text,
    its own leading space is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool = False, continues: bool = False) -> None:
        self.tokenizer = tokenizer
        self.keep_special = keep_special
        self._without_text = () if keep_special else tokenizer.special_tokens.keys()
        self._ids: list[int] = list(tokenizer.anchor[0]) if continues else []
        self._shown = len(self._ids)  # the number of ids whose text was returned: those of the last piece that has text

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these ids add, without an incomplete character at the end."""
        self._ids += [token for token in ids if token < self.tokenizer.size and token not in self._without_text]
        text = self._pending()
        if text.endswith("�"):
            text = self._complete_part()
        else:
            self._mark_shown(len(self._ids), text)
        return text

    def flush(self) -> str:
        """The text that was held back. Incomplete characters become U+FFFD."""
        text = self._pending()
        self._mark_shown(len(self._ids), text)
        return text

    def fork(self) -> "Decoder":
        """A decoder that continues from here on its own."""
        forked = copy(self)
        forked._ids = list(self._ids)
        return forked

    def _mark_shown(self, end: int, text: str) -> None:
        if text:  # behind a piece without text, the next one would look like the start of a text
            del self._ids[: self._shown]
            end -= self._shown
        self._shown = end

    def _pending(self, end: int | None = None) -> str:
        head = self._decode(self._ids[: self._shown])
        return self._decode(self._ids[:end])[len(head) :]

    def _complete_part(self) -> str:
        """The pending text up to the last id behind which every character is complete."""
        for end in range(len(self._ids) - 1, max(self._shown, len(self._ids) - 5), -1):
            text = self._pending(end)
            if not text.endswith("�"):
                self._mark_shown(end, text)
                return text
        return self._broken_part()

    def _broken_part(self) -> str:
        """The pending text before the last three ids, where no character is complete: no later id completes one of it."""
        pending = self._pending()
        for end in range(len(self._ids) - 3, max(self._shown, len(self._ids) - 7), -1):
            text = self._pending(end)
            if pending.startswith(text):
                self._mark_shown(end, text)
                return text
        return ""

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, keep_special=self.keep_special)
