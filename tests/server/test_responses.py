"""/v1/responses with OpenAI's own client: input items, tools, schemas, and every event of a stream."""

import json
from itertools import groupby

import httpx
import openai
import pytest
from openai.types.responses import Response
from serving import make, served, user

pytestmark = pytest.mark.filterwarnings("ignore")  # from the client's own library

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "find", "description": "Finds.", "parameters": SCHEMA, "strict": True}
SAID = 'say: <|channel>thought\nhm<channel|>I look.<|tool_call>call:find{what:<|"|>ö<|"|>}<tool_call|>'


@pytest.fixture(scope="module")
def url():
    with served(make(), name="small") as address:
        yield address


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_text_is_answered(client):
    response = client.responses.create(model="", input=user("say: Hi there"), max_output_tokens=32, metadata={"a": "b"})
    Response.model_validate(response.model_dump(), strict=False)  # the client itself does not check what it reads
    assert (response.output_text, response.status, response.model) == ("Hi there", "completed", "small")
    assert (response.object, response.id[:5], response.store, response.metadata) == ("response", "resp_", False, {"a": "b"})
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    canvas = {"diffusion_canvas_length": 4, "diffusion_read_only": True}
    cut = client.responses.create(model="", input="x", extra_body=canvas)
    assert (cut.usage.output_tokens, cut.status, cut.incomplete_details.reason) == (4, "incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"


def test_a_stream_announces_fills_and_ends_every_item(client):
    asked = {"model": "", "input": user(SAID), "tools": [TOOL], "max_output_tokens": 96}
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert (whole.output[0].content[0].text, whole.output_text) == ("hm", "I look.")
    assert (whole.output[2].name, json.loads(whole.output[2].arguments)) == ("find", {"what": "ö"})
    assert whole.usage.output_tokens_details.reasoning_tokens == 2
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    text_kinds = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    expected = ["created", "in_progress"]
    expected += [kind.format("reasoning_text") for kind in text_kinds]
    expected += [kind.format("output_text") for kind in text_kinds]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    expected += ["output_item.added", *arguments, "output_item.done", "completed"]
    assert [kind for kind, _ in groupby(kinds)] == expected  # a text may come in several deltas
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "I look."
    last = events[-1].response
    assert [item.model_dump(exclude={"id", "call_id"}) for item in last.output] == [
        item.model_dump(exclude={"id", "call_id"}) for item in whole.output
    ]
    with client.responses.stream(**asked) as stream:  # the client's own accumulation of the events
        assert stream.get_final_response().output_text == "I look."


def test_input_items_are_a_conversation(client):
    """The prompt of input items has as many tokens as that of the same messages."""
    items = [
        *user("say: x"),
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "find", "arguments": '{"n": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "nothing"},
        {"role": "user", "content": [{"type": "input_text", "text": "say: well"}]},
    ]
    response = client.responses.create(model="", instructions="Be brief.", input=items)
    assert response.output_text == "well"
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"n": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *user("say: x"),
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "nothing"},
        *user("say: well"),
    ]
    chat = client.chat.completions.create(model="", messages=messages)
    assert (response.usage.input_tokens, response.output_text) == (
        chat.usage.prompt_tokens,
        chat.choices[0].message.content,
    )


def test_schemas_and_forced_tools_are_obeyed(client):
    text_format = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    record = json.loads(client.responses.create(model="", input="x", text={"format": text_format}).output_text)
    assert record["n"] in range(1, 10)
    for choice in ("required", {"type": "function", "name": "find"}):
        response = client.responses.create(model="", input="x", tools=[TOOL], tool_choice=choice, max_output_tokens=96)
        (call,) = response.output
        assert (call.type, call.name, json.loads(call.arguments)["n"] in range(1, 10)) == ("function_call", "find", True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1"}, "the server keeps no state"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "can be a message, function_call"),
        ({"input": [{"role": "tool", "content": "x"}]}, "has the role user, assistant, system or developer"),
        ({"input": user([{"type": "input_image", "image_url": "data:,"}])}, "takes no images: send text only"),
        ({"input": user([{"type": "input_file", "file_id": "f"}])}, "only text input is supported here, got a part of type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "must be JSON"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input has no message to answer"),
        ({"tools": [{"type": "web_search"}]}, "a tool is a function with a name, got the type 'web_search'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format can be"),
        ({"max_output_tokens": True}, "got true"),
        ({"max_output_tokens": 100_000}, "context"),
        ({"input": "x" * 1_000_000}, "has more than 512 tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(url, fields, words):
    refused = httpx.post(f"{url}/v1/responses", json={"input": "x", **fields, "stream": True}, timeout=600)
    assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True), refused.text
