"""Constraints on the next token of an answer, for the causal half: which tokens may follow the tokens before.

`constraints.py` constrains whole canvases. Here an answer grows from left to right, so a token is allowed if the rest of the
answer can still obey: the pattern matches, and no pin is cut off.
Shapes: S rows (one per verified position), V vocabulary, Q automaton states.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from redraft.constraints.constraints import NEVER, Constraints


class NextToken:
    """The constraints of one answer, position by position. The caller holds the state of the pattern."""

    def __init__(self, constraints: Constraints, answer_length: int, stops: Sequence[int], vocab_size: int) -> None:
        self.constraints = constraints
        self.answer_length = answer_length
        self.stops = [stop for stop in stops if stop < vocab_size]
        self.vocab_size = vocab_size
        self.last_pin = max(constraints.pins, default=-1)
        self._cursor = constraints.grammar.new_cursor() if constraints.grammar is not None else None
        self._live: list[np.ndarray] | None = None  # by answer position: the states from which the rest can match

    @property
    def is_empty(self) -> bool:
        """Whether every token is always allowed."""
        c = self.constraints
        return not (c.pins or c.forbidden or c.allowed_first or c.banned or c.pattern is not None)

    def advance(self, state: int, token: int) -> int | None:
        """The pattern's state after a token; None if the token does not fit. 0 without a pattern."""
        if self._cursor is not None:
            return self._cursor.advance(state, token)
        automaton = self.constraints.automaton
        if automaton is None:
            return 0
        if state == automaton.states - 1:
            return state
        pairs = automaton.pairs_of_token(token)
        targets = automaton.to_R[pairs[automaton.from_R[pairs] == state]]
        return int(targets[0]) if len(targets) else None

    def mask_logits(self, logits_SV: Tensor, position: int, state: int, drafts: Sequence[int]) -> Tensor:
        """Masks the impossible tokens of consecutive positions, the first of which is `position` in this state.

        Row i assumes that the first i drafts were accepted. A row behind a draft that does not fit is left as it is: the
        draft will be rejected.
        """
        if self.is_empty:
            return logits_SV
        masked = []
        for row, logits_V in enumerate(logits_SV):
            allowed_V = self.allowed(position + row, state).to(logits_SV.device)
            masked.append(logits_V.masked_fill(~allowed_V, NEVER))
            if row == len(drafts):
                break
            next_state = self.advance(state, drafts[row])
            if next_state is None or position + row + 1 >= self.answer_length:
                break
            state = next_state
        return torch.cat([torch.stack(masked), logits_SV[len(masked) :]])

    def allowed(self, position: int, state: int) -> Tensor:
        """The tokens that may stand at an answer position, bool_V."""
        c = self.constraints
        if position in c.pins:
            pinned_V = torch.zeros(self.vocab_size, dtype=torch.bool)
            pinned_V[c.pins[position]] = True
            return pinned_V
        allowed_V = torch.ones(self.vocab_size, dtype=torch.bool)
        if c.automaton is not None:
            allowed_V = torch.from_numpy(self._automaton_allows(position, state))
        elif self._cursor is not None:
            allowed_V = torch.from_numpy(self._cursor.allowed(state))
        if c.allowed_first and position == 0:
            first_V = torch.zeros_like(allowed_V)
            first_V[list(c.allowed_first)] = True
            allowed_V &= first_V
        allowed_V[list(c.forbidden)] = False
        allowed_V[list(c.banned.get(position, ()))] = False
        if position < self.last_pin:
            allowed_V[self.stops] = False
        return allowed_V

    def _automaton_allows(self, position: int, state: int) -> np.ndarray:
        """The tokens after which the pattern can still be matched within the answer, bool_V."""
        automaton = self.constraints.automaton
        assert automaton is not None
        first, last = automaton.pairs_of_state[state : state + 2].tolist()
        targets = automaton.to_R[first:last]
        if self.constraints.pins:
            usable = self._live_states()[position + 1][targets]
        else:
            usable = automaton.distance_Q[targets] <= self.answer_length - position - 1
        begin, end = np.searchsorted(automaton.pair_E, (first, last))
        allowed_K = np.zeros(len(automaton.sizes_K), dtype=bool)
        allowed_K[automaton.class_E[begin:end][usable[automaton.pair_E[begin:end] - first]]] = True
        return allowed_K[automaton.classes_V]

    def _live_states(self) -> list[np.ndarray]:
        """For every answer position, the states from which the rest of the answer, with its pins, can still match."""
        if self._live is None:
            automaton = self.constraints.automaton
            assert automaton is not None
            live = [automaton.final_Q]
            for position in range(self.answer_length - 1, -1, -1):
                pins = {0: self.constraints.pins[position]} if position in self.constraints.pins else {}
                live.append(automaton.step_back(live[-1], 1, pins))
            self._live = live[::-1]
        return self._live
