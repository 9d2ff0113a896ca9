"""Structures: the automaton of a tree matches what its nodes say, and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.config import ConfigError
from redraft.constraints.budget import Budget
from redraft.constraints.dfa import DFA, minimize
from redraft.constraints.errors import BudgetError, PatternError, UnboundedError
from redraft.constraints.nfa import MAX_DFA_STATES, MAX_NFA_STATES, NFA, determinize
from redraft.constraints.pattern_compiler import Pattern
from redraft.constraints.prefix_grammar import BYTES, PrefixGrammar
from redraft.constraints.structure import add_structure, text_without_start
from redraft.tasks.generation import GenerationOptions


def const(text):
    return {"type": "const_string", "value": text}


def repeat(content, least, most, separator=","):
    return {"type": "repeat", "content": content, "separator": separator, "min": least, "max": most}


def build_nfa(structure) -> tuple[NFA, int, int]:
    nfa = NFA("of the structure", Budget())
    start = nfa.add_state()
    return nfa, start, add_structure(nfa, start, structure)


def compile_structure(structure) -> DFA:
    nfa, start, end = build_nfa(structure)
    return minimize(determinize(nfa, start, end), nfa.budget)


AB = {"type": "regex", "pattern": "a|b"}
NESTED = {"type": "array", "items": {"$ref": "#"}}  # no finite automaton expresses it


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
        (repeat(AB, 3, None, ""), ["aba", "abab"], ["", "a", "ab"]),
        ({"type": "sequence", "elements": [repeat(AB, 0, None, ""), const("é|"), AB]}, ["é|a", "abé|b"], ["é", "éa", "ab"]),
    ],
)
def test_a_structure_matches_what_its_nodes_say(structure, matches, others):
    dfa = compile_structure(structure)
    assert all(dfa.accepts(text.encode()) for text in matches)
    assert not any(dfa.accepts(text.encode()) for text in others)
    compiled = Pattern(structure=structure).compile(Budget())
    assert isinstance(compiled, DFA)
    assert (compiled.transitions_Q256 == dfa.transitions_Q256).all()
    assert (compiled.accepting_Q == dfa.accepting_Q).all()
    assert compiled.start == dfa.start
    assert GenerationOptions(structure=structure).pattern == Pattern(structure=structure)


WITHOUT_MARK = compile_structure(text_without_start("<tool_call>"))


@given(st.text(alphabet="<>tool_ca \n", max_size=14) | st.just("<tool_call>x") | st.just(" <tool_call>"))
@settings(deadline=None)
def test_a_text_may_begin_with_anything_but_the_mark(text):
    assert WITHOUT_MARK.accepts(text.encode()) == (not text.lstrip().startswith("<tool_call>"))


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
        compile_structure(structure)
    if structure is not None:
        with pytest.raises(PatternError, match=words):
            Pattern(structure=structure).compile(Budget())


def test_a_structure_with_a_schema_that_refers_to_itself_is_a_grammar():
    structure = {"type": "sequence", "elements": [const("x="), {"type": "json_schema", "json_schema": NESTED}, const(";")]}
    with pytest.raises(UnboundedError, match="its nesting has no limit"):
        compile_structure(structure)
    grammar = Pattern(structure=structure).compile(Budget())
    assert isinstance(grammar, str)
    matches, others = [b"x=[];", b"x=[[[[[]]]], []];"], [b"x=[]", b"[];", b"x=[1];", b"x=[[];", b"x=[]];"]
    compiled = PrefixGrammar("of the structure", grammar, BYTES)
    assert [text for text in matches + others if compiled.accepts_text(text)] == matches


def test_a_structure_has_limits():
    deep = AB
    for _ in range(60):
        deep = {"type": "or", "elements": [deep]}
    with pytest.raises(PatternError, match="nested too deeply"):
        compile_structure(deep)
    wide = const("x" * 25_000)
    build_nfa(wide)
    with pytest.raises(BudgetError, match=f"more than {MAX_NFA_STATES:,} parts"):
        build_nfa({"type": "sequence", "elements": [wide, wide]})
    with pytest.raises(BudgetError, match=f"more than {MAX_NFA_STATES:,} parts"):
        build_nfa(const("x" * 200_000))
    with pytest.raises(BudgetError, match=f"more than {MAX_DFA_STATES:,} states"):
        compile_structure(wide)
    with pytest.raises((PatternError, ConfigError), match="regex and structure"):
        GenerationOptions(regex="a", structure=AB)
