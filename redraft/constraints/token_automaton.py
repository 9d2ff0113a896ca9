"""Token automata: exact regular-expression constraints for a canvas whose positions are denoised all at once.

    regex -> [DFA over bytes, regex_dfa.py] -> [1 automaton over tokens]
    on a canvas: [2 forward-backward] -> marginals of the matching texts; [3 Viterbi] -> the most probable matching text

The denoiser gives each position its own distribution over tokens, independent of the other positions. Conditioned on the
event "the whole text matches", the positions depend on one another. Forward-backward sums over the automaton's states give
the exact probability of every token at every position under that condition.

Tokens with the same transitions in every state form one class; sums run over classes instead of tokens. Behind a match, stop
tokens fill the canvas; at the last position of the answer a match may also end without one.
Shapes: C canvas positions, V vocabulary, Q states, K token classes, R pairs of states (from, to) with a transition, E edges
(a pair and a class whose tokens make the transition).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import torch

from redraft.constraints import regex_dfa
from redraft.constraints.regex_dfa import DFA, PatternError

MAX_EDGES = 100_000
MAX_WORK = 400_000_000  # DFA states times tokens: a few seconds
CHUNK = 2**24  # DFA states times tokens that are walked at once
UNREACHABLE = 1 << 30
# In nats below the best token. Log-probabilities are clamped at MIN_LOG_PROB, except that a token below FORBIDDEN has none.
MIN_LOG_PROB = -300.0
FORBIDDEN = -1e7


# 1. From a DFA over bytes to an automaton over tokens


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

    @property
    def states(self) -> int:
        """The number of states."""
        return len(self.final_Q)

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
                raise PatternError(f"token {token} does not fit the pattern {self.pattern!r}")
            state = int(targets[0])
        return state


class AutomatonCompiler:
    """Compiles regular expressions to token automata over one vocabulary.

    `token_bytes` holds the bytes of every token, None for special tokens, which stand in no text.
    """

    def __init__(self, token_bytes: Sequence[bytes | None], stops: Sequence[int]) -> None:
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

    @lru_cache(maxsize=64)  # noqa: B019  (a compiler lives as long as its model)
    def compile(self, pattern: str) -> TokenAutomaton:
        """The token automaton of a regular expression."""
        dfa = regex_dfa.compile_dfa(pattern)
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
            raise PatternError(f"no text of this vocabulary matches {pattern!r}")
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


# 2. On a canvas


@dataclass(frozen=True, eq=False)
class CanvasAutomaton:
    """A token automaton on one canvas."""

    automaton: TokenAutomaton
    state: int  # at the first position of the canvas
    room: int  # the number of canvas positions that belong to the answer
    ends_Q: np.ndarray  # the states in which the canvas may end

    def forward_backward_viterbi(self, logits_CV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """log_weights_CK, and the most probable matching text, ids_C. Takes the logits of the first `room` positions.

        Adding a class's log weight to the logits of its tokens gives the marginals of the matching texts, up to a constant.
        """
        automaton = self.automaton
        logits_CV, nonempty_K = self._sort_by_class(logits_CV)
        starts = automaton.tokens_by_class[1][nonempty_K]
        sizes = automaton.sizes_K[nonempty_K]
        sums_CK = np.zeros((len(logits_CV), len(nonempty_K)))
        best_CK = np.full(sums_CK.shape, -np.inf, dtype=np.float32)
        top_CK = np.maximum.reduceat(logits_CV, starts, axis=1)
        best_CK[:, nonempty_K] = top_CK
        relative_CV = torch.from_numpy(logits_CV - np.repeat(top_CK, sizes, axis=1)).exp_().numpy()  # to the class's best
        below_CK = (top_CK - top_CK.max(axis=1, keepdims=True)).astype(np.float64)
        # At any temperature, a token that is not forbidden keeps some probability: it may be the only one that matches.
        top_prob_CK = np.where(below_CK < FORBIDDEN, 0.0, np.exp(np.maximum(below_CK, MIN_LOG_PROB)))
        sums_CK[:, nonempty_K] = np.add.reduceat(relative_CV, starts, axis=1, dtype=np.float64) * top_prob_CK
        weights_CR = np.add.reduceat(sums_CK[:, automaton.class_E], automaton.edge_starts_R, axis=1)
        live = self._find_live_states(weights_CR > 0)
        if not live[0][self.state]:
            raise self.no_match_error()
        through_CR = self._run_forward_backward(weights_CR, live)
        pairs_E, classes, starts = automaton.pairs_by_class
        through_CK = np.zeros_like(sums_CK)
        through_CK[:, classes] = np.add.reduceat(through_CR[:, pairs_E], starts, axis=1)
        with np.errstate(divide="ignore"):
            return np.log(through_CK), self._run_viterbi(logits_CV, best_CK, live)

    def accepts(self, ids: Sequence[int]) -> bool:
        """Whether a canvas with these tokens can begin a matching answer."""
        try:
            return bool(self.ends_Q[self.automaton.advance(self.state, ids[: self.room])])
        except PatternError:
            return False

    def no_match_error(self) -> PatternError:
        """The error for a canvas on which no text matches."""
        return PatternError(f"no text of this length can match {self.automaton.pattern!r} here")

    def log_match_probability(self, logits_CV: np.ndarray) -> float:
        """The log probability that a text matches if every position is sampled on its own."""
        automaton = self.automaton
        logits_CV, nonempty_K = self._sort_by_class(logits_CV[: self.room])
        logs_CV = torch.from_numpy(logits_CV).double().log_softmax(dim=1).numpy()
        logs_CK = np.full((len(logs_CV), len(nonempty_K)), -np.inf)
        logs_CK[:, nonempty_K] = np.logaddexp.reduceat(logs_CV, automaton.tokens_by_class[1][nonempty_K], axis=1)
        from_E = automaton.from_R[automaton.pair_E]
        to_E = automaton.to_R[automaton.pair_E]
        score_Q = np.full(automaton.states, -np.inf)
        score_Q[self.state] = 0.0
        for logs_K in logs_CK:
            next_Q = np.full(automaton.states, -np.inf)
            np.logaddexp.at(next_Q, to_E, score_Q[from_E] + logs_K[automaton.class_E])
            score_Q = next_Q
        return float(np.logaddexp.reduce(score_Q[self.ends_Q]))

    def _sort_by_class(self, logits_CV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits with the tokens sorted by class, and which classes have tokens."""
        order_V = torch.from_numpy(self.automaton.tokens_by_class[0])
        return torch.from_numpy(logits_CV).index_select(1, order_V).numpy(), self.automaton.sizes_K > 0

    def _find_live_states(self, possible_CR: np.ndarray) -> np.ndarray:
        """The states from which a match can still be reached, [C + 1, Q], by position."""
        automaton = self.automaton
        live = np.zeros((len(possible_CR) + 1, automaton.states), dtype=bool)
        live[-1] = self.ends_Q
        for position in range(len(possible_CR) - 1, -1, -1):
            usable_R = possible_CR[position] & live[position + 1].take(automaton.to_R)
            live[position][automaton.from_R[usable_R]] = True
        return live

    def _run_forward_backward(self, weights_CR: np.ndarray, live: np.ndarray) -> np.ndarray:
        """The probability mass of matching texts through each pair at each position, without the pair's own weight."""
        automaton = self.automaton
        forward = np.zeros(live.shape)
        forward[0][self.state] = 1.0
        for position, weights_R in enumerate(weights_CR):
            mass_R = forward[position].take(automaton.from_R) * weights_R
            mass_Q = np.bincount(automaton.to_R, mass_R, automaton.states) * live[position + 1]
            forward[position + 1] = mass_Q / np.add.reduce(mass_Q)
        reached = forward > 0
        backward = np.zeros(live.shape)
        backward[-1] = live[-1] & reached[-1]
        for position in range(len(weights_CR) - 1, -1, -1):
            mass_R = backward[position + 1].take(automaton.to_R) * weights_CR[position]
            mass_Q = np.bincount(automaton.from_R, mass_R, automaton.states) * reached[position]
            backward[position] = mass_Q / np.maximum.reduce(mass_Q)
        return forward[:-1].take(automaton.from_R, axis=1) * backward[1:].take(automaton.to_R, axis=1)

    # 3. Viterbi

    def _run_viterbi(self, logits_CV: np.ndarray, best_CK: np.ndarray, live: np.ndarray) -> np.ndarray:
        """The tokens of the most probable matching text. Logits are sorted by class."""
        automaton = self.automaton
        count = len(logits_CV)
        order_R, targets, starts = automaton.pairs_by_target
        best_CR = np.maximum.reduceat(best_CK[:, automaton.class_E], automaton.edge_starts_R, axis=1)[:, order_R]
        from_R = automaton.from_R[order_R]
        scores = np.full((count + 1, automaton.states), -np.inf)
        scores[0][self.state] = 0.0
        dead_penalty = np.where(live, 0.0, -np.inf)
        for position in range(count):
            candidates_R = scores[position].take(from_R) + best_CR[position]
            scores[position + 1][targets] = np.maximum.reduceat(candidates_R, starts)
            scores[position + 1] += dead_penalty[position + 1]
        pairs_of_target = dict(zip(targets.tolist(), pairwise([*starts.tolist(), len(order_R)]), strict=True))
        pairs_C = np.empty(count, dtype=np.int64)
        state = int(np.argmax(np.where(self.ends_Q, scores[-1], -np.inf)))
        for position in range(count - 1, -1, -1):
            low, high = pairs_of_target[state]
            if high - low > 1:
                low += int((scores[position].take(from_R[low:high]) + best_CR[position, low:high]).argmax())
            pairs_C[position] = order_R[low]
            state = int(from_R[low])
        return self._pick_tokens(pairs_C, logits_CV, best_CK)

    def _pick_tokens(self, pairs_C: np.ndarray, logits_CV: np.ndarray, best_CK: np.ndarray) -> np.ndarray:
        """The most probable token for each of these transitions."""
        automaton = self.automaton
        order_V, bounds_K = automaton.tokens_by_class
        edge_bounds = np.append(automaton.edge_starts_R, len(automaton.pair_E))
        first_edges = edge_bounds[pairs_C].tolist()
        end_edges = edge_bounds[pairs_C + 1].tolist()
        ids_C = np.zeros(len(pairs_C), dtype=np.int64)
        for position, (first, end) in enumerate(zip(first_edges, end_edges, strict=True)):
            token_class = automaton.class_E[first]
            if end - first > 1:
                classes = automaton.class_E[first:end]
                token_class = classes[best_CK[position].take(classes).argmax()]
            begin = bounds_K[token_class]
            size = automaton.sizes_K[token_class]
            offset = logits_CV[position, begin : begin + size].argmax() if size > 1 else 0
            ids_C[position] = order_V[begin + offset]
        return ids_C
