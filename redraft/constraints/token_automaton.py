"""Token automata: regular expressions over the tokens of a vocabulary. Compiled without PyTorch.

    regex -> [DFA over bytes, regex_dfa.py] -> automaton over tokens

Tokens with the same transitions in every state form one class; sums run over classes instead of tokens. Behind a match, stop
tokens fill the canvas; at the last position of the answer a match may also end without one.
Shapes: V vocabulary, N tokens with bytes, Q states, K token classes, R pairs of states (from, to) with a transition, E edges
(a pair and a class whose tokens make the transition).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from redraft.constraints import regex_dfa
from redraft.constraints.budget import Budget
from redraft.constraints.compiled_cache import CompiledCache
from redraft.constraints.dfa import DFA
from redraft.constraints.errors import BudgetError, PatternError, shorten
from redraft.constraints.graph import UNREACHABLE, distances_to
from redraft.constraints.prefix_grammar import GrammarVocabulary
from redraft.constraints.token_trie import TokenTrie, build_trie

MAX_EDGES = 100_000
VOCABULARY_WORK = 1  # unit of the budget for each token: the tokens are sorted by class
MAX_CACHED_BYTES = 128 * 2**20
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
    def vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.classes_V)

    @property
    def states(self) -> int:
        """The number of states."""
        return len(self.final_Q)

    @property
    def operations(self) -> int:
        """What one position of a canvas costs: its edges, pairs and states, which the sums visit."""
        return len(self.pair_E) + len(self.from_R) + self.states

    @property
    def bytes(self) -> int:
        """The size of the arrays, with those that are derived from them on first use."""
        return 3 * sum(getattr(self, name).nbytes for name in ARRAYS)

    @cached_property
    def distance_Q(self) -> np.ndarray:
        """The fewest tokens from each state to the end of a match, stop token not counted."""
        return distances_to(self.final_Q, self.from_R, self.to_R)

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
    def pairs_of_state(self) -> np.ndarray:
        """Where the pairs of each state begin, with the end of the last ones: pairs are sorted by their first state."""
        return np.searchsorted(self.from_R, np.arange(self.states + 1))

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

    @cached_property
    def edges_by_class(self) -> tuple[np.ndarray, np.ndarray]:
        """The pairs of all edges sorted by class, and the start of each class, with the end of the last one."""
        order_E = np.argsort(self.class_E, kind="stable")
        return self.pair_E[order_E], np.searchsorted(self.class_E[order_E], np.arange(len(self.sizes_K) + 1))

    def pairs_of_token(self, token: int) -> np.ndarray:
        """The pairs of states between which a token leads."""
        pairs_E, begins_K = self.edges_by_class
        token_class = self.classes_V[token]
        return pairs_E[begins_K[token_class] : begins_K[token_class + 1]]

    def longest_match(self, limit: int) -> int | None:
        """The most tokens that a match can have, stop token not counted; None if it can have more than `limit`."""
        is_text_R = self.to_R != self.states - 1
        from_R = self.from_R[is_text_R]
        to_R = self.to_R[is_text_R]
        reached_Q = np.arange(self.states) == self.start
        for length in range(limit + 1):
            next_Q = np.zeros_like(reached_Q)
            next_Q[to_R[reached_Q[from_R]]] = True
            if not next_Q.any():
                return length
            if (next_Q == reached_Q).all():  # a loop: every number of tokens leads here
                return None
            reached_Q = next_Q
        return None

    def step_back(self, ends_Q: np.ndarray, count: int, pins: Mapping[int, int]) -> np.ndarray:
        """The states from which `count` tokens can lead to one of `ends_Q`, with pinned tokens at some of the positions."""
        pinned = sorted(position for position in pins if position < count)
        position = count
        while position > 0:
            position -= 1
            is_pinned = bool(pinned) and pinned[-1] == position
            from_R = self.from_R
            to_R = self.to_R
            if is_pinned:
                pairs = self.pairs_of_token(pins[pinned.pop()])
                from_R = from_R[pairs]
                to_R = to_R[pairs]
            before_Q = np.zeros_like(ends_Q)
            before_Q[from_R[ends_Q[to_R]]] = True
            if not is_pinned and (before_Q == ends_Q).all():  # nothing changes up to the next pin
                position = pinned[-1] + 1 if pinned else 0
            ends_Q = before_Q
        return ends_Q

    def advance(self, state: int, ids: Sequence[int]) -> int:
        """The state after these tokens. Tokens behind a stop token do not count."""
        for token in ids:
            if state == self.states - 1:
                break
            pairs = self.pairs_of_token(token)
            targets = self.to_R[pairs[self.from_R[pairs] == state]]
            if not len(targets):
                raise PatternError(f"token {token} does not fit the pattern {shorten(self.pattern)}")
            state = int(targets[0])
        return state

    def accepts(self, ids: Sequence[int]) -> bool:
        """Whether these tokens are a whole match, with or without a stop token behind it."""
        try:
            return bool(self.final_Q[self.advance(self.start, ids)])
        except PatternError:
            return False


class AutomatonCompiler:
    """Compiles regular expressions to token automata over one vocabulary.

    `token_bytes` holds the bytes of every token, None for special tokens, which stand in no text.
    """

    def __init__(self, token_bytes: Sequence[bytes | None], stops: Sequence[int]) -> None:
        self.compiled: CompiledCache[Any] = CompiledCache(64, MAX_CACHED_BYTES, lambda kept: kept.bytes)  # by pattern
        self.grammar_vocabulary = GrammarVocabulary(token_bytes, stops)
        self.size = len(token_bytes)
        self.stops = tuple(stops)
        stop_set = set(stops)
        usable = {token: text for token, text in enumerate(token_bytes) if text and token not in stop_set}
        self.tokens_N = np.array(list(usable), dtype=np.int64)
        self.trie, self.nodes_N = build_trie(list(usable.values()))

    def compile(self, pattern: str, budget: Budget | None = None) -> TokenAutomaton:
        """The token automaton of a regular expression. It spends from `budget`; a pattern in the cache costs nothing."""
        if not isinstance(pattern, str):
            raise PatternError(f"a pattern is a text, got {shorten(pattern)}")
        automaton = self.compiled.get(pattern)
        if automaton is None:
            budget = budget if budget is not None else Budget()
            automaton = self.compile_tokens(pattern, regex_dfa.compile_dfa(pattern, budget), budget)
            self.compiled.put(pattern, automaton)
        return automaton

    def compile_tokens(self, pattern: str, dfa: DFA, budget: Budget) -> TokenAutomaton:
        """The token automaton of a DFA, which error messages call `pattern`."""
        states = len(dfa.accepting_Q)
        budget.spend(self.size * VOCABULARY_WORK, "the vocabulary")
        classes_V, edges_E3 = self._classify_tokens(dfa, budget)
        pair_keys, pair_E = np.unique(edges_E3[:, 0] * (states + 1) + edges_E3[:, 1], return_inverse=True)
        pair_E = pair_E.ravel()
        order_E = np.argsort(pair_E, kind="stable")
        from_R, to_R = np.divmod(pair_keys, states + 1)
        automaton = TokenAutomaton(
            pattern=pattern,
            stops=self.stops,
            start=dfa.start,
            classes_V=classes_V,
            from_R=from_R,
            to_R=to_R,
            pair_E=pair_E[order_E],
            class_E=edges_E3[order_E, 2],
            final_Q=np.append(dfa.accepting_Q, True),
        )
        if automaton.distance_Q[dfa.start] >= UNREACHABLE:
            raise PatternError(f"no text of this vocabulary matches {shorten(pattern)}")
        return automaton

    def _classify_tokens(self, dfa: DFA, budget: Budget) -> tuple[np.ndarray, np.ndarray]:
        """The class of every token, classes_V, and edges_E3 with columns from, to, class.

        Tokens are in the same class if a 64-bit hash of all their transitions is the same; hash 0 means no transition.
        """
        states = len(dfa.accepting_Q)
        trie, number_M = self.trie.merge_bytes(dfa.transitions_Q256, budget)
        nodes_N = number_M[self.nodes_N]  # -1 for a token that fits nowhere
        hash_M = _hash_transitions(trie, dfa, budget)
        hash_N = np.where(nodes_N >= 0, hash_M[nodes_N], np.uint64(0))
        _, first_row, class_N = np.unique(hash_N, return_index=True, return_inverse=True)
        class_N = np.where(hash_N == 0, 0, class_N.ravel() + 1)
        class_names, class_N = np.unique(np.append(class_N, 0), return_inverse=True)  # renumbers: class 0 always exists
        first_row = first_row[class_names[1:] - 1]
        stop_class = len(class_names)
        classes_V = np.zeros(self.size, dtype=np.int64)
        classes_V[self.tokens_N] = class_N.ravel()[:-1]
        classes_V[list(self.stops)] = stop_class
        # A stop token leads from the end of a match to the state behind it, and from there to itself.
        stop_sources = np.append(np.flatnonzero(dfa.accepting_Q), states)
        stop_edges = np.stack(
            [stop_sources, np.full(len(stop_sources), states), np.full(len(stop_sources), stop_class)], axis=1
        )
        return classes_V, np.concatenate([*_find_edges(trie, nodes_N[first_row], dfa, budget), stop_edges])


def _hash_transitions(trie: TokenTrie, dfa: DFA, budget: Budget) -> np.ndarray:
    """A hash of the transitions of every node of the trie: one number that all pairs of states contribute to."""
    factors_Q = np.random.default_rng(0).integers(1, 2**63, size=(len(dfa.accepting_Q),), dtype=np.uint64) | 1
    hash_M = np.zeros(trie.size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for source, target, node in trie.walk(dfa.transitions_Q256, budget):
            np.add.at(hash_M, node, _mix_bits(target.astype(np.uint64) * factors_Q[source]))
    return hash_M


def _find_edges(trie: TokenTrie, nodes_K: np.ndarray, dfa: DFA, budget: Budget) -> Iterator[np.ndarray]:
    """Edges with columns from, to, class, in pieces. `nodes_K` are the nodes of one token of each class but class 0."""
    class_M = np.zeros(trie.size, dtype=np.int64)
    class_M[nodes_K] = np.arange(1, 1 + len(nodes_K))
    count = 0
    for source, target, node in trie.keep_ancestors(nodes_K).walk(dfa.transitions_Q256, budget):
        is_edge = class_M[node] > 0
        count += int(is_edge.sum())
        if count > MAX_EDGES:
            raise BudgetError(f"the pattern has more than {MAX_EDGES:,} transitions between states: make it simpler")
        yield np.stack([source[is_edge], target[is_edge], class_M[node[is_edge]]], axis=1).astype(np.int64)


def _mix_bits(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64, shortened."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(27))
