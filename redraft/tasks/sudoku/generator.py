"""Puzzles by the thousand: a search over many boards at once, puzzles dug from full boards, and the symmetries of a board.

The search is `solver.py`'s, a round at a time for all boards: draw conclusions; where nothing follows, guess, keeping the
other way on a stack; where candidates run out, go back to the last stack. Candidates are zeros and ones, and units and
peers are matrices, so that a round is three products, on a CPU or a GPU.

Shapes: N boards, C = 81 cells, G = 9 digits, U = 27 units.
"""

import torch
from torch import Tensor

from redraft.tasks.sudoku.board import CELLS, PEERS, SIZE, UNITS

DEPTH = 64  # guesses that may be open at once; a board of 81 cells has never needed half of it


class Search:
    """Looks for solutions of many boards of candidates."""

    def __init__(self, can_NGC: Tensor, generator: torch.Generator) -> None:
        device = can_NGC.device
        self.can_NGC, self.generator = can_NGC.float(), generator
        self.units_CU = torch.zeros(CELLS, len(UNITS), device=device)
        self.peers_CC = torch.zeros(CELLS, CELLS, device=device)
        for number, unit in enumerate(UNITS):
            self.units_CU[unit, number] = 1
        for cell, peers in enumerate(PEERS):
            self.peers_CC[cell, peers] = 1
        boards = len(can_NGC)
        self.rows_N = torch.arange(boards, device=device)  # which board each one still searched is
        self.stack = torch.zeros(DEPTH, boards, SIZE, CELLS, dtype=torch.bool, device=device)
        self.height_N = torch.zeros(boards, dtype=torch.long, device=device)
        self.solution_NC = torch.zeros(boards, CELLS, dtype=torch.long, device=device)

    def run(self) -> Tensor:
        """A solution of each board, solution_NC; zeros where there is none."""
        while len(self.rows_N):
            before_NGC = self.can_NGC
            dead_N = self._conclude()
            still_N = ~dead_N & (before_NGC == self.can_NGC).flatten(1).all(dim=-1)  # and so without contradiction
            solved_N = still_N & (self.can_NGC.sum(dim=1) == 1).all(dim=-1)
            stuck_N = still_N & ~solved_N
            self.solution_NC[self.rows_N[solved_N]] = self.can_NGC[solved_N].argmax(dim=1) + 1
            self._guess(stuck_N.nonzero()[:, 0])
            self._go_back(dead_N.nonzero()[:, 0])
            self._drop(solved_N | (dead_N & (self.height_N < 0)))
        return self.solution_NC

    def _conclude(self) -> Tensor:
        """One round of naked and hidden singles; dead_N where a cell or a digit has nowhere to go."""
        can_NGC = self.can_NGC
        single_NGC = can_NGC * (can_NGC.sum(dim=1, keepdim=True) == 1)
        can_NGC = can_NGC * (single_NGC @ self.peers_CC == 0)
        places_NGU = can_NGC @ self.units_CU
        lone_NGC = can_NGC * ((places_NGU == 1).float() @ self.units_CU.T > 0)
        self.can_NGC = torch.where(lone_NGC.any(dim=1, keepdim=True), lone_NGC, can_NGC)
        return (places_NGU == 0).flatten(1).any(dim=-1) | (can_NGC.sum(dim=1) == 0).any(dim=-1)

    def _guess(self, at: Tensor) -> None:
        """A digit by chance in the cell with the fewest candidates; the other digits wait on the stack."""
        if not len(at):
            return
        can_NGC = self.can_NGC[at]
        count_NC = can_NGC.sum(dim=1)
        chance_NC = torch.rand(count_NC.shape, generator=self.generator, device=can_NGC.device)
        cell_N = torch.where(count_NC == 1, torch.inf, count_NC + chance_NC / 2).argmin(dim=-1)
        some = torch.arange(len(at), device=at.device)
        digit_N = torch.multinomial(can_NGC[some, :, cell_N], 1, generator=self.generator)[:, 0]
        other_NGC = can_NGC.clone()
        other_NGC[some, digit_N, cell_N] = 0
        can_NGC[some, :, cell_N] = 0
        can_NGC[some, digit_N, cell_N] = 1
        self.stack[self.height_N[at], at] = other_NGC.bool()
        self.height_N[at] += 1
        self.can_NGC[at] = can_NGC

    def _go_back(self, at: Tensor) -> None:
        self.height_N[at] -= 1
        self.can_NGC[at] = self.stack[self.height_N[at].clamp(min=0), at].float()

    def _drop(self, over_N: Tensor) -> None:
        if over_N.any():
            left = (~over_N).nonzero()[:, 0]
            self.rows_N, self.height_N, self.can_NGC = self.rows_N[left], self.height_N[left], self.can_NGC[left]
            self.stack = self.stack[:, left]


