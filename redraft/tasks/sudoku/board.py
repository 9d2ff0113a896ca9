"""Sudoku boards: parsing, checking and printing.

A board is a tuple of 81 digits in reading order; 0 marks an open cell. Messages count rows, columns and boxes from 1.
"""

import operator
from collections.abc import Iterable, Iterator
from itertools import combinations

Board = tuple[int, ...]

CELLS = 81
SIZE = 9
ROW = [cell // SIZE for cell in range(CELLS)]
COLUMN = [cell % SIZE for cell in range(CELLS)]
BOX = [row // 3 * 3 + column // 3 for row, column in zip(ROW, COLUMN, strict=True)]
UNITS = [[cell for cell in range(CELLS) if kind[cell] == number] for kind in (ROW, COLUMN, BOX) for number in range(SIZE)]
UNIT_NAMES = [f"{kind} {number + 1}" for kind in ("row", "column", "box") for number in range(SIZE)]
PEERS = [sorted({peer for unit in UNITS if cell in unit for peer in unit} - {cell}) for cell in range(CELLS)]

OPEN_CHARACTERS = "0.*_?"
GRID_CHARACTERS = "|+-─│┼┌┐└┘├┤┬┴═║╬╔╗╚╝╠╣╦╩ \t\r\n"  # ignored: people draw grids with them


class BoardError(ValueError):
    """The input is not a board, or its clues break the rules of Sudoku."""


def parse(text: str) -> Board:
    """Parses one puzzle: a line of 81 characters, or a drawn grid. Does not check the clues."""
    is_one_word = len(text.split()) == 1
    digits: list[int] = []
    for number, line in enumerate(text.splitlines() or [""], 1):
        for column, character in enumerate(line, 1):
            if character in OPEN_CHARACTERS:
                digits.append(0)
            elif character in "123456789":
                digits.append(int(character))
            elif is_one_word or character not in GRID_CHARACTERS:
                where = f"character {column}" if is_one_word else f"line {number}, character {column}"
                raise BoardError(f"{character!r} ({where}) is neither a digit nor an open cell (0, ., *, _ or ?)")
    if len(digits) != CELLS:
        raise BoardError(f"a puzzle has 81 cells, this one has {len(digits)}")
    return tuple(digits)


def parse_puzzle(text: str) -> Board:
    """Parses one puzzle and raises BoardError if two clues contradict each other."""
    board = parse(text)
    conflicts = describe_conflicts(board)
    if conflicts:
        raise BoardError(f"the clues contradict one another: {conflicts[0]}")
    return board


def to_board(puzzle: str | Iterable[int]) -> Board:
    """Converts a puzzle given as text or as 81 integers, and checks its clues."""
    if isinstance(puzzle, str):
        return parse_puzzle(puzzle)
    try:
        digits = [operator.index(digit) for digit in puzzle]
    except TypeError:
        raise BoardError(f"a puzzle is text or 81 whole numbers, got {str(puzzle)[:60]!r}") from None
    out_of_range = [digit for digit in digits if not 0 <= digit <= SIZE]
    if out_of_range:
        raise BoardError(f"a cell has 0 to 9, got {out_of_range[0]}")
    return parse_puzzle(to_line(tuple(digits)))


def describe_conflicts(board: Board) -> list[str]:
    """Describes every pair of equal digits in one row, column or box."""
    messages: dict[tuple[int, int], str] = {}
    for name, unit in zip(UNIT_NAMES, UNITS, strict=True):
        for first, second in combinations(unit, 2):
            if board[first] and board[first] == board[second]:
                message = f"{board[first]} stands twice in {name}, at {cell_name(first)} and {cell_name(second)}"
                messages.setdefault((first, second), message)
    return list(messages.values())


def conflicting_cells(board: Board) -> set[int]:
    """Returns the cells whose digit appears twice in a row, column or box."""
    return {cell for cell in range(CELLS) if board[cell] and any(board[peer] == board[cell] for peer in PEERS[cell])}


def cell_name(cell: int) -> str:
    """Names a cell by row and column."""
    return f"row {ROW[cell] + 1} column {COLUMN[cell] + 1}"


def is_solution(solution: Board, puzzle: Board) -> bool:
    """Whether `solution` is a complete valid board that keeps every clue of `puzzle`."""
    if len(solution) != CELLS:
        return False
    has_valid_units = all(sorted(solution[cell] for cell in unit) == list(range(1, 10)) for unit in UNITS)
    return has_valid_units and all(clue in (0, digit) for clue, digit in zip(puzzle, solution, strict=True))


def to_boards(puzzle: str | Iterable[int] | Iterable[str | Board]) -> tuple[list[Board], bool]:
    """The boards of one puzzle or of several, and whether it was one."""
    if isinstance(puzzle, str):
        return [parse_puzzle(puzzle)], True
    if isinstance(puzzle, bytes) or not isinstance(puzzle, Iterable):
        raise BoardError(f"a puzzle is text or 81 whole numbers, got {str(puzzle)[:60]!r}")
    items = list(puzzle)
    if items and not isinstance(items[0], Iterable):
        return [to_board(items)], True  # type: ignore[arg-type]
    return [to_board(item) for item in items], False  # type: ignore[arg-type]


def to_line(board: Board) -> str:
    """Formats a board as 81 characters."""
    return "".join(map(str, board))


def to_grid(board: Board) -> str:
    """Formats a board as a grid with lines between the boxes."""
    rows = [board[begin : begin + SIZE] for begin in range(0, CELLS, SIZE)]
    lines = [" | ".join(" ".join(str(d) if d else "." for d in row[b : b + 3]) for b in (0, 3, 6)) for row in rows]
    return "\n------+-------+------\n".join("\n".join(lines[b : b + 3]) for b in (0, 3, 6))


def read_puzzles(text: str) -> Iterator[tuple[int, Board]]:
    """Yields (line number, puzzle) for every puzzle of a file. Errors name the line.

    Accepts one puzzle per line, the first column of a CSV file, or grids separated by blank lines.
    """
    lines = text.splitlines()
    nonempty = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if nonempty and not any(len(line.split(",")[0].strip()) >= CELLS - 1 for _, line in nonempty):
        yield from _read_grids(lines)
        return
    for number, line in nonempty:
        first_column = line.split(",")[0].strip().strip('"')
        is_header = number == nonempty[0][0] and first_column.lower() in ("puzzle", "quizzes", "question")
        if not is_header:
            yield number, _parse_at_line(first_column, number)


def _read_grids(lines: list[str]) -> Iterator[tuple[int, Board]]:
    first_number = 0
    grid: list[str] = []
    for number, line in enumerate([*lines, ""], 1):
        if line.strip() and not line.startswith("#"):
            if not grid:
                first_number = number
            grid.append(line)
        elif grid:
            yield first_number, _parse_at_line("\n".join(grid), first_number)
            grid = []


def _parse_at_line(text: str, number: int) -> Board:
    try:
        return parse_puzzle(text)
    except BoardError as error:
        raise BoardError(f"line {number}: {error}") from None
