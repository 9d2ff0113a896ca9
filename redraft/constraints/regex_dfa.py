"""From a regular expression to a table over bytes: what `re.fullmatch` accepts, as UTF-8.

    pattern -> [Python's own parser] -> tree -> [1 parts with byte edges] -> [2 sets of parts] -> [3 fewest states] -> table

Python's parser reads the pattern, so it means here what it means there. What no table can hold (groups referred to, looking
around, boundaries of words) is refused by name.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from re import _constants as op
from re import _parser as parser
from typing import Any

import numpy as np

MOST_PARTS, MOST_STATES = 20_000, 5_000
MOST_WORK = 3_000_000  # parts looked at while their sets are found: a second or two
FEW = 512  # states among which those that do alike are looked for
TYPES = int(re.ASCII | re.UNICODE | re.LOCALE)
LAST = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]  # of code points or of bytes, both ends included, in order


class PatternError(ValueError):
    """A pattern that cannot be obeyed; the message says why."""


@lru_cache(maxsize=64)
def compile_dfa(pattern: str) -> tuple[np.ndarray, np.ndarray, int]:
    """next_Q256, the state each byte leads to; ends_Q, whether a match may end there; and the state to begin in.

    State 0 is the one that nothing leads out of.
    """
    if not isinstance(pattern, str):
        raise PatternError(f"a pattern is a text, got {pattern!r}")
    parts = _Parts(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what may mean something else some day
            tree = parser.parse(pattern)
        begin, end = parts.of(tree, tree.state.flags, (True, True))
    except (re.error, OverflowError) as error:
        raise PatternError(f"the pattern {_short(pattern)} is not a regular expression: {error}") from None
    except RecursionError:
        raise PatternError(f"the pattern {_short(pattern)} is nested too deeply") from None
    return fewest(*_sets(parts, begin, end))


# 1. Parts


class _Parts:
    """The parts of a pattern, with edges over bytes and edges over nothing between them."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.bytes, self.free = pattern, [], []

    def new(self) -> int:
        if len(self.bytes) >= MOST_PARTS:
            raise PatternError(f"the pattern {_short(self.pattern)} has more than {MOST_PARTS:,} parts: repeat less often")
        self.bytes.append([])
        self.free.append([])
        return len(self.bytes) - 1

    def of(self, items: Sequence[tuple[Any, Any]], flags: int, outer: tuple[bool, bool] = (False, False)) -> tuple[int, int]:
        """Items one after another: where they begin and end. `outer`: whether the pattern begins and ends with them."""
        begin = end = self.new()
        for number, (kind, value) in enumerate(items):
            edges = outer[0] and number == 0, outer[1] and number == len(items) - 1
            if kind is op.AT:
                self._anchor(value, *edges)
                continue
            first, last = self._item(kind, value, flags, edges)
            self.free[end].append(first)
            end = last
        return begin, end

    def _item(self, kind: Any, value: Any, flags: int, edges: tuple[bool, bool]) -> tuple[int, int]:
        if kind is op.SUBPATTERN:
            _, more, less, items = value
            if more & TYPES:  # one kind of characters takes the other's place
                flags &= ~TYPES
            return self.of(items, (flags | more) & ~less, edges)
        if kind is op.BRANCH:
            begin, end = self.new(), self.new()
            for branch in value[1]:
                first, last = self.of(branch, flags, edges)
                self.free[begin].append(first)
                self.free[last].append(end)
            return begin, end
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeat(*value, flags)
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            return self._one_of(characters(kind, value, flags))
        names = {
            op.GROUPREF: "refers back to a group",
            op.GROUPREF_EXISTS: "depends on a group",
            op.ASSERT: "looks around",
            op.ASSERT_NOT: "looks around",
        }
        raise PatternError(f"the pattern {self.pattern!r} {names.get(kind, f'uses {kind}')}, which cannot be held on a page")

    def _repeat(self, least: int, most: Any, items: Sequence, flags: int) -> tuple[int, int]:
        begin = end = self.new()
        for _ in range(least):
            first, last = self.of(items, flags)
            self.free[end].append(first)
            end = last
        if most is op.MAXREPEAT:
            first, last = self.of(items, flags)
            out = self.new()
            for a, b in ((end, first), (end, out), (last, first), (last, out)):
                self.free[a].append(b)
            return begin, out
        out = self.new()
        for _ in range(most - least):
            first, last = self.of(items, flags)
            self.free[end] += [first, out]
            end = last
        self.free[end].append(out)
        return begin, out

    def _one_of(self, ranges: Ranges) -> tuple[int, int]:
        begin, end = self.new(), self.new()
        made = {(): end}

        def place(node: tuple) -> int:
            if node not in made:
                made[node] = self.new()
                self.bytes[made[node]] = [(low, high, place(rest)) for low, high, rest in node]
            return made[node]

        self.bytes[begin] = [(low, high, place(rest)) for low, high, rest in utf8(ranges)]
        return begin, end

    def _anchor(self, where: Any, first: bool, last: bool) -> None:
        begins, ends = (op.AT_BEGINNING, op.AT_BEGINNING_STRING), (op.AT_END, op.AT_END_STRING)
        if not (where in begins and first) and not (where in ends and last):
            raise PatternError(
                f"the pattern {self.pattern!r} has an anchor inside (^, $ or \\b), which cannot be held on a page"
            )


