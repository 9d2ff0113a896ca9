"""Constrained answers always match their pattern; marginals equal those of all matching texts, enumerated one by one."""

import calendar
import itertools
import json
import random
import re
from dataclasses import replace
from datetime import date
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.config import SamplerConfig
from redraft.constraints import json_schema, number_range, regex_dfa
from redraft.constraints.budget import Budget
from redraft.constraints.canvas_automaton import CanvasAutomaton
from redraft.constraints.constraints import Constraints
from redraft.constraints.dfa import DFA
from redraft.constraints.errors import PatternError
from redraft.constraints.formats import FORMATS
from redraft.constraints.number_range import NumberRange
from redraft.constraints.pattern_compiler import Pattern, compile_one
from redraft.constraints.prefix_grammar import BYTES, PrefixGrammar
from redraft.constraints.schema_nfa import compile_schema
from redraft.constraints.token_automaton import AutomatonCompiler
from redraft.diffusion.generate import Committed, generate
from redraft.tasks.generation import cut_at_stop
from redraft.tokenizer.tokenizer import Tokenizer, TokenizerError
from redraft.writer import Writer

SMALL = replace(tiny.BASE, layer_types=("full_attention",), hidden_size=16, canvas_length=8)
WRITER = Writer(tiny.decided(SMALL), tiny.byte_tokenizer(), tiny.sampler(canvas_length=8))
ALPHABET = "ab1 é"


def call_or_error(function, *arguments, **options):
    """The function's result and no message, or no result and the message of its error."""
    try:
        return function(*arguments, **options), ""
    except ValueError as error:
        return None, str(error)


def random_pattern(rng: random.Random, depth: int = 3) -> str:
    kind = rng.randrange(9) if depth else rng.randrange(4)
    if kind == 0:
        return re.escape(rng.choice(ALPHABET))
    if kind == 1:
        return rng.choice(["[ab]", "[^a]", ".", r"\d", r"\w", r"\s", "[a-c1]", "[^\\W\\d]", "é", "[é-ü]"])
    if kind in (2, 3):
        return "".join(re.escape(c) for c in rng.choices(ALPHABET, k=rng.randrange(3)))
    if kind == 4:
        return f"(?:{random_pattern(rng, depth - 1)}|{random_pattern(rng, depth - 1)})"
    if kind == 5:
        return f"({random_pattern(rng, depth - 1)})" + rng.choice(["?", "*", "+", "{2}", "{1,3}", "{0,2}", "*?", "{2,}"])
    return random_pattern(rng, depth - 1) + random_pattern(rng, depth - 1)


def accepts(pattern: str, text: str) -> bool:
    return regex_dfa.compile_dfa(pattern).accepts(text.encode())


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), texts=st.lists(st.text(ALPHABET + "\n😀Z", max_size=5), max_size=12))
def test_a_dfa_accepts_what_python_accepts(seed, texts):
    pattern = random_pattern(random.Random(seed))
    for text in texts:
        assert accepts(pattern, text) == bool(re.fullmatch(pattern, text)), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^a+$", ["a", "aaa"], ["", "ba"]),
        ("(?i)straße", ["STRAßE", "straße"], ["strasse"]),
        ("(?s:.)x", ["\nx"], ["x"]),
        (r"[\]\\-]+", ["]-\\"], ["a"]),
        ("[]a]", ["]", "a"], ["b"]),
        (r"\D", ["é", "\n"], ["5", "٣"]),
        (r"(?a)\w\W", ["aé"], ["éa"]),
        (r"(?a)(?u:\W)", ["-"], ["é", "a"]),
        ("\N{GREEK SMALL LETTER ALPHA}{2}", ["αα"], ["α"]),
        ("[^\x00-\x7f]", ["é", "😀", "￿"], ["a"]),
        ("(?P<year>[0-9]{4})", ["2026"], ["26"]),
    ],
)
def test_common_patterns(pattern, good, bad):
    assert all(accepts(pattern, text) and re.fullmatch(pattern, text) for text in good)
    assert not any(accepts(pattern, text) or re.fullmatch(pattern, text) for text in bad)


TOKEN_BYTES = [None, None, b"a", b"b", b"ab", b"1", b"\xc3", b"\xa9"]
COMPILER = AutomatonCompiler(TOKEN_BYTES, [1])


