"""Batched exact solver, puzzle generator and board symmetries, on a CPU or a GPU.

The search is the one of `solver.py`, one round at a time for all boards: remove candidates; where nothing changes, guess and
push the alternative on a stack; where a cell or digit has no candidate left, pop the last alternative. Candidates are zeros
and ones, units and peers are matrices, so a round is three matrix products.

Shapes: N boards, C = 81 cells, G = 9 digits, U = 27 units.
"""

import torch
from torch import Tensor

from redraft.tasks.sudoku.board import CELLS, PEERS, SIZE, UNITS

MAX_DEPTH = 64  # open guesses per board; a board of 81 cells has never needed half of it
DIAGONAL_BOXES = (18, 22, 26)  # indices into UNITS; these boxes share no row or column
SYMMETRY_DRAWS = 34  # uniform numbers that define one symmetry


class BatchSearch:
    """Finds one solution for each board of candidates."""

    def __init__(self, candidates_NGC: Tensor, generator: torch.Generator) -> None:
        device = candidates_NGC.device
        self.candidates_NGC = candidates_NGC.float()
        self.generator = generator
        self.units_CU = torch.zeros(CELLS, len(UNITS), device=device)
        for number, unit in enumerate(UNITS):
            self.units_CU[unit, number] = 1
        self.peers_CC = torch.zeros(CELLS, CELLS, device=device)
        for cell, peers in enumerate(PEERS):
            self.peers_CC[cell, peers] = 1
        boards = len(candidates_NGC)
        self.rows_N = torch.arange(boards, device=device)  # board index of each row that is still searched
        self.stack = torch.zeros(MAX_DEPTH, boards, SIZE, CELLS, dtype=torch.bool, device=device)
        self.height_N = torch.zeros(boards, dtype=torch.long, device=device)
        self.solution_NC = torch.zeros(boards, CELLS, dtype=torch.long, device=device)

    def run(self) -> Tensor:
        """Returns solution_NC; zeros where a board has no solution."""
        while len(self.rows_N):
            before_NGC = self.candidates_NGC
            dead_N = self._propagate()
            unchanged_N = ~dead_N & (before_NGC == self.candidates_NGC).flatten(1).all(dim=-1)
            solved_N = unchanged_N & (self.candidates_NGC.sum(dim=1) == 1).all(dim=-1)
            stuck_N = unchanged_N & ~solved_N
            self.solution_NC[self.rows_N[solved_N]] = self.candidates_NGC[solved_N].argmax(dim=1) + 1
            self._guess(stuck_N.nonzero()[:, 0])
            self._backtrack(dead_N.nonzero()[:, 0])
            self._drop(solved_N | (dead_N & (self.height_N < 0)))
        return self.solution_NC

    def _propagate(self) -> Tensor:
        """One round of naked and hidden singles. Returns dead_N: a cell or a digit has no place left."""
        candidates_NGC = self.candidates_NGC
        single_NGC = candidates_NGC * (candidates_NGC.sum(dim=1, keepdim=True) == 1)
        candidates_NGC = candidates_NGC * (single_NGC @ self.peers_CC == 0)
        places_NGU = candidates_NGC @ self.units_CU
        hidden_NGC = candidates_NGC * ((places_NGU == 1).float() @ self.units_CU.T > 0)
        self.candidates_NGC = torch.where(hidden_NGC.any(dim=1, keepdim=True), hidden_NGC, candidates_NGC)
        return (places_NGU == 0).flatten(1).any(dim=-1) | (candidates_NGC.sum(dim=1) == 0).any(dim=-1)

    def _guess(self, rows: Tensor) -> None:
        """Guesses a random digit in the cell with the fewest candidates; pushes the other digits on the stack."""
        if not len(rows):
            return
        candidates_NGC = self.candidates_NGC[rows]
        count_NC = candidates_NGC.sum(dim=1)
        tie_break_NC = torch.rand(count_NC.shape, generator=self.generator, device=rows.device)
        cell_N = torch.where(count_NC == 1, torch.inf, count_NC + tie_break_NC / 2).argmin(dim=-1)
        index_N = torch.arange(len(rows), device=rows.device)
        digit_N = torch.multinomial(candidates_NGC[index_N, :, cell_N], 1, generator=self.generator)[:, 0]
        alternative_NGC = candidates_NGC.clone()
        alternative_NGC[index_N, digit_N, cell_N] = 0
        candidates_NGC[index_N, :, cell_N] = 0
        candidates_NGC[index_N, digit_N, cell_N] = 1
        self.stack[self.height_N[rows], rows] = alternative_NGC.bool()
        self.height_N[rows] += 1
        self.candidates_NGC[rows] = candidates_NGC

    def _backtrack(self, rows: Tensor) -> None:
        self.height_N[rows] -= 1
        self.candidates_NGC[rows] = self.stack[self.height_N[rows].clamp(min=0), rows].float()

    def _drop(self, finished_N: Tensor) -> None:
        if finished_N.any():
            remaining = (~finished_N).nonzero()[:, 0]
            self.rows_N = self.rows_N[remaining]
            self.height_N = self.height_N[remaining]
            self.candidates_NGC = self.candidates_NGC[remaining]
            self.stack = self.stack[:, remaining]


