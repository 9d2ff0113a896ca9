"""Builds the automaton of a JSON schema from its shapes. The JSON stands on one line, with ", " and ": " between values.

A schema whose values are nested without limit has no automaton: UnboundedError. Any JSON (`{}`) is nested up to ANY_DEPTH.
"""

import itertools
import json
from typing import Any

from redraft.constraints.budget import Budget
from redraft.constraints.dfa import DFA, intersect, minimize, subtract
from redraft.constraints.errors import BudgetError, PatternError, UnboundedError
from redraft.constraints.formats import FORMATS
from redraft.constraints.json_schema import SchemaReader
from redraft.constraints.nfa import NFA, determinize
from redraft.constraints.number_range import DECIMAL, WHOLE
from redraft.constraints.regex_dfa import ESCAPES, compile_dfa, compile_string_dfa
from redraft.constraints.schema_references import name_path
from redraft.constraints.schema_shapes import (
    ANY,
    ANY_SHAPES,
    ArrayShape,
    Literal,
    Node,
    NumberShape,
    ObjectShape,
    Shape,
    StringShape,
)

ANY_DEPTH = 2  # arrays and objects inside one another where a schema allows any JSON
EMPTY = (Literal("[]"), Literal("{}"))
MAX_DEPTH = 100  # subschemas inside one another
MAX_LENGTH = 20_000  # bounds of lengths that are counted state by state
MAX_DISTINCT = 6  # values of an array of distinct ones
MAX_KEY_PATTERNS = 3  # of `patternProperties`


def compile_schema(schema: Any, budget: Budget, name: str = "of the schema") -> DFA:
    """The automaton of a schema's values, which errors call `name`."""
    reader = SchemaReader(schema, budget)
    for depth in range(ANY_DEPTH, -1, -1):
        nfa = NFA(name, budget)
        builder = SchemaBuilder(reader, nfa, depth)
        try:
            start = nfa.add_state()
            dfa = minimize(determinize(nfa, start, builder.add(start, reader.root_node, depth)), budget)
        except BudgetError:
            if depth and builder.has_any:  # less of any JSON may fit
                continue
            raise
        if dfa.is_empty:
            raise PatternError("the schema allows no value")
        return dfa
    raise AssertionError


