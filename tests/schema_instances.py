"""Instances of JSON schemas: judged by jsonschema, written as redraft writes them, and made to find what obeys no schema.

    schema -> [schemathesis] -> valid values -> [mutations] -> values of both kinds -> [Judge] -> valid or not
           -> [redraft] -> accepted or not

A schema is obeyed if no accepted text has an invalid value.
"""

import json
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any

import jsonschema
import referencing
from compiled_schemas import CompiledSchema
from jsonschema.exceptions import SchemaError, ValidationError
from referencing.exceptions import Unresolvable

DRAFTS = {
    "http://json-schema.org/draft-03/schema": jsonschema.Draft3Validator,
    "http://json-schema.org/draft-04/schema": jsonschema.Draft4Validator,
    "http://json-schema.org/draft-06/schema": jsonschema.Draft6Validator,
    "http://json-schema.org/draft-07/schema": jsonschema.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema.Draft201909Validator,
}
MAX_LENGTH = 20_000  # characters of an instance: longer ones are left out
Schema = Mapping[str, Any] | bool


# 1. Judging


class Judge:
    """Decides whether values are valid, as jsonschema does. Formats are annotations.

    It differs from jsonschema in two ways. `multipleOf` is exact for decimals: jsonschema divides floating-point numbers, so
    that 4.35 is no multiple of 0.01. A pattern is read twice, with the character classes of Python and with those of
    ECMA-262 (`\\d` is ASCII); if the two differ, the value is left undecided.
    """

    def __init__(self, schema: Schema) -> None:
        uri = schema.get("$schema") if isinstance(schema, Mapping) else None
        name = re.sub("^https?", "http", uri.rstrip("#")) if isinstance(uri, str) else ""
        draft = next(
            (kept for key, kept in DRAFTS.items() if re.sub("^https?", "http", key) == name), jsonschema.Draft202012Validator
        )
        self.is_schema = _is_valid_schema(draft, schema)
        self.readings = [_extend_draft(draft, flags)(schema, registry=referencing.Registry()) for flags in (0, re.ASCII)]

    def is_valid(self, value: Any) -> bool | None:
        """Whether the value is valid; None where this is not decided."""
        if not self.is_schema:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                verdicts = {reading.is_valid(value) for reading in self.readings}
        except (Unresolvable, re.error, RecursionError, OverflowError, ArithmeticError, TypeError, AttributeError):
            return None  # a reference to elsewhere, a pattern that Python does not read
        return verdicts.pop() if len(verdicts) == 1 else None

    def is_valid_here(self, schema: Schema, value: Any) -> bool:
        """Whether the value is valid by a subschema."""
        try:
            return self.readings[0].evolve(schema=schema).is_valid(value)
        except (Unresolvable, re.error, RecursionError, ArithmeticError, TypeError, AttributeError):
            return False


def _is_valid_schema(draft: Any, schema: Schema) -> bool:
    try:
        draft.check_schema(schema, format_checker=None)
    except (SchemaError, RecursionError, re.error):
        return False
    return True


@lru_cache
def _extend_draft(draft: Any, flags: int) -> Any:
    return jsonschema.validators.extend(draft, _exact_keywords(flags))


def _exact_keywords(flags: int) -> dict[str, Any]:
    def check_pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[ValidationError]:
        if validator.is_type(value, "string") and not re.search(_end_at_end(pattern), value, flags):
            yield ValidationError(f"{value!r} does not match {pattern!r}")

    def check_multiple(validator: Any, unit: float, value: Any, schema: Any) -> Iterator[ValidationError]:
        if validator.is_type(value, "number") and Fraction(repr(value)) % Fraction(repr(unit)):
            yield ValidationError(f"{value!r} is not a multiple of {unit}")

    return {"pattern": check_pattern, "multipleOf": check_multiple, "divisibleBy": check_multiple}


def _end_at_end(pattern: str) -> str:
    r"""Python's `$` also stands before a line break at the end; the one of ECMA-262 does not."""
    return re.sub(r"((?:^|[^\\])(?:\\\\)*)\$$", r"\1\\Z", pattern)


# 2. Writing


def to_text(value: Any) -> str:
    """JSON with redraft's spacing."""
    return json.dumps(value, ensure_ascii=False)


