"""What the user fixed on the canvas: pinned and forbidden tokens, a pattern. The sampler obeys; the model knows nothing.

Positions count from the first token of the answer, across canvases. Constraints become tensors one canvas at a time.
Shapes: B rows, C canvas positions, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from redraft.constraints.token_automaton import CanvasAutomaton, TokenAutomaton
from redraft.kernels.backend import select_backend

# Far below any soft-capped logit, so its probability is exactly 0, yet finite after division by a temperature.
NEVER = -1e9


@dataclass(frozen=True, kw_only=True)
class ConstraintEdit:
    """What else is fixed from somewhere on: tokens at positions, pinned or banned, and positions that are free again."""

    pins: Mapping[int, int] = field(default_factory=dict)
    bans: tuple[tuple[int, int], ...] = ()  # a position, and a token that shall not stand there
    free: tuple[int, ...] = ()

    @property
    def positions(self) -> set[int]:
        """All positions that it is about."""
        return {*self.pins, *self.free, *(at for at, _ in self.bans)}

    def restrict(self, begin: int, length: int) -> "ConstraintEdit":
        """What of it is about so many positions from there on, which are counted from there."""
        here = range(begin, begin + length)
        pins = {at - begin: token for at, token in self.pins.items() if at in here}
        bans = tuple((at - begin, token) for at, token in self.bans if at in here)
        return ConstraintEdit(pins=pins, bans=bans, free=tuple(at - begin for at in self.free if at in here))


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """The constraints of one row: `pins` maps answer positions to token ids, `forbidden` ids stand nowhere but where pinned.

    The answer matches `pattern`, whole: its text up to the stop token, or up to the last position it may have.
    """

    pins: Mapping[int, int] = field(default_factory=dict)
    forbidden: tuple[int, ...] = ()
    allowed_first: tuple[int, ...] = ()  # where given, the answer begins with one of them
    banned: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # tokens that do not stand at a position
    automaton: TokenAutomaton | None = None

    def __post_init__(self) -> None:
        for what, places in (("pin", self.pins), ("ban", self.banned)):
            if any(position < 0 for position in places):
                raise ValueError(f"a {what}'s position must be 0 or more, got {min(places)}")

    def apply_edit(self, more: ConstraintEdit) -> "Constraints":
        """With what else is fixed. What is pinned anew is banned no longer, and the other way round."""
        pins, bans = ({at: one for at, one in held.items() if at not in more.free} for held in (self.pins, self.banned))
        for at, token in more.pins.items():
            pins[at] = token
            bans[at] = tuple(other for other in bans.get(at, ()) if other != token)
        banned: dict[int, list[int]] = {}
        for at, token in more.bans:
            pins.pop(at, None)
            banned.setdefault(at, []).append(token)
        bans |= {at: tuple(dict.fromkeys((*bans.get(at, ()), *tokens))) for at, tokens in banned.items()}
        return replace(self, pins=pins, banned={at: tokens for at, tokens in bans.items() if tokens})

    def validate(self, vocab_size: int, answer_length: int, stops: Sequence[int]) -> None:
        """Refuses tokens outside the vocabulary, pins that the answer would not hold, and constraints that leave no token."""
        for token in (
            *self.pins.values(),
            *self.forbidden,
            *self.allowed_first,
            *(t for some in self.banned.values() for t in some),
        ):
            if not 0 <= token < vocab_size:
                raise ValueError(f"token {token} is outside the vocabulary of {vocab_size}")
        for what, places in (("pin", self.pins), ("ban", self.banned)):
            if places and max(places) >= answer_length:
                raise ValueError(f"a {what} at {max(places)} is beyond the answer's {answer_length} positions")
        never = {*self.forbidden, *(stops if self.pins else ())}
        for position, tokens in self.banned.items():
            if self.pins.get(position) in tokens:
                raise ValueError(f"the token {self.pins[position]} is both pinned and banned at {position}")
            if len(never) + len(tokens) >= vocab_size and len(never.union(tokens)) >= vocab_size:
                raise ValueError(f"every token is banned at {position}")
        for position, token in self.pins.items():
            if token in stops and position < max(self.pins):
                raise ValueError(f"the stop token {token} pinned at {position} would cut off the pin at {max(self.pins)}")
        if len(never) >= vocab_size:
            raise ValueError("every token is forbidden")
        if self.allowed_first and not set(self.allowed_first) - never:
            raise ValueError("every token that the answer may begin with is forbidden")
        if self.automaton is not None:
            self._check_pattern(vocab_size, answer_length, stops)

    def _check_pattern(self, vocab_size: int, answer_length: int, stops: Sequence[int]) -> None:
        one = self.automaton
        if set(one.stops) != set(stops):
            raise ValueError(f"the pattern was made for the stop tokens {list(one.stops)}, the answer has {list(stops)}")
        if pinned := set(stops).intersection(self.pins.values()):
            raise ValueError(
                f"a pattern says itself where the answer ends: the stop token {min(pinned)} cannot be pinned with it"
            )
        if len(one.classes_V) != vocab_size:
            raise ValueError(f"the pattern was made for a vocabulary of {len(one.classes_V)}, the model has {vocab_size}")
        if self.forbidden or self.allowed_first:
            raise ValueError("a pattern says itself which tokens may stand where: give no forbidden or first tokens with it")
        if one.distance_Q[one.start] > answer_length:
            needed = one.distance_Q[one.start]
            raise ValueError(f"a match of {one.pattern!r} takes {needed} tokens, the answer may have {answer_length}")
        if self.pins and not one.before(one.final_Q, answer_length, self.pins)[one.start]:
            raise ValueError(f"no answer of {answer_length} tokens that has these pins matches {one.pattern!r}")

    def check_canvas(self, page: Sequence[int], begin: int) -> None:
        """Refuses a page that begins at this position of the answer and has what is not pinned there, or is banned."""
        never = set(self.forbidden)
        for at, token in enumerate(page, begin):
            pinned = self.pins.get(at, token)
            if pinned != token or token in self.banned.get(at, ()) or (token in never and at not in self.pins):
                wanted = f"{pinned} is pinned" if pinned != token else "it may not stand"
                raise ValueError(f"a page that is there already has the token {token} at {at}, where {wanted}")

    @property
    def initial_state(self) -> int:
        """Where the pattern begins."""
        return self.automaton.start if self.automaton is not None else 0

    def advance(self, state: int, page: Sequence[int], room: int) -> int:
        """Where a page leads to, of which so many positions belong to the answer."""
        return self.automaton.advance(state, page[: max(0, room)]) if self.automaton is not None else 0

    def canvas_automaton(self, state: int, begin: int, length: int, answer: int) -> CanvasAutomaton | None:
        """The pattern on a canvas of an answer of so many tokens that begins at this position in this state."""
        one = self.automaton
        if one is None:
            return None
        end = min(begin + length, answer)
        pins = {position - end: token for position, token in self.pins.items() if position >= end}
        ends_Q = one.before(one.final_Q, answer - end, pins) if pins else one.distance_Q <= answer - end
        return CanvasAutomaton(one, state, max(0, end - begin), ends_Q)


@dataclass(frozen=True)
class CanvasConstraints:
    """The constraints of all rows on one canvas."""

    pins_BC: Tensor  # token id, or -1 where nothing is pinned
    forbidden_BV: Tensor | None
    unending_BC: Tensor | None  # where a stop token would cut off a later pin; None without pins
    stops: tuple[int, ...]
    automata: tuple[CanvasAutomaton | None, ...] = ()
    never_first_BV: Tensor | None = None  # tokens that the canvas may not begin with
    banned_3N: Tensor | None = None  # rows, positions and tokens that do not go together

    @property
    def pinned_BC(self) -> Tensor:
        """Which positions are pinned."""
        return self.pins_BC >= 0

    def apply_pins(self, canvas_BC: Tensor) -> Tensor:
        """The canvas with its pins asserted."""
        return torch.where(self.pinned_BC, self.pins_BC, canvas_BC)

    def find_violations(self, ids_BC: Tensor) -> Tensor:
        """Where a canvas has what the constraints do not allow: another token than is pinned, a forbidden one, an early end."""
        found_BC = torch.zeros_like(ids_BC, dtype=torch.bool)
        if self.forbidden_BV is not None:
            found_BC = self.forbidden_BV.gather(1, ids_BC)
        if self.banned_3N is not None:
            rows_N, places_N, tokens_N = self.banned_3N
            hit_N = ids_BC[rows_N, places_N] == tokens_N
            found_BC = found_BC.index_put((rows_N[hit_N], places_N[hit_N]), torch.ones_like(hit_N[hit_N]))
        if self.unending_BC is not None:
            stops = torch.tensor(self.stops, dtype=torch.long, device=ids_BC.device)
            found_BC = found_BC | (self.unending_BC & torch.isin(ids_BC, stops))
        return torch.where(self.pinned_BC, ids_BC != self.pins_BC, found_BC)

    def mask_logits(self, logits_BCV: Tensor) -> Tensor:
        """Logits under the constraints. A pinned position is certain: no entropy of its own, nothing else possible."""
        if self.forbidden_BV is not None:
            logits_BCV = logits_BCV.masked_fill(self.forbidden_BV[:, None, :], NEVER)
        if self.banned_3N is not None:
            never = torch.full((), NEVER, dtype=logits_BCV.dtype, device=logits_BCV.device)
            logits_BCV = logits_BCV.index_put(tuple(self.banned_3N), never)
        if self.never_first_BV is not None:
            first_B1V = logits_BCV[:, :1].masked_fill(self.never_first_BV[:, None], NEVER)
            logits_BCV = torch.cat([first_B1V, logits_BCV[:, 1:]], dim=1)
        if self.unending_BC is not None:  # there are pins
            stops = torch.zeros(logits_BCV.shape[-1], dtype=torch.bool, device=logits_BCV.device)
            stops[list(self.stops)] = True
            logits_BCV = logits_BCV.masked_fill(self.unending_BC[..., None] & stops, NEVER)
            certain_BCV = torch.full_like(logits_BCV, NEVER)
            certain_BCV.scatter_(-1, self.pins_BC.clamp(min=0)[..., None], 0.0)
            logits_BCV = torch.where(self.pinned_BC[..., None], certain_BCV, logits_BCV)
        return logits_BCV

    def apply_automata(self, logits_BCV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits as marginals of the texts that match, and these rows' likeliest texts, best_BC; None without patterns.

        The positions' own argmax is not the likeliest text, and in general no match at all.
        """
        if not self.automata:
            return logits_BCV, None
        rows, best = [], []
        for logits_CV, pattern in zip(logits_BCV, self.automata, strict=True):
            row, likeliest = (logits_CV, logits_CV.argmax(dim=-1)) if pattern is None else _held(logits_CV, pattern)
            rows.append(row)
            best.append(likeliest)
        return (torch.stack(rows), torch.stack(best)) if len(rows) > 1 else (rows[0][None], best[0][None])


