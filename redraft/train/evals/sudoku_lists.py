"""How many puzzles a model solves: by list and by how many guesses they need, on one canvas and with check and restarts.

A model that reads from left to right, of the same size and from the same puzzles, is asked for comparison: it writes the
solution cell after cell, the likeliest digit each time, clues copied for it. Shapes: B puzzles, C = 81 cells.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.diffusion.generate import generate
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.tasks.sudoku import encoding, generator, solve, solver, text_encoding
from redraft.tasks.sudoku.board import CELLS, Board, solves
from redraft.tasks.sudoku.solve import Solution
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.sudoku_task import left_to_right, read_puzzles

LISTS = ("17clue", "diabolical", "top1465", "hardest11")
GENERATED = "generated"  # puzzles of 30 clues and more
SEED = 20_261_115  # of the generated ones; not the training's
BINS = (0, 1, 10, 100)  # guesses, from


@dataclass(frozen=True)
class Listed:
    """A list of puzzles with their solutions."""

    name: str
    puzzles: list[Board]
    solutions: list[Board]


def generated(count: int, most: int = 45) -> Listed:
    """Puzzles of 30 clues and more."""
    chance = torch.Generator().manual_seed(SEED)
    full_NC = generator.full_boards(count, chance)
    clues_N = torch.randint(30, most + 1, (count,), generator=chance)
    puzzles_NC = generator.dig(full_NC, clues_N, chance)
    return Listed(GENERATED, [tuple(board) for board in puzzles_NC.tolist()], [tuple(board) for board in full_NC.tolist()])


def read(folder: Path, name: str, count: int) -> Listed:
    """The first puzzles of an evaluation list."""
    puzzles, solutions = (column[:count].tolist() for column in read_puzzles(str(folder / f"{name}_eval.csv.xz")))
    return Listed(name, [tuple(board) for board in puzzles], [tuple(board) for board in solutions])


def score(
    model: DiffusionGemma, listed: Listed, sampler: SamplerConfig, *, canvases: int, rows: int, tell: Callable[[int], None]
) -> dict[str, Any]:
    """One list: one canvas without check, check and restarts, forwards, by guesses, and how many were right at each pass.

    Before that one canvas that is seen the same way throughout, which is what `generate` does, here or elsewhere.
    """
    straight = solve.solve(model, listed.puzzles, sampler, seed=0, check=False, turn=0, rows=rows)
    still = sum(event.solved for event in straight if isinstance(event, Solution))
    solutions_NC = torch.tensor(listed.solutions, device=model.device)
    right_at = torch.zeros(len(listed.puzzles), sampler.max_steps + 1, dtype=torch.bool, device=model.device)
    cells, first_steps, found = torch.zeros(len(listed.puzzles)), torch.zeros(len(listed.puzzles)), []
    events = solve.solve(model, listed.puzzles, sampler, seed=0, canvases=canvases, check=canvases > 1, rows=rows)
    for event in events:
        if isinstance(event, Solution):
            found.append(event)
            tell(len(found))
            continue
        first = [row for row, attempt in enumerate(event.tries) if attempt == 0]
        if first:
            whose = torch.tensor([event.numbers[row] for row in first], device=model.device)
            same = event.boards_NC[first] == solutions_NC[whose]
            right_at[whose, event.step :] = same.all(dim=-1)[:, None]  # what it is when it leaves, it stays
            cells[whose.cpu()] = same.float().mean(dim=-1).cpu()
            first_steps[whose.cpu()] = float(event.step)
    found.sort(key=lambda solution: solution.number)
    whole = _summary(listed, found, right_at.float().mean(dim=0)[1:].tolist(), cells, first_steps)
    return {"puzzles": len(found), "one_canvas_not_turned": still / len(found), **whole}


def _summary(
    listed: Listed, found: Sequence[Solution], by_pass: list[float], cells: Tensor, steps: Tensor
) -> dict[str, Any]:
    count = len(found)
    guesses = [solver.rating(solution.puzzle) for solution in found]
    bins = {}
    for low, high in zip(BINS, (*BINS[1:], None), strict=True):
        inside = [s for s, g in zip(found, guesses, strict=True) if g >= low and (high is None or g < high)]
        if inside:
            name = f"{low}" if high == low + 1 else f"{low} to {high - 1}" if high else f"{low} and more"
            bins[name] = {
                "puzzles": len(inside),
                "one_canvas": sum(s.at_first for s in inside) / len(inside),
                "checked": sum(s.solved for s in inside) / len(inside),
            }
    kept = sum(all(c in (0, d) for c, d in zip(s.puzzle, s.board, strict=True)) for s in found)
    return {
        "puzzles": count,
        "one_canvas": sum(s.at_first for s in found) / count,
        "cells": float(cells.mean()),
        "clues_kept": kept / count,
        "forwards_one_canvas": float(steps.mean()),
        "forwards_one_canvas_most": int(steps.max()),
        "checked": sum(solves(s.board, s.puzzle) for s in found) / count,
        "canvases": sum(s.canvases for s in found) / count,
        "forwards_checked": sum(s.forwards for s in found) / count,
        "by_guesses": bins,
        "right_after": [round(share, 4) for share in by_pass],
    }


@torch.inference_mode()
def spoken(model: DiffusionGemma, listed: Listed, rows: int) -> dict[str, Any]:
    """The same list by a model that was trained left to right: the likeliest digit in every open cell, in reading order."""
    right, cells = 0, 0.0
    digits = slice(encoding.DIGITS.start, encoding.DIGITS.stop)
    for begin in range(0, len(listed.puzzles), rows):
        puzzle_BC = torch.tensor(listed.puzzles[begin : begin + rows], device=model.device)
        solution_BC = torch.tensor(listed.solutions[begin : begin + rows], device=model.device)
        ids_BS = left_to_right(puzzle_BC, puzzle_BC[:, :0], model.config.bos_token_id)
        cache = model.new_cache(len(puzzle_BC), ids_BS.shape[1] + CELLS)
        hidden_BSD, said = model.encode(ids_BS, cache), []
        for cell in range(CELLS):
            best_B = model.head(hidden_BSD[:, -1])[:, digits].argmax(dim=-1) + 1
            digit_B = torch.where(puzzle_BC[:, cell] > 0, puzzle_BC[:, cell], best_B)
            said.append(digit_B)
            hidden_BSD = model.encode(digit_B[:, None] + (encoding.DIGITS.start - 1), cache)
        same_BC = torch.stack(said, dim=1) == solution_BC
        right, cells = right + int(same_BC.all(dim=-1).sum()), cells + float(same_BC.float().mean(dim=-1).sum())
    count = len(listed.puzzles)
    return {"puzzles": count, "exact": right / count, "cells": cells / count, "forwards": CELLS}


def written(
    model: DiffusionGemma, tokenizer: Tokenizer, listed: Listed, sampler: SamplerConfig, rows: int
) -> dict[str, Any]:
    """The same list by a model that writes: the puzzle as a prompt, the solution as text. Clues are not held."""
    right = kept = read = 0
    steps: list[int] = []
    for begin in range(0, len(listed.puzzles), rows):
        puzzles, solutions = listed.puzzles[begin : begin + rows], listed.solutions[begin : begin + rows]
        prompts = [tokenizer.encode_prompt(text_encoding.prompt(puzzle)) for puzzle in puzzles]
        seeds = range(begin, begin + len(puzzles))
        *_, last = generate(model, prompts, sampler, seeds=list(seeds))
        for row, (puzzle, solution) in enumerate(zip(puzzles, solutions, strict=True)):
            board = text_encoding.read(tokenizer.decode(last.ids_BT[row].tolist()))
            read += board is not None
            right += board == solution
            kept += board is not None and all(c in (0, d) for c, d in zip(puzzle, board, strict=True))
            steps.append(last.stats[row].steps)
    count = len(listed.puzzles)
    shares = {"boards": read / count, "clues_kept": kept / count, "exact": right / count}
    return {"puzzles": count, **shares, "steps": sum(steps) / count}


def draw(found: dict[str, dict[str, Any]], picture: Path) -> None:
    """Boards right against forwards, one canvas, a line for each list."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install 'redraft[train]'") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, scores in found.items():
        shares = scores["right_after"]
        axes.plot(range(1, len(shares) + 1), [100 * share for share in shares], label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("forwards, one canvas")
    axes.set_ylabel("boards right, %")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)
