"""Solving by diffusion: batched = alone = `generate`, clues stay, a wrong board is reported as wrong."""

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
from redraft.tasks.sudoku.board import CELLS, conflicting_cells, is_solution
from redraft.tasks.sudoku.solve import FORBIDDEN, Attempt, Solution, SolveStep
from redraft.tasks.sudoku.symmetry import Symmetry
from redraft.train.loop import init_model

MODEL = init_model(CONFIG, 0).requires_grad_(False)
CFG = SamplerConfig(
    canvas_length=CELLS, max_new_tokens=CELLS, max_steps=5, entropy_bound=3.0, confidence_threshold=2.19, eos_token_ids=(1,)
)


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


FULL = [tuple(board) for board in generator.full_boards(6, chance(0)).tolist()]
PUZZLES = [
    tuple(board)
    for board in generator.remove_clues(torch.tensor(FULL), torch.tensor([81, 79, 70, 60, 40, 30]), chance(1)).tolist()
]


UNIFORM_PROBS = torch.full((CELLS, 9), 1 / 9)


def solve_all(puzzles, **options) -> list[Solution]:
    events = solve.solve(MODEL, puzzles, CFG, **{"seed": 3, **options})
    return sorted((e for e in events if isinstance(e, Solution)), key=lambda solution: solution.number)


def test_without_symmetries_every_canvas_equals_generate():
    found = solve_all(PUZZLES, check=False, symmetry_every=0)
    prompt = [CONFIG.bos_token_id, *encoding.NAMES]
    constraints = [Constraints(pins=encoding.clue_pins(puzzle), forbidden=FORBIDDEN) for puzzle in PUZZLES]
    events = list(generate(MODEL, [prompt] * 6, CFG, seeds=range(3, 9), constraints=constraints))
    committed = next(event for event in events if isinstance(event, Committed))
    assert [solution.board for solution in found] == [encoding.board_from_ids(ids) for ids in committed.ids_BC.tolist()]
    assert [solution.forwards for solution in found] == committed.steps_B.tolist()
    assert [solution.settled for solution in found] == committed.settled_B.tolist()
    assert len({solution.forwards for solution in found}) > 1  # some leave the batch before others


@pytest.mark.soak
def test_batched_is_alone():
    together = solve_all(PUZZLES, canvases=4)
    for number, puzzle in enumerate(PUZZLES):
        (alone,) = solve_all([puzzle], seed=3 + number, canvases=4)
        assert replace(alone, number=number, seconds=0) == replace(together[number], seconds=0)
    assert [replace(s, seconds=0) for s in solve_all(PUZZLES, canvases=4, rows=2)] == [
        replace(s, seconds=0) for s in together
    ]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**40), open_cells=st.sets(st.integers(0, 80)), canvases=st.integers(1, 3))
def test_clues_are_never_overwritten(seed, open_cells, canvases):
    puzzle = tuple(0 if cell in open_cells else digit for cell, digit in enumerate(FULL[seed % 6]))
    for event in solve.solve(MODEL, [puzzle], CFG, seed=seed, canvases=canvases):
        rows = [event.board] if isinstance(event, Solution) else event.boards_NC.tolist()
        for board in rows:
            assert all(clue in (0, digit) for clue, digit in zip(puzzle, board, strict=True))
            assert all(1 <= digit <= 9 for digit in board)


def test_a_wrong_board_is_attempted_again_and_reported_as_wrong():
    unsolvable = PUZZLES[5]
    (once,) = solve_all([unsolvable], check=False)
    assert (once.solved, once.at_first, once.canvases) == (False, False, 1)
    (often,) = solve_all([unsolvable], canvases=11)
    assert (often.solved, often.canvases) == (False, 11)
    assert often.forwards > 5 * once.forwards
    full, nearly = solve_all(PUZZLES[:2])
    assert full.solved
    assert full.at_first
    assert full.canvases == 1
    assert nearly.solved == is_solution(nearly.board, PUZZLES[1])
    assert nearly.at_first == (nearly.canvases == 1 and nearly.solved)