def matching(pattern: str, room: int) -> list[tuple[int, ...]]:
    """All sequences of `room` tokens that are a match, or a match and then stop tokens to the end."""
    sequences = []
    for ids in itertools.product(range(len(TOKEN_BYTES)), repeat=room):
        end = ids.index(1) if 1 in ids else room
        if any(token != 1 for token in ids[end:]) or any(TOKEN_BYTES[token] is None for token in ids[:end]):
            continue
        try:
            text = b"".join(TOKEN_BYTES[token] for token in ids[:end]).decode()
        except UnicodeDecodeError:
            continue
        if re.fullmatch(pattern, text):
            sequences.append(ids)
    return sequences


@pytest.mark.parametrize(
    "pattern", ["a+b?", "(ab|1)*", "[ab]{2,3}1?", ".*", "1|ab1", "(a|ab)(é|1)*", "é{1,2}", "[^é]+", "(?:b|)"]
)
@pytest.mark.parametrize("room", [1, 2, 4])
def test_marginals_are_those_of_all_matching_texts(pattern, room):
    automaton = COMPILER.compile(pattern)
    logits = np.random.default_rng(room).normal(size=(room, len(TOKEN_BYTES))).astype(np.float32) * 3
    texts = matching(pattern, room)
    canvas = Constraints(automaton=automaton).canvas_automaton(automaton.start, 0, room, room)
    if not texts:
        with pytest.raises(PatternError, match="no text of this length"):
            canvas.forward_backward_viterbi(logits)
        return
    probs = np.exp(logits.astype(np.float64))
    weight = {ids: np.prod([probs[at, token] for at, token in enumerate(ids)]) for ids in texts}
    expected = np.zeros_like(probs)
    for ids, share in weight.items():
        expected[np.arange(room), ids] += share
    weights, best = canvas.forward_backward_viterbi(logits)
    marginals = probs * np.exp(weights)[:, automaton.classes_V]
    marginals /= marginals.sum(axis=1, keepdims=True)
    assert np.allclose(marginals, expected / expected.sum(axis=1, keepdims=True), atol=1e-9)
    assert weight[tuple(best.tolist())] == pytest.approx(max(weight.values()), rel=1e-6)
    share = sum(weight.values()) / np.prod(probs.sum(axis=1))
    assert canvas.log_match_probability(logits, np.log(probs.sum(axis=1))) == pytest.approx(np.log(share), abs=1e-5)


@pytest.mark.parametrize("pattern", ["a*", "(ab|b1)+", "é{2,3}", "1[^a]?"])
def test_a_token_automaton_accepts_whole_matches_with_and_without_a_stop_token(pattern):
    tokenizer = tiny.byte_tokenizer()
    automaton = AutomatonCompiler(tokenizer.token_bytes, (1, 5)).compile(pattern)
    for length in range(4):
        for text in map("".join, itertools.product(ALPHABET, repeat=length)):
            ids = tokenizer.encode(text)
            assert automaton.accepts(ids) == automaton.accepts([*ids, 5, 0, 70]) == bool(re.fullmatch(pattern, text))


def test_a_very_improbable_match_is_found():
    """The most probable first token leads to no match; the match is a hundred orders of magnitude less probable."""
    automaton = COMPILER.compile("b{6}1")
    logits = np.zeros((8, len(TOKEN_BYTES)), dtype=np.float32)
    logits[:, 2] = 75.0
    _, best = Constraints(automaton=automaton).canvas_automaton(automaton.start, 0, 8, 8).forward_backward_viterbi(logits)
    assert best.tolist() == [3] * 6 + [5, 1]


def write_batch(requests: list[tuple[SamplerConfig, int, Constraints]]) -> list[str]:
    """The texts of several answers that the engine generates in one batch."""
    prompt = WRITER.tokenizer.encode_prompt("a")
    added = [WRITER.engine.add(prompt, cfg, seed=seed, constraints=constraints) for cfg, seed, constraints in requests]
    finished = WRITER.engine.run(added)
    texts = []
    for request, (cfg, _, _) in zip(added, requests, strict=True):
        ids, _ = cut_at_stop(finished[request].ids_BT[0].tolist(), cfg, cfg.max_new_tokens)
        texts.append(WRITER.tokenizer.decode(ids))
    return texts


