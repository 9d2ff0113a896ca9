"""Regular expressions compiled to DFAs over UTF-8 bytes. A DFA accepts the texts that `re.fullmatch` accepts.

    pattern -> [Python's own parser] -> syntax tree -> [1 NFA] -> [2 subset construction] -> [minimization, dfa.py] -> DFA

Python's parser reads the pattern, so syntax and meaning are those of `re`. Constructs that are not regular, or not supported
(back-references, lookaround, word boundaries), are refused by name. Shapes: Q states.
"""

import re
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from re import _constants as op  # type: ignore[attr-defined]  # not in typeshed
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import numpy as np

from redraft.constraints.budget import Budget
from redraft.constraints.characters import character_ranges, utf8_trie
from redraft.constraints.compiled_cache import CompiledCache
from redraft.constraints.dfa import DFA, minimize
from redraft.constraints.errors import BudgetError, PatternError, shorten

MAX_NFA_STATES = 20_000
MAX_DFA_STATES = 5_000
MAX_DEPTH = 150  # of groups inside one another; the limit of Python's stack is more than twice as deep
GROUPS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|[()]", re.DOTALL)  # brackets, with what hides them: \( and [(]
MAX_REASON = 120  # characters of Python's own error message
CHARACTER_TYPES = int(re.ASCII | re.UNICODE | re.LOCALE)

# Units of the budget (see budget.py for the unit) for each ...
PARSE_WORK = 40  # character of the pattern
NFA_STATE_WORK = 60  # state of the NFA
NFA_EDGE_WORK = 20  # byte edge of the NFA
EDGE_WORK = 4  # edge that a search visits
STORED_WORK = 10  # member of a set of states that is kept
SUBSET_WORK = 4  # member of a subset that is expanded
CLOSURE_WORK = 4  # closure in a union; each of its members takes one more unit
DFA_STATE_WORK = 250  # state of the DFA
DETERMINIZATION = "making the pattern deterministic"
CLOSURES = "the pattern's optional parts"


COMPILED: CompiledCache[DFA] = CompiledCache(64, 32 * 2**20, lambda dfa: dfa.bytes)


def compile_dfa(pattern: str, budget: Budget | None = None) -> DFA:
    """Compiles a pattern to a DFA. It spends from `budget`; a pattern in the cache costs nothing."""
    if not isinstance(pattern, str):
        raise PatternError(f"a pattern is a text, got {shorten(pattern)}")
    dfa = COMPILED.get(pattern)
    if dfa is None:
        dfa = _compile(pattern, budget if budget is not None else Budget())
        COMPILED.put(pattern, dfa)
    return dfa


def _compile(pattern: str, budget: Budget) -> DFA:
    nfa = _NFA(pattern, budget)
    with explain_syntax_errors(pattern):
        tree = parse(pattern, budget)
        start, end = nfa.add_sequence(tree, tree.state.flags, (True, True))
    return minimize(_determinize(nfa, start, end), budget)


def parse(pattern: str, budget: Budget) -> Any:
    """The syntax tree of a pattern."""
    budget.spend_characters(len(pattern), "the pattern")
    budget.spend(len(pattern) * PARSE_WORK, "parsing the pattern")
    _check_depth(pattern)
    with warnings.catch_warnings(), explain_syntax_errors(pattern):
        warnings.simplefilter("ignore")  # Python warns of syntax whose meaning may change in a later version
        return parser.parse(pattern)


@contextmanager
def explain_syntax_errors(pattern: str) -> Iterator[None]:
    """Turns the errors of Python's parser into PatternError."""
    try:
        yield
    except (re.error, OverflowError) as error:
        reason = str(error.args[0])[:MAX_REASON]  # it may repeat a name of the pattern
        raise PatternError(f"the pattern {shorten(pattern)} is not a regular expression: {reason}") from None
    except PatternError:
        raise
    except ValueError:  # Python reads no number with thousands of digits
        raise PatternError(f"the pattern {shorten(pattern)} has a number with too many digits") from None


def _check_depth(pattern: str) -> None:
    """Refuses groups that are nested too deeply, before the parser is: see config/json_text.py for the reason."""
    depth = 0
    for match in GROUPS.finditer(pattern) if pattern.count("(") > MAX_DEPTH else ():
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth > MAX_DEPTH:
            raise PatternError(f"the pattern {shorten(pattern)} is nested too deeply: at most {MAX_DEPTH} groups")


# 1. From the syntax tree to an NFA


