"""Regular expressions compiled to DFAs over UTF-8 bytes.

    pattern -> [Python's own parser] -> syntax tree -> [RegexBuilder] -> NFA -> [determinize, minimize] -> DFA

`compile_dfa` accepts the texts that `re.fullmatch` accepts. `compile_string_dfa` is for the `pattern` of a JSON schema: it
reads ECMA-262, finds the pattern anywhere in the text, and accepts the text as JSON writes it inside of quotes.
Constructs that are not regular, or not supported (back-references, lookaround inside a pattern, word boundaries), are
refused by name.
"""

import re
import warnings
from collections.abc import Sequence
from re import _constants as op  # type: ignore[attr-defined]  # not in typeshed
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from redraft.constraints.budget import Budget
from redraft.constraints.characters import ANY_CHARACTER, character_ranges, json_trie, utf8_trie
from redraft.constraints.compiled_cache import CompiledCache
from redraft.constraints.dfa import DFA, intersect, minimize, subtract
from redraft.constraints.errors import BudgetError, PatternError, shorten
from redraft.constraints.nfa import NFA, determinize

MAX_DEPTH = 150  # of groups inside one another; the limit of Python's stack is more than twice as deep
GROUPS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|[()]", re.DOTALL)  # brackets, with what hides them: \( and [(]
MAX_REASON = 120  # characters of Python's own error message
CHARACTER_TYPES = int(re.ASCII | re.UNICODE | re.LOCALE)
MAX_PARTS = 20_000  # characters of a pattern for llguidance, repeats counted
PARSE_WORK = 40  # units of the budget (see budget.py for the unit) for each character of the pattern
ECMA = int(re.ASCII)  # \d and \w are ASCII there
ESCAPES = str.maketrans({character: f"\\{character}" for character in r"\.^$*+?{}[]|()-"})
NAMED_GROUP = re.compile(r"(\\.)|\(\?<(?![=!])", re.DOTALL)

HANDLES_ENDS = (op.AT, op.SUBPATTERN, op.BRANCH)  # items that say themselves what may stand before or behind them
COMPILED: CompiledCache[DFA] = CompiledCache(64, 32 * 2**20, lambda dfa: dfa.bytes)


def compile_dfa(pattern: str, budget: Budget | None = None) -> DFA:
    """Compiles a pattern to a DFA. It spends from `budget`; a pattern in the cache costs nothing."""
    if not isinstance(pattern, str):
        raise PatternError(f"a pattern is a text, got {shorten(pattern)}")
    dfa = COMPILED.get(pattern)
    if dfa is None:
        nfa = NFA(pattern, budget if budget is not None else Budget())
        start = nfa.add_state()
        dfa = minimize(determinize(nfa, start, add_regex(nfa, start, pattern)), nfa.budget)
        COMPILED.put(pattern, dfa)
    return dfa


def compile_string_dfa(pattern: str, budget: Budget) -> DFA:
    """The texts in which a schema's `pattern` (ECMA-262) is found, as JSON writes them inside of quotes."""
    key = f"in a string: {pattern}"
    dfa = COMPILED.get(key)
    if dfa is None:
        _check_text(pattern, budget)
        source = NAMED_GROUP.sub(lambda match: match[1] or "(?P<", pattern)
        tree = _parse(source, ECMA)
        looks, items = _split_lookaheads(tree)
        dfa = _compile_items(pattern, items, budget, searches=True)
        for kind, look in looks:
            ends_text = bool(look) and look[-1] == (op.AT, op.AT_END)
            at_start = _compile_items(pattern, list(look) if ends_text else [*look, *ANYTHING], budget, searches=False)
            dfa = (intersect if kind is op.ASSERT else subtract)(dfa, at_start, budget)
        COMPILED.put(key, dfa)
    return dfa


ANYTHING = list(parser.parse(r"[\s\S]*"))


def _compile_items(pattern: str, items: Sequence[tuple[Any, Any]], budget: Budget, *, searches: bool) -> DFA:
    nfa = NFA(pattern, budget)
    start, end = RegexBuilder(nfa, in_json=True, searches=searches).add_sequence(items, ECMA, (True, True))
    return minimize(determinize(nfa, start, end), budget)


def _split_lookaheads(tree: Any) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """The lookaheads directly behind ^ at the start of a pattern, and the pattern without them."""
    items = list(tree)
    looks = []
    while len(items) > 1 and items[0] == (op.AT, op.AT_BEGINNING) and items[1][0] in (op.ASSERT, op.ASSERT_NOT):
        kind, (direction, look) = items.pop(1)
        if direction < 0:
            return [], list(tree)
        looks.append((kind, look))
    return looks, items