def initial_candidates(boards_NC: Tensor) -> Tensor:
    """Returns candidates_NGC before any propagation: the clue, or all digits in an open cell."""
    digits = torch.arange(1, SIZE + 1, device=boards_NC.device)
    return (boards_NC[:, None, :] == digits[:, None]) | (boards_NC[:, None, :] == 0)


def solve_many(boards_NC: Tensor, generator: torch.Generator) -> Tensor:
    """Returns one solution per board, a random one if there are several, zeros if there is none."""
    return BatchSearch(initial_candidates(boards_NC), generator).run()


def full_boards(count: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
    """Returns random solved boards: fills the three diagonal boxes at random and solves the rest."""
    boards_NC = torch.zeros(count, CELLS, dtype=torch.long, device=device)
    for box in DIAGONAL_BOXES:
        cells = torch.tensor(UNITS[box], device=device)
        boards_NC[:, cells] = torch.rand(count, SIZE, generator=generator, device=device).argsort(dim=-1) + 1
    return solve_many(boards_NC, generator)


def remove_clues(full_NC: Tensor, clues_N: Tensor, generator: torch.Generator) -> Tensor:
    """Makes puzzles with one solution each: removes clues in random order while the solution stays unique.

    Stops at clues_N clues, or at a minimal puzzle if no further clue can be removed.
    """
    puzzles_NC = full_NC.clone()
    index_N = torch.arange(len(full_NC), device=full_NC.device)
    order_NC = torch.rand(full_NC.shape, generator=generator, device=full_NC.device).argsort(dim=-1)
    for cell_N in order_NC.T:
        rows = ((puzzles_NC > 0).sum(dim=-1) > clues_N).nonzero()[:, 0]
        if not len(rows):
            break
        index = index_N[: len(rows)]
        cells = cell_N[rows]
        fewer_NC = puzzles_NC[rows]
        fewer_NC[index, cells] = 0
        # The clue can go if no solution has another digit in its cell.
        other_NGC = initial_candidates(fewer_NC)
        other_NGC[index, full_NC[rows, cells] - 1, cells] = False
        unique_N = (BatchSearch(other_NGC, generator).run() == 0).all(dim=-1)
        puzzles_NC[rows[unique_N], cells[unique_N]] = 0
    return puzzles_NC


def draw_symmetries(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns `count` random symmetries; see `symmetries_from`."""
    return symmetries_from(torch.rand((count, SYMMETRY_DRAWS), generator=generator, device=generator.device))


def symmetries_from(uniform_NU: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (from_NC, digits_NG): the cell each cell's content comes from, and the digit each digit becomes.

    A symmetry permutes rows inside a band, bands, columns and stacks likewise, transposes half of the boards, and permutes
    the digits.
    """
    rows_N3, rows_N9, columns_N3, columns_N9, transpose_N1, digits_N9 = uniform_NU.split((3, 9, 3, 9, 1, 9), dim=-1)

    def permute_lines(bands_N3: Tensor, inside_N9: Tensor) -> Tensor:
        inside_N33 = inside_N9.unflatten(-1, (3, 3)).argsort(dim=-1)
        return (bands_N3.argsort(dim=-1)[:, :, None] * 3 + inside_N33).flatten(1)

    from_NRC = permute_lines(rows_N3, rows_N9)[:, :, None] * SIZE + permute_lines(columns_N3, columns_N9)[:, None, :]
    from_NRC = torch.where(transpose_N1[..., None] < 0.5, from_NRC.transpose(1, 2), from_NRC)
    return from_NRC.flatten(1), digits_N9.argsort(dim=-1) + 1


def apply_symmetry(boards_NC: Tensor, from_NC: Tensor, digits_NG: Tensor) -> Tensor:
    """Transforms boards; open cells stay open."""
    moved_NC = boards_NC.gather(1, from_NC)
    names_NG = torch.cat([torch.zeros_like(digits_NG[:, :1]), digits_NG], dim=1)
    return names_NG.gather(1, moved_NC)
