"""Hostile patterns and schemas: small requests that cost much if nothing counts the work. Strategies for hypothesis."""

import json
from typing import Any

from hypothesis import strategies as st


def doubling_references(levels: int, keyword: str = "anyOf") -> dict[str, Any]:
    """Every definition contains the next one twice: the text of the last one occurs 2**levels times."""
    definitions: dict[str, Any] = {f"d{levels}": {"type": "string"}}
    for level in range(levels):
        reference = {"$ref": f"#/$defs/d{level + 1}"}
        parts: dict[str, Any] = {
            "anyOf": {"anyOf": [reference, dict(reference)]},
            "oneOf": {"anyOf": [reference, {"type": "array", "items": reference}]},
            "properties": {"type": "object", "properties": {"a": reference, "b": reference}, "required": ["a"]},
            "items": {"type": "array", "items": reference},
        }
        definitions[f"d{level}"] = parts[keyword]
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def chained_references(count: int, length: int) -> dict[str, Any]:
    """Many definitions with long texts: each contains the one before it."""
    definitions: dict[str, Any] = {"d0": {"const": "x" * length}}
    for number in range(count):
        definitions[f"d{number + 1}"] = {"anyOf": [{"$ref": f"#/$defs/d{number}"}, {"const": number}]}
    branches = [{"$ref": f"#/$defs/d{number}"} for number in range(count + 1)]
    return {"anyOf": branches, "$defs": definitions}


def optional_properties(count: int, length: int) -> dict[str, Any]:
    """An object whose properties are all optional."""
    names = [f"{number}".ljust(length, "x") for number in range(count)]
    return {"type": "object", "properties": {name: {"type": "null"} for name in names}}


