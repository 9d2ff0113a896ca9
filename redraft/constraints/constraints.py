"""Constraints of a request: pinned tokens, banned tokens, and a regular expression for the whole answer.

The sampler applies them to the logits and the canvas; the model does not know of them. Positions count from the first token
of the answer, across canvases. Constraints become tensors one canvas at a time.
Shapes: B rows, C canvas positions, V vocabulary, Q automaton states, K token classes, N bans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from redraft.constraints.canvas_automaton import CanvasAutomaton
from redraft.constraints.errors import BudgetError, shorten
from redraft.constraints.prefix_grammar import PrefixGrammar
from redraft.constraints.token_automaton import TokenAutomaton
from redraft.kernels.backend import select_backend

# The logit of an impossible token: far below any soft-capped logit, so its probability is exactly 0, and still finite after
# division by a temperature.
NEVER = -1e9
# The sums of a pattern at one denoising step: positions of the canvas times states, pairs and edges of the automaton. One of
# them takes about 50 ns on a CPU, with automata of 14,000 to 157,000 states, pairs and edges.
MAX_CANVAS_SUMS = 25_000_000
MAX_PINNED_SUMS = 6_000_000  # transitions that are walked back over the rest of the answer at the start of each canvas
MIN_CANVAS_SUMS = 2_000_000  # 0.1 s: allowed with every model
MAX_SLOWDOWN = 4  # on a CPU the sums take at most about this many times as long as the model
MULTIPLICATIONS_PER_SUM = 2_500  # of the model in the time of one sum: `tiny` takes 72 ms for 256 positions on two cores


@dataclass(frozen=True, kw_only=True)
class ConstraintEdit:
    """A change of constraints while an answer is generated: new pins, new bans, and positions that become free again."""

    pins: Mapping[int, int] = field(default_factory=dict)
    bans: tuple[tuple[int, int], ...] = ()  # (position, token): the token may not stand at the position
    free: tuple[int, ...] = ()

    @property
    def positions(self) -> set[int]:
        """All positions that the edit names."""
        return {*self.pins, *self.free, *(position for position, _ in self.bans)}

    def restrict(self, begin: int, length: int) -> "ConstraintEdit":
        """The part of the edit that names `length` positions from `begin` on, counted from `begin`."""
        window = range(begin, begin + length)
        return ConstraintEdit(
            pins={position - begin: token for position, token in self.pins.items() if position in window},
            bans=tuple((position - begin, token) for position, token in self.bans if position in window),
            free=tuple(position - begin for position in self.free if position in window),
        )


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What a denoising step costs without a pattern, and how much a pattern may add."""

    canvas_length: int
    multiplications: int | None = None  # of the model for each position; None on a GPU, where MAX_CANVAS_SUMS is enough

    def allows(self, automaton: TokenAutomaton, answer_length: int) -> bool:
        """Whether the sums over a canvas take little enough time."""
        return self._sums(automaton, answer_length) <= self._limit(answer_length)

    def check(self, automaton: TokenAutomaton, answer_length: int) -> None:
        """Refuses an automaton whose sums over a canvas would take too long."""
        if not self.allows(automaton, answer_length):
            raise BudgetError(
                f"the pattern {shorten(automaton.pattern)} has {automaton.operations:,} states and transitions, the canvas "
                f"{self._positions(answer_length):,} positions: {self._sums(automaton, answer_length):,} sums at each step, "
                f"at most {self._limit(answer_length):,} are allowed: shorten the canvas or simplify the pattern"
            )

    def _positions(self, answer_length: int) -> int:
        return min(self.canvas_length, answer_length)

    def _sums(self, automaton: TokenAutomaton, answer_length: int) -> int:
        return self._positions(answer_length) * automaton.operations

    def _limit(self, answer_length: int) -> int:
        if self.multiplications is None:
            return MAX_CANVAS_SUMS
        of_model = int(MAX_SLOWDOWN * self.multiplications / MULTIPLICATIONS_PER_SUM) * min(
            self.canvas_length, answer_length
        )
        return min(MAX_CANVAS_SUMS, max(of_model, MIN_CANVAS_SUMS))


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """The constraints of one row.

    With an `automaton`, the whole answer matches its pattern: the text up to the stop token, or up to the last position.
    A `grammar` says the same of an answer that is written from left to right; no canvas can obey it.
    """

    pins: Mapping[int, int] = field(default_factory=dict)  # answer position -> token id
    forbidden: tuple[int, ...] = ()  # tokens that stand nowhere, except where they are pinned
    allowed_first: tuple[int, ...] = ()  # if given, the answer begins with one of these tokens
    banned: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # answer position -> tokens that may not stand there
    automaton: TokenAutomaton | None = None
    grammar: PrefixGrammar | None = None

    def __post_init__(self) -> None:
        if any(position < 0 for position in self.pins):
            raise ValueError(f"a pin's position must be 0 or more, got {min(self.pins)}")
        if any(position < 0 for position in self.banned):
            raise ValueError(f"a ban's position must be 0 or more, got {min(self.banned)}")

    def apply_edit(self, edit: ConstraintEdit) -> "Constraints":
        """These constraints after an edit. A new pin lifts a ban of its token; a new ban removes a pin at its position."""
        free = set(edit.free)
        pins = {position: token for position, token in self.pins.items() if position not in free}
        banned = {position: tokens for position, tokens in self.banned.items() if position not in free}
        for position, token in edit.pins.items():
            pins[position] = token
            banned[position] = tuple(other for other in banned.get(position, ()) if other != token)
        new_bans: dict[int, list[int]] = {}
        for position, token in edit.bans:
            pins.pop(position, None)
            new_bans.setdefault(position, []).append(token)
        for position, tokens in new_bans.items():
            banned[position] = tuple(dict.fromkeys((*banned.get(position, ()), *tokens)))
        return replace(self, pins=pins, banned={position: tokens for position, tokens in banned.items() if tokens})

    def validate(self, vocab_size: int, answer_length: int, stops: Sequence[int], step: "StepCost | None" = None) -> None:
        """Refuses tokens outside the vocabulary, positions outside the answer, and constraints that leave no token.

        With a `step`, it also refuses a pattern whose sums would slow a denoising step down too much.
        """
        banned_tokens = [token for tokens in self.banned.values() for token in tokens]
        for token in (*self.pins.values(), *self.forbidden, *self.allowed_first, *banned_tokens):
            if not 0 <= token < vocab_size:
                raise ValueError(f"token {token} is outside the vocabulary of {vocab_size}")
        if self.pins and max(self.pins) >= answer_length:
            raise ValueError(f"a pin at {max(self.pins)} is beyond the answer's {answer_length} positions")
        if self.banned and max(self.banned) >= answer_length:
            raise ValueError(f"a ban at {max(self.banned)} is beyond the answer's {answer_length} positions")
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
        if self.pattern is not None:
            self._validate_pattern(self.pattern, vocab_size, stops)
        if self.grammar is not None and self.pins:
            raise ValueError("a schema that no automaton expresses is written from left to right: give no pins with it")
        if self.automaton is not None:
            self._validate_automaton(self.automaton, answer_length)
            if step is not None:
                step.check(self.automaton, answer_length)

    @property
    def pattern(self) -> TokenAutomaton | PrefixGrammar | None:
        """The automaton or the grammar that the whole answer matches."""
        return self.automaton if self.automaton is not None else self.grammar

    def is_match(self, ids: Sequence[int]) -> bool:
        """Whether these tokens are a whole match of the pattern. False without one."""
        return self.pattern is not None and self.pattern.accepts(ids)

    def _validate_pattern(self, pattern: TokenAutomaton | PrefixGrammar, vocab_size: int, stops: Sequence[int]) -> None:
        if set(pattern.stops) != set(stops):
            raise ValueError(f"the pattern was made for the stop tokens {list(pattern.stops)}, the answer has {list(stops)}")
        if pinned_stops := set(stops).intersection(self.pins.values()):
            raise ValueError(
                f"a pattern decides where the answer ends: the stop token {min(pinned_stops)} cannot be pinned with it"
            )
        if pattern.vocab_size != vocab_size:
            raise ValueError(f"the pattern was made for a vocabulary of {pattern.vocab_size}, the model has {vocab_size}")
        if self.forbidden or self.allowed_first:
            raise ValueError("a pattern decides which tokens may stand where: give no forbidden or first tokens with it")

    def _validate_automaton(self, automaton: TokenAutomaton, answer_length: int) -> None:
        pattern = automaton.pattern
        shortest = automaton.distance_Q[automaton.start]
        if shortest > answer_length:
            raise ValueError(f"a match of {shorten(pattern)} takes {shortest} tokens, the answer may have {answer_length}")
        if self.pins and answer_length * len(automaton.from_R) > MAX_PINNED_SUMS:
            raise ValueError(
                f"pins under a pattern of {len(automaton.from_R):,} transitions allow an answer of at most "
                f"{MAX_PINNED_SUMS // len(automaton.from_R):,} tokens, got {answer_length:,}: shorten max_tokens"
            )
        if self.pins and not automaton.step_back(automaton.final_Q, answer_length, self.pins)[automaton.start]:
            raise ValueError(f"no answer of {answer_length} tokens that has these pins matches {shorten(pattern)}")

    def check_canvas(self, ids: Sequence[int], begin: int) -> None:
        """Refuses a given canvas that starts at answer position `begin` and violates a pin or a ban."""
        forbidden = set(self.forbidden)
        for position, token in enumerate(ids, begin):
            pinned = self.pins.get(position, token)
            if pinned != token:
                raise ValueError(f"a given canvas has the token {token} at {position}, where {pinned} is pinned")
            if token in self.banned.get(position, ()) or (token in forbidden and position not in self.pins):
                raise ValueError(f"a given canvas has the token {token} at {position}, where it may not stand")

    @property
    def initial_state(self) -> int:
        """The automaton's state before the answer; 0 without an automaton."""
        return self.automaton.start if self.automaton is not None else 0

    def advance(self, state: int, ids: Sequence[int], room: int) -> int:
        """The automaton's state after the first `room` tokens of a canvas; 0 without an automaton."""
        return self.automaton.advance(state, ids[: max(0, room)]) if self.automaton is not None else 0

    def canvas_automaton(self, state: int, begin: int, length: int, answer_length: int) -> CanvasAutomaton | None:
        """The automaton on the canvas of `length` positions that starts at answer position `begin` in this state.

        The canvas may only end in states from which the rest of the answer, with its pins, can still match.
        """
        automaton = self.automaton
        if automaton is None:
            return None
        end = min(begin + length, answer_length)
        later_pins = {position - end: token for position, token in self.pins.items() if position >= end}
        if later_pins:
            ends_Q = automaton.step_back(automaton.final_Q, answer_length - end, later_pins)
        else:
            ends_Q = automaton.distance_Q <= answer_length - end
        return CanvasAutomaton(automaton, state, max(0, end - begin), ends_Q)


