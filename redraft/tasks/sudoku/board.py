"""Boards: 81 digits, row after row, 0 where a cell is open. Reading what people write, and saying what is wrong with it.

Rows, columns and boxes count from 1 in every message, as people count them.
"""

import operator
from collections.abc import Iterable, Iterator
from itertools import combinations

Board = tuple[int, ...]

CELLS, SIZE = 81, 9
ROW = [cell // SIZE for cell in range(CELLS)]
COLUMN = [cell % SIZE for cell in range(CELLS)]
BOX = [row // 3 * 3 + column // 3 for row, column in zip(ROW, COLUMN, strict=True)]
UNITS = [[cell for cell in range(CELLS) if kind[cell] == number] for kind in (ROW, COLUMN, BOX) for number in range(SIZE)]
UNIT_NAMES = [f"{kind} {number + 1}" for kind in ("row", "column", "box") for number in range(SIZE)]
PEERS = [sorted({peer for unit in UNITS if cell in unit for peer in unit} - {cell}) for cell in range(CELLS)]

OPEN = "0.*_?"
DRAWING = "|+-─│┼┌┐└┘├┤┬┴═║╬╔╗╚╝╠╣╦╩ \t\r\n"  # what grids are drawn with


class BoardError(ValueError):
    """A puzzle that cannot be read, or breaks the constraints."""


def parse(text: str) -> Board:
    """One puzzle: a line of 81 characters, or a grid with whatever it is drawn with."""
    lone = len(text.split()) == 1
    digits: list[int] = []
    for number, line in enumerate(text.splitlines() or [""], 1):
        for at, character in enumerate(line, 1):
            if character in OPEN:
                digits.append(0)
            elif character in "123456789":
                digits.append(int(character))
            elif lone or character not in DRAWING:
                where = f"character {at}" if lone else f"line {number}, character {at}"
                raise BoardError(f"{character!r} ({where}) is neither a digit nor an open cell (0, ., *, _ or ?)")
    if len(digits) != CELLS:
        raise BoardError(f"a puzzle has 81 cells, this one has {len(digits)}")
    return tuple(digits)


def checked(text: str) -> Board:
    """A puzzle whose clues obey the constraints."""
    board = parse(text)
    if wrong := conflicts(board):
        raise BoardError(f"the clues contradict one another: {wrong[0]}")
    return board


def given(puzzle: str | Iterable[int]) -> Board:
    """A puzzle as a program hands it over: text, or 81 whole numbers."""
    if isinstance(puzzle, str):
        return checked(puzzle)
    try:
        digits = [operator.index(digit) for digit in puzzle]
    except TypeError:
        raise BoardError(f"a puzzle is text or 81 whole numbers, got {str(puzzle)[:60]!r}") from None
    if wrong := [digit for digit in digits if not 0 <= digit <= SIZE]:
        raise BoardError(f"a cell has 0 to 9, got {wrong[0]}")
    return checked(line(tuple(digits)))


def conflicts(board: Board) -> list[str]:
    """Every pair of equal digits that may not be, in words."""
    found = {}
    for name, unit in zip(UNIT_NAMES, UNITS, strict=True):
        for first, second in combinations(unit, 2):
            if board[first] and board[first] == board[second]:
                found.setdefault((first, second), f"{board[first]} stands twice in {name}, at {at(first)} and {at(second)}")
    return list(found.values())


def clashing(board: Board) -> set[int]:
    """The cells whose digit stands twice in a row, column or box."""
    return {cell for cell in range(CELLS) if board[cell] and any(board[peer] == board[cell] for peer in PEERS[cell])}


def at(cell: int) -> str:
    """A cell's place as people say it."""
    return f"row {ROW[cell] + 1} column {COLUMN[cell] + 1}"


def solves(solution: Board, puzzle: Board) -> bool:
    """Whether it is a full board by the constraints that keeps every clue."""
    whole = len(solution) == CELLS and all(sorted(solution[cell] for cell in unit) == list(range(1, 10)) for unit in UNITS)
    return whole and all(clue in (0, digit) for clue, digit in zip(puzzle, solution, strict=True))


def line(board: Board) -> str:
    """81 characters."""
    return "".join(map(str, board))


def grid(board: Board) -> str:
    """A board as people draw it."""
    rows = [board[begin : begin + SIZE] for begin in range(0, CELLS, SIZE)]
    drawn = [" | ".join(" ".join(str(d) if d else "." for d in row[b : b + 3]) for b in (0, 3, 6)) for row in rows]
    return "\n------+-------+------\n".join("\n".join(drawn[b : b + 3]) for b in (0, 3, 6))


def read_many(text: str) -> Iterator[tuple[int, Board]]:
    """The puzzles of a file, each with the line it stands on; what cannot be read is named by its line.

    One a line, the first column of a CSV, or grids with a blank line between them.
    """
    lines = text.splitlines()
    filled = [(number, one) for number, one in enumerate(lines, 1) if one.strip() and not one.startswith("#")]
    if filled and not any(len(one.split(",")[0].strip()) >= CELLS - 1 for _, one in filled):
        yield from _grids(lines)
        return
    for number, one in filled:
        first = one.split(",")[0].strip().strip('"')
        if number == filled[0][0] and first.lower() in ("puzzle", "quizzes", "question"):
            continue
        yield number, _named(first, number)


def _grids(lines: list[str]) -> Iterator[tuple[int, Board]]:
    begin, part = 0, []
    for number, one in enumerate([*lines, ""], 1):
        if one.strip() and not one.startswith("#"):
            begin = begin if part else number
            part.append(one)
        elif part:
            yield begin, _named("\n".join(part), begin)
            part = []


def _named(text: str, number: int) -> Board:
    try:
        return checked(text)
    except BoardError as error:
        raise BoardError(f"line {number}: {error}") from None
