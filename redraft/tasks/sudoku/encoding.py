"""Boards as token ids and as text.

Token ids, for the `sudoku` model: the vocabulary has 112 tokens. The prompt names the 81 cells in order; the canvas holds
one token per cell in the same order, so a cell's name always stands 81 positions before its digit. A clue and a predicted
digit are different tokens, so the model can tell them apart. The BLANK token is for autoregressive models that read the
puzzle.

Text, for general models: nine lines of nine digits. A space and a digit form one token in most vocabularies.
"""

from collections.abc import Sequence

from redraft.tasks.sudoku.board import CELLS, COLUMN, ROW, SIZE, Board

SPECIAL_TOKENS = 6  # special tokens take the first ids
DIGITS = range(SPECIAL_TOKENS, SPECIAL_TOKENS + 9)
CLUES = range(DIGITS.stop, DIGITS.stop + 9)
BLANK = CLUES.stop
NAMES = range(BLANK + 1, BLANK + 1 + CELLS)
VOCAB_SIZE = 112  # rounded up to a multiple of 16, which matrix products prefer
WORDS = [*"123456789", *"①②③④⑤⑥⑦⑧⑨", ".", *(f"r{ROW[cell] + 1}c{COLUMN[cell] + 1}" for cell in range(CELLS))]
DIGIT_OF_ID = {token: digit for ids in (DIGITS, CLUES) for digit, token in enumerate(ids, 1)}


def clue_pins(puzzle: Board) -> dict[int, int]:
    """Returns the clues as pins of a canvas: cell -> token id."""
    return {cell: CLUES[digit - 1] for cell, digit in enumerate(puzzle) if digit}


def board_from_ids(ids: Sequence[int]) -> Board:
    """Returns the digits of a canvas; 0 where the token is neither a digit nor a clue."""
    return tuple(DIGIT_OF_ID.get(token, 0) for token in ids)


def prompt_text(puzzle: Board) -> str:
    """Formats a puzzle as a prompt; 0 marks an open cell."""
    return f"Sudoku:\n{board_text(puzzle)}Solution:\n"


def board_text(board: Board) -> str:
    """Formats a board as nine lines of nine digits."""
    rows = [board[begin : begin + SIZE] for begin in range(0, CELLS, SIZE)]
    return "".join("".join(f" {digit}" for digit in row) + "\n" for row in rows)


def board_from_text(text: str) -> Board | None:
    """Parses an answer; None if it is not nine lines of nine digits."""
    rows = [line.split() for line in text.rstrip().split("\n")]
    if len(rows) != SIZE or any(len(row) != SIZE for row in rows):
        return None
    cells = [cell for row in rows for cell in row]
    if any(len(cell) != 1 or cell not in "123456789" for cell in cells):
        return None
    return tuple(map(int, cells))
