"""Several models in one server: loaded when a request names them, unloaded when idle, each with the answers it has alone."""

import asyncio
import threading
import weakref
from contextlib import asynccontextmanager
from functools import lru_cache

import anthropic
import httpx
import ollama
import openai
import pytest
import tiny
from serving import keep, post_and_leave, served, user

from redraft.server.app import ServerConfig, make_app
from redraft.server.model_card import ModelCard
from redraft.server.models import ModelSource
from redraft.writer import Writer

pytestmark = pytest.mark.filterwarnings("ignore")  # from the clients' own libraries

SAMPLER = tiny.sampler(max_steps=3, max_new_tokens=32)
SEEDS = {"base": 0, "one": 1, "two": 2, "three": 3}
NAMES = ["base", "one", "two"]
OPTIONS = {"seed": 3, "num_predict": 12}


class HeldWriter(Writer):
    """A Writer whose requests wait until they may begin."""

    may_begin = threading.Event()
    may_begin.set()

    def stream(self, *args, **keywords):
        assert self.may_begin.wait(600)
        return super().stream(*args, **keywords)


def new_writer(name):
    return HeldWriter(tiny.decided(tiny.BASE, SEEDS[name]), tiny.byte_tokenizer(), SAMPLER)


CARD = ModelCard.from_writer(new_writer("base"))


class Loader:
    """Loads a tiny model; counts its loads, waits until it may load, fails on demand, and remembers what it has loaded."""

    def __init__(self, name):
        self.name = name
        self.loads = 0
        self.may_load = threading.Event()
        self.may_load.set()
        self.may_begin = threading.Event()  # the requests of the models it has loaded
        self.may_begin.set()
        self.error = None
        self.models = []
        self.engines = []

    def __call__(self):
        self.loads += 1
        assert self.may_load.wait(600)
        assert all(model() is None for model in self.models)  # its memory was given back before
        writer = new_writer(self.name)
        writer.may_begin = self.may_begin
        self.models.append(weakref.ref(writer.model))
        self.engines.append(weakref.ref(writer.engine))
        if self.error is not None:
            raise self.error
        return writer


def sources_of(loaders):
    return {loader.name: ModelSource(loader, CARD) for loader in loaders}


writer_alone = lru_cache(new_writer)


def alone(name, prompt, **options):
    """The answer of a Writer of its own."""
    writer = writer_alone(name)
    options = {"seed": 3, "max_tokens": 12, **options}
    return (writer.write if isinstance(prompt, str) else writer.chat)(prompt, **options).text


class Running:
    """A server in this event loop, with a clock that stands still."""

    def __init__(self, models, client):
        self.models = models
        self.client = client
        self.now = 0.0
        models.clock = lambda: self.now

    async def ask(self, model, **changes):
        body = {"prompt": "Once", "max_tokens": 12, "seed": 3, "model": model, **changes}
        answer = await self.client.post("/v1/completions", json=body)
        return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.status_code

    async def ollama(self, model, **fields):
        body = {"model": model, "stream": False, "raw": True, "options": OPTIONS, **fields}
        answer = await self.client.post("/api/generate", json=body)
        return answer.json()

    async def loaded(self):
        return [model["name"] for model in (await self.client.get("/api/ps")).json()["models"]]

    async def pass_time(self, seconds):
        """Lets time pass, and waits until the models that are idle by then are unloaded."""
        self.now += seconds
        leaving = list(self.models._in_memory)
        self.models.unload_idle()
        for loaded in leaving:
            if loaded.unloading is not None:
                await loaded.unloading


@asynccontextmanager
async def running(*loaders, **config):
    app = make_app(new_writer("base"), ServerConfig(name="base", **config), sources_of(loaders))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
    async with app.router.lifespan_context(app), http as client:
        yield Running(app.state.models, client)


async def until(condition):
    for _ in range(10**5):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never came true")


# 1. Clients


@pytest.fixture(scope="module")
def url():
    with served(new_writer("base"), sources=sources_of([Loader("one"), Loader("two")]), name="base") as address:
        yield address


