"""Documents: the answer of a turn is what the parser reads back, and its prompt is the one that generation gets."""

import copy
import itertools
import json

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.tokenizer.chat_parser import ToolCall, parse_chat
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.documents import Document, check_record, to_documents
from redraft.train.records import BadRecord

TOKENIZER = tiny.byte_tokenizer()
STOP = 1
TURN_END = TOKENIZER.vocabulary.token_to_id("<turn|>")
RESPONSE_START = TOKENIZER.vocabulary.token_to_id("<|tool_response>")

USER = {"role": "user", "content": "How warm is it in Bern?"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}]
ARGUMENTS = {"city": "Bern", "days": [1, 2.5], "now": True, "unit": None}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
RESPONSE = {"role": "tool", "tool_call_id": "c1", "content": "12 degrees"}

# A checkpoint's template: it writes the reasoning of calls, and <|tool_response> behind calls that nobody has answered.
GEMMA_LIKE = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|turn>model\n' if loop.previtem is not defined or loop.previtem.role != 'tool' else '' }}
{%- if m.tool_calls and m.reasoning %}{{ '<|channel>thought\n' + m.reasoning + '\n<channel|>' }}{% endif %}
{%- if m.content %}{{ m.content | trim }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '<|tool_call>call:' }}{{ c.function.name }}{ {{- 'x:' ~ c.function.arguments | length -}} }<tool_call|>
{%- endfor %}{% if not m.tool_calls %}{{ '<turn|>\n' }}{% elif loop.last %}<|tool_response>{% endif %}
{%- elif m.role == 'tool' %}<|tool_response>response:{{ m.name }}{value:{{ m.content }}}<tool_response|>
{%- else %}{{ '<|turn>' + m.role + '\n' + m.content | trim + '<turn|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>model\n' }}{% endif %}
{%- if add_generation_prompt and messages[-1].role == 'tool' and enable_thinking %}{{ '<|channel>thought\n' }}{% endif %}"""

# A template with other special tokens, a line break between text and calls, and empty thoughts in the last turn.
QWEN_LIKE = """{% for m in messages %}{{ '<|channel>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{- m.content }}{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first else '' }}
{{- '<call>' + (c.function | tojson) + '</call>' }}{% endfor %}{{ '<channel|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|channel>assistant\n' }}
{%- if not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def with_template(template):
    return Tokenizer(TOKENIZER.vocabulary, template=template)


def documents(record, tokenizer=TOKENIZER):
    return to_documents(record, "f:1", tokenizer, STOP)


def show(ids):
    return TOKENIZER.decode(ids, keep_special=True)


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}


# 1. Kinds of records


def test_texts_prompts_and_ids_are_tokenized_as_they_are():
    bos = [TOKENIZER.bos_id]
    assert documents({"text": " a\n"}) == [Document(bos, [*TOKENIZER.encode(" a\n"), STOP], where="f:1")]
    pair = documents({"prompt": "Say: ", "completion": "b", "id": 7})
    assert pair == [Document(TOKENIZER.encode_prompt("Say: "), [*TOKENIZER.encode("b"), STOP], where="f:1")]
    assert documents({"ids": [20, 21]}) == [Document(bos, [20, 21], where="f:1")]


def test_a_single_turn_is_the_prompt_of_generation_and_the_text_as_it_is():
    (document,) = documents({"messages": [USER, assistant(" Warm. \n")]})
    assert document.prompt == TOKENIZER.encode_chat([USER])
    assert document.answer == [*TOKENIZER.encode(" Warm. \n"), TURN_END]


# 2. Conversations


def test_every_turn_of_the_assistant_is_a_document():
    messages = [{"role": "system", "content": "Be brief."}, USER, assistant("12."), USER, assistant("13."), USER]
    got = documents({"messages": messages})
    assert [document.prompt for document in got] == [
        TOKENIZER.encode_chat(messages[:2]),
        TOKENIZER.encode_chat(messages[:4]),
    ]
    assert [show(document.answer) for document in got] == ["12.<turn|>", "13.<turn|>"]


def test_reasoning_is_learned_in_its_channel_and_dropped_from_later_prompts():
    messages = [USER, assistant("12.", reasoning_content=" Look outside. "), USER, assistant("13.", reasoning="Look again.")]
    first, second = documents({"messages": messages})
    assert first.prompt == TOKENIZER.encode_chat(messages[:1], think=True)
    assert show(first.answer) == "<|channel>thought\nLook outside.<channel|>12.<turn|>"
    assert parse_chat(TOKENIZER, first.answer).reasoning == "Look outside."
    assert second.prompt == TOKENIZER.encode_chat([USER, assistant("12."), USER], think=True)
    assert "outside" not in show(second.prompt)


def test_reasoning_in_the_text_is_the_same_as_reasoning_in_its_own_field():
    inside = [USER, assistant("<|channel>thought\nLook.<channel|>12."), USER, assistant("13.")]
    beside = [USER, assistant("12.", reasoning_content="Look."), USER, assistant("13.")]
    assert documents({"messages": inside}) == documents({"messages": beside})


def test_a_turn_without_reasoning_has_a_prompt_without_thinking():
    _, second = documents({"messages": [USER, assistant("12.", reasoning="Look."), USER, assistant("13.")]})
    assert second.prompt == TOKENIZER.encode_chat([USER, assistant("12."), USER])


@pytest.mark.parametrize("arguments", [json.dumps(ARGUMENTS), ARGUMENTS])
def test_tool_calls_are_parsed_back_and_stop_before_the_response(arguments):
    call = copy.deepcopy(CALL)
    call["function"]["arguments"] = arguments
    messages = [USER, assistant(None, tool_calls=[call, CALL]), RESPONSE, assistant("12.", reasoning="A number.")]
    first, second = documents({"messages": messages, "tools": TOOLS})
    assert first.prompt == TOKENIZER.encode_chat([USER], tools=TOOLS)
    assert first.answer[-1] == RESPONSE_START  # where the sampler stops; the server then answers the calls
    parsed = parse_chat(TOKENIZER, first.answer)
    assert parsed.tool_calls == (ToolCall("weather", ARGUMENTS),) * 2
    assert parsed.text == parsed.reasoning == ""
    assert second.prompt == TOKENIZER.encode_chat(messages[:3], tools=TOOLS, think=True)
    assert parse_chat(TOKENIZER, second.answer).reasoning == "A number."


def test_a_call_with_text_and_reasoning():
    (document,) = documents({"messages": [USER, assistant("I look.", tool_calls=[CALL], reasoning="Hm.")], "tools": TOOLS})
    parsed = parse_chat(TOKENIZER, document.answer)
    assert (parsed.text, parsed.reasoning, parsed.tool_calls) == ("I look.", "Hm.", (ToolCall("weather", ARGUMENTS),))
    assert show(document.answer).startswith("<|channel>thought\nHm.<channel|>I look.<|tool_call>call:weather{")


def test_the_prompt_and_the_calls_are_what_a_later_prompt_shows():
    """Without reasoning, prompt and answer are together the beginning of the next turn's prompt."""
    messages = [USER, assistant("I look.", tool_calls=[CALL]), RESPONSE, assistant("12."), USER, assistant("13.")]
    for template in (None, GEMMA_LIKE):
        tokenizer = with_template(template)
        for earlier, later in itertools.pairwise(documents({"messages": messages}, tokenizer)):
            shown = show(earlier.prompt).removesuffix("<|channel>thought\n<channel|>") + show(earlier.answer)
            assert show(later.prompt).startswith(shown)


def test_weight_0_is_history_only():
    messages = [USER, assistant("12.", weight=0), USER, assistant("13.", weight=1), USER, assistant("", weight=0)]
    (document,) = documents({"messages": messages})
    assert document.prompt == TOKENIZER.encode_chat([USER, assistant("12."), USER])
    assert show(document.answer) == "13.<turn|>"


def test_text_in_parts_is_joined_and_the_first_greeting_is_history():
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2."}]
    (document,) = documents({"messages": [assistant("Hello!"), USER, assistant(parts)]})
    assert show(document.answer) == "12.<turn|>"
    assert "Hello!" in show(document.prompt)


# 3. Other templates


def test_a_checkpoints_template_says_how_turns_are_written():
    tokenizer = with_template(GEMMA_LIKE)
    messages = [USER, assistant(None, tool_calls=[CALL], reasoning="Hm."), RESPONSE, assistant("12.", reasoning="So.")]
    first, second = documents({"messages": messages}, tokenizer)
    assert show(first.prompt).endswith("<|turn>model\n")
    assert (
        show(first.answer) == "<|channel>thought\nHm.\n<channel|><|tool_call>call:weather{x:4}<tool_call|><|tool_response>"
    )
    assert show(second.prompt).endswith("<tool_response|><|channel>thought\n")
    assert show(second.answer) == "So.<channel|>12.<turn|>"


def test_a_template_with_other_special_tokens():
    tokenizer = with_template(QWEN_LIKE)
    called = assistant("", tool_calls=[CALL])
    first, second = documents({"messages": [USER, called, RESPONSE, assistant("12.")]}, tokenizer)
    assert show(first.answer).startswith("<call>{")
    assert show(first.answer).endswith("</call><channel|>")
    assert show(second.prompt).endswith("<|channel>assistant\n<think>\n\n</think>\n\n")
    assert show(second.answer) == "12.<channel|>"
    (document,) = documents({"messages": [USER, assistant("12.", reasoning="Hm.")]}, tokenizer)
    assert show(document.answer) == "<think>\nHm.\n</think>\n\n12.<channel|>"


def test_a_template_without_special_tokens_ends_with_the_stop_token():
    (document,) = documents({"messages": [USER, assistant("12.")]}, with_template(PLAIN))
    assert show(document.prompt).endswith("assistant: ")
    assert document.answer == [*TOKENIZER.encode("12."), STOP]


OTHER_START = "{% for m in messages %}{{ m.role }}={{ m.content }}{% endfor %}{{ 'bot: ' if add_generation_prompt else '' }}"


@pytest.mark.parametrize(
    ("template", "message", "why"),
    [
        ("{{ messages | length }}", assistant("x"), "does not write what the assistant says"),
        (OTHER_START, assistant("x"), "in another way"),
        (PLAIN, assistant("x", reasoning="y"), "does not know reasoning"),
        (PLAIN, assistant("x", tool_calls=[CALL]), "does not write the call to 'weather'"),
        ("{{ raise_exception('no assistants') }}", assistant("x"), "no assistants"),
    ],
)
def test_a_template_that_hides_the_turn_is_one_clear_error(template, message, why):
    with pytest.raises(BadRecord, match=rf"^f:1: .*{why}"):
        documents({"messages": [USER, message]}, with_template(template))


# 4. Bad records


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "message 0 has the role 'wizard'; known are system"),
        ({"messages": [USER, assistant("")]}, r"message 1 \(assistant\) is empty"),
        ({"messages": [USER, assistant(" \n")]}, r"message 1 \(assistant\) is empty"),
        ({"messages": [USER, assistant(None)]}, "neither content nor tool_calls"),
        ({"messages": [USER, assistant("", reasoning="x")]}, "is empty"),
        ({"messages": [USER]}, "no message of the assistant"),
        ({"messages": [assistant("x")]}, "no message of the assistant answers"),
        ({"messages": [USER, assistant("x", weight=0)]}, "no message of the assistant"),
        ({"messages": [USER, assistant("x", weight=0.5)]}, "message 1 has the weight 0.5"),
        ({"messages": [USER, assistant("x", reasoning=5)]}, "reasoning is not a text: 5"),
        ({"messages": [USER, assistant("x")], "tools": {}}, "tools must be a list"),
        ({"messages": [USER, assistant(None, tool_calls=[{"function": {"name": "f", "arguments": "{"}}])]}, "not JSON"),
        ({"messages": "x"}, "at least one message"),
        ({"messages": 5}, ""),
        ({"prompt": ["x"], "completion": "y"}, r"the prompt is not a text: \['x'\]"),
        ({"prompt": "x", "completion": ""}, "nothing to learn from ''"),
        ({"text": "x", "messages": [USER]}, "this one has"),
        ({"ids": [1, "x"]}, "ids must be a list of tokens"),
        ({}, r"this one has \[\]"),
    ],
)
def test_a_bad_record_is_found_without_a_tokenizer(record, why):
    with pytest.raises(BadRecord, match=f"^f:1: .*{why}"):
        check_record(record, "f:1")
    with pytest.raises(BadRecord, match=f"^f:1: .*{why}"):
        documents(record)


