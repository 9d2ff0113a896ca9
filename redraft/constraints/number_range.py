"""JSON numbers within bounds, and multiples of a number, as DFAs over their decimal notation.

Without bounds a number has at most 15 digits before the point and 15 behind it, and may have an exponent. A side without a
bound has at most 15 digits before the point, or as many as the other bound.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from redraft.constraints.budget import Budget
from redraft.constraints.compiled_cache import CompiledCache
from redraft.constraints.dfa import DFA, intersect, minimize
from redraft.constraints.errors import PatternError, shorten
from redraft.constraints.regex_dfa import compile_dfa

FREE_DIGITS = 15  # of a number without a bound: a small model would write digits to the end
INTEGER = f"-?(?:0|[1-9][0-9]{{0,{FREE_DIGITS - 1}}})"
NUMBER = rf"{INTEGER}(?:\.[0-9]{{1,{FREE_DIGITS}}})?(?:[eE][+-]?(?:[0-9]{{1,2}}|[12][0-9]{{2}}))?"
WHOLE = "-?(?:0|[1-9][0-9]*)"
DECIMAL = rf"{WHOLE}(?:\.[0-9]+)?"
MAX_BOUND_DIGITS = 40
MAX_RESIDUES = 2_000  # states of the automaton of multiples
RESIDUE_WORK = 100  # units of the budget for each of them

COMPILED: CompiledCache[DFA] = CompiledCache(64, 16 * 2**20, lambda dfa: dfa.bytes)


@dataclass(frozen=True, kw_only=True)
class NumberRange:
    """The numbers between two bounds that are multiples of some numbers."""

    is_integer: bool = False
    low: Decimal | None = None
    high: Decimal | None = None
    excludes_low: bool = False
    excludes_high: bool = False
    multiples: tuple[Decimal, ...] = ()

    def intersect(self, other: "NumberRange") -> "NumberRange | None":
        """The numbers in both; None if there are none."""
        lows = [(side.low, side.excludes_low) for side in (self, other) if side.low is not None]
        highs = [(-side.high, side.excludes_high) for side in (self, other) if side.high is not None]
        low, excludes_low = max(lows, default=(None, False))
        high, excludes_high = max(highs, default=(None, False))
        high = None if high is None else -high
        if low is not None and high is not None and (low > high or (low == high and (excludes_low or excludes_high))):
            return None
        return NumberRange(
            is_integer=self.is_integer or other.is_integer,
            low=low,
            high=high,
            excludes_low=excludes_low,
            excludes_high=excludes_high,
            multiples=tuple(dict.fromkeys((*self.multiples, *other.multiples))),
        )

    def contains(self, value: float) -> bool:
        """Whether a number is one of them."""
        exact = Decimal(str(value))
        return (
            (not self.is_integer or exact == exact.to_integral_value())
            and (self.low is None or exact > self.low or (exact == self.low and not self.excludes_low))
            and (self.high is None or exact < self.high or (exact == self.high and not self.excludes_high))
            and all(exact % multiple == 0 for multiple in self.multiples)
        )

    def compile(self, budget: Budget) -> DFA:
        """The automaton of their texts."""
        if not (self.low is not None or self.high is not None or self.multiples):
            return compile_dfa(INTEGER if self.is_integer else NUMBER, budget)
        key = str(self)
        dfa = COMPILED.get(key)
        if dfa is None:
            first, *others = (compile_dfa(regex, budget) for regex in self._build_regexes())
            dfa = functools.reduce(lambda one, two: intersect(one, two, budget), others, first)
            for multiple in self.multiples:
                dfa = intersect(dfa, _multiples_dfa(multiple, budget), budget)
            if dfa.is_empty:
                raise PatternError(f"no number is {self}")
            COMPILED.put(key, dfa)
        return dfa

    def __str__(self) -> str:
        kind = "a whole number" if self.is_integer else "a number"
        low = f" {'above' if self.excludes_low else 'from'} {self.low}" if self.low is not None else ""
        high = f" {'below' if self.excludes_high else 'up to'} {self.high}" if self.high is not None else ""
        return kind + low + high + "".join(f", a multiple of {multiple}" for multiple in self.multiples)

    def _build_regexes(self) -> Iterator[str]:
        """Regular expressions of decimal numbers; the numbers match all of them."""
        digits = max([FREE_DIGITS, *(len(str(abs(int(bound)))) for bound in (self.low, self.high) if bound is not None)])
        decimals = max([FREE_DIGITS, *(len(_split(abs(bound))[1]) for bound in (self.low, self.high) if bound is not None)])
        whole = f"-?(?:0|[1-9][0-9]{{0,{digits - 1}}})"
        yield whole if self.is_integer else rf"{whole}(?:\.[0-9]{{1,{decimals}}})?"
        above_zero = _from(Decimal(0), excludes=True, is_integer=self.is_integer)
        if self.low is not None and self.low >= 0:
            yield _from(self.low, excludes=self.excludes_low, is_integer=self.is_integer)
        elif self.low is not None:
            negative = _up_to(-self.low, excludes=self.excludes_low, is_integer=self.is_integer)
            yield f"(?:{_from(Decimal(0), excludes=False, is_integer=self.is_integer)})|-(?:{negative})"
        if self.high is not None and self.high >= 0:
            positive = _up_to(self.high, excludes=self.excludes_high, is_integer=self.is_integer)
            yield f"-(?:{above_zero})|{positive}" if positive else f"-(?:{above_zero})"
        elif self.high is not None:
            yield f"-(?:{_from(-self.high, excludes=self.excludes_high, is_integer=self.is_integer)})"


def read_bound(value: object, path: str) -> Decimal:
    """A bound of a schema as an exact number."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != value
        or value in (float("inf"), -float("inf"))
    ):
        raise PatternError(f"{path} must be a number, got {shorten(value)}")
    if abs(value) >= 10**MAX_BOUND_DIGITS:
        raise PatternError(f"{path} is {shorten(value)}, at most {MAX_BOUND_DIGITS} digits are supported")
    exact = Decimal(str(value))
    if -exact.normalize().as_tuple().exponent > MAX_BOUND_DIGITS:  # type: ignore[operator]
        raise PatternError(f"{path} is {shorten(value)}, at most {MAX_BOUND_DIGITS} digits are supported")
    return exact.normalize() if exact else Decimal(0)


