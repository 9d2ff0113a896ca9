"""The command `redraft sudoku PUZZLE|FILE`; `main.py` registers it.

One puzzle is drawn while it settles; a file of puzzles runs in batches with a progress bar. The exact solver first makes
sure that every puzzle has exactly one solution, and a board that breaks the rules is reported as wrong.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from redraft.cli.options import Adapter, Threads
from redraft.cli.terminal import CHANGED, FRAME_SECONDS, NOISE, QUIET, defer_interrupt
from redraft.config import replace_file
from redraft.tasks.sudoku import board as boards
from redraft.tasks.sudoku import solver
from redraft.tasks.sudoku.board import Board, BoardError

if TYPE_CHECKING:
    from redraft.tasks.sudoku.solve import Solution, SolveStep

COLUMNS = ("puzzle", "board", "solved", "canvases", "forwards", "revisions", "seconds", "seed")


def sudoku(
    puzzle: Annotated[str, typer.Argument(help="81 characters (0 . * are open cells), a file of puzzles, or - for stdin.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Checkpoint folder. [sudoku, in the package]")] = "",
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same boards. [random]")] = None,
    canvases: Annotated[int, typer.Option("--canvases", help="Maximum number of canvases for a puzzle.")] = 64,
    steps: Annotated[int | None, typer.Option("--steps", help="Maximum denoising steps of a canvas. [checkpoint's]")] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Attempt again if a board breaks the rules.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per puzzle.")] = False,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Write the results here instead of printing them.")] = None,
    visual: Annotated[
        bool | None, typer.Option("--visual/--no-visual", help="Draw the board while it settles. [on a terminal]")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda. [a GPU if there is one]")] = None,
    threads: Threads = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    adapter: Adapter = None,
) -> None:
    """Solve Sudoku by diffusion: one puzzle, drawn while it settles, or a file of puzzles."""
    located_puzzles = read_argument(puzzle)
    for where, board in located_puzzles:
        with _prefix_errors(where):
            solver.solve(board)  # raises BoardError unless there is exactly one solution
    from redraft.writer import SUDOKU_MODEL, load, new_seed

    writer = load(model or SUDOKU_MODEL, device=device, dtype=dtype, adapter=adapter)
    puzzles = [board for _, board in located_puzzles]
    seed = seed if seed is not None else new_seed()
    if out and not Path(out).absolute().parent.is_dir():
        raise ValueError(f"there is no folder {str(Path(out).parent)!r} to write {out!r} into")
    events = writer.sudoku_events(puzzles, seed=seed, canvases=canvases, check=check, max_steps=steps)
    console = Console(highlight=False)
    draws_board = not as_json and not out and (console.is_terminal if visual is None else visual)
    if len(puzzles) == 1 and not as_json and not out:
        solution = draw_steps(events, puzzles[0], console) if draws_board else last_solution(events)
        _print_solution(solution, drawn=draws_board)
        solutions = [solution]
    else:
        solutions = _solve_many(events, len(puzzles), as_json, out)
    if not all(solution.solved for solution in solutions):
        raise typer.Exit(1)


# 1. The argument


def read_argument(text: str) -> list[tuple[str, Board]]:
    """Reads puzzles from a file, from stdin, or from the argument itself.

    Returns (location, puzzle); a lone one has location "".
    """
    if text == "-":
        return _read_puzzles(sys.stdin.buffer.read(), "stdin")
    if is_file(text):
        return _read_puzzles(Path(text).read_bytes(), text)
    try:
        return [("", boards.parse_puzzle(text))]
    except BoardError as error:
        if any(character.isalpha() or character == "/" for character in text):
            raise BoardError(f"there is no file {text[:200]!r}, and as a puzzle: {error}") from None
        raise


def is_file(text: str) -> bool:
    """Whether the text names a file or a pipe. A folder raises BoardError."""
    try:
        exists = Path(text).exists()
        is_folder = Path(text).is_dir()
    except (OSError, ValueError):  # not a possible file name
        return False
    if text and is_folder:
        raise BoardError(f"{text!r} is a folder; give a file of puzzles")
    return bool(text) and exists


def _read_puzzles(raw: bytes, name: str) -> list[tuple[str, Board]]:
    with _prefix_errors(name):
        puzzles = list(boards.read_puzzles(raw.decode("utf-8-sig", errors="replace")))
        if not puzzles:
            raise BoardError("there is no puzzle in it")
    return [(f"{name}, line {number}", board) for number, board in puzzles]


@contextmanager
def _prefix_errors(where: str) -> Iterator[None]:
    try:
        yield
    except BoardError as error:
        raise BoardError(f"{where}: {error}" if where else str(error)) from None


# 2. One puzzle


def last_solution(events: Iterable[SolveStep | Solution]) -> Solution:
    """The solution of a lone puzzle."""
    from redraft.tasks.sudoku.solve import Solution

    *_, last = events
    assert isinstance(last, Solution)
    return last


def draw_steps(
    events: Iterable[SolveStep | Solution], puzzle: Board, console: Console, step_seconds: float = FRAME_SECONDS
) -> Solution:
    """Draws the first canvas after every step, each for `step_seconds` at least, then the final board."""
    from redraft.tasks.sudoku.solve import Solution

    before: Board | None = None
    solution: Solution | None = None
    last_frame = time.monotonic() - step_seconds
    with Live(console=console, auto_refresh=False) as live:
        for event in events:
            if isinstance(event, Solution):
                live.update(draw_board(event.board, puzzle), refresh=True)
                solution = event
                break
            digits = tuple(event.boards_NC[0].tolist())
            time.sleep(max(0.0, last_frame + step_seconds - time.monotonic()))  # else too quick to see
            last_frame = time.monotonic()
            attempt = f" · canvas {event.attempts[0] + 1}, {len(event.attempts)} at once" if event.attempts[0] else ""
            status = Text(f"step {event.step}{attempt}", QUIET)
            with defer_interrupt():
                board = draw_board(digits, puzzle, before, event.accepted_NC[0].tolist())
                live.update(Group(board, status), refresh=True)
            before = digits
    if not console.is_terminal:
        console.print()  # rich leaves the cursor at the end of the last line
    assert solution is not None
    return solution


def draw_board(board: Board, puzzle: Board, before: Board | None = None, accepted: list[bool] | None = None) -> Text:
    """Renders a board: clues bold, changed digits green, digits not accepted grey, conflicting digits red."""
    conflicting = boards.conflicting_cells(board)
    text = Text()
    for cell, digit in enumerate(board):
        row, column = divmod(cell, boards.SIZE)
        if column == 0 and row:
            text.append("\n──────┼───────┼──────\n" if row % 3 == 0 else "\n", QUIET)
        elif column:
            text.append(" │ " if column % 3 == 0 else " ", QUIET)
        style = ""
        if puzzle[cell]:
            style = "bold red" if cell in conflicting else "bold"
        elif accepted is not None and not accepted[cell]:
            style = NOISE
        elif cell in conflicting:
            style = "red"
        elif before is not None and before[cell] != digit:
            style = f"{CHANGED} reverse"
        text.append(str(digit) if digit else "·", style)
    return text


def _print_solution(solution: Solution, *, drawn: bool) -> None:
    """Prints the board, unless it was drawn, and its line to stdout; the summary goes to stderr."""
    if not drawn:
        print(boards.to_grid(solution.board))
    print(boards.to_line(solution.board))
    print(summarize(solution), file=sys.stderr)


def summarize(solution: Solution) -> str:
    """Says whether the board is right, and its cost."""
    state = "solved" if solution.solved else "WRONG: this board breaks the rules"
    canvases = f", {solution.canvases} canvases" if solution.canvases > 1 else ""
    return (
        f"{state} · {solution.forwards} steps{canvases}, {solution.revisions} revisions, {solution.seconds:.2f} s · "
        f"seed {solution.seed}"
    )


# 3. Many puzzles


def _solve_many(events: Iterable[SolveStep | Solution], count: int, as_json: bool, out: str | None) -> list[Solution]:
    """Writes results in the order of the puzzles, each as soon as the ones before it are done; progress goes to stderr."""
    from redraft.tasks.sudoku.solve import Solution

    console = Console(stderr=True, highlight=False)
    solutions: list[Solution] = []
    waiting: dict[int, Solution] = {}
    start_time = time.perf_counter()
    with _open_output(out) as write, _progress_bar(console, count) as show:
        for event in events:
            if not isinstance(event, Solution):
                continue
            waiting[event.number] = event
            while len(solutions) in waiting:
                solution = waiting.pop(len(solutions))
                if not solutions and not as_json:
                    write(",".join(COLUMNS))
                solutions.append(solution)
                write(_format_solution(solution, as_json))
            solved = sum(solution.solved for solution in solutions)
            show(len(solutions) + len(waiting), f"{solved} of {len(solutions)} solved")
    seconds = time.perf_counter() - start_time
    solved = sum(solution.solved for solution in solutions)
    steps = sum(solution.forwards for solution in solutions) / count
    wrong = f", {count - solved} WRONG" if solved < count else ""
    rate = f"{count / seconds:.1f} puzzles a second, {steps:.1f} steps each"
    print(f"{solved} of {count} solved{wrong} · {rate}", file=sys.stderr)
    return solutions


def _format_solution(solution: Solution, as_json: bool) -> str:
    record = asdict(solution) | {"puzzle": boards.to_line(solution.puzzle), "board": boards.to_line(solution.board)}
    record["seconds"] = round(solution.seconds, 3)
    if as_json:
        return json.dumps(record)
    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow(str(record[name]).lower() for name in COLUMNS)
    return row.getvalue()


@contextmanager
def _open_output(out: str | None) -> Iterator[Callable[[str], None]]:
    """Yields a function that writes a line. A file gets its name when all lines are in it."""
    if out is None:
        yield lambda text: print(text, flush=True)
        return
    with replace_file(out, keep_unfinished=True) as file:
        try:
            yield lambda text: print(text, file=file, flush=True)
        except BaseException:
            if file.tell():
                print(f"the results so far are in {file.name}", file=sys.stderr)
            raise


@contextmanager
def _progress_bar(console: Console, count: int) -> Iterator[Callable[[int, str], None]]:
    if not console.is_terminal:
        yield lambda done, text: None
        return
    columns: Any = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=count)
        yield lambda done, text: progress.update(task, completed=done, description=text)
