"""Kernel builds: Triton compiles a kernel at its first launch and keeps it on disk (TRITON_CACHE_DIR, ~/.triton/cache)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from redraft.kernels.backend import select_backend


@contextmanager
def watch_builds(report: Callable[[str], None], device: str = "cuda") -> Iterator[None]:
    """Calls `report` with the name of every kernel that is compiled meanwhile. A kernel found on disk is not reported."""
    if not torch.cuda.is_available() or not select_backend(device).uses_triton:
        yield
        return
    from triton import knobs

    def listen(*, src: Any, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            report(str(metadata.get("name", "kernel")))

    before = knobs.compilation.listener
    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = before