def characters(kind: Any, value: Any, flags: int) -> Ranges:
    """The code points that an item stands for."""
    if kind is op.ANY:
        return joined([(0, LAST)]) if flags & re.DOTALL else minus([(10, 10)])
    if kind is op.LITERAL:
        return joined((c, c) for c in _cases(value, flags))
    if flags & re.IGNORECASE and (kind is op.NOT_LITERAL or (kind is op.IN and value[0][0] is op.NEGATE)):
        raise PatternError("a class of all but some characters cannot be held without regard to case: write both cases")
    if kind is op.NOT_LITERAL:
        return minus((c, c) for c in _cases(value, flags))
    ranges: list[tuple[int, int]] = []
    for what, detail in value:
        if what is op.LITERAL:
            ranges += [(c, c) for c in _cases(detail, flags)]
        elif what is op.RANGE:
            ranges += [detail]
            if flags & re.IGNORECASE and detail[1] - detail[0] < 0x1000:  # of a larger one, what it says itself
                ranges += [(c, c) for one in range(detail[0], detail[1] + 1) for c in _cases(one, flags)]
        elif what is op.CATEGORY:
            ranges += category(detail, bool(flags & re.ASCII))
    return minus(ranges) if value[0][0] is op.NEGATE else joined(ranges)


def _cases(code: int, flags: int) -> list[int]:
    """A character, and under IGNORECASE its other cases."""
    if not flags & re.IGNORECASE:
        return [code]
    one = chr(code)
    forms = {one, one.lower(), one.upper(), one.title(), one.swapcase()}
    match = re.compile(re.escape(one), flags & (re.IGNORECASE | re.ASCII)).fullmatch
    return sorted(ord(form) for form in forms if len(form) == 1 and match(form))


