"""Errors of the engine: the user's mistakes and the engine's own faults are different types.

A server answers a RequestError (or a PatternError of the constraints, or a CausalOnlyError of the model) with 400 and an
EngineError with 500.
"""

from dataclasses import dataclass

import torch

from redraft.constraints.errors import PatternError
from redraft.model.backbone import CausalOnlyError


class RequestError(ValueError):
    """The request cannot be carried out as it was made; the message says what to change."""


class ReplayError(RequestError):
    """A replay that does not fit its run, or an intervention at a step that the run never reached."""


class EngineError(RuntimeError):
    """The engine failed while it worked on this request. The fault is not the user's; the log has the trace."""


class Stopped(RuntimeError):
    """The caller set the request's stop event."""

    def __init__(self) -> None:
        super().__init__("this request was stopped: its client has left")


MEMORY_ADVICE = "try a smaller model, a shorter prompt, or --device cpu"
USER_ERRORS = (RequestError, PatternError, CausalOnlyError)


@dataclass(frozen=True)
class Failure:
    """Why a request failed: type and message only, because a kept exception keeps all frames of its traceback in memory."""

    error_type: type[Exception]
    message: str
    is_out_of_memory: bool = False  # the GPU's memory was not enough

    @classmethod
    def from_exception(cls, error: BaseException) -> "Failure":
        """User errors keep their type. Everything else becomes an EngineError that names the original type."""
        if isinstance(error, USER_ERRORS):
            return cls(type(error), str(error))
        message = f"the engine failed while this request ran: {type(error).__name__}: {error}"
        return cls(EngineError, message, isinstance(error, torch.OutOfMemoryError))

    @property
    def is_engine_fault(self) -> bool:
        """Whether the fault is the engine's own."""
        return issubclass(self.error_type, EngineError)

    def to_exception(self, memory_advice: str) -> Exception:
        """A new exception of the same type and message, without frames. A lack of memory says what to do about it."""
        return self.error_type(f"out of GPU memory: {memory_advice}" if self.is_out_of_memory else self.message)
