"""Exact solver for one puzzle: constraint propagation, then depth-first search.

Propagation finds naked and hidden singles. The search guesses in the cell with the fewest candidates. Candidates of a cell
are nine bits. A hard puzzle takes tens of milliseconds; `generator.py` runs the same search on thousands of puzzles at once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from redraft.tasks.sudoku.board import CELLS, PEERS, UNITS, Board, BoardError, cell_name, describe_conflicts

ALL_DIGITS = 0b111111111
MAX_GUESSES = 50_000  # the hardest puzzles known take some thousand
DIGIT_OF_BIT = {1 << (digit - 1): digit for digit in range(1, 10)}


@dataclass
class Search:
    """Enumerates the solutions of one puzzle and counts the guesses made so far."""

    puzzle: Board
    guesses: int = 0
    max_guesses: float = math.inf  # raise BoardError beyond this

    def solutions(self) -> Iterator[Board]:
        """Yields every solution, in order of the digits guessed."""
        if describe_conflicts(self.puzzle):
            return
        candidates = [1 << (digit - 1) if digit else ALL_DIGITS for digit in self.puzzle]
        if propagate_singles(candidates, [cell for cell in range(CELLS) if self.puzzle[cell]]):
            yield from self._search(candidates)

    def _search(self, candidates: list[int]) -> Iterator[Board]:
        open_cells = [cell for cell in range(CELLS) if candidates[cell] not in DIGIT_OF_BIT]
        if not open_cells:
            yield tuple(DIGIT_OF_BIT[bits] for bits in candidates)
            return
        cell = min(open_cells, key=lambda cell: candidates[cell].bit_count())
        for bit in DIGIT_OF_BIT:
            if candidates[cell] & bit:
                self.guesses += 1
                if self.guesses > self.max_guesses:
                    raise BoardError(f"whether this puzzle has one solution is not known after {self.max_guesses:,} guesses")
                guessed = candidates.copy()
                guessed[cell] = bit
                if propagate_singles(guessed, [cell]):
                    yield from self._search(guessed)


def propagate_singles(candidates: list[int], decided: list[int]) -> bool:
    """Removes candidates, in place, until no naked or hidden single is left. Returns False on a contradiction.

    `decided` lists the cells with one candidate that has not been removed from their peers yet.
    """
    while True:
        while decided:
            cell = decided.pop()
            bit = candidates[cell]
            for peer in PEERS[cell]:
                if candidates[peer] & bit:
                    candidates[peer] &= ~bit
                    if not candidates[peer]:
                        return False
                    if candidates[peer] in DIGIT_OF_BIT:
                        decided.append(peer)
        for unit in UNITS:
            in_some_cell = 0
            in_two_cells = 0
            for cell in unit:
                in_two_cells |= in_some_cell & candidates[cell]
                in_some_cell |= candidates[cell]
            if in_some_cell != ALL_DIGITS:
                return False
            in_one_cell = in_some_cell & ~in_two_cells
            for cell in unit:
                hidden_single = candidates[cell] & in_one_cell
                if hidden_single and hidden_single != candidates[cell]:
                    if hidden_single not in DIGIT_OF_BIT:
                        return False
                    candidates[cell] = hidden_single
                    decided.append(cell)
        if not decided:
            return True


def solve(puzzle: Board) -> Board:
    """Returns the only solution; raises BoardError if the puzzle has none or several."""
    solutions = list(islice(Search(puzzle, max_guesses=MAX_GUESSES).solutions(), 2))
    if not solutions:
        raise BoardError("this puzzle has no solution")
    if len(solutions) > 1:
        first, second = solutions
        cell = next(cell for cell in range(CELLS) if first[cell] != second[cell])
        digits = f"{first[cell]} or {second[cell]}"
        raise BoardError(f"this puzzle has more than one solution: {cell_name(cell)} may be {digits}")
    return solutions[0]


def count_guesses(puzzle: Board) -> int:
    """Counts the guesses until the first solution; 0 where singles are enough. A measure of difficulty."""
    search = Search(puzzle)
    next(search.solutions(), None)
    return search.guesses
