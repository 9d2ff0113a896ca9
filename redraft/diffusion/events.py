"""Events of a generation: drafts, committed canvases, the end with its statistics. The core's events carry token ids.

This file imports no PyTorch: the command line shows its help and its usage errors without it.
Shapes: B rows, C canvas positions, T generated tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from redraft.kernels import TopProbs


@dataclass(frozen=True)
class Draft:
    """The canvas after one denoising step."""

    block: int  # index of the canvas
    step: int  # the first step is 1
    ids_BC: Tensor  # the draft: the argmax token of every position
    canvas_BC: Tensor  # the input of the next step: sampled tokens where accepted, noise elsewhere
    accepted_BC: Tensor
    entropy_BC: Tensor  # nats
    settled_B: Tensor
    max_steps: int
    pinned_BC: Tensor | None = None  # positions that the constraints fix; None without constraints
    top_probs: TopProbs | None = None  # of the likeliest tokens, when the request asked for candidates
    verified: int | None = None  # checked mode: positions from the left that are final; None while all may change
    final_B: Tensor | None = None  # with settle_prefix: positions from the left that are final
    logprobs: tuple[float, ...] = ()  # checked mode: of the verified tokens, under the causal half
    counts: Mapping[str, int] = field(default_factory=dict)  # checked mode: rounds and drafts so far, as in Stats

    @property
    def final(self) -> int:
        """Positions of the first row, from the left, that no later step changes."""
        if self.final_B is not None:
            return int(self.final_B[0])
        return self.verified or 0


@dataclass(frozen=True)
class Committed:
    """A canvas that will not change any more. Its tokens include the stop token; padding follows it."""

    block: int
    ids_BC: Tensor
    entropy_BC: Tensor  # nats, at the last step
    settled_B: Tensor  # False where the canvas was still changing at the last allowed step: its text is less reliable
    steps_B: Tensor  # denoising steps used
    logprobs: tuple[float, ...] = ()  # checked and exact mode: of every token, under the causal half
    top_probs: TopProbs | None = None  # in these modes: of the likeliest tokens, when the request asked for candidates
    counts: Mapping[str, int] = field(default_factory=dict)  # in these modes: rounds and drafts so far, as in Stats


@dataclass(frozen=True)
class Stats:
    """The cost of one row."""

    seed: int  # reproduces the tokens
    prompt_tokens: int
    new_tokens: int  # tokens of the answer: up to and including the stop token, at most max_new_tokens
    canvases: int
    settled: int  # canvases that settled before the last allowed step
    steps: int  # denoising forwards
    commits: int  # causal forwards over committed canvases
    seconds: float
    prefill_seconds: float
    reused: int = 0  # prompt tokens taken from the prefix cache
    check: str = "off"
    rounds: int = 0  # checked and exact mode: forwards that verify, each with the next drafts
    drafted: int = 0  # drafts that were verified
    accepted: int = 0
    corrected: int = 0  # drafts that were replaced
    logprob: float | None = None  # in these modes: of the whole answer, under the causal half

    @property
    def forwards(self) -> int:
        """Forwards of the model after prefill."""
        return self.steps + self.commits + self.rounds

    @property
    def tokens_per_forward(self) -> float:
        """New tokens per forward; the forwards of commits count too."""
        return self.new_tokens / max(1, self.forwards)

    @property
    def tokens_per_second(self) -> float:
        """Output speed: new tokens over wall time, prefill included."""
        return self.new_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Finished:
    """The last event: the tokens of every row (whole canvases, padded), why each row ended, and its cost.

    A reason is "stop" (the row has a stop token, or all of it matches its pattern) or "length" (max_new_tokens reached); the
    engine adds "deadline".
    """

    ids_BT: Tensor
    reasons: tuple[str, ...]
    stats: tuple[Stats, ...]


Event = Draft | Committed | Finished