def test_attempts_double_and_start_from_noise_or_from_a_wrong_board():
    state = solve._PuzzleState(0, PUZZLES[4], 7)
    counts = []
    wrong = (1,) * 40 + FULL[4][40:]
    while state.attempted < 64:
        attempts = state.next_attempts(64)
        counts.append(len(attempts))
        for attempt in attempts:
            assert (attempt.start is not None) == bool(attempt.index % 2)
            if attempt.start:
                assert all(start in (0, digit) for start, digit in zip(attempt.start, wrong, strict=True))
                assert not conflicting_cells(attempt.start)
                assert any(attempt.start)
        state.outcomes += [solve.Outcome(attempt, wrong, True, 5, 0, 0, UNIFORM_PROBS) for attempt in attempts]
    assert counts == [1, 1, 2, 4, 8, 16, 32]
    starts = [state._renoise(wrong, attempt) for attempt in range(5)]
    assert len(set(starts)) == 5


def test_a_solved_canvas_ends_the_other_attempts_at_its_puzzle():
    """Three canvases of a full board and one of an unsolvable one: the first step ends the three."""
    wanted = {0: None, 5: None}
    attempts = [Attempt(0, 0), Attempt(0, 1), Attempt(5, 0), Attempt(0, 2)]
    seen = []
    settings = CFG.changed(confidence_threshold=1e-9, max_steps=3, stability_threshold=0)
    for event in solve.run_attempts(MODEL, PUZZLES, attempts, settings, 3, wanted):
        if isinstance(event, SolveStep):
            seen.append(event.numbers)
        elif event.attempt.number == 0:
            assert event.siblings == 2
            wanted.pop(0)
    assert seen == [(0, 0, 5, 0), (5,), (5,)]


def test_the_result_of_a_puzzle_does_not_depend_on_other_puzzles():
    """Attempts at one puzzle stay in one batch, however small the batch is."""
    attempts = [Attempt(number, attempt) for number in range(3) for attempt in range(2, 4)]
    batches = list(solve._batch_attempts(attempts, 3))
    assert [[one.number for one in batch] for batch in batches] == [[0, 0], [1, 1], [2, 2]]
    assert [len(batch) for batch in solve._batch_attempts(attempts, 4)] == [4, 2]


def test_boards_under_symmetries_keep_the_clues_as_given():
    for event in solve.run_attempts(
        MODEL, PUZZLES, [Attempt(4, 0), Attempt(4, 1), Attempt(4, 2)], CFG, 3, {4}, symmetry_every=2
    ):
        for board in [event.board] if not isinstance(event, SolveStep) else event.boards_NC.tolist():
            assert all(clue in (0, digit) for clue, digit in zip(PUZZLES[4], board, strict=True))
        if isinstance(event, SolveStep):
            clues = torch.tensor(PUZZLES[4]) > 0
            assert event.accepted_NC[:, clues].all()


def test_a_symmetry_and_its_inverse_cancel():
    """For logits exactly; ids, logits and boards are transformed alike; `where` mixes two symmetries by row."""
    symmetry = Symmetry.from_uniform(torch.rand(3, generator.SYMMETRY_DRAWS, generator=chance(2)))
    logits = torch.randn(3, CELLS, encoding.VOCAB_SIZE, generator=chance(3))
    assert torch.equal(symmetry.invert_logits(symmetry.apply_to_logits(logits)), logits)
    ids = torch.randint(encoding.VOCAB_SIZE, (3, CELLS), generator=chance(4))
    certain = torch.nn.functional.one_hot(ids, encoding.VOCAB_SIZE).float()
    assert torch.equal(symmetry.apply_to_logits(certain).argmax(dim=-1), symmetry.apply_to_ids(ids))
    boards = torch.tensor(PUZZLES[3:])
    shown = symmetry.apply_to_ids(torch.where(boards > 0, boards + (encoding.DIGITS.start - 1), 0))
    assert torch.equal(torch.where(shown > 0, shown - (encoding.DIGITS.start - 1), 0), symmetry.apply_to_boards(boards))
    identity = Symmetry.identity(3)
    assert all(torch.equal(identity.apply_to_ids(x), x) for x in (ids, boards))
    mixed = identity.where(torch.tensor([True, False, True]), symmetry)
    assert torch.equal(mixed.apply_to_ids(ids)[1], symmetry.apply_to_ids(ids)[1])
    assert torch.equal(mixed.apply_to_ids(ids)[::2], ids[::2])


