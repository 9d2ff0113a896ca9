"""Regular expressions over tokens, exactly: which tokens may stand where, and the likeliest text that matches.

    regex -> [1 automaton over tokens] -> on a canvas: [2 forward and backward] -> marginals of matching texts
                                                       [3 Viterbi]              -> the most probable one

The denoiser says of every position, independent of the others, how likely each token is. Among all texts of the canvas, those
that match have a share of that; the sums over them, by dynamic programming over the automaton's states, give what each
position must be for the text to match, with its exact probability. Tokens that act alike in every state are one class.

After the pattern comes a stop token and then anything; at the end of the answer a match may also end without one.
Shapes: C canvas positions, V vocabulary, Q states, K classes of tokens, R pairs of states with a step between them, E pairs
with the classes that make the step.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MOST_STATES, MOST_STEPS = 5_000, 200_000
ASCII = {"d": "0-9", "w": "A-Za-z0-9_", "s": r" \t\n\r\f\v"}  # a part of what Python's classes hold
FAR = 1 << 30


class PatternError(ValueError):
    """A pattern that cannot be obeyed; the message says why."""


# 1. From a regex to an automaton


@dataclass(frozen=True, eq=False)
class Automaton:
    """States and the classes of tokens that lead from one to the next. The last state is behind the stop token."""

    pattern: str
    start: int
    classes_V: np.ndarray  # the class of every token; 0 holds those that fit nowhere
    from_R: np.ndarray
    to_R: np.ndarray
    of_E: np.ndarray  # the pair, in order
    class_E: np.ndarray
    final_Q: np.ndarray  # a match may end here
    distance_Q: np.ndarray  # the fewest tokens to a match, the stop token not counted

    @property
    def states(self) -> int:
        """How many there are."""
        return len(self.final_Q)

    @property
    def over(self) -> int:
        """The state behind the stop token."""
        return self.states - 1

    def after(self, state: int, ids: Sequence[int]) -> int:
        """The state some tokens lead to."""
        for token in ids:
            found = self._next(state, int(self.classes_V[token]))
            if found is None:
                raise PatternError(f"token {token} does not fit the pattern {self.pattern!r}")
            state = found
        return state

    def _next(self, state: int, kind: int) -> int | None:
        pairs = self.of_E[self.class_E == kind]
        found = self.to_R[pairs][self.from_R[pairs] == state]
        return int(found[0]) if len(found) else None


def automaton(pattern: str, spellings: Sequence[bytes | None], stops: Sequence[int]) -> Automaton:
    """The automaton of a regex over a vocabulary; None spells a mark, which no text contains."""
    return _automaton(pattern, _Words(tuple(spellings)), tuple(sorted(stops)))


class _Words:
    """A vocabulary, for the memory of automata: compared by what it is, hashed once."""

    def __init__(self, spellings: tuple[bytes | None, ...]) -> None:
        self.spellings = spellings
        self.hash = hash(spellings)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Words) and self.spellings == other.spellings


@lru_cache(maxsize=64)
def _automaton(pattern: str, words: _Words, stops: tuple[int, ...]) -> Automaton:
    index = _index(pattern, words, stops)
    steps = index.get_transitions()
    if len(steps) > MOST_STATES:
        raise PatternError(f"the pattern has {len(steps):,} states, at most {MOST_STATES:,} can be held: make it shorter")
    names = {state: number for number, state in enumerate(sorted(steps))}
    for to in {to for edges in steps.values() for to in edges.values()} - set(names):
        names[to] = len(names)
    states = len(names) + 1
    final_Q = np.zeros(states, dtype=bool)
    final_Q[[names[state] for state in index.get_final_states() if state in names]] = True
    final_Q[-1] = True
    classes_V, table = _classes(steps, names, words, stops, np.flatnonzero(final_Q[:-1]))
    if len(table) > MOST_STEPS:
        raise PatternError(f"the pattern has {len(table):,} steps, at most {MOST_STEPS:,} can be held: make it simpler")
    pairs_R2, of_E = np.unique(table[:, :2], axis=0, return_inverse=True)
    order = np.argsort(of_E.ravel(), kind="stable")
    distance_Q = _distances(pairs_R2, final_Q)
    start = names[index.get_initial_state()] if index.get_initial_state() in names else 0
    if distance_Q[start] >= FAR:
        raise PatternError(f"no text of this vocabulary matches {pattern!r}")
    return Automaton(
        pattern, start, classes_V, pairs_R2[:, 0], pairs_R2[:, 1], of_E.ravel()[order], table[order, 2], final_Q, distance_Q
    )


def _index(pattern: str, words: _Words, stops: tuple[int, ...]) -> "Index":  # noqa: F821
    try:
        from outlines_core import Index, Vocabulary
    except ImportError:
        raise PatternError("patterns need the package outlines-core: pip install outlines-core") from None
    spelled: dict[bytes, list[int]] = {}
    for token, text in enumerate(words.spellings):
        if text and token not in stops:
            spelled.setdefault(text, []).append(token)
    try:
        return Index(plain(pattern), Vocabulary(stops[0], spelled))
    except ValueError as error:
        if "incompatible" in str(error):
            raise PatternError(f"no text of this vocabulary matches {pattern!r}") from None
        raise PatternError(f"the pattern {pattern!r} cannot be made an automaton: {error}") from None


def _classes(
    steps: dict[int, dict[int, int]], names: dict[int, int], words: _Words, stops: tuple[int, ...], final: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that act alike, by a hash of all they do; and rows (from, to, class)."""
    size, over = len(words.spellings), len(names)
    chance = np.random.default_rng(0)
    mark_V, edges = np.zeros(size, dtype=np.uint64), []
    for state, row in steps.items():
        tokens = np.fromiter(row.keys(), dtype=np.int64, count=len(row))
        to = np.array([names[target] for target in row.values()], dtype=np.int64)
        real = ~np.isin(tokens, stops)
        tokens, to = tokens[real], to[real]
        lots = chance.integers(1, 2**63, size=over, dtype=np.uint64)
        mark_V[tokens] += lots[to]
        edges.append(np.stack([np.full(len(to), names[state]), to, tokens], axis=1))
    _, classes_V = np.unique(mark_V, return_inverse=True)
    classes_V = classes_V.ravel() + 1
    classes_V[mark_V == 0] = 0
    classes_V[list(stops)] = classes_V.max() + 1
    kinds = np.arange(classes_V.max() + 1)
    table = np.concatenate(edges) if edges else np.zeros((0, 3), dtype=np.int64)
    table[:, 2] = classes_V[table[:, 2]]
    ends = np.stack([final, np.full(len(final), over), np.full(len(final), kinds[-1])], axis=1)
    after = np.stack([np.full(len(kinds), over), np.full(len(kinds), over), kinds], axis=1)
    return classes_V, np.unique(np.concatenate([table, ends, after]), axis=0)


