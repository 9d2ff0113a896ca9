"""Characters of a regular expression: the code points that an item matches, and their UTF-8 bytes."""

import _sre  # the functions by which `re` ignores case
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from re import _constants as op  # type: ignore[attr-defined]  # not in typeshed
from re._casefix import _EXTRA_CASES
from typing import Any, NamedTuple

import numpy as np

from redraft.constraints.budget import Budget
from redraft.constraints.errors import PatternError

LAST_CODE_POINT = 0x10FFFF
RANGE_WORK = 300  # units for one range of a character class and for its bytes
CHARACTER_CLASS = "a character class of the pattern"
OPPOSITES = {
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
}
ECMA_SPACES = ((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
               (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF))  # fmt: skip
PLAIN_IN_JSON = ((0x20, 0x21), (0x23, 0x5B), (0x5D, LAST_CODE_POINT))
Ranges = tuple[tuple[int, int], ...]  # of code points or of bytes, both ends included, in ascending order


def character_ranges(kind: Any, value: Any, flags: int, budget: Budget, *, is_ecma: bool = False) -> Ranges:
    """The code points that one item of the syntax tree matches, in Python or in ECMA-262."""
    if kind is op.ANY:
        return merge_ranges([(0, LAST_CODE_POINT)]) if flags & re.DOTALL else complement([(10, 10)])
    if kind is op.LITERAL:
        return merge_ranges(case_variants(value, value, flags))
    is_negated = kind is op.NOT_LITERAL or (kind is op.IN and value[0][0] is op.NEGATE)
    if flags & re.IGNORECASE and is_negated:
        raise PatternError("a negated character class cannot be matched without regard to case: write both cases")
    if kind is op.NOT_LITERAL:
        return complement([(value, value)])
    ranges: list[tuple[int, int]] = []
    spent = 0
    for member, detail in value:
        budget.spend(RANGE_WORK * (len(ranges) - spent), CHARACTER_CLASS)
        spent = len(ranges)
        if member is op.LITERAL:
            ranges += case_variants(detail, detail, flags)
        elif member is op.RANGE:
            low, high = detail
            ranges += case_variants(low, high, flags)
        elif member is op.CATEGORY:
            ranges += category_ranges(detail, bool(flags & re.ASCII), is_ecma)
    budget.spend(RANGE_WORK * (len(ranges) - spent), CHARACTER_CLASS)
    return complement(ranges) if is_negated else merge_ranges(ranges)


def case_variants(low: int, high: int, flags: int) -> list[tuple[int, int]]:
    """A range of characters, and under IGNORECASE the other cases that `re` takes for them."""
    if not flags & re.IGNORECASE:
        return [(low, high)]
    cases = _ascii_case_variants() if flags & re.ASCII else _unicode_case_variants()
    cased = cases.characters[bisect_left(cases.characters, low) : bisect_right(cases.characters, high)]
    return [(low, high), *((variant, variant) for code in cased for variant in cases.variants[code])]


class _CaseVariants(NamedTuple):
    characters: list[int]  # that have another case, ascending
    variants: dict[int, list[int]]  # all cases of each of them


@lru_cache(maxsize=1)
def _unicode_case_variants() -> _CaseVariants:
    """`re` compares lower cases, and takes a few lower cases for one another, such as s and long s."""
    lowers = map(_sre.unicode_tolower, range(LAST_CODE_POINT + 1))
    lower_of = {code: lower for code, lower in enumerate(lowers) if lower != code}
    families: dict[int, set[int]] = {}
    for lower in {*lower_of.values(), *_EXTRA_CASES}:
        families.setdefault(_family(lower), set()).update({lower, *_EXTRA_CASES.get(lower, ())})
    for code, lower in lower_of.items():
        families[_family(lower)].add(code)
    return _group_cases(families.values())


@lru_cache(maxsize=1)
def _ascii_case_variants() -> _CaseVariants:
    return _group_cases({ord(letter), ord(letter.upper())} for letter in "abcdefghijklmnopqrstuvwxyz")


def _family(lower: int) -> int:
    """The smallest of the lower cases that `re` takes for this one."""
    return min(lower, *_EXTRA_CASES.get(lower, (lower,)))


def _group_cases(families: Iterable[set[int]]) -> _CaseVariants:
    variants = {code: sorted(family) for family in families for code in family}
    return _CaseVariants(sorted(variants), variants)


@lru_cache(maxsize=16)
def category_ranges(category: Any, ascii_only: bool, is_ecma: bool = False) -> Ranges:
    r"""The code points of \d, \w, \s, \D, \W or \S: `re` itself finds their runs in a text of all characters."""
    if category in OPPOSITES:
        return complement(category_ranges(OPPOSITES[category], ascii_only, is_ecma))
    if is_ecma and category is op.CATEGORY_SPACE:
        return ECMA_SPACES
    escapes = {op.CATEGORY_DIGIT: r"\d", op.CATEGORY_SPACE: r"\s", op.CATEGORY_WORD: r"\w"}
    runs = re.compile(f"{escapes[category]}+", re.ASCII if ascii_only else re.UNICODE)
    codes = np.arange(128 if ascii_only else LAST_CODE_POINT + 1, dtype="<u4")
    characters = codes.tobytes().decode("utf-32-le", "surrogatepass")  # a list of single characters would take 100 MB
    return merge_ranges((run.start(), run.end() - 1) for run in runs.finditer(characters))


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


@lru_cache(maxsize=64)
def json_trie(ranges: Ranges) -> tuple:
    r"""Like `utf8_trie`, of these code points as json.dumps writes them in a string: \" \\ \n \u001f, all others plainly."""
    sequences: list[list[tuple[int, int]]] = []
    for low, high in ranges:
        for code in (*range(low, min(high, 0x1F) + 1), *(code for code in (0x22, 0x5C) if low <= code <= high)):
            sequences.append([(byte, byte) for byte in json.dumps(chr(code))[1:-1].encode()])
    plain = [(max(low, first), min(high, last)) for low, high in ranges for first, last in PLAIN_IN_JSON]
    for low, high in plain:
        if low <= high:
            _split_into_byte_ranges(low, high, sequences)
    return _build_trie(sequences)


@lru_cache(maxsize=32)
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


ANY_CHARACTER = merge_ranges([(0, LAST_CODE_POINT)])