def prepare(cfg: SamplerConfig, constraints: Constraints, pattern: Pattern) -> Constraints:
    """The constraints with a pattern, or the error with which a Writer refuses them."""
    constrained = replace(constraints, automaton=compile_one(WRITER.automaton_compiler, pattern, Budget()))
    constrained.validate(tiny.VOCAB, cfg.max_new_tokens, cfg.eos_token_ids)
    return constrained


def blocks(*marks: pytest.MarkDecorator) -> list[Any]:
    """Half of the blocks of random cases are for a release."""
    later = [pytest.param(block, marks=pytest.mark.soak_long) for block in range(4, 8)]
    return [pytest.param(0, marks=marks), *(pytest.param(block, marks=pytest.mark.soak) for block in range(1, 4)), *later]


@pytest.mark.parametrize("block", blocks(pytest.mark.soak))
def test_two_thousand_random_patterns_are_matched(block):
    """On one canvas or several, cut off by the length or not, some with a pin. 50 answers share a batch."""
    rng = random.Random(block)
    patterns: list[str] = []
    requests: list[tuple[SamplerConfig, int, Constraints]] = []
    while len(requests) < 250:
        pattern = rng.choice(["", "", "", "(?i)"]) + random_pattern(rng)
        room = rng.randrange(4, 25)
        steps = rng.choice([1, 1, 2, 3])
        pins = {rng.randrange(room): rng.randrange(tiny.VOCAB)} if rng.random() < 0.2 else {}
        cfg = WRITER.sampler.changed(max_new_tokens=room, max_steps=steps, t_min=rng.choice([0.0, 0.4]))
        constraints, error = call_or_error(prepare, cfg, Constraints(pins=pins), Pattern(regex=pattern))
        if constraints is None:  # the shortest match is too long, or no match has the pin
            expected = (
                "tokens, the answer may have",
                "without regard to case",
                "cannot be pinned",
                "has these pins matches",
            )
            assert any(words in error for words in expected), (pattern, error)
            continue
        patterns.append(pattern)
        requests.append((cfg, len(requests), constraints))
    for begin in range(0, 250, 50):
        texts = write_batch(requests[begin : begin + 50])
        for pattern, text in zip(patterns[begin : begin + 50], texts, strict=True):
            assert re.fullmatch(pattern, text), (pattern, text)


def test_an_answer_at_a_low_temperature_matches():
    answer = WRITER.write("a", regex="[0-9]{3}", t_min=0.0, t_max=0.01, max_tokens=8, max_steps=4, seed=1)
    assert re.fullmatch("[0-9]{3}", answer.text)


def test_a_pattern_that_fails_on_the_way_ends_its_own_request_only(monkeypatch):
    """No pattern is known to fail while an answer is generated; if one does, other requests go on."""
    words, cfg, prompt = (
        WRITER.automaton_compiler,
        WRITER.sampler.changed(max_new_tokens=8),
        WRITER.tokenizer.encode_prompt("a"),
    )
    held = WRITER.engine.add(prompt, cfg, seed=1, constraints=Constraints(automaton=words.compile("a+")))
    free = WRITER.engine.add(prompt, cfg, seed=2)
    streams = [WRITER.engine.stream(request) for request in (held, free)]

    def fail(self, logits):
        raise PatternError("broken")

    monkeypatch.setattr(CanvasAutomaton, "forward_backward_viterbi", fail)
    with pytest.raises(PatternError, match="broken"):
        list(streams[0])
    *_, end = streams[1]
    *_, expected = generate(WRITER.model, [prompt], cfg, seeds=[2])
    assert torch.equal(end.ids_BT, expected.ids_BT)


