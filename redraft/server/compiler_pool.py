"""Compiler pool: compiles the patterns of requests in helper processes, so that no client stalls the others.

A client has at most one process at a time. The next free process goes to the client that has waited longest.
"""

import threading
from collections.abc import Callable, Sequence

from redraft.constraints.compiled_cache import CompiledCache
from redraft.constraints.pattern_compiler import CompilerProcess, Pattern, pack_patterns
from redraft.constraints.token_automaton import TokenAutomaton
from redraft.engine.request import client_of
from redraft.tokenizer.helper_process import HelperStoppedError

POLL_SECONDS = 0.02
MAX_CACHED_BYTES = 64 * 2**20


class CompilerPool:
    """A PatternCompiler over several helper processes. `make_process` is called when a process is first needed."""

    def __init__(self, make_process: Callable[[], CompilerProcess], size: int = 2) -> None:
        self.size = size
        self.compiled: CompiledCache[list[TokenAutomaton]] = CompiledCache(
            256, MAX_CACHED_BYTES, lambda automata: sum(automaton.bytes for automaton in automata)
        )
        self._make_process = make_process
        self._processes: list[CompilerProcess] = []
        self._free: list[CompilerProcess] = []
        self._waiting: list[str] = []  # clients, in order
        self._busy_clients: set[str] = set()
        self._is_closed = False
        self._changed = threading.Condition()

    def compile(self, patterns: Sequence[Pattern], stop: threading.Event | None = None) -> list[TokenAutomaton]:
        """The automata of a request's patterns. Raises HelperStoppedError once `stop` is set."""
        key = pack_patterns(patterns)
        cached = self.compiled.get(key)
        if cached is not None:
            return cached
        client = client_of(stop)
        process = self._acquire(client, stop)
        try:
            automata = self.compiled.get(key)  # another request of this client may have compiled it meanwhile
            if automata is None:
                automata = process.compile(patterns, stop)
                self.compiled.put(key, automata)
            return automata
        finally:
            self._release(client, process)

    def close(self) -> None:
        """Ends all processes; calls that wait raise HelperStoppedError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            processes = list(self._processes)
        for process in processes:
            process.close()

    def _acquire(self, client: str, stop: threading.Event | None) -> CompilerProcess:
        with self._changed:
            self._waiting.append(client)
            try:
                while not self._is_next(client):
                    if self._is_closed or (stop is not None and stop.is_set()):
                        raise HelperStoppedError("the caller has stopped waiting")
                    self._changed.wait(timeout=POLL_SECONDS)
                self._busy_clients.add(client)
            finally:
                self._waiting.remove(client)
            if self._free:
                return self._free.pop()
            try:
                process = self._make_process()
            except BaseException:
                self._release(client, None)
                raise
            self._processes.append(process)
            return process

    def _release(self, client: str, process: CompilerProcess | None) -> None:
        with self._changed:
            self._free += [process] if process is not None else []
            self._busy_clients.discard(client)
            self._changed.notify_all()

    def _is_next(self, client: str) -> bool:
        """Whether a process is free and no other client that may have one has waited longer."""
        if self._is_closed or (not self._free and len(self._processes) >= self.size):
            return False
        return client == next((other for other in self._waiting if other not in self._busy_clients), None)