def test_a_reason_is_short_even_if_it_quotes_the_record():
    with pytest.raises(BadRecord, match="message 0 has the role") as raised:
        check_record({"messages": [{"role": "x" * 10_000, "content": "y"}]}, "f:1")
    assert len(str(raised.value)) < 600


def test_what_only_the_tokenizer_knows():
    with pytest.raises(BadRecord, match="f:1: ids must be a list of tokens below"):
        documents({"ids": [TOKENIZER.size]})
    with pytest.raises(BadRecord, match=r"f:1: .*cannot chat"):
        documents({"messages": [USER, assistant("x")]}, Tokenizer.byte_level(["<pad>", "<eos>", "<bos>"]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3),
    max_leaves=6,
)
CALLS = JSON | st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": JSON}, optional={"arguments": JSON})}, optional={"id": JSON}
    ),
    max_size=2,
)
MESSAGE = JSON | st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "tool", "system", "model", "wizard"]) | JSON,
        "content": st.text(max_size=5) | JSON,
    },
    optional={
        "tool_calls": CALLS,
        "reasoning_content": JSON,
        "reasoning": JSON,
        "weight": JSON,
        "name": JSON,
        "tool_call_id": JSON,
    },
)
RECORD = st.fixed_dictionaries(
    {},
    optional={
        "text": JSON,
        "prompt": JSON,
        "completion": JSON,
        "messages": JSON | st.lists(MESSAGE, max_size=4),
        "tools": JSON | st.lists(st.fixed_dictionaries({"name": JSON}, optional={"parameters": JSON, "description": JSON})),
        "ids": JSON,
    },
)
CHAT = st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=4)}, optional={"tools": JSON})


@pytest.mark.soak
@settings(max_examples=300, deadline=None)
@given(RECORD | CHAT)
def test_any_json_gives_documents_or_a_bad_record(record):
    try:
        got = documents(record)
    except BadRecord as error:
        message = str(error)
    else:
        message = "f:1: good"
        assert got
        assert all(document.answer for document in got)
        assert check_record(record, "f:1") in ("text", "completion", "messages", "ids")
    assert message.startswith("f:1: ")


TEXT = st.text("ab {}\"'\n,:<|é🦙", min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT, st.dictionaries(st.text("ab", min_size=1), TEXT | st.integers() | st.booleans() | st.none()))
def test_round_trip_of_any_turn(text, reasoning, arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    message = assistant(text, reasoning=reasoning, tool_calls=[call])
    (document,) = documents({"messages": [USER, message]})
    parsed = parse_chat(TOKENIZER, document.answer)
    assert parsed.text == text.strip()
    assert parsed.tool_calls == (ToolCall("f", arguments),)
    assert parsed.reasoning == reasoning.strip()