def random_schema(rng: random.Random, depth: int = 2):
    kind = rng.randrange(11) if depth else rng.randrange(7)
    if kind == 0:
        low = rng.randrange(-200, 200)
        return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 7, 150, 4000])}
    if kind == 1:
        return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 6)}
    if kind == 2:
        return {"enum": rng.sample(["x", 'q"', "é\\", 1, 2.5, None, True, [1], {"a": "b."}], 3)}
    if kind == 3:
        return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}
    if kind == 4:
        return {"const": rng.choice(["(a|b)*", 5, False])}
    if kind == 5:
        return {"type": "string", "format": rng.choice(["date", "time", "ipv4"])}
    if kind == 6:
        return {"type": "string", "pattern": rng.choice(["^[a-c]{2}$", "^é?x$"])}
    if kind == 7:
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": rng.randrange(2), "maxItems": 2}
    if kind == 8:
        return {"anyOf": [random_schema(rng, depth - 1), random_schema(rng, 0)]}
    names = rng.sample(["a", "b b", "ü", "$x"], rng.randrange(1, 4))
    found = {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names}}
    return found | {"required": rng.sample(names, rng.randrange(len(names) + 1)), "additionalProperties": False}


@pytest.mark.parametrize("block", blocks())
def test_a_thousand_schema_answers_are_valid(block):
    """25 answers share a batch."""
    rng = random.Random(block)
    cfg = WRITER.sampler.changed(max_new_tokens=128, canvas_length=64, max_steps=1)
    schemas: list[dict] = []
    requests: list[tuple[SamplerConfig, int, Constraints]] = []
    while len(requests) < 125:
        schema = random_schema(rng)
        constraints, error = call_or_error(prepare, cfg, Constraints(), Pattern(schema=schema))
        if constraints is None:
            assert "tokens, the answer may have" in error, (schema, error)
            continue
        schemas.append(schema)
        requests.append((cfg, len(requests), constraints))
    for begin in range(0, 125, 25):
        texts = write_batch(requests[begin : begin + 25])
        for schema, text in zip(schemas[begin : begin + 25], texts, strict=True):
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


@pytest.mark.parametrize(
    ("options", "pattern"), [({"regex": "[0-9]{3}-x*"}, "[0-9]{3}-x*"), ({"choices": ["yes", "no"]}, "yes|no")]
)
def test_a_writer_obeys_a_pattern(options, pattern):
    for seed in range(4):
        assert re.fullmatch(pattern, WRITER.write("a", max_tokens=12, seed=seed, **options).text)


def test_a_writer_obeys_a_schema():
    schema = {"type": "object", "properties": {"born": {"type": "string", "format": "date"}}, "required": ["born"]}
    for seed in range(4):
        answer = WRITER.write("a", schema=schema, max_tokens=40, seed=seed)
        date.fromisoformat(json.loads(answer.text)["born"])


YEARS = (1, 4, 100, 400, 1600, 1700, 1899, 1900, 1904, 1999, 2000, 2023, 2024, 2026, 2100, 2400, 9996, 9999)


def test_schema_dates_are_those_of_the_calendar():
    """Every string YYYY-MM-DD of these years, valid or not, against `datetime`."""
    pattern = FORMATS["date"]
    match = re.compile(pattern).fullmatch
    for year, month, day in itertools.product(YEARS, range(14), range(33)):
        text = f"{year:04}-{month:02}-{day:02}"
        try:
            is_date = bool(date(year, month, day))
        except ValueError:
            is_date = False
        assert bool(match(text)) == is_date, text
        if month in (1, 2, 12) and day > 27:
            assert accepts(pattern, text) == is_date, text
            assert accepts(FORMATS["date-time"], f"{text}T23:59:59Z") == is_date, text
    leap_years = [year for year in range(10_000) if match(f"{year:04}-02-29")]
    assert leap_years == [year for year in range(1, 10_000) if calendar.isleap(year)]
    assert not match("0000-01-01")


def test_a_batch_with_and_without_automata_equals_generate():
    """The engine's answers equal those of `generate`, over several canvases, with pins, beside unconstrained requests."""
    words, cfg = WRITER.automaton_compiler, WRITER.sampler.changed(max_new_tokens=20, max_steps=3)
    pins = {9: WRITER.tokenizer.encode("7")[0]}
    asked = [
        Constraints(automaton=words.compile("[a-d]{12,19}")),
        Constraints(),
        Constraints(automaton=words.compile("([0-9]{2}-)+[0-9]{2}"), pins=pins),
        Constraints(automaton=words.compile("yes|no")),
    ]
    prompt = WRITER.tokenizer.encode_prompt("ab")
    requests = [WRITER.engine.add(prompt, cfg, seed=row, constraints=constraints) for row, constraints in enumerate(asked)]
    finished = WRITER.engine.run(requests)
    events = list(generate(WRITER.model, [prompt] * 4, cfg, seeds=range(4), constraints=asked))
    for row, request in enumerate(requests):
        ids = finished[request].ids_BT[0].tolist()
        assert ids == events[-1].ids_BT[row].tolist()[: len(ids)]
    assert len([event for event in events if isinstance(event, Committed)]) == 3
    text = WRITER.tokenizer.decode(finished[requests[2]].ids_BT[0, :20].tolist())
    assert re.fullmatch("([0-9]{2}-)+[0-9]{2}", text)
    assert text[9] == "7"


