"""A lock for work that runs beside the engine.

Such work (autoregressive, decide, sudoku) allocates its own KV cache and makes its own forwards, so one request runs at a
time. A request that waits for the lock gives up as soon as its client has left.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from redraft.engine import Stopped
from redraft.model.kv_cache import KVCache
from redraft.server.errors import BadRequestError
from redraft.writer import Writer

LOCK = threading.Lock()
POLL_SECONDS = 0.05


@contextmanager
def exclusive(stop: threading.Event) -> Iterator[None]:
    """Holds the lock. Raises Stopped if `stop` is set before the lock is free."""
    while not LOCK.acquire(timeout=POLL_SECONDS):
        if stop.is_set():
            raise Stopped
    try:
        if stop.is_set():
            raise Stopped
        yield
    finally:
        LOCK.release()


def check_cache_fits(writer: Writer, tokens: int, param: str) -> None:
    """Raises BadRequestError if a KV cache of so many tokens is too large beside the engine's own caches."""
    size = KVCache.count_bytes(writer.model.config, tokens, writer.model.dtype)
    if size > writer.engine.scheduler.budget // 10:
        raise BadRequestError(f"{tokens} tokens take more memory than is left beside the engine: shorten {param}", param)