def add_regex(nfa: NFA, start: int, pattern: str) -> int:
    """Adds the texts that a regular expression matches in full, with the meaning that Python gives it."""
    _check_text(pattern, nfa.budget)
    tree = _parse(pattern, 0)
    item_start, end = RegexBuilder(nfa).add_sequence(tree, tree.state.flags, (True, True))
    nfa.link(start, item_start)
    return end


def _check_text(pattern: str, budget: Budget) -> None:
    """Refuses what takes long to parse. Groups that are nested too deeply: see config/json_text.py for the reason."""
    if not isinstance(pattern, str):
        raise PatternError(f"a pattern is a text, got {shorten(pattern)}")
    budget.spend_characters(len(pattern), "the pattern")
    budget.spend(len(pattern) * PARSE_WORK, "parsing the pattern")
    depth = 0
    for match in GROUPS.finditer(pattern) if pattern.count("(") > MAX_DEPTH else ():
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth > MAX_DEPTH:
            raise PatternError(f"the pattern {shorten(pattern)} is nested too deeply: at most {MAX_DEPTH} groups")


def _parse(pattern: str, flags: int) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of syntax whose meaning may change in a later version
            return parser.parse(pattern, flags)
    except (re.error, OverflowError) as error:
        reason = str(error.args[0])[:MAX_REASON]  # it may repeat a name of the pattern
        raise PatternError(f"the pattern {shorten(pattern)} is not a regular expression: {reason}") from None
    except ValueError:  # Python reads no number with thousands of digits
        raise PatternError(f"the pattern {shorten(pattern)} has a number with too many digits") from None


