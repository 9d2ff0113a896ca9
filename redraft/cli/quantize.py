"""The command redraft quantize: writes a checkpoint in fewer bits, and says what rounding did to each projection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from redraft.cli.options import Device, Threads

if TYPE_CHECKING:
    from redraft.checkpoint.quantize import Projection

MEGABYTE = 10**6


def quantize(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, GGUF file, or hub id OWNER/NAME.")],
    folder: Annotated[str | None, typer.Argument(metavar="[OUT]", help="Folder to write; the same as --out.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Folder to write.")] = None,
    to: Annotated[
        str, typer.Option("--to", help="nvfp4, int4 or fp8: the format of the experts, nine tenths of the model.")
    ] = "fp8",
    rest: Annotated[
        str,
        typer.Option("--rest", help="fp8 or bf16: the format of attention and dense MLP. The embedding stays as stored."),
    ] = "fp8",
    force: Annotated[bool, typer.Option("--force", help="Replace the checkpoint that the folder holds.")] = False,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Write a checkpoint in 4 or 8 bits, in the compressed-tensors format. A command that was stopped continues."""
    if (folder is None) == (out is None):
        raise ValueError("name the folder to write, once: redraft quantize MODEL --out DIR")
    from redraft import checkpoint
    from redraft.checkpoint.quantize import Quantized
    from redraft.kernels.backend import select_device

    target = str(out or folder)
    options = checkpoint.QuantizeOptions(to=to, rest=rest)
    checkpoint.check_target(target, force=force)  # before a download
    source = checkpoint.find(model)
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("quantizing"), BarColumn(), MofNCompleteColumn(), TextColumn("MB"), TimeRemainingColumn())
    projections: dict[str, Projection] = {}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("quantizing", total=None)
        events = checkpoint.quantize_checkpoint(source, target, options, device=select_device(device), force=force)
        for event in events:
            if isinstance(event, Quantized):
                progress.update(task, completed=event.done // MEGABYTE, total=event.total // MEGABYTE)
            else:
                projections = event
    console.print(_projection_table(projections))
    print(target)


def _projection_table(projections: dict[str, Projection]) -> Table:
    """Errors are relative to the weights: root mean square over a projection, and the largest of a block."""
    table = Table("projection", "matrices", "bits", "error", "largest block error", box=None, pad_edge=False)
    for name, projection in projections.items():
        errors = ("as stored", "")
        if projection.rounded:
            errors = (f"{projection.relative_error:.2%}", f"{projection.largest_block:.1%}")
        table.add_row(name, f"{projection.matrices:,}", f"{projection.bits:.2f}", *errors)
    return table
