"""Regular expressions compiled to DFAs over UTF-8 bytes. A DFA accepts the texts that `re.fullmatch` accepts.

    pattern -> [Python's own parser] -> syntax tree -> [1 NFA] -> [2 subset construction] -> [3 minimization] -> DFA

Python's parser reads the pattern, so syntax and meaning are those of `re`. Constructs that are not regular, or not supported
(back-references, lookaround, word boundaries), are refused by name. Shapes: Q states.
"""

import re
import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from re import _constants as op  # type: ignore[attr-defined]  # not in typeshed
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import numpy as np

from redraft.constraints.budget import Budget
from redraft.constraints.compiled_cache import CompiledCache
from redraft.constraints.errors import PatternError, shorten

MAX_NFA_STATES = 20_000
MAX_DFA_STATES = 5_000
MAX_WORK = 3_000_000  # NFA states visited by the subset construction: a second or two
MAX_MINIMIZED = 512  # a DFA with more states keeps its equivalent states
CHARACTER_TYPES = int(re.ASCII | re.UNICODE | re.LOCALE)
LAST_CODE_POINT = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]  # of code points or of bytes, both ends included, in ascending order


class DFA(NamedTuple):
    """A deterministic finite automaton over bytes. State 0 is dead: no transition leaves it."""

    transitions_Q256: np.ndarray  # the next state for each state and byte
    accepting_Q: np.ndarray  # whether a match may end in the state
    start: int

    @property
    def bytes(self) -> int:
        """The size of the tables."""
        return self.transitions_Q256.nbytes + self.accepting_Q.nbytes


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
    nfa = _NFA(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of syntax whose meaning may change in a later version
            tree = parser.parse(pattern)
        start, end = nfa.add_sequence(tree, tree.state.flags, (True, True))
    except (re.error, OverflowError) as error:
        raise PatternError(f"the pattern {shorten(pattern)} is not a regular expression: {error}") from None
    except RecursionError:
        raise PatternError(f"the pattern {shorten(pattern)} is nested too deeply") from None
    return minimize(_determinize(nfa, start, end))


# 1. From the syntax tree to an NFA


class _NFA:
    """A nondeterministic automaton under construction (Thompson's construction).

    `byte_edges[state]` holds (first byte, last byte, next state); `epsilon_edges[state]` holds next states that need no
    byte. Every `add_` method adds states for one part of the pattern and returns the part's first and last state.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.byte_edges: list[list[tuple[int, int, int]]] = []
        self.epsilon_edges: list[list[int]] = []

    def add_state(self) -> int:
        if len(self.byte_edges) >= MAX_NFA_STATES:
            raise PatternError(
                f"the pattern {shorten(self.pattern)} has more than {MAX_NFA_STATES:,} parts: repeat less often"
            )
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
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self._add_character(character_ranges(kind, value, flags))
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
            item_start, item_end = self.add_sequence(items, flags)
            out = self.add_state()
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

    def _add_character(self, ranges: Ranges) -> tuple[int, int]:
        """One character out of these ranges, as its UTF-8 bytes."""
        start = self.add_state()
        end = self.add_state()
        state_of_node: dict[tuple, int] = {(): end}

        def add_node(node: tuple) -> int:
            if node not in state_of_node:
                state_of_node[node] = self.add_state()
                self.byte_edges[state_of_node[node]] = [(low, high, add_node(rest)) for low, high, rest in node]
            return state_of_node[node]

        self.byte_edges[start] = [(low, high, add_node(rest)) for low, high, rest in utf8_trie(ranges)]
        return start, end

    def _check_anchor(self, anchor: Any, is_first: bool, is_last: bool) -> None:
        """Refuses anchors except ^ at the start and $ at the end, which are implied."""
        starts = anchor in (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
        ends = anchor in (op.AT_END, op.AT_END_STRING)
        if not (starts and is_first) and not (ends and is_last):
            raise PatternError(
                f"the pattern {shorten(self.pattern)} has an anchor inside (^, $ or \\b), which is not supported: remove it"
            )


def character_ranges(kind: Any, value: Any, flags: int) -> Ranges:
    """The code points that one item of the syntax tree matches."""
    if kind is op.ANY:
        return merge_ranges([(0, LAST_CODE_POINT)]) if flags & re.DOTALL else complement([(10, 10)])
    if kind is op.LITERAL:
        return merge_ranges((code, code) for code in _case_variants(value, flags))
    is_negated = kind is op.NOT_LITERAL or (kind is op.IN and value[0][0] is op.NEGATE)
    if flags & re.IGNORECASE and is_negated:
        raise PatternError("a negated character class cannot be matched without regard to case: write both cases")
    if kind is op.NOT_LITERAL:
        return complement((code, code) for code in _case_variants(value, flags))
    ranges: list[tuple[int, int]] = []
    for member, detail in value:
        if member is op.LITERAL:
            ranges += [(code, code) for code in _case_variants(detail, flags)]
        elif member is op.RANGE:
            low, high = detail
            ranges.append((low, high))
            if flags & re.IGNORECASE and high - low < 0x1000:  # a larger range keeps only the cases that it contains
                ranges += [(code, code) for inner in range(low, high + 1) for code in _case_variants(inner, flags)]
        elif member is op.CATEGORY:
            ranges += category_ranges(detail, bool(flags & re.ASCII))
    return complement(ranges) if is_negated else merge_ranges(ranges)


def _case_variants(code: int, flags: int) -> list[int]:
    """A character, and under IGNORECASE the other cases that `re` takes for it."""
    if not flags & re.IGNORECASE:
        return [code]
    character = chr(code)
    variants = {character, character.lower(), character.upper(), character.title(), character.swapcase()}
    match = re.compile(re.escape(character), flags & (re.IGNORECASE | re.ASCII)).fullmatch
    return sorted(ord(variant) for variant in variants if len(variant) == 1 and match(variant))


@lru_cache(maxsize=16)
def category_ranges(category: Any, ascii_only: bool) -> Ranges:
    r"""The code points of \d, \w, \s, \D, \W or \S: `re` itself finds their runs in a text of all characters."""
    escapes = {
        op.CATEGORY_DIGIT: r"\d",
        op.CATEGORY_NOT_DIGIT: r"\D",
        op.CATEGORY_SPACE: r"\s",
        op.CATEGORY_NOT_SPACE: r"\S",
        op.CATEGORY_WORD: r"\w",
        op.CATEGORY_NOT_WORD: r"\W",
    }
    runs = re.compile(f"{escapes[category]}+", re.ASCII if ascii_only else re.UNICODE)
    all_characters = "".join(map(chr, range(LAST_CODE_POINT + 1)))
    return merge_ranges((run.start(), run.end() - 1) for run in runs.finditer(all_characters))


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges in ascending order, overlaps merged, surrogates (which are no characters) removed."""
    merged: list[list[int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    characters: list[tuple[int, int]] = []
    for low, high in merged:
        characters.append((low, min(high, 0xD7FF)))
        characters.append((max(low, 0xE000), high))
    return tuple((low, high) for low, high in characters if low <= high)


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All characters outside these ranges."""
    gaps = []
    at = 0
    for low, high in merge_ranges(ranges):
        gaps.append((at, low - 1))
        at = high + 1
    gaps.append((at, LAST_CODE_POINT))
    return merge_ranges((low, high) for low, high in gaps if low <= high)


@lru_cache(maxsize=256)
def utf8_trie(ranges: Ranges) -> tuple:
    """The UTF-8 encodings of these code points as a trie: (first byte, last byte, subtrie) per edge; () is a leaf."""
    sequences: list[list[tuple[int, int]]] = []
    for low, high in ranges:
        _split_into_byte_ranges(low, high, sequences)
    return _build_trie(sequences)


def _split_into_byte_ranges(low: int, high: int, sequences: list[list[tuple[int, int]]]) -> None:
    """Splits code points into sequences of byte ranges; every combination within a sequence encodes one of them."""
    for limit in (0x7F, 0x7FF, 0xFFFF):  # the last code points of 1, 2 and 3 bytes
        if low <= limit < high:
            _split_into_byte_ranges(low, limit, sequences)
            _split_into_byte_ranges(limit + 1, high, sequences)
            return
    first = chr(low).encode()
    last = chr(high).encode()
    for count in range(1, len(first)):
        mask = (1 << (6 * count)) - 1  # the bits of the last `count` bytes
        if low & ~mask != high & ~mask:
            if low & mask:
                _split_into_byte_ranges(low, low | mask, sequences)
                _split_into_byte_ranges((low | mask) + 1, high, sequences)
                return
            if high & mask != mask:
                _split_into_byte_ranges(low, (high & ~mask) - 1, sequences)
                _split_into_byte_ranges(high & ~mask, high, sequences)
                return
    sequences.append(list(zip(first, last, strict=True)))


def _build_trie(sequences: Sequence[Sequence[tuple[int, int]]]) -> tuple:
    """Sequences with the same first range share it. First ranges are equal or disjoint."""
    by_first: dict[tuple[int, int], list] = {}
    for sequence in sequences:
        by_first.setdefault(sequence[0], []).append(sequence[1:])
    edges: list[list] = []
    for (low, high), rests in sorted(by_first.items()):
        subtrie = _build_trie([rest for rest in rests if rest]) if rests[0] else ()
        if edges and edges[-1][2] == subtrie and edges[-1][1] + 1 == low:
            edges[-1][1] = high
        else:
            edges.append([low, high, subtrie])
    return tuple(map(tuple, edges))


# 2. From the NFA to a DFA


def _determinize(nfa: _NFA, start: int, end: int) -> DFA:
    """Subset construction: each DFA state is the set of NFA states that can be active at once."""
    closures: list[frozenset[int]] = []
    work = 0
    for state in range(len(nfa.byte_edges)):
        closure = _epsilon_closure(nfa.epsilon_edges, state)
        work = _check_work(work + len(closure), nfa.pattern)
        closures.append(frozenset(member for member in closure if nfa.byte_edges[member] or member == end))
    if not closures[start]:  # the pattern matches no text at all
        return DFA(np.zeros((2, 256), dtype=np.int32), np.zeros(2, dtype=bool), 1)
    numbers: dict[frozenset[int], int] = {frozenset(): 0, closures[start]: 1}
    rows = [np.zeros(256, dtype=np.int32)]
    waiting = [closures[start]]
    while waiting:
        subset = waiting.pop(0)
        edges = [edge for state in subset for edge in nfa.byte_edges[state]]
        cuts = sorted({0, *(low for low, _, _ in edges), *(high + 1 for _, high, _ in edges)})
        row = np.zeros(256, dtype=np.int32)
        for low, high in zip(cuts, [*cuts[1:], 256], strict=True):
            target = frozenset().union(*(closures[state] for first, last, state in edges if first <= low <= last))
            work = _check_work(work + len(target), nfa.pattern)
            if target and target not in numbers:
                if len(numbers) > MAX_DFA_STATES:
                    raise PatternError(f"the pattern {shorten(nfa.pattern)} has more than {MAX_DFA_STATES:,} states")
                numbers[target] = len(numbers)
                waiting.append(target)
            row[low:high] = numbers[target]
        rows.append(row)
    return DFA(np.stack(rows), np.array([end in subset for subset in numbers]), 1)


def _check_work(work: int, pattern: str) -> int:
    if work > MAX_WORK:
        raise PatternError(
            f"the pattern {shorten(pattern)} is too intricate: repeat less often, or fewer things inside repeats"
        )
    return work


def _epsilon_closure(epsilon_edges: Sequence[Sequence[int]], start: int) -> set[int]:
    """All states that are reachable without reading a byte."""
    closure = {start}
    waiting = [start]
    while waiting:
        for state in epsilon_edges[waiting.pop()]:
            if state not in closure:
                closure.add(state)
                waiting.append(state)
    return closure


# 3. Minimization


def minimize(dfa: DFA) -> DFA:
    """Merges states that lead to no match into state 0, and merges equivalent states (Moore's algorithm, by hashes).

    A DFA with more than MAX_MINIMIZED states keeps its equivalent states: finding them takes as many rounds as the longest
    match has bytes.
    """
    accepting_Q = dfa.accepting_Q
    states = len(accepting_Q)
    edge_keys = np.unique(np.arange(states)[:, None] * states + dfa.transitions_Q256)  # one number per (from, to)
    from_R, to_R = np.divmod(edge_keys, states)
    live_Q = accepting_Q.copy()
    count = -1
    while live_Q.sum() > count:
        count = live_Q.sum()
        live_Q[from_R[live_Q[to_R]]] = True
    next_Q256 = np.where(live_Q[dfa.transitions_Q256], dfa.transitions_Q256, 0)
    class_Q = np.where(live_Q, np.arange(states), 0)
    if states <= MAX_MINIMIZED:
        class_Q = _find_equivalent_states(next_Q256, accepting_Q)
    _, first, class_Q = np.unique(class_Q, return_index=True, return_inverse=True)
    class_Q = class_Q.ravel()
    order = np.argsort(np.arange(len(first)) != class_Q[0], kind="stable")  # the dead state first
    rank = np.empty(len(first), dtype=np.int32)
    rank[order] = np.arange(len(first))
    return DFA(rank[class_Q[next_Q256[first[order]]]], accepting_Q[first[order]], int(rank[class_Q[dfa.start]]))


def _find_equivalent_states(next_Q256: np.ndarray, accepting_Q: np.ndarray) -> np.ndarray:
    """Numbers the states so that equivalent states have the same number."""
    class_Q = accepting_Q.astype(np.int64)
    factors = np.random.default_rng(0).integers(1, 2**63, size=(MAX_MINIMIZED + 257,), dtype=np.uint64)
    byte_factors = factors[:256]
    class_factors = factors[257:]
    while True:
        hash_Q = (class_factors[class_Q[next_Q256]] * byte_factors).sum(axis=1, dtype=np.uint64)
        hash_Q += factors[256] * class_Q.astype(np.uint64)
        refined_Q = np.unique(hash_Q, return_inverse=True)[1].ravel()
        if refined_Q.max() <= class_Q.max():
            return refined_Q
        class_Q = refined_Q
