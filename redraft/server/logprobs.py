"""Logprobs: the tokens of a completion with their probabilities.

They are those of the causal half in checked and exact mode, else those of the last step of the token's canvas.
"""

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from redraft.diffusion.generate import Draft
from redraft.tasks.text_events import EncodedPrompt, TextCommitted
from redraft.tokenizer.chat_parser import find_opening
from redraft.tokenizer.chat_tokens import CHANNELS
from redraft.tokenizer.tokenizer import Tokenizer

ZERO_PROBABILITY_LOGPROB = -9999.0  # what OpenAI's clients read for a probability of zero


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the completion, its probability, and the likeliest tokens at its position."""

    id: int
    offset: int  # characters of the completion before the token
    probability: float
    top: tuple[tuple[int, float], ...]


class LogprobCollector:
    """Collects the tokens of committed canvases and releases them together with the text they spell.

    Text may be held back (a stop string may begin in it) or dropped (a stop string was found): its tokens are too.
    `count` is how many likely tokens come with each token; None collects nothing.
    """

    def __init__(self, tokenizer: Tokenizer, count: int | None, prompt: EncodedPrompt) -> None:
        self.tokenizer = tokenizer
        self.count = count
        names = (*CHANNELS, *CHANNELS.values()) if prompt.is_chat else ()
        self._channel_tokens = {tokenizer.vocabulary.token_to_id(name): name for name in names}
        self._is_reasoning = prompt.is_chat and bool(find_opening(tokenizer, prompt.ids))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""  # decoded, not released yet
        self._tokens: list[TokenLogprob] = []  # of `_text`; their offsets count from its start
        self._released = 0  # characters released so far

    def add_canvas(self, event: TextCommitted, draft: Draft | None) -> None:
        """Adds committed tokens; `draft` was the last step of their canvas. Special tokens and reasoning are left out."""
        all_probs = event.top_probs if event.top_probs is not None or draft is None else draft.top_probs
        if self.count is None or all_probs is None:
            return
        ids = event.ids_BC[0].tolist()[: event.shown]
        probabilities = all_probs.draft_BC[0].tolist()
        top = zip(all_probs.ids_BCK[0].tolist(), all_probs.probs_BCK[0].tolist(), strict=True)
        for token, probability, (top_ids, top_probs) in zip(ids, probabilities, top, strict=False):
            if token in self._channel_tokens:
                self._is_reasoning = self._channel_tokens[token] in CHANNELS
            token_bytes = self.tokenizer.bytes_of(token)
            if token_bytes and not self._is_reasoning:
                start = len(self._text)
                size = len(token_bytes.decode("utf-8", "replace"))
                self._text += self._decoder.decode(token_bytes)
                offset = max(start, len(self._text) - size)  # half a character may turn out to be none only now
                pairs = tuple(zip(top_ids, top_probs, strict=True))[: self.count]
                self._tokens.append(TokenLogprob(token, offset, probability, pairs))

    def release(self, text: str) -> tuple[TokenLogprob, ...]:
        """Returns the tokens that spell `text`, which is sent now. Whitespace before it is dropped."""
        if not text or self.count is None:
            return ()
        begin = max(0, self._text.find(text))
        end = begin + len(text)
        shift = self._released - begin
        released = [replace(t, offset=t.offset + shift) for t in self._tokens if begin <= t.offset < end]
        self._tokens = [replace(t, offset=t.offset - end) for t in self._tokens if t.offset >= end]
        self._text = self._text[end:]
        self._released += len(text)
        return tuple(released)


def logprobs_of(tokenizer: Tokenizer, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Tokens with their log probabilities, as OpenAI's chat completions and Ollama write them."""

    def entry(token: int, probability: float) -> dict[str, Any]:
        logprob = round(math.log(probability), 6) if probability > 0 else ZERO_PROBABILITY_LOGPROB
        return {"token": tokenizer.token_text(token), "logprob": logprob, "bytes": list(tokenizer.bytes_of(token))}

    return [entry(t.id, t.probability) | {"top_logprobs": [entry(*pair) for pair in t.top]} for t in tokens]
