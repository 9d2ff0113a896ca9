"""JSON schemas compiled to regular expressions: every match is JSON on one line and satisfies the schema.

Objects have their properties in the schema's order and no others. A keyword that a regular expression cannot express, or
that is not supported, is refused by name: no keyword is ignored silently.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redraft.constraints import regex_dfa
from redraft.constraints.budget import Budget
from redraft.constraints.errors import PatternError

MAX_DIGITS = 15  # of an integer: all integers of 15 digits are exact as floating-point numbers
MAX_REGEX_LENGTH = 200_000
CHARACTER = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\/bfnrt])'
STRING = f'"{CHARACTER}*"'
INTEGER = f"-?(?:0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
NUMBER = INTEGER + r"(?:\.[0-9]{1,15})?"


def _build_date_regex() -> str:
    """All dates of the Gregorian calendar from 0001-01-01 to 9999-12-31."""
    year = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
    multiple_of_4 = "(?:0[48]|[2468][048]|[13579][26])"  # two digits, without 00
    leap_year = f"(?:[0-9]{{2}}{multiple_of_4}|{multiple_of_4}00)"
    days_28 = "(?:0[1-9]|1[0-9]|2[0-8])"
    days_30 = "(?:0[1-9]|[12][0-9]|30)"
    days_31 = "(?:0[1-9]|[12][0-9]|3[01])"
    month_and_day = f"(?:02-{days_28}|(?:0[469]|11)-{days_30}|(?:0[13578]|1[02])-{days_31})"
    return f"(?:{year}-{month_and_day}|{leap_year}-02-29)"


DATE = _build_date_regex()
TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z"
IPV4_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"(?:{IPV4_BYTE}\.){{3}}{IPV4_BYTE}",
    "email": r"[a-z0-9]+(?:[._-][a-z0-9]+)*@[a-z0-9]+(?:-[a-z0-9]+)*(?:\.[a-z]{2,})+",
}
ANNOTATION_KEYWORDS = {  # they describe a schema and do not restrict it
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly",
    "$defs", "definitions", "$anchor",
}  # fmt: skip
KEYWORDS_OF_TYPE: dict[str, set[str]] = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}
Builder = Callable[[Mapping[str, Any], str, tuple[str, ...]], str]


def build_regex(schema: Mapping[str, Any] | str, budget: Budget | None = None) -> str:
    """The regular expression of a schema, given as an object or as JSON text. It spends from `budget`."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise PatternError(f"the schema is not JSON: {error}") from None
    try:
        return _RegexBuilder(schema).build(schema, "", ())
    except RecursionError:
        raise PatternError("the schema is nested too deeply") from None


