"""Training on puzzles: the objective equals encode and denoise, canvases advance as the sampler's, resumed = unbroken."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from redraft.config import FULL, SLIDING, SamplerConfig
from redraft.constraints.constraints import Constraints, build_canvas_constraints
from redraft.diffusion import rng, sampler
from redraft.tasks.sudoku import encoding, generator
from redraft.tasks.sudoku.board import CELLS, is_solution
from redraft.tasks.sudoku.solve import FORBIDDEN
from redraft.train import sudoku_data, sudoku_task
from redraft.train.config import TrainConfig
from redraft.train.loop import Trainer, init_model
from redraft.train.optim import OptimConfig
from redraft.train.records import open_text
from redraft.train.sudoku_data import PuzzleConfig, PuzzlePool
from redraft.train.sudoku_task import BoardObjective, Slots, SudokuTask

CONFIG = replace(
    tiny.BASE,
    vocab_size=encoding.VOCAB_SIZE,
    canvas_length=CELLS,
    sliding_window=256,
    image_token_ids=(3, 4, 5),
    eos_token_ids=(1,),
)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def write_puzzles(folder: Path) -> PuzzleConfig:
    """Twelve easy puzzles in a file, twelve generated ones."""
    full = generator.full_boards(12, chance(1))
    easy = generator.remove_clues(full, torch.full((12,), 60), chance(2))
    lines = [",".join("".join(map(str, board)) for board in pair) for pair in zip(easy.tolist(), full.tolist(), strict=True)]
    (folder / "easy.csv").write_text("puzzle,solution\n" + "\n".join(lines) + "\n")
    return PuzzleConfig(
        files=(str(folder / "easy.csv"),), shares=(0.5,), generated=12, cache_file=str(folder / "own.npz"), max_steps=4
    )


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory) -> PuzzleConfig:
    return write_puzzles(tmp_path_factory.mktemp("puzzles"))


def config(puzzles: PuzzleConfig, **changes) -> TrainConfig:
    settings = SamplerConfig(canvas_length=CELLS, max_new_tokens=CELLS, eos_token_ids=(1,))
    usual = {"steps": 6, "rows": 4, "report_every": 2, "save_every": 100}
    return TrainConfig(model=CONFIG, sampler=settings, data=puzzles, **usual | changes)


def test_tokens_are_words_of_their_vocabulary():
    words = sudoku_data.build_tokenizer()
    assert words.size <= encoding.VOCAB_SIZE
    assert [words.encode(word) for word in encoding.WORDS] == [[i] for i in range(encoding.SPECIAL_TOKENS, words.size)]
    puzzle = tuple(n % 10 for n in range(CELLS))
    canvas = words.encode(" ".join(encoding.WORDS[9 + n - 1] if n else "5" for n in puzzle))
    assert encoding.board_from_ids(canvas) == tuple(n or 5 for n in puzzle)
    assert {cell: canvas[cell] for cell in encoding.clue_pins(puzzle)} == encoding.clue_pins(puzzle)
    assert encoding.board_from_ids([0, encoding.BLANK, encoding.NAMES[0]]) == (0, 0, 0)


def test_puzzles_drawn_from_the_pool_keep_their_solutions(puzzles):
    drawn, solved = PuzzlePool(puzzles, torch.device("cpu")).draw(40, chance())
    assert ((drawn == 0) | (drawn == solved)).all()
    assert torch.equal(generator.solve_many(drawn, chance()), solved)
    clues = (drawn > 0).sum(dim=-1)
    assert 8 < int((clues == 60).sum()) < 32  # the file's; ours have 45 at most
    with np.load(puzzles.cache_file) as kept:
        assert kept["puzzles"].shape == (12, CELLS)


def test_puzzles_are_written_as_text_records(puzzles, tmp_path):
    sudoku_data.write_text_records(puzzles, tmp_path / "p.jsonl.gz", count=30, clues=(62, 66))
    with open_text(tmp_path / "p.jsonl.gz") as file:
        records = [json.loads(line) for line in file]
    assert len(records) == 30
    for record in records:
        solution = encoding.board_from_text(record["completion"])
        puzzle = tuple(int(c) for c in record["prompt"] if c.isdigit())
        assert record["prompt"] == encoding.prompt_text(puzzle)
        assert record["completion"] == encoding.board_text(solution)
        assert is_solution(solution, puzzle)
        assert 62 <= sum(map(bool, puzzle)) <= 66
    for wrong in (
        "",
        " 1 2\n",
        encoding.board_text((0,) * 81),
        encoding.board_text(solution)[:-4],
        encoding.board_text(solution).replace("1", "x"),
    ):
        assert encoding.board_from_text(wrong) is None


def test_the_objective_computes_what_generation_computes(puzzles):
    model = init_model(CONFIG, 0)
    drawn, solved = PuzzlePool(puzzles, torch.device("cpu")).draw(3, chance())
    fixed = build_canvas_constraints(
        [Constraints(pins=encoding.clue_pins(tuple(board)), forbidden=FORBIDDEN) for board in drawn.tolist()],
        0, CELLS, encoding.VOCAB_SIZE, (1,), "cpu",
    )  # fmt: skip
    settings = SamplerConfig(canvas_length=CELLS, max_new_tokens=CELLS, t_min=0.7, t_max=0.7, entropy_bound=0.5)
    draws = rng.draws([1, 2, 3], 0)
    prompt = torch.tensor([[CONFIG.bos_token_id, *encoding.NAMES]] * 3)
    cache = model.new_cache(3, prompt.shape[1])
    objective, soft, probs = BoardObjective(model, 0.0), None, torch.zeros(3, CELLS, 9)
    with torch.no_grad():
        model.encode(prompt, cache)
        state = sampler.start(draws.noise(0, CELLS, encoding.VOCAB_SIZE), fixed)
        for _ in range(3):
            logits = model.denoise(state.ids_BC, soft, cache)
            losses, got = objective(state.ids_BC, probs, drawn, solved)
            digits = logits[..., list(encoding.DIGITS)]
            assert torch.allclose(got, digits, atol=1e-4)
            open_cells = drawn == 0
            expected = torch.nn.functional.cross_entropy(digits[open_cells], solved[open_cells] - 1)
            assert torch.allclose(losses.denoiser, expected, atol=1e-4)
            slots = Slots.empty(3, torch.device("cpu"))
            slots.puzzle_BC, slots.solution_BC = drawn, solved
            slots.temperature_B[:], slots.entropy_bound_B[:] = 0.7, 0.5
            sudoku_task.advance(slots, got, 4, chance())
            state, shaped = sampler.step(logits, state, settings, draws, fixed)
            soft, probs = model.soft_embed(shaped), slots.probs_BCG
            predicted = shaped.softmax(dim=-1)[..., list(encoding.DIGITS)]
            assert torch.allclose(probs[open_cells], predicted[open_cells], atol=1e-4)
            accepted = torch.isin(slots.ids_BC, torch.tensor([*encoding.DIGITS, *encoding.CLUES]))
            assert accepted[state.accepted_BC].all()  # elsewhere noise may be a digit too
            assert torch.equal(slots.ids_BC[~open_cells], state.ids_BC[~open_cells])


def test_a_solved_puzzle_leaves_its_slot_and_an_unsolved_one_is_dropped(puzzles):
    slots, pool = Slots.empty(2, torch.device("cpu")), PuzzlePool(puzzles, torch.device("cpu"))
    sudoku_task.refill(slots, pool, puzzles, chance())
    first = slots.puzzle_BC.clone()
    confident = torch.nn.functional.one_hot(slots.solution_BC - 1, 9).float() * 20
    logits = torch.stack([confident[0], torch.zeros(CELLS, 9)])
    for number in range(4):
        slots.finished_B[:] = False
        sudoku_task.advance(slots, logits, 4, chance(number))
        assert slots.finished_B.tolist() == [number >= 1, number == 3]
    sudoku_task.refill(slots, pool, puzzles, chance(9))
    assert (slots.puzzle_BC != first).any(dim=-1).all()
    assert slots.steps_B.tolist() == [0, 0]
    assert not slots.probs_BCG.any()


@pytest.mark.soak
@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_few_steps_memorize_puzzles(puzzles, tmp_path, causal):
    """The loss falls below chance (2.2 nats), which is impossible without attention to the board."""
    optim = OptimConfig(muon_lr=3e-2, adamw_lr=1.5e-2, warmup=5)
    steps = 48 if causal else 80
    cfg = config(replace(puzzles, causal=causal, shares=(0.99,)), steps=steps, rows=24, report_every=4, optim=optim)
    cfg = replace(cfg, model=replace(CONFIG, layer_types=(SLIDING, FULL)))
    reports = [event for event in Trainer(cfg, tmp_path).run() if hasattr(event, "solved")]
    assert reports[-1].denoiser < 2.15 < 2.4 < reports[0].denoiser


def test_gradients_flow_between_unrolled_steps(puzzles):
    """The second step's loss has a gradient in the first step's logits, through the probabilities that it passes on."""
    cfg = config(replace(puzzles, unrolled_steps=2, symmetry_share=0.0))
    task = SudokuTask(cfg, CONFIG, sudoku_data.build_tokenizer(), torch.device("cpu"), [0])
    objective, seen = task.objective(init_model(CONFIG, 0)), []

    def compute(ids, probs, *rest):
        losses, logits = objective(ids, probs, *rest)
        if seen:
            (gradient,) = torch.autograd.grad(losses.denoiser, seen[-1][1], retain_graph=True)
            assert gradient.abs().sum() > 0
            assert torch.allclose(probs, sudoku_task.digit_logprobs(seen[-1][1], task.slots[0]).exp())
        else:
            assert not probs.requires_grad
        seen.append((losses, logits))
        return losses, logits

    found = task.losses(compute, 0, chance())
    assert len(seen) == 2
    assert torch.allclose(found.total, (seen[0][0].total + seen[1][0].total) / 2)
    assert task.slots[0].steps_B.tolist() == [2] * 4
    assert not task.slots[0].probs_BCG.requires_grad


def test_symmetries_transform_probabilities_with_their_boards(puzzles):
    """For half of the boards: canvas and probabilities follow the cells and digits; probabilities keep their gradient."""
    task = SudokuTask(
        config(replace(puzzles, unrolled_steps=2, symmetry_share=0.5)),
        CONFIG,
        sudoku_data.build_tokenizer(),
        torch.device("cpu"),
        [0],
    )
    objective, seen = task.objective(init_model(CONFIG, 0)), []

    def compute(ids, probs, puzzle, solution):
        losses, logits = objective(ids, probs, puzzle, solution)
        seen.append((probs, puzzle.clone(), solution.clone(), logits))
        return losses, logits

    task.losses(compute, 0, chance())
    (_, puzzle, solution, logits), (probs, moved_puzzle, moved_solution, _) = seen
    predicted = sudoku_task.digit_logprobs(logits, task.slots[0]).exp()
    moved = (puzzle != moved_puzzle).any(dim=1)
    assert 0 < moved.sum() < len(moved)
    assert torch.equal(probs[~moved], predicted[~moved])
    assert torch.equal((puzzle > 0).sum(dim=1), (moved_puzzle > 0).sum(dim=1))
    before, after = (b.gather(2, (s - 1)[..., None])[..., 0] for b, s in ((predicted, solution), (probs, moved_solution)))
    assert torch.allclose(before.sort(dim=1).values, after.sort(dim=1).values)  # the right digits keep their probabilities
    assert torch.autograd.grad(probs.square().sum(), logits)[0].abs().sum() > 0


def test_wrong_settings_and_files_are_refused(puzzles, tmp_path):
    with pytest.raises(ValueError, match="2 files have 1 shares"):
        replace(puzzles, files=("a", "b"))
    with pytest.raises(ValueError, match="generated must be at least 1"):
        replace(puzzles, shares=(1.0,))
    for change, words in (
        ({"max_steps": 0}, "max_steps must be at least 1, got 0"),
        ({"entropy_bounds": (0.0, 1.0)}, "ranges above 0, got 0.0 to 1.0"),
        ({"hint_share": 2.0}, "shares are between 0 and 1, got 2.0"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(puzzles, **change)
    for text, words in (
        ("puzzle,solution\n", "has no puzzles"),
        ("quiz\n1\n", "line 2, puzzle: a puzzle has 81 cells, this one has 0"),
        (f"puzzle,solution\n{'1' * 81},{'x' * 81}\n", "line 2, solution: 'x'"),
    ):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(ValueError, match=words):
            sudoku_data.read_puzzles(str(tmp_path / "bad.csv"))
    wrong = replace(config(puzzles), model=replace(CONFIG, vocab_size=200))
    with pytest.raises(ValueError, match="a vocabulary of 112 tokens, the model 200"):
        SudokuTask(wrong, wrong.model, sudoku_data.build_tokenizer(), torch.device("cpu"), [0])
