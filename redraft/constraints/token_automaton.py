"""Patterns over tokens, exactly: which tokens may stand where, and the likeliest text that matches.

    regex -> [table over bytes, regex_dfa.py] -> [1 automaton over tokens]
    on a canvas: [2 forward and backward] -> marginals of matching texts; [3 Viterbi] -> the most probable one

The denoiser says of every position, apart from the others, how likely each token is. Among all texts of the canvas, those
that match have a share of that; the sums over them, by dynamic programming over the automaton's states, give what each
position must be for the text to match, with its exact probability. Tokens that act alike in every state are one class.

After the pattern come stop tokens to the end of the page; at the end of the answer a match may also end without one.
Shapes: C canvas positions, V vocabulary, Q states, K classes of tokens, R pairs of states with a step between them, E pairs
with the classes that make the step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import torch

from redraft.constraints import regex_dfa
from redraft.constraints.regex_dfa import PatternError

MOST_STEPS = 100_000
MOST_WORK = 400_000_000  # states times tokens: some seconds
AT_ONCE = 2**24  # states times tokens looked at together
FAR = 1 << 30
FAINTEST, IMPOSSIBLE = -300.0, -1e7  # nats below the best token: as faint as anything counts; forbidden


# 1. From a table over bytes to an automaton over tokens


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """States and the classes of tokens that lead from one to the next. The last state is behind the stop token."""

    pattern: str
    stops: tuple[int, ...]
    start: int
    classes_V: np.ndarray  # the class of every token; 0 holds those that fit nowhere, the last the stop tokens
    from_R: np.ndarray
    to_R: np.ndarray
    pair_E: np.ndarray  # the pair, in order
    class_E: np.ndarray
    final_Q: np.ndarray  # a match may end here

    @property
    def states(self) -> int:
        """How many there are."""
        return len(self.final_Q)

    @cached_property
    def distance_Q(self) -> np.ndarray:
        """The fewest tokens from each state to a match, the stop token not counted."""
        distance_Q = np.where(self.final_Q, 0, FAR)
        while True:
            better_Q = distance_Q.copy()
            np.minimum.at(better_Q, self.from_R, distance_Q[self.to_R] + 1)
            better_Q = np.minimum(better_Q, FAR)
            if (better_Q == distance_Q).all():
                return distance_Q
            distance_Q = better_Q

    @cached_property
    def tokens_by_class(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens in the order of their classes, order_V, and where each class begins, bounds_K. No class is empty but 0."""
        order_V = np.argsort(self.classes_V, kind="stable")
        return order_V, np.searchsorted(self.classes_V[order_V], np.arange(self.classes_V.max() + 1))

    @cached_property
    def sizes_K(self) -> np.ndarray:
        """How many tokens each class has."""
        return np.diff(np.append(self.tokens_by_class[1], len(self.classes_V)))

    @cached_property
    def edge_starts_R(self) -> np.ndarray:
        """Where each pair begins among the E."""
        return np.searchsorted(self.pair_E, np.arange(len(self.from_R)))

    @cached_property
    def pairs_by_target(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pairs in the order of where they lead, order_R; the states that any leads to, and where theirs begin."""
        order_R = np.argsort(self.to_R, kind="stable")
        return order_R, *np.unique(self.to_R[order_R], return_index=True)

    @cached_property
    def pairs_by_class(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pairs in the order of the classes that make their steps; the classes that make any, and where theirs begin."""
        order_E = np.argsort(self.class_E, kind="stable")
        return self.pair_E[order_E], *np.unique(self.class_E[order_E], return_index=True)

    def before(self, ends_Q: np.ndarray, count: int, pins: Mapping[int, int]) -> np.ndarray:
        """From which states so many positions can end in one of these, with these tokens at some of them."""
        for at in range(count - 1, -1, -1):
            can_R = ends_Q[self.to_R]
            if at in pins:
                can_R = can_R & np.isin(np.arange(len(can_R)), self.pair_E[self.class_E == self.classes_V[pins[at]]])
            ends_Q = np.zeros_like(ends_Q)
            ends_Q[self.from_R[can_R]] = True
        return ends_Q

    def advance(self, state: int, ids: Sequence[int]) -> int:
        """The state some tokens lead to; behind the stop token stands nothing that matters."""
        for token in ids:
            if state == self.states - 1:
                break
            pairs = self.pair_E[self.class_E == self.classes_V[token]]
            found = self.to_R[pairs][self.from_R[pairs] == state]
            if not len(found):
                raise PatternError(f"token {token} does not fit the pattern {self.pattern!r}")
            state = int(found[0])
        return state


class AutomatonCompiler:
    """A vocabulary as bytes: the spelling of every token, None for marks, which stand in no text; and the stop tokens."""

    def __init__(self, token_bytes: Sequence[bytes | None], stops: Sequence[int]) -> None:
        self.size, self.stops = len(token_bytes), tuple(stops)
        usable = [token for token, text in enumerate(token_bytes) if text and token not in self.stops]
        self.longest = max((len(token_bytes[token]) for token in usable), default=0)
        self.tokens_N = np.array(usable, dtype=np.int64)
        self.lengths_N = np.array([len(token_bytes[token]) for token in usable], dtype=np.int64)
        self.bytes_NL = np.zeros((len(usable), self.longest), dtype=np.uint8)
        for row, token in enumerate(usable):
            self.bytes_NL[row, : self.lengths_N[row]] = np.frombuffer(token_bytes[token], dtype=np.uint8)

    @lru_cache(maxsize=64)  # noqa: B019  (a vocabulary lives as long as its model)
    def compile(self, pattern: str) -> TokenAutomaton:
        """The automaton of a regex over these tokens."""
        next_Q256, ends_Q, begin = regex_dfa.compile_dfa(pattern)
        if (work := len(next_Q256) * len(self.tokens_N)) > MOST_WORK:
            raise PatternError(
                f"the pattern has {len(next_Q256):,} states and the vocabulary {len(self.tokens_N):,} tokens: "
                f"{work:,} steps to look at, at most {MOST_WORK:,} can be"
            )
        classes_V, table = self._classes(next_Q256, ends_Q)
        if len(table) > MOST_STEPS:
            raise PatternError(f"the pattern has {len(table):,} steps, at most {MOST_STEPS:,} can be held: make it simpler")
        pairs_R2, pair_E = np.unique(table[:, :2], axis=0, return_inverse=True)
        order_E = np.argsort(pair_E.ravel(), kind="stable")
        pairs = pairs_R2[:, 0], pairs_R2[:, 1], pair_E.ravel()[order_E], table[order_E, 2]
        found = TokenAutomaton(pattern, self.stops, begin, classes_V, *pairs, np.append(ends_Q, True))
        if found.distance_Q[begin] >= FAR:
            raise PatternError(f"no text of this vocabulary matches {pattern!r}")
        return found

    def walk(self, next_Q256: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Where tokens (rows of this vocabulary) lead from every state, [Q, rows]; 0 where they do not fit."""
        state_QN = np.repeat(np.arange(len(next_Q256), dtype=np.int32)[:, None], len(rows), axis=1)
        for at in range(int(self.lengths_N[rows].max(initial=0))):
            going = np.flatnonzero(self.lengths_N[rows] > at)
            state_QN[:, going] = next_Q256[state_QN[:, going], self.bytes_NL[rows[going], at]]
        return state_QN

    def _classes(self, next_Q256: np.ndarray, ends_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that act alike, by a hash of all they do, classes_V; and rows (from, to, class)."""
        states, marks = len(next_Q256), []
        lots_Q = np.random.default_rng(0).integers(1, 2**63, size=(states,), dtype=np.uint64) | 1
        with np.errstate(over="ignore"):
            for some in np.array_split(np.arange(len(self.tokens_N)), 1 + states * len(self.tokens_N) // AT_ONCE):
                to = self.walk(next_Q256, some).astype(np.uint64)
                marks.append((_mixed(to * lots_Q[:, None]) * (to > 0)).sum(axis=0, dtype=np.uint64))
        mark_N = np.concatenate(marks) if marks else np.zeros(0, dtype=np.uint64)
        _, first, kind_N = np.unique(mark_N, return_index=True, return_inverse=True)
        kind_N = np.where(mark_N == 0, 0, kind_N.ravel() + 1)
        kinds, kind_N = np.unique(np.append(kind_N, 0), return_inverse=True)
        first = first[kinds[1:] - 1]
        classes_V = np.zeros(self.size, dtype=np.int64)
        classes_V[self.tokens_N] = kind_N.ravel()[:-1]
        stop = len(kinds)
        classes_V[list(self.stops)] = stop
        to_QK = self.walk(next_Q256, first)
        start, column = np.nonzero(to_QK)
        table = [np.stack([start, to_QK[start, column], column + 1], axis=1)]
        final = np.append(np.flatnonzero(ends_Q), states)  # from a match to the end, and from the end to the end
        table.append(np.stack([final, np.full(len(final), states), np.full(len(final), stop)], axis=1))
        return classes_V, np.concatenate(table)


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(27))


# 2. On a canvas


@dataclass(frozen=True, eq=False)
class CanvasAutomaton:
    """A pattern where a canvas begins."""

    automaton: TokenAutomaton
    state: int
    room: int  # positions of the canvas that belong to the answer
    ends_Q: np.ndarray  # where they may lead to

    def forward_backward_viterbi(self, logits_CV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The logarithm of how much matching text goes through each class, weights_CK; and the likeliest text, ids_C.

        Takes the logits of the positions that count. weights_CK added to the logits of the classes' tokens gives the
        marginals of matching texts, up to a constant.
        """
        one = self.automaton
        logits_CV, held_K = self._sorted(logits_CV)
        begins, sizes = one.tokens_by_class[1][held_K], one.sizes_K[held_K]
        sums_CK = np.zeros((len(logits_CV), len(held_K)))
        best_CK = np.full(sums_CK.shape, -np.inf, dtype=np.float32)
        best_CK[:, held_K] = tops_CK = np.maximum.reduceat(logits_CV, begins, axis=1)
        near_CV = torch.from_numpy(logits_CV - np.repeat(tops_CK, sizes, axis=1)).exp_().numpy()  # of a class's best
        below_CK = (tops_CK - tops_CK.max(axis=1, keepdims=True)).astype(np.float64)
        # However cold, what is not forbidden keeps a chance: it may be all that matches.
        chance_CK = np.where(below_CK < IMPOSSIBLE, 0.0, np.exp(np.maximum(below_CK, FAINTEST)))
        sums_CK[:, held_K] = np.add.reduceat(near_CV, begins, axis=1, dtype=np.float64) * chance_CK
        steps_CR = np.add.reduceat(sums_CK[:, one.class_E], one.edge_starts_R, axis=1)
        live = self._live(steps_CR > 0)
        if not live[0][self.state]:
            raise self.no_match_error()
        through_CR = self._through(steps_CR, live)
        pairs_E, used, first = one.pairs_by_class
        weights_CK = np.zeros_like(sums_CK)
        weights_CK[:, used] = np.add.reduceat(through_CR[:, pairs_E], first, axis=1)
        with np.errstate(divide="ignore"):
            return np.log(weights_CK), self._likeliest(logits_CV, best_CK, live)

    def accepts(self, ids: Sequence[int]) -> bool:
        """Whether a canvas is the beginning of an answer that matches."""
        try:
            return bool(self.ends_Q[self.automaton.advance(self.state, ids[: self.room])])
        except PatternError:
            return False

    def no_match_error(self) -> PatternError:
        """What is said when no text of the canvas matches."""
        return PatternError(f"no text of this length can match {self.automaton.pattern!r} here")

    def _sorted(self, logits_CV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits in the order of the classes, and which classes have any token."""
        order_V, held_K = self.automaton.tokens_by_class[0], self.automaton.sizes_K > 0
        return torch.from_numpy(logits_CV).index_select(1, torch.from_numpy(order_V)).numpy(), held_K

    def log_match_probability(self, logits_CV: np.ndarray) -> float:
        """The logarithm of the probability that a text drawn position by position matches."""
        one = self.automaton
        logits_CV, held_K = self._sorted(logits_CV[: self.room])
        logs_CV = torch.from_numpy(logits_CV).double().log_softmax(dim=1).numpy()
        sums_CK = np.full((len(logs_CV), len(held_K)), -np.inf)
        sums_CK[:, held_K] = np.logaddexp.reduceat(logs_CV, one.tokens_by_class[1][held_K], axis=1)
        score_Q = np.full(one.states, -np.inf)
        score_Q[self.state] = 0.0
        for sums_K in sums_CK:
            now_Q = np.full(one.states, -np.inf)
            np.logaddexp.at(now_Q, one.to_R[one.pair_E], score_Q[one.from_R[one.pair_E]] + sums_K[one.class_E])
            score_Q = now_Q
        return float(np.logaddexp.reduce(score_Q[self.ends_Q]))

    def _live(self, can_CR: np.ndarray) -> np.ndarray:
        """From which states a match can still be reached, [C + 1, Q]; the first position first."""
        one = self.automaton
        live = np.zeros((len(can_CR) + 1, one.states), dtype=bool)
        live[-1] = self.ends_Q
        for at in range(len(can_CR) - 1, -1, -1):
            live[at][one.from_R[can_CR[at] & live[at + 1].take(one.to_R)]] = True
        return live

    def _through(self, steps_CR: np.ndarray, live: np.ndarray) -> np.ndarray:
        """How much matching text goes through each pair at each position, but for the step's own probability."""
        one, before = self.automaton, np.zeros(live.shape)
        before[0][self.state] = 1.0
        for at, steps_R in enumerate(steps_CR):
            now = np.bincount(one.to_R, before[at].take(one.from_R) * steps_R, one.states) * live[at + 1]
            before[at + 1] = now / np.add.reduce(now)
        came, behind = before > 0, np.zeros(live.shape)
        behind[-1] = live[-1] & came[-1]
        for at in range(len(steps_CR) - 1, -1, -1):
            now = np.bincount(one.from_R, behind[at + 1].take(one.to_R) * steps_CR[at], one.states) * came[at]
            behind[at] = now / np.maximum.reduce(now)
        return before[:-1].take(one.from_R, axis=1) * behind[1:].take(one.to_R, axis=1)

    def _likeliest(self, logits_CV: np.ndarray, best_CK: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Viterbi: the most probable text that matches. Logits in the order of the classes."""
        one, count = self.automaton, len(logits_CV)
        order_R, targets, first = one.pairs_by_target
        each_CR = np.maximum.reduceat(best_CK[:, one.class_E], one.edge_starts_R, axis=1)[:, order_R]
        from_R, scores = one.from_R[order_R], np.full((count + 1, one.states), -np.inf)
        scores[0][self.state] = 0.0
        dead = np.where(live, 0.0, -np.inf)
        for at in range(count):
            scores[at + 1][targets] = np.maximum.reduceat(scores[at].take(from_R) + each_CR[at], first)
            scores[at + 1] += dead[at + 1]
        bounds = dict(zip(targets.tolist(), pairwise([*first.tolist(), len(order_R)]), strict=True))
        pairs, state = np.empty(count, dtype=np.int64), int(np.argmax(np.where(self.ends_Q, scores[-1], -np.inf)))
        for at in range(count - 1, -1, -1):
            low, high = bounds[state]
            if high - low > 1:
                low += int((scores[at].take(from_R[low:high]) + each_CR[at, low:high]).argmax())
            pairs[at], state = order_R[low], int(from_R[low])
        return self._spelled(pairs, logits_CV, best_CK)

    def _spelled(self, pairs_C: np.ndarray, logits_CV: np.ndarray, best_CK: np.ndarray) -> np.ndarray:
        """The likeliest token that makes each of these steps."""
        one, ids_C = self.automaton, np.zeros(len(pairs_C), dtype=np.int64)
        order_V, bounds_K = one.tokens_by_class
        last_R = np.append(one.edge_starts_R, len(one.pair_E))
        for at, (first, end) in enumerate(zip(last_R[pairs_C].tolist(), last_R[pairs_C + 1].tolist(), strict=True)):
            kind = one.class_E[first]
            if end - first > 1:
                kinds = one.class_E[first:end]
                kind = kinds[best_CK[at].take(kinds).argmax()]
            begin, size = bounds_K[kind], one.sizes_K[kind]
            ids_C[at] = order_V[begin + (logits_CV[at, begin : begin + size].argmax() if size > 1 else 0)]
        return ids_C
