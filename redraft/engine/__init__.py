"""Many requests at once over one model: schedule -> run -> settle. Each gets the tokens that `generate` gives."""

from redraft.engine.engine import Engine
from redraft.engine.request import Intervention, Replay, Request, Stopped

__all__ = ["Engine", "Intervention", "Replay", "Request", "Stopped"]