def test_clients_of_every_kind_name_their_models(url):
    openai_client = keep(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    anthropic_client = keep(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))
    ollama_client = keep(ollama.Client(host=url))
    for name in ("one", "base", "two"):
        expected = alone(name, user("hi"))
        chat = openai_client.chat.completions.create(model=name, messages=user("hi"), max_tokens=12, seed=3)
        assert (chat.model, chat.choices[0].message.content) == (name, expected)
        message = anthropic_client.messages.create(model=name, messages=user("hi"), max_tokens=12, extra_body={"seed": 3})
        assert (message.model, message.content[-1].text) == (name, expected)
        parts = list(ollama_client.chat(model=f"{name}:latest", messages=user("hi"), stream=True, options=OPTIONS))
        assert {part.model for part in parts} == {name}
        assert "".join(part.message.content for part in parts) == expected
    assert len({alone(name, user("hi")) for name in NAMES}) == 3
    assert [model.model for model in ollama_client.ps().models] == ["base", "one", "two"]


def test_the_other_routes_use_the_named_model(url):
    with httpx.Client(base_url=url, timeout=600) as http:
        for name in ("one", "two"):
            body = {"model": name, "prompt": "Once", "n_predict": 12, "seed": 3}
            assert http.post("/completion", json=body).json()["content"] == alone(name, "Once")
            body = {"model": name, "prompt": "Once", "max_tokens": 12, "seed": 3, "stream": False}
            assert http.post("/v1/canvas", json=body).json()["events"][-1]["text"] == alone(name, "Once")
            counted = http.post("/v1/messages/count_tokens", json={"model": name, "max_tokens": 1, "messages": user("hi")})
            assert counted.json()["input_tokens"] > 2
            assert len(http.post("/tokenize", json={"model": name, "content": "ab"}).json()["tokens"]) == 2
        text = http.get("/metrics").text
    assert "redraft_loaded_models 3.0" in text
    assert 'redraft_tokens_total{kind="prompt",model="one"}' in text


# 2. Loading


def test_requests_for_a_model_load_it_once_and_others_go_on():
    async def first_requests():
        loader = Loader("one")
        loader.may_load.clear()
        async with running(loader) as server:
            waiting = [asyncio.create_task(server.ask("one")) for _ in range(3)]
            await until(lambda: server.models.first.worker.slots.taken == 3)
            assert await server.ask("base") == alone("base", "Once")
            assert await server.loaded() == ["base"]
            loader.may_load.set()
            texts = await asyncio.gather(*waiting)
            assert texts == [alone("one", "Once")] * 3
            assert loader.loads == 1
            assert server.models.first.worker.slots.taken == 0

    asyncio.run(first_requests())


def test_models_answer_at_the_same_time_as_they_do_alone():
    async def ask_all():
        async with running(Loader("one"), Loader("two")) as server:
            jobs = [("base", "off"), ("one", "off"), ("two", "off"), ("one", "exact")]
            texts = await asyncio.gather(*(server.ask(name, check=check) for name, check in jobs))
            assert texts == [alone(name, "Once", check=check) for name, check in jobs]
            assert len(set(texts[:3])) == 3

    asyncio.run(ask_all())


def test_an_empty_request_loads_a_model_and_says_how_long_it_took():
    async def load():
        loader = Loader("one")
        async with running(loader) as server:
            answer = await server.ollama("one")
            assert (answer["done_reason"], answer["response"], loader.loads) == ("load", "", 1)
            assert answer["total_duration"] == answer["load_duration"] > 0
            again = await server.ollama("one", prompt="Once")
            assert (again["response"], loader.loads) == (alone("one", "Once"), 1)
            assert again["load_duration"] < answer["load_duration"]
            chat = await server.client.post("/api/chat", json={"model": "base", "stream": False})
            assert chat.json()["done_reason"] == "load"

    asyncio.run(load())


FAILED_LOADS = [  # what fails, and where the wire format has the kind of the error and its message
    (OSError("weights are gone"), "/v1/completions", {"prompt": "a"}, lambda body: tuple(body["error"].values())[:2]),
    (MemoryError(), "/v1/messages", {"messages": user("a"), "max_tokens": 4}, lambda body: tuple(body["error"].values())),
    (ValueError("no such precision"), "/api/generate", {"prompt": "a"}, lambda body: (body["error"],)),
]


