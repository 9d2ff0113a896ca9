"""Every route of the app, against one table: which model a request means, the bound on its work, and how that work stops.

Work is counted where it is done: characters that are tokenized, ids that are decoded, tokens through the model.
"""

import asyncio
import threading
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx
import pytest
import tiny
from serving import NO_END, EchoWriter, post_and_leave, user

from redraft.config import ConfigError
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.server import infill
from redraft.server.app import ServerConfig, make_app
from redraft.server.model_card import ModelCard
from redraft.server.models import ModelSource

LONG = "a b " * 250_000  # characters; the context has 256 tokens
MANY = 100  # tokens of a long answer
CONTEXT = 256
BOARD = "534678912672195348198342567859761423426853791713924856961537284287419635345286.7."
NO_WORK = {  # routes that only say what is there
    "/": "/",
    "/page/{name}": "/page/app.js",
    "/docs": "/docs",
    "/openapi.json": "/openapi.json",
    "/metrics": "/metrics",
    "/health": "/health",
    "/props": "/props",
    "/slots": "/slots",
    "/models": "/models",
    "/v1/models": "/v1/models",
    "/v1/models/": "/v1/models/",
    "/v1/models/{model_id:path}": f"/v1/models/{'x' * 8000}",
    "/v1/fim/completions/models": "/v1/fim/completions/models",
    "/v1/edit/completions/models": "/v1/edit/completions/models",
    "/api/tags": "/api/tags",
    "/api/ps": "/api/ps",
    "/api/version": "/api/version",
}


def region_of(text):
    return f"<|current_file_content|>\n<|code_to_edit|>\n{text}\n<|/code_to_edit|>\n<|/current_file_content|>"


@dataclass(frozen=True)
class Bound:
    """A route with the bound on the work of a request."""

    small: dict  # a body that asks for little
    hostile: dict  # fields that ask for much more than the bound
    status: int = 400  # of the hostile request
    encoded: int = 0  # characters that it may have tokenized
    tokens: int = 0  # that it may have sent through the model
    decoded: int = 0
    long: dict | None = None  # fields that ask for work of many pieces; None: the small body has one or two
    leaves_at: tuple[str, int] = ("forward", 3)  # the piece of work in which the client leaves
    pieces_after: int = 2  # forwards and texts to tokenize that may be begun when it has left