class SchemaBuilder:
    """Adds the values of nodes to an NFA. Every `add` method returns the state behind the part that it adds."""

    def __init__(self, reader: SchemaReader, nfa: NFA, any_depth: int = ANY_DEPTH) -> None:
        self.reader = reader
        self.nfa = nfa
        self.any_depth = any_depth
        self.has_any = False  # some values are any JSON
        self._unfinished: list[Node] = []
        self._strings: dict[StringShape, DFA] = {}

    def add(self, start: int, node: Node, depth: int | None = None) -> int:
        """A value of a node. `depth`: how deep values that may be any JSON are nested."""
        depth = self.any_depth if depth is None else depth
        shapes = self.reader.shapes(node)
        is_any = shapes is ANY_SHAPES
        if is_any:
            self.has_any = True
            if not depth:
                shapes = (*(shape for shape in shapes if not isinstance(shape, ArrayShape | ObjectShape)), *EMPTY)
            depth -= 1
        elif node in self._unfinished:
            raise UnboundedError(f"{name_path(node.path)} refers to itself: its nesting has no limit")
        elif len(self._unfinished) >= MAX_DEPTH:
            raise PatternError(f"the schema is nested too deeply: at most {MAX_DEPTH} levels")
        else:
            self._unfinished.append(node)
        end = self.nfa.add_state()
        for shape in shapes:
            shape_start = self.nfa.add_state()
            self.nfa.link(start, shape_start)
            self.nfa.link(self._add_shape(shape_start, shape, depth, node), end)
        if not is_any:
            self._unfinished.pop()
        return end

    def _add_shape(self, start: int, shape: Shape, depth: int, node: Node) -> int:
        match shape:
            case Literal():
                return self.nfa.add_text(start, shape.text.encode("utf-8", "surrogatepass"))
            case NumberShape():
                return self.nfa.add_dfa(start, self._number_dfa(shape))
            case StringShape():
                return self._add_string(start, self._string_dfa(shape))
            case ArrayShape():
                return self._add_array(start, shape, depth, node)
            case ObjectShape():
                return self._add_object(start, shape, depth, node)

    def _add_string(self, start: int, inside: DFA) -> int:
        return self.nfa.add_text(self.nfa.add_dfa(self.nfa.add_text(start, b'"'), inside), b'"')

    # 1. Numbers and strings

    def _number_dfa(self, shape: NumberShape) -> DFA:
        budget = self.nfa.budget
        dfa = shape.range.compile(budget)
        others = [_decimal_regex(text) for text in sorted(shape.excluded)]
        others += [rf"{WHOLE}(?:\.0+)?"] if shape.is_fraction else []
        if others:
            values = "|".join(others)
            dfa = subtract(intersect(dfa, compile_dfa(DECIMAL, budget), budget), compile_dfa(values, budget), budget)
        return dfa

    def _string_dfa(self, shape: StringShape) -> DFA:
        """What stands inside of the quotes."""
        if shape not in self._strings:
            budget = self.nfa.budget
            dfas = [compile_string_dfa(pattern, budget) for pattern in shape.patterns]
            dfas += [compile_dfa(FORMATS[name], budget) for name in shape.formats]
            if shape.least or shape.most is not None or not dfas:
                if max(shape.least, shape.most or 0) > MAX_LENGTH:
                    raise BudgetError(
                        f"a length of {max(shape.least, shape.most or 0):,} is too long: at most {MAX_LENGTH:,}"
                    )
                most = "" if shape.most is None else shape.most
                dfas.append(compile_string_dfa(rf"^[\s\S]{{{shape.least},{most}}}$", budget))
            dfa = dfas[0]
            for other in dfas[1:]:
                dfa = intersect(dfa, other, budget)
            for pattern in shape.excluded_patterns:
                dfa = subtract(dfa, compile_string_dfa(pattern, budget), budget)
            if shape.excluded:
                dfa = subtract(dfa, self._texts_dfa(shape.excluded), budget)
            self._strings[shape] = dfa
        return self._strings[shape]

    def _texts_dfa(self, texts: Any) -> DFA:
        """Exactly these strings, as they stand inside of quotes."""
        nfa = NFA("of names", self.nfa.budget)
        start, end = nfa.add_state(), nfa.add_state()
        for text in texts:
            nfa.link(nfa.add_text(start, json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")), end)
        return minimize(determinize(nfa, start, end), self.nfa.budget)

    # 2. Arrays

    def _add_array(self, start: int, shape: ArrayShape, depth: int, node: Node) -> int:
        if shape.unique and (shape.most is None or shape.most > 1):
            return self._add_distinct(start, shape, node)
        if shape.contains:
            return self._add_containing(start, shape, depth, node)
        nfa = self.nfa
        end = nfa.add_state()
        behind = nfa.add_text(start, b"[")  # the state behind so many items
        separated = behind  # where the next item begins
        count = 0
        while True:
            if count >= shape.least:
                nfa.link(nfa.add_text(behind, b"]"), end)
            if count == shape.most:
                return end
            if count >= max(len(shape.first), shape.least - 1) and shape.most is None:  # the same from here on
                loop = nfa.add_state()
                nfa.link(separated, loop)
                last = self.add(loop, shape.rest, depth)
                nfa.link(nfa.add_text(last, b", "), loop)
                nfa.link(nfa.add_text(last, b"]"), end)
                return end
            if not self.reader.shapes(shape.item(count)):  # no further item is possible
                return end
            behind = self.add(separated, shape.item(count), depth)
            separated = nfa.add_text(behind, b", ") if count + 1 != shape.most else behind
            count += 1

    def _add_containing(self, start: int, shape: ArrayShape, depth: int, node: Node) -> int:
        """Arrays of which some items obey `contains`: one state for each number of them."""
        (wanted, least, most), *others = shape.contains
        if others or shape.first or shape.most is not None or shape.least > 1 or max(least, most or 0) > MAX_DISTINCT:
            raise UnboundedError(f"{name_path(node.path)} has contains beside limits that it cannot be combined with")
        nfa = self.nfa
        end = nfa.add_state()
        both = shape.rest & wanted
        rest = shape.rest
        if most is not None:
            path = wanted.path
            negated = {"allOf": [{"not": part.value} for part in wanted.parts[:1]]} if wanted.parts else False
            rest = shape.rest & self.reader.made_node(negated, path)
        top = most if most is not None else least
        first = nfa.add_text(start, b"[")
        if not least and not shape.least:
            nfa.link(nfa.add_text(first, b"]"), end)
        begins = [nfa.add_state() for _ in range(top + 1)]  # an item begins, behind so many that obey
        nfa.link(first, begins[0])
        for count, begin in enumerate(begins):
            targets = [(rest, count)] + ([(both, count + 1)] if count < top else [])
            for item, after in targets:
                last = self.add(begin, item, depth)
                nfa.link(nfa.add_text(last, b", "), begins[after])
                if after >= least:
                    nfa.link(nfa.add_text(last, b"]"), end)
        return end

    def _add_distinct(self, start: int, shape: ArrayShape, node: Node) -> int:
        """Arrays of different items, of a few known values: one state for each set of values."""
        values = self.reader.shapes(shape.rest)
        if shape.first or shape.contains or len(values) > MAX_DISTINCT or not all(isinstance(v, Literal) for v in values):
            raise UnboundedError(
                f"{name_path(node.path)} has uniqueItems, which is supported for at most {MAX_DISTINCT} known values"
            )
        nfa = self.nfa
        end = nfa.add_state()
        most = len(values) if shape.most is None else min(shape.most, len(values))
        states: dict[frozenset[int], int] = {frozenset(): nfa.add_text(start, b"[")}
        for count in range(most + 1):
            for chosen in map(frozenset, itertools.combinations(range(len(values)), count)):
                state = states[chosen]
                if count >= shape.least:
                    nfa.link(nfa.add_text(state, b"]"), end)
                if count == most:
                    continue
                begin = nfa.add_text(state, b", ") if count else state
                for number in set(range(len(values))) - chosen:
                    text = values[number].text  # type: ignore[union-attr]
                    after = nfa.add_text(begin, text.encode("utf-8", "surrogatepass"))
                    nfa.link(after, states.setdefault(chosen | {number}, nfa.add_state()))
        return end

    # 3. Objects

    def _add_object(self, start: int, shape: ObjectShape, depth: int, node: Node) -> int:
        nfa = self.nfa
        reader = self.reader
        values = {name: reader.property_node(shape, name) for name in self._known_names(shape)}
        values = {
            name: value
            for name, value in values.items()
            if reader.shapes(value) and all(reader.contains(names, name) for names in shape.names)
        }
        end = nfa.add_state()
        if any(name not in values for name in shape.required):
            return end  # nothing obeys it
        free = self._free_names(shape, values)
        least = shape.least if shape.least > len(shape.required) else 0
        most = shape.most if shape.most is not None and (free or shape.most < len(values)) else None
        if least > 1 and free and least > len(shape.required) + 1:
            raise UnboundedError(f"{name_path(node.path)} has minProperties {least} for names that are not known")
        top = most if most is not None else max(least, 1)  # properties are counted so far
        states: list[int | None] = [None] * (top + 1)  # behind the properties before, by their number
        states[0] = nfa.add_text(start, b"{")
        for name, value in values.items():
            key = json.dumps(name, ensure_ascii=False).encode("utf-8", "surrogatepass") + b": "
            is_required = name in shape.required
            following: list[int | None] = [None if is_required else state for state in states]
            for after, begin in self._entries(states, top, is_limit=most is not None).items():
                last = self.add(nfa.add_text(begin, key), value, depth)
                joined = following[after]
                if joined is not None:
                    state = nfa.add_state()
                    nfa.link(joined, state)
                    nfa.link(last, state)
                    last = state
                following[after] = last
            states = following
        if free:
            loops = [nfa.add_state() for _ in states]
            for loop, before in zip(loops, states, strict=True):
                if before is not None:
                    nfa.link(before, loop)
            for after, begin in self._entries(list(loops), top, is_limit=most is not None).items():
                for names, value in free:
                    last = nfa.add_text(self._add_string(begin, names), b": ")
                    nfa.link(self.add(last, value, depth), loops[after])
            states = list(loops)
        for count, last_state in enumerate(states):
            if last_state is not None and count >= least:
                nfa.link(nfa.add_text(last_state, b"}"), end)
        return end

    def _entries(self, states: list[int | None], top: int, *, is_limit: bool) -> dict[int, int]:
        """Where a next property begins, by the number of properties behind it. Beyond `top` they are not counted."""
        begins: dict[int, int] = {}
        for count, state in enumerate(states):
            if state is None or (is_limit and count == top):
                continue
            after = min(count + 1, top)
            begin = begins.setdefault(after, self.nfa.add_state())
            self.nfa.link(self.nfa.add_text(state, b", ") if count else state, begin)
        return begins

    def _known_names(self, shape: ObjectShape) -> list[str]:
        """The names that the schema mentions: of properties, in `required`, and a list of `propertyNames`."""
        listed = [self.reader.shapes(names) for names in shape.names]
        literals = [text.value for shapes in listed if all(isinstance(each, Literal) for each in shapes) for text in shapes]  # type: ignore[union-attr]
        return list(dict.fromkeys([*shape.named, *(name for name in literals if isinstance(name, str))]))

    def _free_names(self, shape: ObjectShape, values: dict[str, Node]) -> list[tuple[DFA, Node]]:
        """Names that the schema does not mention, and their values: a set of names for each set of patterns."""
        reader = self.reader
        budget = self.nfa.budget
        patterns = list(dict.fromkeys(pattern for side in shape.sides for pattern, _ in side.patterns))
        has_schema = any(not side.is_open for side in shape.sides)
        is_closed = any(side.additional.parts and not reader.shapes(side.additional) for side in shape.sides)
        if (is_closed or (values and not has_schema)) and not patterns:
            return []
        if len(patterns) > MAX_KEY_PATTERNS:
            raise UnboundedError(f"patternProperties has {len(patterns)} patterns, at most {MAX_KEY_PATTERNS} are supported")
        allowed = self._string_dfa(StringShape())
        for names in shape.names:
            strings = [each for each in reader.shapes(names) if isinstance(each, StringShape)]
            if len(strings) != 1:
                return []  # known names only
            allowed = intersect(allowed, self._string_dfa(strings[0]), budget)
        if mentioned := shape.named:
            allowed = subtract(allowed, self._texts_dfa(mentioned), budget)
        free = []
        for count in range(len(patterns) + 1):
            for matching in itertools.combinations(patterns, count):
                if not matching and values and not has_schema:
                    continue
                value = Node()
                for side in shape.sides:
                    parts = [part for pattern, part in side.patterns if pattern in matching]
                    for part in parts or [side.additional]:
                        value &= part
                if not reader.shapes(value):
                    continue
                matched = allowed
                for pattern in patterns:
                    combine = intersect if pattern in matching else subtract
                    matched = combine(matched, compile_string_dfa(pattern, budget), budget)
                if not matched.is_empty:
                    free.append((matched, value if value.parts else ANY))
        return free


def _decimal_regex(text: str) -> str:
    """All notations of a number without an exponent."""
    value = json.loads(text)
    sign = "-?" if value == 0 else "-" if value < 0 else ""
    whole, _, digits = format(abs(value), "f").partition(".") if isinstance(value, float) else (str(abs(value)), "", "")
    digits = digits.rstrip("0")
    return sign + whole.translate(ESCAPES) + (rf"\.{digits}0*" if digits else r"(?:\.0+)?")