@pytest.mark.soak
def test_a_load_that_fails_is_answered_and_tried_again():
    async def fail():
        loader = Loader("one")
        async with running(loader) as server:
            for error, path, body, fields_of in FAILED_LOADS:
                loader.error = error
                answer = await server.client.post(path, json={**body, "model": "one"})
                assert answer.status_code == 500
                assert f"the model one cannot be loaded: {str(error) or 'MemoryError'}" in fields_of(answer.json())
            assert loader.loads == len(FAILED_LOADS)
            assert await server.loaded() == ["base"]
            assert (await server.client.get("/health")).json() == {"status": "ok"}
            loader.error = None
            assert await server.ask("one") == alone("one", "Once")

    asyncio.run(fail())


def test_a_client_that_leaves_while_a_model_loads_is_let_go():
    async def leave():
        loader = Loader("one")
        loader.may_load.clear()
        app = make_app(new_writer("base"), ServerConfig(name="base"), sources_of([loader]))
        models = app.state.models
        async with app.router.lifespan_context(app):
            has_left = asyncio.Event()
            leaving = asyncio.create_task(post_and_leave(app, "/v1/completions", {"prompt": "a", "model": "one"}, has_left))
            await until(lambda: loader.loads == 1)
            has_left.set()
            assert await leaving == 499
            assert models.first.worker.slots.taken == 0
            assert models._current["one"].users == 0
            loader.may_load.set()
            await until(lambda: len(models.services) == 2)  # the next request finds it loaded

    asyncio.run(leave())


# 3. Unloading


def engine_threads():
    return sum(thread.name == "redraft-engine" for thread in threading.enumerate())


def test_an_idle_model_is_unloaded_and_gives_its_memory_back():
    async def idle():
        loader = Loader("one")
        async with running(loader) as server:
            assert await server.ask("one") == alone("one", "Once")
            pool = weakref.ref(server.models._current["one"].service.pool)
            threads = engine_threads()
            await server.pass_time(299)
            assert await server.loaded() == ["base", "one"]
            await server.pass_time(2)
            assert await server.loaded() == ["base"]
            assert [ref() for ref in (*loader.models, *loader.engines, pool)] == [None, None, None]
            assert engine_threads() == threads - 1
            assert await server.ask("one") == alone("one", "Once")
            assert loader.loads == 2

    asyncio.run(idle())


def test_the_compilers_of_an_idle_model_are_ended():
    async def idle():
        async with running(Loader("one"), compile_seconds=600) as server:
            assert await server.ask("one", guided_choice=["yes", "no"]) in ("yes", "no")
            process = server.models._current["one"].service.pool._processes[0].process._process
            await server.pass_time(300)
            assert process.wait(600) is not None

    asyncio.run(idle())


def test_clients_of_ollama_say_how_long_a_model_stays():
    async def keep_alive():
        one = Loader("one")
        async with running(one) as server:
            await server.ollama("one", prompt="Once", keep_alive="10m")
            await server.pass_time(599)
            (_, entry) = (await server.client.get("/api/ps")).json()["models"]
            assert entry["name"] == "one"
            assert entry["expires_at"] < "9999"
            await server.pass_time(1)
            assert await server.loaded() == ["base"]
            await server.ollama("one", prompt="Once", keep_alive=-1)
            await server.pass_time(10**9)
            (_, entry) = (await server.client.get("/api/ps")).json()["models"]
            assert entry["expires_at"] == "9999-12-31T23:59:59Z"
            answer = await server.ollama("one", prompt="Once", keep_alive=0)
            assert answer["response"] == alone("one", "Once")
            assert await server.loaded() == ["base"]
            await server.ollama("one")
            assert await server.loaded() == ["base", "one"]
            stopped = await server.ollama("one", keep_alive=0)  # as `ollama stop one` asks for it
            assert (stopped["model"], stopped["done_reason"]) == ("one", "unload")
            assert await server.loaded() == ["base"]
            assert one.loads == 3

    asyncio.run(keep_alive())