@lru_cache(maxsize=16)
def category(name: Any, ascii_only: bool) -> Ranges:
    """What backslash and d, w, s (or D, W, S) stand for."""
    tests: dict[Any, Callable[[str], bool]] = {
        op.CATEGORY_DIGIT: str.isdecimal,
        op.CATEGORY_SPACE: str.isspace,
        op.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    }
    opposite = {op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT, op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE}
    opposite[op.CATEGORY_NOT_WORD] = op.CATEGORY_WORD
    if name in opposite:
        return minus(category(opposite[name], ascii_only))
    if ascii_only:
        letters = {op.CATEGORY_DIGIT: "0123456789", op.CATEGORY_SPACE: " \t\n\r\f\v"}
        test = letters[name].__contains__ if name in letters else lambda c: (c.isalnum() or c == "_") and c.isascii()
        return joined((c, c) for c in range(128) if test(chr(c)))
    return joined((c, c) for c in range(LAST + 1) if tests[name](chr(c)))


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """In order, without overlap, without the code points that are no characters."""
    found: list[list[int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1][1] = max(found[-1][1], high)
        else:
            found.append([low, high])
    whole = []
    for low, high in found:
        whole += [(low, min(high, 0xD7FF)), (max(low, 0xE000), high)] if low < 0xE000 and high > 0xD7FF else [(low, high)]
    return tuple((low, high) for low, high in whole if low <= high and not 0xD800 <= low <= 0xDFFF)


def minus(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All characters but these."""
    found, at = [], 0
    for low, high in joined(ranges):
        found.append((at, low - 1))
        at = high + 1
    return joined((low, high) for low, high in [*found, (at, LAST)] if low <= high)


@lru_cache(maxsize=256)
def utf8(ranges: Ranges) -> tuple:
    """The bytes of these code points as a tree: (first, last, what follows) for every run of bytes; () is the end."""
    lines: list[list[tuple[int, int]]] = []
    for low, high in ranges:
        _lines(low, high, lines)
    return _tree(lines)


def _lines(low: int, high: int, lines: list[list[tuple[int, int]]]) -> None:
    """Code points as sequences of byte ranges, any combination of which is one of them."""
    for limit in (0x7F, 0x7FF, 0xFFFF):
        if low <= limit < high:
            _lines(low, limit, lines)
            _lines(limit + 1, high, lines)
            return
    first, last = chr(low).encode(), chr(high).encode()
    for at in range(1, len(first)):
        mask = (1 << (6 * at)) - 1  # the bits of the last bytes
        if low & ~mask != high & ~mask:
            if low & mask:
                _lines(low, low | mask, lines)
                _lines((low | mask) + 1, high, lines)
                return
            if high & mask != mask:
                _lines(low, (high & ~mask) - 1, lines)
                _lines(high & ~mask, high, lines)
                return
    lines.append(list(zip(first, last, strict=True)))


def _tree(lines: Sequence[Sequence[tuple[int, int]]]) -> tuple:
    """Sequences with the same beginning share it; ranges of first bytes are the same or apart."""
    by_first: dict[tuple[int, int], list] = {}
    for line in lines:
        by_first.setdefault(line[0], []).append(line[1:])
    nodes: list[list] = []
    for (low, high), rest in sorted(by_first.items()):
        node = _tree([line for line in rest if line]) if rest[0] else ()
        if nodes and nodes[-1][2] == node and nodes[-1][1] + 1 == low:
            nodes[-1][1] = high
        else:
            nodes.append([low, high, node])
    return tuple(map(tuple, nodes))


# 2. Sets of parts


def _sets(parts: _Parts, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, int]:
    """A table whose states are the sets of parts that one can be in at once."""
    useful, work = [], 0
    for part in range(len(parts.bytes)):
        reached = _reached(parts.free, part)
        work = _spent(work + len(reached), parts.pattern)
        useful.append(frozenset(p for p in reached if parts.bytes[p] or p == end))
    if not useful[begin]:  # there is no text at all
        return np.zeros((2, 256), dtype=np.int32), np.zeros(2, dtype=bool), 1
    numbers: dict[frozenset[int], int] = {frozenset(): 0, useful[begin]: 1}
    rows, waiting = [np.zeros(256, dtype=np.int32)], [useful[begin]]
    while waiting:
        here = waiting.pop(0)
        edges = [edge for part in here for edge in parts.bytes[part]]
        cuts = sorted({0, *(low for low, _, _ in edges), *(high + 1 for _, high, _ in edges)})
        row = np.zeros(256, dtype=np.int32)
        for low, high in zip(cuts, [*cuts[1:], 256], strict=True):
            to = frozenset().union(*(useful[part] for first, last, part in edges if first <= low <= last))
            work = _spent(work + len(to), parts.pattern)
            if to and to not in numbers:
                if len(numbers) > MOST_STATES:
                    raise PatternError(f"the pattern {_short(parts.pattern)} has more than {MOST_STATES:,} states")
                numbers[to] = len(numbers)
                waiting.append(to)
            row[low:high] = numbers[to]
        rows.append(row)
    return np.stack(rows), np.array([end in one for one in numbers]), 1


def _spent(work: int, pattern: str) -> int:
    if work > MOST_WORK:
        raise PatternError(
            f"the pattern {_short(pattern)} is too intricate: repeat less often, or fewer things inside repeats"
        )
    return work


def _reached(free: Sequence[Sequence[int]], part: int) -> set[int]:
    found, waiting = {part}, [part]
    while waiting:
        for other in free[waiting.pop()]:
            if other not in found:
                found.add(other)
                waiting.append(other)
    return found


# 3. Fewest states


def fewest(next_Q256: np.ndarray, ends_Q: np.ndarray, begin: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The same table with states that do alike as one, those that lead to no match as state 0.

    Of a large table only the latter: finding the others takes as many rounds as its longest text has letters.
    """
    from_R, to_R = np.unique([np.repeat(np.arange(len(next_Q256)), 256), next_Q256.ravel()], axis=1)
    live_Q, count = ends_Q.copy(), -1
    while live_Q.sum() > count:
        count = live_Q.sum()
        live_Q[from_R[live_Q[to_R]]] = True
    next_Q256 = np.where(live_Q[next_Q256], next_Q256, 0)
    now_Q = np.where(live_Q, np.arange(len(live_Q)), 0)
    kinds_Q, rounds = ends_Q.astype(np.int64), len(ends_Q) <= FEW
    lots = np.random.default_rng(0).integers(1, 2**63, size=(FEW + 257,), dtype=np.uint64)
    while rounds:
        marks_Q = (lots[257 + kinds_Q[next_Q256]] * lots[:256]).sum(axis=1, dtype=np.uint64) + lots[256] * kinds_Q.astype(
            np.uint64
        )
        now_Q = np.unique(marks_Q, return_inverse=True)[1].ravel()
        rounds, kinds_Q = now_Q.max() > kinds_Q.max(), now_Q
    _, first, now_Q = np.unique(now_Q, return_index=True, return_inverse=True)
    now_Q = now_Q.ravel()
    order = np.argsort(np.arange(len(first)) != now_Q[0], kind="stable")  # the dead one first
    rank = np.empty(len(first), dtype=np.int32)
    rank[order] = np.arange(len(first))
    return rank[now_Q[next_Q256[first[order]]]], ends_Q[first[order]], int(rank[now_Q[begin]])


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else pattern[:57] + "...")
