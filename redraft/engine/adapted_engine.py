"""AdaptedEngine: an engine as the requests of one adapter use it. Requests with other adapters and without share its steps.

Tasks (infill, edit, decide, best of N) take an engine, add requests to it and reserve KV caches from it. Given this view of
an engine, all of that goes through the adapter.
"""

from redraft.engine.engine import Engine
from redraft.model.lora import Adapter, AdapterError


class AdaptedEngine(Engine):
    """A view of an engine. It shares all state with the engine except the adapter."""

    __slots__ = ("adapter",)  # the only attribute that is not in the dictionary, which both share

    def __init__(self, engine: Engine, adapter: Adapter | None) -> None:
        if adapter is not None and engine.verifier is not None:
            raise AdapterError(
                "verify_with decides what is written, so an adapter of the model that drafts would not show: leave it out"
            )
        self.__dict__ = engine.__dict__
        self.adapter = adapter
