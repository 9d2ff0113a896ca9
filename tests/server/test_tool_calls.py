"""Tools on every wire: text or calls under auto, forced calls, several calls, whole and streamed; results of calls."""

import json
from dataclasses import replace

import anthropic
import httpx
import jsonschema
import ollama
import openai
import pytest
import tiny
from serving import EchoWriter, keep, make, served, user

from redraft.constraints.budget import Budget
from redraft.constraints.errors import PatternError
from redraft.constraints.pattern_compiler import Pattern
from redraft.server.errors import BadRequestError
from redraft.server.tool_calls import NO_TOOLS, CallDelta, CallReader, build_structure, choose_tools, join_calls
from redraft.tokenizer.chat_parser import Parsed, ToolCall
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.tokenizer.tool_text import HERMES, LLAMA
from redraft.writer import Writer

pytestmark = pytest.mark.filterwarnings("ignore")  # from the clients' own libraries

UNIT = {"enum": ["C", "F"]}
PARAMETERS = {
    "weather": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"$ref": "#/$defs/unit"}},
        "required": ["days", "unit"],
        "additionalProperties": False,
        "$defs": {"unit": UNIT},
    },
    "stop/now": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
    for name, schema in PARAMETERS.items()
]
ANTHROPIC_TOOLS = [{"name": name, "description": "", "input_schema": schema} for name, schema in PARAMETERS.items()]
RESPONSES_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
PROPERTIES = {"days": {"type": "integer"}, "unit": {"type": "string", "enum": ["C", "F"]}}  # ollama's client drops $ref
SIMPLE = {"type": "object", "properties": PROPERTIES, "required": ["days", "unit"]}
OLLAMA_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SIMPLE}}, TOOLS[1]]
NAMED = {"type": "function", "function": {"name": "weather"}}
ARGUMENTS = '{"days": 3, "unit": "C"}'
CALL = HERMES.write("weather", ARGUMENTS)
OTHER_CALL = HERMES.write("stop/now", "{}")
ROOMY = replace(tiny.BASE, max_position_embeddings=2048)  # the description of tools takes many tokens of a byte each
# ChatML with plain roles: it knows no tools.
PLAIN_CHAT = (
    "{% for message in messages %}<|turn>{{ message.role }}\n{{ message.content }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>assistant\n{% endif %}"
)


class ObedientWriter(EchoWriter):
    """Answers a message "say: TEXT" with TEXT, if the structure of the answer allows it."""

    def stream(self, prompt, options=None, **keywords):
        said = prompt.message.removeprefix("say: ")
        if said != prompt.message and options.structure is not None:
            if not is_match(options.structure, said):
                raise PatternError(f"this cannot be said: {said}")
            options = replace(options, structure={"type": "const_string", "value": said})
        return Writer.stream(self, prompt, options, **keywords)


def is_match(structure: dict, text: str) -> bool:
    compiled = Pattern(structure=structure).compile(Budget())
    assert not isinstance(compiled, str)
    return compiled.accepts(text.encode())


def chat_writer() -> Writer:
    """A writer whose chat template knows no tools."""
    tokenizer = Tokenizer(tiny.byte_tokenizer().vocabulary, template=PLAIN_CHAT)
    return ObedientWriter(tiny.decided(ROOMY), tokenizer, make(canvas=32).sampler)


def plain_writer() -> Writer:
    """A writer whose model has no chat template, as the one that ships."""
    names = ["<p>", *tiny.SPECIAL_TOKENS[1:4], *(f"<unused{number}>" for number in range(12))]
    return Writer(tiny.decided(ROOMY), Tokenizer.byte_level(names), make(canvas=32).sampler)


@pytest.fixture(scope="module", params=[make, chat_writer, plain_writer], ids=["own form", "text form", "plain"])
def url(request):
    with served(request.param(), name="small") as address:
        yield address


@pytest.fixture(name="text_url", scope="module")
def _text_url():
    """A model whose template knows no tools, and which says what it is told to."""
    with served(chat_writer(), name="small") as address:
        yield address


def check_call(name: str, arguments: object) -> None:
    jsonschema.validate(arguments, PARAMETERS[name])


def join_streamed(parts) -> dict[int, list[str]]:
    """Name and arguments of the calls of a stream of OpenAI's, by their index. The first part has the id and the name."""
    calls = {}
    for part in parts:
        calls_of_part = part.choices[0].delta.tool_calls or []
        assert len(calls_of_part) <= 1  # some clients read one
        for call in calls_of_part:
            assert (call.id is not None) == (call.index not in calls)
            calls.setdefault(call.index, [call.function.name, ""])[1] += call.function.arguments
    return calls