class _RegexBuilder:
    """Builds the regular expression of one schema.

    Every builder takes a subschema, its path in the whole schema (for error messages) and the references that led to it.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self.combining_builders: dict[str, Builder] = {  # keywords that define a schema without a type
            "$ref": self._build_reference,
            "enum": self._build_enum,
            "const": lambda schema, path, references: _escape_json(schema["const"]),
            "anyOf": lambda schema, path, references: self._build_any(schema["anyOf"], f"{path}/anyOf", references),
            "oneOf": self._build_one_of,
            "allOf": self._build_all_of,
        }
        self.type_builders: dict[str, Builder] = {
            "string": self._build_string,
            "integer": self._build_integer,
            "number": lambda schema, path, references: NUMBER,
            "boolean": lambda schema, path, references: "(?:true|false)",
            "null": lambda schema, path, references: "null",
            "array": self._build_array,
            "object": self._build_object,
        }

    def build(self, schema: Any, path: str, references: tuple[str, ...]) -> str:
        where = _name_path(path)
        if not isinstance(schema, Mapping):
            raise PatternError(f"{where} must be an object, got {json.dumps(schema)[:60]}")
        keywords = {keyword for keyword in schema if keyword not in ANNOTATION_KEYWORDS}
        for keyword, builder in self.combining_builders.items():
            if keyword in keywords:
                allowed = {keyword, "type"} if keyword in ("enum", "const") else {keyword}
                _refuse_other_keywords(keywords, allowed, where)
                return builder(schema, path, references)
        types = self._find_types(schema, keywords, where)
        _refuse_other_keywords(keywords, {"type"}.union(*(KEYWORDS_OF_TYPE[name] for name in types)), where)
        regex = _join_alternatives([self.type_builders[name](schema, path, references) for name in types])
        if len(regex) > MAX_REGEX_LENGTH:
            raise PatternError(
                f"{where} makes a pattern of {len(regex):,} characters, at most {MAX_REGEX_LENGTH:,} are supported"
            )
        return regex

    def _find_types(self, schema: Mapping[str, Any], keywords: set[str], where: str) -> list[str]:
        """The types that a schema names, or the type that its keywords imply."""
        types = schema.get("type")
        if types is None:
            types = [name for name in ("object", "array", "string") if keywords & KEYWORDS_OF_TYPE[name]]
            if len(types) != 1:
                problem = f"has {min(keywords)!r}, which is not supported" if keywords else "allows anything; name a type"
                raise PatternError(f"{where} {problem}")
        types = types if isinstance(types, list) else [types]
        if not types or not all(isinstance(name, str) and name in KEYWORDS_OF_TYPE for name in types):
            known = ", ".join(KEYWORDS_OF_TYPE)
            raise PatternError(f"{where} has the type {schema.get('type')!r}; known are {known}")
        return types

    def _build_reference(self, schema: Mapping[str, Any], path: str, references: tuple[str, ...]) -> str:
        where = _name_path(path)
        name = schema["$ref"]
        if not isinstance(name, str) or not name.startswith("#"):
            raise PatternError(f"{where} refers to {name!r}; only references inside the schema (#/...) are supported")
        if name in references or name == "#":
            raise PatternError(f"the schema refers to itself ({name}), which is not supported: its nesting has no limit")
        target = self.root
        for part in name.removeprefix("#").strip("/").split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or key not in target:
                raise PatternError(f"{where} refers to {name!r}, which is not there")
            target = target[key]
        return self.build(target, name, (*references, name))

    def _build_enum(self, schema: Mapping[str, Any], path: str, references: tuple[str, ...]) -> str:
        return _join_alternatives([_escape_json(value) for value in _check_list(schema["enum"], f"{path}/enum")])

    def _build_any(self, branches: Any, path: str, references: tuple[str, ...]) -> str:
        checked = _check_list(branches, path)
        return _join_alternatives([self.build(branch, f"{path}/{n}", references) for n, branch in enumerate(checked)])

    def _build_one_of(self, schema: Mapping[str, Any], path: str, references: tuple[str, ...]) -> str:
        branches = _check_list(schema["oneOf"], f"{path}/oneOf")
        regex = self._build_any(branches, f"{path}/oneOf", references)
        types: list[Any] = []
        for branch in branches:
            named = branch.get("type") if isinstance(branch, Mapping) else None
            types += named if isinstance(named, list) else [named]
        if None in types or len(set(types)) < len(types) or {"integer", "number"} <= set(types):
            raise PatternError(f"{_name_path(path)} has 'oneOf' with branches that may overlap; use 'anyOf'")
        return regex

    def _build_all_of(self, schema: Mapping[str, Any], path: str, references: tuple[str, ...]) -> str:
        branches = _check_list(schema["allOf"], f"{path}/allOf")
        if len(branches) > 1:
            raise PatternError(f"{_name_path(path)} has 'allOf' with {len(branches)} parts; only one is supported")
        return self.build(branches[0], f"{path}/allOf/0", references)

    def _build_string(self, schema: Mapping[str, Any], path: str, references: tuple[str, ...]) -> str:
        keywords = set(schema) - ANNOTATION_KEYWORDS
        if "format" in schema:
            _refuse_other_keywords(keywords, {"type", "format"}, _name_path(path))
            if not isinstance(schema["format"], str) or schema["format"] not in FORMATS:
                raise PatternError(f"{path}/format is {schema['format']!r}; known are {', '.join(sorted(FORMATS))}")
            return f'"{FORMATS[schema["format"]]}"'
        if "pattern" in schema:
            _refuse_other_keywords(keywords, {"type", "pattern"}, _name_path(path))
            return f'"(?:{_check_string_pattern(schema["pattern"], path)})"'
        least, most = _read_bounds(schema, "minLength", "maxLength", path)
        return f'"{CHARACTER}{_format_repeat(least, most)}"'

    def _build_integer(self, schema: Mapping[str, Any], path: str, references: tuple[str, ...]) -> str:
        limit = 10**MAX_DIGITS - 1
        low = _read_integer(schema, "minimum", -limit, path)
        high = _read_integer(schema, "maximum", limit, path)
        low = max(low, _read_integer(schema, "exclusiveMinimum", -limit - 1, path) + 1)
        high = min(high, _read_integer(schema, "exclusiveMaximum", limit + 1, path) - 1)
        if (low, high) == (-limit, limit):
            return INTEGER
        if low > high:
            raise PatternError(f"{_name_path(path)} has no whole number between {low} and {high}")
        return integers_between(low, high)

    def _build_array(self, schema: Mapping[str, Any], path: str, references: tuple[str, ...]) -> str:
        if "items" not in schema:
            raise PatternError(f"{_name_path(path)} is an array without 'items': say what it holds")
        item = self.build(schema["items"], f"{path}/items", references)
        least, most = _read_bounds(schema, "minItems", "maxItems", path)
        if most == 0:
            return r"\[\]"
        repeat = _format_repeat(max(0, least - 1), most - 1 if most is not None else None)
        nonempty = rf"\[{item}(?:, {item}){repeat}\]"
        return nonempty if least else rf"(?:\[\]|{nonempty})"

    def _build_object(self, schema: Mapping[str, Any], path: str, references: tuple[str, ...]) -> str:
        where = _name_path(path)
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        additional = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise PatternError(f"{where}: properties must be an object and required a list")
        if not all(isinstance(name, str) for name in required):
            raise PatternError(f"{where}: required must be a list of names, got {required!r}")
        if missing := [name for name in required if name not in properties]:
            raise PatternError(f"{where} requires {missing[0]!r}, which is not among its properties")
        if not isinstance(additional, bool) and (properties or not isinstance(additional, Mapping)):
            raise PatternError(
                f"{path}/additionalProperties may be true or false beside properties, or a schema without them"
            )
        if properties:
            entries = []
            for name, value in properties.items():
                entry = f"{_escape_json(name)}: {self.build(value, f'{path}/properties/{name}', references)}"
                entries.append((entry, name in required))
            return rf"\{{{_join_entries(entries)}\}}"
        if isinstance(additional, Mapping):
            entry = f"{STRING}: {self.build(additional, f'{path}/additionalProperties', references)}"
            return rf"\{{(?:{entry}(?:, {entry})*)?\}}"
        if "properties" not in schema and additional:
            raise PatternError(f"{where} is an object without 'properties': say what it holds")
        return r"\{\}"


def _name_path(path: str) -> str:
    return path or "the schema"


def _refuse_other_keywords(keywords: set[str], allowed: set[str], where: str) -> None:
    if other := sorted(keywords - allowed):
        raise PatternError(f"{where} has {other[0]!r}, which is not supported here")


def _join_entries(entries: Sequence[tuple[str, bool]]) -> str:
    """The entries of an object in order, with commas between those that are present. The flag says which are required."""
    if not entries:
        return ""
    rest = "".join(f", {entry}" if is_required else f"(?:, {entry})?" for entry, is_required in entries[1:])
    first, is_required = entries[0]
    return first + rest if is_required else f"(?:{first}{rest}|{_join_entries(entries[1:])})"


def _join_alternatives(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _escape_json(value: Any) -> str:
    """A regular expression that matches the JSON of exactly this value."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(f"\\{c}" if c in r"\.^$*+?{}[]|()-" else c for c in text)


