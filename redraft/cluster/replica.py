"""Replica: the app of the single machine in a Ray Serve replica, with one engine of its own.

    front -> Replica.answer(scope, body) -> [the app of server/app.py] -> batches of ASGI messages -> front

The front has checked Host, Origin and key; the app here checks the body and everything after it. When the front stops to
listen, because its client has left, Serve cancels `answer`, and the engine drops the request at its next step.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack
from typing import Any

from redraft.cluster.cluster_config import ServedModel

LOOPBACK = "127.0.0.1"
Message = MutableMapping[str, Any]
Family = tuple[str, str, str, list[tuple[str, dict[str, str], float]]]  # name, help, type, samples of a metric


class Replica:
    """One engine with a model. Serve constructs it on the node, and on the GPU, that it has chosen."""

    async def __init__(self, served: ServedModel, settings: Any) -> None:  # type: ignore[misc]
        """`settings` is the ServerConfig of its app."""
        from redraft.server.app import make_app

        self.served = served
        listen_on_loopback()
        log_requests()
        writer = await asyncio.to_thread(load_writer, served)
        self.app = make_app(writer, settings)
        self._running = AsyncExitStack()
        await self._running.enter_async_context(self.app.router.lifespan_context(self.app))

    async def __del__(self) -> None:
        """Serve calls this when the running requests have ended, or when their time to drain is over."""
        if hasattr(self, "_running"):
            await self._running.aclose()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Runs a request through the app and yields the messages of its response as they come."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await asyncio.Event().wait()  # a client that leaves cancels this whole call
            raise AssertionError

        async def run() -> None:
            try:
                await self.app({**scope, "type": "http", "asgi": {"version": "3.0"}}, receive, messages.put)
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            is_open = True
            while is_open:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                is_open = batch[-1] is not None
                if ready := [message for message in batch if message is not None]:
                    name_replica(ready[0])
                    yield ready
            await task
        finally:
            task.cancel()
            await asyncio.wait({task})

    def check_health(self) -> None:
        """Serve asks every few seconds, and replaces a replica that fails three times in a row.

        Any step that succeeds clears the fault: a replica that still has one is idle or fails every step.
        """
        if fault := self.find_fault():
            raise RuntimeError(f"the last step failed: {fault}")

    def find_fault(self) -> str:
        """The failure of the engine's last step, as text; empty if there was none."""
        faults = [service.writer.engine.fault for service in self.app.state.models.services]
        return next(filter(None, faults), "")

    async def health(self) -> dict[str, Any]:
        """What /health says about this replica."""
        fault = self.find_fault()
        state = {"status": "error", "error": f"the last step failed: {fault}"} if fault else {"status": "ok"}
        place = {"deployment": self.served.deployment, "node": node_name(), "pid": os.getpid()}
        active = self.app.state.models.active
        return {"model": self.served.name, "replica": replica_name(), **state, "active": active, **place}

    async def metrics(self) -> tuple[str, list[Family]]:
        """The name of this replica and all its metrics."""
        return replica_name(), collect_families(self.app.state.models.metrics.registry)


def load_writer(served: ServedModel) -> Any:
    """Loads the model as `redraft serve` does, and launches its kernels, where it has some."""
    from redraft import writer
    from redraft.kernels.threads import fix_threads
    from redraft.server.first_launch import launch_if_triton

    if served.threads is not None:
        fix_threads(served.threads)
    return launch_if_triton(writer.load(served.model, **served.loading))


def replica_name() -> str:
    """The name that Serve gave this replica."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def node_name() -> str:
    """The id of the node on which this replica runs."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def name_replica(message: Message) -> None:
    """Adds the header that tells which replica has answered."""
    if message["type"] == "http.response.start":
        message["headers"] = [*message.get("headers", ()), (b"x-redraft-replica", replica_name().encode())]


def collect_families(registry: Any) -> list[Family]:
    """The metrics of a registry as plain values, which travel between processes."""
    return [
        (family.name, family.documentation, family.type, [(row.name, row.labels, row.value) for row in family.samples])
        for family in registry.collect()
    ]


def listen_on_loopback() -> None:
    """Serve opens a gRPC port in every replica, on all addresses. On a cluster of one machine it is the loopback address.

    Ray has no setting for it. Ray itself uses the port only if RAY_SERVE_USE_GRPC_BY_DEFAULT is set.
    """
    import ray
    from ray.serve._private import replica

    if ray.util.get_node_ip_address() != LOOPBACK or not hasattr(replica, "add_port_to_grpc_server"):
        return
    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, _: add_port(server, f"{LOOPBACK}:0")


def log_requests() -> None:
    """Logs one line per request, without its text, to the replica's own log, which Ray keeps."""
    log = logging.getLogger("redraft.server")
    log.setLevel(logging.INFO)
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
    log.propagate = False
