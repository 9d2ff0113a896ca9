"""Adapters on a server: clients name one as their model; each answer is that of a Writer with that adapter alone."""

from concurrent.futures import ThreadPoolExecutor

import anthropic
import httpx
import openai
import pytest
import tiny
from serving import keep, served, user

from redraft.writer import Writer

pytestmark = pytest.mark.filterwarnings("ignore")  # from the clients' own libraries

ADAPTERS = {"pirate": tiny.trained(tiny.BASE, seed=1), "poet": tiny.trained(tiny.BASE, seed=2, targets=("attention",))}
SAMPLER = tiny.sampler(max_steps=3, max_new_tokens=32)


def new_writer():
    writer = Writer(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), SAMPLER)
    writer.adapters = dict(ADAPTERS)
    return writer


@pytest.fixture(scope="module")
def url():
    with served(new_writer(), name="base") as address:
        yield address


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, timeout=600) as client:
        yield client


def alone(model, prompt, is_chat, **options):
    """The answer of a Writer of its own, without other requests."""
    writer = new_writer().with_adapter(ADAPTERS.get(model))
    return (writer.chat if is_chat else writer.write)(prompt, **options).text


MODELS = ("base", "pirate", "poet")


@pytest.mark.soak
@pytest.mark.parametrize("stream", [False, True])
def test_clients_with_different_adapters_are_served_at_once(url, stream):
    client = keep(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))

    def ask(job):
        model, seed, check = job
        answer = client.completions.create(
            model=model, prompt="Once upon", seed=seed, max_tokens=32, stream=stream, extra_body={"check": check}
        )
        if not stream:
            assert answer.model == model
            return answer.choices[0].text
        chunks = list(answer)
        assert {chunk.model for chunk in chunks} == {model}
        return "".join(chunk.choices[0].text or "" for chunk in chunks if chunk.choices)

    jobs = [(model, seed, check) for check in ("off", "checked", "exact") for seed in (5, 6) for model in MODELS]
    with ThreadPoolExecutor(len(jobs)) as threads:
        found = list(threads.map(ask, jobs))
    expected = [alone(model, "Once upon", False, seed=seed, check=check, max_tokens=32) for model, seed, check in jobs]
    assert found == expected
    assert len(set(found[:3])) == 3


WIRES = {
    "/v1/chat/completions": ({"messages": user("hi")}, lambda r: r["choices"][0]["message"]["content"], "max_tokens"),
    "/v1/responses": ({"input": "hi"}, lambda r: r["output"][-1]["content"][0]["text"], "max_output_tokens"),
    "/v1/messages": ({"messages": user("hi")}, lambda r: r["content"][-1]["text"], "max_tokens"),
}


@pytest.mark.parametrize("path", WIRES)
def test_every_chat_wire_uses_the_adapter(http, path):
    body, text_of, limit = WIRES[path]
    for model in MODELS:
        reply = http.post(path, json={**body, "model": model, "seed": 3, limit: 20}).json()
        assert reply["model"] == model
        assert text_of(reply) == alone(model, user("hi"), True, seed=3, max_tokens=20)


def test_ollama_names_may_have_a_tag(http):
    options = {"seed": 3, "num_predict": 20}
    for model in ("pirate", "pirate:latest"):
        body = {"model": model, "messages": user("hi"), "stream": False, "options": options}
        reply = http.post("/api/chat", json=body).json()
        assert reply["model"] == "pirate"
        assert reply["message"]["content"] == alone("pirate", user("hi"), True, seed=3, max_tokens=20)
    body = {"model": "poet", "prompt": "Once", "raw": True, "stream": False, "options": options}
    assert http.post("/api/generate", json=body).json()["response"] == alone("poet", "Once", False, seed=3, max_tokens=20)


def test_llama_cpp_infill_edit_and_canvas_use_the_adapter(http):
    """Whatever is beside plain completions: each differs from the base's, and equals the Writer's where it has a method."""
    prompt = {"prompt": "Once", "n_predict": 20, "seed": 3}
    assert http.post("/completion", json={**prompt, "model": "poet"}).json()["content"] == alone(
        "poet", "Once", False, seed=3, max_tokens=20
    )
    requests = {
        "/infill": {"input_prefix": "Once ", "input_suffix": " a time", "n_predict": 4, "seed": 3},
        "/v1/canvas": {"prompt": "Once upon", "seed": 3, "max_tokens": 20, "stream": False},
        "/v1/canvas/edit": {"text": "Once upon a time", "seed": 3, "strength": 0.5, "stream": False},
        "/v1/canvas/decide": {"prompt": "Is it?", "choices": ["yes", "no"], "stream": False},
        "/v1/canvas/autoregressive": {"prompt": "Once", "max_tokens": 6, "seed": 3, "stream": False},
    }
    for path, body in requests.items():
        base, adapted, again = (strip(http.post(path, json={**body, "model": m}).json()) for m in ("x", "pirate", "pirate"))
        assert adapted == again
        assert adapted != base, path
    decided = http.post("/v1/canvas/decide", json={**requests["/v1/canvas/decide"], "model": "pirate"}).json()
    expected = new_writer().with_adapter("pirate").decide("Is it?", ["yes", "no"])
    shares = {choice["text"]: choice["probability"] for choice in decided["events"][-1]["choices"]}
    assert shares == pytest.approx(expected)


def strip(reply):
    """A reply without times and memory."""
    if isinstance(reply, dict):
        skipped = ("timings", "memory", "tokens_cached")
        return {name: strip(value) for name, value in reply.items() if name not in skipped}
    return [strip(value) for value in reply] if isinstance(reply, list) else reply


def test_best_of_is_scored_with_the_adapter(http):
    body = {"prompt": "Once", "max_tokens": 20, "seed": 3, "best_of": 3, "model": "pirate"}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert text == alone("pirate", "Once", False, seed=3, max_tokens=20, best_of=3)


def test_patterns_work_with_an_adapter(http):
    body = {"prompt": "Once", "max_tokens": 20, "seed": 3, "guided_regex": "[a-z]{4,8}", "model": "pirate"}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert text == alone("pirate", "Once", False, seed=3, max_tokens=20, regex="[a-z]{4,8}")


def test_models_are_listed(url, http):
    client = keep(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    listed = {model.id: model for model in client.models.list().data}
    assert [name for name in listed if name in MODELS] == list(MODELS)
    assert listed["pirate"].parent == "base"
    assert client.models.retrieve("poet").id == "poet"
    for path in ("/api/tags", "/api/ps"):
        models = http.get(path).json()["models"]
        assert [model["name"] for model in models] == list(MODELS)
        assert [model["details"]["parent_model"] for model in models] == ["", "base", "base"]


def test_the_anthropic_client_streams_an_adapter(url):
    client = keep(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))
    options = {"model": "poet", "max_tokens": 20, "messages": user("hi"), "extra_body": {"seed": 3}}
    with client.messages.stream(**options) as stream:
        assert stream.get_final_text() == alone("poet", user("hi"), True, seed=3, max_tokens=20)
