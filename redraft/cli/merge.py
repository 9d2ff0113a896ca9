"""The command redraft merge: writes a checkpoint whose weights hold what an adapter adds to them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from redraft.cli.options import Threads


def merge(
    base: Annotated[str, typer.Argument(help="The model that the adapter was trained for: folder, GGUF file, or hub id.")],
    adapter: Annotated[str, typer.Argument(help="Folder of the adapter, as redraft tune and peft write it.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Folder to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the checkpoint that the folder holds.")] = False,
    threads: Threads = None,
) -> None:
    """Merge an adapter into its base. Packed weights are packed again; those of a GGUF file become full precision."""
    from redraft import checkpoint

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("loading", total=None)
        for event in checkpoint.merge_checkpoint(base, adapter, out, force=force):
            if isinstance(event, checkpoint.Merged):
                is_last = event.done == event.total
                progress.update(
                    task, description="writing" if is_last else "merging", completed=event.done, total=event.total
                )
            else:
                for sentence in event.sentences:
                    console.print(sentence, markup=False)
    print(out)
