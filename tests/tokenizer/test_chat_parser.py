"""Answers taken apart, whole and while they grow."""

import time

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from redraft.tokenizer.chat_parser import Parsed, ToolCall, parse

BYTES = tiny.byte_tokenizer()


@pytest.mark.parametrize(
    ("answer", "parsed"),
    [
        ("Hello<turn|>", Parsed("Hello")),
        ("<|channel>thought\nhm<channel|>Hello<turn|>", Parsed("Hello", "hm")),
        ("<|channel>thought\n<channel|>Hello", Parsed("Hello")),
        ("<|channel>thought\nnever ends", Parsed("", "never ends")),
        (
            '<|tool_call>call:f{a:<|"|>x, {y}<|"|>,b:[1,-2.5,true,null],c:{d:<|"|><|"|>}}<tool_call|><|tool_response>',
            Parsed("", "", (ToolCall("f", {"a": "x, {y}", "b": [1, -2.5, True, None], "c": {"d": ""}}),)),
        ),
        ("Both <|tool_call>call:a.b-c{}<tool_call|>of them", Parsed("Both of them", "", (ToolCall("a.b-c", {}),))),
        ("<|tool_call>call:f{a:}}<tool_call|>", Parsed("<|tool_call>call:f{a:}}<tool_call|>")),
        ("a <think> is text", Parsed("a <think> is text")),
        ("<|tool_call>call:f{n:NaN}<tool_call|>", Parsed("", "", (ToolCall("f", {"n": "NaN"}),))),
        ("<|tool_call>call:f{ A <tool_call|> b }<tool_call|>", Parsed("<|tool_call>call:f{ A <tool_call|> b }<tool_call|>")),
    ],
)
def test_answers_are_taken_apart(answer, parsed):
    assert parse(answer) == parsed


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_characters="<|>", codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), json_values, max_size=4))
def test_a_call_written_by_the_template_reads_back(arguments):
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    assert parse(BYTES.render(messages).split("model\n", 1)[1]).tool_calls == (ToolCall("f", arguments),)


@given(st.text())
def test_parsing_never_fails(text):
    parse(text)
    parse("<|tool_call>call:f{" + text + "}<tool_call|>")


PIECES = [
    "<|channel>",
    "thought\n",
    "thou",
    "<channel|>",
    "<|tool_call>",
    "call:f{",
    "a:1",
    "}",
    "<tool_call|>",
    " text ",
    "<",
]


@given(
    st.lists(st.sampled_from(PIECES) | st.characters(codec="utf-8"), max_size=12), st.lists(st.integers(0, 60), max_size=4)
)
def test_what_is_shown_of_a_growing_answer_only_grows(pieces, cuts):
    answer = "".join(pieces)
    before = Parsed("")
    for end in sorted({min(cut, len(answer)) for cut in cuts}):
        now = parse(answer[:end], final=False)
        for old, new in ((before.text, now.text), (before.reasoning, now.reasoning), (before.tool_calls, now.tool_calls)):
            assert new[: len(old)] == old
        before = now
    whole = parse(answer)
    assert whole.text.startswith(before.text)
    assert whole.reasoning.startswith(before.reasoning)
    assert whole.tool_calls[: len(before.tool_calls)] == before.tool_calls


def test_parsing_takes_time_in_proportion_to_the_answer():
    began = time.perf_counter()
    parse("<|tool_call>call:f{" * 50_000)
    parse("<|channel>thought" * 50_000)
    assert time.perf_counter() - began < 5
