"""The commands for texts that are there: redraft fill FILE|-, redraft edit FILE|-. `cli.py` makes them commands."""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from redraft import writer
from redraft.cli.options import Device, Model, Seed, Threads, number, option, whole
from redraft.cli.terminal import CanvasView, harmless
from redraft.tasks.edit import DEFAULT_EDIT_STRENGTH, Edited, check
from redraft.tasks.infill import Filled, parse_template

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Write = Annotated[bool, typer.Option("--write", "-w", help="Replace the file, at once or not at all.")]


def fill(
    file: Annotated[str, typer.Argument(help="A file with holes, [[ ]] or [[ 8 ]] for 8 tokens; - reads stdin.")] = "-",
    model: Model = "",
    count: Annotated[int, option("--count", "-c", help="Fills, the likeliest first.", parser=whole)] = 1,
    longest: Annotated[int, option("--longest", help="Most tokens of a hole without a length.", parser=whole)] = 32,
    seed: Seed = None,
    seconds: Annotated[float | None, option("--seconds", help="Take a hole as it is after so long.", parser=number)] = None,
    as_json: AsJson = False,
    write: Write = False,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Fill the holes of a text; everything else comes back as it was."""
    text = given(file, write)
    parts = parse_template(text).texts  # a mistake is told before the model is loaded
    subject, console = writer.load(model or writer.DEFAULT_MODEL, device=device), Console(highlight=False)
    beside = Console(stderr=True, highlight=False)
    with CanvasView(beside, subject.tokenizer, subject.sampler.eos_token_ids) as view:
        watch = view.watch if beside.is_terminal else None
        found = subject.fill(text, count=count, longest=longest, seed=seed, seconds=seconds, watch=watch)
    if write:
        replace(Path(file), found[0].text)
    if as_json:
        print(json.dumps([asdict(one) for one in found] if count > 1 else asdict(found[0])))
        return
    for at, one in enumerate([] if write else found):
        if count > 1:
            print(f"{'' if at == 0 else chr(10)}# {at + 1}: score {one.score:.1f}, seed {one.seed}", file=sys.stderr)
        if console.is_terminal:
            console.print(coloured(parts, one), soft_wrap=True, end="")
        else:
            sys.stdout.write(one.text + ("\n" if count > 1 and not one.text.endswith("\n") else ""))


def edit(
    file: Annotated[str, typer.Argument(help="A text file; - reads stdin.")] = "-",
    instruction: Annotated[
        str | None, typer.Option("--instruction", "-i", help="What to change, for a model that chats. [what it doubts]")
    ] = None,
    model: Model = "",
    strength: Annotated[
        float, option("--strength", help="Share of tokens that may change, 0 to 1.", parser=number)
    ] = DEFAULT_EDIT_STRENGTH,
    seed: Seed = None,
    suggest: Annotated[bool, typer.Option("--suggest", help="Change nothing: print what it doubts, line by line.")] = False,
    as_json: AsJson = False,
    write: Write = False,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Redraft a text in place where the model doubts it, and show the difference."""
    text = given(file, write)
    if suggest and (write or instruction is not None):
        raise ValueError("--suggest changes nothing: it goes with neither --write nor --instruction")
    check(strength)
    subject, console = writer.load(model or writer.DEFAULT_MODEL, device=device), Console(highlight=False)
    if suggest:
        _print_suggestions(subject, text, as_json)
        return
    with Console(stderr=True).status("editing"):
        found = subject.edit(text, instruction, strength=strength, seed=seed)
    if write:
        replace(Path(file), found.text)
    if as_json:
        print(json.dumps(asdict(found)))
    elif console.is_terminal:
        console.print(shown(found, "text" if file == "-" else file), soft_wrap=True, end="")
    elif not write:
        sys.stdout.write(found.text)


def given(file: str, write: bool) -> str:
    """The text of a file, or of stdin."""
    if file == "-" and write:
        raise ValueError("--write replaces a file, and - is none")
    raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}") from None


def replace(path: Path, text: str) -> None:
    """The file with another text: written beside it, then put in its place, with its permissions."""
    path = path.resolve()  # a link stays a link
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(text.encode("utf-8"))
        os.chmod(name, path.stat().st_mode & 0o7777)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def coloured(parts: tuple[str, ...], filled: Filled) -> Text:
    """The text as it was, what was filled in green."""
    found = Text()
    for part, hole in zip(parts, (*filled.gaps, ""), strict=True):
        found.append(harmless(part))
        found.append(harmless(hole), style="bold green")
    return found


def shown(edited: Edited, name: str) -> Text:
    """The difference, lines that went red and lines that came green."""
    styles, found = {"-": "red", "+": "green", "@": "cyan"}, Text()
    for line in edited.diff(name).split("\n")[:-1]:
        found.append(harmless(line + "\n"), style=styles.get(line[:1], ""))
    return found


def _print_suggestions(subject: writer.Writer, text: str, as_json: bool) -> None:
    found = subject.suggest(text)
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return
    for one in found:
        line, column = text.count("\n", 0, one.start) + 1, one.start - text.rfind("\n", 0, one.start)
        rather = ", ".join(f"{other!r} {100 * share:.0f}%" for other, share in one.alternatives)
        print(f"{line}:{column}: {one.text!r} {100 * one.probability:.1f}%; rather {rather}")
