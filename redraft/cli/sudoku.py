"""The command redraft sudoku PUZZLE|FILE.

One puzzle is drawn while it is denoised; a file of puzzles runs in batches with a progress bar. The exact solver checks first
that a puzzle has exactly one solution; the command says so when the model's board is not that solution.
"""

import csv
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from redraft.cli.terminal import CHANGED, FRAME_SECONDS, NOISE, QUIET, defer_interrupt
from redraft.tasks.sudoku import board as boards
from redraft.tasks.sudoku import solver
from redraft.tasks.sudoku.board import Board, BoardError
from redraft.tasks.sudoku.solve import Pass, Solution
from redraft.writer import SUDOKU_MODEL, load, new_seed

COLUMNS = ("puzzle", "board", "solved", "canvases", "forwards", "revisions", "seconds", "seed")


def sudoku(
    puzzle: Annotated[str, typer.Argument(help="81 characters (0 . * are open cells), a file of puzzles, or - for stdin.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Checkpoint folder. [sudoku, in the package]")] = "",
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same boards. [a random one]")] = None,
    canvases: Annotated[int, typer.Option("--canvases", help="Maximum canvases per puzzle.")] = 64,
    steps: Annotated[int | None, typer.Option("--steps", help="Maximum denoising steps per canvas. [checkpoint's]")] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Try again when a board breaks the rules of Sudoku.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per puzzle.")] = False,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Write the results here instead of printing them.")] = None,
    visual: Annotated[
        bool | None, typer.Option("--visual/--no-visual", help="Draw the board as it settles. [on a terminal]")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda. [a GPU if there is one]")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
) -> None:
    """Solve one Sudoku puzzle and draw its canvas, or solve a file of puzzles."""
    numbered = given(puzzle)
    for where, one in numbered:
        with _named(where):
            solver.solve(one)  # exactly one solution, or a sentence
    writer = load(model or SUDOKU_MODEL, device=device, dtype=dtype)
    puzzles = [one for _, one in numbered]
    seed = seed if seed is not None else new_seed()
    if out and not Path(out).absolute().parent.is_dir():
        raise ValueError(f"there is no folder {str(Path(out).parent)!r} to write {out!r} into")
    events = writer.sudoku_events(puzzles, seed=seed, canvases=canvases, check=check, max_steps=steps)
    console = Console(highlight=False)
    drawing = not as_json and not out and (console.is_terminal if visual is None else visual)
    if len(puzzles) == 1 and not as_json and not out:
        found = [_draw(events, puzzles[0], console) if drawing else _last(events)]
        _print_solution(found[0], drawn=drawing)
    else:
        found = _many(events, len(puzzles), as_json, out)
    if not all(solution.solved for solution in found):
        raise typer.Exit(1)


# 1. Read puzzles


def given(text: str) -> list[tuple[str, Board]]:
    """Puzzles of an argument: a file's, stdin's, or the argument itself. Each with where it stands, empty for a lone one."""
    if text == "-":
        return _read(sys.stdin.buffer.read(), "stdin")
    if is_file(text):
        return _read(Path(text).read_bytes(), text)
    try:
        return [("", boards.checked(text))]
    except BoardError as error:
        if any(character.isalpha() or character == "/" for character in text):
            raise BoardError(f"there is no file {text[:200]!r}, and as a puzzle: {error}") from None
        raise


def is_file(text: str) -> bool:
    """Whether something to read lies there; a pipe does, too."""
    try:
        exists, folder = Path(text).exists(), Path(text).is_dir()
    except (OSError, ValueError):  # no name a file could have
        return False
    if text and folder:
        raise BoardError(f"{text!r} is a folder; give a file of puzzles")
    return bool(text) and exists


def _read(raw: bytes, name: str) -> list[tuple[str, Board]]:
    with _named(name):
        found = list(boards.read_many(raw.decode("utf-8-sig", errors="replace")))
        if not found:
            raise BoardError("there is no puzzle in it")
    return [(f"{name}, line {number}", one) for number, one in found]


@contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except BoardError as error:
        raise BoardError(f"{where}: {error}" if where else str(error)) from None


# 2. One puzzle


def _last(events: Iterable[Pass | Solution]) -> Solution:
    *_, last = events
    assert isinstance(last, Solution)
    return last


