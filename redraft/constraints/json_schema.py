"""A JSON schema as a regular expression: every text that matches is JSON, on one line, and satisfies the schema.

Objects have their properties in the order of the schema and no others. What a regular expression cannot say, or what is not
supported, is refused by name: nothing is left out silently.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redraft.constraints import regex_dfa
from redraft.constraints.regex_dfa import PatternError

DIGITS = 15  # of a whole number at the most: all of them are exact as floating-point numbers
LARGEST = 200_000  # characters of a pattern
CHARACTER = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\/bfnrt])'
STRING = f'"{CHARACTER}*"'
WHOLE = f"-?(?:0|[1-9][0-9]{{0,{DIGITS - 1}}})"
NUMBER = WHOLE + r"(?:\.[0-9]{1,15})?"
FORMATS = {
    "date": r"[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])",  # the days that every month has
    "time": r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])",
    "email": r"[a-z0-9]+(?:[._-][a-z0-9]+)*@[a-z0-9]+(?:-[a-z0-9]+)*(?:\.[a-z]{2,})+",
}
FORMATS["date-time"] = f"{FORMATS['date']}T{FORMATS['time']}"
TOLD = {  # keywords that only tell
    *("title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly"),
    *("$defs", "definitions", "$anchor"),
}
KEYWORDS_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}


def build_regex(schema: Mapping[str, Any] | str) -> str:
    """The regular expression of a schema, given as an object or as its JSON."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise PatternError(f"the schema is not JSON: {error}") from None
    try:
        return _Schema(schema).of(schema, "", ())
    except RecursionError:
        raise PatternError("the schema is nested too deeply") from None


