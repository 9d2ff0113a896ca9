"""Hostile patterns and schemas are refused in one sentence, or compiled rightly, within the budget of one request."""

import json
import re
import subprocess
import sys
from collections import deque

import hostile
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.constraints import regex_dfa
from redraft.constraints.budget import MAX_CHARACTERS, MAX_WORK, Budget
from redraft.constraints.compiled_cache import CompiledCache
from redraft.constraints.dfa import DFA
from redraft.constraints.errors import BudgetError, PatternError, shorten
from redraft.constraints.nfa import MAX_DFA_STATES, MAX_NFA_STATES
from redraft.constraints.pattern_compiler import Pattern, compile_one
from redraft.constraints.prefix_grammar import PrefixGrammar
from redraft.constraints.schema_nfa import compile_schema
from redraft.constraints.token_automaton import AutomatonCompiler
from redraft.tasks.generation import GenerationOptions
from redraft.tokenizer.tokenizer import Tokenizer

COMPILER = AutomatonCompiler([None, *(bytes([byte]) for byte in range(256)), b"ab", b"aa", b'{"', b'": ', b"null"], [0])
SMALL_WORK = 2_000_000


def compile_or_error(pattern: object, budget: Budget, is_schema: bool) -> tuple[DFA | None, str]:
    """The DFA if there is one (some schemas become a grammar), or the one short sentence of the refusal."""
    try:
        if is_schema:
            compiled = Pattern(schema=pattern).compile(budget)
            if isinstance(compiled, str):
                PrefixGrammar("of the schema", compiled, COMPILER.grammar_vocabulary)
                return None, ""
            dfa = compiled
            COMPILER.compile_tokens("of the schema", dfa, budget)
        else:
            dfa = regex_dfa.compile_dfa(pattern, budget)
            COMPILER.compile(pattern, budget)
    except PatternError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 500
        assert message
        return None, message
    finally:
        assert budget.work <= budget.max_work
        assert budget.characters <= budget.max_characters
    return dfa, ""


def shortest_match(dfa: DFA) -> str:
    """The shortest text that the DFA accepts."""
    texts = {dfa.start: b""}
    waiting = deque([dfa.start])
    while waiting:
        state = waiting.popleft()
        if dfa.accepting_Q[state]:
            return texts[state].decode()
        for byte, target in enumerate(dfa.transitions_Q256[state].tolist()):
            if target and target not in texts:
                texts[target] = texts[state] + bytes([byte])
                waiting.append(target)
    raise AssertionError("the DFA accepts nothing")


@pytest.mark.parametrize("number", range(len(hostile.REGEXES)))
def test_a_hostile_regex_stays_within_the_budget(number):
    pattern = hostile.REGEXES[number]
    dfa, _ = compile_or_error(pattern, Budget(SMALL_WORK), is_schema=False)
    assert dfa is None or re.fullmatch(pattern, shortest_match(dfa))


@pytest.mark.parametrize("number", range(len(hostile.SCHEMAS)))
def test_a_hostile_schema_stays_within_the_budget(number):
    dfa, _ = compile_or_error(hostile.SCHEMAS[number], Budget(SMALL_WORK), is_schema=True)
    assert dfa is None or json.loads(shortest_match(dfa)) is not ...


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@settings(max_examples=60, deadline=None)
@given(pattern=hostile.hostile_regexes())
def test_any_hostile_regex_is_refused_or_right(pattern):
    dfa, _ = compile_or_error(pattern, Budget(SMALL_WORK), is_schema=False)
    assert dfa is None or re.fullmatch(pattern, shortest_match(dfa))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@settings(max_examples=60, deadline=None)
@given(schema=hostile.hostile_schemas())
def test_any_hostile_schema_is_refused_or_right(schema):
    dfa, _ = compile_or_error(schema, Budget(SMALL_WORK), is_schema=True)
    assert dfa is None or json.loads(shortest_match(dfa)) is not ...


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a" * (MAX_CHARACTERS + 1), f"the {MAX_CHARACTERS:,} characters of regular expressions that one request may use"),
        ("(a*){2000}", f"the {MAX_WORK:,} units of work that one request may use"),
        (f"a{{{MAX_NFA_STATES + 1}}}", f"more than {MAX_NFA_STATES:,} parts"),
        (f"a{{{MAX_DFA_STATES + 1}}}", f"more than {MAX_DFA_STATES:,} states"),
    ],
)
def test_a_refusal_names_its_limit(pattern, words):
    with pytest.raises(BudgetError, match=re.escape(words)):
        COMPILER.compile(pattern)


@pytest.mark.parametrize("levels", [14, 18, 40])
def test_doubled_references_are_read_once(levels):
    """A level takes the same little work however many there are, and the automaton is that of the last one."""
    budget = Budget()
    dfa = compile_schema(hostile.doubling_references(levels), budget)
    text = compile_schema({"type": "string"}, Budget())
    assert (dfa.transitions_Q256 == text.transitions_Q256).all()
    assert (dfa.accepting_Q == text.accepting_Q).all()
    assert budget.work < 25_000 + 2_000 * levels


@pytest.mark.parametrize("keyword", ["oneOf", "properties"])
def test_a_schema_is_refused_before_its_automaton_is_built(keyword):
    """Every level would double the automaton: the work that was spent is that of an automaton below the limit."""
    budget = Budget()
    with pytest.raises(BudgetError, match=f"more than {MAX_NFA_STATES:,} parts"):
        compile_schema(hostile.doubling_references(40, keyword), budget)
    assert budget.work < 100 * MAX_NFA_STATES
    budget = Budget(100_000)
    with pytest.raises(BudgetError, match="would exceed the 100,000 units of work"):
        compile_schema(hostile.doubling_references(40, keyword), budget)