def test_every_draft_matches():
    for event in WRITER.stream("a", regex="(ab|cd){2,4}", max_tokens=8, seed=1):
        if hasattr(event, "step"):
            assert re.fullmatch("(ab|cd){2,4}", event.text)


def test_probabilities_of_choices_add_up_to_one():
    probabilities = WRITER.decide("a", ["yes", "no", "maybe"])
    assert sum(probabilities.values()) == pytest.approx(1.0)
    assert list(probabilities) == ["yes", "no", "maybe"]
    assert probabilities == WRITER.decide("a", ["yes", "no", "maybe"])
    assert WRITER.decide("a", ["no", "yes", "maybe"])["no"] == pytest.approx(probabilities["no"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "a("}, "is not a regular expression: missing )"),
        ({"regex": r"(a)\1"}, "refers back to a group"),
        ({"regex": "(?=a)b"}, "looks around"),
        ({"regex": r"a\bb"}, "has an anchor inside"),
        ({"regex": "x(^a)"}, "has an anchor inside"),
        ({"regex": "a{200000}"}, "more than 40,000 parts"),
        ({"regex": "(?>a)b"}, "uses ATOMIC_GROUP"),
        ({"regex": "a{40}"}, "takes 40 tokens, the answer may have 16"),
        ({"regex": r"[^\x00-\U0010ffff]"}, "no text of this vocabulary matches"),
        ({"regex": "a", "choices": ["b"]}, "obeys one of regex, schema, choices, structure, got regex and choices"),
        ({"choices": []}, "must be a list of non-empty strings"),
        ({"choices": "yes"}, "must be a list of non-empty strings, got 'yes'"),
        ({"choices": ["a", "a"]}, "must differ"),
        ({"schema": "{"}, "the schema is not JSON"),
        ({"schema": {"$ref": "#"}}, "refers to itself"),
        ({"schema": {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {}]}}}}, "refers to itself"),
        ({"schema": {"type": "array", "items": {"$ref": "#"}, "contains": {"type": "null"}}}, "the schema has contains"),
        ({"schema": {"$ref": "http://x/y"}}, "only references inside the schema"),
        ({"schema": {"$ref": "#/$defs/x"}}, "which is not there"),
        ({"schema": {"not": {}}}, "the schema allows no value"),
        ({"schema": {"not": {"multipleOf": 2}}}, "/not is not supported"),
        ({"schema": {"type": "array", "not": {"const": [1]}}}, "/not forbids [1], which is not supported"),
        ({"schema": {"type": "number", "minimum": "2"}}, "/minimum must be a number, got '2'"),
        ({"schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "the schema allows no value"),
        (
            {"schema": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}},
            "no number is a whole number above 3 below 4",
        ),
        ({"schema": {"type": "integer", "multipleOf": 0}}, "/multipleOf must be above 0, got 0"),
        ({"schema": {"type": "integer", "multipleOf": 2001}}, "at most 2,000 residues"),
        ({"schema": {"type": "object", "properties": {"a": {"type": "strin"}}}}, "/properties/a has the type 'strin'"),
        ({"schema": {"unevaluatedItems": False}}, "/unevaluatedItems is not supported"),
        (
            {"schema": {"anyOf": [{"required": ["a"]}], "unevaluatedProperties": False}},
            "/unevaluatedProperties is not supported beside anyOf",
        ),
        ({"schema": {"type": "string", "minLength": 3, "maxLength": 2}}, "minLength is 3, maxLength is 2"),
        ({"schema": {"type": "string", "minLength": -1}}, "/minLength must be a whole number, 0 or more, got -1"),
        ({"schema": {"type": "string", "minLength": 30}}, "tokens, the answer may have 16"),
        ({"schema": {"type": "string", "pattern": "("}}, "is not a regular expression: missing )"),
        ({"schema": {"type": "string", "pattern": r"(a)\1"}}, "refers back to a group"),
        ({"schema": {"type": "string", "pattern": 5}}, "/pattern must be a text, got 5"),
        ({"schema": {"oneOf": [{"type": "integer"}, {"type": "integer"}]}}, "the schema allows no value"),
        ({"schema": {"oneOf": [{"minLength": n} for n in range(13)]}}, "13 branches that may overlap, at most 12"),
        ({"schema": {"allOf": [{"type": "null"}, {"type": "string"}]}}, "the schema allows no value"),
        ({"schema": {"allOf": []}}, "/allOf must be a list of at least one"),
        ({"schema": {"enum": []}}, "/enum must be a list of at least one"),
        ({"schema": {"enum": [float("nan")]}}, "/enum has nan, which JSON cannot express"),
        ({"schema": {"oneOf": [{"type": {}}]}}, "has the type {}"),
        ({"schema": 5}, "the schema must be an object, true or false, got 5"),
        ({"schema": False}, "the schema allows no value"),
        ({"schema": {"type": "object", "required": ["a"], "additionalProperties": False}}, "the schema allows no value"),
        ({"schema": {"type": "object", "required": [5]}}, "must name its properties by texts, got 5"),
        ({"constraints": Constraints(pins={0: 70}), "regex": "[0-9]+"}, "that has these pins matches"),
        ({"constraints": Constraints(pins={4: 1}), "regex": "[0-9]+"}, "the stop token 1 cannot be pinned"),
        ({"regex": "a+", "eos_token_ids": (70,)}, "was made for the stop tokens"),
        ({"regex": "(?i)[^k]"}, "without regard to case: write both cases"),
        ({"regex": "(?:x" * 400 + "ab" + ")?" * 400}, "is nested too deeply"),
        ({"regex": 5}, "a pattern is a text, got 5"),
        ({"regex": b"a"}, "a pattern is a text, got b'a'"),
        ({"schema": '{"type": "array", "items": ' * 400 + '{"type": "null"}' + "}" * 400}, "is nested too deeply"),
        (
            {"schema": '{"type": "array", "items": ' * 101 + '{"type": "null"}' + "}" * 101},
            "the schema is nested too deeply: at most 100 levels",
        ),
    ],
)
def test_an_impossible_constraint_is_refused_in_one_sentence(options, words):
    with pytest.raises(ValueError) as caught:
        WRITER.write("a", max_tokens=16, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def compile_any(schema: Any) -> DFA | PrefixGrammar:
    """The automaton of a schema, or its grammar."""
    compiled = Pattern(schema=schema).compile(Budget())
    return PrefixGrammar("of the schema", compiled, BYTES) if isinstance(compiled, str) else compiled


NESTED = {"type": "array", "items": {"$ref": "#"}}
CLOSED = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "number", "minimum": 2}, ["2", "2.5", "31"], ["1.99", "-3", '"2"']),
        ({"type": "integer", "minimum": -3, "maximum": 2}, ["-3", "0", "2"], ["-4", "3", "1.5"]),
        (
            {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True},
            ["[]", "[1]", "[2, 1]"],
            ["[1, 1]", "[2, 1, 2]"],
        ),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, ["[]", "[null]"], ["[null, null]"]),
        ({"type": "string", "format": "color"}, ['"red"', '""'], ["red", "1"]),
        ({"type": "string", "pattern": "a"}, ['"a"', '"xax"'], ['"x"', '""']),
        ({"type": "string", "pattern": "^.$"}, ['"a"', '"é"', r'"\""', r'"\\"'], ['""', '"ab"', '"""', r'"\n"']),
        ({"type": "string", "pattern": "^a\\$"}, ['"a$"', '"a$b"'], ['"a"', '"ba$"']),
        ({"oneOf": [{"type": "string"}, {"maxLength": 1}]}, ['"ab"', "5", "null"], ['"a"', '""']),
        ({"allOf": [{"type": "null"}, {"type": "null"}]}, ["null"], ["1"]),
        ({"allOf": [{"minimum": 3}, {"maximum": 5, "type": "integer"}]}, ["3", "5"], ["2", "6", "null"]),
        ({"not": {"type": "string"}}, ["1", "null", "[]", '{"a": 1.5}'], ['""', '"a"']),
        ({}, ["null", "1e5", '"x"', '[{"a": 1}]'], ["nul", "[1,", "{1: 2}"]),
        ({"type": "object"}, ["{}", '{"a": [1]}'], ["[]", "null", "{a: 1}"]),
        ({"type": "object", "required": ["a"]}, ['{"a": 1}'], ["{}", '{"b": 1}']),
        (
            CLOSED,
            ['{"a": null}', '{"a": null, "b": 1}', '{"b": 1}', "{}"],
            ['{"a": 1}', '{"b": null}', '{"a": null, "a": 1}'],
        ),
        (NESTED, ["[]", "[[], [[]]]", "[" * 9 + "]" * 9], ["[1]", "[[]", "{}", "[]]"]),
        (
            {"properties": {"a": {"$ref": "#"}, "b": {"const": 1}}, "required": ["b"], "type": "object"},
            ['{"b": 1}', '{"a": {"a": {"b": 1}, "b": 1}, "b": 1}'],
            ['{"a": {}, "b": 1}', '{"a": {"b": 2}, "b": 1}', "{}"],
        ),
    ],
)
def test_what_was_refused_once_is_obeyed(schema, valid, invalid):
    compiled = compile_any(schema)
    accepts_text = compiled.accepts if isinstance(compiled, DFA) else compiled.accepts_text
    assert [text for text in valid + invalid if accepts_text(text.encode())] == valid
    validator = jsonschema.Draft202012Validator(schema)
    assert all(validator.is_valid(json.loads(text)) for text in valid)


