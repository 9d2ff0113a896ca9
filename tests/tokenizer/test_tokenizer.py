"""Golden ids, the chat template, and incremental decoding."""

import json
from pathlib import Path

import jinja2
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Vocabulary
from tokenizers import models

from redraft.tokenizer.tokenizer import Decoder, Tokenizer, TokenizerError, check_same_vocabulary

GOLDEN = Path(__file__).parents[1] / "golden"
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
    assert GEMMA.encode_chat(ESSAY) == ESSAY_IDS
    thinking = GEMMA.encode_chat(ESSAY, think=True)
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
    with pytest.raises(jinja2.TemplateError):  # the error of the sandbox itself
        jinja2.sandbox.ImmutableSandboxedEnvironment().from_string("{{ x.__class__.mro() }}").render(x=[])


def test_text_in_parts_is_joined_before_a_template_sees_it():
    parts = [{"type": "text", "text": "Hello "}, "you", {"type": "text", "text": "!"}]
    own = Tokenizer(BYTES.vocabulary, template="{{ '[' + messages[0]['content'] + ']' }}")
    assert own.render([{"role": "user", "content": parts}]) == "[Hello you!]"
    assert "user\nHello you!<turn|>" in BYTES.render([{"role": "user", "content": parts}])


def test_templates_written_for_transformers_render_the_same():
    from transformers.utils.chat_template_utils import render_jinja_template

    templates = [
        "{{ bos_token }}{{ eos_token }}{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}x{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content | tojson }}{% endgeneration %}\n  {% endfor %}",
        "{{ tools | tojson(indent=2) }}{{ messages[0] | tojson }}<|tool_call>call:f{}<tool_call|>",
        "{{ strftime_now('%Y') }}{% set ns = namespace(a=1) %}{{ ns.a }}",
        "{%- if add_generation_prompt and not enable_thinking %}go{% endif %}",
    ]
    messages = [{"role": "user", "content": f"a < b & it's 'ö' {i}"} for i in range(3)]
    tokenizer = Tokenizer(BYTES.vocabulary, settings={"eos_token": {"content": "<eos>"}})
    for template in templates:
        tokenizer.template = template
        tools = [WEATHER] if "tools" in template else None
        expected, _ = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=True,
            enable_thinking=False,
            bos_token="<bos>",
            eos_token="<eos>",
        )
        assert [tokenizer.render(messages, tools=tools)] == expected


def test_the_default_of_several_named_templates_is_used(tmp_path):
    BYTES.save(tmp_path)
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "bos_token": None}))
    assert Tokenizer.from_folder(tmp_path).render(ESSAY) == "Write a long essay about Portugal.!"


def test_truncation_and_padding_in_a_file_are_switched_off(tmp_path):
    vocabulary = Vocabulary.from_str(BYTES.vocabulary.to_str())
    vocabulary.enable_truncation(4)
    vocabulary.enable_padding(length=20)
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path).encode_prompt("Once upon a time") == BYTES.encode_prompt("Once upon a time")


def test_a_lone_surrogate_becomes_a_question_mark():
    assert BYTES.decode(BYTES.encode("a\udcffb")) == "a?b"


def test_settings_survive_saving(tmp_path):
    tokenizer = Tokenizer(BYTES.vocabulary, template="x", settings={"eos_token": "<eos>", "padding_side": "left"})
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert (again.settings, again.template) == (tokenizer.settings, "x")
    BYTES.save(tmp_path)
    assert Tokenizer.from_folder(tmp_path).template is None


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "not text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "not text"),
        ([{"role": "user", "content": {"a": 1}}], "not text"),
        ([{"role": "user", "content": 5}], "not text"),
        ([{"role": "user", "content": {"type": "image", "image": b"x"}}], "put it into a list"),
        ([{"role": "tool", "content": {"type": "image", "image": b"x"}}], "put it into a list"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x" * 9999}]}], 'an image is {"type": "image"'),
        ([{"role": "user", "content": [bytes(9999)]}], "not text"),
        ([{"role": "assistant", "tool_calls": [{}]}], "no name"),
        ([{"role": "assistant", "tool_calls": "abc"}], "must be a list"),
        ([{"role": "wizard", "content": "x"}], "wizard"),
        ([{"role": "user"}], "neither content"),
        (["hello"], "hello"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "not JSON"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}], "not an object"),
    ],
)
def test_an_invalid_conversation_is_refused(messages, words):
    with pytest.raises(TokenizerError, match=words):
        BYTES.render(messages)


