"""What a client asks for, whatever the wire: a text or messages, settings, patterns; and the pieces that come of it.

    request -> CompletionParams -> [pieces: Writer.stream, cut at the client's stop strings] -> Frame, Text, End

Sampling: a temperature of 1 is the model's own schedule, others scale it. Knows nothing of HTTP.
"""

import codecs
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch

from redraft.config import SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import Draft, Finished, Stats
from redraft.engine import Stopped
from redraft.server.schema import ChatMessage
from redraft.tokenizer.chat_parser import ToolCall
from redraft.tokenizer.tokenizer import Message, Tokenizer, TokenizerError
from redraft.writer import TextCommitted, TextDraft, Writer, new_seed

FAINT = 5e-4  # of a token that is not worth showing
COLDEST = 0.02  # times the model's own temperature: what a client's 0 means
PLAIN_OBJECT = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}}


class Refused(ValueError):
    """What cannot be done, in a sentence; `param` is the field it is about."""

    def __init__(self, sentence: str, param: str | None = None) -> None:
        super().__init__(sentence)
        self.param = param


@dataclass(frozen=True, kw_only=True)
class CompletionParams:
    """One answer."""

    prompt: str | Sequence[Message]
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stops: tuple[str, ...] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    think: bool = False
    pattern: Mapping[str, Any] = field(default_factory=dict)  # regex, schema or choices
    forbidden: tuple[int, ...] = ()
    unending: bool = False  # nothing ends it but its length
    pins: Mapping[int, int] = field(default_factory=dict)
    draft: str | tuple[int, ...] | None = None  # a text, or its tokens, to start from instead of noise
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplerConfig
    frames: bool = False
    logprobs: int | None = None  # how many likely tokens are told beside each of the answer's; None: nothing is


@dataclass(frozen=True)
class Said:
    """A token of the answer, how likely the last step of its page found it, and the likeliest there."""

    id: int
    at: int  # characters of the answer before it
    share: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Frame:
    """A page after a step: its text, and the tokens that are not as in the frame before it."""

    block: int
    step: int
    total: int
    text: str
    tokens: list[dict[str, Any]]
    entropy: float
    accepted: int


@dataclass(frozen=True)
class Text:
    """What a committed page adds."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tokens: tuple[Said, ...] = ()  # where they were asked for


@dataclass(frozen=True)
class End:
    """Why it ended, and what it cost."""

    reason: str  # stop, length, deadline or tool_calls
    stats: Stats
    stop: str | None = None  # the client's own stop string that ended it


@dataclass(frozen=True)
class Begun:
    """The request was taken."""


Piece = Begun | Frame | Text | End


def stops_of(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def plain_text(content: Any, where: str) -> str:
    """The text of a content, which may come in parts; pictures and sounds are refused."""
    if isinstance(content, str):
        return content
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type", "text") if isinstance(part, dict) else part
        if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
            raise Refused(f"only text can be read, got a part of type {kind!r}", where)
    return "".join(part["text"] for part in content)


def message_of(message: ChatMessage) -> Message:
    """A message as the chat template reads it."""
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    found["content"] = plain_text(message.content, "messages") if message.content is not None else ""
    if message.name is not None:
        found["name"] = message.name
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    return found


def arguments(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """A call's arguments, which travel as JSON in a string."""
    if not isinstance(given, str):
        return given
    try:
        read = json.loads(given or "{}")
    except (json.JSONDecodeError, RecursionError):
        raise Refused(f"the arguments of a tool call must be JSON, got {given[:60]!r}", "messages") from None
    if not isinstance(read, dict):
        raise Refused(f"the arguments of a tool call must be a JSON object, got {given[:60]!r}", "messages")
    return read


def heated(cfg: SamplerConfig, temperature: float | None) -> dict[str, float]:
    """Settings for a client's temperature."""
    if temperature is None or temperature == 1.0:
        return {}
    scale = max(temperature, COLDEST)
    return {"t_min": cfg.t_min * scale, "t_max": cfg.t_max * scale}