# Regular expressions of numbers from 0 up, without a sign


def _from(low: Decimal, *, excludes: bool, is_integer: bool) -> str:
    """The numbers from `low` on, or above it."""
    whole, digits = _split(low)
    larger = _integers_from(whole + 1)
    if is_integer:
        return larger if excludes or digits else f"{whole}|{larger}"
    return rf"{larger}(?:\.[0-9]+)?|{whole}(?:{'|'.join(_fractions_above(digits, excludes))})"


def _up_to(high: Decimal, *, excludes: bool, is_integer: bool) -> str:
    """The numbers up to `high`, or below it. An empty text if there are none."""
    whole, digits = _split(high)
    smaller = integers_between(0, whole - 1)
    if is_integer:
        return "|".join(filter(None, [smaller, "" if excludes and not digits else str(whole)]))
    fractions = _fractions_below(digits, excludes)
    equal = f"{whole}(?:{'|'.join(fractions)})" if fractions else ""
    return "|".join(filter(None, [rf"(?:{smaller})(?:\.[0-9]+)?" if smaller else "", equal]))


def _split(value: Decimal) -> tuple[int, str]:
    """The integer part, and the digits behind the point without trailing zeros."""
    whole = int(value)
    digits = format(value - whole, "f").partition(".")[2].rstrip("0")
    return whole, digits


def _fractions_above(digits: str, excludes: bool) -> list[str]:
    """What may stand behind the integer part, so that the fraction is at least 0.digits."""
    some = "[0-9]*[1-9][0-9]*"  # more than nothing
    parts = [rf"\.{digits[:n]}[{int(digit) + 1}-9][0-9]*" for n, digit in enumerate(digits) if digit != "9"]
    if excludes:
        return [*parts, rf"\.{digits}{some}"]
    return [*parts, rf"\.{digits}[0-9]*"] if digits else [r"(?:\.[0-9]+)?"]


