"""NFA: a nondeterministic automaton over bytes under construction, and the subset construction that makes a DFA of it.

A builder (of a regular expression, a JSON schema, a structure) adds states and edges for one part after another. Every
`add_` method returns the last state of its part. Shapes: Q states.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from redraft.constraints.budget import Budget
from redraft.constraints.dfa import DFA
from redraft.constraints.errors import BudgetError, shorten

MAX_NFA_STATES = 40_000
MAX_DFA_STATES = 10_000

# Units of the budget (see budget.py for the unit) for each ...
NFA_STATE_WORK = 60  # state of the NFA
NFA_EDGE_WORK = 20  # byte edge of the NFA
EDGE_WORK = 4  # edge that a search visits
STORED_WORK = 10  # member of a set of states that is kept
SUBSET_WORK = 4  # member of a subset that is expanded
CLOSURE_WORK = 4  # closure in a union; each of its members takes one more unit
DFA_STATE_WORK = 250  # state of the DFA
DETERMINIZATION = "making the pattern deterministic"
CLOSURES = "the pattern's optional parts"


class NFA:
    """`byte_edges[state]` holds (first byte, last byte, next state), `epsilon_edges[state]` next states without a byte."""

    def __init__(self, pattern: str, budget: Budget) -> None:
        self.pattern = pattern  # for error messages
        self.budget = budget
        self.byte_edges: list[list[tuple[int, int, int]]] = []
        self.epsilon_edges: list[list[int]] = []

    def add_state(self) -> int:
        """A new state without edges."""
        if len(self.byte_edges) >= MAX_NFA_STATES:
            raise BudgetError(
                f"the pattern {shorten(self.pattern)} has more than {MAX_NFA_STATES:,} parts: repeat less often"
            )
        self.budget.spend(NFA_STATE_WORK, "the pattern's NFA")
        self.byte_edges.append([])
        self.epsilon_edges.append([])
        return len(self.byte_edges) - 1

    def link(self, start: int, end: int) -> None:
        """An edge that needs no byte."""
        self.epsilon_edges[start].append(end)

    def add_text(self, start: int, text: bytes) -> int:
        """Exactly these bytes."""
        for byte in text:
            end = self.add_state()
            self.budget.spend(NFA_EDGE_WORK, "the pattern's NFA")
            self.byte_edges[start].append((byte, byte, end))
            start = end
        return start

    def add_trie(self, start: int, trie: tuple) -> int:
        """One character of those whose bytes are in a trie: (first byte, last byte, subtrie) per edge; () is a leaf."""
        end = self.add_state()
        state_of_node: dict[tuple, int] = {(): end}

        def add_edges(state: int, node: tuple) -> None:
            self.budget.spend(NFA_EDGE_WORK * len(node), "the pattern's NFA")
            self.byte_edges[state] += [(low, high, add_node(rest)) for low, high, rest in node]

        def add_node(node: tuple) -> int:
            if node not in state_of_node:
                state_of_node[node] = self.add_state()
                add_edges(state_of_node[node], node)
            return state_of_node[node]

        add_edges(start, trie)
        return end

    def add_dfa(self, start: int, dfa: DFA) -> int:
        """A text that a DFA accepts."""
        end = self.add_state()
        states = {0: -1, dfa.start: self.add_state()}
        for state in range(1, len(dfa.accepting_Q)):
            if state not in states:
                states[state] = self.add_state()
        for state, edges in enumerate(dfa.byte_ranges):
            if state:
                self.budget.spend(NFA_EDGE_WORK * len(edges), "the pattern's NFA")
                self.byte_edges[states[state]] += [(low, high, states[target]) for low, high, target in edges]
                if dfa.accepting_Q[state]:
                    self.link(states[state], end)
        self.link(start, states[dfa.start])
        return end


def determinize(nfa: NFA, start: int, end: int) -> DFA:
    """Subset construction: each DFA state is the set of NFA states that can be active at once."""
    closures = _epsilon_closures(nfa, end)
    if not closures[start]:  # the pattern matches no text at all
        return DFA(np.zeros((2, 256), dtype=np.int32), np.zeros(2, dtype=bool), 1)
    numbers: dict[frozenset[int], int] = {frozenset(): 0, closures[start]: 1}
    rows = [np.zeros(256, dtype=np.int32)]
    waiting = deque([closures[start]])
    while waiting:
        subset = waiting.popleft()
        nfa.budget.spend(DFA_STATE_WORK + SUBSET_WORK * len(subset), DETERMINIZATION)
        edges = [edge for state in subset for edge in nfa.byte_edges[state]]
        row = np.zeros(256, dtype=np.int32)
        for low, high, next_states in _split_by_byte(edges, nfa.budget):
            nfa.budget.spend(sum(CLOSURE_WORK + len(closures[state]) for state in next_states), DETERMINIZATION)
            target = frozenset().union(*(closures[state] for state in next_states))
            if target and target not in numbers:
                if len(numbers) > MAX_DFA_STATES:
                    raise BudgetError(
                        f"the pattern {shorten(nfa.pattern)} has more than {MAX_DFA_STATES:,} states: repeat less often"
                    )
                nfa.budget.spend(STORED_WORK * len(target), DETERMINIZATION)
                numbers[target] = len(numbers)
                waiting.append(target)
            row[low:high] = numbers[target]
        rows.append(row)
    return DFA(np.stack(rows), np.array([end in subset for subset in numbers]), 1)


def _split_by_byte(edges: Sequence[tuple[int, int, int]], budget: Budget) -> list[tuple[int, int, set[int]]]:
    """Ranges of bytes (the first, and the one behind the last), and the next states of each range."""
    budget.spend(EDGE_WORK * len(edges), DETERMINIZATION)
    by_range: dict[tuple[int, int], set[int]] = {}
    for low, high, state in edges:
        by_range.setdefault((low, high + 1), set()).add(state)
    cuts = sorted({cut for pair in by_range for cut in pair})
    index_of_cut = {cut: index for index, cut in enumerate(cuts)}
    next_states: list[set[int]] = [set() for _ in cuts]
    for (low, high), states in by_range.items():
        covered = range(index_of_cut[low], index_of_cut[high])
        budget.spend(EDGE_WORK * len(covered) * len(states), DETERMINIZATION)
        for index in covered:
            next_states[index] |= states
    return [(low, high, states) for low, high, states in zip(cuts, cuts[1:], next_states, strict=False) if states]


def _epsilon_closures(nfa: NFA, end: int) -> list[frozenset[int]]:
    """The states with edges that each state reaches without reading a byte; `end` counts as one of them."""
    closures = []
    for start in range(len(nfa.byte_edges)):
        closure = {start}
        waiting = [start]
        while waiting:
            next_states = nfa.epsilon_edges[waiting.pop()]
            nfa.budget.spend(EDGE_WORK * (1 + len(next_states)), CLOSURES)
            waiting += [state for state in next_states if state not in closure]
            closure.update(next_states)
        nfa.budget.spend(STORED_WORK * len(closure), CLOSURES)
        closures.append(frozenset([state for state in closure if nfa.byte_edges[state] or state == end]))
    return closures
