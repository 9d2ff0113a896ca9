"""Fast constructions equal plain ones: properties, case variants, tries, minimal DFAs, distances, blocks of a canvas."""

import itertools
import json
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_token_automaton import random_pattern

from redraft.constraints import canvas_automaton, regex_dfa, token_trie
from redraft.constraints.budget import Budget
from redraft.constraints.characters import case_variants
from redraft.constraints.constraints import MAX_CANVAS_SUMS, Constraints, StepCost
from redraft.constraints.dfa import DFA
from redraft.constraints.errors import BudgetError, PatternError
from redraft.constraints.graph import UNREACHABLE, distances_to
from redraft.constraints.schema_nfa import compile_schema
from redraft.constraints.token_automaton import ARRAYS, AutomatonCompiler, TokenAutomaton
from redraft.tasks.generation import GenerationOptions
from redraft.writer import Writer

TOKEN_BYTES = [None, None, b"a", b"b", b"ab", b"1", b"\xc3", b"\xa9", b"a", b"1 ", b"b1", b"abab"]
COMPILER = AutomatonCompiler(TOKEN_BYTES, [1])


def canonical(dfa: DFA) -> list[tuple]:
    """The DFA with its states numbered in the order in which they are reached: equal for equal minimal DFAs."""
    numbers = {dfa.start: 0}
    rows = []
    for state in (order := [dfa.start]):
        targets = dfa.transitions_Q256[state].tolist()
        for target in targets:
            if target and target not in numbers:
                numbers[target] = len(numbers)
                order.append(target)
        rows.append((bool(dfa.accepting_Q[state]), [numbers.get(target) if target else None for target in targets]))
    return rows


def join_entries_plainly(entries: list[tuple[str, bool]]) -> str:
    """The old construction: one alternative for each property that may come first."""
    if not entries:
        return ""
    rest = "".join(f", {entry}" if is_required else f"(?:, {entry})?" for entry, is_required in entries[1:])
    first, is_required = entries[0]
    return first + rest if is_required else f"(?:{first}{rest}|{join_entries_plainly(entries[1:])})"


@settings(max_examples=60, deadline=None)
@given(required=st.lists(st.booleans(), min_size=1, max_size=9), seed=st.integers(0, 2**32))
def test_properties_equal_the_plain_construction(required, seed):
    rng = random.Random(seed)
    properties = {
        f"{rng.choice('ab')}{number}": {"enum": rng.sample([1, 12, None, "x"], 2)} for number in range(len(required))
    }
    names = [name for name, is_required in zip(properties, required, strict=True) if is_required]
    schema = {"type": "object", "properties": properties, "required": names}
    texts = {name: "|".join(map(json.dumps, value["enum"])) for name, value in properties.items()}
    entries = [(f'"{name}": (?:{text})', name in names) for name, text in texts.items()]
    plain = rf"\{{{join_entries_plainly(entries)}\}}"
    assert canonical(compile_schema(schema, Budget())) == canonical(regex_dfa.compile_dfa(plain))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_equivalent_patterns_have_the_same_minimal_dfa(seed):
    pattern = random_pattern(random.Random(seed))
    expected = regex_dfa.compile_dfa(pattern)
    assert len(canonical(expected)) >= len(expected.accepting_Q) - 1  # all states but the dead one are reached
    for other in (f"(?:{pattern}|{pattern})", f"(?:(?:{pattern})|[^\\x00-\\U0010ffff]a*)", f"(?:{pattern}){{1,1}}"):
        assert canonical(regex_dfa.compile_dfa(other)) == canonical(expected)


def test_a_large_dfa_is_minimal():
    assert len(regex_dfa.compile_dfa("(?:ab|ab|[ac]b){0,900}").accepting_Q) == 2 * 900 + 2


@pytest.mark.parametrize(
    ("low", "high", "flags"),
    [
        (97, 97, re.IGNORECASE),
        (0x212A, 0x212A, re.IGNORECASE),
        (65, 0x2000, re.IGNORECASE),
        (0x400, 0x450, re.IGNORECASE),
        (0x10400, 0x10410, re.IGNORECASE),
        (75, 75, re.IGNORECASE | re.ASCII),
        (65, 0x2000, re.IGNORECASE | re.ASCII),
    ],
)
def test_case_variants_are_those_of_re(low, high, flags):
    every_character = "".join(map(chr, range(0x110000)))
    expected = {ord(match) for match in re.findall(f"[{chr(low)}-{chr(high)}]", every_character, flags)}
    assert {code for first, last in case_variants(low, high, flags) for code in range(first, last + 1)} == expected


