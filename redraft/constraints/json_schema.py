"""JSON schemas compiled to regular expressions: every match is JSON on one line and satisfies the schema.

Objects have their properties in the schema's order and no others. A keyword that a regular expression cannot express, or
that is not supported, is refused by name: no keyword is ignored silently.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redraft.config import JSONDepthError, parse_json
from redraft.constraints import regex_dfa
from redraft.constraints.budget import Budget
from redraft.constraints.errors import MAX_SHOWN, BudgetError, PatternError, shorten

MAX_DIGITS = 15  # of an integer with a bound: all integers of 15 digits are exact as floating-point numbers
# Where a schema has no limit, a value has at most so many ...
FREE_DIGITS = 9  # digits, before the point
FREE_DECIMALS = 6  # digits behind the point
MAIL_PART = (
    "[a-z0-9]{1,12}"  # characters of a part of an e-mail address, at most three parts before the @ and four behind it
)
MAX_BOUND_DIGITS = 20  # of `minimum` and `maximum`
MAX_REPEAT = 20_000  # `minLength`, `maxLength`, `minItems`, `maxItems`
MAX_SCHEMA_CHARACTERS = 1_000_000  # of JSON text
MAX_DEPTH = 100  # of subschemas and references inside one another; see config/json_text.py for the reason
MAX_PATH = 120  # characters of a path in an error message

# Units of the budget (see budget.py for the unit) for each ...
NODE_WORK = 200  # subschema
KEYWORD_WORK = 10  # keyword of a subschema, part of a reference
VALUE_WORK = 60  # value of an enum, name of a property
ESCAPE_WORK = 1  # character of them
INTEGER_WORK = 5_000  # range of integers
COPY_WORK = 1  # character of a regular expression that is kept
CHARACTER = r'(?:[^"\\\x00-\x1f\x7f]|\\["\\/bfnrt])'
STRING = f'"{CHARACTER}*"'
INTEGER = f"-?(?:0|[1-9][0-9]{{0,{FREE_DIGITS - 1}}})"
NUMBER = rf"{INTEGER}(?:\.[0-9]{{1,{FREE_DECIMALS}}})?"


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
    "email": rf"{MAIL_PART}(?:[._+-]{MAIL_PART}){{0,2}}@(?:{MAIL_PART}(?:-{MAIL_PART})?\.){{1,3}}[a-z]{{2,10}}",
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
ESCAPES = str.maketrans({character: f"\\{character}" for character in r"\.^$*+?{}[]|()-"})
Builder = Callable[[Mapping[str, Any], str], str]


def build_regex(schema: Mapping[str, Any] | str, budget: Budget | None = None) -> str:
    """The regular expression of a schema, given as an object or as JSON text. It spends from `budget`."""
    if isinstance(schema, str):
        schema = _parse_schema(schema)
    return _RegexBuilder(schema, budget if budget is not None else Budget()).build(schema, "")


def _parse_schema(text: str) -> Any:
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise BudgetError(f"the schema has {len(text):,} characters, at most {MAX_SCHEMA_CHARACTERS:,} are supported")
    try:
        return parse_json(text)
    except JSONDepthError:
        raise PatternError("the schema is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise PatternError(f"the schema is not JSON: {error}") from None
    except ValueError:  # Python reads no integer of more than 4,300 digits
        raise PatternError("the schema has an integer with thousands of digits: make it smaller") from None


class _RegexBuilder:
    """Builds the regular expression of one schema, every subschema once.

    Every builder takes a subschema and its path in the whole schema, for error messages. Lengths are checked before texts
    are concatenated, because a text repeats what its references contain.
    """

    def __init__(self, root: Any, budget: Budget) -> None:
        self.root = root
        self.budget = budget
        self.built: dict[int, tuple[Any, str]] = {}  # id of a subschema -> the subschema, so that it lives, and its regex
        self.unfinished: set[int] = set()  # ids of the subschemas that contain the current one
        self.combining_builders: dict[str, Builder] = {  # keywords that define a schema without a type
            "$ref": self._build_reference,
            "enum": self._build_enum,
            "const": lambda schema, path: self._escape_json(schema["const"], f"{path}/const"),
            "anyOf": lambda schema, path: self._build_any(schema["anyOf"], f"{path}/anyOf"),
            "oneOf": self._build_one_of,
            "allOf": self._build_all_of,
        }
        self.type_builders: dict[str, Builder] = {
            "string": self._build_string,
            "integer": self._build_integer,
            "number": lambda schema, path: NUMBER,
            "boolean": lambda schema, path: "(?:true|false)",
            "null": lambda schema, path: "null",
            "array": self._build_array,
            "object": self._build_object,
        }

    def build(self, schema: Any, path: str) -> str:
        """The regular expression of a subschema."""
        if len(path) > MAX_PATH:  # nested paths would grow without limit
            path = f"...{path[-MAX_PATH:]}"
        if id(schema) not in self.built:
            if len(self.unfinished) >= MAX_DEPTH:
                raise PatternError(f"the schema is nested too deeply: at most {MAX_DEPTH} levels")
            self.unfinished.add(id(schema))
            self.built[id(schema)] = (schema, self._build_new(schema, path))
            self.unfinished.remove(id(schema))
        return self.built[id(schema)][1]

    def _build_new(self, schema: Any, path: str) -> str:
        where = _name_path(path)
        if not isinstance(schema, Mapping):
            raise PatternError(f"{where} must be an object, got {shorten(schema)}")
        self.budget.spend(NODE_WORK + KEYWORD_WORK * len(schema), where)
        keywords = {keyword for keyword in schema if keyword not in ANNOTATION_KEYWORDS}
        for keyword, builder in self.combining_builders.items():
            if keyword in keywords:
                allowed = {keyword, "type"} if keyword in ("enum", "const") else {keyword}
                _refuse_other_keywords(keywords, allowed, where)
                return builder(schema, path)
        types = self._find_types(schema, keywords, where)
        _refuse_other_keywords(keywords, {"type"}.union(*(KEYWORDS_OF_TYPE[name] for name in types)), where)
        return self._join_alternatives([self.type_builders[name](schema, path) for name in types], path)

    def _concatenate(self, parts: Sequence[str], path: str) -> str:
        """The parts one after another, if they are not too long together."""
        length = sum(map(len, parts))
        self.budget.check_length(length, _name_path(path))
        self.budget.spend(len(parts) + length * COPY_WORK, _name_path(path))
        return "".join(parts)

    def _join_alternatives(self, parts: Sequence[str], path: str) -> str:
        """One of the parts; parts that are equal are one alternative."""
        different = list(dict.fromkeys(parts))
        if len(different) == 1:
            return different[0]
        separators = ["(?:", *["|"] * (len(different) - 1)]
        pieces = [piece for pair in zip(separators, different, strict=True) for piece in pair]
        return self._concatenate([*pieces, ")"], path)

    def _escape_json(self, value: Any, path: str) -> str:
        """A regular expression that matches the JSON of exactly this value."""
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):  # NaN, thousands of digits, an object in itself
            raise PatternError(f"{_name_path(path)} has {shorten(value)}, which JSON cannot express") from None
        self.budget.check_length(len(text), _name_path(path))
        self.budget.spend(VALUE_WORK + len(text) * ESCAPE_WORK, _name_path(path))
        return text.translate(ESCAPES)

    def _find_types(self, schema: Mapping[str, Any], keywords: set[str], where: str) -> list[str]:
        """The types that a schema names, or the type that its keywords imply."""
        types = schema.get("type")
        if types is None:
            types = [name for name in ("object", "array", "string") if keywords & KEYWORDS_OF_TYPE[name]]
            if len(types) != 1:
                problem = (
                    f"has {shorten(min(keywords, key=str))}, which is not supported"
                    if keywords
                    else "allows anything; name a type"
                )
                raise PatternError(f"{where} {problem}")
        types = types if isinstance(types, list) else [types]
        self.budget.spend(KEYWORD_WORK * len(types), where)
        if not types or not all(isinstance(name, str) and name in KEYWORDS_OF_TYPE for name in types):
            known = ", ".join(KEYWORDS_OF_TYPE)
            raise PatternError(f"{where} has the type {shorten(schema.get('type'))}; known are {known}")
        return list(dict.fromkeys(types))

    def _build_reference(self, schema: Mapping[str, Any], path: str) -> str:
        where = _name_path(path)
        name = schema["$ref"]
        if not isinstance(name, str) or not name.startswith("#"):
            raise PatternError(f"{where} refers to {shorten(name)}; only references inside the schema (#/...) are supported")
        target = self.root
        parts = name.removeprefix("#").strip("/").split("/") if name != "#" else []
        self.budget.spend(KEYWORD_WORK * len(parts), where)
        for part in parts:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or key not in target:
                raise PatternError(f"{where} refers to {shorten(name)}, which is not there")
            target = target[key]
        if id(target) in self.unfinished:
            raise PatternError(
                f"the schema refers to itself ({shorten(name)}), which is not supported: its nesting has no limit"
            )
        return self.build(target, name[:MAX_SHOWN])

    def _build_enum(self, schema: Mapping[str, Any], path: str) -> str:
        path = f"{path}/enum"
        values = _check_list(schema["enum"], path)
        self.budget.check_length(2 * len(values) + 3, path)  # a character and a separator at the least
        return self._join_alternatives([self._escape_json(value, path) for value in values], path)

    def _build_any(self, branches: Any, path: str) -> str:
        checked = _check_list(branches, path)
        self.budget.spend(KEYWORD_WORK * len(checked), path)
        return self._join_alternatives([self.build(branch, f"{path}/{n}") for n, branch in enumerate(checked)], path)

    def _build_one_of(self, schema: Mapping[str, Any], path: str) -> str:
        branches = _check_list(schema["oneOf"], f"{path}/oneOf")
        regex = self._build_any(branches, f"{path}/oneOf")
        types: list[Any] = []
        for branch in branches:
            named = branch.get("type") if isinstance(branch, Mapping) else None
            types += named if isinstance(named, list) else [named]
        if (
            not all(isinstance(name, str) for name in types)
            or len(set(types)) < len(types)
            or {"integer", "number"} <= set(types)
        ):
            raise PatternError(f"{_name_path(path)} has 'oneOf' with branches that may overlap; use 'anyOf'")
        return regex

    def _build_all_of(self, schema: Mapping[str, Any], path: str) -> str:
        branches = _check_list(schema["allOf"], f"{path}/allOf")
        if len(branches) > 1:
            raise PatternError(f"{_name_path(path)} has 'allOf' with {len(branches)} parts; only one is supported")
        return self.build(branches[0], f"{path}/allOf/0")

    def _build_string(self, schema: Mapping[str, Any], path: str) -> str:
        keywords = set(schema) - ANNOTATION_KEYWORDS
        if "format" in schema:
            _refuse_other_keywords(keywords, {"type", "format"}, _name_path(path))
            if not isinstance(schema["format"], str) or schema["format"] not in FORMATS:
                raise PatternError(f"{path}/format is {shorten(schema['format'])}; known are {', '.join(sorted(FORMATS))}")
            return f'"{FORMATS[schema["format"]]}"'
        if "pattern" in schema:
            _refuse_other_keywords(keywords, {"type", "pattern"}, _name_path(path))
            return f'"(?:{_check_string_pattern(schema["pattern"], path, self.budget)})"'
        least, most = _read_bounds(schema, "minLength", "maxLength", path)
        return f'"{CHARACTER}{_format_repeat(least, most)}"'

    def _build_integer(self, schema: Mapping[str, Any], path: str) -> str:
        if not KEYWORDS_OF_TYPE["integer"] & set(schema):
            return INTEGER
        limit = 10**MAX_DIGITS - 1
        low = _read_integer(schema, "minimum", -limit, path)
        high = _read_integer(schema, "maximum", limit, path)
        low = max(low, _read_integer(schema, "exclusiveMinimum", -limit - 1, path) + 1)
        high = min(high, _read_integer(schema, "exclusiveMaximum", limit + 1, path) - 1)
        free = 10**FREE_DIGITS - 1
        if high == limit and low <= free:
            high = free
        if low == -limit and high >= -free:
            low = -free
        if low > high:
            raise PatternError(f"{_name_path(path)} has no whole number between {shorten(low)} and {shorten(high)}")
        self.budget.spend(INTEGER_WORK, _name_path(path))
        return integers_between(low, high)

    def _build_array(self, schema: Mapping[str, Any], path: str) -> str:
        if "items" not in schema:
            raise PatternError(f"{_name_path(path)} is an array without 'items': say what it holds")
        item = self.build(schema["items"], f"{path}/items")
        least, most = _read_bounds(schema, "minItems", "maxItems", path)
        if most == 0:
            return r"\[\]"
        repeat = _format_repeat(max(0, least - 1), most - 1 if most is not None else None)
        nonempty = self._concatenate([r"\[", item, "(?:, ", item, f"){repeat}", r"\]"], path)
        return nonempty if least else rf"(?:\[\]|{nonempty})"

    def _build_object(self, schema: Mapping[str, Any], path: str) -> str:
        where = _name_path(path)
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        additional = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise PatternError(f"{where}: properties must be an object and required a list")
        self.budget.spend(KEYWORD_WORK * (len(properties) + len(required)), where)
        if not all(isinstance(name, str) for name in required):
            raise PatternError(f"{where}: required must be a list of names, got {shorten(required)}")
        if missing := [name for name in required if name not in properties]:
            raise PatternError(f"{where} requires {shorten(missing[0])}, which is not among its properties")
        if not isinstance(additional, bool) and (properties or not isinstance(additional, Mapping)):
            raise PatternError(
                f"{path}/additionalProperties may be true or false beside properties, or a schema without them"
            )
        if properties:
            return self._build_properties(properties, set(required), path)
        if isinstance(additional, Mapping):
            entry = f"{STRING}: {self.build(additional, f'{path}/additionalProperties')}"
            return self._concatenate([r"\{(?:", entry, "(?:, ", entry, r")*)?\}"], path)
        if "properties" not in schema and additional:
            raise PatternError(f"{where} is an object without 'properties': say what it holds")
        return r"\{\}"

    def _build_properties(self, properties: Mapping[str, Any], required: set[str], path: str) -> str:
        entries = []
        for name, value in properties.items():
            if not isinstance(name, str):
                raise PatternError(f"{path}/properties must have names, got {shorten(name)}")
            key = self._escape_json(name, f"{path}/properties")
            regex = self.build(value, f"{path}/properties/{name[:MAX_SHOWN]}")
            entries.append((self._concatenate([key, ": ", regex], path), name in required))
        return self._concatenate([r"\{", *_join_entries(entries), r"\}"], path)


def _name_path(path: str) -> str:
    return path or "the schema"


def _refuse_other_keywords(keywords: set[str], allowed: set[str], where: str) -> None:
    if other := sorted(keywords - allowed, key=str):
        raise PatternError(f"{where} has {shorten(other[0])}, which is not supported here")


def _join_entries(entries: Sequence[tuple[str, bool]]) -> list[str]:
    """The entries of an object in order, with commas between those that are present. The flag says which are required.

    Returns the parts of a regular expression. Every entry occurs once if one is required: those before it have a comma
    behind them, those after it a comma before them.
    """
    first_required = next((number for number, (_, is_required) in enumerate(entries) if is_required), None)
    if first_required is None:
        return ["(?:", *_join_optional([entry for entry, _ in entries]), ")?"]
    parts: list[str] = []
    for entry, _ in entries[:first_required]:
        parts += ["(?:", entry, ", )?"]
    parts.append(entries[first_required][0])
    for entry, is_required in entries[first_required + 1 :]:
        parts += [", ", entry] if is_required else ["(?:, ", entry, ")?"]
    return parts


def _join_optional(entries: Sequence[str]) -> list[str]:
    """At least one of the entries, in order, with commas between them.

    Either one of the first half is present, and the second half follows with commas, or the second half stands alone. An
    entry occurs about log2(n) times.
    """
    if len(entries) == 1:
        return [entries[0]]
    half = len(entries) // 2
    followers = [part for entry in entries[half:] for part in ("(?:, ", entry, ")?")]
    return ["(?:", *_join_optional(entries[:half]), *followers, "|", *_join_optional(entries[half:]), ")"]


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
            raise PatternError(f"{path}/{name} must be a whole number, 0 or more, got {shorten(value)}")
        if value > MAX_REPEAT:
            raise BudgetError(f"{path}/{name} is {shorten(value)}, at most {MAX_REPEAT:,} is supported")
    if most is not None and least > most:
        raise PatternError(f"{_name_path(path)}: {low} is {least}, {high} is {most}")
    return least, most


def _read_integer(schema: Mapping[str, Any], name: str, default: int, path: str) -> int:
    value = schema.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0:
        raise PatternError(f"{path}/{name} must be a whole number, got {shorten(value)}")
    if abs(value) >= 10**MAX_BOUND_DIGITS:
        raise PatternError(f"{path}/{name} is {shorten(value)}, at most {MAX_BOUND_DIGITS} digits are supported")
    return int(value)


def _check_string_pattern(pattern: Any, path: str, budget: Budget) -> str:
    """The inside of a string's `pattern`, ^...$. It must match no character that JSON would write as an escape."""
    if not isinstance(pattern, str):
        raise PatternError(f"{path}/pattern must be a text, got {shorten(pattern)}")
    backslashes = len(pattern) - 1 - len(pattern[:-1].rstrip("\\"))  # directly before the last character
    if not (pattern.startswith("^") and pattern.endswith("$")) or backslashes % 2:
        raise PatternError(f"{path}/pattern is {shorten(pattern)}; only patterns of the whole text, ^...$, are supported")
    dfa = regex_dfa.compile_dfa(pattern, budget)
    if dfa.transitions_Q256[1:, [*range(32), ord('"'), ord("\\"), 127]].any():
        raise PatternError(
            f"{path}/pattern {shorten(pattern)} matches quotes, backslashes or control characters; leave them out"
        )
    return pattern.removeprefix("^")[:-1]


def integers_between(low: int, high: int) -> str:
    """A regular expression of the integers from low to high."""
    parts = []
    if low < 0:
        parts += [f"-{part}" for part in _split_into_digit_ranges(max(1, -high), -low)]
    if high >= 0:
        parts += _split_into_digit_ranges(max(0, low), high)
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


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