def _fractions_below(digits: str, excludes: bool) -> list[str]:
    """What may stand behind the integer part, so that the fraction is at most 0.digits."""
    if not digits:
        return [] if excludes else [r"(?:\.0+)?"]
    parts = [rf"\.{digits[:n]}[0-{int(digit) - 1}][0-9]*" for n, digit in enumerate(digits) if digit != "0"]
    shorter = [rf"\.{digits[:n]}" for n in range(1, len(digits))]
    return ["", *shorter, *parts, *([] if excludes else [rf"\.{digits}0*"])]


def _integers_from(low: int) -> str:
    if low <= 0:
        return "(?:0|[1-9][0-9]*)"
    digits = len(str(low))
    return f"(?:[1-9][0-9]{{{digits},}}|{integers_between(low, 10**digits - 1)})"


def integers_between(low: int, high: int) -> str:
    """A regular expression of the integers from low to high, 0 and up: prefixes, digit ranges, free digits."""
    parts = []
    if low == 0 <= high:
        parts.append("0")
        low = 1
    while low <= high:
        free_digits = 0
        while low % 10 ** (free_digits + 1) == 0 and low + 10 ** (free_digits + 1) - 1 <= high:
            free_digits += 1
        step = 10**free_digits
        digit = low // step % 10
        count = 1
        while digit + count <= 9 and low + (count + 1) * step - 1 <= high:
            count += 1
        prefix = str(low // step // 10) if low // step >= 10 else ""
        digits = str(digit) if count == 1 else f"[{digit}-{digit + count - 1}]"
        parts.append(prefix + digits + (f"[0-9]{{{free_digits}}}" if free_digits else ""))
        low += count * step
    return "|".join(parts)


# Multiples


def _multiples_dfa(multiple: Decimal, budget: Budget) -> DFA:
    """The decimal numbers that are a multiple: a state for each residue, and for each number of decimals."""
    decimals = max(0, -multiple.as_tuple().exponent)  # type: ignore[operator]
    modulus = int(multiple.scaleb(decimals))
    count = modulus * (decimals + 1)
    if count > MAX_RESIDUES:
        raise PatternError(f"multipleOf {multiple} is not supported: at most {MAX_RESIDUES:,} residues can be told apart")
    budget.spend(RESIDUE_WORK * count, "the multiples of a number")
    # States: 0 dead, 1 start, 2 behind the sign, then a residue (of the number without its point) behind each digit.
    first = 3
    point = first + count  # directly behind the point, by residue
    table = np.zeros((point + modulus + 1, 256), dtype=np.int32)
    accepting = np.zeros(len(table), dtype=bool)
    table[1, ord("-")] = 2
    zeros = point + modulus  # behind all decimals of a multiple: zeros only
    table[zeros, ord("0")] = zeros
    accepting[zeros] = True
    for digit in range(10):
        table[1:3, ord("0") + digit] = first + digit % modulus
    for place in range(decimals + 1):
        for residue in range(modulus):
            state = first + place * modulus + residue
            is_multiple = residue * 10 ** (decimals - place) % modulus == 0
            accepting[state] = is_multiple
            for digit in range(10):
                following = (residue * 10 + digit) % modulus
                if place == 0:
                    table[state, ord("0") + digit] = first + following
                elif place < decimals:
                    table[state, ord("0") + digit] = first + (place + 1) * modulus + following
            if place == 0:
                table[state, ord(".")] = point + residue
                for digit in range(10):
                    following = (residue * 10 + digit) % modulus
                    if decimals:
                        table[point + residue, ord("0") + digit] = first + modulus + following
                if not decimals and is_multiple:
                    table[point + residue, ord("0")] = zeros
            elif place == decimals and is_multiple:
                table[state, ord("0")] = zeros
    return minimize(DFA(table, accepting, 1), budget)
