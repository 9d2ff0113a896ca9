"""A board as tokens of a small vocabulary of its own, for models that do nothing else.

The prompt names the 81 cells; the canvas has a token for each, in the same order, so that a cell's name always stands 81
places before it. A clue is another token than a digit: what is given and what is believed must not look alike. The blank is
for models that read the puzzle from left to right.
"""

from redraft.tasks.sudoku.board import CELLS, COLUMN, ROW, Board

MARKS = 6  # ids before the first of ours
DIGITS = range(MARKS, MARKS + 9)
CLUES = range(DIGITS.stop, DIGITS.stop + 9)
BLANK = CLUES.stop
NAMES = range(BLANK + 1, BLANK + 1 + CELLS)
SIZE = 112  # of the vocabulary, rounded up: products want sixteens
WORDS = [*"123456789", *"①②③④⑤⑥⑦⑧⑨", ".", *(f"r{ROW[cell] + 1}c{COLUMN[cell] + 1}" for cell in range(CELLS))]


def pins(puzzle: Board) -> dict[int, int]:
    """The clues, as pins of a canvas."""
    return {cell: CLUES[digit - 1] for cell, digit in enumerate(puzzle) if digit}


def board(ids: list[int]) -> Board:
    """The digits of a canvas; 0 where a token is none."""
    known = {**{token: n for n, token in enumerate(DIGITS, 1)}, **{token: n for n, token in enumerate(CLUES, 1)}}
    return tuple(known.get(token, 0) for token in ids)