def test_all_parts_of_a_schema_share_one_budget():
    """One property compiles with this budget, forty do not."""
    one = Budget()
    compile_schema(hostile.pattern_per_property(1, "x[é-ü]{0,20}"), one)
    compile_schema(hostile.pattern_per_property(1, "y[é-ü]{0,20}"), Budget(2 * one.work))
    with pytest.raises(BudgetError):
        compile_schema(hostile.pattern_per_property(40, "z[é-ü]{0,20}"), Budget(2 * one.work))


def test_the_automaton_of_optional_properties_grows_no_faster_than_their_number():
    states = [len(compile_schema(hostile.optional_properties(count, 4), Budget()).accepting_Q) for count in (50, 100, 200)]
    assert states[2] < 2.05 * states[1] < 2.05 * 2.05 * states[0]


def test_a_compiled_pattern_costs_nothing():
    COMPILER.compile("[a-f]{3}x")
    budget = Budget(0, 0)
    assert COMPILER.compile("[a-f]{3}x", budget) is COMPILER.compile("[a-f]{3}x")
    assert (budget.work, budget.characters) == (0, 0)


def test_a_compiled_schema_costs_nothing():
    pattern = Pattern(schema={"type": "array", "items": {"enum": ["a", None]}})
    compiled = compile_one(COMPILER, pattern, Budget())
    budget = Budget(0, 0)
    assert compile_one(COMPILER, Pattern(schema={"type": "array", "items": {"enum": ["a", None]}}), budget) is compiled
    assert (budget.work, budget.characters) == (0, 0)


def test_a_cache_forgets_when_it_holds_too_many_bytes():
    cache: CompiledCache[bytes] = CompiledCache(3, 100, len)
    cache.put("a", b"x" * 40)
    cache.put("b", b"x" * 40)
    assert cache.get("a") is not None
    cache.put("c", b"x" * 40)  # b was not used for the longest time
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (b"x" * 40, None, b"x" * 40)
    cache.put("d", b"x" * 1_000)
    assert len(cache) == 0
    for name in "efgh":
        cache.put(name, b"")
    assert len(cache) == 3
    assert cache.bytes == 3


def test_millions_of_choices_are_refused_before_they_are_joined():
    with pytest.raises(BudgetError, match="the list of choices makes a pattern of 399,999 characters"):
        GenerationOptions(choices=[f"{number}" for number in range(200_000)])
    options = GenerationOptions(choices=["x" * 60_000, "y" * 60_000])
    budget = Budget()
    with pytest.raises(BudgetError, match="the list of choices makes a pattern of 120,000 characters"):
        options.pattern.compile(budget)
    assert budget.work < 1_000
    dfa = GenerationOptions(choices=["a.", "b"]).pattern.compile(Budget())
    texts = ["a.", "b", "ax", "a", "", "a.b", "a.|b", r"a\."]
    assert [text for text in texts if dfa.accepts(text.encode())] == ["a.", "b"]


WORDS = [f"word {number * 7919}" for number in range(500)]
ORDINARY = {
    "forty properties": {
        "type": "object",
        "properties": {
            f"field_{number}": kind
            for number, kind in enumerate(
                [
                    {"type": "string"},
                    {"type": "integer"},
                    {"type": "number"},
                    {"type": "boolean"},
                    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                ]
                * 8
            )
        },
        "required": [f"field_{number}" for number in range(0, 40, 2)],
    },
    "five hundred words": {"enum": WORDS},
    "forty optional properties": hostile.optional_properties(40, 8),
    "a short text": {"type": "string", "maxLength": 100},
    "dates": {"type": "array", "items": {"type": "string", "format": "date-time"}, "maxItems": 10},
}


@pytest.mark.parametrize("name", list(ORDINARY))
def test_an_ordinary_schema_compiles_with_the_shipped_vocabulary(name):
    compiler = AutomatonCompiler(Tokenizer.from_folder("redraft/weights/tiny").token_bytes, [1])
    budget = Budget()
    assert compiler.compile_tokens(name, compile_schema(ORDINARY[name], budget), budget).states > 1
    assert budget.work < MAX_WORK / 2


def test_an_ordinary_schema_compiles_with_a_large_vocabulary():
    texts = [f"{number:x}"[::-1].encode() for number in range(262_143)]
    budget = Budget()
    compiler = AutomatonCompiler([None, *texts], [0])
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 20}
    with pytest.raises(PatternError, match="no text of this vocabulary matches"):  # it has no brackets
        compiler.compile_tokens("of the schema", compile_schema(schema, budget), budget)
    assert compiler.compile("(?:[0-9a-f]{2}){1,40}", budget).states == 83
    assert budget.work < MAX_WORK / 2


@pytest.mark.soak
@given(value=st.recursive(st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_a_shortened_value_is_short(value):
    assert len(shorten(value)) <= 120
    assert len(shorten([value] * 1_000)) <= 60
    assert shorten(10**5_000) == "a value of the type int"


def test_patterns_compile_without_pytorch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from redraft.constraints.budget import Budget\n"
        "from redraft.constraints.pattern_compiler import Pattern, compile_one\n"
        "from redraft.constraints.token_automaton import AutomatonCompiler\n"
        "compiler = AutomatonCompiler([None, b'a', b'null', b'[', b']', b', '], [0])\n"
        "print(compile_one(compiler, Pattern(schema={'type': 'null'}), Budget()).states)\n"
        "nested = compile_one(compiler, Pattern(schema={'type': 'array', 'items': {'$ref': '#'}}), Budget())\n"
        "print(type(nested).__name__, nested.accepts([3, 3, 4, 5, 3, 4, 4]), nested.accepts([3, 2, 4]))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["7", "PrefixGrammar True False"]
