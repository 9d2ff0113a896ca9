"""POST /v1/canvas/sudoku: solves a puzzle, with the board at every step."""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from redraft import checkpoint
from redraft.config import SamplerConfig
from redraft.kernels.backend import select_dtype
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.server.api.canvas.events import Events, seed_of
from redraft.server.schema import SudokuRequest
from redraft.tasks.sudoku import board as boards
from redraft.tasks.sudoku import solve
from redraft.tasks.sudoku.solve import Solution
from redraft.writer import SUDOKU_MODEL, Writer


class SudokuSolver:
    """Solves puzzles with the served model if it is a Sudoku model, else with the one in the package, loaded when needed."""

    def __init__(self) -> None:
        self._packaged: dict[torch.device, tuple[DiffusionGemma, SamplerConfig]] = {}
        self._loading = threading.Lock()

    def stream(self, writer: Writer, body: SudokuRequest, stop: threading.Event) -> Events:
        """Yields the last attempt's board, and which of its cells are accepted, at every step."""
        puzzle = boards.to_board(body.puzzle)
        seed = seed_of(body.seed)
        with self._loading:
            model, sampler = self._choose_model(writer)
        yield {"type": "begin", "seed": seed, "puzzle": list(puzzle), "prefix": "", "eos_token_ids": []}
        if body.autoregressive:
            events = solve.solve_in_reading_order(model, puzzle, seed=seed)
        else:
            options: dict[str, Any] = {"seed": seed, "canvases": body.canvases, "check": body.check}
            events = solve.solve(model, [puzzle], sampler, **options)
        tokens = boards.CELLS * (1 if body.autoregressive else body.canvases)
        while True:
            with writer.engine.take_turn(tokens, stop):
                event = next(events, None)
            if event is None:
                return
            yield _end_event(event) if isinstance(event, Solution) else _board_event(event)

    def _choose_model(self, writer: Writer) -> tuple[DiffusionGemma, SamplerConfig]:
        if solve.is_sudoku_model(writer.model):
            return writer.model, writer.sampler
        device = writer.model.device
        if device not in self._packaged:
            folder = checkpoint.find(SUDOKU_MODEL)
            sampler = checkpoint.read_sampler_config(folder, checkpoint.read_model_config(folder))
            self._packaged[device] = checkpoint.load_model(folder, dtype=select_dtype(device), device=device), sampler
        return self._packaged[device]


def _board_event(event: solve.SolveStep) -> dict[str, Any]:
    board = event.boards_NC[-1].tolist()
    accepted = event.accepted_NC[-1].int().tolist()
    return {
        "type": "board",
        "attempt": event.attempts[-1],
        "canvases": len(event.attempts),
        "step": event.step,
        "board": board,
        "accepted": accepted,
        "conflicts": conflicting_cells(board, accepted),
    }


def conflicting_cells(board: Sequence[int], accepted: Sequence[int]) -> list[int]:
    """Returns accepted cells that contradict one another."""
    accepted_digits = tuple(digit if is_accepted else 0 for digit, is_accepted in zip(board, accepted, strict=True))
    return sorted(boards.conflicting_cells(accepted_digits))


def _end_event(solution: Solution) -> dict[str, Any]:
    return {
        "type": "end",
        "finish_reason": "stop",
        "text": boards.to_line(solution.board),
        "board": list(solution.board),
        "seconds": round(solution.seconds, 4),
        "solved": solution.solved,
        "settled": solution.settled,
        "solved_on_first_canvas": solution.at_first,
        "canvases": solution.canvases,
        "forwards": solution.forwards,
        "revisions": solution.revisions,
        "seed": solution.seed,
    }