def forward_backward_viterbi_on_gpu(logits_CV: Tensor, pattern: CanvasAutomaton) -> tuple[Tensor, Tensor]:
    """`CanvasAutomaton.forward_backward_viterbi` on a GPU, where the logits are: what to add to them, weights_CV, and the likeliest text, ids_C."""
    from redraft.kernels.triton import token_automaton  # Triton takes long to import

    tables, ends_Q = token_automaton.upload_automaton(pattern.automaton, logits_CV.device), torch.from_numpy(pattern.ends_Q)
    weights_CK, ids_C, can = token_automaton.forward_backward_viterbi(
        logits_CV, tables, pattern.state, ends_Q.to(logits_CV.device)
    )
    if not can:
        raise pattern.no_match_error()
    return weights_CK.index_select(1, tables.columns_V), ids_C


def _held(logits_CV: Tensor, pattern: CanvasAutomaton) -> tuple[Tensor, Tensor]:
    """One row's logits as marginals of texts that match, and the likeliest of them."""
    room, device = pattern.room, logits_CV.device
    if select_backend(device).uses_triton:
        weights_CV, best_C = forward_backward_viterbi_on_gpu(logits_CV[:room], pattern)
    else:
        weights_CK, ids_C = pattern.forward_backward_viterbi(logits_CV[:room].float().cpu().numpy())
        weights_CV = torch.from_numpy(weights_CK).float().index_select(1, torch.from_numpy(pattern.automaton.classes_V))
        weights_CV, best_C = weights_CV.to(device), torch.from_numpy(ids_C).to(device)
    held_CV = weights_CV.clamp_(min=NEVER).add_(logits_CV[:room])
    if room == len(logits_CV):
        return held_CV, best_C
    return torch.cat([held_CV, logits_CV[room:]]), torch.cat([best_C, logits_CV[room:].argmax(dim=-1)])