def _distances(pairs_R2: np.ndarray, final_Q: np.ndarray) -> np.ndarray:
    distance_Q = np.where(final_Q, 0, FAR)
    while True:
        through_R = distance_Q[pairs_R2[:, 1]] + 1
        better = distance_Q.copy()
        np.minimum.at(better, pairs_R2[:, 0], through_R)
        better = np.minimum(better, FAR)
        if (better == distance_Q).all():
            return distance_Q
        distance_Q = better


def plain(pattern: str) -> str:
    """A regex as the automaton's compiler reads it, so that whatever it matches Python's `re.fullmatch` matches too.

    Anchors at both ends say nothing here. Classes such as \\d are those of ASCII. What both read differently is refused.
    """
    try:
        re.compile(pattern)
    except re.error as error:
        raise PatternError(f"the pattern {pattern!r} is not a regular expression: {error}") from None
    text = pattern.removeprefix("^").removeprefix(r"\A").removesuffix(r"\Z")
    if text.endswith("$") and not text.endswith(r"\$"):
        text = text[:-1]
    found, inside, at = [], False, 0
    while at < len(text):
        one, two = text[at], text[at : at + 2]
        if one == "\\":
            found.append(_escape(two, inside, pattern))
            at += 2
            continue
        if inside and (two in ("&&", "--", "~~", "||") or one == "["):
            raise PatternError(
                f"{two if one != '[' else one!r} inside a class is read in two ways; write it with backslashes"
            )
        if not inside and two == "(?" and not text.startswith(("(?:", "(?i:", "(?s:", "(?m:", "(?x:", "(?P<"), at):
            raise PatternError(
                f"{text[at : at + 4]!r} in {pattern!r} is not supported: look-around, conditions and flags are not"
            )
        if one == "[" and not inside:
            inside, step = True, 1
            if text[at + 1 : at + 2] == "^":
                step = 2
            if text[at + step : at + step + 1] == "]":  # a bracket that stands first is meant
                found.append(text[at : at + step] + r"\]")
                at += step + 1
                continue
            found.append(text[at : at + step])
            at += step
            continue
        if one == "]":
            inside = False
        found.append(one)
        at += 1
    return "".join(found)


def _escape(two: str, inside: bool, pattern: str) -> str:
    letter = two[1:]
    if letter in ASCII:
        return ASCII[letter] if inside else f"[{ASCII[letter]}]"
    if letter.lower() in ASCII and not inside:
        return f"[^{ASCII[letter.lower()]}]"
    if letter.isdigit() and letter != "0":
        raise PatternError(f"{two!r} in {pattern!r} refers back to a group, which no automaton can")
    if letter in "bBAZDWSGzRXhHkKpPN" or letter == "0":
        raise PatternError(f"{two!r} in {pattern!r} is not supported")
    return two


# 2. On a canvas


