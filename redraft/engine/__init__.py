"""Many requests at once over one model: schedule -> run -> settle. Each gets the tokens that `generate` gives."""

from redraft.engine.engine import Engine
from redraft.engine.request import Request, Stopped

__all__ = ["Engine", "Request", "Stopped"]
