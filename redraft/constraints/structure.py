"""Structures: a tree of texts, patterns and schemas, compiled to a regular expression.

The names of the nodes and of their fields are those of XGrammar's structural tags:

    {"type": "const_string", "value": "<call>"}                          this text
    {"type": "regex", "pattern": "[0-9]+"}                               a text that the regular expression matches
    {"type": "json_schema", "json_schema": {"type": "object"}}           JSON of the schema
    {"type": "sequence", "elements": [NODE, NODE]}                       one element after the other
    {"type": "or", "elements": [NODE, NODE]}                             one of the elements
    {"type": "repeat", "content": NODE, "separator": "", "min": 1, "max": null}    null: any number

A schema that has a title and cannot be compiled is named by its title in the error.
"""

import re
from collections.abc import Mapping
from typing import Any

from redraft.constraints import json_schema, regex_dfa
from redraft.constraints.budget import Budget
from redraft.constraints.errors import PatternError, shorten

FIELDS = {
    "const_string": {"value"},
    "regex": {"pattern"},
    "json_schema": {"json_schema"},
    "sequence": {"elements"},
    "or": {"elements"},
    "repeat": {"content", "separator", "min", "max"},
}
MAX_DEPTH = 50  # of nodes inside one another
MAX_REPEAT = 1000


def build_regex(structure: Any, budget: Budget, depth: int = MAX_DEPTH) -> str:
    """The regular expression of a structure. It spends from `budget`. Nodes are nested `depth` times at most."""
    if not depth:
        raise PatternError(f"the structure is nested too deeply: at most {MAX_DEPTH} levels")
    match check_node(structure):
        case {"type": "const_string", "value": str(text)}:
            budget.check_length(len(text), "a text of the structure")
            regex = re.escape(text)
        case {"type": "regex", "pattern": str(pattern)}:
            regex_dfa.parse(pattern, budget)  # one that ends the group around it would be part of another pattern
            regex = f"(?:{pattern})"
        case {"type": "json_schema", "json_schema": schema}:
            regex = build_schema(schema, budget)
        case {"type": "sequence", "elements": [*elements]}:
            regex = "".join(build_regex(element, budget, depth - 1) for element in elements)
        case {"type": "or", "elements": [_, *_] as elements}:
            regex = f"(?:{'|'.join(build_regex(element, budget, depth - 1) for element in elements)})"
        case {"type": "repeat", "content": content, "separator": str(separator), "min": least, "max": most}:
            check_bounds(least, most)
            regex = repeat(build_regex(content, budget, depth - 1), re.escape(separator), least, most)
        case node:
            raise PatternError(f"a node of type {node['type']!r} has a field that it cannot have: {shorten(node)}")
    budget.check_length(len(regex), "the structure")  # a text repeats what it contains
    return regex


def check_node(node: Any) -> Mapping[str, Any]:
    """Refuses what is no node, and a node with other fields than its type has."""
    kind = node.get("type") if isinstance(node, Mapping) else None
    if not isinstance(kind, str) or kind not in FIELDS:
        raise PatternError(f"a node of a structure has one of the types {', '.join(FIELDS)}, got {shorten(node)}")
    if node.keys() != FIELDS[kind] | {"type"}:
        fields = ", ".join(sorted(FIELDS[kind]))
        raise PatternError(f"a node of type {kind!r} has the fields {fields} beside its type, got {shorten(list(node))}")
    return node


def build_schema(schema: Any, budget: Budget) -> str:
    """The regular expression of a schema."""
    try:
        return f"(?:{json_schema.build_regex(schema, budget)})"
    except PatternError as error:
        title = schema.get("title") if isinstance(schema, Mapping) else None
        raise type(error)(f"{title}: {error}" if isinstance(title, str) else str(error)) from None


def check_bounds(least: Any, most: Any) -> None:
    """Refuses bounds of a repetition that are none."""
    are_numbers = type(least) is int and (most is None or type(most) is int)
    if not are_numbers or not 0 <= least <= MAX_REPEAT or (most is not None and not max(1, least) <= most <= MAX_REPEAT):
        raise PatternError(
            f"a repeat has min and max up to {MAX_REPEAT}, min not above max, got {shorten(least)} and {shorten(most)}"
        )


def repeat(item: str, separator: str, least: int, most: int | None) -> str:
    """An item `least` to `most` times, with a separator in between."""
    rest_least = max(least - 1, 0)
    rest_most = "" if most is None else most - 1
    some = f"{item}(?:{separator}{item}){{{rest_least},{rest_most}}}" if most != 1 else item
    return f"(?:{some})" if least else f"(?:{some})?"


def text_without_start(start: str) -> dict[str, Any]:
    """The node of any text that does not begin with `start`; white space before that does not count."""
    rest = ""
    for character in reversed(start[1:]):
        own = re.escape(character)
        follows = f"|{own}{rest}" if rest else ""
        rest = f"(?:[^{own}][\\s\\S]*{follows})?"
    first = re.escape(start[0])
    return {"type": "regex", "pattern": f"\\s*(?:[^\\s{first}][\\s\\S]*|{first}{rest})?"}
