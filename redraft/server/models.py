"""Models: the models of one server. The first is loaded at start and stays; others are loaded when a request names them.

    request -> Models.select -> [not in memory: make room, load in a thread; the request waits] -> the model's Service

A model is in use from `select` until the response has ended. One that no request has used for its keep-alive time is
unloaded, and so is the longest idle one when another model needs its place. Each model has an engine of its own, so models
do not wait for one another. Everything here runs on the event loop, except the loading itself.
"""

import asyncio
import copy
import gc
import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Self

import torch
from fastapi import Request

from redraft.config import ConfigError
from redraft.server.addresses import check_aliases, resolve_name
from redraft.server.errors import LOG, ModelLoadError, ServerClosingError, UnknownModelError, message_of
from redraft.server.images import ServedImages, new_permits
from redraft.server.keep_alive import FOREVER
from redraft.server.middleware import AT_END, Metrics
from redraft.server.model_card import ModelCard
from redraft.server.schema import Body
from redraft.server.server_config import ServerConfig
from redraft.server.service import Service, client_name_of
from redraft.server.streams import result_until_disconnected
from redraft.server.worker import Worker
from redraft.tokenizer.helper_process import return_free_memory
from redraft.writer import Writer

IDLE_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class ModelSource:
    """A model that is loaded on demand."""

    load: Callable[[], Writer]  # called in a thread
    card: ModelCard


class LoadedModel:
    """One stay of a model in memory, from the request that has it loaded to its unloading."""

    def __init__(self, name: str, keep_seconds: float) -> None:
        self.name = name
        self.keep_seconds = keep_seconds  # after the last request
        self.last_used = 0.0
        self.users = 0  # requests that use the model or wait until it is loaded
        self.is_free = asyncio.Event()  # set while there are no users
        self.is_free.set()
        self.service: Service | None = None  # None before it is loaded and after it is unloaded
        self.loading: asyncio.Task[None] | None = None
        self.unloading: asyncio.Task[None] | None = None


