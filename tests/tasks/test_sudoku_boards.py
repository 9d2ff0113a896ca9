"""Puzzles: parsed in every format, solved exactly; batched = one by one; generated puzzles have one solution."""

import csv
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.tasks.sudoku import board, generator, solver
from redraft.tasks.sudoku.board import BoardError

LISTED = list(csv.DictReader((Path(__file__).parents[1] / "golden" / "sudoku.csv").read_text().splitlines()[1:]))
LINE = LISTED[0]["puzzle"]
SOLVED = board.parse(LISTED[0]["solution"])
BOARDS = torch.tensor([board.parse(row["puzzle"]) for row in LISTED])
ANSWERS = torch.tensor([board.parse(row["solution"]) for row in LISTED])


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("row", LISTED, ids=lambda row: row["list"])
def test_listed_puzzles_have_the_listed_solution_and_no_other(row):
    puzzle = board.parse_puzzle(row["puzzle"])
    assert board.to_line(solver.solve(puzzle)) == row["solution"]
    assert board.is_solution(board.parse(row["solution"]), puzzle)
    assert (solver.count_guesses(puzzle) == 0) == (row["guesses"] == "0")


@pytest.mark.soak
def test_batched_search_equals_one_by_one():
    assert torch.equal(generator.solve_many(BOARDS, chance()), ANSWERS)
    broken = BOARDS.clone()
    broken[::2, :2] = 5  # twice in a row
    found = generator.solve_many(broken, chance())
    assert not found[::2].any()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_boards_with_few_clues_count_alike(data):
    """Clues of a solved board, one of them perhaps wrong: solutions are found by both searches, or by neither."""
    kept = data.draw(st.sets(st.integers(0, 80), min_size=17, max_size=40))
    digits = [SOLVED[cell] if cell in kept else 0 for cell in range(81)]
    if data.draw(st.booleans()):
        digits[data.draw(st.integers(0, 80))] = data.draw(st.integers(1, 9))
    puzzle = tuple(digits)
    one = next(solver.Search(puzzle).solutions(), None)
    many = tuple(generator.solve_many(torch.tensor([puzzle]), chance())[0].tolist())
    assert (one is None) == (not any(many))
    if one is not None:
        assert board.is_solution(one, puzzle)
        assert board.is_solution(many, puzzle)


def test_full_boards_are_full_and_differ():
    full = [tuple(one) for one in generator.full_boards(64, chance()).tolist()]
    assert all(board.is_solution(one, (0,) * 81) for one in full)
    assert len(set(full)) == 64


def test_generated_puzzles_have_one_solution_and_the_requested_clues():
    full = generator.full_boards(24, chance())
    wanted = torch.tensor([40, 30, 0] * 8)
    puzzles = generator.remove_clues(full, wanted, chance(1))
    for puzzle, answer, clues in zip(puzzles.tolist(), full.tolist(), wanted.tolist(), strict=True):
        assert solver.solve(tuple(puzzle)) == tuple(answer)
        count = sum(digit > 0 for digit in puzzle)
        assert count == clues or (clues < 30 and count >= 17)
        if clues == 0:  # minimal: no clue can be missed
            for cell in (cell for cell in range(81) if puzzle[cell]):
                fewer = tuple(0 if at == cell else digit for at, digit in enumerate(puzzle))
                with pytest.raises(BoardError, match="more than one solution"):
                    solver.solve(fewer)


def test_symmetries_keep_puzzles_puzzles():
    to_from, digits = generator.draw_symmetries(len(BOARDS), chance())
    puzzles, answers = (generator.apply_symmetry(boards, to_from, digits).tolist() for boards in (BOARDS, ANSWERS))
    assert all(board.is_solution(tuple(a), tuple(p)) for a, p in zip(answers, puzzles, strict=True))
    assert all(sum(d > 0 for d in p) == int((b > 0).sum()) for p, b in zip(puzzles, BOARDS, strict=True))
    assert len({tuple(p) for p in puzzles}) == len(BOARDS)


@pytest.mark.parametrize("open_cell", "0.*_?")
def test_lines_and_grids_are_read(open_cell):
    puzzle = board.parse(LINE)
    assert board.parse(LINE.replace("0", open_cell)) == puzzle
    assert board.parse(board.to_grid(puzzle).replace(".", open_cell)) == puzzle
    assert board.to_line(puzzle) == LINE


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (LINE[:-1], "81 cells, this one has 80"),
        (LINE + "1", "81 cells, this one has 82"),
        ("", "81 cells, this one has 0"),
        (LINE[:9] + "x" + LINE[10:], r"'x' \(character 10\)"),
        (board.to_grid(board.parse(LINE)).replace("|", "#", 1), r"'#' \(line 1, character 7\)"),
        ("55" + LINE[2:], "5 stands twice in row 1, at row 1 column 1 and row 1 column 2"),
        (LINE[:6] + "2" + LINE[7:15] + "2" + LINE[16:], "2 stands twice in"),
        (LINE[:-1] + "٣", "neither a digit"),
    ],
)
def test_errors_say_what_is_wrong_with_a_puzzle(text, complaint):
    with pytest.raises(BoardError, match=complaint):
        board.parse_puzzle(text)


def test_puzzles_with_no_or_several_solutions_are_refused():
    with pytest.raises(BoardError, match="no solution"):
        solver.solve(board.parse_puzzle("12345678" + "0" * 9 + "9" + "0" * 63))
    with pytest.raises(BoardError, match=r"row \d column \d may be \d or \d"):
        solver.solve((0,) * 81)


def test_files_of_lines_tables_and_grids_are_read():
    lines = [row["puzzle"] for row in LISTED[:3]]
    expected = [board.parse(one) for one in lines]
    assert [one for _, one in board.read_puzzles("\n".join(["# mine", *lines]))] == expected
    table = "\n".join(["puzzle,solution", *(f"{row['puzzle']},{row['solution']}" for row in LISTED[:3])])
    assert list(board.read_puzzles(table)) == list(zip((2, 3, 4), expected, strict=True))
    grids = "\n\n".join(board.to_grid(one) for one in expected)
    assert list(board.read_puzzles(grids)) == list(zip((1, 13, 25), expected, strict=True))
    with pytest.raises(BoardError, match="line 2: a puzzle has 81 cells, this one has 80"):
        list(board.read_puzzles(f"{LINE}\n{LINE[1:]}"))


@settings(max_examples=200)
@given(st.text(max_size=120))
def test_any_text_is_a_board_or_a_board_error(text):
    for read in (board.parse, lambda text: list(board.read_puzzles(text))):
        with suppress(BoardError):
            read(text)


def test_conflicts_and_wrong_solutions_are_found():
    wrong = list(SOLVED)
    wrong[0], wrong[1] = wrong[1], wrong[0]
    assert not board.is_solution(tuple(wrong), (0,) * 81)
    assert {0, 1} <= board.conflicting_cells(tuple(wrong))
    assert not board.conflicting_cells(SOLVED)
    other = tuple(digit % 9 + 1 for digit in SOLVED)
    assert board.is_solution(other, (0,) * 81)
    assert not board.is_solution(other, board.parse(LINE))