class _Schema:
    """One schema, which its parts may refer to."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def of(self, schema: Any, at: str, seen: tuple[str, ...]) -> str:
        """A part of it, found at `at`, inside of these references."""
        where = at or "the schema"
        if not isinstance(schema, Mapping):
            raise PatternError(f"{where} must be an object, got {json.dumps(schema)[:60]}")
        keys = {key for key in schema if key not in TOLD}
        for key, make in self._whole_keywords.items():
            if key in keys:
                self._only(keys, {key, "type"} if key in ("enum", "const") else {key}, where)
                return make(schema, at, seen)
        kinds = schema.get("type")
        if kinds is None:
            kinds = [kind for kind in ("object", "array", "string") if keys & KEYWORDS_OF_TYPE[kind]]
            if len(kinds) != 1:
                what = f"has {sorted(keys)[0]!r}, which is not supported" if keys else "allows anything; name a type"
                raise PatternError(f"{where} {what}")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if not kinds or not all(isinstance(kind, str) and kind in KEYWORDS_OF_TYPE for kind in kinds):
            raise PatternError(f"{where} has the type {schema.get('type')!r}; known are {', '.join(KEYWORDS_OF_TYPE)}")
        self._only(keys, {"type"}.union(*(KEYWORDS_OF_TYPE[kind] for kind in kinds)), where)
        makers = {"string": self._string, "integer": self._integer, "array": self._array, "object": self._object}
        fixed = {"number": NUMBER, "boolean": "(?:true|false)", "null": "null"}
        found = _either([fixed[kind] if kind in fixed else makers[kind](schema, at, seen) for kind in kinds])
        if len(found) > LARGEST:
            raise PatternError(f"{where} makes a pattern of {len(found):,} characters, at most {LARGEST:,} can be held")
        return found

    @property
    def _whole_keywords(self) -> dict[str, Callable[..., str]]:
        return {
            "$ref": self._reference,
            "enum": lambda schema, at, seen: _either([_literal(value) for value in _list(schema["enum"], f"{at}/enum")]),
            "const": lambda schema, at, seen: _literal(schema["const"]),
            "anyOf": lambda schema, at, seen: self._any(schema["anyOf"], f"{at}/anyOf", seen),
            "oneOf": self._one,
            "allOf": self._all,
        }

    def _only(self, keys: set[str], known: set[str], where: str) -> None:
        if extra := sorted(keys - known):
            raise PatternError(f"{where} has {extra[0]!r}, which is not supported here")

    def _reference(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> str:
        name = schema["$ref"]
        if not isinstance(name, str) or not name.startswith("#"):
            raise PatternError(
                f"{at or 'the schema'} refers to {name!r}; only references inside the schema (#/...) are supported"
            )
        if name in seen or name == "#":
            raise PatternError(f"the schema refers to itself ({name}): no page can hold what has no end")
        found = self.whole
        for part in name.removeprefix("#").strip("/").split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or part not in found:
                raise PatternError(f"{at or 'the schema'} refers to {name!r}, which is not there")
            found = found[part]
        return self.of(found, name, (*seen, name))

    def _any(self, branches: Any, at: str, seen: tuple[str, ...]) -> str:
        return _either([self.of(branch, f"{at}/{n}", seen) for n, branch in enumerate(_list(branches, at))])

    def _one(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> str:
        branches = _list(schema["oneOf"], f"{at}/oneOf")
        kinds = [branch.get("type") if isinstance(branch, Mapping) else None for branch in branches]
        flat = [kind for some in kinds for kind in (some if isinstance(some, list) else [some])]
        if None in flat or len(set(flat)) < len(flat) or {"integer", "number"} <= set(flat):
            raise PatternError(f"{at or 'the schema'} has 'oneOf' with branches that may overlap; use 'anyOf'")
        return self._any(branches, f"{at}/oneOf", seen)

    def _all(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> str:
        branches = _list(schema["allOf"], f"{at}/allOf")
        if len(branches) > 1:
            raise PatternError(f"{at or 'the schema'} has 'allOf' with {len(branches)} parts; only one is supported")
        return self.of(branches[0], f"{at}/allOf/0", seen)

    def _string(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> str:
        if "format" in schema or "pattern" in schema:
            self._only(
                set(schema) - TOLD, {"type", "format"} if "format" in schema else {"type", "pattern"}, at or "the schema"
            )
        if "format" in schema:
            if not isinstance(schema["format"], str) or schema["format"] not in FORMATS:
                raise PatternError(f"{at}/format is {schema['format']!r}; known are {', '.join(sorted(FORMATS))}")
            return f'"{FORMATS[schema["format"]]}"'
        if "pattern" in schema:
            return f'"(?:{_inside_a_string(schema["pattern"], at)})"'
        least, most = _bounds(schema, "minLength", "maxLength", at)
        return f'"{CHARACTER}{_times(least, most)}"'

    def _integer(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> str:
        limit = 10**DIGITS - 1
        low, high = _number(schema, "minimum", -limit, at), _number(schema, "maximum", limit, at)
        low = max(low, _number(schema, "exclusiveMinimum", -limit - 1, at) + 1)
        high = min(high, _number(schema, "exclusiveMaximum", limit + 1, at) - 1)
        if (low, high) == (-limit, limit):
            return WHOLE
        if low > high:
            raise PatternError(f"{at or 'the schema'} has no whole number between {low} and {high}")
        return integers_between(low, high)

    def _array(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> str:
        if "items" not in schema:
            raise PatternError(f"{at or 'the schema'} is an array without 'items': say what it holds")
        one = self.of(schema["items"], f"{at}/items", seen)
        least, most = _bounds(schema, "minItems", "maxItems", at)
        if most == 0:
            return r"\[\]"
        more = _times(max(0, least - 1), most - 1 if most is not None else None)
        filled = rf"\[{one}(?:, {one}){more}\]"
        return filled if least else rf"(?:\[\]|{filled})"

    def _object(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise PatternError(f"{at or 'the schema'}: properties must be an object and required a list")
        if not all(isinstance(name, str) for name in required):
            raise PatternError(f"{at or 'the schema'}: required must be a list of names, got {required!r}")
        more = schema.get("additionalProperties", True)
        if missing := [name for name in required if name not in properties]:
            raise PatternError(f"{at or 'the schema'} requires {missing[0]!r}, which is not among its properties")
        if not isinstance(more, bool) and (properties or not isinstance(more, Mapping)):
            raise PatternError(f"{at}/additionalProperties may be true or false beside properties, or a schema without them")
        if not properties:
            if not isinstance(more, Mapping):
                if "properties" not in schema and more:
                    raise PatternError(f"{at or 'the schema'} is an object without 'properties': say what it holds")
                return r"\{\}"
            entry = f"{STRING}: {self.of(more, f'{at}/additionalProperties', seen)}"
            return rf"\{{(?:{entry}(?:, {entry})*)?\}}"
        entries = []
        for name, value in properties.items():
            entries.append((f"{_literal(name)}: {self.of(value, f'{at}/properties/{name}', seen)}", name in required))
        return rf"\{{{_entries(entries)}\}}"


def _entries(entries: Sequence[tuple[str, bool]]) -> str:
    """Entries in order with commas between those that are there; the flag says which must be."""
    if not entries:
        return ""
    behind = "".join(f", {entry}" if needed else f"(?:, {entry})?" for entry, needed in entries[1:])
    first, needed = entries[0]
    return first + behind if needed else f"(?:{first}{behind}|{_entries(entries[1:])})"


def _either(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _literal(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return "".join(f"\\{c}" if c in r"\.^$*+?{}[]|()-" else c for c in text)


def _list(value: Any, at: str) -> list:
    if not isinstance(value, list) or not value:
        raise PatternError(f"{at} must be a list of at least one")
    return value


def _times(least: int, most: int | None) -> str:
    return "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"


def _bounds(schema: Mapping[str, Any], low: str, high: str, at: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for name, value in ((low, least), (high, 0 if most is None else most)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise PatternError(f"{at}/{name} must be a whole number, 0 or more, got {value!r}")
    if most is not None and least > most:
        raise PatternError(f"{at or 'the schema'}: {low} is {least}, {high} is {most}")
    return least, most


def _number(schema: Mapping[str, Any], name: str, otherwise: int, at: str) -> int:
    value = schema.get(name, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise PatternError(f"{at}/{name} must be a whole number, got {value!r}")
    return int(value)


def _inside_a_string(pattern: Any, at: str) -> str:
    """A pattern for the text of a string, which must need no escapes, since JSON would write them differently."""
    if not isinstance(pattern, str):
        raise PatternError(f"{at}/pattern must be a text, got {pattern!r}")
    escaped = len(pattern) - 1 - len(pattern[:-1].rstrip("\\"))  # backslashes before the last character
    if not (pattern.startswith("^") and pattern.endswith("$")) or escaped % 2:
        raise PatternError(f"{at}/pattern is {pattern!r}; only patterns of the whole text, ^...$, are supported")
    next_Q256, _, _ = regex_dfa.compile_dfa(pattern)
    if next_Q256[1:, [*range(32), 34, 92, 127]].any():
        raise PatternError(f"{at}/pattern {pattern!r} matches quotes, backslashes or control characters; leave them out")
    return pattern.removeprefix("^")[:-1]


def integers_between(low: int, high: int) -> str:
    """A regular expression of the whole numbers from low to high."""
    parts = []
    if low < 0:
        parts += [f"-{part}" for part in _upwards(max(1, -high), -low)]
    if high >= 0:
        parts += _upwards(max(0, low), high)
    return _either(parts)


def _upwards(low: int, high: int) -> list[str]:
    """Numbers from low to high, 0 and up, as runs whose last digits are free."""
    parts = []
    if low == 0:
        parts, low = ["0"], 1
    while low <= high:
        free = 0
        while low % 10 ** (free + 1) == 0 and low + 10 ** (free + 1) - 1 <= high:
            free += 1
        step = 10**free
        digit, count = low // step % 10, 1
        while digit + count <= 9 and low + (count + 1) * step - 1 <= high:
            count += 1
        prefix = str(low // step // 10) if low // step >= 10 else ""
        run = str(digit) if count == 1 else f"[{digit}-{digit + count - 1}]"
        parts.append(prefix + run + (f"[0-9]{{{free}}}" if free else ""))
        low += count * step
    return parts
