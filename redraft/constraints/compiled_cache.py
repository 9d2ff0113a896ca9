"""CompiledCache: the automata that were compiled last, by pattern, bounded by count and by bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Compiled = TypeVar("Compiled")


class CompiledCache(Generic[Compiled]):
    """Keeps the compiled patterns that were used last. The budget of a request is no part of the key."""

    def __init__(self, max_entries: int, max_bytes: int, count_bytes: Callable[[Compiled], int]) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.count_bytes = count_bytes
        self.bytes = 0
        self._entries: OrderedDict[str, tuple[Compiled, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, pattern: str) -> Compiled | None:
        """The compiled pattern, or None."""
        with self._lock:
            if pattern not in self._entries:
                return None
            self._entries.move_to_end(pattern)
            return self._entries[pattern][0]

    def put(self, pattern: str, compiled: Compiled) -> None:
        """Stores a compiled pattern, and evicts the least recently used ones."""
        size = self.count_bytes(compiled) + len(pattern)
        with self._lock:
            _, old_size = self._entries.pop(pattern, (None, 0))
            self._entries[pattern] = (compiled, size)
            self.bytes += size - old_size
            while self._entries and (len(self._entries) > self.max_entries or self.bytes > self.max_bytes):
                _, (_, forgotten) = self._entries.popitem(last=False)
                self.bytes -= forgotten
