"""An exact solver: singles as far as they go, then a guess in the cell with the fewest candidates.

Candidates of a cell are nine bits. A hard puzzle takes tens of milliseconds; `generator.py` has the same search for
thousands of puzzles at once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from redraft.tasks.sudoku.board import CELLS, PEERS, UNITS, Board, BoardError, conflicts

ALL = 0b111111111
MOST = 50_000  # guesses; the hardest puzzles known take some thousand
DIGIT = {1 << (digit - 1): digit for digit in range(1, 10)}


@dataclass
class Search:
    """Solutions one after another, and how many guesses were tried so far."""

    puzzle: Board
    guesses: int = 0
    most: float = math.inf  # guesses after which it is given up

    def solutions(self) -> Iterator[Board]:
        """All of them, in order of the digits guessed."""
        if conflicts(self.puzzle):
            return
        candidates = [1 << (digit - 1) if digit else ALL for digit in self.puzzle]
        if singles(candidates, [cell for cell in range(CELLS) if self.puzzle[cell]]):
            yield from self._below(candidates)

    def _below(self, candidates: list[int]) -> Iterator[Board]:
        open_cells = [cell for cell in range(CELLS) if candidates[cell] not in DIGIT]
        if not open_cells:
            yield tuple(DIGIT[bits] for bits in candidates)
            return
        cell = min(open_cells, key=lambda cell: candidates[cell].bit_count())
        for bit in DIGIT:
            if candidates[cell] & bit:
                self.guesses += 1
                if self.guesses > self.most:
                    raise BoardError(f"whether this puzzle has one solution is not known after {self.most:,} guesses")
                tried = candidates.copy()
                tried[cell] = bit
                if singles(tried, [cell]):
                    yield from self._below(tried)


def singles(candidates: list[int], decided: list[int]) -> bool:
    """Draws every conclusion that one cell or one unit allows, in place; False where they contradict one another.

    `decided` are the cells whose only candidate the others have not heard of.
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
                    if candidates[peer] in DIGIT:
                        decided.append(peer)
        for unit in UNITS:
            once = more = 0
            for cell in unit:
                more |= once & candidates[cell]
                once |= candidates[cell]
            if once != ALL:
                return False
            once &= ~more
            for cell in unit:
                only = candidates[cell] & once
                if only and only != candidates[cell]:
                    if only not in DIGIT:
                        return False
                    candidates[cell] = only
                    decided.append(cell)
        if not decided:
            return True


def solve(puzzle: Board) -> Board:
    """The solution; puzzles with none or with several are refused."""
    found = list(islice(Search(puzzle, most=MOST).solutions(), 2))
    if not found:
        raise BoardError("this puzzle has no solution")
    if len(found) > 1:
        cell = next(cell for cell in range(CELLS) if found[0][cell] != found[1][cell])
        a, b = found[0][cell], found[1][cell]
        raise BoardError(
            f"this puzzle has more than one solution: row {cell // 9 + 1} column {cell % 9 + 1} may be {a} or {b}"
        )
    return found[0]


def rating(puzzle: Board) -> int:
    """Guesses until the solution is found: 0 where singles are enough."""
    search = Search(puzzle)
    next(search.solutions(), None)
    return search.guesses
