"""JSON schemas are obeyed: no answer that redraft could give is invalid, and answers that everybody expects are possible.

`schemas.jsonl` has small schemas with every validation keyword of JSON Schema 2020-12, alone and beside others, each with
valid instances (keys in the order of the properties) and invalid ones. A schema compiles and is obeyed, or it is refused
with one sentence; only those with `may_be_refused` may be. jsonschema confirms the instances and judges mutations of them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import compiled_schemas
import pytest
from schema_instances import Judge, check_instances, check_made, to_text

from redraft.constraints.errors import PatternError

# Schemas that are not obeyed today: an invalid answer is possible.
DISOBEYED: set[str] = set()
# Schemas that must compile, and are refused today, or make an answer impossible that everybody expects.
NOT_YET: set[str] = set()

# Judged by hand: jsonschema reads a `\d` or `\w` as Python does, and resolves no reference to elsewhere.
UNDECIDED = {
    "pattern with ASCII digits", "pattern with ASCII words", "pattern with a Unicode property", "pattern that is none",
    "definitions that nobody uses",
}  # fmt: skip

DISOBEYS = "accepts an invalid answer: "
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")  # name -> subschema
VALUES = ("enum", "const", "default", "examples", "required", "dependentRequired")  # hold no subschemas
KEYWORDS = (
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref", "items", "prefixItems", "minItems",
    "maxItems", "contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "properties",
    "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "if", "then", "else",
    "minLength", "maxLength", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "additionalItems",
)  # fmt: skip
UNNOTICED = {"unevaluatedProperties"}  # objects have no other properties than those that are named anyway


@dataclass(frozen=True)
class Case:
    """A schema with its instances."""

    name: str
    schema: Any
    valid: list[Any]
    invalid: list[Any]
    may_be_refused: bool = False


def read_cases() -> list[Case]:
    lines = (Path(__file__).parent / "schemas.jsonl").read_text(encoding="utf-8").splitlines()
    return [Case(**json.loads(line)) for line in lines]


CASES = read_cases()
JUDGES = {case.name: Judge(case.schema) for case in CASES}


def find_fault(case: Case) -> str:
    """What is wrong with what redraft makes of the schema: nothing if it is obeyed, or refused and may be."""
    try:
        compiled = compiled_schemas.compile_schema(case.schema)
    except PatternError as error:
        is_sentence = str(error).strip() and "\n" not in str(error)
        return "" if is_sentence and case.may_be_refused else f"is refused: {error}"
    judge = JUDGES[case.name]
    instances = [*((value, True) for value in case.valid), *((value, False) for value in case.invalid)]
    listed = check_instances(compiled, case.schema, instances, judge)
    made = check_made(compiled, case.schema, [*case.valid, *case.invalid], 40 + len(instances), judge)
    for text in (*listed.disobeyed, *made.disobeyed):
        return f"{DISOBEYS}{text}"
    for text in (to_text(value) for value in case.valid):
        if not compiled.accepts(text):
            return f"makes this valid answer impossible: {text}"
    return ""


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_schema_is_obeyed_or_refused(case):
    fault = find_fault(case)
    if case.name in DISOBEYED:
        assert fault.startswith(DISOBEYS), "it is obeyed now: take it off the list"
    elif case.name in NOT_YET:
        assert fault, "it is obeyed now: take it off the list"
        assert not fault.startswith(DISOBEYS), fault
    else:
        assert not fault, fault


def test_jsonschema_confirms_the_instances():
    undecided = set()
    for case in CASES:
        judge = JUDGES[case.name]
        for values, expected in ((case.valid, True), (case.invalid, False)):
            for value in values:
                verdict = judge.is_valid(value)
                assert verdict in (expected, None), f"{case.name}: {value!r} is {verdict}"
                if verdict is None:
                    undecided.add(case.name)
    assert undecided <= UNDECIDED


def test_every_name_is_that_of_a_schema():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(names) >= NOT_YET | DISOBEYED | UNDECIDED


def drop_keyword(schema: Any, keyword: str) -> Any:
    """The schema without this keyword, in all subschemas."""
    if isinstance(schema, list):
        return [drop_keyword(each, keyword) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for name, value in schema.items():
        if name == keyword:
            continue
        if name in MAPS and isinstance(value, Mapping):
            kept[name] = {key: drop_keyword(each, keyword) for key, each in value.items()}
        else:
            kept[name] = value if name in VALUES else drop_keyword(value, keyword)
    return kept


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_keyword_that_is_ignored_is_noticed(monkeypatch, keyword):
    """A compiler that ignores a keyword compiles what is left of a schema without it. Made instances alone show it."""
    compile_schema = compiled_schemas.compile_schema
    compiled = []

    def compile_without(schema: Any) -> compiled_schemas.CompiledSchema:
        compiled.append(compile_schema(drop_keyword(schema, keyword)))
        return compiled[-1]

    monkeypatch.setattr(compiled_schemas, "compile_schema", compile_without)
    noticed = []
    for case in CASES:
        left = drop_keyword(case.schema, keyword)
        if left == case.schema or case.name in DISOBEYED or not any(Judge(left).is_valid(value) for value in case.invalid):
            continue
        if find_fault(replace(case, invalid=[])).startswith(DISOBEYS):
            noticed.append(case.name)
            break
    if keyword in UNNOTICED:
        assert not noticed, "it is noticed now: take it off the list"
    elif not compiled:
        pytest.skip(f"no schema that needs {keyword} compiles without it")
    else:
        assert noticed, f"no schema notices that {keyword} is ignored"
