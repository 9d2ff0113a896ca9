"""Launches the kernels of a model before the first client needs them: Triton builds them at their first launch."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redraft.writer import Writer

BATCHES = (1, 2, 4, 8)  # requests at once: kernels are specialised by how many rows they get
FEW_TOKENS = 8  # of a causal-only model, which has no canvas


def launch_if_triton(subject: Writer) -> Writer:
    """Launches the kernels of a model where it has some."""
    from redraft.kernels.backend import select_backend

    if select_backend(subject.model.device).uses_triton:
        launch_kernels(subject)
    return subject


def launch_kernels(subject: Writer) -> None:
    """Runs a short request of every kind: some at once, one with a pattern, one that is watched.

    A model that refuses one of them is not run that way later either: the Sudoku model takes no text.
    """
    prompt = "Once upon a time"
    length = subject.sampler.canvas_length if not subject.model.config.is_causal_only else FEW_TOKENS
    settings: dict[str, Any] = {"seed": 0, "max_steps": 2}
    for count in BATCHES:
        with suppress(ValueError):
            subject.write([prompt] * count, max_tokens=2 * length, **settings)
    with suppress(ValueError):
        subject.write(prompt, max_tokens=length, regex="[a-z ]+", **settings)
    with suppress(ValueError):
        for _ in subject.stream(prompt, max_tokens=length, candidates=3, **settings):
            pass