def test_openai_forces_a_named_tool_and_any_tool(url):
    client = keep(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    for choice in (NAMED, "required"):
        asked = {"model": "", "messages": user("x"), "tools": TOOLS, "tool_choice": choice, "max_tokens": 96}
        (whole,) = client.chat.completions.create(**asked, seed=1).choices
        (call,) = whole.message.tool_calls
        check_call(call.function.name, json.loads(call.function.arguments))
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        assert call.function.name == "weather" or choice == "required"
        parts = list(client.chat.completions.create(**asked, seed=1, stream=True, stop="{"))  # a stop string cuts no call
        assert join_streamed(parts) == {0: [call.function.name, call.function.arguments]}
        assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_anthropic_forces_a_named_tool_and_any_tool(url):
    client = keep(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any"}):
        asked = {"model": "", "max_tokens": 96, "messages": user("x"), "tools": ANTHROPIC_TOOLS, "tool_choice": choice}
        message = client.messages.create(**asked)
        (block,) = message.content
        check_call(block.name, block.input)
        assert message.stop_reason == "tool_use"
        counting = {"model": "", "messages": user("x"), "tools": ANTHROPIC_TOOLS, "tool_choice": choice}
        assert client.messages.count_tokens(**counting).input_tokens == message.usage.input_tokens
        with client.messages.stream(**asked) as stream:
            (block,) = stream.get_final_message().content
        check_call(block.name, block.input)


@pytest.mark.parametrize("said", ["Sunny. <tool_call>", "<tool", "", "1 < 2"])
def test_a_text_under_auto_stays_text(text_url, said):
    client = keep(openai.OpenAI(base_url=f"{text_url}/v1", api_key="none", max_retries=0))
    asked = {"model": "", "messages": user(f"say: {said}"), "tools": TOOLS, "max_tokens": 64}
    (whole,) = client.chat.completions.create(**asked).choices
    assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == (said, None, "stop")
    parts = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == said
    assert not join_streamed(parts)


def test_a_text_is_streamed_as_it_comes_and_a_stop_string_cuts_it(text_url):
    client = keep(openai.OpenAI(base_url=f"{text_url}/v1", api_key="none", max_retries=0))
    said = "One sentence that is longer than a canvas of the model. Two."
    asked = {"model": "", "messages": user(f"say: {said}"), "tools": TOOLS, "max_tokens": 64, "stop": " Two"}
    texts = [part.choices[0].delta.content for part in client.chat.completions.create(**asked, stream=True)]
    assert "".join(filter(None, texts)) == said.removesuffix(" Two.")
    assert len(list(filter(None, texts))) > 1


def test_openai_gets_several_calls_of_a_model_that_knows_no_tools(text_url):
    client = keep(openai.OpenAI(base_url=f"{text_url}/v1", api_key="none", max_retries=0))
    calls = [["weather", ARGUMENTS], ["stop/now", "{}"]]
    asked = {"model": "", "messages": user(f"say: {CALL}\n{OTHER_CALL}"), "tools": TOOLS, "max_tokens": 160, "stop": "days"}
    (whole,) = client.chat.completions.create(**asked).choices
    assert [[call.function.name, call.function.arguments] for call in whole.message.tool_calls] == calls
    assert len({call.id for call in whole.message.tool_calls}) == 2
    assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
    parts = list(client.chat.completions.create(**asked, stream=True))
    assert join_streamed(parts) == dict(enumerate(calls))
    assert len([part for part in parts if part.choices[0].delta.tool_calls]) > 1  # arguments come as the canvases do
    with pytest.raises(openai.BadRequestError, match="this cannot be said"):
        client.chat.completions.create(**asked, parallel_tool_calls=False)


def test_anthropic_gets_several_calls_of_a_model_that_knows_no_tools(text_url):
    client = keep(anthropic.Anthropic(base_url=text_url, api_key="none", max_retries=0))
    asked = {"model": "", "max_tokens": 160, "messages": user(f"say: {CALL}\n{OTHER_CALL}"), "tools": ANTHROPIC_TOOLS}
    expected = [("weather", json.loads(ARGUMENTS)), ("stop/now", {})]
    whole = client.messages.create(**asked)
    assert [(block.name, block.input) for block in whole.content] == expected
    with client.messages.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_message()
    assert [(block.name, block.input) for block in streamed.content] == expected
    assert (whole.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use")
    pieces = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert "".join(pieces) == ARGUMENTS + "{}"
    with pytest.raises(anthropic.BadRequestError, match="this cannot be said"):
        client.messages.create(**asked, tool_choice={"type": "auto", "disable_parallel_tool_use": True})


def test_responses_stream_the_arguments_of_several_calls(text_url):
    client = keep(openai.OpenAI(base_url=f"{text_url}/v1", api_key="none", max_retries=0))
    asked = {"model": "", "input": user(f"say: {CALL}\n{OTHER_CALL}"), "tools": RESPONSES_TOOLS, "max_output_tokens": 160}
    expected = [("weather", ARGUMENTS), ("stop/now", "{}")]
    assert [(item.name, item.arguments) for item in client.responses.create(**asked).output] == expected
    events = list(client.responses.create(**asked, stream=True))
    assert [(item.name, item.arguments) for item in events[-1].response.output] == expected
    for index, (_, arguments) in enumerate(expected):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        deltas = [event.delta for event in own if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == arguments
        assert [event.arguments for event in own if event.type == "response.function_call_arguments.done"] == [arguments]


def test_ollama_gets_several_calls_of_a_model_that_knows_no_tools(text_url):
    client = keep(ollama.Client(host=text_url))
    messages = user(f"say: {CALL}\n{OTHER_CALL}")
    asked = {"model": "small", "messages": messages, "tools": OLLAMA_TOOLS, "options": {"num_predict": 160}}
    expected = [("weather", json.loads(ARGUMENTS)), ("stop/now", {})]
    whole = client.chat(**asked).message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in whole] == expected
    lines = list(client.chat(**asked, stream=True))
    streamed = [call for line in lines for call in line.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in streamed] == expected
    assert "tools" in client.show("small").capabilities


def test_a_format_beside_tools_holds_for_the_text(text_url):
    client = keep(openai.OpenAI(base_url=f"{text_url}/v1", api_key="none", max_retries=0))
    form = {"type": "regex", "regex": "[ab]{4}"}
    asked = {"model": "", "tools": TOOLS, "max_tokens": 160, "response_format": form}
    (text,) = client.chat.completions.create(**asked, messages=user("say: abba")).choices
    assert text.message.content == "abba"
    (call,) = client.chat.completions.create(**asked, messages=user(f"say: {CALL}")).choices
    assert call.message.tool_calls[0].function.arguments == ARGUMENTS


def test_results_of_calls_are_shown_to_a_model_that_knows_no_tools(text_url):
    """All wires give the same prompt, so its tokens are as many."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    chat = [*user("x"), {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "rain"}]  # fmt: skip
    used = {"type": "tool_use", "id": "1", "name": "weather", "input": json.loads(ARGUMENTS)}
    blocks = [*user("x"), {"role": "assistant", "content": [used]},
              {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "rain"}]}]  # fmt: skip
    items = [*user("x"), {"type": "function_call", "call_id": "1", "name": "weather", "arguments": ARGUMENTS},
             {"type": "function_call_output", "call_id": "1", "output": "rain"}]  # fmt: skip
    own = [*user("x"), {"role": "assistant", "tool_calls": [{"function": used | {"arguments": used["input"]}}]},
           {"role": "tool", "tool_name": "weather", "content": "rain"}]  # fmt: skip

    def ask(path, **body):
        answer = httpx.post(f"{text_url}{path}", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        return answer.json()

    counts = {
        ask("/v1/chat/completions", messages=chat, tools=TOOLS, max_tokens=100)["usage"]["prompt_tokens"],
        ask("/v1/messages", messages=blocks, tools=ANTHROPIC_TOOLS, max_tokens=100)["usage"]["input_tokens"],
        ask("/v1/responses", input=items, tools=RESPONSES_TOOLS, max_output_tokens=100)["usage"]["input_tokens"],
        ask("/api/chat", messages=own, tools=TOOLS, stream=False, options={"num_predict": 100})["prompt_eval_count"],
    }
    assert len(counts) == 1


def test_a_choice_that_cannot_be_made_is_refused(url):
    chat = {"messages": user("x"), "tools": TOOLS, "max_tokens": 96}
    odd = [
        ({**chat, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "names 'fly'; the tools are 'weather'"),
        ({**chat, "tool_choice": "always"}, "can be none, auto, required, a function by its name or allowed_tools"),
        ({**chat, "tool_choice": "required", "tools": []}, "there are no tools"),
        ({**chat, "tool_choice": NAMED, "response_format": {"type": "json_object"}}, "leave one of them out"),
        ({**chat, "tool_choice": NAMED, "tools": [{"function": {"name": "weather", "parameters": {"type": "array"}}}]},
         "must be a JSON schema of an object"),
        ({**chat, "tool_choice": NAMED, "max_tokens": 3}, "the answer may have 3"),
    ]  # fmt: skip
    for body, words in odd:
        refused = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
        assert (refused.status_code, words in refused.text) == (400, True), refused.text
    refused = httpx.post(
        f"{url}/v1/messages", json={"messages": user("x"), "max_tokens": 9, "tool_choice": {"type": "tool"}}, timeout=600
    )
    assert (refused.status_code, "any or a tool by its name" in refused.text) == (400, True)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "object", "properties": {"a": {"type": "text"}}}, "the parameters of 'bad': "),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "the parameters of 'bad': "),
        ({"type": "object", "properties": {"a": {"type": "string", "maxLength": 2 * 10**9}}}, "'bad'"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": r"(a)\1"}}}, "'bad'"),
        ({"properties": 3}, "'bad'"),
        ({"type": "array"}, "the parameters of 'bad' must be a JSON schema of an object"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_named_by_its_tool(text_url, parameters, words):
    tools = [*TOOLS, {"type": "function", "function": {"name": "bad", "parameters": parameters}}]
    body = {"messages": user("x"), "tools": tools, "max_tokens": 96}
    refused = httpx.post(f"{text_url}/v1/chat/completions", json=body, timeout=600)
    assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True), refused.text
    none = httpx.post(f"{text_url}/v1/chat/completions", json={**body, "tool_choice": "none"}, timeout=600)
    assert none.status_code == 200, none.text


# The parts


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "description": "nothing"}])
def test_a_tool_without_parameters_is_called_with_none(parameters):
    choice = choose_tools([{"function": {"name": "now", "parameters": parameters}}], "required")
    structure = build_structure(choice, LLAMA, {})
    assert is_match(structure, '{"name": "now", "parameters": {}}')
    assert not is_match(structure, '{"name": "now", "parameters": {"a": 1}}')


def test_choices_of_tools():
    assert choose_tools(TOOLS, "none") == choose_tools([], None) == NO_TOOLS
    only = [{"type": "function", "function": {"name": "weather"}}]
    flat = [{"type": "function", "name": "weather"}]  # as the responses API has it
    for allowed in ({"allowed_tools": {"mode": "auto", "tools": only}}, {"mode": "auto", "tools": flat}):
        allowed |= {"type": "allowed_tools"}
        assert choose_tools(TOOLS, allowed).names == ("weather",)
        assert choose_tools(TOOLS, allowed).tools == TOOLS[:1]
        assert not choose_tools(TOOLS, allowed).is_forced
    required = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": only}}
    assert choose_tools(TOOLS, required).is_forced
    with pytest.raises(BadRequestError):
        choose_tools(TOOLS, {"type": "allowed_tools"})


TRICKY = '{"a": "}]\\"{<tool_call>\\\\", "b": [{"c": {}}, "\\u00e9"]}'


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, HERMES.write('we"ird\n', TRICKY), [('we"ird\n', TRICKY)]),
        (HERMES, f"\n{CALL}\n{OTHER_CALL}", [("weather", ARGUMENTS), ("stop/now", "{}")]),
        (LLAMA, LLAMA.write("weather", TRICKY), [("weather", TRICKY)]),
        (HERMES, "<tool_call", "<tool_call"),
        (HERMES, f"I say {CALL}", f"I say {CALL}"),
        (LLAMA, '{"name": "Tom", "age": 3}', '{"name": "Tom", "age": 3}'),
        (LLAMA, '{"name": 3', '{"name": 3'),
        (HERMES, "", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_are_read_from_pieces_of_any_size(form, text, expected, size):
    reader = CallReader(form, None)
    pieces = [reader.feed(Parsed(text[start : start + size])) for start in range(0, len(text), size)]
    said = "".join(piece for piece, _ in pieces) + reader.flush()
    calls = [(call.name, call.arguments) for call in join_calls([delta for _, deltas in pieces for delta in deltas])]
    assert (said, calls) == ((expected, []) if isinstance(expected, str) else ("", expected))


def test_one_call_of_a_model_with_its_own_form_is_passed_on_if_there_may_be_one():
    parsed = Parsed("", "", (ToolCall("a", {}), ToolCall("b", {"ö": 1})))
    deltas = [CallDelta(0, "a", "{}"), CallDelta(1, "b", '{"ö": 1}')]
    assert CallReader(None, None).feed(parsed)[1] == tuple(deltas)
    assert CallReader(None, 1).feed(parsed)[1] == tuple(deltas[:1])