@pytest.mark.parametrize("tools", ["abc", [{}], ["x"], [{"function": {"name": ""}}], {"name": "f"}])
def test_invalid_tools_are_refused(tools):
    with pytest.raises(TokenizerError, match=r"no name|must be a list"):
        BYTES.render(ESSAY, tools=tools)


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
    for content in ("{", "[]", '{"bos_token": 5}', '{"eos_token": {"a": 1}}', '{"chat_template": 3}', "[" * 200_000):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)


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


@pytest.mark.parametrize("keep_special", [False, True])
@given(st.lists(st.sampled_from([b"\x80", b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x9f", b"\x98", b"a", None]), max_size=24))
def test_bytes_that_make_no_character_decode_piece_by_piece_as_at_once(keep_special, parts):
    ids = [7 if part is None else BYTES.token_bytes.index(part) for part in parts]
    decoder = Decoder(BYTES, keep_special=keep_special)
    pieces = [decoder.feed([i]) for i in ids]
    assert "".join(pieces) + decoder.flush() == BYTES.decode(ids, keep_special=keep_special)


@pytest.mark.parametrize("token", [BYTES.token_bytes.index(b"\x80"), 7, 10_000])
def test_ids_that_make_no_character_are_decoded_a_few_times_each(monkeypatch, token):
    """Not all of them again with every new one: a client may ask for an answer of such ids."""
    decoded = []
    usual = BYTES.decode
    monkeypatch.setattr(BYTES, "decode", lambda ids, **options: decoded.append(len(ids)) or usual(ids, **options))
    decoder = Decoder(BYTES)
    decoder.feed(BYTES.encode("é")[:1])
    pieces = [decoder.feed([token]) for _ in range(500)]
    monkeypatch.undo()
    assert sum(decoded) < 500 * 120
    assert "".join(pieces) + decoder.flush() == BYTES.decode([*BYTES.encode("é")[:1], *[token] * 500])


def test_decoding_a_fragment_keeps_a_leading_space():
    ids = GEMMA.encode("Hello world")
    assert [GEMMA.decode_fragment([i]) for i in ids] == ["Hello", " world"]


def test_equal_vocabularies_are_accepted(tmp_path):
    BYTES.save(tmp_path)
    check_same_vocabulary(BYTES, Tokenizer.from_folder(tmp_path))
    check_same_vocabulary(GEMMA, GEMMA)


@pytest.mark.parametrize(
    ("special_tokens", "difference"),
    [
        (
            ["<pad>", "<end>", *tiny.SPECIAL_TOKENS[2:]],
            "id 1 is the special token '<eos>' in the drafter and the special token",
        ),
        (
            tiny.SPECIAL_TOKENS[:-1],
            f"id {len(tiny.SPECIAL_TOKENS) - 1} is the special token '<|\"|>' in the drafter and b'!' in",
        ),
        (
            [*tiny.SPECIAL_TOKENS, "<more>"],
            f"id {len(tiny.SPECIAL_TOKENS)} is b'!' in the drafter and the special token '<more>'",
        ),
    ],
)
def test_another_vocabulary_is_refused_by_its_first_differing_id(special_tokens, difference):
    with pytest.raises(TokenizerError) as caught:
        check_same_vocabulary(BYTES, Tokenizer.byte_level(special_tokens), "the drafter", "the verifier")
    assert str(caught.value).startswith("the drafter and the verifier have different vocabularies, so one cannot verify")
    assert difference in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_longer_vocabulary_is_refused():
    longer = tiny.byte_tokenizer()
    longer.vocabulary.add_tokens(["more"])
    with pytest.raises(TokenizerError, match=rf"id {tiny.VOCAB} is no token in A and b'more' in B$"):
        check_same_vocabulary(BYTES, longer, "A", "B")


def test_a_special_token_differs_from_the_same_text():
    plain = Tokenizer.byte_level(tiny.SPECIAL_TOKENS)
    special = Tokenizer.byte_level(tiny.SPECIAL_TOKENS)
    plain.vocabulary.add_tokens(["<x>"])
    special.vocabulary.add_special_tokens(["<x>"])
    with pytest.raises(TokenizerError, match=rf"id {tiny.VOCAB} is b'<x>' in A and the special token '<x>' in B$"):
        check_same_vocabulary(plain, special, "A", "B")


def test_a_vocabulary_that_is_not_bytes_is_refused():
    words = Tokenizer(Vocabulary(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(TokenizerError, match="the vocabulary of B cannot be compared"):
        check_same_vocabulary(BYTES, words, "A", "B")