def walk_plainly(dfa: DFA, text: bytes, state: int) -> int:
    for byte in text:
        state = int(dfa.transitions_Q256[state, byte])
    return state


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_transitions_of_tokens_equal_those_of_their_bytes(seed):
    pattern = random_pattern(random.Random(seed))
    try:
        automaton = COMPILER.compile(pattern)
    except PatternError:
        return
    dfa = regex_dfa.compile_dfa(pattern)
    edges = {
        (int(automaton.from_R[pair]), int(automaton.to_R[pair]), token)
        for token in range(len(TOKEN_BYTES))
        for pair in automaton.pairs_of_token(token)
    }
    last = automaton.states - 1
    expected = {(state, last, 1) for state in (*np.flatnonzero(dfa.accepting_Q).tolist(), last)}
    for token, state in itertools.product(range(2, len(TOKEN_BYTES)), range(1, last)):
        if target := walk_plainly(dfa, TOKEN_BYTES[token], state):
            expected.add((state, target, token))
    assert edges == expected


WALKED = [*TOKEN_BYTES[2:], *(f"{number * 7919 % 1000}{'ab1é'[number % 4]}".encode() for number in range(60))]


@pytest.mark.parametrize("pattern", ["a+b?", "(ab|1)*", "[ab]{2,9}1?", "(?s).*", "[0-9]{1,3}[^b]", "(a|ab)(é|1)*"])
def test_the_walk_of_a_trie_is_the_same_however_small_its_pieces_are(monkeypatch, pattern):
    dfa = regex_dfa.compile_dfa(pattern)
    trie, nodes_N = token_trie.build_trie(WALKED)
    expected = [
        (state, target, int(node))
        for text, node in zip(WALKED, nodes_N, strict=True)
        for state in range(1, len(dfa.accepting_Q))
        if (target := walk_plainly(dfa, text, state))
    ]
    found = {}
    work = {}
    for chunk in (1, 7, 2**18):
        monkeypatch.setattr(token_trie, "CHUNK", chunk)
        for kind, part in (("whole", trie), ("part", trie.keep_ancestors(nodes_N))):
            budget = Budget()
            pieces = list(part.walk(dfa.transitions_Q256, budget))
            triples = [triple for piece in pieces for triple in zip(*(array.tolist() for array in piece), strict=True)]
            assert len(set(triples)) == len(triples)
            found[chunk, kind] = sorted(triples)
            work[chunk, kind] = budget.work
    assert len(set(map(str, found.values()))) == 1
    assert len(set(work.values())) == 1
    wanted = set(nodes_N.tolist())
    assert {triple for triple in found[1, "whole"] if triple[2] in wanted} == set(expected)


@pytest.mark.parametrize("pattern", ["a+b?", "(ab|1)*", "(?s).*", "(a|ab)(é|1)*"])
def test_an_automaton_is_the_same_however_small_the_pieces_of_the_walk_are(monkeypatch, pattern):
    dfa = regex_dfa.compile_dfa(pattern)
    expected = AutomatonCompiler(TOKEN_BYTES, [1]).compile_tokens(pattern, dfa, Budget())
    for chunk in (1, 7):
        monkeypatch.setattr(token_trie, "CHUNK", chunk)
        other = AutomatonCompiler(TOKEN_BYTES, [1]).compile_tokens(pattern, dfa, Budget())
        for token in range(len(TOKEN_BYTES)):
            pairs = [
                sorted(zip(each.from_R[own].tolist(), each.to_R[own].tolist(), strict=True))
                for each in (expected, other)
                for own in [each.pairs_of_token(token)]
            ]
            assert pairs[0] == pairs[1]
        assert (other.final_Q == expected.final_Q).all()


@settings(max_examples=60, deadline=None)
@given(
    edges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
    ends=st.lists(st.booleans(), min_size=10, max_size=10),
)
def test_distances_equal_relaxation(edges, ends):
    from_R = np.array([source for source, _ in edges], dtype=np.int64)
    to_R = np.array([target for _, target in edges], dtype=np.int64)
    expected = [0 if is_end else UNREACHABLE for is_end in ends]
    for _ in range(10):
        for source, target in edges:
            expected[source] = min(expected[source], expected[target] + 1)
    assert distances_to(np.array(ends), from_R, to_R).tolist() == expected


def step_back_plainly(automaton: TokenAutomaton, ends_Q: np.ndarray, count: int, pins: dict[int, int]) -> np.ndarray:
    for position in range(count - 1, -1, -1):
        pairs = automaton.pairs_of_token(pins[position]) if position in pins else np.arange(len(automaton.from_R))
        before_Q = np.zeros_like(ends_Q)
        before_Q[automaton.from_R[pairs][ends_Q[automaton.to_R[pairs]]]] = True
        ends_Q = before_Q
    return ends_Q