def pieces(writer: Writer, asked: CompletionParams, stop: threading.Event) -> Iterator[Piece]:
    """One answer as it comes."""
    prompt, began = asked.prompt, time.perf_counter()
    if not isinstance(prompt, str) and not writer.tokenizer.can_chat:
        if asked.tools:
            raise Refused("this model continues text and was not made for conversation: it cannot call tools", "tools")
        prompt = continued(prompt)
    if asked.logprobs is not None:
        check_logprobs(writer.tokenizer, asked)
    seed = asked.seed if asked.seed is not None else new_seed()
    if asked.unending or isinstance(asked.draft, tuple):
        asked = one_canvas(asked, asked.settings.get("canvas_length", writer.sampler.canvas_length))
    forbidden = (*asked.forbidden, *(writer.sampler.eos_token_ids if asked.unending else ()))
    settings = {**heated(writer.sampler, asked.temperature), **asked.settings, **asked.pattern}
    events = writer.stream(
        prompt,
        tools=asked.tools,
        think=asked.think,
        max_tokens=asked.max_tokens,
        seed=seed,
        constraints=Constraints(pins=asked.pins, forbidden=forbidden) if asked.pins or forbidden else None,
        stop=stop,
        draft=asked.draft,
        drafts=asked.frames,
        candidates=max(int(asked.frames), 0 if asked.logprobs is None else asked.logprobs or 1),
        **settings,
    )
    cut, frames, called, last, pages = Stops(asked.stops), Frames(writer.tokenizer), False, None, []
    spoken, drawn = Spoken(writer.tokenizer, asked.logprobs), None
    yield Begun()
    for event in events:
        match event:
            case Draft():
                drawn = event
                if asked.frames:
                    yield frames.of(event)
            case TextCommitted():
                text = cut.feed(event.text)
                pages.append((event, text))
                called = called or bool(event.tool_calls)
                spoken.hear(event, drawn)
                yield Text(text, event.reasoning, event.tool_calls, spoken.told(text, bool(event.reasoning)))
                frames = Frames(writer.tokenizer)
                if cut.found is not None:
                    stop.set()
                    writer.engine.tell()
                    ids = writer.encode_prompt(prompt, asked.tools, asked.think)
                    yield End("stop", cut_off(writer, ids, pages, seed, time.perf_counter() - began), cut.found)
                    return
            case Finished():
                last = event
    if last is None:
        raise Stopped
    if rest := cut.flush():
        yield Text(rest, tokens=spoken.told(rest))
    yield End("tool_calls" if called else last.reasons[0], last.stats[0])


def one_canvas(asked: CompletionParams, length: int) -> CompletionParams:
    """A canvas given by its tokens is whole; one that nothing ends is the whole answer."""
    if isinstance(asked.draft, tuple) and len(asked.draft) != length:
        sentence = f"diffusion_seed_canvas has {len(asked.draft)} tokens, the canvas has {length}"
        raise Refused(sentence, "diffusion_seed_canvas")
    return replace(asked, max_tokens=length) if asked.unending else asked


def cut_off(
    writer: Writer, prompt: Sequence[int], pages: Sequence[tuple[TextCommitted, str]], seed: int, seconds: float
) -> Stats:
    """What an answer cost that a stop string ended: the tokens that were shown, and whole pages of work."""
    shown = sum(len(writer.tokenizer.encode(event.reasoning + text)) for event, text in pages)
    steps = sum(int(event.steps_B[0]) for event, _ in pages)
    settled = sum(bool(event.settled_B[0]) for event, _ in pages)
    return Stats(seed, len(prompt), shown, len(pages), settled, steps, len(pages) - 1, seconds, 0.0)


def continued(messages: Sequence[Message]) -> str:
    """A conversation for a model that only continues text: what was said, paragraph by paragraph."""
    return "\n\n".join(str(message.get("content") or "") for message in messages)