def _check_list(value: Any, path: str) -> list:
    if not isinstance(value, list) or not value:
        raise PatternError(f"{path} must be a list of at least one")
    return value


def _format_repeat(least: int, most: int | None) -> str:
    return "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"


def _read_bounds(schema: Mapping[str, Any], low: str, high: str, path: str) -> tuple[int, int | None]:
    least = schema.get(low, 0)
    most = schema.get(high)
    for name, value in ((low, least), (high, 0 if most is None else most)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise PatternError(f"{path}/{name} must be a whole number, 0 or more, got {value!r}")
    if most is not None and least > most:
        raise PatternError(f"{_name_path(path)}: {low} is {least}, {high} is {most}")
    return least, most


def _read_integer(schema: Mapping[str, Any], name: str, default: int, path: str) -> int:
    value = schema.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise PatternError(f"{path}/{name} must be a whole number, got {value!r}")
    return int(value)


def _check_string_pattern(pattern: Any, path: str) -> str:
    """The inside of a string's `pattern`, ^...$. It must match no character that JSON would write as an escape."""
    if not isinstance(pattern, str):
        raise PatternError(f"{path}/pattern must be a text, got {pattern!r}")
    backslashes = len(pattern) - 1 - len(pattern[:-1].rstrip("\\"))  # directly before the last character
    if not (pattern.startswith("^") and pattern.endswith("$")) or backslashes % 2:
        raise PatternError(f"{path}/pattern is {pattern!r}; only patterns of the whole text, ^...$, are supported")
    dfa = regex_dfa.compile_dfa(pattern)
    if dfa.transitions_Q256[1:, [*range(32), ord('"'), ord("\\"), 127]].any():
        raise PatternError(f"{path}/pattern {pattern!r} matches quotes, backslashes or control characters; leave them out")
    return pattern.removeprefix("^")[:-1]


def integers_between(low: int, high: int) -> str:
    """A regular expression of the integers from low to high."""
    parts = []
    if low < 0:
        parts += [f"-{part}" for part in _split_into_digit_ranges(max(1, -high), -low)]
    if high >= 0:
        parts += _split_into_digit_ranges(max(0, low), high)
    return _join_alternatives(parts)


def _split_into_digit_ranges(low: int, high: int) -> list[str]:
    """Regular expressions of the integers from low to high, 0 and up: a prefix, a digit range, free digits."""
    parts = []
    if low == 0:
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
    return parts
