"""Structures: a tree of texts, patterns and schemas.

The names of the nodes and of their fields are those of XGrammar's structural tags:

    {"type": "const_string", "value": "<call>"}                          this text
    {"type": "regex", "pattern": "[0-9]+"}                               a text that the regular expression matches
    {"type": "json_schema", "json_schema": {"type": "object"}}           JSON of the schema
    {"type": "sequence", "elements": [NODE, NODE]}                       one element after the other
    {"type": "or", "elements": [NODE, NODE]}                             one of the elements
    {"type": "repeat", "content": NODE, "separator": "", "min": 1, "max": null}    null: any number

A schema that has a title and cannot be compiled is named by its title in the error.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from redraft.constraints.budget import Budget
from redraft.constraints.errors import PatternError, shorten
from redraft.constraints.json_schema import SchemaReader
from redraft.constraints.nfa import NFA
from redraft.constraints.prefix_grammar import to_grammar
from redraft.constraints.regex_dfa import add_regex
from redraft.constraints.schema_nfa import compile_schema

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


def add_structure(nfa: NFA, start: int, structure: Any, depth: int = MAX_DEPTH) -> int:
    """Adds the texts of a structure to an automaton. Nodes are nested `depth` times at most."""
    if not depth:
        raise PatternError(f"the structure is nested too deeply: at most {MAX_DEPTH} levels")
    match check_node(structure):
        case {"type": "const_string", "value": str(text)}:
            return nfa.add_text(start, text.encode("utf-8", "surrogatepass"))
        case {"type": "regex", "pattern": str(pattern)}:
            return add_regex(nfa, start, pattern)
        case {"type": "json_schema", "json_schema": schema}:
            with naming(schema):
                return nfa.add_dfa(start, compile_schema(schema, nfa.budget))
        case {"type": "sequence", "elements": [*elements]}:
            for element in elements:
                start = add_structure(nfa, start, element, depth - 1)
            return start
        case {"type": "or", "elements": [_, *_] as elements}:
            end = nfa.add_state()
            for element in elements:
                begin = nfa.add_state()
                nfa.link(start, begin)
                nfa.link(add_structure(nfa, begin, element, depth - 1), end)
            return end
        case {"type": "repeat", "content": content, "separator": str(separator), "min": least, "max": most}:
            check_bounds(least, most)
            return _add_repeat(nfa, start, content, separator.encode("utf-8", "surrogatepass"), least, most, depth - 1)
        case node:
            raise PatternError(f"a node of type {node['type']!r} has a field that it cannot have: {shorten(node)}")


def _add_repeat(nfa: NFA, start: int, content: Any, separator: bytes, least: int, most: int | None, depth: int) -> int:
    end = nfa.add_state()
    if not least:
        nfa.link(start, end)
    begin = nfa.add_state()
    nfa.link(start, begin)
    for count in range(1, (most if most is not None else max(least, 1)) + 1):
        last = add_structure(nfa, begin, content, depth)
        if count >= least:
            nfa.link(last, end)
        following = begin if count == max(least, 1) and most is None else nfa.add_state()
        nfa.link(nfa.add_text(last, separator), following)
        begin = following
    return end


def to_lark(structure: Any, budget: Budget) -> tuple[str, bool]:
    """The structure as a grammar of llguidance, and whether some array has only different items."""
    writer = _LarkWriter(budget)
    return f"start: {writer.write(structure)}\n", writer.has_distinct


class _LarkWriter:
    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.has_distinct = False

    def write(self, node: Any) -> str:
        """A node that `add_structure` has checked."""
        match node["type"]:
            case "const_string":
                return json.dumps(node["value"]) if node["value"] else '""'
            case "regex":
                pattern = node["pattern"].replace("/", r"\/").replace("\n", r"\n")
                return f"/{pattern}/"
            case "json_schema":
                with naming(node["json_schema"]):
                    reader = SchemaReader(node["json_schema"], self.budget)
                    grammar = json.loads(to_grammar(reader))
                self.has_distinct |= grammar["distinct"]
                return f"%json {json.dumps(grammar['schema'], ensure_ascii=False)}"
            case "sequence":
                return "(" + " ".join(map(self.write, node["elements"])) + ")"
            case "or":
                return "(" + " | ".join(map(self.write, node["elements"])) + ")"
        item = self.write(node["content"])
        least, most = node["min"], node["max"]
        rest = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        some = f"({item} ({json.dumps(node['separator'])} {item}){rest})" if most != 1 else f"({item})"
        return some if least else f"{some}?"


def check_node(node: Any) -> Mapping[str, Any]:
    """Refuses what is no node, and a node with other fields than its type has."""
    kind = node.get("type") if isinstance(node, Mapping) else None
    if not isinstance(kind, str) or kind not in FIELDS:
        raise PatternError(f"a node of a structure has one of the types {', '.join(FIELDS)}, got {shorten(node)}")
    if node.keys() != FIELDS[kind] | {"type"}:
        fields = ", ".join(sorted(FIELDS[kind]))
        raise PatternError(f"a node of type {kind!r} has the fields {fields} beside its type, got {shorten(list(node))}")
    return node


@contextmanager
def naming(schema: Any) -> Iterator[None]:
    """Errors of a schema begin with its title."""
    try:
        yield
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


def text_without_start(start: str) -> dict[str, Any]:
    """The node of any text that does not begin with `start`; white space before that does not count."""
    rest = ""
    for character in reversed(start[1:]):
        own = re.escape(character)
        follows = f"|{own}{rest}" if rest else ""
        rest = f"(?:[^{own}][\\s\\S]*{follows})?"
    first = re.escape(start[0])
    return {"type": "regex", "pattern": f"\\s*(?:[^\\s{first}][\\s\\S]*|{first}{rest})?"}
