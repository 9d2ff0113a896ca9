"""Compiler pool: compiles the patterns of requests in helper processes, so that no client stalls the others."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from redraft.constraints.compiled_cache import CompiledCache
from redraft.constraints.pattern_compiler import Compiled, CompilerProcess, Pattern, pack_patterns
from redraft.tokenizer.helper_pool import HelperPool
from redraft.tokenizer.helper_process import HelperError

MAX_CACHED_BYTES = 64 * 2**20
WARM_UP = [Pattern(regex="a")]


class _Starting(threading.Event):
    """Stands for the client for whom a process is started. A client has one process, so each has a name of its own."""

    def __init__(self, client: str) -> None:
        super().__init__()
        self.client = client


class CompilerPool(HelperPool[CompilerProcess]):
    """A PatternCompiler over several helper processes. A client has at most one of them at a time."""

    def __init__(self, make_process: Callable[[], CompilerProcess], size: int = 2) -> None:
        super().__init__(make_process, size)
        self.compiled: CompiledCache[list[Compiled]] = CompiledCache(
            256, MAX_CACHED_BYTES, lambda automata: sum(automaton.bytes for automaton in automata)
        )

    def start(self) -> None:
        """Starts all processes in the background, so that the first request does not wait for their imports."""
        for number in range(self.size):
            threading.Thread(target=self._start_one, args=(_Starting(f"process {number}"),), daemon=True).start()

    def _start_one(self, client: threading.Event) -> None:
        with suppress(HelperError), self.lend(client) as process:
            process.compile(WARM_UP)

    def compile(self, patterns: Sequence[Pattern], stop: threading.Event | None = None) -> list[Compiled]:
        """The automata or grammars of a request's patterns. Raises HelperStoppedError once `stop` is set."""
        key = pack_patterns(patterns)
        cached = self.compiled.get(key)
        if cached is not None:
            return cached
        with self.lend(stop) as process:
            automata = self.compiled.get(key)  # another request of this client may have compiled it meanwhile
            if automata is None:
                automata = process.compile(patterns, stop)
                self.compiled.put(key, automata)
            return automata
