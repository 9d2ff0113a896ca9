"""Token automata: regular expressions over the tokens of a vocabulary. Compiled without PyTorch.

    regex -> [DFA over bytes, regex_dfa.py] -> automaton over tokens

Tokens with the same transitions in every state form one class; sums run over classes instead of tokens. Behind a match, stop
tokens fill the canvas; at the last position of the answer a match may also end without one.
Shapes: V vocabulary, N tokens with bytes, Q states, K token classes, R pairs of states (from, to) with a transition, E edges
(a pair and a class whose tokens make the transition).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from redraft.constraints import regex_dfa
from redraft.constraints.budget import Budget
from redraft.constraints.compiled_cache import CompiledCache
from redraft.constraints.errors import PatternError, shorten
from redraft.constraints.regex_dfa import DFA

MAX_EDGES = 100_000
MAX_WORK = 400_000_000  # DFA states times tokens: a few seconds
CHUNK = 2**24  # DFA states times tokens that are walked at once
MAX_CACHED_BYTES = 128 * 2**20
UNREACHABLE = 1 << 30
ARRAYS = ("classes_V", "from_R", "to_R", "pair_E", "class_E", "final_Q")  # fields of a TokenAutomaton


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """An automaton whose transitions are token classes. Its last state is the one behind a stop token."""

    pattern: str
    stops: tuple[int, ...]
    start: int
    classes_V: np.ndarray  # the class of every token; class 0: tokens that fit nowhere; the last class: stop tokens
    from_R: np.ndarray
    to_R: np.ndarray
    pair_E: np.ndarray  # the pair of every edge, ascending
    class_E: np.ndarray  # the class of every edge
    final_Q: np.ndarray  # whether a match may end in the state

    @classmethod
    def from_arrays(cls, pattern: str, stops: Sequence[int], arrays: Mapping[str, np.ndarray]) -> Self:
        """The automaton that `to_arrays` described."""
        fields = {name: arrays[name] for name in ARRAYS}
        return cls(pattern=pattern, stops=tuple(stops), start=int(arrays["start"]), **fields)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """All fields but the pattern and the stop tokens as arrays, for another process."""
        return {"start": np.array(self.start), **{name: getattr(self, name) for name in ARRAYS}}

    @property
    def states(self) -> int:
        """The number of states."""
        return len(self.final_Q)

    @property
    def bytes(self) -> int:
        """The size of the arrays, with those that are derived from them on first use."""
        return 3 * sum(getattr(self, name).nbytes for name in ARRAYS)

    @cached_property
    def distance_Q(self) -> np.ndarray:
        """The fewest tokens from each state to the end of a match, stop token not counted."""
        distance_Q = np.where(self.final_Q, 0, UNREACHABLE)
        while True:
            relaxed_Q = distance_Q.copy()
            np.minimum.at(relaxed_Q, self.from_R, distance_Q[self.to_R] + 1)
            relaxed_Q = np.minimum(relaxed_Q, UNREACHABLE)
            if (relaxed_Q == distance_Q).all():
                return distance_Q
            distance_Q = relaxed_Q

    @cached_property
    def tokens_by_class(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens sorted by class, order_V, and the start of each class, bounds_K. Only class 0 can be empty."""
        order_V = np.argsort(self.classes_V, kind="stable")
        return order_V, np.searchsorted(self.classes_V[order_V], np.arange(self.classes_V.max() + 1))

    @cached_property
    def sizes_K(self) -> np.ndarray:
        """The number of tokens in each class."""
        return np.diff(np.append(self.tokens_by_class[1], len(self.classes_V)))

    @cached_property
    def edge_starts_R(self) -> np.ndarray:
        """The first edge of each pair."""
        return np.searchsorted(self.pair_E, np.arange(len(self.from_R)))

    @cached_property
    def pairs_by_target(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pairs sorted by target state, order_R; the states that are targets; and where each target's pairs start."""
        order_R = np.argsort(self.to_R, kind="stable")
        return order_R, *np.unique(self.to_R[order_R], return_index=True)

    @cached_property
    def pairs_by_class(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pairs of all edges sorted by class; the classes with edges; and where each class's edges start."""
        order_E = np.argsort(self.class_E, kind="stable")
        return self.pair_E[order_E], *np.unique(self.class_E[order_E], return_index=True)

    def step_back(self, ends_Q: np.ndarray, count: int, pins: Mapping[int, int]) -> np.ndarray:
        """The states from which `count` tokens can lead to one of `ends_Q`, with pinned tokens at some of the positions."""
        for position in range(count - 1, -1, -1):
            usable_R = ends_Q[self.to_R]
            if position in pins:
                pinned_pairs = self.pair_E[self.class_E == self.classes_V[pins[position]]]
                usable_R = usable_R & np.isin(np.arange(len(usable_R)), pinned_pairs)
            ends_Q = np.zeros_like(ends_Q)
            ends_Q[self.from_R[usable_R]] = True
        return ends_Q

    def advance(self, state: int, ids: Sequence[int]) -> int:
        """The state after these tokens. Tokens behind a stop token do not count."""
        for token in ids:
            if state == self.states - 1:
                break
            pairs = self.pair_E[self.class_E == self.classes_V[token]]
            targets = self.to_R[pairs][self.from_R[pairs] == state]
            if not len(targets):
                raise PatternError(f"token {token} does not fit the pattern {shorten(self.pattern)}")
            state = int(targets[0])
        return state


class AutomatonCompiler:
    """Compiles regular expressions to token automata over one vocabulary.

    `token_bytes` holds the bytes of every token, None for special tokens, which stand in no text.
    """

    def __init__(self, token_bytes: Sequence[bytes | None], stops: Sequence[int]) -> None:
        self.compiled: CompiledCache[TokenAutomaton] = CompiledCache(64, MAX_CACHED_BYTES, lambda kept: kept.bytes)
        self.size = len(token_bytes)
        self.stops = tuple(stops)
        stop_set = set(stops)
        usable = [(token, text) for token, text in enumerate(token_bytes) if text and token not in stop_set]
        self.tokens_N = np.array([token for token, _ in usable], dtype=np.int64)
        self.lengths_N = np.array([len(text) for _, text in usable], dtype=np.int64)
        self.longest = int(self.lengths_N.max(initial=0))
        self.bytes_NL = np.zeros((len(usable), self.longest), dtype=np.uint8)
        for row, (_, text) in enumerate(usable):
            self.bytes_NL[row, : len(text)] = np.frombuffer(text, dtype=np.uint8)

    def compile(self, pattern: str, budget: Budget | None = None) -> TokenAutomaton:
        """The token automaton of a regular expression. It spends from `budget`; a pattern in the cache costs nothing."""
        if not isinstance(pattern, str):
            raise PatternError(f"a pattern is a text, got {shorten(pattern)}")
        automaton = self.compiled.get(pattern)
        if automaton is None:
            automaton = self._compile(pattern, budget if budget is not None else Budget())
            self.compiled.put(pattern, automaton)
        return automaton

    def _compile(self, pattern: str, budget: Budget) -> TokenAutomaton:
        dfa = regex_dfa.compile_dfa(pattern, budget)
        states = len(dfa.accepting_Q)
        work = states * len(self.tokens_N)
        if work > MAX_WORK:
            raise PatternError(
                f"the pattern has {states:,} states and the vocabulary {len(self.tokens_N):,} tokens: "
                f"{work:,} transitions to compute, at most {MAX_WORK:,} are supported: make it simpler"
            )
        classes_V, edges_E3 = self._classify_tokens(dfa)
        if len(edges_E3) > MAX_EDGES:
            raise PatternError(
                f"the pattern has {len(edges_E3):,} transitions, at most {MAX_EDGES:,} are supported: make it simpler"
            )
        pairs_R2, pair_E = np.unique(edges_E3[:, :2], axis=0, return_inverse=True)
        pair_E = pair_E.ravel()
        order_E = np.argsort(pair_E, kind="stable")
        automaton = TokenAutomaton(
            pattern=pattern,
            stops=self.stops,
            start=dfa.start,
            classes_V=classes_V,
            from_R=pairs_R2[:, 0],
            to_R=pairs_R2[:, 1],
            pair_E=pair_E[order_E],
            class_E=edges_E3[order_E, 2],
            final_Q=np.append(dfa.accepting_Q, True),
        )
        if automaton.distance_Q[dfa.start] >= UNREACHABLE:
            raise PatternError(f"no text of this vocabulary matches {shorten(pattern)}")
        return automaton

    def _walk_tokens(self, transitions_Q256: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The state after each token (a row of `bytes_NL`) from every state, [Q, rows]; 0 where the token does not fit."""
        state_QN = np.repeat(np.arange(len(transitions_Q256), dtype=np.int32)[:, None], len(rows), axis=1)
        for position in range(int(self.lengths_N[rows].max(initial=0))):
            longer = np.flatnonzero(self.lengths_N[rows] > position)
            state_QN[:, longer] = transitions_Q256[state_QN[:, longer], self.bytes_NL[rows[longer], position]]
        return state_QN

    def _classify_tokens(self, dfa: DFA) -> tuple[np.ndarray, np.ndarray]:
        """The class of every token, classes_V, and edges_E3 with columns from, to, class.

        Tokens are in the same class if a 64-bit hash of all their transitions is the same; hash 0 means no transition.
        """
        states = len(dfa.accepting_Q)
        factors_Q = np.random.default_rng(0).integers(1, 2**63, size=(states,), dtype=np.uint64) | 1
        hashes = [np.zeros(0, dtype=np.uint64)]
        with np.errstate(over="ignore"):
            for rows in np.array_split(np.arange(len(self.tokens_N)), 1 + states * len(self.tokens_N) // CHUNK):
                target_QN = self._walk_tokens(dfa.transitions_Q256, rows).astype(np.uint64)
                hashes.append((_mix_bits(target_QN * factors_Q[:, None]) * (target_QN > 0)).sum(axis=0, dtype=np.uint64))
        hash_N = np.concatenate(hashes)
        _, first_row, class_N = np.unique(hash_N, return_index=True, return_inverse=True)
        class_N = np.where(hash_N == 0, 0, class_N.ravel() + 1)
        class_names, class_N = np.unique(np.append(class_N, 0), return_inverse=True)  # renumbers: class 0 always exists
        first_row = first_row[class_names[1:] - 1]
        stop_class = len(class_names)
        classes_V = np.zeros(self.size, dtype=np.int64)
        classes_V[self.tokens_N] = class_N.ravel()[:-1]
        classes_V[list(self.stops)] = stop_class
        target_QK = self._walk_tokens(dfa.transitions_Q256, first_row)
        source, column = np.nonzero(target_QK)
        text_edges = np.stack([source, target_QK[source, column], column + 1], axis=1)
        # A stop token leads from the end of a match to the state behind it, and from there to itself.
        stop_sources = np.append(np.flatnonzero(dfa.accepting_Q), states)
        stop_edges = np.stack(
            [stop_sources, np.full(len(stop_sources), states), np.full(len(stop_sources), stop_class)], axis=1
        )
        return classes_V, np.concatenate([text_edges, stop_edges])


def _mix_bits(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64, shortened."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(27))
