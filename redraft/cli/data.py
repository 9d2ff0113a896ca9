"""The command `redraft data`: makes training data."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from redraft.cli.options import Device, Threads, option, parse_int

KINDS = ("stories",)


def data(
    kind: Annotated[str, typer.Argument(help="What to make: stories.")],
    teacher: Annotated[
        str,
        typer.Option("--teacher", help="The model that writes: a Llama folder with tokens.jsonl, or as --model elsewhere."),
    ] = "tiny",
    count: Annotated[int, option("--count", "-n", help="How many stories.", parser=parse_int)] = 1000,
    out: Annotated[str, typer.Option("--out", "-o", help="The data folder, which REDRAFT_DATA then names.")] = "data",
    seed: Annotated[int, option("--seed", help="Another seed gives other stories.", parser=parse_int)] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace stories that the folder holds.")] = False,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Make training data: stories sampled from a teacher, in the files that `redraft train tiny` reads."""
    if kind not in KINDS:
        raise ValueError(
            f"redraft can make {', '.join(KINDS)}, got {kind!r}: docs/training.md says where other data comes from"
        )
    if count < 1:
        raise ValueError(f"--count must be at least 1, got {count}")
    folder = Path(out) / "stories"
    if not force and any(folder.glob("stories_*.txt.xz")):
        raise ValueError(f"{folder} has stories already: add --force to replace them, or choose another --out")
    from redraft.train.stories import sample_stories, write_stories

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("stories"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=count)
        for written in write_stories(sample_stories(teacher, device, seed), count, folder):
            progress.update(task, completed=written)
    print(f"{count:,} stories in {folder}")
