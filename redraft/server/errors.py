"""Errors of a request, and the HTTP status of each.

A mistake of the client is a 400 with one sentence that names it. Any other exception is a fault of the server: it is
answered as a 500 and logged with a trace. Lower packages raise ValueError subclasses for user mistakes (BAD_REQUESTS);
a bare ValueError counts as a user mistake only where a request is checked before it runs (`checking_request`).
"""

import logging
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from redraft.config import ConfigError
from redraft.constraints.regex_dfa import PatternError
from redraft.engine import RequestError, Stopped
from redraft.model.backbone import CausalOnlyError
from redraft.tasks.sudoku.board import BoardError
from redraft.tokenizer.tokenizer import TokenizerError

LONGEST_NAME = 100  # characters of a model's name in a sentence
LOG = logging.getLogger("redraft.server")


class BadRequestError(ValueError):
    """A request that cannot be fulfilled. `param` names the field that is wrong."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModelError(LookupError):
    """A request names a model that the server does not have. `models` are those it has, the first one first."""

    param = "model"

    def __init__(self, model: str, models: Sequence[str]) -> None:
        name = model if len(model) <= LONGEST_NAME else f"{model[:LONGEST_NAME]}..."
        alias = shlex.quote(f"{name}={models[0]}")
        way_out = f"name one of them, or start it with --alias {alias}"
        super().__init__(f"there is no model {name!r} here; this server has {', '.join(models)}: {way_out}")


class BodyTooLargeError(Exception):
    """The body has more bytes than the server accepts."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(f"a request body may have {max_bytes:,} bytes at most: send less at once, or raise --max-body")


class BodyTimeoutError(RuntimeError):
    """The body did not come in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the request body did not come within {seconds:g} s")


class ServerBusyError(RuntimeError):
    """The server, or this client's share of it, is taken. `retry_after` is in seconds."""

    def __init__(self, taken: str, retry_after: int = 1) -> None:
        super().__init__(f"{taken}: try again in {retry_after} s")
        self.retry_after = retry_after


class TooManyBytesError(ServerBusyError):
    """The server already receives as many bytes of request bodies as it accepts."""

    def __init__(self) -> None:
        super().__init__("the server already receives as many bytes as it accepts, or as it accepts from one client")


class ServerClosingError(RuntimeError):
    """The server shuts down and accepts no new requests."""


class ReplicaLostError(RuntimeError):
    """The replica that worked on a request has ended, or there is none. What it wrote is not a finished answer."""


class ModelLoadError(RuntimeError):
    """A model that a request names could not be loaded. The next request for it tries again."""


class ClientDisconnected(RuntimeError):
    """The client closed its connection."""


BAD_REQUESTS = (BadRequestError, PatternError, ConfigError, TokenizerError, BoardError, RequestError, CausalOnlyError)
STATUS_CODES: dict[type[Exception], int] = {
    **dict.fromkeys(BAD_REQUESTS, 400),
    UnknownModelError: 404,
    BodyTimeoutError: 408,
    BodyTooLargeError: 413,
    ServerBusyError: 429,
    **dict.fromkeys((ClientDisconnected, Stopped), 499),
    ServerClosingError: 503,
    ReplicaLostError: 503,
}


def status_of(error: Exception) -> int:
    """Returns the HTTP status of an error: 500 unless the table names its class."""
    return next((status for kind, status in STATUS_CODES.items() if isinstance(error, kind)), 500)


def message_of(error: Exception) -> str:
    """Returns the sentence that the client reads."""
    return str(error) or type(error).__name__


def log_fault(error: Exception) -> None:
    """Logs an error with its trace if it is a fault of the server."""
    if status_of(error) == 500:
        LOG.error("internal error: %s", message_of(error), exc_info=error)


@contextmanager
def checking_request() -> Iterator[None]:
    """Turns the ValueErrors of checks in lower packages into BadRequestError.

    Wrap only code that checks or submits a request: once tokens are generated, a bare ValueError is a fault of the server.
    """
    try:
        yield
    except BAD_REQUESTS:
        raise
    except RecursionError:
        raise BadRequestError("the request is nested too deeply") from None
    except ValueError as error:
        raise BadRequestError(message_of(error)) from error
