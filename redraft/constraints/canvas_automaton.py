"""Token automata on a canvas whose positions are denoised all at once: exact marginals, and the most probable text.

    logits -> [1 forward-backward] -> marginals of the matching texts; [2 Viterbi] -> the most probable matching text

The denoiser gives each position its own distribution over tokens, independent of the other positions. Conditioned on the
event "the whole text matches", the positions depend on one another. Forward-backward sums over the automaton's states give
the exact probability of every token at every position under that condition.
Shapes: C canvas positions, V vocabulary, Q states, K token classes, R pairs of states (from, to) with a transition, E edges
(a pair and a class whose tokens make the transition).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from redraft.constraints.errors import PatternError, shorten
from redraft.constraints.token_automaton import TokenAutomaton

# In nats below the best token. Log-probabilities are clamped at MIN_LOG_PROB, except that a token below FORBIDDEN has none.
MIN_LOG_PROB = -300.0
FORBIDDEN = -1e7
BLOCK_VALUES = 2**19  # values of edges or tokens that are computed at once: 4 MB as float64


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
        sums_CK, best_CK = self._reduce_classes(logits_CV)
        live = self._find_live_states(sums_CK > 0)
        if not live[0][self.state]:
            raise self.no_match_error()
        log_weights_CK = self._run_forward_backward(PairRows(automaton, sums_CK, np.add), live)
        return log_weights_CK, self._run_viterbi(logits_CV, best_CK, live)

    def accepts(self, ids: Sequence[int]) -> bool:
        """Whether a canvas with these tokens can begin a matching answer."""
        try:
            return bool(self.ends_Q[self.automaton.advance(self.state, ids[: self.room])])
        except PatternError:
            return False

    def no_match_error(self) -> PatternError:
        """The error for a canvas on which no text matches."""
        return PatternError(f"no text of this length can match {shorten(self.automaton.pattern)} here")

    def log_match_probability(self, logits_CV: np.ndarray, log_totals_C: np.ndarray) -> float:
        """The log probability that a text matches if every position is sampled on its own.

        `log_totals_C` is the logsumexp of each position, which all patterns share.
        """
        automaton = self.automaton
        order_V, bounds_K = automaton.tokens_by_class
        tokens = order_V[bounds_K[1] :]  # without class 0
        logs_CV = logits_CV[: self.room, tokens].astype(np.float64) - log_totals_C[: self.room, None]
        logs_CK = np.full((self.room, len(bounds_K)), -np.inf)
        logs_CK[:, 1:] = np.logaddexp.reduceat(logs_CV, bounds_K[1:] - bounds_K[1], axis=1)
        from_E = automaton.from_R[automaton.pair_E]
        to_E = automaton.to_R[automaton.pair_E]
        score_Q = np.full(automaton.states, -np.inf)
        score_Q[self.state] = 0.0
        for logs_K in logs_CK:
            next_Q = np.full(automaton.states, -np.inf)
            np.logaddexp.at(next_Q, to_E, score_Q[from_E] + logs_K[automaton.class_E])
            score_Q = next_Q
        return float(np.logaddexp.reduce(score_Q[self.ends_Q]))

    def _reduce_classes(self, logits_CV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each class's probability relative to the position's best token, sums_CK, and its best logit, best_CK."""
        automaton = self.automaton
        order_V, bounds_K = automaton.tokens_by_class
        nonempty_K = automaton.sizes_K > 0
        starts = bounds_K[nonempty_K]
        sizes = automaton.sizes_K[nonempty_K]
        sums_CK = np.zeros((len(logits_CV), len(nonempty_K)))
        best_CK = np.full(sums_CK.shape, -np.inf, dtype=np.float32)
        tokens = torch.from_numpy(order_V)
        for block in split_positions(len(logits_CV), logits_CV.shape[1]):
            sorted_BV = torch.from_numpy(logits_CV[block]).index_select(1, tokens).numpy()
            top_BK = np.maximum.reduceat(sorted_BV, starts, axis=1)
            best_CK[block, nonempty_K] = top_BK
            relative_BV = (
                torch.from_numpy(sorted_BV - np.repeat(top_BK, sizes, axis=1)).exp_().numpy()
            )  # to the class's best
            below_BK = (top_BK - top_BK.max(axis=1, keepdims=True)).astype(np.float64)
            # At any temperature, a token that is not forbidden keeps some probability: it may be the only one that matches.
            top_prob_BK = np.where(below_BK < FORBIDDEN, 0.0, np.exp(np.maximum(below_BK, MIN_LOG_PROB)))
            sums_CK[block, nonempty_K] = np.add.reduceat(relative_BV, starts, axis=1, dtype=np.float64) * top_prob_BK
        return sums_CK, best_CK

    # 1. Forward-backward

    def _find_live_states(self, possible_CK: np.ndarray) -> np.ndarray:
        """The states from which a match can still be reached, [C + 1, Q], by position."""
        automaton = self.automaton
        is_any_impossible = not possible_CK[:, automaton.pairs_by_class[1]].all()
        possible = PairRows(automaton, possible_CK, np.logical_or)
        live = np.zeros((len(possible_CK) + 1, automaton.states), dtype=bool)
        live[-1] = self.ends_Q
        for position in range(len(possible_CK) - 1, -1, -1):
            usable_R = live[position + 1].take(automaton.to_R)
            if is_any_impossible:
                usable_R &= possible[position]
            live[position][automaton.from_R[usable_R]] = True
        return live

    def _run_forward_backward(self, weights: "PairRows", live: np.ndarray) -> np.ndarray:
        """The log of the probability mass of matching texts through each class, without the class's own weight."""
        automaton = self.automaton
        count = len(live) - 1
        forward = np.zeros(live.shape)
        forward[0][self.state] = 1.0
        for position in range(count):
            mass_R = forward[position].take(automaton.from_R) * weights[position]
            mass_Q = np.bincount(automaton.to_R, mass_R, automaton.states) * live[position + 1]
            forward[position + 1] = mass_Q / np.add.reduce(mass_Q)
        backward = np.zeros(live.shape)
        backward[-1] = live[-1] & (forward[-1] > 0)
        for position in range(count - 1, -1, -1):
            mass_R = backward[position + 1].take(automaton.to_R) * weights[position]
            mass_Q = np.bincount(automaton.from_R, mass_R, automaton.states) * (forward[position] > 0)
            backward[position] = mass_Q / np.maximum.reduce(mass_Q)
        pairs_E, classes, starts = automaton.pairs_by_class
        through_CK = np.zeros((count, len(automaton.sizes_K)))
        for block in split_positions(count, len(pairs_E)):
            after = slice(block.start + 1, block.stop + 1)
            through_BR = forward[block].take(automaton.from_R, axis=1) * backward[after].take(automaton.to_R, axis=1)
            through_CK[block, classes] = np.add.reduceat(through_BR[:, pairs_E], starts, axis=1)
        with np.errstate(divide="ignore"):
            return np.log(through_CK)

    # 2. Viterbi

    def _run_viterbi(self, logits_CV: np.ndarray, best_CK: np.ndarray, live: np.ndarray) -> np.ndarray:
        """The tokens of the most probable matching text."""
        automaton = self.automaton
        count = len(logits_CV)
        order_R, targets, starts = automaton.pairs_by_target
        best = PairRows(automaton, best_CK, np.maximum, order_R)
        from_R = automaton.from_R[order_R]
        scores = np.full((count + 1, automaton.states), -np.inf)
        scores[0][self.state] = 0.0
        for position in range(count):
            candidates_R = scores[position].take(from_R) + best[position]
            scores[position + 1][targets] = np.maximum.reduceat(candidates_R, starts)
            scores[position + 1][~live[position + 1]] = -np.inf
        pairs_of_target = dict(zip(targets.tolist(), pairwise([*starts.tolist(), len(order_R)]), strict=True))
        pairs_C = np.empty(count, dtype=np.int64)
        state = int(np.argmax(np.where(self.ends_Q, scores[-1], -np.inf)))
        for position in range(count - 1, -1, -1):
            low, high = pairs_of_target[state]
            if high - low > 1:
                low += int((scores[position].take(from_R[low:high]) + best[position][low:high]).argmax())
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
            offset = logits_CV[position].take(order_V[begin : begin + size]).argmax() if size > 1 else 0
            ids_C[position] = order_V[begin + offset]
        return ids_C