class RegexBuilder:
    """Adds parts of a syntax tree to an NFA (Thompson's construction).

    Every `add_` method returns the part's first and last state. No edge leaves a part's last state. `in_json` writes
    characters as JSON does inside of quotes. `searches` finds the pattern anywhere: where it has no ^ or $, any text may
    stand before or behind it.
    """

    def __init__(self, nfa: NFA, *, in_json: bool = False, searches: bool = False) -> None:
        self.nfa = nfa
        self.in_json = in_json
        self.searches = searches
        self.tries: dict[tuple, tuple] = {}  # of character classes, which repeats use again

    def add_sequence(
        self, items: Sequence[tuple[Any, Any]], flags: int, at_ends: tuple[bool, bool] = (False, False)
    ) -> tuple[int, int]:
        """Items one after another. `at_ends`: whether the sequence stands at the start and at the end of the pattern."""
        start = end = self.nfa.add_state()
        if self.searches and at_ends[0] and not (items and items[0][0] in HANDLES_ENDS):
            end = self._add_anything(end)
        for number, (kind, value) in enumerate(items):
            is_first = at_ends[0] and number == 0
            is_last = at_ends[1] and number == len(items) - 1
            if kind is op.AT:
                self._check_anchor(value, is_first, is_last)
                if self.searches and len(items) == 1 and at_ends == (True, True):  # ^ or $ alone: any text
                    end = self._add_anything(end)
                continue
            if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
                end = self._add_character(end, kind, value, flags)
                continue
            item_start, item_end = self._add_item(kind, value, flags, (is_first, is_last))
            self.nfa.epsilon_edges[end].append(item_start)
            end = item_end
        if self.searches and at_ends[1] and not (items and items[-1][0] in HANDLES_ENDS):
            end = self._add_anything(end)
        return start, end

    def _add_item(self, kind: Any, value: Any, flags: int, at_ends: tuple[bool, bool]) -> tuple[int, int]:
        if kind is op.SUBPATTERN:
            _, added_flags, removed_flags, items = value
            if added_flags & CHARACTER_TYPES:  # ASCII and UNICODE exclude each other
                flags &= ~CHARACTER_TYPES
            return self.add_sequence(items, (flags | added_flags) & ~removed_flags, at_ends)
        if kind is op.BRANCH:
            start = self.nfa.add_state()
            end = self.nfa.add_state()
            for branch in value[1]:
                branch_start, branch_end = self.add_sequence(branch, flags, at_ends)
                self.nfa.epsilon_edges[start].append(branch_start)
                self.nfa.epsilon_edges[branch_end].append(end)
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
        raise PatternError(f"the pattern {shorten(self.nfa.pattern)} {reason}, which a finite automaton cannot express")

    def _add_repeat(self, least: int, most: Any, items: Sequence, flags: int) -> tuple[int, int]:
        start = end = self.nfa.add_state()
        for _ in range(least):
            item_start, item_end = self.add_sequence(items, flags)
            self.nfa.epsilon_edges[end].append(item_start)
            end = item_end
        if most is op.MAXREPEAT:
            out = self.nfa.add_state()
            if not least:
                item_start, item_end = self.add_sequence(items, flags)
                self.nfa.epsilon_edges[end] += [item_start, out]
            self.nfa.epsilon_edges[item_end] += [item_start, out]
            return start, out
        out = self.nfa.add_state()
        for _ in range(most - least):
            item_start, item_end = self.add_sequence(items, flags)
            self.nfa.epsilon_edges[end] += [item_start, out]
            end = item_end
        self.nfa.epsilon_edges[end].append(out)
        return start, out

    def _add_character(self, start: int, kind: Any, value: Any, flags: int) -> int:
        """Adds one character as its bytes, from a state that no edge leaves yet. Returns the state behind it."""
        key = (kind, tuple(value) if kind is op.IN else value, flags)
        if key not in self.tries:
            ranges = character_ranges(kind, value, flags, self.nfa.budget, is_ecma=self.in_json)
            self.tries[key] = (json_trie if self.in_json else utf8_trie)(ranges)
        return self.nfa.add_trie(start, self.tries[key])

    def _add_anything(self, end: int) -> int:
        """Any text, behind a state."""
        trie = (json_trie if self.in_json else utf8_trie)(ANY_CHARACTER)
        loop = self.nfa.add_state()
        self.nfa.link(end, loop)
        start = self.nfa.add_state()
        self.nfa.link(loop, start)
        self.nfa.link(self.nfa.add_trie(start, trie), loop)
        out = self.nfa.add_state()
        self.nfa.link(loop, out)
        return out

    def _check_anchor(self, anchor: Any, is_first: bool, is_last: bool) -> None:
        """Refuses anchors except ^ at the start and $ at the end, which are implied."""
        starts = anchor in (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
        ends = anchor in (op.AT_END, op.AT_END_STRING)
        if not (starts and is_first) and not (ends and is_last):
            raise PatternError(
                f"the pattern {shorten(self.nfa.pattern)} has an anchor inside (^, $, \\b), which is not supported"
            )


# The same syntax tree for llguidance


def to_explicit_regex(pattern: str, budget: Budget) -> str:
    """The pattern with all its characters as ranges of code points, so that it means the same in every library.

    A character counts as one part, however many bytes its class has. Raises BudgetError above MAX_PARTS.
    """
    _check_text(pattern, budget)
    tree = _parse(pattern, 0)
    return _ExplicitWriter(pattern, budget).write_sequence(tree, tree.state.flags, (True, True), 1)


class _ExplicitWriter:
    def __init__(self, pattern: str, budget: Budget) -> None:
        self.pattern = pattern
        self.budget = budget
        self.parts = 0
        self.anchors = RegexBuilder(NFA(pattern, budget))

    def write_sequence(self, items: Sequence[tuple[Any, Any]], flags: int, at_ends: tuple[bool, bool], copies: int) -> str:
        texts = []
        for number, (kind, value) in enumerate(items):
            ends = (at_ends[0] and number == 0, at_ends[1] and number == len(items) - 1)
            self.parts += copies
            if self.parts > MAX_PARTS:
                raise BudgetError(
                    f"the pattern {shorten(self.pattern)} has more than {MAX_PARTS:,} parts: repeat less often"
                )
            texts.append(self._write_item(kind, value, flags, ends, copies))
        return "".join(texts)

    def _write_item(self, kind: Any, value: Any, flags: int, ends: tuple[bool, bool], copies: int) -> str:
        if kind is op.AT:
            self.anchors._check_anchor(value, *ends)
            return ""
        if kind in (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN):
            ranges = character_ranges(kind, value, flags, self.budget)
            return "[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges) + "]"
        if kind is op.SUBPATTERN:
            _, added_flags, removed_flags, items = value
            if added_flags & CHARACTER_TYPES:
                flags &= ~CHARACTER_TYPES
            return f"(?:{self.write_sequence(items, (flags | added_flags) & ~removed_flags, ends, copies)})"
        if kind is op.BRANCH:
            return f"(?:{'|'.join(self.write_sequence(branch, flags, ends, copies) for branch in value[1])})"
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, items = value
            is_open = most is op.MAXREPEAT
            item = self.write_sequence(items, flags, (False, False), copies * max(1, least if is_open else most))
            return f"(?:{item}){{{least},{'' if is_open else most}}}"
        raise PatternError(f"the pattern {shorten(self.pattern)} uses {kind}, which a finite automaton cannot express")