def build_canvas_constraints(
    constraints: Sequence[Constraints],
    block: int,
    length: int,
    vocab_size: int,
    stops: Sequence[int],
    device: torch.device | str,
    patterns: Sequence[CanvasAutomaton | None] = (),
) -> CanvasConstraints | None:
    """The rows' constraints on canvas number `block`, or None when there are none to obey."""
    held = any(pattern is not None for pattern in patterns)
    start = block * length
    banned_3N = _bans(constraints, start, length)
    some = held or banned_3N.numel() > 0
    if not some and not any(rule.pins or rule.forbidden or (rule.allowed_first and block == 0) for rule in constraints):
        return None
    pins_BC = torch.full((len(constraints), length), -1)
    last_B = torch.full((len(constraints), 1), -1)
    forbidden_BV, never_first_BV = (torch.zeros(len(constraints), vocab_size, dtype=torch.bool) for _ in range(2))
    for row, rule in enumerate(constraints):
        for position, token in rule.pins.items():
            if start <= position < start + length:
                pins_BC[row, position - start] = token
        last_B[row] = max(rule.pins, default=-1)
        forbidden_BV[row, list(rule.forbidden)] = True
        if rule.allowed_first and block == 0:
            never_first_BV[row] = True
            never_first_BV[row, list(rule.allowed_first)] = False
    pinned = any(rule.pins for rule in constraints)
    unending_BC = torch.arange(start, start + length) < last_B
    return CanvasConstraints(
        pins_BC.to(device),
        forbidden_BV.to(device) if forbidden_BV.any() else None,
        unending_BC.to(device) if pinned else None,
        tuple(stop for stop in stops if stop < vocab_size),
        tuple(patterns) if held else (),
        never_first_BV.to(device) if never_first_BV.any() else None,
        banned_3N.to(device) if banned_3N.numel() else None,
    )


def _bans(constraints: Sequence[Constraints], start: int, length: int) -> Tensor:
    """Rows, positions and tokens of the bans on one canvas."""
    found = [
        (row, position - start, token)
        for row, rule in enumerate(constraints)
        for position, tokens in rule.banned.items()
        for token in tokens
        if start <= position < start + length
    ]
    return torch.tensor(found, dtype=torch.long).view(-1, 3).T
