"""Puzzles on canvases: batched = alone = `generate`, clues stay, a wrong board is said to be wrong."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sudoku_task import CONFIG

from redraft.config import SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import Committed, generate
from redraft.tasks.sudoku import encoding, generator, solve
from redraft.tasks.sudoku.board import CELLS, clashing, solves
from redraft.tasks.sudoku.solve import FORBIDDEN, Pass, Solution, Try
from redraft.tasks.sudoku.views import View
from redraft.train.loop import fresh

MODEL = fresh(CONFIG, 0).requires_grad_(False)
CFG = SamplerConfig(
    canvas_length=CELLS, max_new_tokens=CELLS, max_steps=5, entropy_bound=3.0, confidence_threshold=2.19, eos_token_ids=(1,)
)


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


FULL = [tuple(board) for board in generator.full_boards(6, chance(0)).tolist()]
PUZZLES = [
    tuple(board) for board in generator.dig(torch.tensor(FULL), torch.tensor([81, 79, 70, 60, 40, 30]), chance(1)).tolist()
]


BELIEF = torch.full((CELLS, 9), 1 / 9)


def solved(puzzles, **options) -> list[Solution]:
    events = solve.solve(MODEL, puzzles, CFG, **{"seed": 3, **options})
    return sorted((e for e in events if isinstance(e, Solution)), key=lambda solution: solution.number)


def test_every_canvas_is_what_generate_makes_of_it():
    found = solved(PUZZLES, check=False, turn=0)
    prompt = [CONFIG.bos_token_id, *encoding.NAMES]
    constraints = [Constraints(pins=encoding.pins(puzzle), forbidden=FORBIDDEN) for puzzle in PUZZLES]
    events = list(generate(MODEL, [prompt] * 6, CFG, seeds=range(3, 9), constraints=constraints))
    page = next(event for event in events if isinstance(event, Committed))
    assert [solution.board for solution in found] == [encoding.board(ids) for ids in page.ids_BC.tolist()]
    assert [solution.forwards for solution in found] == page.steps_B.tolist()
    assert [solution.settled for solution in found] == page.settled_B.tolist()
    assert len({solution.forwards for solution in found}) > 1  # some leave the batch before others


def test_batched_is_alone():
    together = solved(PUZZLES, canvases=4)
    for number, puzzle in enumerate(PUZZLES):
        (alone,) = solved([puzzle], seed=3 + number, canvases=4)
        assert replace(alone, number=number, seconds=0) == replace(together[number], seconds=0)
    assert [replace(s, seconds=0) for s in solved(PUZZLES, canvases=4, rows=2)] == [replace(s, seconds=0) for s in together]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**40), open_cells=st.sets(st.integers(0, 80)), canvases=st.integers(1, 3))
def test_clues_are_never_overwritten(seed, open_cells, canvases):
    puzzle = tuple(0 if cell in open_cells else digit for cell, digit in enumerate(FULL[seed % 6]))
    for event in solve.solve(MODEL, [puzzle], CFG, seed=seed, canvases=canvases):
        rows = [event.board] if isinstance(event, Solution) else event.boards_NC.tolist()
        for board in rows:
            assert all(clue in (0, digit) for clue, digit in zip(puzzle, board, strict=True))
            assert all(1 <= digit <= 9 for digit in board)


def test_a_wrong_board_is_tried_again_and_said_to_be_wrong():
    hopeless = PUZZLES[5]
    (once,) = solved([hopeless], check=False)
    assert (once.solved, once.at_first, once.canvases) == (False, False, 1)
    (often,) = solved([hopeless], canvases=11)
    assert (often.solved, often.canvases) == (False, 11)
    assert often.forwards > 5 * once.forwards
    full, nearly = solved(PUZZLES[:2])
    assert full.solved
    assert full.at_first
    assert full.canvases == 1
    assert nearly.solved == solves(nearly.board, PUZZLES[1])
    assert nearly.at_first == (nearly.canvases == 1 and nearly.solved)


def test_tries_double_and_begin_from_noise_or_from_a_wrong_board():
    book = solve._Book(0, PUZZLES[4], 7)
    counts = []
    wrong = (1,) * 40 + FULL[4][40:]
    while book.tried < 64:
        tries = book.next_tries(64)
        counts.append(len(tries))
        for one in tries:
            assert (one.start is not None) == bool(one.attempt % 2)
            if one.start:
                assert all(start in (0, digit) for start, digit in zip(one.start, wrong, strict=True))
                assert not clashing(one.start)
                assert any(one.start)
        book.outcomes += [solve.Outcome(one, wrong, True, 5, 0, 0, BELIEF) for one in tries]
    assert counts == [1, 1, 2, 4, 8, 16, 32]
    starts = [book._doubted(wrong, attempt) for attempt in range(5)]
    assert len(set(starts)) == 5


def test_a_right_canvas_ends_the_others_of_its_puzzle():
    """Three canvases of a full board and one of a hopeless one: the first pass ends the three."""
    wanted = {0: None, 5: None}
    tries, seen = [Try(0, 0), Try(0, 1), Try(5, 0), Try(0, 2)], []
    settings = CFG.changed(confidence_threshold=1e-9, max_steps=3, stability_threshold=0)
    for event in solve.run(MODEL, PUZZLES, tries, settings, 3, wanted):
        if isinstance(event, Pass):
            seen.append(event.numbers)
        elif event.of.number == 0:
            assert event.beside == 2
            wanted.pop(0)
    assert seen == [(0, 0, 5, 0), (5,), (5,)]


def test_what_becomes_of_a_puzzle_depends_on_no_other():
    """Tries of one puzzle stay in one batch, however small it is."""
    tries = [Try(number, attempt) for number in range(3) for attempt in range(2, 4)]
    batches = list(solve._batches(tries, 3))
    assert [[one.number for one in batch] for batch in batches] == [[0, 0], [1, 1], [2, 2]]
    assert [len(batch) for batch in solve._batches(tries, 4)] == [4, 2]


def test_a_turned_puzzle_comes_back_as_it_was_given():
    for event in solve.run(MODEL, PUZZLES, [Try(4, 0), Try(4, 1), Try(4, 2)], CFG, 3, {4}, turn=2):
        for board in [event.board] if not isinstance(event, Pass) else event.boards_NC.tolist():
            assert all(clue in (0, digit) for clue, digit in zip(PUZZLES[4], board, strict=True))
        if isinstance(event, Pass):
            clues = torch.tensor(PUZZLES[4]) > 0
            assert event.accepted_NC[:, clues].all()


def test_only_the_model_sees_a_board_turned():
    """What is shown and what comes back undo one another, for ids, logits and boards."""
    view = View.drawn(torch.rand(3, generator.CHANCE, generator=chance(2)))
    logits = torch.randn(3, CELLS, encoding.SIZE, generator=chance(3))
    assert torch.equal(view.back(view.logits(logits)), logits)
    ids = torch.randint(encoding.SIZE, (3, CELLS), generator=chance(4))
    certain = torch.nn.functional.one_hot(ids, encoding.SIZE).float()
    assert torch.equal(view.logits(certain).argmax(dim=-1), view.ids(ids))
    boards = torch.tensor(PUZZLES[3:])
    shown = view.ids(torch.where(boards > 0, boards + (encoding.DIGITS.start - 1), 0))
    assert torch.equal(torch.where(shown > 0, shown - (encoding.DIGITS.start - 1), 0), view.boards(boards))
    straight = View.straight(3)
    assert all(torch.equal(straight.ids(x), x) for x in (ids, boards))
    some = straight.where(torch.tensor([True, False, True]), view)
    assert torch.equal(some.ids(ids)[1], view.ids(ids)[1])
    assert torch.equal(some.ids(ids)[::2], ids[::2])


def test_a_model_that_does_not_care_makes_the_same_of_every_view(monkeypatch):
    """It repeats what it is shown, so that only the views could make a difference: boards are equal without them."""

    def repeat(ids_NC, soft_NCD, cache):
        return 9.0 * torch.nn.functional.one_hot(ids_NC, encoding.SIZE).float()

    monkeypatch.setattr(MODEL, "denoise", repeat)
    cfg = CFG.changed(confidence_threshold=1e-9, max_steps=5)
    found = []
    for turn in (0, 2):
        events = solve.run(MODEL, PUZZLES, [Try(5, 0), Try(4, 0)], cfg, 3, {4, 5}, turn=turn)
        found.append([event.boards_NC for event in events if isinstance(event, Pass)])
    assert len(found[0]) == 5
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_board_is_shown_another_way_every_few_passes(monkeypatch):
    """The first try begins straight; then, and from the start in later tries, the ways differ, by seed and pass only."""
    shown = []
    monkeypatch.setattr(View, "ids", lambda self, ids: (shown.append(self.from_NC.clone()), ids)[1])
    cfg = CFG.changed(confidence_threshold=1e-9, max_steps=5)
    list(solve.run(MODEL, PUZZLES, [Try(5, 0), Try(5, 1)], cfg, 3, {5}, turn=2))
    straight = torch.arange(CELLS)
    assert torch.equal(shown[0][0], straight)
    assert not torch.equal(shown[0][1], straight)
    assert torch.equal(shown[0], shown[1])
    assert all(not torch.equal(shown[2][row], shown[other][row]) for row in (0, 1) for other in (0, 4))
    again, shown = shown, []
    monkeypatch.setattr(View, "ids", lambda self, ids: (shown.append(self.from_NC.clone()), ids)[1])
    list(solve.run(MODEL, PUZZLES, [Try(5, 1)], cfg, 3, {5}, turn=2))
    assert all(torch.equal(one[0], two[1]) for one, two in zip(shown, again, strict=True))


def test_guesses_are_doubted_cells_and_are_pinned():
    puzzle, solution = PUZZLES[5], FULL[5]
    belief = torch.nn.functional.one_hot(torch.tensor(solution) - 1, 9).double()
    doubted = [cell for cell, digit in enumerate(puzzle) if not digit][:3]
    for cell in doubted:
        belief[cell] = 0.0
        belief[cell, :2] = 0.5
    book = solve._Book(0, puzzle, 7)
    book.outcomes = [solve.Outcome(Try(0, 0), solution, True, 5, 0, 0, belief)]
    guesses = [book._guesses(attempt) for attempt in range(64)]
    assert guesses[:2] == [(), ()]
    assert all(len(one) == 1 for one in guesses[2:16])
    assert {len(two) for two in guesses[16:]} == {1, 2}  # the same cell may be drawn twice
    found = {(cell, digit) for one in guesses for cell, digit in one}
    assert found == {(cell, digit) for cell in doubted for digit in (1, 2)}
    for event in solve.run(MODEL, PUZZLES, [Try(5, 2, None, ((doubted[0], 1), (doubted[1], 2)))], CFG, 3, {5}):
        board = event.board if not isinstance(event, Pass) else event.boards_NC[0].tolist()
        assert (board[doubted[0]], board[doubted[1]]) == (1, 2)


def test_revisions_are_digits_that_changed():
    before, changed = None, 0
    for event in solve.run(MODEL, PUZZLES, [Try(5, 0)], CFG, 3, {5}):
        if isinstance(event, Pass):
            changed += 0 if before is None else int((event.boards_NC != before).sum())
            before = event.boards_NC
        else:
            assert event.revisions == changed > 0


def test_siblings_of_a_right_canvas_are_counted():
    book = solve._Book(0, FULL[0], 1)
    book.outcomes = [
        solve.Outcome(Try(0, n), board, True, 5, 0, 2, BELIEF) for n, board in enumerate([(1,) * CELLS, FULL[0]])
    ]
    assert (book.solution().canvases, book.solution().forwards) == (4, 5 + 5 + 2 * 5)


def test_what_cannot_be_solved_is_refused():
    other = fresh(replace(CONFIG, vocab_size=120), 0)
    with pytest.raises(ValueError, match="a vocabulary of 120 and pages of 81: it was not made for boards"):
        solve.solve(other, PUZZLES, CFG, seed=0)
    with pytest.raises(ValueError, match="at least one canvas, got 0"):
        solve.solve(MODEL, PUZZLES, CFG, seed=0, canvases=0)
    with pytest.raises(ValueError, match=r"seed must be a whole number, got 1\.5"):
        solve.solve(MODEL, PUZZLES, CFG, seed=1.5)
