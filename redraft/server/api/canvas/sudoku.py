"""POST /v1/canvas/sudoku: solves a puzzle, with the board at every step."""

import threading
from collections.abc import Sequence
from typing import Any

from redraft import checkpoint
from redraft.kernels.backend import select_dtype
from redraft.server.api.canvas.events import Events, seed_of
from redraft.server.schema import SudokuRequest
from redraft.tasks.sudoku import board as boards
from redraft.tasks.sudoku import solve
from redraft.tasks.sudoku.solve import Solution
from redraft.writer import SUDOKU_MODEL, Writer


class SudokuSolver:
    """Solves puzzles with the served model if it is a Sudoku model, else with the one in the package, loaded when needed."""

    def __init__(self, writer: Writer) -> None:
        self._model = writer.model
        self._sampler = writer.sampler
        self._engine = writer.engine
        self._device = writer.model.device
        self._loading = threading.Lock()

    def stream(self, body: SudokuRequest, stop: threading.Event) -> Events:
        """Yields the last attempt's board, and which of its cells are accepted, at every step."""
        puzzle = boards.to_board(body.puzzle)
        seed = seed_of(body.seed)
        with self._loading:
            self._load_model()
        yield {"type": "begin", "seed": seed, "puzzle": list(puzzle), "prefix": "", "eos_token_ids": []}
        if body.autoregressive:
            events = solve.solve_in_reading_order(self._model, puzzle, seed=seed)
        else:
            options: dict[str, Any] = {"seed": seed, "canvases": body.canvases, "check": body.check}
            events = solve.solve(self._model, [puzzle], self._sampler, **options)
        tokens = boards.CELLS * (1 if body.autoregressive else body.canvases)
        while True:
            with self._engine.take_turn(tokens, stop):
                event = next(events, None)
            if event is None:
                return
            yield _end_event(event) if isinstance(event, Solution) else _board_event(event)

    def _load_model(self) -> None:
        if solve.is_sudoku_model(self._model):
            return
        folder = checkpoint.find(SUDOKU_MODEL)
        self._sampler = checkpoint.read_sampler_config(folder, checkpoint.read_model_config(folder))
        self._model = checkpoint.load_model(folder, dtype=select_dtype(self._device), device=self._device)


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
