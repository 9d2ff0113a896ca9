"""`redraft warm`, and the line that says that kernels are being built.

Triton compiles a kernel for a model's shape at its first launch and keeps it on disk: the first answer of the first process
waits for that, later processes do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.table import Table

from redraft.cli.options import Context, Device, Dtype, GpuMemory, KeepBf16, Kv, Model, Quant
from redraft.config import CHECKS
from redraft.server.first_launch import BATCHES, FEW_TOKENS, launch_kernels

if TYPE_CHECKING:
    from redraft.writer import Writer

T = TypeVar("T")


def warm(
    model: Model = "",
    device: Device = None,
    dtype: Dtype = None,
    quant: Quant = None,
    keep_bf16: KeepBf16 = False,
    kv: Kv = None,
    gpu_memory: GpuMemory = None,
    context: Context = None,
) -> None:
    """Build the GPU kernels for a model now and keep them on disk, so that no answer waits for them later."""
    from redraft import writer
    from redraft.kernels.backend import select_backend

    console = Console(stderr=True, highlight=False)
    built: list[str] = []
    with show_builds(console, built.append):
        options: dict[str, Any] = {"device": device, "dtype": dtype, "quant": quant, "keep_bf16": keep_bf16}
        memory: dict[str, Any] = {"kv": kv, "gpu_memory": gpu_memory, "context": context}
        subject = writer.load(model or writer.DEFAULT_MODEL, **options, **memory)
        show_loaded(subject, console)
        backend = select_backend(subject.model.device)
        if not backend.uses_triton:
            console.print(f"There are no kernels to build: {backend.reason}.", markup=False)
            return
        launch_kernels(subject)
        launch_other_shapes(subject)
    console.print(f"{len(built)} kernels built, the others were on disk.", markup=False)
    show_peak(subject, console)


def launch_other_shapes(subject: Writer) -> None:
    """Runs requests of other canvas lengths and modes, infills, edits and long prompts.

    A server starts without them, so the first client that asks for such a shape makes the others wait while its kernels
    are built: `redraft warm` before a server that strangers can reach.
    """
    prompt = "Once upon a time"
    settings: dict[str, Any] = {"seed": 0, "max_steps": 2}
    has_canvas = not subject.model.config.is_causal_only
    longest = subject.sampler.canvas_length if has_canvas else FEW_TOKENS
    lengths = [1 << bits for bits in range(longest.bit_length()) if 1 << bits < longest]
    for length in (*lengths, *(3 * length // 2 + 1 for length in lengths), 2 * longest) if has_canvas else ():
        for count in BATCHES:
            with suppress(ValueError):
                subject.write([prompt] * count, canvas_length=length, max_tokens=2 * length, **settings)
        with suppress(ValueError):
            subject.write(prompt, canvas_length=length, max_tokens=length, regex="[a-z ]+", **settings)
    for words in (100, 1000, 3000):
        with suppress(ValueError):
            subject.write(" ".join(["word"] * words), max_tokens=longest, **settings)
    for check in CHECKS:
        for count in BATCHES:
            with suppress(ValueError):
                subject.write([prompt] * count, check=check, max_tokens=longest, **settings)
    with suppress(ValueError):
        subject.fill("Once upon a [[ ]] there was a dog.", seed=0)
    with suppress(ValueError):
        subject.edit("Once upon a time there was a dog.", seed=0)
    with suppress(ValueError):
        subject.decide(prompt, [" there", " was"])


def show_loaded(subject: Writer, console: Console) -> None:
    """Prints which weights were rounded while they were loaded, and the memory plan, if --gpu-memory asked for one."""
    for sentence in subject.model.conversions:
        console.print(sentence, style="bright_black", markup=False)
    if subject.gpu_limit is not None:
        table = Table("GPU memory", "", box=None, pad_edge=False)
        for row in subject.gpu_limit.rows:
            table.add_row(*row)
        console.print(table, markup=False)


def show_peak(subject: Writer, console: Console) -> None:
    """Prints the most memory that was used, if --gpu-memory limits it."""
    if subject.gpu_limit is not None:
        console.print(subject.gpu_limit.peak, markup=False)


@contextmanager
def show_builds(console: Console, report: Callable[[str], None] = lambda name: None, *, message: str = "") -> Iterator[None]:
    """While kernels are built, says so: as a status line that counts on a terminal, as one line of text elsewhere.

    With a message, a terminal shows it from the beginning.
    """
    from redraft.kernels.builds import watch_builds

    count = 0
    status = console.status(message)
    if message and console.is_terminal:
        status.start()

    def on_build(name: str) -> None:
        nonlocal count
        count += 1
        report(name)
        if console.is_terminal:
            status.update(f"building kernels, once: {count}")
            status.start()
        elif count == 1:
            console.print("building kernels, once")

    with watch_builds(on_build):
        try:
            yield
        finally:
            status.stop()


def show_builds_until_first(events: Iterator[T], console: Console, *, message: str = "") -> Iterator[T]:
    """The same events. While the first one is being made, kernel builds are shown, and the message on a terminal."""
    with show_builds(console, message=message):
        first = list(zip((0,), events, strict=False))  # none, where there are no events
    return chain((event for _, event in first), events)
