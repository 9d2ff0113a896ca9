"""The command redraft demo: a Sudoku and a story, each drawn while it settles, with a line that says what was seen.

In a pipe it prints the solved board and the story alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from redraft.cli.options import Device, Threads, option, parse_int
from redraft.cli.sudoku import draw_steps, last_solution
from redraft.cli.terminal import QUIET, CanvasView
from redraft.diffusion.events import Finished
from redraft.tasks.sudoku import board as boards
from redraft.tasks.text_events import TextCommitted, TextEvent

if TYPE_CHECKING:
    from redraft.writer import Writer

# By Arto Inkala, who called it the hardest. It is in none of the lists that the model was trained on. With the seeds 1, 2
# and 3 it took 110, 7 and 26 steps.
PUZZLE = "800000000003600000070090200050007000000045700000100030001000068008500010090000400"
PUZZLE_SEED = 2
PROMPT = "Once upon a time"
MAX_TOKENS = 160
STEP_SECONDS = 0.3  # a step on the board is shown for so long: the run itself is too quick to see
BOARD_SECONDS = 3.0  # at most, for all steps


def demo(
    seed: Annotated[int, option("--seed", help="Another seed gives another story.", parser=parse_int)] = 1,
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Watch text diffusion: a Sudoku is solved, then a story is written, by the two models that ship."""
    from redraft import writer

    console = Console(highlight=False)
    show_sudoku(writer.load(writer.SUDOKU_MODEL, device=device, dtype="float32"), console)
    storyteller = writer.load(device=device)
    show_story(storyteller, storyteller.stream(PROMPT, seed=seed, max_tokens=MAX_TOKENS), console)


def show_sudoku(solver: Writer, console: Console) -> None:
    """Solves the puzzle at full speed, then draws its steps slowly."""
    puzzle = boards.parse_puzzle(PUZZLE)
    events = list(solver.sudoku_events([puzzle], seed=PUZZLE_SEED))
    if not console.is_terminal:
        print(boards.to_grid(last_solution(events).board), end="\n\n")
        return
    solution = draw_steps(events, puzzle, console, min(STEP_SECONDS, BOARD_SECONDS / len(events)))
    console.print(
        f"{'Solved' if solution.solved else 'NOT solved'}: the {puzzle.count(0)} open cells changed together, in "
        f"{solution.forwards} steps and {solution.seconds:.2f} s (shown slower).\n",
        style=QUIET,
    )


def show_story(storyteller: Writer, events: Iterator[TextEvent], console: Console) -> None:
    """Draws a story while it settles."""
    if not console.is_terminal:
        print(PROMPT + "".join(event.text for event in events if isinstance(event, TextCommitted)))
        return
    with CanvasView(console, storyteller.tokenizer, storyteller.sampler.eos_token_ids, prompt=PROMPT) as view:
        for event in view.show(events):
            if isinstance(event, Finished):
                stats = event.stats[0]
    console.print(
        f"Written: {stats.new_tokens} tokens in {stats.forwards} forwards and {stats.seconds:.1f} s: a canvas is drafted "
        "at once, then checked from the left.",
        style=QUIET,
    )
