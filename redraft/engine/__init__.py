"""Many requests at once over one model: schedule -> run -> settle. Each gets the tokens that `generate` gives."""

from redraft.engine.engine import Engine
from redraft.engine.request import Course, Request, Stopped, Turn

__all__ = ["Course", "Engine", "Request", "Stopped", "Turn"]
