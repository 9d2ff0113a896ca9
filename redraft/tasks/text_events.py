"""Events with text: the core's events carry token ids, the Writer's carry the decoded text as well.

engine events -> [add_text] -> TextDraft, TextCommitted, Finished
events of `generate` -> [feed_streamer] -> a streamer of transformers
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from redraft.config import SamplerConfig
from redraft.diffusion.events import Committed, Draft, Event, Finished
from redraft.tasks.canvas_html import render_result, shorten_text
from redraft.tokenizer.chat_parser import ChatParser, Parsed, ToolCall
from redraft.tokenizer.tokenizer import Decoder, Tokenizer

if TYPE_CHECKING:  # text-only use does not load it
    from redraft.model.vision import ImageSpan

NOTHING = Parsed("")


@dataclass(frozen=True)
class TextDraft(Draft):
    """A draft with its text. This is the public `redraft.Draft`."""

    text: str = ""
    delta: Parsed = NOTHING  # what became final since the last event, from the left: no later event takes it back
    tokenizer: Tokenizer | None = field(default=None, compare=False)  # decodes single tokens for a notebook

    @classmethod
    def from_draft(cls, event: Draft, text: str, delta: Parsed = NOTHING, tokenizer: Tokenizer | None = None) -> "TextDraft":
        """Adds the decoded text to an event of the core, which knows token ids only."""
        return cls(**_fields_of(event), text=text, delta=delta, tokenizer=tokenizer)

    def __repr__(self) -> str:
        return f"Draft({shorten_text(self.text)}, block={self.block}, step={self.step}, {self._describe_progress()})"

    def _describe_progress(self) -> str:
        length = self.ids_BC.shape[1]
        if self.verified is not None:
            return f"{self.verified} of {length} verified"
        return f"{int(self.accepted_BC[0].sum())} of {length} accepted"

    def _repr_html_(self) -> str:
        """The first row's canvas: final text plain, accepted tokens violet, others grey, pinned ones underlined."""
        notes = [f"canvas {self.block}, step {self.step}", self._describe_progress()]
        if self.tokenizer is None:
            return render_result([(self.text, "draft")], notes)
        kinds = ["draft" if is_accepted else "noise" for is_accepted in self.accepted_BC[0].tolist()]
        if self.verified is not None:
            kinds = ["final" if position < self.verified else "noise" for position in range(len(kinds))]
        if self.pinned_BC is not None:
            pinned = self.pinned_BC[0].tolist()
            kinds = ["pinned" if is_pinned else kind for kind, is_pinned in zip(kinds, pinned, strict=True)]
        tokens = zip(self.ids_BC[0].tolist(), kinds, strict=True)
        parts = []
        for kind, group in groupby(tokens, key=lambda token: token[1]):  # a character may be several tokens
            parts.append((self.tokenizer.decode_fragment([token for token, _ in group]), kind))
        return render_result(parts, notes)


@dataclass(frozen=True)
class TextCommitted(Committed):
    """A committed canvas with the text it adds to the answer. This is the public `redraft.Committed`."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    shown: int = 0  # how many of its tokens belong to the answer: those before the stop token and within max_tokens
    delta: Parsed = NOTHING  # the part that no draft has delivered: all deltas of a stream add up to the answer

    def __repr__(self) -> str:
        return f"Committed({shorten_text(self.text)}, block={self.block}, {self.shown} tokens)"

    @classmethod
    def from_committed(cls, event: Committed, parsed: Parsed, shown: int, delta: Parsed | None = None) -> "TextCommitted":
        """Adds the decoded text to an event of the core, which knows token ids only. The delta is all of it by default."""
        return cls(
            **_fields_of(event),
            text=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=tuple(parsed.tool_calls),
            shown=shown,
            delta=parsed if delta is None else delta,
        )


TextEvent = TextDraft | TextCommitted | Finished


def _fields_of(event: Draft | Committed) -> dict[str, Any]:
    return {item.name: getattr(event, item.name) for item in fields(event)}


@dataclass(frozen=True)
class EncodedPrompt:
    """The token ids of a prompt: of a conversation, whose answer may have reasoning and tool calls, or of a text."""

    ids: Sequence[int]
    is_chat: bool
    images: Sequence["ImageSpan"] = field(default=(), kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)  # sentences for the user about the images


class TextAssembler:
    """Turns the tokens of one answer into text, canvas by canvas; separates reasoning and tool calls in a chat."""

    def __init__(self, tokenizer: Tokenizer, prompt: EncodedPrompt) -> None:
        self.tokenizer = tokenizer
        has_text = any(token not in tokenizer.special_tokens for token in prompt.ids)
        self._follows_text = has_text and not prompt.is_chat
        self._decoder = Decoder(tokenizer, continues=self._follows_text)
        self._parser = ChatParser(tokenizer, prompt.ids) if prompt.is_chat else None

    def fork(self) -> "TextAssembler":
        """An assembler that continues from here on its own, for tokens that may still change."""
        forked = copy(self)
        forked._decoder = self._decoder.fork()
        forked._parser = self._parser.fork() if self._parser is not None else None
        return forked

    def decode_draft(self, ids: Sequence[int]) -> str:
        """The text of a canvas that may still change."""
        return self.tokenizer.decode_fragment(ids, keep_special=False) if self._follows_text else self.tokenizer.decode(ids)

    def add(self, ids: Sequence[int], final: bool) -> Parsed:
        """The text, reasoning and tool calls that these committed tokens add."""
        self._follows_text = self._follows_text or bool(ids)
        if self._parser is not None:
            return self._parser.feed(ids, final=final)
        return Parsed(self._decoder.feed(ids) + (self._decoder.flush() if final else ""))


def join_parsed(parts: Sequence[Parsed]) -> Parsed:
    """The parts of an answer as one."""
    calls = tuple(call for part in parts for call in part.tool_calls)
    return Parsed("".join(part.text for part in parts), "".join(part.reasoning for part in parts), calls)


def add_text(
    events: Iterator[Event], cfg: SamplerConfig, assembler: TextAssembler, *, decodes_drafts: bool, is_compared: bool
) -> Iterator[TextEvent]:
    """Adds text to the engine's events. What is final of a canvas in work is delivered as a delta, at once.

    Not so if `is_compared`: the drafts are then those of one answer among several, and another one may be returned.
    """
    from redraft.tasks.generation import cut_at_stop

    tokens_left = cfg.max_new_tokens
    delivered = 0  # tokens of the canvas in work
    deltas: list[Parsed] = []  # of the canvas in work
    for event in events:
        match event:
            case Draft():
                ids, _ = cut_at_stop(event.ids_BC[0].tolist(), cfg, tokens_left)
                final = ids[delivered : 0 if is_compared else event.final]
                if final:
                    delivered += len(final)
                    deltas.append(assembler.add(final, final=False))
                text = assembler.decode_draft(ids) if decodes_drafts else ""
                yield TextDraft.from_draft(event, text, deltas[-1] if final else NOTHING, assembler.tokenizer)
            case Committed():
                ids, is_stopped = cut_at_stop(event.ids_BC[0].tolist(), cfg, tokens_left)
                tokens_left -= len(ids)
                delta = assembler.add(ids[delivered:], final=is_stopped or tokens_left <= 0)
                yield TextCommitted.from_committed(event, join_parsed([*deltas, delta]), len(ids), delta)
                delivered = 0
                deltas = []
            case Finished():
                yield event
