"""Sudoku scores: the share of puzzles a model solves, by list and by difficulty, on one canvas and with check and restarts.

For comparison, an autoregressive model of the same size and trained on the same puzzles writes the solution cell by cell,
the likeliest digit each time; clues are copied for it. Shapes: B puzzles, C = 81 cells.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.diffusion.generate import generate
from redraft.model.backbone import Backbone
from redraft.model.lora import Adapter
from redraft.tasks.sudoku import encoding, generator, solve, solver
from redraft.tasks.sudoku.board import CELLS, Board, is_solution
from redraft.tasks.sudoku.solve import Solution
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.sudoku_data import read_puzzles
from redraft.train.sudoku_task import autoregressive_ids

LISTS = ("17clue", "diabolical", "top1465", "hardest11")
SEED = 20_261_115  # of the generated puzzles; training uses another
GUESS_BINS = (0, 1, 10, 100)  # lower bounds of the difficulty classes, in guesses of the exact solver


@dataclass(frozen=True)
class PuzzleList:
    """A named list of puzzles with their solutions."""

    name: str
    puzzles: list[Board]
    solutions: list[Board]


def generate_list(count: int, max_clues: int = 45) -> PuzzleList:
    """Generates puzzles of 30 to `max_clues` clues."""
    rng = torch.Generator().manual_seed(SEED)
    full_NC = generator.full_boards(count, rng)
    clues_N = torch.randint(30, max_clues + 1, (count,), generator=rng)
    puzzles_NC = generator.remove_clues(full_NC, clues_N, rng)
    return PuzzleList("generated", [tuple(b) for b in puzzles_NC.tolist()], [tuple(b) for b in full_NC.tolist()])


def read_list(folder: Path, name: str, count: int) -> PuzzleList:
    """Reads the first puzzles of an evaluation list."""
    puzzles, solutions = (column[:count].tolist() for column in read_puzzles(str(folder / f"{name}_eval.csv.xz")))
    return PuzzleList(name, [tuple(board) for board in puzzles], [tuple(board) for board in solutions])


def score(
    model: Backbone,
    puzzle_list: PuzzleList,
    sampler: SamplerConfig,
    *,
    canvases: int,
    rows: int,
    progress: Callable[[int], None],
) -> dict[str, Any]:
    """Scores one list: one canvas without symmetries, which is what `generate` computes; one canvas; check and restarts.

    Also the forwards, the scores by difficulty, and the share of right boards after each step of the first canvas.
    """
    puzzles = puzzle_list.puzzles
    plain_events = solve.solve(model, puzzles, sampler, seed=0, check=False, symmetry_every=0, rows=rows)
    solved_plain = sum(event.solved for event in plain_events if isinstance(event, Solution))
    solutions_NC = torch.tensor(puzzle_list.solutions, device=model.device)
    is_right_after = torch.zeros(len(puzzles), sampler.max_steps + 1, dtype=torch.bool, device=model.device)
    right_cells = torch.zeros(len(puzzles))
    first_steps = torch.zeros(len(puzzles))
    solutions: list[Solution] = []
    for event in solve.solve(model, puzzles, sampler, seed=0, canvases=canvases, check=canvases > 1, rows=rows):
        if isinstance(event, Solution):
            solutions.append(event)
            progress(len(solutions))
            continue
        first_rows = [row for row, attempt in enumerate(event.attempts) if attempt == 0]
        if first_rows:
            numbers = torch.tensor([event.numbers[row] for row in first_rows], device=model.device)
            is_right_NC = event.boards_NC[first_rows] == solutions_NC[numbers]
            is_right_after[numbers, event.step :] = is_right_NC.all(dim=-1)[:, None]  # a finished canvas stays as it is
            right_cells[numbers.cpu()] = is_right_NC.float().mean(dim=-1).cpu()
            first_steps[numbers.cpu()] = float(event.step)
    solutions.sort(key=lambda solution: solution.number)
    right_after = is_right_after.float().mean(dim=0)[1:].tolist()
    summary = _summarize(solutions, right_after, right_cells, first_steps)
    return {"puzzles": len(solutions), "one_canvas_not_turned": solved_plain / len(solutions), **summary}


def _summarize(
    solutions: Sequence[Solution], right_after: list[float], right_cells: Tensor, first_steps: Tensor
) -> dict[str, Any]:
    count = len(solutions)
    keeps_clues = [all(c in (0, d) for c, d in zip(s.puzzle, s.board, strict=True)) for s in solutions]
    return {
        "puzzles": count,
        "one_canvas": sum(s.at_first for s in solutions) / count,
        "cells": float(right_cells.mean()),
        "clues_kept": sum(keeps_clues) / count,
        "forwards_one_canvas": float(first_steps.mean()),
        "forwards_one_canvas_most": int(first_steps.max()),
        "checked": sum(is_solution(s.board, s.puzzle) for s in solutions) / count,
        "canvases": sum(s.canvases for s in solutions) / count,
        "forwards_checked": sum(s.forwards for s in solutions) / count,
        "by_guesses": _score_by_guesses(solutions),
        "right_after": [round(share, 4) for share in right_after],
    }


def _score_by_guesses(solutions: Sequence[Solution]) -> dict[str, dict[str, Any]]:
    """Scores by the number of guesses that the exact solver needs."""
    guesses = [solver.count_guesses(solution.puzzle) for solution in solutions]
    scores = {}
    for low, high in zip(GUESS_BINS, (*GUESS_BINS[1:], None), strict=True):
        inside = [s for s, g in zip(solutions, guesses, strict=True) if g >= low and (high is None or g < high)]
        if inside:
            name = f"{low} and more" if high is None else f"{low}" if high == low + 1 else f"{low} to {high - 1}"
            scores[name] = {
                "puzzles": len(inside),
                "one_canvas": sum(s.at_first for s in inside) / len(inside),
                "checked": sum(s.solved for s in inside) / len(inside),
            }
    return scores


@torch.inference_mode()
def score_autoregressive(model: Backbone, puzzle_list: PuzzleList, rows: int) -> dict[str, Any]:
    """Scores the list with an autoregressive model: the likeliest digit in every open cell, in reading order."""
    exact = 0
    right_cells = 0.0
    digits = slice(encoding.DIGITS.start, encoding.DIGITS.stop)
    for begin in range(0, len(puzzle_list.puzzles), rows):
        puzzle_BC = torch.tensor(puzzle_list.puzzles[begin : begin + rows], device=model.device)
        solution_BC = torch.tensor(puzzle_list.solutions[begin : begin + rows], device=model.device)
        ids_BS = autoregressive_ids(puzzle_BC, puzzle_BC[:, :0], model.config.bos_token_id)
        cache = model.new_cache(len(puzzle_BC), ids_BS.shape[1] + CELLS)
        hidden_BSD = model.encode(ids_BS, cache)
        columns = []
        for cell in range(CELLS):
            best_B = model.head(hidden_BSD[:, -1])[:, digits].argmax(dim=-1) + 1
            digit_B = torch.where(puzzle_BC[:, cell] > 0, puzzle_BC[:, cell], best_B)
            columns.append(digit_B)
            hidden_BSD = model.encode(digit_B[:, None] + (encoding.DIGITS.start - 1), cache)
        is_right_BC = torch.stack(columns, dim=1) == solution_BC
        exact += int(is_right_BC.all(dim=-1).sum())
        right_cells += float(is_right_BC.float().mean(dim=-1).sum())
    count = len(puzzle_list.puzzles)
    return {"puzzles": count, "exact": exact / count, "cells": right_cells / count, "forwards": CELLS}


def score_text(
    model: Backbone,
    tokenizer: Tokenizer,
    puzzle_list: PuzzleList,
    sampler: SamplerConfig,
    rows: int,
    adapter: Adapter | None = None,
) -> dict[str, Any]:
    """Scores the list with a text model: the puzzle is the prompt, the answer is the solution as text. No clue is pinned."""
    readable = keeping_clues = exact = 0
    steps: list[int] = []
    for begin in range(0, len(puzzle_list.puzzles), rows):
        puzzles = puzzle_list.puzzles[begin : begin + rows]
        solutions = puzzle_list.solutions[begin : begin + rows]
        prompts = [tokenizer.encode_prompt(encoding.prompt_text(puzzle)) for puzzle in puzzles]
        seeds = list(range(begin, begin + len(puzzles)))
        *_, finished = generate(model, prompts, sampler, seeds=seeds, adapter=adapter)
        for row, (puzzle, solution) in enumerate(zip(puzzles, solutions, strict=True)):
            board = encoding.board_from_text(tokenizer.decode(finished.ids_BT[row].tolist()))
            readable += board is not None
            keeping_clues += board is not None and all(c in (0, d) for c, d in zip(puzzle, board, strict=True))
            exact += board == solution
            steps.append(finished.stats[row].steps)
    count = len(puzzle_list.puzzles)
    shares = {"boards": readable / count, "clues_kept": keeping_clues / count, "exact": exact / count}
    return {"puzzles": count, **shares, "steps": sum(steps) / count}


def draw_scores(scores_of: dict[str, dict[str, Any]], picture: Path) -> None:
    """Plots the share of right boards against forwards of one canvas, one line per list."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the picture needs matplotlib: pip install 'redraft[train]'") from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, scores in scores_of.items():
        shares = scores["right_after"]
        axes.plot(range(1, len(shares) + 1), [100 * share for share in shares], label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("forwards, one canvas")
    axes.set_ylabel("boards right, %")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)
