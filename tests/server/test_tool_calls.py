"""tool_choice: a forced call is valid under the tool's schema whatever the model writes, whole and streamed."""

import json

import anthropic
import httpx
import jsonschema
import openai
import pytest
import tiny
from serving import keep, make, served, user

from redraft.server.errors import BadRequestError
from redraft.server.tool_calls import NO_PARAMETERS, NO_TOOLS, choose_tools
from redraft.tokenizer.tokenizer import Tokenizer
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
NAMED = {"type": "function", "function": {"name": "weather"}}


def plain_writer() -> Writer:
    """A writer whose model has no chat template, as the one that ships."""
    names = ["<p>", *tiny.SPECIAL_TOKENS[1:4], *(f"<unused{number}>" for number in range(12))]
    writer = make()
    return Writer(writer.model, Tokenizer.byte_level(names), writer.sampler)


@pytest.fixture(scope="module", params=[make, plain_writer], ids=["chat", "plain"])
def url(request):
    with served(request.param(), name="small") as address:
        yield address


def check_call(name: str, arguments: object) -> None:
    jsonschema.validate(arguments, PARAMETERS[name])


def test_openai_forces_a_named_tool_and_any_tool(url):
    client = keep(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    for choice in (NAMED, "required"):
        asked = {"model": "", "messages": user("x"), "tools": TOOLS, "tool_choice": choice, "max_tokens": 64}
        names = set()
        for seed in range(2):
            (choice_of_answer,) = client.chat.completions.create(**asked, seed=seed).choices
            (call,) = choice_of_answer.message.tool_calls
            check_call(call.function.name, json.loads(call.function.arguments))
            assert (choice_of_answer.finish_reason, choice_of_answer.message.content) == ("tool_calls", None)
            names.add(call.function.name)
        assert names == {"weather"} if choice == NAMED else names <= set(PARAMETERS)
        parts = list(client.chat.completions.create(**asked, seed=1, stream=True, stop="{"))  # a stop string cuts no call
        (streamed,) = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
        assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
        assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_anthropic_forces_a_named_tool_and_any_tool(url):
    client = keep(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))
    tools = [{"name": name, "description": "", "input_schema": schema} for name, schema in PARAMETERS.items()]
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any"}):
        asked = {"model": "", "max_tokens": 64, "messages": user("x"), "tools": tools, "tool_choice": choice}
        message = client.messages.create(**asked)
        (block,) = message.content
        check_call(block.name, block.input)
        assert message.stop_reason == "tool_use"
        counted = client.messages.count_tokens(model="", messages=user("x"), tools=tools, tool_choice=choice)
        assert counted.input_tokens == message.usage.input_tokens
        with client.messages.stream(**asked) as stream:
            (block,) = stream.get_final_message().content
        check_call(block.name, block.input)


def test_a_choice_that_cannot_be_made_is_refused(url):
    chat = {"messages": user("x"), "tools": TOOLS, "max_tokens": 64}
    odd = [
        ({**chat, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "names 'fly'; the tools are 'weather'"),
        ({**chat, "tool_choice": "always"}, "can be none, auto, required or a function by its name, got 'always'"),
        ({**chat, "tool_choice": "required", "tools": []}, "there are no tools"),
        ({**chat, "tool_choice": NAMED, "response_format": {"type": "json_object"}}, "leave one of them out"),
        ({**chat, "tool_choice": NAMED, "tools": [{"function": {"name": "weather", "parameters": {"type": "array"}}}]},
         "must be a JSON schema of an object"),
        ({**chat, "tool_choice": NAMED, "max_tokens": 3}, "takes 24 tokens, the answer may have 3"),
    ]  # fmt: skip
    for body, words in odd:
        refused = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=600)
        assert (refused.status_code, words in refused.text) == (400, True), refused.text
    refused = httpx.post(
        f"{url}/v1/messages", json={"messages": user("x"), "max_tokens": 9, "tool_choice": {"type": "tool"}}, timeout=600
    )
    assert (refused.status_code, "any or a tool by its name" in refused.text) == (400, True)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "description": "nothing"}])
def test_a_tool_without_parameters_is_called_with_none(parameters):
    forced = force_call([{"function": {"name": "now", "parameters": parameters}}], None)
    assert forced.schema == NO_PARAMETERS
    assert forced.parse("{}").arguments == {}


def test_references_hold_inside_the_schema_of_several_tools():
    schema = force_call(TOOLS, None).schema
    assert schema["$defs"]["0"]["properties"]["unit"] == {"$ref": "#/$defs/0/$defs/unit"}
    call = {"name": "weather", "arguments": {"days": 3, "unit": "C"}}
    jsonschema.validate(call, schema)
    assert force_call(TOOLS, None).parse(json.dumps(call)).arguments == call["arguments"]
    assert choose_tools(TOOLS, "none") == (None, None)
    with pytest.raises(BadRequestError):
        choose_tools(TOOLS, {"type": "allowed_tools"})
