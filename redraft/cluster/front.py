"""Front: takes the requests of all clients and passes each to a replica of the model that it names.

    client -> Serve's proxy -> Front: access, body, slot -> handle of the model's deployment -> Replica -> back the same way

Serve's router chooses the replica. Requests of one conversation have one session id, which Ray's ConsistentHashRouter sends
to one replica, where the prefix cache has the conversation's beginning. /metrics, /health and the lists of models are
gathered from all replicas.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, MutableMapping
from contextlib import aclosing, suppress
from typing import Any

from redraft.cluster.cluster_config import KEY_VARIABLE, ClusterConfig
from redraft.cluster.replica import collect_families, listen_on_loopback, replica_name
from redraft.cluster.routing import read_fields, session_of
from redraft.server.addresses import is_local, resolve_name

Message = MutableMapping[str, Any]
Batches = AsyncGenerator[list[Message], None]
FORWARDED = ("http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "client", "server")
SECRET_HEADERS = (b"host", b"origin", b"authorization", b"x-api-key")  # checked here; the replica does not see them
PRIVATE = ("deployment", "node", "pid")  # of a replica: for `redraft cluster status`, not for everybody
LISTS = ("/v1/models", "/v1/models/", "/models", "/api/tags", "/api/ps")
MODEL_PATH = "/v1/models/"
FRESH_SECONDS = 1.0  # for which /health and /metrics answer without asking the replicas again
GATHER_SECONDS = 10.0  # for all replicas of a model to answer
LOST = "the replica that worked on this request has ended before its answer was complete: send the request again"
NO_REPLICA = "no replica of the model {} is running: try again in a few seconds"
NEEDS_KEY = f"this address can be reached from other machines and has no key: set {KEY_VARIABLE} where Ray runs"


class Front:
    """The ingress deployment of Ray Serve."""

    def __init__(self, config: ClusterConfig, *handles: Any) -> None:
        from redraft.server.worker import Slots

        listen_on_loopback()
        self.config = config
        self.key = config.key or os.environ.get(KEY_VARIABLE) or None
        self.handles = {model.name: handle for model, handle in zip(config.models, handles, strict=True)}
        self.model_of = {name: model.name for model in config.models for name in model.names}
        self.first = config.models[0].name
        self.slots = Slots(config.slots, "running or waiting")
        self._fresh: dict[str, tuple[float, asyncio.Task[Any]]] = {}

    def __serve_build_asgi_app__(self) -> Any:
        """Serve calls this when the replica of the front has been constructed."""
        return build_app(self)

    # 1. One request

    async def forward(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Passes a request to a replica, and its response to the client. ASGI."""
        from redraft.server.connections import name_client
        from redraft.server.errors import ClientDisconnected

        body = await read_whole(receive)
        client = name_client(scope["client"][0] if scope.get("client") else None)
        self.slots.take(client)
        try:
            progress = Progress()
            relay = asyncio.ensure_future(self._relay(scope, body, send, progress))
            leaving = asyncio.ensure_future(wait_until_left(receive))
            try:
                await asyncio.wait({relay, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if relay.done() or progress.is_complete:  # a client may leave with the last byte
                    await relay
                elif not progress.start:
                    raise ClientDisconnected("the client has disconnected")
            finally:
                relay.cancel()
                leaving.cancel()
                await asyncio.wait({relay, leaving})
        finally:
            self.slots.release(client)

    async def _relay(self, scope: Mapping[str, Any], body: bytes, send: Any, progress: "Progress") -> None:
        """Sends what the replica answers. A replica that ends midway makes the response an error, never an end."""
        from redraft.server.errors import ReplicaLostError

        fields = await asyncio.to_thread(read_fields, body) if len(body) > 2**16 else read_fields(body)
        path = scope["path"]
        model = self.find_model(path.removeprefix(MODEL_PATH) if path.startswith(MODEL_PATH) else fields.model_name(path))
        session = session_of(dict(scope["headers"]), fields)
        try:
            async with aclosing(self.ask(model, scope, body, session)) as batches:
                async for batch in batches:
                    for message in batch:
                        progress.note(message)
                        await send(message)
        except ReplicaLostError as error:
            if not progress.start:
                raise
            if not progress.is_complete:
                await send({"type": "http.response.body", "body": error_event(path, progress.start, str(error))})

    async def ask(
        self, model: str, scope: Mapping[str, Any], body: bytes, session: str
    ) -> AsyncGenerator[list[Message], None]:
        """Yields the messages of a replica of the model. Raises ReplicaLostError if it ends, or if there is none."""
        from ray.exceptions import RayActorError, RayError
        from ray.serve.exceptions import DeploymentUnavailableError

        from redraft.server.errors import ReplicaLostError

        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in SECRET_HEADERS]
        forwarded = {key: scope[key] for key in FORWARDED if key in scope}
        forwarded["headers"] = [*headers, (b"host", b"localhost")]
        response = self.handles[model].options(stream=True, session_id=session).answer.remote(forwarded, body)
        try:
            async for batch in response:
                yield batch
        except DeploymentUnavailableError:
            raise ReplicaLostError(NO_REPLICA.format(model)) from None
        except RayError as error:
            if isinstance(error, RayActorError):
                raise ReplicaLostError(LOST) from None
            raise
        finally:
            response.cancel()

    def find_model(self, name: str) -> str:
        """The deployment of the model or adapter that a client names; the first if it names none."""
        from redraft.server.errors import UnknownModelError

        if not name:
            return self.first
        found = resolve_name(name, self.model_of, self.config.aliases)
        if found is None:
            raise UnknownModelError(name, list(self.model_of))
        return self.model_of[found]

    # 2. What all replicas say

    async def lists(self, scope: Mapping[str, Any]) -> dict[str, Any]:
        """A list of models, united from one replica of each."""
        answers = await asyncio.gather(*(self._ask_for_json(model, scope) for model in self.handles))
        united: dict[str, Any] = dict(answers[0])
        for answer in answers[1:]:
            for key, rows in answer.items():
                if isinstance(rows, list):
                    listed = {row.get("id") or row.get("name") for row in united[key]}
                    united[key] = [*united[key], *(row for row in rows if (row.get("id") or row.get("name")) not in listed)]
        return united

    async def _ask_for_json(self, model: str, scope: Mapping[str, Any]) -> dict[str, Any]:
        content = b""
        async with aclosing(self.ask(model, scope, b"", "")) as batches:
            async for batch in batches:
                content += b"".join(message.get("body", b"") for message in batch)
        return json.loads(content)

    async def gather(self, method: str) -> dict[str, list[Any]]:
        """What all running replicas answer to a method, by model. Several callers within a second share one answer."""
        loop = asyncio.get_running_loop()
        asked_at, task = self._fresh.get(method, (float("-inf"), None))
        if task is None or loop.time() - asked_at > FRESH_SECONDS:
            task = asyncio.create_task(self._gather(method))
            self._fresh[method] = (loop.time(), task)
        return await asyncio.shield(task)

    async def _gather(self, method: str) -> dict[str, list[Any]]:
        async def of_model(handle: Any) -> list[Any]:
            try:
                response = handle.broadcast(method)
                answers = await response.results_async(timeout_s=GATHER_SECONDS, return_exceptions=True)
            except Exception:  # no replica is running, or one does not answer: it is left out
                return []
            return [answer for answer in answers if not isinstance(answer, BaseException)]

        answers = await asyncio.gather(*map(of_model, self.handles.values()))
        return dict(zip(self.handles, answers, strict=True))

    async def health(self) -> dict[str, Any]:
        """All replicas with their state. It is well if every model has a replica that is."""
        replicas = await self.gather("health")
        is_well = all(any(each["status"] == "ok" for each in replicas[model]) for model in self.handles)
        listed = [dict(each) for model in self.handles for each in sorted(replicas[model], key=lambda row: row["replica"])]
        missing = [model for model in self.handles if not replicas[model]]
        error = {"error": NO_REPLICA.format(", ".join(missing))} if missing else {}
        return {"status": "ok" if is_well else "error", **error, "replicas": listed}

    async def metrics(self, own_registry: Any) -> str:
        """The metrics of all replicas, and of this front, with the labels `deployment` and `replica`."""
        import prometheus_client
        from prometheus_client.core import Metric

        gathered = [(model, *answer) for model, answers in (await self.gather("metrics")).items() for answer in answers]
        gathered.append(("front", replica_name(), collect_families(own_registry)))
        united: dict[str, Any] = {}
        for deployment, replica, families in gathered:
            for name, documentation, kind, samples in families:
                family = united.setdefault(name, Metric(name, documentation, kind))
                for row, labels, value in samples:
                    family.add_sample(row, {**labels, "deployment": deployment, "replica": replica}, value)

        class United:
            def collect(self) -> list[Any]:
                return list(united.values())

        return prometheus_client.generate_latest(United()).decode()


class Progress:
    """How far a response has come."""

    def __init__(self) -> None:
        self.start: Message = {}  # the message with status and headers; empty before it
        self.is_complete = False

    def note(self, message: Message) -> None:
        """Notes a message that is sent to the client."""
        if message["type"] == "http.response.start":
            self.start = message
        elif message["type"] == "http.response.body":
            self.is_complete = not message.get("more_body", False)


class LocalWithoutKey:
    """ASGI middleware for a front without a key: it answers this machine only, whatever address Ray's proxy listens on."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Passes a request on if it came to a loopback address, by that of its socket and not by its headers."""
        from redraft.server.app import error_body

        if scope["type"] != "http" or is_local(str((scope.get("server") or ("",))[0])):
            await self.app(scope, receive, send)
            return
        content = json.dumps(error_body(scope["path"], 403, NEEDS_KEY)).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def build_app(front: Front) -> Any:
    """The ASGI app of a front: the middleware and the errors of the single machine around `forward`."""
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, PlainTextResponse, Response
    from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

    from redraft.server.app import add_error_handlers, error_body
    from redraft.server.bodies import BodyLimits
    from redraft.server.middleware import AccessMiddleware, Limits, Metrics

    config = front.config
    size = config.max_body * 2**20
    metrics = Metrics()
    bodies = BodyLimits(body_bytes=size, received_bytes=4 * size, body_seconds=config.body_seconds)
    limits = Limits(hosts=(config.host, *config.hosts), origins=config.origins, key=front.key, bodies=bodies)
    app = FastAPI(title="redraft", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(AccessMiddleware, limits=limits, metrics=metrics, error_body=error_body)
    if front.key is None:
        app.add_middleware(LocalWithoutKey)
    if config.trusted_proxies:
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(config.trusted_proxies))
    metrics.active.set_function(lambda: front.slots.taken)
    add_error_handlers(app)

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        state = await front.health()
        for replica in state["replicas"]:
            for private in PRIVATE:
                replica.pop(private, None)
        return JSONResponse(state, status_code=200 if state["status"] == "ok" else 503)

    @app.api_route("/metrics", methods=["GET", "HEAD"])
    async def metrics_page() -> Response:
        return PlainTextResponse(await front.metrics(metrics.registry), media_type="text/plain; version=0.0.4")

    if len(front.handles) > 1:

        async def lists(request: Request) -> Response:
            return JSONResponse(await front.lists(request.scope))

        for path in LISTS:
            app.add_api_route(path, lists, methods=["GET", "HEAD"])
    app.mount("/", front.forward)
    return app


async def read_whole(receive: Callable[[], Coroutine[Any, Any, Message]]) -> bytes:
    """The body of a request, which the middleware has limited."""
    from redraft.server.errors import ClientDisconnected

    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the client has disconnected")
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


async def wait_until_left(receive: Callable[[], Coroutine[Any, Any, Message]]) -> None:
    """Returns when the client has left. Serve cancels the request too, unless a header of the client forbids it."""
    with suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass


def error_event(path: str, start: Message, sentence: str) -> bytes:
    """The last event of a stream whose replica has ended, in the shape of its wire format."""
    from redraft.server.api import anthropic, llamacpp, ollama, openai, responses

    kind = next((value for name, value in start["headers"] if name.lower() == b"content-type"), b"")
    if kind.startswith(b"application/x-ndjson"):
        return json.dumps(ollama.error(sentence)).encode() + b"\n"
    if not kind.startswith(b"text/event-stream"):
        raise RuntimeError(sentence)  # the connection is closed before the end of the body
    if path.startswith("/v1/messages"):
        return f"event: error\ndata: {json.dumps(anthropic.error(503, sentence))}\n\n".encode()
    if path.startswith("/v1/responses"):
        return f"event: error\ndata: {json.dumps(responses.error_event(503, sentence))}\n\n".encode()
    if path.startswith("/v1/canvas"):
        event = {"type": "error", "error": {"message": sentence, "code": 503}}
        return f"data: {json.dumps(event)}\n\n".encode()
    wire = llamacpp if path in ("/completion", "/infill") else openai
    return f"data: {json.dumps(wire.error(503, sentence))}\n\n".encode()
