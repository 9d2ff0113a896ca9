"""What commands are told in the same way: numbers with messages of their own, the model, the seed, the device."""

from typing import Annotated, Any

import typer


def whole(text: str) -> int:
    """A whole number from the command line; typer's own message leaves out what was typed."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """A number from the command line."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def _fix_threads(threads: int | None) -> int | None:
    if threads is not None:
        from redraft.kernels.threads import fix_threads

        fix_threads(threads)
    return threads


def option(*names: str, help: str, parser: Any = None) -> Any:
    """An option, read by one of these."""
    return typer.Option(*names, help=help, parser=parser, metavar={whole: "INT", number: "FLOAT"}.get(parser))


Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", envvar="REDRAFT_MODEL", help="Checkpoint folder, or hub id OWNER/NAME. [tiny, in the package]"
    ),
]
Seed = Annotated[
    int | None, option("--seed", help="The same seed gives the same text. [a fresh one, reported]", parser=whole)
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1. [a GPU if there is one]")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32 or bfloat16. [as stored; float32 on a CPU without bf16]")
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        help="CPU threads. [OMP_NUM_THREADS, or as many as there are free cores]",
        parser=whole,
        metavar="INT",
        callback=_fix_threads,
    ),
]
