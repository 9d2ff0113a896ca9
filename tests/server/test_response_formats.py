"""Answers with a form: the field that asks for it in each wire format, and the reason for which such an answer ends.

With this seed the model writes no stop token on its own: an answer is complete only if its pattern says so.
"""

from typing import Literal

import anthropic
import httpx
import openai
import pytest
import tiny
from pydantic import BaseModel
from serving import EchoWriter, keep, served, user

pytestmark = pytest.mark.filterwarnings("ignore")  # from the clients' own libraries

LENGTH = 12  # tokens of a match, one for each byte
SCHEMA = {"type": "string", "pattern": f"^[0-9]{{{LENGTH - 2}}}$"}
CHAT = {"messages": user("x"), "max_tokens": LENGTH, "seed": 1}
TEXT = {"prompt": "x", "max_tokens": LENGTH, "seed": 1}
INPUT = {"input": "x", "max_output_tokens": LENGTH, "seed": 1}
OLLAMA = {"options": {"num_predict": LENGTH, "seed": 1}, "stream": False}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
NAMED = {"name": "a", "schema": SCHEMA}
FINISHES = ('"finish_reason":"stop"', '"finish_reason":"length"')
STATUSES = ('"status":"completed"', '"status":"incomplete"')
STOP_REASONS = ('"stop_reason":"end_turn"', '"stop_reason":"max_tokens"')
DONE_REASONS = ('"done_reason":"stop"', '"done_reason":"length"')
STOP_TYPES = ('"stop_type":"eos"', '"stop_type":"limit"')
WIRES = [  # path, body, the fields that ask for a form, what a complete answer and one that was cut say
    ("/v1/chat/completions", CHAT, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, *FINISHES),
    (
        "/v1/chat/completions",
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}},
        *FINISHES,
    ),
    (
        "/v1/chat/completions",
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": False}}},
        *FINISHES,
    ),
    ("/v1/chat/completions", CHAT, {"response_format": {"type": "json_object", "schema": SCHEMA}}, *FINISHES),
    ("/v1/completions", TEXT, {"response_format": FORMAT}, *FINISHES),
    ("/v1/completions", TEXT, {"guided_regex": f'"[0-9]{{{LENGTH - 2}}}"'}, *FINISHES),
    ("/v1/completions", TEXT, {"guided_regex": f"[0-9]{{{LENGTH},}}"}, *FINISHES),
    ("/v1/responses", INPUT, {"text": {"format": {**FORMAT, "name": "a"}}}, *STATUSES),
    ("/v1/messages", CHAT, {"output_config": {"format": FORMAT}}, *STOP_REASONS),
    ("/api/chat", {"messages": user("x"), **OLLAMA}, {"format": SCHEMA}, *DONE_REASONS),
    ("/api/generate", {"prompt": "x", **OLLAMA}, {"format": SCHEMA}, *DONE_REASONS),
    ("/completion", {"prompt": "x", "n_predict": LENGTH, "seed": 1}, {"json_schema": SCHEMA}, *STOP_TYPES),
]


class Vote(BaseModel):
    answer: Literal["yes", "nay"]


@pytest.fixture(scope="module")
def url():
    sampler = tiny.sampler(canvas_length=16, max_steps=2, max_new_tokens=32, eos_token_ids=(3,))
    with served(EchoWriter(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), sampler), name="small") as address:
        yield address


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, timeout=600) as client:
        yield client


def text_of(path, body):
    """The text of a whole answer, where clients of the path read it."""
    match path:
        case "/v1/chat/completions":
            return body["choices"][0]["message"]["content"]
        case "/v1/completions":
            return body["choices"][0]["text"]
        case "/v1/responses":
            return body["output"][0]["content"][0]["text"]
        case "/v1/messages":
            return body["content"][0]["text"]
        case "/api/chat":
            return body["message"]["content"]
        case "/api/generate":
            return body["response"]
    return body["content"]


@pytest.mark.parametrize(("path", "body", "form", "complete", "cut"), WIRES)
def test_an_answer_that_fills_max_tokens_is_complete_if_it_matches(http, path, body, form, complete, cut):
    for check in ("off", "exact"):
        mode = {"options": {**body["options"], "check": check}} if "options" in body else {"check": check}
        whole = http.post(path, json={**body, **mode, **form})
        assert whole.status_code == 200, whole.text
        text = text_of(path, whole.json())
        assert (len(text), text.strip('"').isdigit()) == (LENGTH, True), text
        assert (complete in whole.text, cut in whole.text) == (True, False)
    streamed = http.post(path, json={**body, **form, "stream": True}).text
    assert (complete in streamed, cut in streamed) == (True, False)
    assert cut in http.post(path, json=body).text
    assert cut in http.post(path, json={**body, "stream": True}).text


def test_the_parsers_of_the_libraries_take_an_answer_that_fills_max_tokens(url):
    asks = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    claude = keep(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))
    most = len('{"answer": "yes"}')
    chat = {"model": "", "messages": user("x"), "max_tokens": most}
    with asks:
        assert asks.chat.completions.parse(**chat, response_format=Vote).choices[0].message.parsed.answer in ("yes", "nay")
        response = asks.responses.parse(model="", input="x", max_output_tokens=most, text_format=Vote)
    assert (response.status, response.output_parsed.answer in ("yes", "nay")) == ("completed", True)
    message = claude.messages.parse(**chat, output_format=Vote)
    assert (message.stop_reason, message.parsed_output.answer in ("yes", "nay")) == ("end_turn", True)


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/v1/messages", {"output_config": {"format": {"type": "json_object"}}}, "output_config.format can be"),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema"}}}, "got {'type': 'json_schema'}"),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": "x"}}}, "got {'type': "),
        ("/v1/messages", {"output_config": {"format": "json"}}, "output_config.format: Input should be"),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "'x'"),
        ("/v1/chat/completions", {"response_format": {"type": "json_schema"}}, "json_schema needs a schema"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object", "schema": 5}}, "schema"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object", "schema": "x"}}, "schema"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object", "schema": [1]}}, "schema"),
        ("/v1/chat/completions", {"grammar": 'root ::= "a"'}, "grammar is not supported; response_format knows"),
        ("/v1/chat/completions", {"json_schema": SCHEMA}, "json_schema is not supported; response_format knows"),
    ],
)
def test_a_form_that_cannot_be_kept_is_refused(http, path, fields, words):
    refused = http.post(path, json={**CHAT, **fields})
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_no_form(http):
    effort = http.post("/v1/messages", json={**CHAT, "output_config": {"effort": "low", "format": None}})
    assert (effort.status_code, effort.headers["x-redraft-unknown-fields"]) == (200, "output_config.effort")
    assert http.post("/v1/chat/completions", json={**CHAT, "grammar": "", "json_schema": None}).status_code == 200
