"""Tools, calls and results: as text, and in the forms of Llama's and Mistral's templates."""

import pytest
import tiny

from redraft.tokenizer.chat_parser import ChatParser, Parsed, ToolCall, parse_chat
from redraft.tokenizer.messages import TokenizerError
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.tokenizer.tool_text import HERMES, LLAMA, write_tools

TOOL = {"type": "function", "function": {"name": "weather", "description": "Looks it up", "parameters": {"type": "object"}}}
QUESTION = {"role": "user", "content": "Ulm?"}


def call(name: str, arguments: object, **fields: str) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


CALLS = [call("weather", '{"city": "Köln"}', id="call_with_a_long_id"), call("now", {}, id="2")]
RESULTS = [
    {"role": "tool", "tool_call_id": "call_with_a_long_id", "content": "rain"},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "noon"}]},
]
CONVERSATION = [QUESTION, {"role": "assistant", "content": None, "tool_calls": CALLS}, *RESULTS]

# The tool parts of the published templates, in short: Llama 3.2, Mistral 7B v0.3, Mistral Small 3.2.
LLAMA_3 = """
{%- if tools is not none %}Respond in the format {"name": function name, "parameters": dictionary of arguments}.
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif -%}
{%- for message in messages -%}
{%- if message.tool_calls -%}
{%- if message.tool_calls|length != 1 %}{{ raise_exception("only single tool-calls") }}{% endif -%}
{%- set tool_call = message.tool_calls[0].function -%}
<|start_header_id|>assistant<|end_header_id|>\n
{"name": "{{ tool_call.name }}", "parameters": {{ tool_call.arguments | tojson }}}<|eot_id|>
{%- elif message.role == "tool" -%}<|start_header_id|>ipython<|end_header_id|>\n\n{{ message.content | tojson }}<|eot_id|>
{%- else -%}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content }}<|eot_id|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif -%}
"""
CHECK_ID = '{% if id is not defined or id|length != 9 %}{{ raise_exception("Tool call IDs have length 9!") }}{% endif %}'
MISTRAL_3 = f"""
{{%- if tools %}}[AVAILABLE_TOOLS] {{{{ tools | tojson }}}}[/AVAILABLE_TOOLS]{{% endif -%}}
{{%- for message in messages -%}}
{{%- if message.tool_calls -%}}[TOOL_CALLS] [
{{%- for tool_call in message.tool_calls -%}}{{%- set id = tool_call.id -%}}{CHECK_ID}
{{{{- (tool_call.function | tojson)[:-1] }}}}, "id": "{{{{ id }}}}"}}{{{{ ", " if not loop.last else "]</s>" }}}}
{{%- endfor -%}}
{{%- elif message.role == "tool" -%}}{{%- set id = message.tool_call_id -%}}{CHECK_ID}
[TOOL_RESULTS] {{"content": {{{{ message.content }}}}, "call_id": "{{{{ id }}}}"}}[/TOOL_RESULTS]
{{%- elif message.role == "user" -%}}[INST] {{{{ message.content }}}}[/INST]
{{%- else -%}}{{{{ message.content }}}}</s>{{%- endif -%}}
{{%- endfor -%}}
"""
NO_SYSTEM = (
    '{% if messages[0].role == "system" %}{{ raise_exception("System role not supported") }}{% endif %}'
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
)


def tokenizer(template: str | None, *tokens: str) -> Tokenizer:
    return Tokenizer(Tokenizer.byte_level(["<p>", "</s>", "<|turn>", *tokens]).vocabulary, template=template)


def test_tools_calls_and_results_as_text():
    system, question, calls, results = write_tools(CONVERSATION, [TOOL])
    assert '{"name": "weather", "description": "Looks it up", "parameters": {"type": "object"}}\n' in system["content"]
    assert system["role"] == "system"
    assert '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>' in system["content"]
    assert question == QUESTION
    assert calls == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    }
    assert results == {
        "role": "user",
        "content": "<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>",
    }
    assert write_tools(CONVERSATION, None) == [question, calls, results]
    assert write_tools([QUESTION], None) == [QUESTION]
    said = {"role": "assistant", "content": "I look.", "tool_calls": CALLS[1:]}
    assert write_tools([QUESTION, said], None)[1]["content"] == f"I look.\n{HERMES.write('now', '{}')}"


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_the_description_joins_a_system_message(content):
    (system, _) = write_tools([{"role": "system", "content": content}, QUESTION], [TOOL])
    text = system["content"] if isinstance(content, str) else "".join(part["text"] for part in system["content"])
    assert text.startswith("Be brief.\n\nYou have these tools:\n")


