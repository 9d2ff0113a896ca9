"""Chat answers split into text, reasoning and tool calls, whole and while they stream."""

from itertools import pairwise

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.tokenizer.chat_parser import ChatParser, Parsed, ToolCall, parse_chat

BYTES = tiny.byte_tokenizer()
SPECIAL_IDS = sorted(BYTES.special_tokens)


def parse(answer: str) -> Parsed:
    """Parses an answer whose special tokens are written out."""
    return parse_chat(BYTES, BYTES.encode(answer))


def spell_out(text: str) -> list[int]:
    """Ids of a text as plain characters, special tokens not recognised."""
    return [token for character in text for token in BYTES.encode(character)]


def stream(pieces: list[list[int]]) -> Parsed:
    """Feeds the pieces of an answer one by one and joins what they add."""
    parser = ChatParser(BYTES)
    added = [parser.feed(piece) for piece in pieces] + [parser.feed([], final=True)]
    calls = tuple(call for piece in added for call in piece.tool_calls)
    return Parsed("".join(piece.text for piece in added), "".join(piece.reasoning for piece in added), calls)


@pytest.mark.parametrize(
    ("answer", "parsed"),
    [
        ("Hello<turn|>", Parsed("Hello")),
        ("<|channel>thought\nhm<channel|>Hello<turn|>", Parsed("Hello", "hm")),
        ("<|channel>thought\n<channel|>Hello", Parsed("Hello")),
        ("<|channel>thought\nnever ends", Parsed("", "never ends")),
        ("<|channel>thought\n a <channel|> b <|channel>thought\n c<channel|> d ", Parsed("b  d", "a\nc")),
        ("<|channel>thou<channel|>x", Parsed("x", "thou")),
        (
            '<|tool_call>call:f{a:<|"|>x, {y}<|"|>,b:[1,-2.5,true,null],c:{d:<|"|><|"|>}}<tool_call|><|tool_response>',
            Parsed("", "", (ToolCall("f", {"a": "x, {y}", "b": [1, -2.5, True, None], "c": {"d": ""}}),)),
        ),
        ("Both <|tool_call>call:a.b-c{}<tool_call|>of them", Parsed("Both of them", "", (ToolCall("a.b-c", {}),))),
        ("<|tool_call>call:f{a:}}<tool_call|>", Parsed("<|tool_call>call:f{a:}}<tool_call|>")),
        ('<|tool_call>call:f{a:<|"|>', Parsed('<|tool_call>call:f{a:<|"|>')),
        ('<|tool_call>call:f{a:x<|"|>}<tool_call|>', Parsed("", "", (ToolCall("f", {"a": 'x<|"|>'}),))),
        ("a <think> is text", Parsed("a <think> is text")),
        ("<|tool_call>call:f{n:NaN}<tool_call|>", Parsed("", "", (ToolCall("f", {"n": "NaN"}),))),
        ("<|tool_call>call:f{ A <tool_call|> b }<tool_call|>", Parsed("<|tool_call>call:f{ A <tool_call|> b }<tool_call|>")),
    ],
)
def test_answers_are_split_into_parts(answer, parsed):
    assert parse(answer) == parsed
    assert stream([[token] for token in BYTES.encode(answer)]) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "Use the <eos> token",
        "half a special token: <|chan",
        "<|channel>thought\nno<channel|>",
        "<|tool_call>call:f{}<tool_call|>",
    ],
)
def test_text_that_looks_like_a_special_token_stays_text(text):
    """The model wrote the characters, not the special token."""
    ids = spell_out(text)
    assert not set(ids) & set(SPECIAL_IDS)
    assert parse_chat(BYTES, ids) == Parsed(text)
    assert stream([[token] for token in ids]) == Parsed(text)


def test_a_quoted_argument_may_contain_the_characters_of_a_quote_token():
    ids = [*BYTES.encode('<|tool_call>call:f{a:<|"|>'), *spell_out('<|"|>'), *BYTES.encode('<|"|>}<tool_call|>')]
    assert parse_chat(BYTES, ids) == Parsed("", "", (ToolCall("f", {"a": '<|"|>'}),))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_characters="<|>", codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]+", fullmatch=True), json_values, max_size=4))
def test_a_call_rendered_by_the_template_parses_back(arguments):
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
    assert parse(BYTES.render(messages).split("model\n", 1)[1]).tool_calls == (ToolCall("f", arguments),)


@given(st.text())
def test_parsing_never_fails(text):
    parse(text)
    parse("<|tool_call>call:f{" + text + "}<tool_call|>")


def test_arguments_are_nested_200_times_at_most():
    """Deeper ones are text. Far deeper ones do not come near the end of Python's stack."""
    for depth in (200, 201, 20_000):
        answer = "<|tool_call>call:f{a:" + "[" * (depth - 1) + "]" * (depth - 1) + "}<tool_call|>"
        found = parse(answer)
        assert len(found.tool_calls) == (depth == 200)
        assert found.text == ("" if depth == 200 else answer)


PIECES = ["thought\n", "thou", "call:f{", "a:1", "}", " text ", "<", "\n", "�", "é"]
token_lists = st.lists(
    st.sampled_from(SPECIAL_IDS).map(lambda token: [token])
    | st.sampled_from(PIECES).map(BYTES.encode)
    | st.integers(0, tiny.VOCAB - 1).map(lambda token: [token]),
    max_size=14,
).map(lambda pieces: [token for piece in pieces for token in piece])


@settings(max_examples=300)
@given(token_lists, st.lists(st.integers(0, 60), max_size=6))
def test_any_split_of_an_answer_adds_up_to_the_whole(ids, cuts):
    """Random ids, special tokens in any order: pieces parsed one after another equal the answer parsed at once."""
    whole = parse_chat(BYTES, ids)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    assert stream([ids[low:high] for low, high in pairwise(bounds)]) == whole
    assert stream([[token] for token in ids]) == whole
    assert whole.text == whole.text.strip()
    assert whole.reasoning == whole.reasoning.strip()


@pytest.mark.parametrize(
    "answer", ["<|tool_call>call:f{", "<|channel>thought", "a b", " ", "<|channel>thought\n a <channel|> "]
)
def test_parsing_work_is_proportional_to_the_answer(answer, monkeypatch):
    """Counts the tokens that are decoded while an answer streams token by token."""
    decoded = []
    decode = BYTES.decode
    monkeypatch.setattr(BYTES, "decode", lambda ids, **options: decoded.append(len(ids)) or decode(ids, **options))
    ids = BYTES.encode(answer * 500)
    stream([[token] for token in ids])
    assert sum(decoded) <= 12 * len(ids)