def pattern_per_property(count: int, pattern: str) -> dict[str, Any]:
    """An object with different patterns."""
    properties = {f"p{number}": {"type": "string", "pattern": f"^{number}{pattern}$"} for number in range(count)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def nested_arrays(depth: int) -> dict[str, Any]:
    """Arrays of arrays: the text of the items doubles at every depth."""
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


EVERY_OTHER = "".join(map(chr, range(0x100, 0xA000, 2)))
REGEXES = (
    "[a-z ]{0,4500}",
    "[a-z ]{0,4900}x",
    "(a*){2000}",
    "(?:a?){3000}",
    "(?:a?b?){1500}",
    "a{200000}",
    "((a{100}){100}){100}",
    "(?:(?:(?:a|b){9}|c){9}|d){9}",
    ".*a.{12}",
    ".*a.{4000}",
    "(?:.*a.{3}){5}",
    r"(?:\w|é){0,60}",
    r"\w{200}",
    "(?i)[a-\uffff]{3}",
    "(?i)" + "".join(f"[{chr(code)}-\uffff]" for code in range(97, 123)) * 40,
    f"[{EVERY_OTHER}]{{0,30}}",
    "|".join(f"[{EVERY_OTHER[number:]}]" for number in range(4)),
    "a" * 1_000_000,
    "(?:" * 50_000,
    "(" * 900 + ")" * 900,
    "a" * 49_000 + "|" + "a" * 49_000,
    "|".join(f"{number:06}" for number in range(14_000)),
    "|".join(f"{number:06}" for number in range(2_500)),
    "(a)" * 33_000,
    "a?" * 45_000,
    "(?:a|b|)" * 2_000,
    "(?:[a-f]|[c-k]|[g-z]){1,1000}",
    "(?:(?:a|ab|abc){0,30}x?){0,30}",
    f"(?P<{'n' * 90_000}>a)(?P<{'n' * 9_000}>a)",
)
SCHEMAS: tuple[dict[str, Any] | str, ...] = (
    *(
        doubling_references(levels, keyword)
        for levels in (14, 18, 40)
        for keyword in ("anyOf", "oneOf", "properties", "items")
    ),
    chained_references(2_000, 40_000),
    chained_references(300, 3),
    optional_properties(450, 2_000),
    optional_properties(2_000, 4),
    optional_properties(450, 4),
    pattern_per_property(400, "(?i:[a-z]{2}){3}"),
    pattern_per_property(400, "[é-ü]{0,90}"),
    pattern_per_property(2, ".*a.{12}"),
    nested_arrays(16),
    nested_arrays(90),
    {"enum": list(range(300_000))},
    {"enum": ["x" * 200_000]},
    {"enum": [float("nan")]},
    {"const": float("inf")},
    {"type": "array", "items": {"type": "null"}, "minItems": 10**9},
    {"type": "array", "items": {"type": "string"}, "maxItems": 19_000},
    {"type": "string", "maxLength": 10**9},
    {"type": "string", "maxLength": 10**5_000},
    {"type": "string", "minLength": 19_000},
    {"type": "integer", "minimum": 10**400},
    {"type": "integer", "maximum": -(10**5_000)},
    {"type": "integer", "minimum": float("nan")},
    {"type": "integer", "maximum": float("inf")},
    {"type": "integer", "minimum": -(10**20) + 1, "maximum": 10**20 - 1},
    {"type": ["string", "null"] * 50_000},
    {"type": "x" * 1_000_000},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b" * 1_000_000]},
    {"$ref": "#/" + "a/" * 400_000},
    {"anyOf": [{"type": "null"}] * 300_000},
    {"x" * 1_000_000: 1},
    '{"const": ' + "9" * 5_000 + "}",
    '{"a": ' * 100_000,
    "[" * 900_000,
    " " * 2_000_000,
    json.dumps({"type": "string", "description": "x" * 500_000}),
)


def hostile_regexes() -> st.SearchStrategy[str]:
    """Regular expressions that double, nest and count."""
    atoms = st.sampled_from(["a", "[a-f]", ".", r"\w", "é", "[^a]", "(?i:[a-z])", "(?i:ß)", "ab|abc", "", r"\d+"])
    counts = st.sampled_from(["*", "+", "?", "{3}", "{0,40}", "{1,900}", "{5000}", "{0,100000}", "{2,}", "{4294967294}"])

    def extend(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.tuples(inner, counts).map(lambda parts: f"(?:{parts[0]}){parts[1]}"),
            st.tuples(inner, inner).map(lambda parts: f"(?:{parts[0]}|{parts[1]})"),
            st.tuples(inner, st.integers(1, 300)).map(lambda parts: f"(?:{parts[0]})" * parts[1]),
            st.tuples(inner, st.integers(1, 300)).map(lambda parts: "(?:" * parts[1] + parts[0] + ")?" * parts[1]),
            st.tuples(inner, inner).map(lambda parts: f".*{parts[0]}.{{12}}{parts[1]}"),
        )

    return st.sampled_from(REGEXES) | st.recursive(atoms, extend, max_leaves=6)


def hostile_schemas() -> st.SearchStrategy[dict[str, Any] | str]:
    """JSON schemas that double, nest and count, as objects or as JSON text."""
    numbers = st.sampled_from([0, 1, 3, 40, 5_000, 10**9, 10**400, -1, 1.5, float("inf"), float("nan"), True, "1"])
    leaves: st.SearchStrategy[Any] = st.one_of(
        st.sampled_from([{"type": "string"}, {"type": "integer"}, {"type": "null"}, {}, True, {"$ref": "#"}]),
        st.builds(lambda low, high: {"type": "string", "minLength": low, "maxLength": high}, numbers, numbers),
        st.builds(lambda low, high: {"type": "integer", "minimum": low, "maximum": high}, numbers, numbers),
        st.builds(lambda regex: {"type": "string", "pattern": f"^{regex}$"}, hostile_regexes()),
        st.builds(lambda count: {"enum": [f"word {number}" for number in range(count)]}, st.integers(1, 1_000)),
    )

    def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.builds(lambda schema, count: {"anyOf": [schema] * count}, inner, st.integers(1, 40)),
            st.builds(lambda schema, most: {"type": "array", "items": schema, "maxItems": most}, inner, numbers),
            st.builds(
                lambda schema, count, length: {
                    "type": "object",
                    "properties": {f"{number}".ljust(length, "x"): schema for number in range(count)},
                },
                inner,
                st.integers(1, 40),
                st.integers(1, 200),
            ),
            st.builds(lambda schema: {"type": "object", "additionalProperties": schema}, inner),
        )

    built = st.recursive(leaves, extend, max_leaves=4)
    doubling = st.builds(doubling_references, st.integers(1, 60), st.sampled_from(["anyOf", "oneOf", "properties", "items"]))
    return st.one_of(st.sampled_from(SCHEMAS), doubling, built, built.map(json.dumps))
