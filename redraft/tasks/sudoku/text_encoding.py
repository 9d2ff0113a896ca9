"""A board as text, for models that read anything: a digit and the space before it are one token in most vocabularies."""

from redraft.tasks.sudoku.board import CELLS, SIZE, Board


def prompt(puzzle: Board) -> str:
    """The puzzle, zeros where cells are open, and what is asked for."""
    return f"Sudoku:\n{answer(puzzle)}Solution:\n"


def answer(board: Board) -> str:
    """Nine lines of nine digits."""
    rows = [board[begin : begin + SIZE] for begin in range(0, CELLS, SIZE)]
    return "".join("".join(f" {digit}" for digit in row) + "\n" for row in rows)


def read(text: str) -> Board | None:
    """The board in an answer; None where it is not nine lines of nine digits."""
    lines = text.rstrip().split("\n")
    cells = [cell for line in lines for cell in line.split()]
    whole = len(lines) == SIZE and all(len(line.split()) == SIZE for line in lines)
    if not whole or any(len(cell) != 1 or cell not in "123456789" for cell in cells):
        return None
    return tuple(map(int, cells))
