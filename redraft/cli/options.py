"""Options that several commands share: model, seed, device, dtype, threads; and input that is parsed with clear messages."""

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from redraft.writer import Writer


def parse_int(text: str) -> int:
    """Parses a whole number. typer's own error message does not show the value."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def parse_float(text: str) -> float:
    """Parses a number. typer's own error message does not show the value."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def decode_utf8(raw: bytes, name: str) -> str:
    """Decodes the text of a file; `name` is its name in the error message."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}") from None


def read_stdin() -> str:
    """The text on stdin."""
    return decode_utf8(sys.stdin.buffer.read(), "stdin")


@contextmanager
def name_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Errors name flags in place of settings. A common word (check, seed) is a setting at the start of a sentence only."""
    try:
        yield
    except ValueError as error:
        message = re.sub(r"^\w+|\b\w+_\w+\b", lambda word: flags.get(word[0], word[0]), str(error))
        if message == str(error):
            raise
        raise ValueError(message) from None


def refuse_sudoku_model(writer: "Writer") -> None:
    """A Sudoku model knows digits only: refuses it where text is asked for."""
    from redraft.tasks.sudoku.solve import is_sudoku_model

    if is_sudoku_model(writer.model):
        raise ValueError("this model solves Sudoku and knows no words: try redraft sudoku PUZZLE, or another --model")


def check_workers(ray: str | None, workers: int | None) -> None:
    """Refuses --ray and --workers that make no sense, and --ray where Ray is missing."""
    if workers is not None and ray is None:
        raise ValueError(f"--workers {workers} needs --ray: --ray local starts them on this machine")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be above 0, got {workers}")
    if ray is not None:
        from redraft.cluster.ray_data import check_address

        check_address(ray)


def _fix_threads(threads: int | None) -> int | None:
    if threads is not None:
        from redraft.kernels.threads import fix_threads

        fix_threads(threads)
    return threads


def option(*names: str, help: str, parser: Any = None) -> Any:
    """A typer option; `parser` is parse_int or parse_float."""
    return typer.Option(*names, help=help, parser=parser, metavar={parse_int: "INT", parse_float: "FLOAT"}.get(parser))


def _threads_option(*names: str) -> Any:
    return typer.Option(
        *names,
        help="CPU threads. [OMP_NUM_THREADS, or as many as there are free cores]",
        parser=parse_int,
        metavar="INT",
        callback=_fix_threads,
    )


Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        envvar="REDRAFT_MODEL",
        help="Checkpoint folder, GGUF file, pulled model, or hub id OWNER/NAME or OWNER/NAME:Q4_K_M. [tiny, in the package]",
    ),
]
Seed = Annotated[
    int | None, option("--seed", help="The same seed gives the same text. [a random one, reported]", parser=parse_int)
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, cuda:1. [a GPU if there is one]")]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="float32, bfloat16 or float16. [as stored, float16 as bfloat16; float32 on a CPU without bf16]"
    ),
]
Threads = Annotated[int | None, _threads_option("--threads", "-t")]
LongThreads = Annotated[int | None, _threads_option("--threads")]  # for a command in which -t is another option
Quant = Annotated[
    str | None,
    typer.Option(
        "--quant", help="nvfp4, int4 or fp8: round the experts to it while loading, the other layers to fp8. [as stored]"
    ),
]
KeepBf16 = Annotated[
    bool, typer.Option("--keep-bf16", help="Attention and dense MLP are not rounded to fp8 beside 4-bit experts.")
]
VerifyWith = Annotated[
    str | None,
    typer.Option("--verify-with", help="Another checkpoint that verifies what the model drafts; same vocabulary."),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter", help="Folder of a LoRA adapter of the model, as redraft tune and peft write it; or tiny-sudoku."
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="local|ADDRESS",
        help="Work on a Ray cluster: local starts one on this machine, HOST:PORT joins a running one. [this process]",
    ),
]
Workers = Annotated[
    int | None,
    option(
        "--workers", help="Workers on the Ray cluster, each with a model. [one per GPU, or per machine]", parser=parse_int
    ),
]
Kv = Annotated[str | None, typer.Option("--kv", help="fp8: store KV caches in 8 bits, half of the memory. [as the weights]")]
GpuMemory = Annotated[
    str | None,
    typer.Option("--gpu-memory", help="Use no more GPU memory than this: 18GB, 18GiB; see docs/hardware.md. [all of it]"),
]
Context = Annotated[
    int | None,
    typer.Option("--context", help="Tokens that --gpu-memory plans for. [16384]", parser=parse_int, metavar="INT"),
]
Vision = Annotated[
    bool,
    typer.Option("--vision", help="Load the vision tower at the start, not with the first image; --gpu-memory counts it."),
]
