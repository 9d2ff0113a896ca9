"""Golden ids, the chat template, taking answers apart, and decoding that never splits a character."""

import json
from pathlib import Path

import jinja2
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Vocabulary

from redraft.tokenizer import Decoder, Parsed, Tokenizer, TokenizerError, ToolCall, parse

GOLDEN = Path(__file__).parent / "golden"
GEMMA = Tokenizer(Vocabulary.from_file(str(GOLDEN / "gemma4_part.json")))
BYTES = tiny.byte_tokenizer()
ESSAY = [{"role": "user", "content": "Write a long essay about Portugal."}]
# fmt: off
ESSAY_IDS = [2, 105, 2364, 107, 6974, 496, 1440, 20494, 1003, 23613, 236761, 106, 107, 105, 4368, 107, 100, 45518, 107, 101]
# fmt: on


@pytest.mark.parametrize(("text", "ids"), json.loads((GOLDEN / "gemma4_vectors.json").read_text(encoding="utf-8")))
def test_gemma_vectors(text, ids):
    assert GEMMA.encode(text) == ids
    assert GEMMA.decode(ids) == text


def test_golden_prompts():
    assert GEMMA.chat(ESSAY) == ESSAY_IDS
    thinking = GEMMA.chat(ESSAY, think=True)
    assert thinking[:11] == [2, 105, 9731, 107, 98, 107, 106, 107, 105, 2364, 107]
    assert thinking[-5:] == [106, 107, 105, 4368, 107]
    assert GEMMA.encode("Why is the sky blue?") == [11355, 563, 506, 7217, 3730, 236881]
    assert GEMMA.encode("0123456789")[:3] == [236771, 236770, 236778]


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Looks it up",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "where"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
DECLARED = (
    '<|tool>declaration:weather{description:<|"|>Looks it up<|"|>,parameters:{properties:{days:{type:<|"|>INTEGER<|"|>},'
    'place:{description:<|"|>where<|"|>,type:<|"|>STRING<|"|>}},required:[<|"|>place<|"|>],type:<|"|>OBJECT<|"|>}}<tool|>'
)


def test_a_whole_conversation():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Köln", "days": 3}'}}
    messages = [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "<|channel>thought\nA greeting.<channel|>Hi!"},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert BYTES.render(messages, tools=[WEATHER]) == (
        f"<bos><|turn>system\nBe brief.{DECLARED}<turn|>\n"
        "<|turn>user\nHello<turn|>\n<|turn>model\nHi!<turn|>\n<|turn>user\nWeather?<turn|>\n"
        '<|turn>model\n<|tool_call>call:weather{days:3,place:<|"|>Köln<|"|>}<tool_call|>'
        '<|tool_response>response:weather{value:<|"|>rain<|"|>}<tool_response|>'
        "<|channel>thought\n<channel|>"
    )
    answered = [*messages, {"role": "assistant", "content": "Take an umbrella."}, {"role": "user", "content": "Thanks"}]
    assert BYTES.render(answered, think=True).endswith(
        "<tool_response|>Take an umbrella.<turn|>\n<|turn>user\nThanks<turn|>\n<|turn>model\n"
    )


def test_the_checkpoints_own_template_is_used_and_cannot_escape(tmp_path):
    BYTES.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert Tokenizer.from_folder(tmp_path).render(ESSAY) == "<bos>[Write a long essay about Portugal.]"
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ messages[5].content.upper() }}",
    ):
        with pytest.raises(TokenizerError):
            Tokenizer(BYTES.vocabulary, template=source).render(ESSAY)
    with pytest.raises(jinja2.TemplateError):  # what the sandbox itself says to it
        jinja2.sandbox.ImmutableSandboxedEnvironment().from_string("{{ x.__class__.mro() }}").render(x=[])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one"),
        ([{"role": "wizard", "content": "x"}], "wizard"),
        ([{"role": "user"}], "neither content"),
        (["hello"], "hello"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "not JSON"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}], "not an object"),
    ],
)
def test_no_conversation(messages, words):
    with pytest.raises(TokenizerError, match=words):
        BYTES.render(messages)


def test_a_tokenizer_without_turns_cannot_chat():
    vocabulary = Vocabulary.from_str(BYTES.vocabulary.to_str().replace("<|turn>", "<|nothing>"))
    with pytest.raises(TokenizerError, match="cannot chat"):
        Tokenizer(vocabulary).render(ESSAY)


def test_a_broken_tokenizer_file_is_named(tmp_path):
    with pytest.raises(TokenizerError, match="does not exist"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    BYTES.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


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


@settings(max_examples=60)
@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=40))
def test_incremental_decoding_never_splits_a_character(text, sizes):
    for tokenizer in (BYTES, GEMMA):
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids)
        decoder, pieces, at = Decoder(tokenizer), [], 0
        for size in [*sizes, len(ids)]:
            pieces.append(decoder.feed(ids[at : at + size]))
            at += size
        if "�" not in whole:
            assert not any("�" in piece for piece in pieces)
        assert "".join(pieces) + decoder.flush() == whole


@settings(max_examples=60)
@given(st.lists(st.integers(0, tiny.VOCAB - 1), max_size=40))
def test_any_ids_decode_piece_by_piece_as_at_once(ids):
    decoder = Decoder(BYTES, keep_special=True)
    pieces = [decoder.feed([i]) for i in ids]
    assert "".join(pieces) + decoder.flush() == BYTES.decode(ids, keep_special=True)


def test_spelling_keeps_a_leading_space():
    ids = GEMMA.encode("Hello world")
    assert [GEMMA.spell([i]) for i in ids] == ["Hello", " world"]
