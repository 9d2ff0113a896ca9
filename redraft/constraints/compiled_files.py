"""CompiledFiles: patterns that were compiled before, in a folder of the user's, by content.

A name is the hash of the pattern, of the vocabulary and of the compiler's own source, so a file is never out of date. The
files that were not used for longest are removed. A file that cannot be read counts as absent.
"""

import hashlib
import os
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

MAX_BYTES = 256 * 2**20  # of all files together
SUFFIX = ".pattern"


class CompiledFiles:
    """The compiled patterns of one vocabulary."""

    def __init__(self, folder: Path, vocabulary: bytes) -> None:
        self.folder = folder
        self.vocabulary = hashlib.sha256(vocabulary).digest()

    def read(self, patterns: str) -> bytes | None:
        """The compiled form of these patterns, or None."""
        path = self._path(patterns)
        try:
            found = path.read_bytes()
            digest, content = found[:32], found[32:]
            os.utime(path)
        except OSError:
            return None
        return content if hashlib.sha256(content).digest() == digest else None

    def write(self, patterns: str, compiled: bytes) -> None:
        """Keeps what was compiled. A full or read-only disk keeps nothing."""
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self._path(patterns)
            part = path.with_name(f".{path.stem}-{os.getpid()}-{threading.get_ident()}")
            part.write_bytes(hashlib.sha256(compiled).digest() + compiled)
            part.replace(path)
            self._remove_old()

    def _path(self, patterns: str) -> Path:
        name = hashlib.sha256(_compiler_hash() + self.vocabulary + patterns.encode("utf-8", "surrogatepass")).hexdigest()
        return self.folder / (name + SUFFIX)

    def _remove_old(self) -> None:
        files = [(path.stat().st_mtime, path.stat().st_size, path) for path in self.folder.glob(f"*{SUFFIX}")]
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= MAX_BYTES:
                break
            path.unlink(missing_ok=True)
            total -= size


@lru_cache(maxsize=1)
def _compiler_hash() -> bytes:
    """Of the source files of this package."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).digest()