def test_a_pattern_with_too_many_states_is_a_grammar():
    grammar = Pattern(regex="[ab]{12000}x?").compile(Budget())
    assert isinstance(grammar, str)
    compiled = PrefixGrammar("of many states", grammar, BYTES)
    texts = [b"a" * 12_000, b"ab" * 6_000 + b"x", b"a" * 11_999, b"a" * 12_001, b"ab" * 6_000 + b"xx"]
    assert [compiled.accepts_text(text) for text in texts] == [True, True, False, False, False]


def test_only_groups_inside_one_another_count_as_depth():
    hidden = r"[(\](]{200}" + r"\(" * 200 + "(?:a)" * 200
    assert accepts(hidden + "(" * 150 + "b" + ")" * 150, "(" * 400 + "a" * 200 + "b")
    with pytest.raises(PatternError, match="at most 150 groups"):
        regex_dfa.compile_dfa(hidden + "(" * 151 + "b" + ")" * 151)


def test_only_schemas_inside_one_another_count_as_depth():
    value: dict[str, Any] = {"type": "null"}
    for _ in range(99):
        value = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    wide = {"type": "array", "items": {"anyOf": [{"type": "integer", "maximum": number} for number in range(200)]}}
    text = '{"a": ' * 99 + "null" + "}" * 99
    dfa = compile_schema(value, Budget())
    assert dfa.accepts(text.encode())
    assert not dfa.accepts(f'{{"a": {text}}}'.encode())
    assert compile_schema(wide, Budget()).accepts(b"[199, -3]")
    with pytest.raises(PatternError, match="at most 100 levels"):
        Pattern(schema={"type": "object", "properties": {"a": value}, "required": ["a"]}).compile(Budget())


