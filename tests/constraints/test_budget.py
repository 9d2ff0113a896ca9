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

from redraft.constraints import json_schema, regex_dfa
from redraft.constraints.budget import MAX_CHARACTERS, MAX_WORK, Budget
from redraft.constraints.compiled_cache import CompiledCache
from redraft.constraints.dfa import DFA
from redraft.constraints.errors import BudgetError, PatternError, shorten
from redraft.constraints.token_automaton import AutomatonCompiler
from redraft.tasks.generation import GenerationOptions
from redraft.tokenizer.tokenizer import Tokenizer

COMPILER = AutomatonCompiler([None, *(bytes([byte]) for byte in range(256)), b"ab", b"aa", b'{"', b'": ', b"null"], [0])
SMALL_WORK = 2_000_000


def compile_or_error(pattern: object, budget: Budget, is_schema: bool) -> tuple[DFA | None, str]:
    """The DFA, or the one short sentence with which the pattern is refused."""
    try:
        regex = json_schema.build_regex(pattern, budget) if is_schema else pattern
        dfa = regex_dfa.compile_dfa(regex, budget)
        COMPILER.compile(regex, budget)
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
        ("a{20001}", "more than 20,000 parts"),
        (".*a.{12}", "more than 5,000 states"),
    ],
)
def test_a_refusal_names_its_limit(pattern, words):
    with pytest.raises(BudgetError, match=re.escape(words)):
        COMPILER.compile(pattern)


@pytest.mark.parametrize("levels", [14, 18, 40])
def test_doubled_references_are_compiled_once(levels):
    assert json_schema.build_regex(hostile.doubling_references(levels)) == json_schema.build_regex({"type": "string"})


def test_a_schema_is_refused_before_its_text_is_built():
    """Every level would double the text: the work that was spent is that of texts below the limit."""
    budget = Budget()
    with pytest.raises(BudgetError, match=f"at most {MAX_CHARACTERS:,} are supported"):
        json_schema.build_regex(hostile.doubling_references(40, "properties"), budget)
    assert budget.work < 6 * MAX_CHARACTERS


def test_all_parts_of_a_schema_share_one_budget():
    """One property compiles with this budget, forty do not."""
    one = Budget()
    json_schema.build_regex(hostile.pattern_per_property(1, "x[é-ü]{0,20}"), one)
    json_schema.build_regex(hostile.pattern_per_property(1, "y[é-ü]{0,20}"), Budget(2 * one.work))
    with pytest.raises(BudgetError):
        json_schema.build_regex(hostile.pattern_per_property(40, "z[é-ü]{0,20}"), Budget(2 * one.work))


def test_the_work_of_optional_properties_grows_little_faster_than_their_number():
    texts = [len(json_schema.build_regex(hostile.optional_properties(count, 4))) for count in (50, 100, 200)]
    assert texts[2] < 2.5 * texts[1] < 2.5 * 2.5 * texts[0]


def test_a_compiled_pattern_costs_nothing():
    COMPILER.compile("[a-f]{3}x")
    budget = Budget(0, 0)
    assert COMPILER.compile("[a-f]{3}x", budget) is COMPILER.compile("[a-f]{3}x")
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
    with pytest.raises(BudgetError, match="the list of choices makes a pattern of 120,001 characters"):
        options.pattern.build_regex(Budget())
    assert GenerationOptions(choices=["a.", "b"]).pattern.build_regex(Budget()) == r"a\.|b"


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
    assert compiler.compile(json_schema.build_regex(ORDINARY[name], budget), budget).states > 1
    assert budget.work < MAX_WORK / 2


def test_an_ordinary_schema_compiles_with_a_large_vocabulary():
    texts = [f"{number:x}"[::-1].encode() for number in range(262_143)]
    budget = Budget()
    compiler = AutomatonCompiler([None, *texts], [0])
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 20}
    with pytest.raises(PatternError, match="no text of this vocabulary matches"):  # it has no brackets
        compiler.compile(json_schema.build_regex(schema, budget), budget)
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
        "from redraft.constraints import budget, json_schema, regex_dfa, token_automaton\n"
        "compiler = token_automaton.AutomatonCompiler([None, b'a', b'null'], [0])\n"
        "print(compiler.compile(json_schema.build_regex({'type': 'null'}, budget.Budget())).states)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "7"
