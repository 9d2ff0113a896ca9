"""Structures: the regular expression of a tree matches what its nodes say, and nothing else."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.config import ConfigError
from redraft.constraints.budget import Budget
from redraft.constraints.errors import BudgetError, PatternError
from redraft.constraints.pattern_compiler import Pattern
from redraft.constraints.regex_dfa import compile_dfa
from redraft.constraints.structure import build_regex, text_without_start
from redraft.tasks.generation import GenerationOptions


def const(text):
    return {"type": "const_string", "value": text}


def repeat(content, least, most, separator=","):
    return {"type": "repeat", "content": content, "separator": separator, "min": least, "max": most}


AB = {"type": "regex", "pattern": "a|b"}


@pytest.mark.parametrize(
    ("structure", "matches", "others"),
    [
        (const("a.b|c\n"), ["a.b|c\n"], ["axb|c\n", "a.b", ""]),
        (AB, ["a", "b"], ["ab", ""]),
        ({"type": "sequence", "elements": [AB, const("-"), AB]}, ["a-b"], ["a", "b", "-"]),
        ({"type": "sequence", "elements": []}, [""], ["a"]),
        ({"type": "or", "elements": [const("x"), AB, const("")]}, ["x", "a", ""], ["xa"]),
        ({"type": "json_schema", "json_schema": {"enum": [1, "x"]}}, ["1", '"x"'], ["x", '1"x"']),
        (repeat(AB, 1, None), ["a", "a,b,a"], ["", "a,", "ab"]),
        (repeat(AB, 0, None), ["", "a", "a,b"], [","]),
        (repeat(AB, 1, 1), ["a"], ["", "a,b"]),
        (repeat(AB, 2, 3, ""), ["ab", "aba"], ["a", "abab"]),
        (repeat(AB, 0, 2, ".*"), ["", "a", "a.*b"], ["a,b", "a.*a.*a"]),
    ],
)
def test_a_structure_matches_what_its_nodes_say(structure, matches, others):
    regex = build_regex(structure, Budget())
    assert all(re.fullmatch(regex, text) for text in matches)
    assert not any(re.fullmatch(regex, text) for text in others)
    assert Pattern(structure=structure).build_regex(Budget()) == regex
    compile_dfa(regex)  # nothing in it is more than the compiler knows
    assert GenerationOptions(structure=structure).pattern == Pattern(structure=structure)


@given(st.text(alphabet="<>tool_ca \n", max_size=14) | st.just("<tool_call>x") | st.just(" <tool_call>"))
@settings(deadline=None)
def test_a_text_may_begin_with_anything_but_the_mark(text):
    regex = build_regex(text_without_start("<tool_call>"), Budget())
    assert bool(re.fullmatch(regex, text)) == (not text.lstrip().startswith("<tool_call>"))


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (None, "one of the types const_string"),
        ({"type": "tag"}, "got {'type': 'tag'}"),
        ({"type": ["or"]}, "one of the types"),
        ({"type": "const_string"}, "has the fields value beside its type, got"),
        ({"type": "const_string", "value": "x", "min": 1}, "has the fields value beside its type"),
        (const(3), "has a field that it cannot have"),
        ({"type": "or", "elements": []}, "has a field that it cannot have"),
        ({"type": "sequence", "elements": "ab"}, "has a field that it cannot have"),
        (repeat(AB, 2, 1), "min not above max, got 2 and 1"),
        (repeat(AB, 0, 0), "min not above max"),
        (repeat(AB, True, None), "got True and None"),
        (repeat(AB, 1, 10**6), "up to 1000"),
        ({"type": "regex", "pattern": "a)|(?:b"}, "is not a regular expression"),
        ({"type": "regex", "pattern": "("}, "is not a regular expression"),
        ({"type": "json_schema", "json_schema": {"title": "the pet", "type": "dog"}}, "^the pet: "),
        ({"type": "json_schema", "json_schema": 3}, "."),
    ],
)
def test_a_structure_that_is_none_is_refused(structure, words):
    with pytest.raises(PatternError, match=words):
        build_regex(structure, Budget())


def test_a_structure_has_limits():
    deep = AB
    for _ in range(60):
        deep = {"type": "or", "elements": [deep]}
    with pytest.raises(PatternError, match="nested too deeply"):
        build_regex(deep, Budget())
    wide = const("x" * 60_000)
    with pytest.raises(BudgetError, match="the structure makes a pattern"):
        build_regex({"type": "sequence", "elements": [wide, wide]}, Budget())
    with pytest.raises(BudgetError):
        build_regex(const("x" * 200_000), Budget())
    with pytest.raises((PatternError, ConfigError), match="regex and structure"):
        GenerationOptions(regex="a", structure=AB)