def candidates(boards_NC: Tensor) -> Tensor:
    """What may stand in every cell, can_NGC, before anything is concluded: the clue, or anything."""
    digits = torch.arange(1, SIZE + 1, device=boards_NC.device)
    return (boards_NC[:, None, :] == digits[:, None]) | (boards_NC[:, None, :] == 0)


def solve_many(boards_NC: Tensor, generator: torch.Generator) -> Tensor:
    """A solution of each board; zeros where there is none. Where there are several, one of them by chance."""
    return Search(candidates(boards_NC), generator).run()


def full_boards(count: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
    """Solved boards: three boxes by chance, the rest as it follows, by chance where it does not."""
    boards_NC = torch.zeros(count, CELLS, dtype=torch.long, device=device)
    for box in (18, 22, 26):  # the boxes on the diagonal, which do not see one another
        cells = torch.tensor(UNITS[box], device=device)
        boards_NC[:, cells] = torch.rand(count, SIZE, generator=generator, device=device).argsort(dim=-1) + 1
    return solve_many(boards_NC, generator)


def dig(full_NC: Tensor, clues_N: Tensor, generator: torch.Generator) -> Tensor:
    """Puzzles with one solution each: clues are taken away in random order while they can be missed.

    Down to clues_N of them or, where no further one can be missed, to a minimal puzzle.
    """
    puzzles_NC = full_NC.clone()
    some = torch.arange(len(full_NC), device=full_NC.device)
    order_NC = torch.rand(full_NC.shape, generator=generator, device=full_NC.device).argsort(dim=-1)
    for cell_N in order_NC.T:
        at = ((puzzles_NC > 0).sum(dim=-1) > clues_N).nonzero()[:, 0]
        if not len(at):
            break
        fewer_NC = puzzles_NC[at]
        fewer_NC[some[: len(at)], cell_N[at]] = 0
        other_NGC = candidates(fewer_NC)  # can the cell be anything else?
        other_NGC[some[: len(at)], full_NC[at, cell_N[at]] - 1, cell_N[at]] = False
        unique_N = (Search(other_NGC, generator).run() == 0).all(dim=-1)
        puzzles_NC[at[unique_N], cell_N[at[unique_N]]] = 0
    return puzzles_NC


CHANCE = 34  # uniform numbers that make a symmetry


def symmetries(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """That many, by chance."""
    return symmetries_of(torch.rand((count, CHANCE), generator=generator, device=generator.device))


def symmetries_of(uniform_NU: Tensor) -> tuple[Tensor, Tensor]:
    """Ways to turn a board into an equal one: from_NC, where each cell comes from, and digits_NG, what each digit becomes.

    Rows trade places inside their band, bands do, columns likewise, and half of the boards are mirrored.
    """
    rows_N3, rows_N9, columns_N3, columns_N9, mirror_N1, names_N9 = uniform_NU.split((3, 9, 3, 9, 1, 9), dim=-1)

    def lines(bands_N3: Tensor, inside_N9: Tensor) -> Tensor:
        inside_N33 = inside_N9.unflatten(-1, (3, 3)).argsort(dim=-1)
        return (bands_N3.argsort(dim=-1)[:, :, None] * 3 + inside_N33).flatten(1)

    from_NRC = lines(rows_N3, rows_N9)[:, :, None] * SIZE + lines(columns_N3, columns_N9)[:, None, :]
    from_NRC = torch.where(mirror_N1[..., None] < 0.5, from_NRC.transpose(1, 2), from_NRC)
    return from_NRC.flatten(1), names_N9.argsort(dim=-1) + 1


def turned(boards_NC: Tensor, from_NC: Tensor, digits_NG: Tensor) -> Tensor:
    """Boards under symmetries; open cells stay open."""
    moved_NC = boards_NC.gather(1, from_NC)
    names_NG = torch.cat([torch.zeros_like(digits_NG[:, :1]), digits_NG], dim=1)
    return names_NG.gather(1, moved_NC)
