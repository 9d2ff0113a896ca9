"""What the server promises beside plain completions: models by name, counts, refusals, CORS, log lines, /docs."""

import json
import re
import threading
from datetime import datetime, timedelta

import anthropic
import httpx
import openai
import pytest
import tiny
from serving import NO_END, EchoWriter, keep, make, served, user, wait_until

from redraft.cli import serve
from redraft.server.middleware import Limits, parse_origin
from redraft.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # from the clients' own libraries

NO_CHAT = ["<p>", *tiny.SPECIAL_TOKENS[1:4], *(f"<unused{number}>" for number in range(len(tiny.SPECIAL_TOKENS) - 4))]


@pytest.fixture(scope="module")
def url():
    with served(make(), name="small") as address:
        yield address


@pytest.fixture(scope="module")
def plain_url():
    """A server whose model has no chat template, as the one that ships."""
    writer = make()
    with served(EchoWriter(writer.model, Tokenizer.byte_level(NO_CHAT), writer.sampler), name="plain") as address:
        yield address


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, timeout=600) as client:
        yield client


def test_a_model_is_found_by_its_name(url, http):
    client = keep(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    assert client.models.retrieve("small") == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="no model 'own/er' here; this server has small"):
        client.models.retrieve("own/er")
    assert http.get("/v1/models/other").json()["error"]["code"] == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": True}),
        ("/v1/chat/completions", {"messages": user("x"), "max_tokens": True}),
        ("/v1/chat/completions", {"messages": user("x"), "max_tokens": 2, "temperature": False}),
        ("/v1/messages", {"messages": user("x"), "max_tokens": True}),
        ("/api/generate", {"prompt": "x", "options": {"num_predict": True}}),
        ("/infill", {"input_prefix": "x", "n_predict": True}),
        ("/v1/completions", {"prompt": "x", "diffusion_seed_canvas": [True]}),
        ("/v1/canvas", {"prompt": "x", "forbidden": [False]}),
    ],
)
def test_a_boolean_is_no_number(http, path, body):
    refused = http.post(path, json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "Input should be a number, got" in message or "Input should be a valid integer" in message


def test_anthropic_counts_the_tokens_that_usage_reports(url, plain_url):
    tools = [{"name": "find", "description": "Finds.", "input_schema": {"type": "object", "properties": {}}}]
    requests = [
        {"messages": user("say: ab")},
        {"messages": user("say: ab"), "system": "Be brief.", "tools": tools},
        {"messages": user("say: ab"), "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ]
    for address, asked in [(url, request) for request in requests for _ in range(2)] + [(plain_url, requests[0])]:
        client = keep(anthropic.Anthropic(base_url=address, api_key="none", max_retries=0))
        counted = client.messages.count_tokens(model="", **asked).input_tokens
        usage = client.messages.create(model="", max_tokens=8, **asked).usage
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (counted, 0)  # the second time too, from the cache
        with client.messages.stream(model="", max_tokens=8, **asked) as stream:
            assert stream.get_final_message().usage.input_tokens == counted


def test_thinking_on_a_model_without_it_is_refused_with_the_reason(plain_url):
    reason = "this model has no chat template, so it cannot reason before it answers: leave thinking out"
    asked = {
        "/v1/messages": {"max_tokens": 4, "thinking": {"type": "enabled"}},
        "/v1/messages/count_tokens": {"thinking": {"type": "enabled"}},
        "/v1/chat/completions": {"reasoning_effort": "high"},
        "/api/chat": {"think": True},
    }
    for path, fields in asked.items():
        refused = httpx.post(f"{plain_url}{path}", json={"messages": user("x"), **fields}, timeout=600)
        assert (refused.status_code, reason in refused.text) == (400, True), path
    adaptive = {"messages": user("x"), "max_tokens": 4, "thinking": {"type": "adaptive"}}
    assert httpx.post(f"{plain_url}/v1/messages", json=adaptive, timeout=600).status_code == 200
    assert "thinking" not in httpx.post(f"{plain_url}/api/show", json={}).json()["capabilities"]


def test_a_template_without_thinking_is_known():
    assert make().tokenizer.can_think
    assert not Tokenizer(tiny.byte_tokenizer().vocabulary, template="{{ messages }}").can_think
    assert Tokenizer(tiny.byte_tokenizer().vocabulary, template="{% if enable_thinking %}{% endif %}").can_think


def test_anthropic_messages_honour_canvas_fields(http):
    ids = tiny.byte_tokenizer().encode("hello world")
    canvas = {"diffusion_canvas_length": 11, "diffusion_seed_canvas": ids, "diffusion_pinned": [0, 1, 2, 3, 4]}
    asked = {"messages": user("x"), "max_tokens": 40, "seed": 1, "diffusion_read_only": True}
    message = http.post("/v1/messages", json={**asked, **canvas}).json()
    assert (message["content"][0]["text"][:5], message["usage"]["output_tokens"]) == ("hello", 11)
    assert http.post("/v1/messages", json={**asked, "vllm_xargs": canvas}).json()["content"] == message["content"]
    refused = http.post("/v1/messages", json={**asked, "diffusion_pinned": [1]})
    assert (refused.status_code, "must name positions" in refused.text) == (400, True)


# Pages of other origins, log lines, the list of routes


def test_a_page_may_use_the_server_only_if_its_origin_is_named():
    page = {"Origin": "https://app.example"}
    wants = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    limits = Limits(key="secret", origins=(parse_origin("https://App.example:443/"),))
    with served(make(), limits=limits) as url, httpx.Client(base_url=url, timeout=600) as client:
        allowed = client.options("/v1/completions", headers={**page, **wants})
        assert (allowed.status_code, allowed.text) == (204, "")
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        assert allowed.headers["access-control-allow-headers"] == "authorization, content-type"
        body = {"prompt": "ab", "max_tokens": 2, "odd": 1}
        answered = client.post("/v1/completions", json=body, headers={**page, "Authorization": "Bearer secret"})
        assert (answered.status_code, answered.headers["vary"]) == (200, "Origin")
        assert "x-redraft-unknown-fields" in answered.headers["access-control-expose-headers"]
        keyless = client.post("/v1/completions", json=body, headers=page)  # the page can read why it was refused
        assert (keyless.status_code, keyless.headers["access-control-allow-origin"]) == (401, "https://app.example")
        for origin in ("https://other.example", "http://app.example", "https://app.example:8443", "null"):
            refused = client.options("/v1/completions", headers={**wants, "Origin": origin})
            assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (403, False)
        assert "pages from 'null' may not use this server; start it with --cors" in refused.json()["error"]["message"]
        own = {"Origin": "http://localhost:3000"}
        for answer in (client.get("/health", headers=own), client.options("/v1/completions", headers={**own, **wants})):
            assert (answer.is_success, "access-control-allow-origin" in answer.headers) == (True, False)
        assert answer.headers["access-control-allow-methods"] == "GET, HEAD, POST, OPTIONS"


def test_a_head_is_what_a_get_is_without_its_body(http):
    for path in ("/", "/docs", "/metrics", "/health", "/slots", "/v1/models/", "/api/version", "/v1/models/nobody"):
        whole = http.get(path)
        head = http.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b""), path
        assert head.headers["content-type"] == whole.headers["content-type"]
        assert path == "/metrics" or head.headers["content-length"] == whole.headers["content-length"]
    assert http.head("/v1/completions").status_code == 405


def test_the_lists_of_models_are_one_under_all_their_names(http):
    lists = [http.get(path).json() for path in ("/v1/models", "/v1/models/", "/models")]
    assert [entry["id"] for entry in lists[0]["data"]] == ["small"]
    assert lists == [lists[0]] * 3


def test_slots_say_how_many_requests_run_and_not_what_they_are():
    writer = make()
    fields = {"n_ctx": writer.model.config.max_position_embeddings, "speculative": False}
    with served(writer) as url, httpx.Client(base_url=url, timeout=600) as client:

        def busy():
            slots = client.get("/slots").json()
            running = [slot.pop("is_processing") for slot in slots]
            assert slots == [{"id": number, **fields} for number in range(8)]
            return running

        assert busy() == [False] * 8
        asked = {"prompt": "my secret", "max_tokens": 32, "logit_bias": NO_END, "stream": True}
        goes_on = threading.Event()
        step = writer.engine.runner.step
        writer.engine.runner.step = lambda requests: (goes_on.wait(600), step(requests))[1]
        with client.stream("POST", "/v1/completions", json=asked) as running:
            assert wait_until(lambda: busy() == [True] + [False] * 7)
            goes_on.set()
            assert running.read()
        assert client.get("/props").json()["total_slots"] == 8


@pytest.mark.parametrize("origin", ["*", "null", "app.example", "ftp://app.example", "https://app.example/page", ""])
def test_what_is_no_origin_is_refused_before_a_model_is_loaded(origin):
    with pytest.raises(ValueError, match="--cors takes the origin of a page, such as ") as refusal:
        serve.serve(models=["/nowhere"], cors=[origin])
    assert str(refusal.value).endswith(repr(origin))


def test_a_log_line_has_its_time_and_no_text(url, http, caplog):
    with caplog.at_level("INFO", logger="redraft.server"):
        http.post("/v1/completions", json={"prompt": "my secret", "max_tokens": 2})
        assert wait_until(lambda: bool(caplog.records))
    line = json.loads(caplog.records[-1].getMessage())
    assert list(line) == ["time", "route", "method", "status", "seconds"]
    assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
    assert (line["route"], line["method"], line["status"]) == ("/v1/completions", "POST", 200)


def test_the_docs_list_every_route_and_load_nothing(http):
    page = http.get("/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for path, methods in http.get("/openapi.json").json()["paths"].items():
        for method, entry in methods.items():
            assert f"<code>{method.upper()} {path}</code></h2>" in page.text
            schema = entry.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for name in schema.get("properties", {}):
                assert f"<td><code>{name}</code></td>" in page.text
    assert not re.search(r"<script|<img|<link|https?://", page.text)
    assert "<td>integer, 1 to 1,000,000</td><td>the most tokens of the completion</td>" in page.text
    with served(make(), limits=Limits(key="secret")) as guarded:
        assert httpx.get(f"{guarded}/docs").status_code == 200