@settings(max_examples=200)
@given(pattern=st.text(st.sampled_from("ab1[](){}|*+?^$.\\-dwsDWS,é:=!<>P&~"), max_size=12))
def test_any_pattern_compiles_or_is_refused_in_one_sentence(pattern):
    dfa, error = call_or_error(regex_dfa.compile_dfa, pattern)
    assert (dfa is None) == bool(error)
    assert "\n" not in error


KEYWORDS = (
    *json_schema.STRING_KEYWORDS, *json_schema.NUMBER_KEYWORDS, *json_schema.ARRAY_KEYWORDS, *json_schema.OBJECT_KEYWORDS,
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "then", "$ref", "dependentRequired", "x",
)  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "type", "items", "properties", "not"]), inner)
    ),
    max_leaves=8,
)


@pytest.mark.soak
@settings(max_examples=300, deadline=None)
@given(
    schema=st.dictionaries(st.sampled_from(KEYWORDS), json_values | st.sampled_from(json_schema.TYPES), max_size=4),
)
def test_any_schema_compiles_or_is_refused_in_one_sentence(schema):
    try:
        compiled, error = compile_any(schema), ""
    except PatternError as refusal:  # not any ValueError
        compiled, error = None, str(refusal)
    assert "\n" not in error
    assert (compiled is None) == bool(error)


