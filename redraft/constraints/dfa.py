"""DFA: a deterministic finite automaton over bytes, and its minimization.

Shapes: Q states, B bytes that the automaton tells apart, T transitions (a state and one of these bytes).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from redraft.constraints.budget import Budget
from redraft.constraints.errors import BudgetError
from redraft.constraints.graph import UNREACHABLE, distances_to, expand_segments

# Units of the budget (see budget.py for the unit) for each ...
TABLE_WORK = 200  # state: its 256 transitions are copied and sorted
PRODUCT_WORK = 400  # state of a product of two automata
MAX_PRODUCT_STATES = 5_000
ROUND_WORK = 800  # round of the minimization
SPLIT_WORK = 30  # state that gets a new class
TRANSITIONS_PER_UNIT = 4  # transitions into such states


@dataclass(frozen=True, eq=False)
class DFA:
    """A deterministic finite automaton over bytes. State 0 is dead: no transition leaves it."""

    transitions_Q256: np.ndarray  # the next state for each state and byte
    accepting_Q: np.ndarray  # whether a match may end in the state
    start: int

    @property
    def is_empty(self) -> bool:
        """It accepts nothing. Only for minimized automata."""
        return not self.accepting_Q.any()

    @cached_property
    def byte_ranges(self) -> list[list[tuple[int, int, int]]]:
        """The transitions of each state: first byte, last byte, next state."""
        rows = []
        for row_256 in self.transitions_Q256:
            cuts = np.flatnonzero(np.diff(row_256, prepend=-1, append=-1))
            pieces = zip(cuts[:-1].tolist(), (cuts[1:] - 1).tolist(), row_256[cuts[:-1]].tolist(), strict=True)
            rows.append([(low, high, target) for low, high, target in pieces if target])
        return rows

    def accepts(self, text: bytes) -> bool:
        """Whether the whole text is a match."""
        state = self.start
        for byte in text:
            state = int(self.transitions_Q256[state, byte])
        return bool(self.accepting_Q[state])

    @property
    def bytes(self) -> int:
        """The size of the tables."""
        return self.transitions_Q256.nbytes + self.accepting_Q.nbytes


def intersect(one: DFA, two: DFA, budget: Budget) -> DFA:
    """The texts that both accept."""
    return _combine(one, two, budget, keeps_dead=False)


def subtract(one: DFA, two: DFA, budget: Budget) -> DFA:
    """The texts that the first one accepts and the second one does not."""
    return _combine(one, two, budget, keeps_dead=True)


def _combine(one: DFA, two: DFA, budget: Budget, *, keeps_dead: bool) -> DFA:
    """The product of two automata. `keeps_dead`: it goes on where the second one is dead, and takes its rejections."""
    numbers = {(0, 0): 0, (one.start, two.start): 1}
    rows = [np.zeros(256, dtype=np.int32)]
    accepting = [False]
    waiting = [(one.start, two.start)]
    for pair in waiting:  # grows
        budget.spend(PRODUCT_WORK, "combining patterns")
        firsts = one.transitions_Q256[pair[0]]
        seconds = two.transitions_Q256[pair[1]]
        width = len(two.accepting_Q)
        keys, inverse = np.unique(firsts.astype(np.int64) * width + seconds, return_inverse=True)
        targets = []
        for first, second in zip(*np.divmod(keys, width), strict=True):
            target = (int(first), int(second))
            if not target[0] or not (target[1] or keeps_dead):
                target = (0, 0)
            if target not in numbers:
                if len(numbers) > MAX_PRODUCT_STATES:
                    raise BudgetError(
                        f"patterns that apply together have more than {MAX_PRODUCT_STATES:,} states: make them simpler"
                    )
                numbers[target] = len(numbers)
                waiting.append(target)
            targets.append(numbers[target])
        rows.append(np.array(targets, dtype=np.int32)[inverse.ravel()])
        accepting.append(bool(one.accepting_Q[pair[0]] and bool(two.accepting_Q[pair[1]]) != keeps_dead))
    return minimize(DFA(np.stack(rows), np.array(accepting), 1), budget)


def minimize(dfa: DFA, budget: Budget) -> DFA:
    """Merges states that lead to no match into state 0, and merges equivalent states."""
    accepting_Q = dfa.accepting_Q
    states = len(accepting_Q)
    budget.spend(states * TABLE_WORK, "the pattern's table of states")
    columns = set(map(bytes, np.ascontiguousarray(dfa.transitions_Q256.T)))
    next_QB = np.stack([np.frombuffer(column, dtype=np.int32) for column in sorted(columns)], axis=1)
    pair_keys = np.unique(np.arange(states)[:, None] * states + next_QB)  # one number per (from, to)
    live_Q = distances_to(accepting_Q, *np.divmod(pair_keys, states)) < UNREACHABLE
    class_Q = _find_equivalent_states(np.where(live_Q[next_QB], next_QB, 0), accepting_Q, budget)
    _, first, class_Q = np.unique(class_Q, return_index=True, return_inverse=True)
    class_Q = class_Q.ravel()
    order = np.argsort(np.arange(len(first)) != class_Q[0], kind="stable")  # the dead state first
    rank = np.empty(len(first), dtype=np.int32)
    rank[order] = np.arange(len(first))
    rank_Q = rank[class_Q]
    return DFA(rank_Q[dfa.transitions_Q256[first[order]]], accepting_Q[first[order]], int(rank_Q[dfa.start]))


def _find_equivalent_states(next_QB: np.ndarray, accepting_Q: np.ndarray, budget: Budget) -> np.ndarray:
    """Numbers the states so that equivalent states have the same number.

    Moore's algorithm: states are in one class until their transitions lead to different classes. A 64-bit hash stands for
    the classes of a state's transitions. It is a sum, so a round updates only the states with a transition to a state that
    changed its class.
    """
    states, width = next_QB.shape
    rng = np.random.default_rng(0)
    class_factors = rng.integers(0, 2**63, size=(states + 2,), dtype=np.uint64)
    byte_factors = rng.integers(0, 2**63, size=(width,), dtype=np.uint64)
    order_T = np.argsort(next_QB, axis=None, kind="stable")  # transitions by their target
    begins_Q = np.searchsorted(next_QB.ravel()[order_T], np.arange(states + 1))
    sources_T = (order_T // width).astype(np.int32)
    factors_T = byte_factors[order_T % width]
    class_Q = accepting_Q.astype(np.int64)
    hash_Q = np.add.reduce(class_factors[class_Q[next_QB]] * byte_factors, axis=1)
    hashes = [int(hash_Q[class_Q == number][:1].sum()) for number in (0, 1)]  # of the states that are in each class to stay
    sizes = np.bincount(class_Q, minlength=2).tolist()
    touched = np.arange(states)
    while len(touched):
        budget.spend(ROUND_WORK + SPLIT_WORK * len(touched), "merging the pattern's equivalent states")
        moved, old = _split_classes(touched, class_Q, hash_Q, hashes, sizes)
        transitions = expand_segments(begins_Q[moved], begins_Q[moved + 1])
        budget.spend(len(transitions) // TRANSITIONS_PER_UNIT, "merging the pattern's equivalent states")
        change = class_factors[class_Q[moved]] - class_factors[old]
        change_T = np.repeat(change, begins_Q[moved + 1] - begins_Q[moved]) * factors_T[transitions]
        np.add.at(hash_Q, sources_T[transitions], change_T)
        touched = np.unique(sources_T[transitions])
    return class_Q


def _split_classes(
    touched: np.ndarray, class_Q: np.ndarray, hash_Q: np.ndarray, hashes: list[int], sizes: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Gives new classes to the states whose hash differs from that of most states of their class.

    The untouched states of a class have the hash of the class. Returns the states with new classes, and their old classes.
    Only the smaller parts of a class get a new one, so a state gets few of them.
    """
    groups: dict[int, dict[int, np.ndarray | list[int]]] = {}  # class -> hash -> states
    for state, number, value in zip(touched.tolist(), class_Q[touched].tolist(), hash_Q[touched].tolist(), strict=True):
        if value != hashes[number]:
            groups.setdefault(number, {}).setdefault(value, []).append(state)  # type: ignore[union-attr]
    moved: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    old: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
    for number, parts in groups.items():
        largest = max(parts, key=lambda value: len(parts[value]))
        rest = sizes[number] - sum(map(len, parts.values()))
        if rest < len(parts[largest]):  # the largest part keeps the class
            if rest:
                parts[hashes[number]] = np.flatnonzero((class_Q == number) & (hash_Q == np.uint64(hashes[number])))
            hashes[number] = largest
            del parts[largest]
        for value, members in parts.items():
            class_Q[members] = len(sizes)
            moved.append(np.asarray(members))
            old.append(np.full(len(members), number))
            sizes[number] -= len(members)
            sizes.append(len(members))
            hashes.append(value)
    return np.concatenate(moved), np.concatenate(old)