def test_the_first_model_stays():
    async def stop_first():
        async with running(Loader("one")) as server:
            body = {"model": "base", "stream": False, "keep_alive": 0}
            answer = await server.client.post("/api/generate", json=body)
            assert answer.json()["done_reason"] == "load"
            assert answer.headers["x-redraft-unknown-fields"] == "keep_alive"
            assert await server.loaded() == ["base"]

    asyncio.run(stop_first())


def test_a_model_in_use_is_not_unloaded():
    async def use():
        loader = Loader("one")
        loader.may_begin.clear()
        async with running(loader, keep_seconds=0.0) as server:
            answers = [asyncio.create_task(server.ask("one")) for _ in range(2)]
            await until(lambda: server.models.active == 2)
            assert (await server.ollama("one", keep_alive=0))["done_reason"] == "unload"
            await server.pass_time(10**9)
            assert await server.loaded() == ["base", "one"]
            loader.may_begin.set()
            assert await asyncio.gather(*answers) == [alone("one", "Once")] * 2
            await until(lambda: len(server.models.services) == 1)
            assert loader.loads == 1

    asyncio.run(use())


def test_one_model_more_unloads_the_longest_idle_one():
    async def rotate():
        loaders = [Loader(name) for name in ("one", "two", "three")]
        async with running(*loaders) as server:
            for name in ("one", "two", "one"):
                await server.ask(name)
                server.now += 1
            assert await server.ask("three") == alone("three", "Once")
            assert await server.loaded() == ["base", "one", "three"]
            assert loaders[1].models[0]() is None
            assert [loader.loads for loader in loaders] == [1, 1, 1]

    asyncio.run(rotate())


def test_a_model_waits_for_room_until_another_is_idle():
    async def wait():
        one, two = Loader("one"), Loader("two")
        one.may_begin.clear()
        async with running(one, two, max_models=2, requests=4) as server:  # of which a client has three
            using_one = asyncio.create_task(server.ask("one"))
            await until(lambda: server.models.active == 1)
            waiting = [asyncio.create_task(server.ask("two")) for _ in range(2)]
            await until(lambda: server.models.first.worker.slots.taken == 3)
            assert [await server.ask("two"), await server.ask("base")] == [429, 429]
            assert two.loads == 0
            one.may_begin.set()
            assert await using_one == alone("one", "Once")
            assert await asyncio.gather(*waiting) == [alone("two", "Once")] * 2
            assert await server.loaded() == ["base", "two"]

    asyncio.run(wait())


def test_a_model_that_nobody_waits_for_any_more_is_not_loaded():
    async def leave():
        one, two = Loader("one"), Loader("two")
        one.may_begin.clear()
        app = make_app(new_writer("base"), ServerConfig(name="base", max_models=2), sources_of([one, two]))
        models = app.state.models
        async with app.router.lifespan_context(app):
            has_left = asyncio.Event()
            using_one = asyncio.create_task(
                post_and_leave(app, "/completion", {"prompt": "a", "model": "one"}, asyncio.Event())
            )
            await until(lambda: models.active == 1)
            leaving = asyncio.create_task(post_and_leave(app, "/completion", {"prompt": "a", "model": "two"}, has_left))
            await until(lambda: "two" in models._current)
            has_left.set()
            assert await leaving == 499
            one.may_begin.set()
            assert await using_one == 200
            await until(lambda: not models._current)
            assert two.loads == 0

    asyncio.run(leave())


# 4. Lists


def test_lists_have_all_models(url):
    client = keep(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    listed = {model.id: model for model in client.models.list().data}
    assert [name for name in listed if name in NAMES] == NAMES
    assert {listed[name].max_model_len for name in NAMES} == {512}
    assert client.models.retrieve("two").id == "two"
    ollama_client = keep(ollama.Client(host=url))
    tags = ollama_client.list().models
    assert [model.model for model in tags] == NAMES
    assert all(model.size > 0 for model in tags)
    assert ollama_client.show("two").modelinfo["diffusion_gemma.context_length"] == 512


def test_a_keep_alive_that_is_no_time_is_a_bad_request(url):
    for value in ("soon", True, [], "9" * 5000):
        answer = httpx.post(f"{url}/api/generate", json={"model": "one", "prompt": "a", "keep_alive": value})
        assert (answer.status_code, answer.json()["error"][:4]) in ((400, "keep"), (400, "a ke"))
