"""What the user fixed on the canvas: pinned and forbidden tokens. The sampler obeys; the model knows nothing of it.

Positions count from the first token of the answer, across canvases. Rules become tensors one canvas at a time.
Shapes: B rows, C canvas positions, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Far below any soft-capped logit, so its probability is exactly 0, yet finite after division by a temperature.
NEVER = -1e9


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of one row: `pins` maps answer positions to token ids, `forbidden` ids stand nowhere but where pinned."""

    pins: Mapping[int, int] = field(default_factory=dict)
    forbidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(position < 0 for position in self.pins):
            raise ValueError(f"a pin's position must be 0 or more, got {min(self.pins)}")

    def check(self, vocab_size: int, answer_length: int, stops: Sequence[int]) -> None:
        """Refuses tokens outside the vocabulary, pins that the answer would not hold, and rules that leave no token."""
        for token in (*self.pins.values(), *self.forbidden):
            if not 0 <= token < vocab_size:
                raise ValueError(f"token {token} is outside the vocabulary of {vocab_size}")
        if self.pins and max(self.pins) >= answer_length:
            raise ValueError(f"a pin at {max(self.pins)} is beyond the answer's {answer_length} positions")
        for position, token in self.pins.items():
            if token in stops and position < max(self.pins):
                raise ValueError(f"the stop token {token} pinned at {position} would cut off the pin at {max(self.pins)}")
        if len({*self.forbidden, *(stops if self.pins else ())}) >= vocab_size:
            raise ValueError("every token is forbidden")


@dataclass(frozen=True)
class CanvasRules:
    """The rules of all rows on one canvas."""

    pins_BC: Tensor  # token id, or -1 where nothing is pinned
    forbidden_BV: Tensor | None
    unending_BC: Tensor | None  # where a stop token would cut off a later pin; None without pins
    stops: tuple[int, ...]

    @property
    def pinned_BC(self) -> Tensor:
        """Which positions are pinned."""
        return self.pins_BC >= 0

    def pin(self, canvas_BC: Tensor) -> Tensor:
        """The canvas with its pins asserted."""
        return torch.where(self.pinned_BC, self.pins_BC, canvas_BC)

    def shape(self, logits_BCV: Tensor) -> Tensor:
        """Logits under the rules. A pinned position is certain: no entropy of its own, nothing else possible."""
        if self.forbidden_BV is not None:
            logits_BCV = logits_BCV.masked_fill(self.forbidden_BV[:, None, :], NEVER)
        if self.unending_BC is not None:  # there are pins
            stops = torch.zeros(logits_BCV.shape[-1], dtype=torch.bool, device=logits_BCV.device)
            stops[list(self.stops)] = True
            logits_BCV = logits_BCV.masked_fill(self.unending_BC[..., None] & stops, NEVER)
            certain_BCV = torch.full_like(logits_BCV, NEVER)
            certain_BCV.scatter_(-1, self.pins_BC.clamp(min=0)[..., None], 0.0)
            logits_BCV = torch.where(self.pinned_BC[..., None], certain_BCV, logits_BCV)
        return logits_BCV


def on_canvas(
    rules: Sequence[Rules], block: int, length: int, vocab_size: int, stops: Sequence[int], device: torch.device | str
) -> CanvasRules | None:
    """The rows' rules on canvas number `block`, or None when there are none to obey."""
    if not any(rule.pins or rule.forbidden for rule in rules):
        return None
    start = block * length
    pins_BC = torch.full((len(rules), length), -1)
    last_B = torch.full((len(rules), 1), -1)
    forbidden_BV = torch.zeros(len(rules), vocab_size, dtype=torch.bool)
    for row, rule in enumerate(rules):
        for position, token in rule.pins.items():
            if start <= position < start + length:
                pins_BC[row, position - start] = token
        last_B[row] = max(rule.pins, default=-1)
        forbidden_BV[row, list(rule.forbidden)] = True
    pinned = any(rule.pins for rule in rules)
    unending_BC = torch.arange(start, start + length) < last_B
    return CanvasRules(
        pins_BC.to(device),
        forbidden_BV.to(device) if forbidden_BV.any() else None,
        unending_BC.to(device) if pinned else None,
        tuple(stop for stop in stops if stop < vocab_size),
    )
