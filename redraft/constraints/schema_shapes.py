"""Shapes: what a JSON schema allows, one shape for each type of value. The reader of schemas and the compilers share them.

    schema -> [SchemaReader] -> shapes -> [schema_nfa.py] -> NFA        (what is finite: a canvas, or left to right)
                                       -> [prefix_grammar.py] -> grammar (recursion, very many states: left to right)

A `Node` stands for values that obey several subschemas at once. Its shapes are read when they are needed, so a schema may
refer to itself.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from redraft.constraints.number_range import NumberRange


@dataclass(frozen=True, eq=False)
class Subschema:
    """A part of a schema: an object, true or false. Its path is for error messages."""

    value: Any
    path: str


@dataclass(frozen=True, eq=False)
class Node:
    """The values that obey all of these subschemas; without any, all values."""

    parts: tuple[Subschema, ...] = ()

    @cached_property
    def key(self) -> frozenset[int]:
        """Equal for nodes of the same subschemas."""
        return frozenset(id(part.value) for part in self.parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def path(self) -> str:
        """Where the first of them stands."""
        return self.parts[0].path if self.parts else ""

    def __and__(self, other: "Node") -> "Node":
        known = self.key
        return Node((*self.parts, *(part for part in other.parts if id(part.value) not in known)))


ANY = Node()


@dataclass(frozen=True)
class Literal:
    """Exactly one value."""

    text: str  # as json.dumps writes it

    @classmethod
    def of(cls, value: Any) -> "Literal":
        """The literal of a value."""
        return cls(json.dumps(value, ensure_ascii=False, allow_nan=False))

    @property
    def value(self) -> Any:
        """The value."""
        return json.loads(self.text)


ALL_NUMBERS = NumberRange()


@dataclass(frozen=True)
class NumberShape:
    """Numbers. A boolean is none."""

    range: NumberRange = ALL_NUMBERS
    excluded: frozenset[str] = frozenset()  # texts of numbers that it does not allow
    is_fraction: bool = False  # no whole number


@dataclass(frozen=True)
class StringShape:
    """Strings: lengths in characters, patterns (ECMA-262) and formats that all apply."""

    least: int = 0
    most: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    excluded_patterns: tuple[str, ...] = ()
    excluded: frozenset[str] = frozenset()  # strings that it does not allow


@dataclass(frozen=True)
class ArrayShape:
    """Arrays: first items, all later ones, how many, and items of which there must be some."""

    first: tuple[Node, ...] = ()
    rest: Node = ANY
    least: int = 0
    most: int | None = None
    contains: tuple[tuple[Node, int, int | None], ...] = ()  # a node, and how many items obey it
    unique: bool = False

    def item(self, index: int) -> Node:
        """What the item at a place obeys."""
        return self.first[index] if index < len(self.first) else self.rest


@dataclass(frozen=True, eq=False)
class Side:
    """What one schema says of an object's properties."""

    properties: Mapping[str, Node]
    patterns: tuple[tuple[str, Node], ...] = ()
    additional: Node = ANY  # obeyed by properties that are not named and match no pattern
    is_open: bool = True  # it says nothing of them


@dataclass(frozen=True)
class ObjectShape:
    """Objects. Named properties come in the order of the schema."""

    sides: tuple[Side, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    names: tuple[Node, ...] = ()  # obeyed by all names

    @property
    def named(self) -> list[str]:
        """All names that a side or `required` mentions, in order."""
        names = [name for side in self.sides for name in side.properties]
        return list(dict.fromkeys([*names, *self.required]))


Shape = Literal | NumberShape | StringShape | ArrayShape | ObjectShape
FREE_STRING = StringShape()
CONSTANTS = tuple(Literal(text) for text in ("null", "true", "false"))
ANY_SHAPES: tuple[Shape, ...] = (*CONSTANTS, NumberShape(), FREE_STRING, ArrayShape(), ObjectShape())


def smaller(one: int | None, two: int | None) -> int | None:
    """The smaller of two upper bounds; None is no bound."""
    return min((bound for bound in (one, two) if bound is not None), default=None)


def intersect_shapes(one: Shape, two: Shape) -> Shape | None:
    """The values that both shapes allow; None if their types differ or nothing is left. For all but literals."""
    if isinstance(one, NumberShape) and isinstance(two, NumberShape):
        both = one.range.intersect(two.range)
        is_fraction = one.is_fraction or two.is_fraction
        is_empty = both is None or (is_fraction and both.is_integer)
        return None if is_empty else NumberShape(both, one.excluded | two.excluded, is_fraction)  # type: ignore[arg-type]
    if isinstance(one, StringShape) and isinstance(two, StringShape):
        both_strings = StringShape(
            max(one.least, two.least),
            smaller(one.most, two.most),
            tuple(dict.fromkeys((*one.patterns, *two.patterns))),
            tuple(dict.fromkeys((*one.formats, *two.formats))),
            tuple(dict.fromkeys((*one.excluded_patterns, *two.excluded_patterns))),
            one.excluded | two.excluded,
        )
        return both_strings if both_strings.most is None or both_strings.least <= both_strings.most else None
    if isinstance(one, ArrayShape) and isinstance(two, ArrayShape):
        count = max(len(one.first), len(two.first))
        both_arrays = ArrayShape(
            tuple(one.item(index) & two.item(index) for index in range(count)),
            one.rest & two.rest,
            max(one.least, two.least),
            smaller(one.most, two.most),
            (*one.contains, *two.contains),
            one.unique or two.unique,
        )
        return both_arrays if both_arrays.most is None or both_arrays.least <= both_arrays.most else None
    if isinstance(one, ObjectShape) and isinstance(two, ObjectShape):
        both_objects = ObjectShape(
            (*one.sides, *(side for side in two.sides if side not in one.sides)),
            tuple(dict.fromkeys((*one.required, *two.required))),
            max(one.least, two.least),
            smaller(one.most, two.most),
            (*one.names, *two.names),
        )
        return both_objects if both_objects.most is None or both_objects.least <= both_objects.most else None
    return None


def exclude_literal(shape: Shape, literal: Literal) -> list[Shape]:
    """The shapes of all values of a shape but one."""
    value = literal.value
    if isinstance(shape, Literal):
        return [] if are_equal(shape.value, value) else [shape]
    if isinstance(shape, StringShape) and isinstance(value, str):
        return [replace(shape, excluded=shape.excluded | {value})]
    if isinstance(shape, NumberShape) and is_number(value):
        return [replace(shape, excluded=shape.excluded | {literal.text})]
    return [shape]


def is_number(value: Any) -> bool:
    """Whether a value is a JSON number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def are_equal(one: Any, two: Any) -> bool:
    """Whether two values are the same JSON: 1 is 1.0, but not true."""
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(are_equal, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(are_equal(one[name], two[name]) for name in one)
    return type(one) is type(two) and one == two if not (is_number(one) and is_number(two)) else one == two