def test_integers_between():
    for low, high in itertools.product((0, 1, 8, 9, 10, 99, 130), (0, 5, 10, 99, 100, 131, 200)):
        if low <= high:
            match = re.compile(number_range.integers_between(low, high)).fullmatch
            assert all(bool(match(str(n))) == (low <= n <= high) for n in range(-200, 300))
            assert not match("-0")
            assert not match("01")


BOUNDS = ("-130", "-10", "-9.5", "-1", "-0.25", "0", "0.05", "1", "8.75", "9", "99", "100")
TEXTS = [
    *map(str, range(-140, 140)),
    *(f"{n / 4:.2f}" for n in range(-600, 600)),
    *("0.04", "0.05", "0.050", "0.051", "-0.249", "-0.2500", "-0.251", "8.7499999", "8.750001", "1000000"),
    *("-1000000.5", "-9.50", "0.0", "-130.0000001", "100.0", "99.999999", "8.7", "9.000"),
]  # fmt: skip


@pytest.mark.parametrize("is_integer", [True, False])
@pytest.mark.parametrize("multiple", [None, "1", "7", "0.5", "0.05"])
@pytest.mark.parametrize("excludes", [(False, False), (True, False), (False, True), (True, True)])
def test_a_range_of_numbers_has_exactly_the_texts_of_its_numbers(is_integer, multiple, excludes):
    """With negative and decimal bounds, with one bound or two."""
    multiples = () if multiple is None else (Decimal(multiple),)
    for low, high in itertools.product((None, *map(Decimal, BOUNDS)), repeat=2):
        if (low is None and high is None and multiple is None) or (None not in (low, high) and low > high):
            continue
        numbers = NumberRange(
            is_integer=is_integer,
            low=low,
            high=high,
            excludes_low=excludes[0] and low is not None,
            excludes_high=excludes[1] and high is not None,
            multiples=multiples,
        )
        dfa, error = call_or_error(numbers.compile, Budget())
        if dfa is None:
            assert error == f"no number is {numbers}"
        for text in TEXTS:
            is_one = numbers.contains(Decimal(text)) and not (is_integer and "." in text)
            assert (dfa is not None and dfa.accepts(text.encode())) == is_one, (str(numbers), text)
        for text in ("01", "-01", "1.", ".5", "+1", "--1", "1e1", "00", ""):
            assert dfa is None or not dfa.accepts(text.encode()), (str(numbers), text)


def test_token_bytes():
    """Byte-level and byte-fallback vocabularies; special tokens have no bytes."""
    token_bytes = WRITER.tokenizer.token_bytes
    assert token_bytes[WRITER.tokenizer.encode("é")[0]] == b"\xc3"
    assert token_bytes[1] is None
    shipped = Tokenizer.from_folder("redraft/weights/tiny")
    ids = shipped.encode(" Zoë said: 'hi'\n\t😀")
    assert b"".join(shipped.token_bytes[token] for token in ids).decode() == " Zoë said: 'hi'\n\t😀"
    with pytest.raises(TokenizerError, match="not the bytes of a text"):
        Tokenizer.from_folder("redraft/weights/sudoku").token_bytes  # noqa: B018


def test_a_pin_on_a_later_canvas_constrains_the_first_canvas():
    """A canvas has eight tokens. The pin on the second canvas leaves only the long branch of the pattern."""
    pin = WRITER.tokenizer.encode("z")[0]
    constraints = Constraints(pins={10: pin})
    answer = WRITER.write("a", regex="a{1,9}|b{10}z", constraints=constraints, max_tokens=12, seed=1, max_steps=2)
    assert answer.text == "b" * 10 + "z"
    assert torch.tensor(answer.ids).shape == (11,)
