"""Frames: a canvas after each denoising step or round, as the tokens that changed since the frame before.

A token of a frame has `i` (position on the canvas), `t` (text), `s` (state: n noise, d draft, v verified, k pinned), `p`
(probability of the token that stands there) and `e` (entropy in nats). With candidates it also has `id` and `c`, the
likeliest tokens as [id, text, probability]. In a round of checked mode, a token keeps the numbers of the last denoising
step; those of a token that is new in the round are None.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from redraft.diffusion.generate import Draft
from redraft.tasks.text_events import TextCommitted, TextDraft
from redraft.tokenizer.tokenizer import Tokenizer

MIN_CANDIDATE_PROBABILITY = 5e-4  # less likely candidates are not shown, except the first
STATES = "ndk"  # noise, draft, pinned
VERIFIED = "v"


@dataclass(frozen=True)
class Frame:
    """A canvas after a step: its text, and the tokens that differ from the frame before."""

    block: int
    step: int
    max_steps: int
    text: str
    tokens: list[dict[str, Any]]
    entropy: float | None  # the mean; None where no step gave one
    accepted: int
    verified: int | None = None  # positions from the left that are final; None while all may change


class FrameBuilder:
    """Builds the frames of one canvas. `with_candidates` adds token ids and the likeliest tokens at every position."""

    def __init__(self, tokenizer: Tokenizer, with_candidates: bool = False) -> None:
        self.tokenizer = tokenizer
        self.with_candidates = with_candidates
        self._previous: list[dict[str, Any]] = []

    def build(self, event: Draft) -> Frame:
        """Returns the frame of a step, or of a round of checked mode."""
        if event.verified is not None:
            return self._build_round(event)
        tokens = [self._token(position, *column) for position, column in enumerate(zip(*_columns(event), strict=True))]
        entropy = round(float(event.entropy_BC[0].mean()), 4)
        return self._show_changes(event, tokens, entropy=entropy, accepted=int(event.accepted_BC[0].sum()))

    def _build_round(self, event: Draft) -> Frame:
        assert event.verified is not None
        tokens = []
        for position, token in enumerate(event.ids_BC[0].tolist()):
            previous = self._previous[position] if position < len(self._previous) else None
            entry = self._kept_token(position, token, previous)
            if entry["s"] != STATES[2]:
                entry["s"] = VERIFIED if position < event.verified else STATES[1]
            tokens.append(entry)
        return self._show_changes(event, tokens, entropy=None, accepted=event.verified, verified=event.verified)

    def _show_changes(self, event: Draft, tokens: list[dict[str, Any]], **fields: Any) -> Frame:
        """A frame of the tokens that are not as the frame before had them."""
        changed = [token for token, previous in zip_longest(tokens, self._previous) if token not in (None, previous)]
        self._previous = tokens
        return Frame(
            block=event.block,
            step=event.step,
            max_steps=event.max_steps,
            text=event.text if isinstance(event, TextDraft) else "",
            tokens=changed,
            **fields,
        )

    def _kept_token(self, position: int, token: int, previous: dict[str, Any] | None) -> dict[str, Any]:
        """The entry of a token in a round: as the frame before had it, if the token stands there or was the likeliest."""
        text = self.tokenizer.token_text(token)
        if previous is not None and previous["t"] == text and previous.get("id", token) == token:
            return dict(previous)
        entry: dict[str, Any] = {"i": position, "t": text, "s": STATES[1], "p": None, "e": None}
        if self.with_candidates:
            best = previous["c"] if previous is not None else [[None]]
            is_likeliest = best[0][0] == token
            entry["id"] = token
            entry["c"] = best if is_likeliest else [[token, text, None]]
            if is_likeliest and previous is not None:
                entry |= {"p": best[0][2], "e": previous["e"]}
        return entry

    def _token(
        self, position: int, token: int, state: int, entropy: float, probability: float, ids: list[int], probs: list[float]
    ) -> dict[str, Any]:
        text_of = self.tokenizer.token_text
        entry: dict[str, Any] = {"i": position, "t": text_of(token), "s": STATES[state]}
        entry |= {"p": round(probability, 4), "e": round(entropy, 3)}
        if self.with_candidates:
            entry["id"] = token
            ranked = enumerate(zip(ids, probs, strict=True))
            shown = [pair for rank, pair in ranked if rank == 0 or pair[1] >= MIN_CANDIDATE_PROBABILITY]
            entry["c"] = [[candidate, text_of(candidate), round(share, 4)] for candidate, share in shown]
        return entry


class ExactFrames:
    """Builds the frames of exact mode: one for every round, with the tokens that it added to canvases of a given length."""

    def __init__(self, tokenizer: Tokenizer, canvas_length: int) -> None:
        self.tokenizer = tokenizer
        self.canvas_length = canvas_length
        self.rounds = 0
        self.ids: list[int] = []

    def build(self, event: TextCommitted) -> Iterator[Frame]:
        """Yields the frame of a round, or two if it ends one canvas and begins the next."""
        self.rounds += 1
        begin = len(self.ids)
        self.ids += event.ids_BC[0].tolist()
        candidates = candidates_of(self.tokenizer, event)
        for block in range(begin // self.canvas_length, (len(self.ids) - 1) // self.canvas_length + 1):
            start = block * self.canvas_length
            stop = min(start + self.canvas_length, len(self.ids))
            tokens = [
                {
                    "i": position - start,
                    "t": self.tokenizer.token_text(self.ids[position]),
                    "s": VERIFIED,
                    "p": round(math.exp(event.logprobs[position - begin]), 4),
                    "e": None,
                    "id": self.ids[position],
                    "c": candidates[position - begin],
                }
                for position in range(max(start, begin), stop)
            ]
            verified = stop - start
            yield Frame(block, self.rounds, 0, "", tokens, None, accepted=verified, verified=verified)


def candidates_of(tokenizer: Tokenizer, event: TextCommitted) -> list[list[list[Any]]]:
    """Checked and exact mode: the causal half's likeliest tokens for each committed token, as [id, text, probability]."""
    assert event.top_probs is not None, "frames need a request with candidates"
    ids_CK = event.top_probs.ids_BCK[0].tolist()
    probs_CK = event.top_probs.probs_BCK[0].tolist()
    return [
        [[token, tokenizer.token_text(token), round(prob, 4)] for token, prob in zip(ids, probs, strict=True)]
        for ids, probs in zip(ids_CK, probs_CK, strict=True)
    ]


def _columns(event: Draft) -> Iterator[list[Any]]:
    """Per position: token, state, entropy, probability, ids of the candidates and their probabilities."""
    assert event.top_probs is not None, "frames need a request with candidates"
    accepted_C = event.accepted_BC[0]
    pinned_C = event.pinned_BC[0] if event.pinned_BC is not None else torch.zeros_like(accepted_C)
    yield event.canvas_BC[0].tolist()
    yield (accepted_C.int() + pinned_C.int()).tolist()
    yield event.entropy_BC[0].tolist()
    yield event.top_probs.own_BC[0].tolist()
    yield event.top_probs.ids_BCK[0].tolist()
    yield event.top_probs.probs_BCK[0].tolist()
