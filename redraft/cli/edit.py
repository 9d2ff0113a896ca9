"""The commands redraft fill FILE|- (infilling) and redraft edit FILE|- (editing in place)."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from redraft.cli.options import (
    Adapter,
    Device,
    Model,
    Seed,
    Threads,
    decode_utf8,
    name_flags,
    option,
    parse_float,
    parse_int,
    read_stdin,
    refuse_sudoku_model,
)
from redraft.cli.terminal import CanvasView, strip_control_characters
from redraft.config import write_text

if TYPE_CHECKING:
    from redraft.tasks.edit import Edited
    from redraft.tasks.infill import Filled
    from redraft.writer import Writer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Write = Annotated[bool, typer.Option("--write", "-w", help="Replace the file with the result, atomically.")]


def fill(
    file: Annotated[str, typer.Argument(help="A text file with gaps: [[ ]], or [[ 8 ]] for 8 tokens; - reads stdin.")] = "-",
    model: Model = "",
    count: Annotated[int, option("--count", "-c", help="Number of infills, the most likely first.", parser=parse_int)] = 1,
    longest: Annotated[int, option("--longest", help="Maximum tokens of a gap without a length.", parser=parse_int)] = 32,
    seed: Seed = None,
    seconds: Annotated[
        float | None, option("--seconds", help="Deadline: after this time a gap is committed as it is.", parser=parse_float)
    ] = None,
    as_json: AsJson = False,
    write: Write = False,
    device: Device = None,
    threads: Threads = None,
    adapter: Adapter = None,
) -> None:
    """Infill the gaps of a text; the text around them does not change."""
    text = read_text(file, write)
    if count < 1:
        raise ValueError(f"--count must be at least 1, got {count}")
    from redraft import writer
    from redraft.tasks.infill import parse_template

    texts = parse_template(text).texts  # checks the gaps before the model is loaded
    subject = writer.load(model or writer.DEFAULT_MODEL, device=device, adapter=adapter)
    refuse_sudoku_model(subject)
    check_longest(longest, subject.model.config.max_position_embeddings)
    console = Console(highlight=False)
    status_console = Console(stderr=True, highlight=False)
    with CanvasView(status_console, subject.tokenizer, subject.sampler.eos_token_ids) as view:
        watch = view.watch if status_console.is_terminal else None
        infills = subject.fill(text, count=count, longest=longest, seed=seed, seconds=seconds, watch=watch)
    if write:
        write_text(file, infills[0].text)
    if as_json:
        print(json.dumps([asdict(filled) for filled in infills] if count > 1 else asdict(infills[0])))
        return
    if count == 1:
        print(f"seed {infills[0].seed}", file=sys.stderr)
    for rank, filled in enumerate([] if write else infills, 1):
        if count > 1:
            blank_line = "" if rank == 1 else "\n"
            print(f"{blank_line}# {rank}: score {filled.score:.1f}, seed {filled.seed}", file=sys.stderr)
        if console.is_terminal:
            console.print(colour_gaps(texts, filled), soft_wrap=True, end="")
        else:
            sys.stdout.write(filled.text + ("\n" if count > 1 and not filled.text.endswith("\n") else ""))


def edit(
    file: Annotated[str, typer.Argument(help="A text file; - reads stdin.")] = "-",
    instruction: Annotated[
        str | None, typer.Option("--instruction", "-i", help="What to change; chat models only. [unlikely tokens]")
    ] = None,
    model: Model = "",
    strength: Annotated[
        float | None,
        option("--strength", help="Maximum share of tokens to replace, 0 to 1. [only repairs]", parser=parse_float),
    ] = None,
    seed: Seed = None,
    suggest: Annotated[bool, typer.Option("--suggest", help="Change nothing: print mistakes and their repairs.")] = False,
    as_json: AsJson = False,
    write: Write = False,
    device: Device = None,
    threads: Threads = None,
    adapter: Adapter = None,
) -> None:
    """Repair the mistakes of a text, or with --strength replace its unlikely tokens, and show the difference."""
    text = read_text(file, write)
    if suggest and (write or instruction is not None):
        raise ValueError("--suggest changes nothing: leave out --write and --instruction")
    from redraft import writer
    from redraft.tasks.edit import check_strength

    if strength is not None:
        with name_flags({"strength": "--strength"}):
            check_strength(strength)
    subject = writer.load(model or writer.DEFAULT_MODEL, device=device, adapter=adapter)
    refuse_sudoku_model(subject)
    console = Console(highlight=False)
    if suggest:
        _print_suggestions(subject, text, as_json)
        return
    with Console(stderr=True).status("editing"):
        edited = subject.edit(text, instruction, strength=strength, seed=seed)
    if write:
        write_text(file, edited.text)
    if as_json:
        print(json.dumps(asdict(edited)))
        return
    print(f"seed {edited.seed}", file=sys.stderr)
    if console.is_terminal:
        console.print(colour_diff(edited, "text" if file == "-" else file), soft_wrap=True, end="")
    elif not write:
        sys.stdout.write(edited.text)


def read_text(file: str, write: bool) -> str:
    """The text of a file, or of stdin for `-`."""
    if file == "-" and write:
        raise ValueError("--write replaces a file, but - is stdin: name a file")
    return read_stdin() if file == "-" else decode_utf8(Path(file).read_bytes(), file)


def check_longest(longest: int, context: int) -> None:
    """Refuses gaps that could not fit the model's context."""
    if not 0 < longest < context:
        raise ValueError(f"--longest must be from 1 to {context - 1}, below the model's context, got {longest}")


def colour_gaps(texts: tuple[str, ...], filled: Filled) -> Text:
    """The text with its infilled gaps in green."""
    coloured = Text()
    for text, gap in zip(texts, (*filled.gaps, ""), strict=True):
        coloured.append(strip_control_characters(text))
        coloured.append(strip_control_characters(gap), style="bold green")
    return coloured


def colour_diff(edited: Edited, name: str) -> Text:
    """The unified diff: removed lines red, added lines green."""
    styles = {"-": "red", "+": "green", "@": "cyan"}
    coloured = Text()
    for line in edited.diff(name).split("\n")[:-1]:
        coloured.append(strip_control_characters(line + "\n"), style=styles.get(line[:1], ""))
    return coloured


def _print_suggestions(subject: Writer, text: str, as_json: bool) -> None:
    suggestions = subject.suggest(text)
    if as_json:
        print(json.dumps([asdict(suggestion) for suggestion in suggestions]))
        return
    for suggestion in suggestions:
        line = text.count("\n", 0, suggestion.start) + 1
        column = suggestion.start - text.rfind("\n", 0, suggestion.start)
        alternatives = ", ".join(f"{token!r} {100 * share:.0f}%" for token, share in suggestion.alternatives)
        print(f"{line}:{column}: {suggestion.text!r} {100 * suggestion.probability:.1f}%; rather {alternatives}")