def _draw(events: Iterable[Pass | Solution], puzzle: Board, console: Console) -> Solution:
    """The first canvas after every pass, then the board that is left."""
    before: Board | None = None
    shown = time.monotonic() - FRAME_SECONDS
    with Live(console=console, auto_refresh=False) as live:
        for event in events:
            if isinstance(event, Solution):
                live.update(picture(event.board, puzzle), refresh=True)
                found = event
                break
            digits = tuple(event.boards_NC[0].tolist())
            time.sleep(max(0.0, shown + FRAME_SECONDS - time.monotonic()))  # too quick to be seen otherwise
            shown = time.monotonic()
            tried = f" · canvas {event.tries[0] + 1}, {len(event.tries)} at once" if event.tries[0] else ""
            meter = Text(f"step {event.step}{tried}", QUIET)
            with defer_interrupt():
                page = picture(digits, puzzle, before, event.accepted_NC[0].tolist())
                live.update(Group(page, meter), refresh=True)
            before = digits
    if not console.is_terminal:
        console.print()  # rich leaves the cursor at the end of the last line
    return found


def picture(board: Board, puzzle: Board, before: Board | None = None, accepted: list[bool] | None = None) -> Text:
    """A board: clues bold, what changed green, what is not accepted grey, cells that break the rules red."""
    wrong, page = boards.clashing(board), Text()
    for cell, digit in enumerate(board):
        row, column = divmod(cell, boards.SIZE)
        if column == 0 and row:
            page.append("\n──────┼───────┼──────\n" if row % 3 == 0 else "\n", QUIET)
        elif column:
            page.append(" │ " if column % 3 == 0 else " ", QUIET)
        style = ""
        if puzzle[cell]:
            style = "bold red" if cell in wrong else "bold"
        elif accepted is not None and not accepted[cell]:
            style = NOISE
        elif cell in wrong:
            style = "red"
        elif before is not None and before[cell] != digit:
            style = f"{CHANGED} reverse"
        page.append(str(digit) if digit else "·", style)
    return page


def _print_solution(solution: Solution, *, drawn: bool) -> None:
    """Prints the board (unless drawn) and its line to stdout; whether it is right and its statistics to stderr."""
    if not drawn:
        print(boards.grid(solution.board))
    print(boards.line(solution.board))
    print(sentence(solution), file=sys.stderr)


def sentence(solution: Solution) -> str:
    """Right or wrong, and what it took."""
    state = "solved" if solution.solved else "WRONG: this board breaks the rules"
    canvases = f", {solution.canvases} canvases" if solution.canvases > 1 else ""
    return (
        f"{state} · {solution.forwards} passes{canvases}, {solution.revisions} revisions, {solution.seconds:.2f} s · "
        f"seed {solution.seed}"
    )


# 3. Many


def _many(events: Iterable[Pass | Solution], count: int, as_json: bool, out: str | None) -> list[Solution]:
    """Results in the order of the puzzles, each as soon as those before it are done; a bar and a summary on stderr."""
    console = Console(stderr=True, highlight=False)
    found: list[Solution] = []
    waiting: dict[int, Solution] = {}
    began = time.perf_counter()
    with _sink(out) as write, _bar(console, count) as bar:
        if not as_json:
            write(",".join(COLUMNS))
        for event in events:
            if not isinstance(event, Solution):
                continue
            waiting[event.number] = event
            while len(found) in waiting:
                solution = waiting.pop(len(found))
                found.append(solution)
                write(_line(solution, as_json))
            right = sum(s.solved for s in found)
            bar(len(found) + len(waiting), f"{right} of {len(found)} solved")
    seconds, right = time.perf_counter() - began, sum(solution.solved for solution in found)
    passes = sum(solution.forwards for solution in found) / count
    wrong = f", {count - right} WRONG" if right < count else ""
    rate = f"{count / seconds:.1f} puzzles a second, {passes:.1f} passes each"
    print(f"{right} of {count} solved{wrong} · {rate}", file=sys.stderr)
    return found


def _line(solution: Solution, as_json: bool) -> str:
    record = asdict(solution) | {"puzzle": boards.line(solution.puzzle), "board": boards.line(solution.board)}
    record["seconds"] = round(solution.seconds, 3)
    if as_json:
        return json.dumps(record)
    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow(str(record[name]).lower() for name in COLUMNS)
    return row.getvalue()


@contextmanager
def _sink(out: str | None) -> Iterator[Callable[[str], None]]:
    if out is None:
        yield lambda text: print(text, flush=True)
        return
    with Path(out).open("w", encoding="utf-8") as file:
        yield lambda text: print(text, file=file, flush=True)


@contextmanager
def _bar(console: Console, count: int) -> Iterator[Callable[[int, str], None]]:
    if not console.is_terminal:
        yield lambda done, text: None
        return
    columns: Any = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=count)
        yield lambda done, text: progress.update(task, completed=done, description=text)
