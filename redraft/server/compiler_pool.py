"""Compiler pool: compiles the patterns of requests in helper processes, so that no client stalls the others."""

import threading
from collections.abc import Callable, Sequence

from redraft.constraints.compiled_cache import CompiledCache
from redraft.constraints.pattern_compiler import Compiled, CompilerProcess, Pattern, pack_patterns
from redraft.tokenizer.helper_pool import HelperPool

MAX_CACHED_BYTES = 64 * 2**20


class CompilerPool(HelperPool[CompilerProcess]):
    """A PatternCompiler over several helper processes. A client has at most one of them at a time."""

    def __init__(self, make_process: Callable[[], CompilerProcess], size: int = 2) -> None:
        super().__init__(make_process, size)
        self.compiled: CompiledCache[list[Compiled]] = CompiledCache(
            256, MAX_CACHED_BYTES, lambda automata: sum(automaton.bytes for automaton in automata)
        )

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