class PairRows:
    """The values of token classes, combined over the edges of each pair, position by position.

    Some positions are computed at once and kept until others are needed, because the array of all positions may have
    gigabytes.
    """

    def __init__(
        self, automaton: TokenAutomaton, values_CK: np.ndarray, combine: np.ufunc, order_R: np.ndarray | None = None
    ) -> None:
        self.automaton = automaton
        self.values_CK = values_CK
        self.combine = combine
        self.order_R = order_R  # of the pairs in a row
        self.length = positions_per_block(len(automaton.class_E))
        self.begin = -self.length  # the first position of the block
        self.block_BR = np.zeros((0, 0))

    def __getitem__(self, position: int) -> np.ndarray:
        """The values of all pairs at one position."""
        if not self.begin <= position < self.begin + self.length:
            self.begin = position - position % self.length
            values_BE = self.values_CK[self.begin : self.begin + self.length, self.automaton.class_E]
            self.block_BR = self.combine.reduceat(values_BE, self.automaton.edge_starts_R, axis=1)
            if self.order_R is not None:
                self.block_BR = self.block_BR[:, self.order_R]
        return self.block_BR[position - self.begin]


def positions_per_block(width: int) -> int:
    """The number of positions that are computed at once, for so many values per position."""
    return max(1, BLOCK_VALUES // max(1, width))


def split_positions(count: int, width: int) -> Iterator[slice]:
    """Splits `count` positions into blocks."""
    length = positions_per_block(width)
    for begin in range(0, count, length):
        yield slice(begin, min(begin + length, count))