def test_a_model_that_copies_its_input_gives_the_same_boards_under_every_symmetry(monkeypatch):
    """The model repeats its input, so only the symmetries could make a difference: boards equal those without them."""

    def repeat(ids_NC, soft_NCD, cache):
        return 9.0 * torch.nn.functional.one_hot(ids_NC, encoding.VOCAB_SIZE).float()

    monkeypatch.setattr(MODEL, "denoise", repeat)
    cfg = CFG.changed(confidence_threshold=1e-9, max_steps=5)
    found = []
    for every in (0, 2):
        events = solve.run_attempts(MODEL, PUZZLES, [Attempt(5, 0), Attempt(4, 0)], cfg, 3, {4, 5}, symmetry_every=every)
        found.append([event.boards_NC for event in events if isinstance(event, SolveStep)])
    assert len(found[0]) == 5
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_symmetry_changes_every_few_steps(monkeypatch):
    """A first attempt starts with the identity.

    Later draws, and all draws of later attempts, depend on seed and step only.
    """
    shown = []
    monkeypatch.setattr(Symmetry, "apply_to_ids", lambda self, ids: (shown.append(self.from_NC.clone()), ids)[1])
    cfg = CFG.changed(confidence_threshold=1e-9, max_steps=5)
    list(solve.run_attempts(MODEL, PUZZLES, [Attempt(5, 0), Attempt(5, 1)], cfg, 3, {5}, symmetry_every=2))
    identity = torch.arange(CELLS)
    assert torch.equal(shown[0][0], identity)
    assert not torch.equal(shown[0][1], identity)
    assert torch.equal(shown[0], shown[1])
    assert all(not torch.equal(shown[2][row], shown[other][row]) for row in (0, 1) for other in (0, 4))
    again, shown = shown, []
    monkeypatch.setattr(Symmetry, "apply_to_ids", lambda self, ids: (shown.append(self.from_NC.clone()), ids)[1])
    list(solve.run_attempts(MODEL, PUZZLES, [Attempt(5, 1)], cfg, 3, {5}, symmetry_every=2))
    assert all(torch.equal(one[0], two[1]) for one, two in zip(shown, again, strict=True))


def test_guesses_are_uncertain_cells_and_are_pinned():
    puzzle, solution = PUZZLES[5], FULL[5]
    probs = torch.nn.functional.one_hot(torch.tensor(solution) - 1, 9).double()
    uncertain = [cell for cell, digit in enumerate(puzzle) if not digit][:3]
    for cell in uncertain:
        probs[cell] = 0.0
        probs[cell, :2] = 0.5
    state = solve._PuzzleState(0, puzzle, 7)
    state.outcomes = [solve.Outcome(Attempt(0, 0), solution, True, 5, 0, 0, probs)]
    guesses = [state._guesses(attempt) for attempt in range(64)]
    assert guesses[:2] == [(), ()]
    assert all(len(one) == 1 for one in guesses[2:16])
    assert {len(two) for two in guesses[16:]} == {1, 2}  # the same cell may be drawn twice
    found = {(cell, digit) for one in guesses for cell, digit in one}
    assert found == {(cell, digit) for cell in uncertain for digit in (1, 2)}
    for event in solve.run_attempts(
        MODEL, PUZZLES, [Attempt(5, 2, None, ((uncertain[0], 1), (uncertain[1], 2)))], CFG, 3, {5}
    ):
        board = event.board if not isinstance(event, SolveStep) else event.boards_NC[0].tolist()
        assert (board[uncertain[0]], board[uncertain[1]]) == (1, 2)


def test_revisions_count_digits_that_changed():
    before, changed = None, 0
    for event in solve.run_attempts(MODEL, PUZZLES, [Attempt(5, 0)], CFG, 3, {5}):
        if isinstance(event, SolveStep):
            changed += 0 if before is None else int((event.boards_NC != before).sum())
            before = event.boards_NC
        else:
            assert event.revisions == changed > 0


def test_siblings_of_a_solved_canvas_are_counted():
    state = solve._PuzzleState(0, FULL[0], 1)
    state.outcomes = [
        solve.Outcome(Attempt(0, n), board, True, 5, 0, 2, UNIFORM_PROBS) for n, board in enumerate([(1,) * CELLS, FULL[0]])
    ]
    assert (state.solution().canvases, state.solution().forwards) == (4, 5 + 5 + 2 * 5)


def test_wrong_models_and_arguments_are_refused():
    other = init_model(replace(CONFIG, vocab_size=120), 0)
    with pytest.raises(ValueError, match="120 tokens and canvases of 81: it was not made for Sudoku boards"):
        solve.solve(other, PUZZLES, CFG, seed=0)
    with pytest.raises(ValueError, match="at least one canvas, got 0"):
        solve.solve(MODEL, PUZZLES, CFG, seed=0, canvases=0)
    with pytest.raises(ValueError, match=r"seed must be a whole number, got 1\.5"):
        solve.solve(MODEL, PUZZLES, CFG, seed=1.5)