CHAT = {"messages": user("say: a"), "max_tokens": 8}
SAY_MUCH = {"messages": user("say: " + "a" * 70), "max_tokens": MANY}
TOO_LONG = {"messages": user(LONG)}
ENDLESS = {"max_tokens": MANY, "logit_bias": NO_END}
GAP = {"encoded": 3 * 20_000, "tokens": 64 * CONTEXT, "status": 200}  # the text next to a gap is read
ROUTES = {
    "/v1/chat/completions": Bound(CHAT, TOO_LONG, long=SAY_MUCH),
    "/v1/apply/completions": Bound(CHAT, TOO_LONG, long=SAY_MUCH),
    "/v1/completions": Bound({"prompt": "a", "max_tokens": 4}, {"prompt": LONG}, long=ENDLESS),
    "/v1/fim/completions": Bound({"prompt": "a", "suffix": "b", "max_tokens": 4}, {"prompt": LONG}, **GAP),
    "/v1/edit/completions": Bound(
        {"messages": user(region_of("a"))},
        {"messages": user(region_of("q" * 100))},
        status=200,
        encoded=20 * CONTEXT,
        tokens=3 * CONTEXT,
        long={"messages": user(region_of("teh " * 25))},
        leaves_at=("encode", 200),
        pieces_after=1500,  # the spellings of one word
    ),
    "/v1/responses": Bound(
        {"input": "say: a", "max_output_tokens": 8},
        {"input": LONG},
        long={"input": SAY_MUCH["messages"], "max_output_tokens": MANY},
    ),
    "/v1/messages": Bound(CHAT, TOO_LONG, long=SAY_MUCH),
    "/v1/messages/count_tokens": Bound(CHAT, TOO_LONG, leaves_at=("encode", 1)),
    "/api/generate": Bound(
        {"prompt": "say: a", "stream": False, "options": {"num_predict": 8}},
        {"prompt": LONG},
        long={"prompt": "say: " + "a" * 70, "options": {"num_predict": MANY}},
    ),
    "/api/chat": Bound(
        {"messages": user("say: a"), "stream": False, "options": {"num_predict": 8}},
        TOO_LONG,
        long={**SAY_MUCH, "options": {"num_predict": MANY}},
    ),
    "/api/show": Bound({}, {"system": LONG}, status=200),
    "/completion": Bound({"prompt": "a", "n_predict": 4}, {"prompt": LONG}, long={"n_predict": MANY, "ignore_eos": True}),
    "/infill": Bound({"input_prefix": "a", "input_suffix": "b", "n_predict": 4}, {"input_prefix": LONG, "n_cmpl": 2}, **GAP),
    "/tokenize": Bound({"content": "a"}, {"content": LONG}, leaves_at=("encode", 1)),
    "/detokenize": Bound({"tokens": [70]}, {"tokens": [70] * 10_000}, leaves_at=("decode", 1)),
    "/v1/canvas": Bound(
        {"prompt": "a", "max_tokens": 4, "stream": False}, {"prompt": LONG}, long={"max_tokens": MANY, "forbidden": [1, 5]}
    ),
    "/v1/canvas/edit": Bound(
        {"text": "some text", "strength": 0.5, "stream": False}, {"text": LONG}, long={"text": "a b " * 25, "strength": 1.0}
    ),
    "/v1/canvas/sudoku": Bound(
        {"puzzle": BOARD, "canvases": 1, "stream": False},
        {"puzzle": "." * 100_000},
        long={"puzzle": "." * 81, "canvases": 256},
    ),
    "/v1/canvas/decide": Bound(
        {"prompt": "a", "choices": ["b", "c"], "stream": False}, {"prompt": LONG}, leaves_at=("forward", 1)
    ),
    "/v1/canvas/autoregressive": Bound(
        {"prompt": "a", "max_tokens": 3, "stream": False}, {"prompt": LONG}, long={"max_tokens": MANY}
    ),
}
BODIES = {path: bound.small for path, bound in ROUTES.items()}
WITHOUT_WORK = {"/infill": {"n_predict": 0}, "/api/generate": {"prompt": ""}, "/api/chat": {"messages": []}}


def new_writer():
    cfg = replace(tiny.BASE, max_position_embeddings=CONTEXT)
    return EchoWriter(tiny.decided(cfg), tiny.byte_tokenizer(), tiny.sampler(canvas_length=8, max_steps=1))


class Work:
    """Counts pieces of work and their sizes. The threads that work wait at one of them until they may go on."""

    def __init__(self):
        self.pieces = Counter()
        self.sizes = Counter()
        self.waits_at = None
        self.is_there = threading.Event()
        self.goes_on = threading.Event()
        self.loop_thread = threading.current_thread()

    def begin(self, kind, size):
        assert threading.current_thread() is not self.loop_thread, f"{kind} on the event loop"
        self.pieces[kind] += 1
        self.sizes[kind] += size
        if self.waits_at == (kind, self.pieces[kind]):
            self.waits_at = None
            self.is_there.set()
            self.goes_on.wait()


@pytest.fixture
def work(monkeypatch):
    """The work of all models and tokenizers."""
    counted = Work()

    run_layer = DiffusionGemma.run_layer

    def run_counted_layer(self, index, x_BSD, *args, **options):
        if index == 0:
            counted.begin("forward", x_BSD.shape[0] * x_BSD.shape[1])
        return run_layer(self, index, x_BSD, *args, **options)

    class CountedVocabulary:
        def __init__(self, vocabulary):
            self._vocabulary = vocabulary

        def __getattr__(self, name):
            return getattr(self._vocabulary, name)

        def encode(self, text, **options):
            counted.begin("encode", len(text))
            return self._vocabulary.encode(text, **options)

        def encode_batch_fast(self, texts, **options):
            counted.begin("encode", sum(map(len, texts)))
            return self._vocabulary.encode_batch_fast(texts, **options)

        def decode(self, ids, **options):
            counted.begin("decode", len(ids))
            return self._vocabulary.decode(ids, **options)

    monkeypatch.setattr(DiffusionGemma, "run_layer", run_counted_layer)
    counted.vocabulary = CountedVocabulary
    return counted