@given(
    pattern=st.sampled_from(["a+b?", "(ab|1)*", "[ab]{2,9}1?", ".*", "a{3}.*"]),
    count=st.integers(0, 14),
    pins=st.dictionaries(st.integers(0, 16), st.integers(0, len(TOKEN_BYTES) - 1), max_size=4),
)
def test_steps_back_equal_the_plain_loop(pattern, count, pins):
    automaton = COMPILER.compile(pattern)
    expected = step_back_plainly(automaton, automaton.final_Q, count, pins)
    assert (automaton.step_back(automaton.final_Q, count, pins) == expected).all()


def test_an_automaton_survives_as_arrays():
    automaton = COMPILER.compile("(ab|1)*b?")
    arrays = automaton.to_arrays()
    assert all(isinstance(array, np.ndarray) and array.dtype != object for array in arrays.values())
    copy = TokenAutomaton.from_arrays(automaton.pattern, automaton.stops, arrays)
    assert (copy.pattern, copy.stops, copy.start) == (automaton.pattern, automaton.stops, automaton.start)
    for name in ARRAYS:
        assert (getattr(copy, name) == getattr(automaton, name)).all()


@pytest.mark.parametrize("values", [1, 40, 300])
@pytest.mark.parametrize("pattern", ["a+b?", "(ab|1)*", "[ab1 ]{2,9}1?", "(a|ab)(é|1)*"])
def test_blocks_of_a_canvas_equal_the_whole(monkeypatch, pattern, values):
    automaton = COMPILER.compile(pattern)
    logits = np.random.default_rng(0).normal(size=(13, len(TOKEN_BYTES))).astype(np.float32) * 4
    canvas = Constraints(automaton=automaton).canvas_automaton(automaton.start, 0, 13, 13)
    weights, best = canvas.forward_backward_viterbi(logits)
    monkeypatch.setattr(canvas_automaton, "BLOCK_VALUES", values)
    block_weights, block_best = canvas.forward_backward_viterbi(logits)
    assert (block_weights == weights).all()
    assert (block_best == best).all()


def test_a_pattern_that_slows_a_step_down_is_refused():
    automaton = COMPILER.compile("[ab1 ]{0,900}")
    constraints = Constraints(automaton=automaton)
    constraints.validate(len(TOKEN_BYTES), 256, [1], StepCost(canvas_length=256))
    constraints.validate(len(TOKEN_BYTES), 4, [1], StepCost(canvas_length=100_000))  # four positions of the canvas are used
    with pytest.raises(BudgetError, match=f"the canvas 100,000 positions: .* at most {MAX_CANVAS_SUMS:,} are allowed"):
        constraints.validate(len(TOKEN_BYTES), 100_000, [1], StepCost(canvas_length=100_000))
    with pytest.raises(BudgetError, match="sums at each step"):
        constraints.validate(len(TOKEN_BYTES), 2_000, [1], StepCost(canvas_length=2_000, multiplications=1_000))
    constraints.validate(len(TOKEN_BYTES), 2_000, [1], StepCost(canvas_length=2_000, multiplications=10**9))


def test_a_writer_refuses_a_pattern_that_slows_a_step_down():
    config = replace(tiny.BASE, max_position_embeddings=4_096)
    writer = Writer(tiny.decided(config), tiny.byte_tokenizer(), tiny.sampler(canvas_length=8))
    with pytest.raises(PatternError, match="shorten the canvas or simplify the pattern"):
        writer.write("a", regex="[a-z ]{0,4500}", canvas_length=3_000, max_tokens=3_000, check="off")


def test_a_pattern_that_slows_a_step_down_is_written_from_left_to_right_if_the_caller_leaves_the_choice():
    config = replace(tiny.BASE, max_position_embeddings=4_096)
    writer = Writer(tiny.decided(config), tiny.byte_tokenizer(), tiny.sampler(canvas_length=8))
    options = GenerationOptions(regex="[a-z ]{0,4500}", max_tokens=3_000, sampler={"canvas_length": 3_000})
    assert writer.choose_check(options) == "exact"
    assert writer.choose_check(replace(options, regex="[a-z ]{0,9}")) == "off"
    answer = writer.write("a", options=options, max_tokens=16)
    assert re.fullmatch("[a-z ]*", answer.text)


def test_a_decision_between_too_many_choices_is_refused_before_the_model_runs(monkeypatch):
    writer = Writer(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), tiny.sampler(canvas_length=16))
    monkeypatch.setattr(writer.engine, "prefill_beside", lambda *arguments: pytest.fail("the model ran"))
    monkeypatch.setattr("redraft.tasks.generation.Budget", lambda: Budget(20_000))
    with pytest.raises(BudgetError, match="20,000 units"):
        writer.decide("a", [f"choice {number}" for number in range(50)])