@dataclass(frozen=True)
class CanvasConstraints:
    """The constraints of all rows on one canvas, as tensors."""

    pins_BC: Tensor  # token id, or -1 where no token is pinned
    forbidden_BV: Tensor | None
    no_stop_BC: Tensor | None  # where a stop token would cut off a later pin; None without pins
    stops: tuple[int, ...]
    automata: tuple[CanvasAutomaton | None, ...] = ()  # one per row; empty if no row has one
    forbidden_first_BV: Tensor | None = None  # tokens that may not stand at the canvas's first position
    bans_3N: Tensor | None = None  # row, position and token of every ban

    @property
    def pinned_BC(self) -> Tensor:
        """Which positions are pinned."""
        return self.pins_BC >= 0

    def apply_pins(self, canvas_BC: Tensor) -> Tensor:
        """The canvas with the pinned tokens at their positions."""
        return torch.where(self.pinned_BC, self.pins_BC, canvas_BC)

    def find_violations(self, ids_BC: Tensor) -> Tensor:
        """Where a canvas violates a pin or a ban, has a forbidden token, or ends before a pin. Automata are not checked."""
        violated_BC = torch.zeros_like(ids_BC, dtype=torch.bool)
        if self.forbidden_BV is not None:
            violated_BC = self.forbidden_BV.gather(1, ids_BC)
        if self.bans_3N is not None:
            rows_N, positions_N, tokens_N = self.bans_3N
            hit_N = ids_BC[rows_N, positions_N] == tokens_N
            violated_BC = violated_BC.index_put((rows_N[hit_N], positions_N[hit_N]), torch.ones_like(hit_N[hit_N]))
        if self.no_stop_BC is not None:
            stops = torch.tensor(self.stops, dtype=torch.long, device=ids_BC.device)
            violated_BC = violated_BC | (self.no_stop_BC & torch.isin(ids_BC, stops))
        return torch.where(self.pinned_BC, ids_BC != self.pins_BC, violated_BC)

    def mask_logits(self, logits_BCV: Tensor) -> Tensor:
        """Logits with impossible tokens masked. At a pinned position the pinned token is certain, so its entropy is 0."""
        if self.forbidden_BV is not None:
            logits_BCV = logits_BCV.masked_fill(self.forbidden_BV[:, None, :], NEVER)
        if self.bans_3N is not None:
            never = torch.full((), NEVER, dtype=logits_BCV.dtype, device=logits_BCV.device)
            logits_BCV = logits_BCV.index_put(tuple(self.bans_3N), never)
        if self.forbidden_first_BV is not None:
            first_B1V = logits_BCV[:, :1].masked_fill(self.forbidden_first_BV[:, None], NEVER)
            logits_BCV = torch.cat([first_B1V, logits_BCV[:, 1:]], dim=1)
        if self.no_stop_BC is not None:  # there are pins
            is_stop_V = torch.zeros(logits_BCV.shape[-1], dtype=torch.bool, device=logits_BCV.device)
            is_stop_V[list(self.stops)] = True
            logits_BCV = logits_BCV.masked_fill(self.no_stop_BC[..., None] & is_stop_V, NEVER)
            certain_BCV = torch.full_like(logits_BCV, NEVER)
            certain_BCV.scatter_(-1, self.pins_BC.clamp(min=0)[..., None], 0.0)
            logits_BCV = torch.where(self.pinned_BC[..., None], certain_BCV, logits_BCV)
        return logits_BCV

    def apply_automata(self, logits_BCV: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits as marginals of the matching texts, and each row's most probable matching text, best_BC.

        best_BC is None if no row has an automaton. It is not the argmax of the marginals: the argmax of each position on its
        own does not match in general.
        """
        if not self.automata:
            return logits_BCV, None
        rows = []
        best_rows = []
        for logits_CV, automaton in zip(logits_BCV, self.automata, strict=True):
            if automaton is None:
                rows.append(logits_CV)
                best_rows.append(logits_CV.argmax(dim=-1))
            else:
                marginals_CV, best_C = _apply_automaton(logits_CV, automaton)
                rows.append(marginals_CV)
                best_rows.append(best_C)
        if len(rows) == 1:  # a view instead of a copy
            return rows[0][None], best_rows[0][None]
        return torch.stack(rows), torch.stack(best_rows)


def forward_backward_viterbi_on_gpu(logits_CV: Tensor, automaton: CanvasAutomaton) -> tuple[Tensor, Tensor]:
    """`CanvasAutomaton.forward_backward_viterbi` on the GPU that holds the logits: log_weights_CV per token, and ids_C."""
    from redraft.kernels.triton import token_automaton  # Triton takes long to import

    device = logits_CV.device
    tables = token_automaton.upload_automaton(automaton.automaton, device)
    ends_Q = torch.from_numpy(automaton.ends_Q).to(device)
    log_weights_CK, ids_C, has_match = token_automaton.forward_backward_viterbi(logits_CV, tables, automaton.state, ends_Q)
    if not has_match:
        raise automaton.no_match_error()
    return log_weights_CK.index_select(1, tables.columns_V), ids_C


def _apply_automaton(logits_CV: Tensor, automaton: CanvasAutomaton) -> tuple[Tensor, Tensor]:
    """One row's logits as marginals of the matching texts, and the most probable matching text."""
    room = automaton.room
    device = logits_CV.device
    if select_backend(device).uses_triton:
        log_weights_CV, best_C = forward_backward_viterbi_on_gpu(logits_CV[:room], automaton)
    else:
        log_weights_CK, ids_C = automaton.forward_backward_viterbi(logits_CV[:room].float().cpu().numpy())
        classes_V = torch.from_numpy(automaton.automaton.classes_V)
        log_weights_CV = torch.from_numpy(log_weights_CK).float().index_select(1, classes_V).to(device)
        best_C = torch.from_numpy(ids_C).to(device)
    marginals_CV = log_weights_CV.clamp_(min=NEVER).add_(logits_CV[:room])
    if room == len(logits_CV):
        return marginals_CV, best_C
    rest_CV = logits_CV[room:]
    return torch.cat([marginals_CV, rest_CV]), torch.cat([best_C, rest_CV.argmax(dim=-1)])


def build_canvas_constraints(
    constraints: Sequence[Constraints],
    block: int,
    length: int,
    vocab_size: int,
    stops: Sequence[int],
    device: torch.device | str,
    automata: Sequence[CanvasAutomaton | None] = (),
) -> CanvasConstraints | None:
    """The rows' constraints on canvas number `block`, or None if no row has any there."""
    start = block * length
    bans_3N = _collect_bans(constraints, start, length)
    has_automata = any(automaton is not None for automaton in automata)
    has_pins = any(row.pins for row in constraints)
    has_forbidden = any(row.forbidden or (row.allowed_first and block == 0) for row in constraints)
    if not (has_automata or has_pins or has_forbidden or bans_3N.numel()):
        return None
    pins_BC = torch.full((len(constraints), length), -1)
    last_pin_B1 = torch.full((len(constraints), 1), -1)
    forbidden_BV = torch.zeros(len(constraints), vocab_size, dtype=torch.bool)
    forbidden_first_BV = torch.zeros(len(constraints), vocab_size, dtype=torch.bool)
    for number, row in enumerate(constraints):
        for position, token in row.pins.items():
            if start <= position < start + length:
                pins_BC[number, position - start] = token
        last_pin_B1[number] = max(row.pins, default=-1)
        forbidden_BV[number, list(row.forbidden)] = True
        if row.allowed_first and block == 0:
            forbidden_first_BV[number] = True
            forbidden_first_BV[number, list(row.allowed_first)] = False
    no_stop_BC = torch.arange(start, start + length) < last_pin_B1
    return CanvasConstraints(
        pins_BC=pins_BC.to(device),
        forbidden_BV=forbidden_BV.to(device) if forbidden_BV.any() else None,
        no_stop_BC=no_stop_BC.to(device) if has_pins else None,
        stops=tuple(stop for stop in stops if stop < vocab_size),
        automata=tuple(automata) if has_automata else (),
        forbidden_first_BV=forbidden_first_BV.to(device) if forbidden_first_BV.any() else None,
        bans_3N=bans_3N.to(device) if bans_3N.numel() else None,
    )


def _collect_bans(constraints: Sequence[Constraints], start: int, length: int) -> Tensor:
    """Rows, positions and tokens of the bans on one canvas, bans_3N."""
    bans = [
        (number, position - start, token)
        for number, row in enumerate(constraints)
        for position, tokens in row.banned.items()
        for token in tokens
        if start <= position < start + length
    ]
    return torch.tensor(bans, dtype=torch.long).view(-1, 3).T