@dataclass(frozen=True, eq=False)
class OnCanvas:
    """A pattern where a canvas begins."""

    automaton: Automaton
    state: int
    left: int  # positions of the answer behind this canvas

    def fits(self, state: int) -> bool:
        """Whether a canvas may end there."""
        return bool(self.ends_Q[state])

    @property
    def ends_Q(self) -> np.ndarray:
        """Where the canvas may end: a match, or near enough to one."""
        return self.automaton.distance_Q <= self.left

    def conform(self, logits_CV: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The logarithm of how much matching text goes through each class, weights_CK; and the likeliest text, ids_C.

        weights_CK added to the logits of the classes' tokens gives the marginals of matching texts, up to a constant.
        """
        one = self.automaton
        tops_C1 = logits_CV.max(axis=1, keepdims=True)
        probs_CV = np.exp((logits_CV - tops_C1).astype(np.float64))
        kinds = int(one.classes_V.max()) + 1
        order_V = np.argsort(one.classes_V, kind="stable")
        bounds_K = np.searchsorted(one.classes_V[order_V], np.arange(kinds))
        held_K = np.diff(np.append(bounds_K, len(order_V))) > 0
        sums_CK = np.zeros((len(logits_CV), kinds))
        sums_CK[:, held_K] = np.add.reduceat(probs_CV[:, order_V], bounds_K[held_K], axis=1)
        best_CK = np.zeros((len(logits_CV), kinds))
        best_CK[:, held_K] = np.maximum.reduceat(probs_CV[:, order_V], bounds_K[held_K], axis=1)
        starts_R = np.searchsorted(one.of_E, np.arange(len(one.from_R)))
        steps_CR = np.add.reduceat(sums_CK[:, one.class_E], starts_R, axis=1)
        live = self._live(steps_CR > 0)
        if not live[0][self.state]:
            raise PatternError(f"no text of this length can match {one.pattern!r} here")
        through_CR = self._through(steps_CR, live)
        weights_CK = np.zeros_like(sums_CK)
        for at, through_R in enumerate(through_CR):
            weights_CK[at] = np.bincount(one.class_E, through_R[one.of_E], minlength=kinds)
        with np.errstate(divide="ignore"):
            return np.log(weights_CK), self._likeliest(probs_CV, best_CK, starts_R, live)

    def _live(self, can_CR: np.ndarray) -> np.ndarray:
        """From which states a match can still be reached, [C + 1, Q]; the first position first."""
        one = self.automaton
        live = np.zeros((len(can_CR) + 1, one.states), dtype=bool)
        live[-1] = self.ends_Q
        for at in range(len(can_CR) - 1, -1, -1):
            live[at][one.from_R[can_CR[at] & live[at + 1][one.to_R]]] = True
        return live

    def _through(self, steps_CR: np.ndarray, live: np.ndarray) -> np.ndarray:
        """How much matching text goes through each pair at each position, but for the step's own probability."""
        one, count = self.automaton, len(steps_CR)
        before = np.zeros((count + 1, one.states))
        before[0][self.state] = 1.0
        for at in range(count):
            now = np.bincount(one.to_R, before[at][one.from_R] * steps_CR[at], minlength=one.states) * live[at + 1]
            before[at + 1] = now / now.sum()
        behind, through_CR = live[-1] * (before[-1] > 0).astype(float), np.zeros_like(steps_CR)
        for at in range(count - 1, -1, -1):
            through_CR[at] = before[at][one.from_R] * behind[one.to_R]
            behind = np.bincount(one.from_R, behind[one.to_R] * steps_CR[at], minlength=one.states) * (before[at] > 0)
            behind = behind / behind.max()
        return through_CR

    def _likeliest(self, probs_CV: np.ndarray, best_CK: np.ndarray, starts_R: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Viterbi: the most probable text that matches."""
        one, count = self.automaton, len(probs_CV)
        with np.errstate(divide="ignore"):
            each_CR = np.log(np.maximum.reduceat(best_CK[:, one.class_E], starts_R, axis=1))
        by_target = np.argsort(one.to_R, kind="stable")
        targets, first = np.unique(one.to_R[by_target], return_index=True)
        score_Q = np.full(one.states, -np.inf)
        score_Q[self.state] = 0.0
        chosen = np.zeros((count, one.states), dtype=np.int64)
        for at in range(count):
            through_R = (score_Q[one.from_R] + each_CR[at])[by_target]
            score_Q = np.full(one.states, -np.inf)
            score_Q[targets] = np.maximum.reduceat(through_R, first)
            hits = np.flatnonzero(through_R == np.repeat(score_Q[targets], np.diff(np.append(first, len(through_R)))))
            chosen[at][one.to_R[by_target[hits[::-1]]]] = by_target[hits[::-1]]
            score_Q[~live[at + 1]] = -np.inf
        state, ids_C = int(np.argmax(np.where(self.ends_Q, score_Q, -np.inf))), np.zeros(count, dtype=np.int64)
        for at in range(count - 1, -1, -1):
            pair = chosen[at][state]
            kinds = one.class_E[one.of_E == pair]
            ids_C[at] = int(np.argmax(np.where(np.isin(one.classes_V, kinds), probs_CV[at], -1.0)))
            state = int(one.from_R[pair])
        return ids_C
