"""Frames: a canvas after each denoising step, as the tokens that changed since the step before.

A token of a frame has `i` (position on the canvas), `t` (text), `s` (state: n noise, d draft, k pinned), `p` (probability of
the token that stands there) and `e` (entropy in nats). With candidates it also has `id` and `c`, the likeliest tokens as
[id, text, probability].
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from redraft.diffusion.generate import Draft
from redraft.tasks.text_events import TextDraft
from redraft.tokenizer.tokenizer import Tokenizer

MIN_CANDIDATE_PROBABILITY = 5e-4  # less likely candidates are not shown, except the first
STATES = "ndk"  # noise, draft, pinned


@dataclass(frozen=True)
class Frame:
    """A canvas after a step: its text, and the tokens that differ from the frame before."""

    block: int
    step: int
    max_steps: int
    text: str
    tokens: list[dict[str, Any]]
    entropy: float
    accepted: int


class FrameBuilder:
    """Builds the frames of one canvas. `with_candidates` adds token ids and the likeliest tokens at every position."""

    def __init__(self, tokenizer: Tokenizer, with_candidates: bool = False) -> None:
        self.tokenizer = tokenizer
        self.with_candidates = with_candidates
        self._previous: list[dict[str, Any]] = []

    def build(self, event: Draft) -> Frame:
        """Returns the frame of a step."""
        tokens = [self._token(position, *column) for position, column in enumerate(zip(*_columns(event), strict=True))]
        changed = [token for token, previous in zip_longest(tokens, self._previous) if token != previous]
        self._previous = tokens
        return Frame(
            block=event.block,
            step=event.step,
            max_steps=event.max_steps,
            text=event.text if isinstance(event, TextDraft) else "",
            tokens=changed,
            entropy=round(float(event.entropy_BC[0].mean()), 4),
            accepted=int(event.accepted_BC[0].sum()),
        )

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