class Stops:
    """Cuts a growing text at the first of some strings; what may become one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self._held = [stop for stop in stops if stop], ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """What of the text is certain to be shown."""
        if not self.stops or self.found is not None:
            return text if self.found is None else ""
        whole = self._held + text
        places = [(whole.find(stop), stop) for stop in self.stops if stop in whole]
        if places:
            at, self.found = min(places)
            return whole[:at]
        sizes = [(stop, min(len(stop), len(whole) + 1)) for stop in self.stops]
        held = max((size for stop, most in sizes for size in range(1, most) if whole.endswith(stop[:size])), default=0)
        self._held = whole[len(whole) - held :]
        return whole[: len(whole) - held]

    def flush(self) -> str:
        """What was held back in vain."""
        held, self._held = self._held, ""
        return held


def check_logprobs(tokenizer: Tokenizer, asked: CompletionParams) -> None:
    """Refuses what has none."""
    if asked.tools or asked.think:
        raise Refused("logprobs are those of plain answers: leave tools and thinking out", "logprobs")
    try:
        _ = tokenizer.token_bytes
    except TokenizerError:
        raise Refused("this model's tokens are not bytes of a text: leave logprobs out", "logprobs") from None


class Spoken:
    """The tokens of an answer with their probabilities, told as its text is: what is held back or cut off is not told."""

    def __init__(self, tokenizer: Tokenizer, most: int | None) -> None:
        self.tokenizer, self.most = tokenizer, most
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._text, self._shown = "", 0  # what is not told yet; characters that are
        self._held: list[Said] = []  # of that, where a token begins in it

    def hear(self, event: TextCommitted, draft: Draft | None) -> None:
        """A page is committed, whose last draft this was. Marks are no text."""
        if self.most is None or draft is None:
            return
        shares = draft.top_probs
        ids, own = event.ids_BC[0].tolist()[: event.shown], shares.draft_BC[0].tolist()
        likely = zip(shares.ids_BCK[0].tolist(), shares.probs_BCK[0].tolist(), strict=True)
        for token, share, (tokens, others) in zip(ids, own, likely, strict=False):
            if letters := self.tokenizer.bytes_of(token):
                before, size = len(self._text), len(letters.decode("utf-8", "replace"))
                self._text += self._characters.decode(letters)
                at = max(before, len(self._text) - size)  # a half character may turn out to be none only now
                self._held.append(Said(token, at, share, tuple(zip(tokens, others, strict=True))[: self.most]))

    def told(self, text: str, thought: bool = False) -> tuple[Said, ...]:
        """Those of a text that is shown now. Blanks before an answer are not, nor what was thought before it."""
        if not text or self.most is None:
            return ()
        begin = max(0, self._text.rfind(text) if thought else self._text.find(text))
        end, shown = begin + len(text), self._shown
        found = [replace(said, at=shown + said.at - begin) for said in self._held if begin <= said.at < end]
        self._held = [replace(said, at=said.at - end) for said in self._held if said.at >= end]
        self._text, self._shown = self._text[end:], shown + len(text)
        return tuple(found)


class Frames:
    """Frames of one page, each with what has changed since the one before; with `everything`, ids and candidates too."""

    def __init__(self, tokenizer: Tokenizer, everything: bool = False) -> None:
        self.tokenizer, self.everything, self._before = tokenizer, everything, []

    def of(self, event: Draft) -> Frame:
        """The frame of a step."""
        now = [self._token(*one) for one in enumerate(zip(*self._columns(event), strict=True))]
        tokens = [token for token, before in zip_longest(now, self._before) if token != before]
        self._before = now
        nats = event.entropy_BC[0]
        mean, accepted = round(float(nats.mean()), 4), int(event.accepted_BC[0].sum())
        text = event.text if isinstance(event, TextDraft) else ""
        return Frame(event.block, event.step, event.max_steps, text, tokens, mean, accepted)

    def _columns(self, event: Draft) -> Iterator[list[Any]]:
        """Of every position: token, state, nats, its probability, and the likeliest tokens with theirs."""
        accepted_C = event.accepted_BC[0]
        pinned_C = event.pinned_BC[0] if event.pinned_BC is not None else torch.zeros_like(accepted_C)
        yield event.canvas_BC[0].tolist()
        yield (accepted_C.int() + pinned_C.int()).tolist()
        yield event.entropy_BC[0].tolist()
        yield event.top_probs.own_BC[0].tolist()
        yield event.top_probs.ids_BCK[0].tolist()
        yield event.top_probs.probs_BCK[0].tolist()

    def _token(self, at: int, columns: tuple[Any, ...]) -> dict[str, Any]:
        """A token is i (place), t (its text), s (n noise, d draft, k pinned), p (its probability), e (nats of doubt).

        And with everything: id, and c, the likeliest: id, text and probability of each.
        """
        token, state, nats, own, ids, shares = columns
        word = self.tokenizer.token_text
        found = {"i": at, "t": word(token), "s": "ndk"[state], "p": round(own, 4), "e": round(nats, 3)}
        if self.everything:
            found["id"] = token
            likely = [pair for rank, pair in enumerate(zip(ids, shares, strict=True)) if not rank or pair[1] >= FAINT]
            found["c"] = [[one, word(one), round(share, 4)] for one, share in likely]
        return found