def test_an_image_beside_calls_stays():
    image = {"role": "user", "content": [{"type": "image", "image": b"x"}]}
    assert write_tools([image, *CONVERSATION[1:]], None)[0] == image


def test_a_template_without_system_messages_is_told_in_the_first_message():
    own = tokenizer(NO_SYSTEM)
    assert not own.takes_system
    assert tokenizer("{{ messages }}").takes_system
    messages = write_tools([QUESTION], [TOOL], takes_system=own.takes_system)
    assert own.render(messages).startswith("<user>Ulm?\n\nYou have these tools:\n")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "assistant", "tool_calls": [call("f", "{")]}], "not JSON"),
        ([{"role": "assistant", "tool_calls": [{}]}], "no name"),
        ([], "at least one message"),
    ],
)
def test_calls_that_cannot_be_written_are_refused(messages, words):
    with pytest.raises(TokenizerError, match=words):
        write_tools(messages, None)


def test_llama_gets_one_call_in_each_message():
    own = tokenizer(LLAMA_3)
    assert (own.can_call, own.has_call_tokens, own.call_form) == (True, False, LLAMA)
    text = own.render(CONVERSATION, tools=[TOOL])
    assert text.count("<|start_header_id|>assistant<|end_header_id|>") == 3  # two calls, and the answer to come
    written = LLAMA.write("weather", '{"city": "Köln"}')
    assert f"\n\n{written}<|eot_id|>" in text
    assert "<|start_header_id|>ipython<|end_header_id|>\n\n" in text


def test_mistral_gets_ids_of_nine_characters():
    own = tokenizer(MISTRAL_3, "[TOOL_CALLS]")
    assert (own.can_call, own.has_call_tokens, own.call_form) == (True, True, HERMES)
    text = own.render(CONVERSATION, tools=[TOOL])
    calls, results = text.split("</s>")
    ids = [part[:9] for part in calls.split('"id": "')[1:]]
    assert ids == [part[:9] for part in results.split('"call_id": "')[1:]]
    assert len(set(ids)) == 2
    without_ids = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call("a", {}), call("b", {})]},
                   {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]  # fmt: skip
    calls, results = own.render(without_ids).split("</s>")
    assert [part[:9] for part in calls.split('"id": "')[1:]] == [part[:9] for part in results.split('"call_id": "')[1:]]
    (head, *_) = calls.split(', "id"')
    found = parse_chat(own, own.encode(f"{head.split('[/INST]')[1]}}}]"))
    assert found == Parsed("", "", (ToolCall("a", {}),))


@pytest.mark.parametrize(
    ("answer", "parsed"),
    [
        ('[TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}, "id": "123456789"}, {"name": "b", "arguments": {}}]</s>',
         Parsed("", "", (ToolCall("a", {"x": 1}), ToolCall("b", {})))),
        ('[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[CALL_ID]123456789[ARGS]{}',
         Parsed("", "", (ToolCall("a", {"x": 1}), ToolCall("b", {})))),
        ('Well.[TOOL_CALLS]a[ARGS]{"x": [ARGS', Parsed('Well.[TOOL_CALLS]a[ARGS]{"x": [ARGS')),
        ("[TOOL_CALLS][]", Parsed("[TOOL_CALLS][]")),
        ("[TOOL_CALLS]a[TOOL_CALLS]b[ARGS]{}", Parsed("[TOOL_CALLS]a", "", (ToolCall("b", {}),))),
        ("a [ARGS] b", Parsed("a [ARGS] b")),
    ],
)  # fmt: skip
def test_calls_of_mistral_are_parsed(answer, parsed):
    own = tokenizer(MISTRAL_3, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    ids = own.encode(answer)
    assert parse_chat(own, ids) == parsed
    parser = ChatParser(own)
    pieces = [parser.feed([token]) for token in ids] + [parser.feed([], final=True)]
    assert "".join(piece.text for piece in pieces) == parsed.text
    assert tuple(each for piece in pieces for each in piece.tool_calls) == parsed.tool_calls


def test_gemma_and_smollm2_keep_their_forms():
    assert (tiny.byte_tokenizer().has_call_tokens, tiny.byte_tokenizer().call_form) == (True, HERMES)
    plain = tokenizer("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    assert (plain.can_call, plain.has_call_tokens, plain.call_form) == (False, False, HERMES)
