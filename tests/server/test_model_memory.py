"""The models of a server share the memory for KV caches, and no more are loaded than it allows."""

import asyncio
import random
from dataclasses import replace

import httpx
import pytest
from test_server_models import CARD, NAMES, Loader, Running, alone, new_writer, running, sources_of

from redraft.config import ConfigError
from redraft.engine import engine
from redraft.server.app import ServerConfig, make_app
from redraft.server.models import ModelSource

GB = 10**9


def budgets_of(models):
    return {service.name: service.writer.engine.scheduler.budget for service in models.services}


@pytest.mark.parametrize("max_models", [3, 10**6])
def test_models_share_the_memory_for_kv_caches(monkeypatch, max_models):
    monkeypatch.setattr(engine, "measure_budget", lambda *_: 9 * GB)

    async def load_all():
        async with running(Loader("one"), Loader("two"), max_models=max_models) as server:
            for name in ("one", "two"):
                await server.ollama(name)
            first = budgets_of(server.models)
            assert list(first) == NAMES
            assert all(budget == pytest.approx(3 * GB, rel=1e-3) for budget in first.values())
            await server.ollama("one", keep_alive=0)
            await server.ollama("one")
            assert budgets_of(server.models) == pytest.approx(first, rel=1e-3)

    asyncio.run(load_all())


def test_the_first_model_leaves_room_for_weights_to_come(monkeypatch):
    free = [9 * GB]
    monkeypatch.setattr(engine, "measure_budget", lambda *_: free[0])

    async def load():
        loaders = [Loader("one"), Loader("two")]
        sources = {loader.name: ModelSource(loader, replace(CARD, nbytes=5 * GB)) for loader in loaders}
        app = make_app(new_writer("base"), ServerConfig(name="base", max_models=2), sources)
        models = app.state.models
        assert budgets_of(models) == {"base": 2 * GB}  # of 9, less 5 for the larger of the others, for two models
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with app.router.lifespan_context(app), http as client:
            server = Running(models, client)
            free[0] = 4 * GB  # the weights have come
            await server.ollama("one")
            assert budgets_of(models)["one"] == 2 * GB
            free[0] = GB  # less than the first was promised: the estimate was wrong
            await server.ollama("two")
            assert budgets_of(models)["two"] == GB // 8

    asyncio.run(load())


def test_a_server_of_one_model_has_all_memory(monkeypatch):
    monkeypatch.setattr(engine, "measure_budget", lambda *_: 9 * GB)
    assert budgets_of(make_app(new_writer("base")).state.models) == {"redraft": 9 * GB}


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None])
def test_a_limit_of_models_is_a_whole_number(value):
    with pytest.raises(ConfigError, match="max_models must be a whole number from 1"):
        ServerConfig(max_models=value)


def test_a_limit_of_one_model_has_no_room_for_others():
    with pytest.raises(ConfigError, match="max_models 1 leaves no room beside the first model"):
        make_app(new_writer("base"), ServerConfig(max_models=1), sources_of([Loader("one")]))


def test_two_models_cannot_have_one_name():
    with pytest.raises(ConfigError, match="two models have the name 'one'"):
        make_app(new_writer("base"), ServerConfig(name="one"), sources_of([Loader("one")]))


@pytest.mark.soak
def test_no_more_models_are_loaded_than_allowed_whatever_the_order_of_requests():
    async def ask_at_random():
        counts = []

        class CountingLoader(Loader):
            def __call__(self):
                writer = super().__call__()
                counts.append(sum(model() is not None for loader in loaders for model in loader.models))
                return writer

        loaders = [CountingLoader(name) for name in ("one", "two", "three")]
        async with running(*loaders, max_models=3) as server:
            order = random.Random(5).choices(["base", "one", "two", "three"], k=24)
            texts = await asyncio.gather(*(server.ask(name, max_tokens=4, check="off") for name in order))
            assert texts == [alone(name, "Once", max_tokens=4, check="off") for name in order]
            assert len(server.models.services) <= 3
        assert max(counts) == 2  # beside the first

    asyncio.run(ask_at_random())
