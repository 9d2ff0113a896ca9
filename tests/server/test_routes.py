"""Every route of the app, against one table of bodies: which model a request means."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest
import tiny
from serving import EchoWriter, user

from redraft.config import ConfigError
from redraft.server import infill
from redraft.server.app import ServerConfig, make_app
from redraft.server.model_card import ModelCard
from redraft.server.models import ModelSource

EDIT = "<|current_file_content|>\n<|code_to_edit|>\na\n<|/code_to_edit|>\n<|/current_file_content|>"
BOARD = "534678912672195348198342567859761423426853791713924856961537284287419635345286.7."
CHAT = {"messages": user("say: a"), "max_tokens": 8}
BODIES = {  # a small request to each route that takes a body
    "/v1/chat/completions": CHAT,
    "/v1/apply/completions": CHAT,
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/v1/fim/completions": {"prompt": "a", "suffix": "b", "max_tokens": 4},
    "/v1/edit/completions": {"messages": user(EDIT)},
    "/v1/responses": {"input": "say: a", "max_output_tokens": 8},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/api/generate": {"prompt": "say: a", "stream": False, "options": {"num_predict": 8}},
    "/api/chat": {"messages": user("say: a"), "stream": False, "options": {"num_predict": 8}},
    "/api/show": {},
    "/completion": {"prompt": "a", "n_predict": 4},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 4},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [70]},
    "/v1/canvas": {"prompt": "a", "max_tokens": 4, "stream": False},
    "/v1/canvas/edit": {"text": "some text", "strength": 0.5, "stream": False},
    "/v1/canvas/sudoku": {"puzzle": BOARD, "canvases": 1, "stream": False},
    "/v1/canvas/decide": {"prompt": "a", "choices": ["b", "c"], "stream": False},
    "/v1/canvas/autoregressive": {"prompt": "a", "max_tokens": 3, "stream": False},
}
WITHOUT_WORK = {"/infill": {"n_predict": 0}, "/api/generate": {"prompt": ""}, "/api/chat": {"messages": []}}


def new_writer():
    return EchoWriter(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), tiny.sampler(canvas_length=8, max_steps=1))


def new_app(**settings):
    """A server of the models "base" and "other"."""
    source = ModelSource(new_writer, ModelCard.from_writer(new_writer()))
    return make_app(new_writer(), ServerConfig(name="base", **settings), {"other": source})


@asynccontextmanager
async def running(app):
    """A client of an app, without a network."""
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


def post_all(app, bodies):
    """The answers to bodies, by their paths."""

    async def post():
        async with running(app) as client:
            return {path: await client.post(path, json=body) for path, body in bodies.items()}

    return asyncio.run(post())


@pytest.fixture(autouse=True)
def _short_gaps(monkeypatch):
    monkeypatch.setattr(infill, "MAX_GAP_TOKENS", 4)


def test_the_table_has_every_route_that_takes_a_body():
    posts = {route.path for route in new_app().routes if "POST" in getattr(route, "methods", ())}
    assert posts == BODIES.keys()


def sentence_of(path, body):
    """The sentence of an error, where clients of the path read it, and the kind of error, if they read one."""
    if path.startswith("/api/"):
        return body["error"], None
    assert path != "/v1/messages" or body["type"] == "error"
    return body["error"]["message"], body["error"]["type"]


def test_an_unknown_model_is_a_404_that_names_all_models_on_every_route():
    app = new_app(aliases={"gpt-4o": "other"})
    for extra in ({}, WITHOUT_WORK):
        bodies = {path: {**BODIES[path], **extra.get(path, {}), "model": "gpt 9"} for path in extra or BODIES}
        for path, answer in post_all(app, bodies).items():
            assert answer.status_code == 404, path
            sentence, kind = sentence_of(path, answer.json())
            assert sentence == (
                "there is no model 'gpt 9' here; this server has base, other: "
                "name one of them, or start it with --alias 'gpt 9=base'"
            )
            assert kind in ("not_found_error", None)
    assert app.state.models.services == [app.state.models.first]  # none was loaded


@pytest.mark.parametrize("model", ["absent", None, "", "base", "base:latest", "gpt-4o", "gpt-4o:latest", "gpt-9"])
def test_a_model_an_alias_and_no_name_mean_a_model_on_every_route(model):
    aliases = {"gpt-4o": "base"} | ({"*": "base"} if model == "gpt-9" else {})
    named = {} if model == "absent" else {"model": model}
    bodies = {path: {**body, **named} for path, body in BODIES.items()}
    for path, answer in post_all(new_app(aliases=aliases), bodies).items():
        assert answer.status_code == 200, (path, answer.text)
        assert answer.json().get("model", "base") == "base"


def test_an_alias_loads_its_model_and_stays_out_of_the_lists():
    async def ask():
        async with running(new_app(aliases={"gpt-4o": "other", "*": "base"})) as client:
            bodies = [{"prompt": "a", "max_tokens": 4, "model": name} for name in ("gpt-4o", "gpt-9")]
            answers = [await client.post("/v1/completions", json=body) for body in bodies]
            assert [answer.json()["model"] for answer in answers] == ["other", "base"]
            assert [entry["id"] for entry in (await client.get("/v1/models")).json()["data"]] == ["base", "other"]
            assert [entry["name"] for entry in (await client.get("/api/tags")).json()["models"]] == ["base", "other"]
            shown = [await client.get(f"/v1/models/{name}") for name in ("gpt-4o", "gpt-9", "other:latest")]
            assert [answer.json()["id"] for answer in shown] == ["other", "base", "other"]

    asyncio.run(ask())


def test_a_long_name_is_shortened():
    answers = post_all(new_app(), {"/tokenize": {"content": "a", "model": "x" * 100_000}})
    sentence, _ = sentence_of("/tokenize", answers["/tokenize"].json())
    assert len(sentence) < 400


@pytest.mark.parametrize(
    ("aliases", "sentence"),
    [
        ({"gpt-4o": "nobody"}, "the alias 'gpt-4o' means 'nobody', which is no model here: name base, other"),
        ({"other": "base"}, "the alias 'other' is the name of a model already: choose another one"),
    ],
)
def test_an_alias_without_a_model_or_over_one_is_refused(aliases, sentence):
    with pytest.raises(ConfigError, match=sentence):
        new_app(aliases=aliases)
