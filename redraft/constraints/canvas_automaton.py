"""Token automata on a canvas whose positions are denoised all at once: exact marginals, and the most probable text.

    logits -> [1 forward-backward] -> marginals of the matching texts; [2 Viterbi] -> the most probable matching text

The denoiser gives each position its own distribution over tokens, independent of the other positions. Conditioned on the
event "the whole text matches", the positions depend on one another. Forward-backward sums over the automaton's states give
the exact probability of every token at every position under that condition.
Shapes: C canvas positions, V vocabulary, Q states, K token classes, R pairs of states (from, to) with a transition, E edges
(a pair and a class whose tokens make the transition).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from redraft.constraints.errors import PatternError, shorten
from redraft.constraints.token_automaton import TokenAutomaton

# In nats below the best token. Log-probabilities are clamped at MIN_LOG_PROB, except that a token below FORBIDDEN has none.
MIN_LOG_PROB = -300.0
FORBIDDEN = -1e7


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
        return PatternError(f"no text of this length can match {shorten(self.automaton.pattern)} here")

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

    # 2. Viterbi

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