def spell(value: Any) -> list[str]:
    """Texts of the same value: redraft's spacing, no spaces, lines, escapes. An invalid value must be refused in each."""
    texts = [to_text(value), json.dumps(value, ensure_ascii=False, separators=(",", ":")), json.dumps(value)]
    texts.append(json.dumps(value, ensure_ascii=False, indent=2))
    escaped = re.sub(r'"([a-zA-Z])', lambda match: f'"\\u{ord(match[1]):04x}', texts[0])
    return list(dict.fromkeys([*texts, escaped]))


@dataclass(frozen=True)
class Ordered:
    """A value whose keys have the order of the schema's properties."""

    value: Any
    is_certain: bool  # False: several subschemas name the keys of an object, in different orders or some each


class KeyOrder:
    """Puts the keys of objects into the order of the schema's properties; other keys follow, required ones first.

    The properties of an object are those of its schema and of all subschemas that apply to it: `$ref`, `allOf`, the branches
    of `anyOf`, `oneOf` and `if` that are valid for it.
    """

    def __init__(self, schema: Schema, judge: Judge) -> None:
        self.root = schema
        self.judge = judge

    def order(self, value: Any) -> Ordered:
        """The value with its keys in order."""
        return self._order(value, [self.root])

    def _order(self, value: Any, schemas: Sequence[Any]) -> Ordered:
        if isinstance(value, list):
            items = [
                self._order(item, list(self._item_schemas(number, schemas, value))) for number, item in enumerate(value)
            ]
            return Ordered([item.value for item in items], all(item.is_certain for item in items))
        if not isinstance(value, dict):
            return Ordered(value, True)
        applied = self._applied(schemas, value)
        orders = [[name for name in each.get("properties", ()) if name in value] for each in applied]
        orders = [names for names in orders if names]
        merged = list(dict.fromkeys(name for names in orders for name in names))
        extra = [name for each in applied for name in _names(each.get("required")) if name in value and name not in merged]
        rest = [name for name in value if name not in merged and name not in extra]
        agrees = all(names == [name for name in merged if name in names] for names in orders)
        is_certain = agrees and (not orders or any(len(names) == len(merged) for names in orders)) and not (extra and rest)
        ordered = {}
        for name in [*merged, *dict.fromkeys(extra), *rest]:
            entry = self._order(value[name], list(_property_schemas(name, applied)))
            ordered[name] = entry.value
            is_certain = is_certain and entry.is_certain
        return Ordered(ordered, is_certain)

    def _applied(self, schemas: Sequence[Any], value: Any) -> list[Mapping[str, Any]]:
        """The subschemas that apply to this value itself."""
        applied: list[Mapping[str, Any]] = []
        waiting = list(reversed(schemas))
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, Mapping) or any(schema is each for each in applied):
                continue
            applied.append(schema)
            inner: list[Any] = [self.resolve(schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
            inner += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
            for keyword in ("anyOf", "oneOf"):
                branches = schema[keyword] if isinstance(schema.get(keyword), list) else []
                inner += [branch for branch in branches if self.judge.is_valid_here(branch, value)]
            if "if" in schema:
                taken = ("if", "then") if self.judge.is_valid_here(schema["if"], value) else ("else",)
                inner += [schema[keyword] for keyword in taken if keyword in schema]
            dependent = schema.get("dependentSchemas", {})
            inner += [dependent[name] for name in dependent if name in value]
            waiting += reversed(inner)
        return applied

    def _item_schemas(self, number: int, schemas: Sequence[Any], value: list) -> Iterator[Any]:
        for schema in self._applied(schemas, value):
            first = schema.get("prefixItems", ())
            items = schema.get("items")
            if number < len(first):
                yield first[number]
            elif isinstance(items, list):
                yield items[number] if number < len(items) else schema.get("additionalItems")
            else:
                yield items

    def resolve(self, reference: str) -> Any:
        """The subschema that a reference inside the schema names, or None."""
        target: Any = self.root
        for part in reference.removeprefix("#").split("/")[1:] if reference.startswith("#") else ["?"]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, Mapping) and key in target:
                target = target[key]
            else:
                return None
        return target


def _names(required: Any) -> list[str]:
    return required if isinstance(required, list) else []


def _property_schemas(name: str, schemas: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    for schema in schemas:
        named = schema.get("properties", {})
        if name in named:
            yield named[name]
        matching = [inner for pattern, inner in schema.get("patternProperties", {}).items() if _matches(pattern, name)]
        yield from matching
        if name not in named and not matching:
            yield schema.get("additionalProperties")


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


# 3. Making


OTHER_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.5, 10**12, "", "a", "é٣", "unknown", [], [1], ["a", "a"], {}, {"a": 1}, {"unknown": None},
)  # fmt: skip


def make_valid(schema: Schema, count: int) -> list[Any]:
    """Values that schemathesis makes for the schema, at most `count`; none where it cannot.

    hypothesis-jsonschema 0.23.1 makes no objects with the hypothesis of constraints.txt (`many` has no attribute `more`) and
    no values of recursive schemas. The generator of schemathesis, which tests of the server use, makes both.
    """
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.generation.jsonschema.builder import build

    made: list[Any] = []

    def keep(value: Any) -> None:
        made.append(value)

    options: dict[str, Any] = {"derandomize": True, "database": None, "deadline": None, "phases": [Phase.generate]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            strategy = build(schema, draft=_draft_number(schema), formats={})
            settings(max_examples=count, suppress_health_check=list(HealthCheck), **options)(given(strategy)(keep))()
    except Exception:  # it names no errors: references to elsewhere, patterns that it does not read, no value that fits
        return made
    return made


def _draft_number(schema: Schema) -> int:
    uri = schema.get("$schema", "") if isinstance(schema, Mapping) else ""
    numbers = {"draft-03": 4, "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 19}
    return next((number for name, number in numbers.items() if name in str(uri)), 20)  # as jsonschema_rs numbers the drafts


def list_named_values(schema: Any) -> list[Any]:
    """Values that the schema names: constants, examples, numbers at and beside its bounds, keys."""
    named: list[Any] = []
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            for key, value in node.items():
                if key in ("const", "default", "example", "examples", "enum"):
                    named += value if isinstance(value, list) else [value]
                elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15:
                    named += [value, value + 1, value - 1, value + 0.5, -value]
                elif key == "required":
                    named += [name for name in _names(value) if isinstance(name, str)]
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return list({to_text(value): value for value in named}.values())


def mutate(value: Any, named: Sequence[Any], rng: random.Random) -> Any:
    """A copy of the value that differs at one place."""
    if isinstance(value, dict | list) and value and rng.random() < 0.75:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        copy[key] = mutate(value[key], named, rng)
        return copy
    others = [*OTHER_VALUES, *named]
    if rng.random() < 0.3:
        return rng.choice(others)
    if isinstance(value, dict):
        return _mutate_object(value, others, rng)
    if isinstance(value, list):
        return _mutate_array(value, others, rng)
    if isinstance(value, str):
        return _mutate_string(value, rng)
    if isinstance(value, bool) or value is None:
        return rng.choice(others)
    return rng.choice([value + 1, value - 1, -value, value + 0.5, value + 0.005, value * 10, value * 1000, value / 2])


def _mutate_object(value: dict, others: Sequence[Any], rng: random.Random) -> dict:
    copy = dict(value)
    action = rng.randrange(4) if value else 1
    if action == 0:  # drop a key
        del copy[rng.choice(list(copy))]
    elif action == 1:  # add an unknown key, or one that the schema names
        names = [name for name in others if isinstance(name, str)]
        copy[rng.choice(["unknown", "x-unknown", *names])] = rng.choice(others)
    elif action == 2:  # add a key with a value that another one has
        key = rng.choice(list(copy))
        copy[f"{key}s"] = copy[key]
    else:  # rename a key
        key = rng.choice(list(copy))
        copy = {(f"{name}s" if name == key else name): item for name, item in copy.items()}
    return copy


def _mutate_array(value: list, others: Sequence[Any], rng: random.Random) -> list:
    action = rng.randrange(4) if value else 1
    if action == 0:  # drop an item
        place = rng.randrange(len(value))
        return value[:place] + value[place + 1 :]
    if action == 1:
        return [*value, rng.choice(others)]
    if action == 2:  # duplicate an item
        return [*value, rng.choice(value)]
    return value * rng.choice([2, 5])


def _mutate_string(value: str, rng: random.Random) -> str:
    place = rng.randrange(len(value) + 1)
    character = rng.choice('aZ0-. é٣"\n\\/')
    return rng.choice(
        [
            "",
            value[:-1],
            value[1:],
            value * 2,
            value + "x" * rng.choice([1, 10, 100, 300]),
            value.swapcase(),
            value[:place] + character + value[place:],
            value[:place] + character + value[place + 1 :],
        ]
    )


def list_key_mutations(values: Sequence[Any]) -> Iterator[Any]:
    """Objects without one of their keys, with one more, and with the keys of the next object."""
    objects = [value for value in values if isinstance(value, dict) and value]
    for value in objects:
        yield from ({name: item for name, item in value.items() if name != key} for key in value)
        yield {**value, f"{next(iter(value))}s": next(iter(value.values()))}
    yield from ({**one, **other} for one, other in pairwise(objects))


def mutate_many(schema: Schema, values: Sequence[Any], count: int, rng: random.Random) -> list[Any]:
    """At least `count` different mutations of the values if there are so many, some of them mutated twice."""
    named = list_named_values(schema)
    seen: dict[str, Any] = {}
    for value in [*OTHER_VALUES, *named][: max(2, count // 2)]:
        seen.setdefault(to_text(value), value)
    for value in islice(list_key_mutations(values), count):
        seen.setdefault(to_text(value), value)
    count += len(seen) // 2
    for _ in range(20 * count):
        if len(seen) >= count:
            break
        value = mutate(rng.choice(values), named, rng) if values else rng.choice(OTHER_VALUES)
        value = mutate(value, named, rng) if rng.random() < 0.25 else value
        if len(text := to_text(value)) <= MAX_LENGTH and _is_json(value):
            seen.setdefault(text, value)
    return list(seen.values())


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False).encode()
        to_text(value).encode()
    except ValueError:  # NaN, half of a surrogate pair
        return False
    return True


# 4. The proof


@dataclass
class Obedience:
    """What redraft made of the instances of one schema."""

    valid_tried: int = 0
    valid_accepted: int = 0
    uncertain_tried: int = 0  # valid ones whose keys have no certain order
    uncertain_accepted: int = 0
    invalid_tried: int = 0
    disobeyed: tuple[str, ...] = ()  # texts of invalid values that redraft accepts
    undecided: int = 0
    valid_refused: tuple[str, ...] = ()


def check_instances(
    compiled: CompiledSchema, schema: Schema, values: Iterable[tuple[Any, bool | None]], judge: Judge
) -> Obedience:
    """Compares redraft with a verdict on each value; without a verdict the value is undecided."""
    order = KeyOrder(schema, judge)
    found = Obedience()
    for value, is_valid in values:
        if is_valid is None:
            found.undecided += 1
            continue
        ordered = order.order(value)
        if is_valid:
            is_accepted = compiled.accepts(to_text(ordered.value))
            if ordered.is_certain:
                found.valid_tried += 1
                found.valid_accepted += is_accepted
            else:
                found.uncertain_tried += 1
                found.uncertain_accepted += is_accepted or compiled.accepts(to_text(value))
            if not is_accepted:
                found.valid_refused += (to_text(ordered.value),)
            continue
        found.invalid_tried += 1
        accepted = [text for text in dict.fromkeys([*spell(ordered.value), to_text(value)]) if compiled.accepts(text)]
        found.disobeyed += tuple(accepted[:1])
    return found


def check_made(
    compiled: CompiledSchema, schema: Schema, bases: Sequence[Any], count: int, judge: Judge, seed: int = 0
) -> Obedience:
    """Compares redraft with jsonschema on at least `count` made values: mutations of `bases`, and redraft's own answers."""
    rng = random.Random(seed)
    answers = [json.loads(text) for text in compiled.random_answers(rng, 5)]
    values = [*bases, *mutate_many(schema, [*bases, *answers], max(1, count - len(bases)), rng)]
    found = check_instances(compiled, schema, [(value, judge.is_valid(value)) for value in values], judge)
    found.invalid_tried += len(answers)
    found.disobeyed += tuple(to_text(answer) for answer in answers if judge.is_valid(answer) is False)
    return found