class _NFA:
    """A nondeterministic automaton under construction (Thompson's construction).

    `byte_edges[state]` holds (first byte, last byte, next state); `epsilon_edges[state]` holds next states that need no
    byte. Every `add_` method adds states for one part of the pattern and returns the part's first and last state. No edge
    leaves a part's last state.
    """

    def __init__(self, pattern: str, budget: Budget) -> None:
        self.pattern = pattern
        self.budget = budget
        self.byte_edges: list[list[tuple[int, int, int]]] = []
        self.epsilon_edges: list[list[int]] = []
        self.tries: dict[tuple, tuple] = {}  # of character classes, which repeats use again

    def add_state(self) -> int:
        if len(self.byte_edges) >= MAX_NFA_STATES:
            raise BudgetError(
                f"the pattern {shorten(self.pattern)} has more than {MAX_NFA_STATES:,} parts: repeat less often"
            )
        self.budget.spend(NFA_STATE_WORK, "the pattern's NFA")
        self.byte_edges.append([])
        self.epsilon_edges.append([])
        return len(self.byte_edges) - 1

    def add_sequence(
        self, items: Sequence[tuple[Any, Any]], flags: int, at_ends: tuple[bool, bool] = (False, False)
    ) -> tuple[int, int]:
        """Items one after another. `at_ends`: whether the sequence stands at the start and at the end of the pattern."""
        start = end = self.add_state()
        for number, (kind, value) in enumerate(items):
            is_first = at_ends[0] and number == 0
            is_last = at_ends[1] and number == len(items) - 1
            if kind is op.AT:
                self._check_anchor(value, is_first, is_last)
                continue
            if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
                end = self._add_character(end, kind, value, flags)
                continue
            item_start, item_end = self._add_item(kind, value, flags, (is_first, is_last))
            self.epsilon_edges[end].append(item_start)
            end = item_end
        return start, end

    def _add_item(self, kind: Any, value: Any, flags: int, at_ends: tuple[bool, bool]) -> tuple[int, int]:
        if kind is op.SUBPATTERN:
            _, added_flags, removed_flags, items = value
            if added_flags & CHARACTER_TYPES:  # ASCII and UNICODE exclude each other
                flags &= ~CHARACTER_TYPES
            return self.add_sequence(items, (flags | added_flags) & ~removed_flags, at_ends)
        if kind is op.BRANCH:
            start = self.add_state()
            end = self.add_state()
            for branch in value[1]:
                branch_start, branch_end = self.add_sequence(branch, flags, at_ends)
                self.epsilon_edges[start].append(branch_start)
                self.epsilon_edges[branch_end].append(end)
            return start, end
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, items = value
            return self._add_repeat(least, most, items, flags)
        reasons = {
            op.GROUPREF: "refers back to a group",
            op.GROUPREF_EXISTS: "depends on a group",
            op.ASSERT: "looks around",
            op.ASSERT_NOT: "looks around",
        }
        reason = reasons.get(kind, f"uses {kind}")
        raise PatternError(f"the pattern {shorten(self.pattern)} {reason}, which a finite automaton cannot express")

    def _add_repeat(self, least: int, most: Any, items: Sequence, flags: int) -> tuple[int, int]:
        start = end = self.add_state()
        for _ in range(least):
            item_start, item_end = self.add_sequence(items, flags)
            self.epsilon_edges[end].append(item_start)
            end = item_end
        if most is op.MAXREPEAT:
            out = self.add_state()
            if not least:
                item_start, item_end = self.add_sequence(items, flags)
                self.epsilon_edges[end] += [item_start, out]
            self.epsilon_edges[item_end] += [item_start, out]
            return start, out
        out = self.add_state()
        for _ in range(most - least):
            item_start, item_end = self.add_sequence(items, flags)
            self.epsilon_edges[end] += [item_start, out]
            end = item_end
        self.epsilon_edges[end].append(out)
        return start, out

    def _add_character(self, start: int, kind: Any, value: Any, flags: int) -> int:
        """Adds one character as its UTF-8 bytes, from a state that no edge leaves yet. Returns the state behind it."""
        key = (kind, tuple(value) if kind is op.IN else value, flags)
        if key not in self.tries:
            self.tries[key] = utf8_trie(character_ranges(kind, value, flags, self.budget))
        end = self.add_state()
        state_of_node: dict[tuple, int] = {(): end}

        def add_edges(state: int, node: tuple) -> None:
            self.budget.spend(NFA_EDGE_WORK * len(node), "the pattern's NFA")
            self.byte_edges[state] = [(low, high, add_node(rest)) for low, high, rest in node]

        def add_node(node: tuple) -> int:
            if node not in state_of_node:
                state_of_node[node] = self.add_state()
                add_edges(state_of_node[node], node)
            return state_of_node[node]

        add_edges(start, self.tries[key])
        return end

    def _check_anchor(self, anchor: Any, is_first: bool, is_last: bool) -> None:
        """Refuses anchors except ^ at the start and $ at the end, which are implied."""
        starts = anchor in (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
        ends = anchor in (op.AT_END, op.AT_END_STRING)
        if not (starts and is_first) and not (ends and is_last):
            raise PatternError(
                f"the pattern {shorten(self.pattern)} has an anchor inside (^, $ or \\b), which is not supported: remove it"
            )


# 2. From the NFA to a DFA


def _determinize(nfa: _NFA, start: int, end: int) -> DFA:
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


def _epsilon_closures(nfa: _NFA, end: int) -> list[frozenset[int]]:
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