class Models:
    """The models that a server has, by the names that clients say."""

    def __init__(self, writer: Writer, sources: Mapping[str, ModelSource], config: ServerConfig, metrics: Metrics) -> None:
        if sources and config.max_models < 2:
            raise ConfigError("max_models 1 leaves no room beside the first model, which stays loaded: give 2 or more")
        for name in sources:
            if name in (config.name, *writer.adapters):
                raise ConfigError(f"two models have the name {name!r}: the first, or an adapter of it, and another one")
        self.sources = dict(sources)
        self.config = config
        self.names = (config.name, *writer.adapters, *sources)  # of models and adapters, as lists show them
        check_aliases(config.aliases, self.names)
        self.metrics = metrics
        self.clock: Callable[[], float] = time.monotonic
        self.cards = {config.name: ModelCard.from_writer(writer)}
        self.cards |= {name: source.card for name, source in self.sources.items()}
        self._read_permits = new_permits()
        self._share_memory(config.name, writer, beside=())
        self.first = self._build_service(config.name, writer, Worker(writer, config.requests))
        self._current: dict[str, LoadedModel] = {}  # what a request for a name gets
        self._in_memory: list[LoadedModel] = []  # also those that are about to be unloaded
        self._load_lock = asyncio.Lock()  # models are loaded one at a time, in the order of their first requests
        self._watching: asyncio.Task[None] | None = None
        self._is_closing = False

    def _build_service(self, name: str, writer: Writer, worker: Worker) -> Service:
        images = ServedImages(self.cards[name].images, self.config.image_hosts, self._read_permits)
        return Service(writer, worker, self.metrics, name, self.config.compile_seconds, images, self.config.pattern_folder)

    def _share_memory(self, name: str, writer: Writer, beside: Sequence[Service]) -> None:
        """Gives a model that was just loaded its part of the memory for KV caches, of which the ones beside it have theirs.

        Its engine has measured what is free. That contains what the others may still take, and the weights of models to
        come: the largest that may be loaded beside these.
        """
        if not self.sources:
            return
        most = min(self.config.max_models, 1 + len(self.sources))
        places = most - len(beside)  # its own, and those of models to come
        loaded = {name, *(service.name for service in beside)}
        weights = sorted((card.loaded_bytes for other, card in self.cards.items() if other not in loaded), reverse=True)
        scheduler = writer.engine.scheduler
        taken = sum(service.writer.engine.unused_cache_bytes for service in beside) + sum(weights[: places - 1])
        # Not less than a quarter of an even part: the sizes of weights are estimates.
        scheduler.budget = max((scheduler.budget - taken) // places, scheduler.budget // (4 * most))

    # 1. The server's life

    def open(self) -> None:
        """Starts to serve."""
        self.first.open()
        if self.sources:
            self._watching = asyncio.create_task(self._watch_idle())

    async def close(self) -> None:
        """Accepts nothing new, lets running requests finish for a while, and unloads everything."""
        self._is_closing = True
        loading = [loaded.loading for loaded in self._current.values() if loaded.loading is not None]
        for task in (self._watching, *loading):
            if task is not None:
                task.cancel()
        unloading = [self._unload(loaded, waits_for_users=False) for loaded in self._in_memory]
        await asyncio.gather(self.first.close(self.config.drain_seconds), *unloading)

    async def _watch_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_POLL_SECONDS)
            self.unload_idle()

    # 2. What is here

    def find_name(self, model: str | None) -> str:
        """The model or adapter that a client names; the first model if it names none. Raises UnknownModelError."""
        if not model:
            return self.first.name
        name = resolve_name(model, self.names, self.config.aliases)
        if name is None:
            raise UnknownModelError(model, self.names)
        return name

    def base_of(self, name: str) -> str:
        """The model to which a name belongs: an adapter is one of the first model's."""
        return name if name in self.sources else self.first.name

    @property
    def services(self) -> list[Service]:
        """The services of all models that are in memory."""
        return [self.first, *(loaded.service for loaded in self._in_memory if loaded.service is not None)]

    @property
    def active(self) -> int:
        """The number of requests that run or wait."""
        return sum(service.worker.active for service in self.services)

    @property
    def seconds_left(self) -> dict[str, float]:
        """How long each model that is in memory stays there if no request comes."""
        now = self.clock()
        seconds = {self.first.name: FOREVER}
        for loaded in self._current.values():
            if loaded.service is not None:
                idle_seconds = 0.0 if loaded.users else now - loaded.last_used
                seconds[loaded.name] = max(0.0, loaded.keep_seconds - idle_seconds)
        return seconds

    # 3. Use

    async def select(self, request: Request, model: str | None, keep_seconds: float | None = None) -> Service:
        """The service of the model that a client names. The model is in use until the response has ended.

        A model that is not in memory is loaded first. `keep_seconds` is its new keep-alive time.
        """
        name = self.find_name(model)
        if name not in self.sources:
            return self.first.select(name)
        loaded = self._current.get(name)
        if loaded is not None and loaded.service is not None:
            self._use(request, loaded, keep_seconds)
            return loaded.service
        client = client_name_of(request)
        slots = self.first.worker.slots
        slots.take(client)  # a request that waits counts as one that the server has
        try:
            loaded = loaded or self._start_loading(name)
            self._use(request, loaded, keep_seconds)
            return await self._wait_until_loaded(request, loaded)
        finally:
            slots.release(client)

    async def _wait_until_loaded(self, request: Request, loaded: LoadedModel) -> Service:
        assert loaded.loading is not None
        began = time.perf_counter()
        try:
            await result_until_disconnected(request, loaded.loading)
        except asyncio.CancelledError:
            if loaded.loading.cancelled():
                raise ServerClosingError("the server is shutting down") from None
            raise
        service = copy.copy(loaded.service)
        assert service is not None
        service.load_seconds = time.perf_counter() - began
        return service

    def _use(self, request: Request, loaded: LoadedModel, keep_seconds: float | None) -> None:
        """The model is in use until the response to this request has ended."""
        if keep_seconds is not None:
            loaded.keep_seconds = keep_seconds
        loaded.users += 1
        loaded.is_free.clear()
        request.scope[AT_END].callback(self._release, loaded)

    def _release(self, loaded: LoadedModel) -> None:
        """A response has ended."""
        loaded.users -= 1
        loaded.last_used = self.clock()
        if not loaded.users:
            loaded.is_free.set()
            self.unload_idle()

    # 4. Loading

    def _start_loading(self, name: str) -> LoadedModel:
        if self._is_closing:
            raise ServerClosingError("the server is shutting down")
        loaded = LoadedModel(name, self.config.keep_seconds)
        loaded.loading = asyncio.create_task(self._load(loaded))
        loaded.loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # all clients may have left
        self._current[name] = loaded
        return loaded

    async def _load(self, loaded: LoadedModel) -> None:
        """Loads a model for the requests that wait for it; not if all of them leave before there is room."""
        async with self._load_lock:
            await self._make_room()
            if not loaded.users:
                self._forget(loaded)
                return
            began = time.perf_counter()
            try:
                service = await self._open_service(loaded.name)
            except Exception as error:
                self._forget(loaded)
                traceback.clear_frames(error.__traceback__)  # they hold what was loaded so far
                await asyncio.to_thread(return_memory)
                raise ModelLoadError(f"the model {loaded.name} cannot be loaded: {message_of(error)}") from error
            self._in_memory.append(loaded)
            loaded.service = service
            loaded.last_used = self.clock()
            log_event("loaded", loaded.name, seconds=round(time.perf_counter() - began, 3))

    async def _open_service(self, name: str) -> Service:
        writer = await asyncio.to_thread(self.sources[name].load)
        await asyncio.to_thread(self._share_memory, name, writer, self.services)
        worker = Worker(writer, self.config.requests, shares_slots_with=self.first.worker)
        service = self._build_service(name, writer, worker)
        service.open()
        self.cards[name] = ModelCard.from_writer(writer)
        return service

    async def _make_room(self) -> None:
        """Waits for models that are being unloaded, and unloads others until one more may be loaded.

        The longest idle one goes. If none is idle, the one that was used longest ago goes when its requests have ended.
        """
        while (leaving := self._leaving) or 1 + len(self._in_memory) >= self.config.max_models:
            if not leaving:
                leaving = {self._unload(min(self._in_memory, key=lambda each: (each.users > 0, each.last_used)))}
            await asyncio.wait(leaving)

    @property
    def _leaving(self) -> set[asyncio.Task[None]]:
        return {loaded.unloading for loaded in self._in_memory if loaded.unloading is not None}

    def _forget(self, loaded: LoadedModel) -> None:
        """The next request for this model loads it anew."""
        if self._current.get(loaded.name) is loaded:
            del self._current[loaded.name]

    # 5. Unloading

    def unload_idle(self) -> None:
        """Unloads models whose keep-alive time has passed since their last request."""
        for loaded in list(self._current.values()):
            is_over = self.clock() >= loaded.last_used + loaded.keep_seconds
            if loaded.service is not None and not loaded.users and is_over:
                self._unload(loaded)

    async def unload(self, model: str | None) -> bool:
        """Unloads a model that a client names, as soon as no request uses it. False for the first one, which stays."""
        name = self.find_name(model)
        loaded = self._current.get(name)
        if loaded is not None:
            loaded.keep_seconds = 0.0
            self.unload_idle()
            if loaded.unloading is not None:
                await asyncio.wait({loaded.unloading})
        return name in self.sources

    def _unload(self, loaded: LoadedModel, *, waits_for_users: bool = True) -> asyncio.Task[None]:
        """Unloads a model when its last request has ended. Newer requests for it load it anew."""
        self._forget(loaded)
        if not waits_for_users:
            loaded.is_free.set()
        if loaded.unloading is None:
            loaded.unloading = asyncio.create_task(self._close_loaded(loaded))
        return loaded.unloading

    async def _close_loaded(self, loaded: LoadedModel) -> None:
        await loaded.is_free.wait()
        assert loaded.service is not None
        try:
            await loaded.service.close(self.config.drain_seconds)
        finally:
            loaded.service = None
            if not self._is_closing:
                await asyncio.to_thread(return_memory)
            self._in_memory.remove(loaded)
            log_event("unloaded", loaded.name)


def return_memory() -> None:
    """Returns the memory of a model that is not used any more to the operating system and the driver."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return_free_memory()


def log_event(event: str, model: str, **fields: Any) -> None:
    """Logs one line of JSON, as requests have one."""
    line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "model": model, "event": event}
    LOG.info(json.dumps({**line, **fields}))


class Handlers:
    """The handlers of a wire format. Those of a request use the model that its body names: see `of`."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.service = models.first

    async def of(self, request: Request, body: Body, keep_seconds: float | None = None) -> Self:
        """These handlers with the service of the model that a body names."""
        selected = copy.copy(self)
        selected.service = await self.models.select(request, body.model, keep_seconds)
        return selected