def new_app_of(work):
    """A server of one model whose work is counted, from here on."""
    writer = new_writer()
    app = make_app(writer, ServerConfig(name="base"))
    writer.tokenizer.vocabulary = work.vocabulary(writer.tokenizer.vocabulary)
    return app


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


# 1. Work


def test_the_table_has_every_route_of_the_app():
    assert {route.path for route in new_app().routes} == ROUTES.keys() | NO_WORK.keys()


def test_a_route_that_only_says_what_is_there_does_no_work(work):
    async def get():
        async with running(new_app_of(work)) as client:
            for path in NO_WORK.values():
                answer = await client.get(path)
                assert answer.status_code == (404 if "xxx" in path else 200), path
                assert (await client.head(path)).status_code == answer.status_code
                assert "xxx" not in path or len(answer.content) < 500

    asyncio.run(get())
    assert not work.pieces


@pytest.mark.parametrize("path", ROUTES)
def test_a_hostile_request_has_a_bound_on_its_work(path, work):
    bound = ROUTES[path]
    answer = post_all(new_app_of(work), {path: {**bound.small, **bound.hostile}})[path]
    assert answer.status_code == bound.status, answer.text
    if bound.status == 400:
        assert len(sentence_of(path, answer.json())[0]) < 300
    assert work.sizes["encode"] <= bound.encoded
    assert work.sizes["forward"] <= bound.tokens
    assert work.sizes["decode"] <= bound.decoded


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [path for path in ROUTES if path != "/api/show"])
def test_the_work_of_a_client_that_has_left_stops(path, stream, work):
    bound = ROUTES[path]
    work.waits_at = bound.leaves_at

    async def leave():
        app = new_app_of(work)
        async with app.router.lifespan_context(app):
            has_left = asyncio.Event()
            body = {**bound.small, **(bound.long or {}), "stream": stream}
            leaving = asyncio.create_task(post_and_leave(app, path, body, has_left))
            is_there = asyncio.create_task(asyncio.to_thread(work.is_there.wait))
            await asyncio.wait({leaving, is_there}, return_when=asyncio.FIRST_COMPLETED)
            work.is_there.set()
            assert not leaving.done()  # it works
            has_left.set()
            assert await leaving in ((200, 499) if stream else (499,))
            before = work.pieces.copy()
            work.goes_on.set()
            while app.state.models.active:
                await asyncio.sleep(0.001)
            after = work.pieces - before
            return after["forward"] + after["encode"]

    assert asyncio.run(leave()) <= bound.pieces_after


# 2. Models


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


@pytest.mark.parametrize("model", ["absent", "gpt-4o:latest"])
def test_a_model_an_alias_and_no_name_mean_a_model_on_every_route(model):
    named = {} if model == "absent" else {"model": model}
    bodies = {path: {**body, **named} for path, body in BODIES.items()}
    for path, answer in post_all(new_app(aliases={"gpt-4o": "base"}), bodies).items():
        assert answer.status_code == 200, (path, answer.text)
        assert answer.json().get("model", "base") == "base"


@pytest.mark.parametrize("model", [None, "", "base", "base:latest", "gpt-4o", "gpt-9", ":latest", "*"])
def test_a_name_means_the_first_model(model):
    app = new_app(aliases={"gpt-4o": "base", "*": "base"})
    assert post_all(app, {"/completion": {**BODIES["/completion"], "model": model}})["/completion"].json()["model"] == "base"


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
        ({"gpt-4o": "nobody"}, "the alias 'gpt-4o' is for 'nobody', a model that is not served: choose one of base, other"),
        ({"other": "base"}, "the alias 'other' is the name of a model already: choose another one"),
    ],
)
def test_an_alias_without_a_model_or_over_one_is_refused(aliases, sentence):
    with pytest.raises(ConfigError, match=sentence):
        new_app(aliases=aliases)
