"""Learning to solve puzzles: a pass is encode and denoise, canvases move as the sampler's do, resumed = unbroken."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch

from redraft.config import SamplerConfig
from redraft.constraints.constraints import Constraints, build_canvas_constraints
from redraft.diffusion import rng, sampler
from redraft.tasks.sudoku import encoding, generator, text_encoding
from redraft.tasks.sudoku.board import CELLS, solves
from redraft.tasks.sudoku.solve import FORBIDDEN
from redraft.train import sudoku_task
from redraft.train.data import open_text
from redraft.train.loop import TrainConfig, Trainer, fresh
from redraft.train.optim import OptimConfig
from redraft.train.sudoku_task import BoardObjective, Boards, Places, Pool, PuzzleConfig

CONFIG = replace(
    tiny.BASE,
    vocab_size=encoding.SIZE,
    canvas_length=CELLS,
    sliding_window=256,
    image_token_ids=(3, 4, 5),
    eos_token_ids=(1,),
)


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory) -> PuzzleConfig:
    """Twelve easy ones in a file, twelve made on the spot."""
    folder = tmp_path_factory.mktemp("puzzles")
    full = generator.full_boards(12, chance(1))
    easy = generator.dig(full, torch.full((12,), 60), chance(2))
    lines = [",".join("".join(map(str, board)) for board in pair) for pair in zip(easy.tolist(), full.tolist(), strict=True)]
    (folder / "easy.csv").write_text("puzzle,solution\n" + "\n".join(lines) + "\n")
    return PuzzleConfig(
        files=(str(folder / "easy.csv"),), top_probs=(0.5,), generated=12, kept=str(folder / "own.npz"), passes=4
    )


def config(puzzles: PuzzleConfig, **changes) -> TrainConfig:
    settings = SamplerConfig(canvas_length=CELLS, max_new_tokens=CELLS, eos_token_ids=(1,))
    usual = {"steps": 6, "rows": 4, "report_every": 2, "save_every": 100}
    return TrainConfig(model=CONFIG, sampler=settings, data=puzzles, **usual | changes)


def test_tokens_are_words_of_their_vocabulary():
    words = sudoku_task.tokenizer()
    assert words.size <= encoding.SIZE
    assert [words.encode(word) for word in encoding.WORDS] == [[i] for i in range(encoding.MARKS, words.size)]
    puzzle = tuple(n % 10 for n in range(CELLS))
    canvas = words.encode(" ".join(encoding.WORDS[9 + n - 1] if n else "5" for n in puzzle))
    assert encoding.board(canvas) == tuple(n or 5 for n in puzzle)
    assert {cell: canvas[cell] for cell in encoding.pins(puzzle)} == encoding.pins(puzzle)
    assert encoding.board([0, encoding.BLANK, encoding.NAMES[0]]) == (0, 0, 0)


def test_puzzles_drawn_from_the_pool_keep_their_solutions(puzzles):
    drawn, solved = Pool(puzzles, torch.device("cpu")).draw(40, chance())
    assert ((drawn == 0) | (drawn == solved)).all()
    assert torch.equal(generator.solve_many(drawn, chance()), solved)
    clues = (drawn > 0).sum(dim=-1)
    assert 8 < int((clues == 60).sum()) < 32  # the file's; ours have 45 at most
    with np.load(puzzles.kept) as kept:
        assert kept["puzzles"].shape == (12, CELLS)


def test_puzzles_as_texts(puzzles, tmp_path):
    sudoku_task.write_texts(puzzles, tmp_path / "p.jsonl.gz", count=30, clues=(62, 66))
    with open_text(tmp_path / "p.jsonl.gz") as file:
        records = [json.loads(line) for line in file]
    assert len(records) == 30
    for record in records:
        solution = text_encoding.read(record["completion"])
        puzzle = tuple(int(c) for c in record["prompt"] if c.isdigit())
        assert record["prompt"] == text_encoding.prompt(puzzle)
        assert record["completion"] == text_encoding.answer(solution)
        assert solves(solution, puzzle)
        assert 62 <= sum(map(bool, puzzle)) <= 66
    for wrong in (
        "",
        " 1 2\n",
        text_encoding.answer((0,) * 81),
        text_encoding.answer(solution)[:-4],
        text_encoding.answer(solution).replace("1", "x"),
    ):
        assert text_encoding.read(wrong) is None


def test_a_pass_that_learns_is_what_generation_computes(puzzles):
    model = fresh(CONFIG, 0)
    drawn, solved = Pool(puzzles, torch.device("cpu")).draw(3, chance())
    fixed = build_canvas_constraints(
        [Constraints(pins=encoding.pins(tuple(board)), forbidden=FORBIDDEN) for board in drawn.tolist()],
        0, CELLS, encoding.SIZE, (1,), "cpu",
    )  # fmt: skip
    settings = SamplerConfig(canvas_length=CELLS, max_new_tokens=CELLS, t_min=0.7, t_max=0.7, entropy_bound=0.5)
    draws = rng.draws([1, 2, 3], 0)
    prompt = torch.tensor([[CONFIG.bos_token_id, *encoding.NAMES]] * 3)
    cache = model.new_cache(3, prompt.shape[1])
    objective, soft, probs = BoardObjective(model, 0.0), None, torch.zeros(3, CELLS, 9)
    with torch.no_grad():
        model.encode(prompt, cache)
        state = sampler.start(draws.noise(0, CELLS, encoding.SIZE), fixed)
        for _ in range(3):
            logits = model.denoise(state.ids_BC, soft, cache)
            losses, got = objective(state.ids_BC, probs, drawn, solved)
            digits = logits[..., list(encoding.DIGITS)]
            assert torch.allclose(got, digits, atol=1e-4)
            open_cells = drawn == 0
            expected = torch.nn.functional.cross_entropy(digits[open_cells], solved[open_cells] - 1)
            assert torch.allclose(losses.denoiser, expected, atol=1e-4)
            places = Places.empty(3, torch.device("cpu"))
            places.puzzle_BC, places.solution_BC = drawn, solved
            places.temperature_B[:], places.bound_B[:] = 0.7, 0.5
            sudoku_task.advance(places, got, 4, chance())
            state, shaped = sampler.step(logits, state, settings, draws, fixed)
            soft, probs = model.soft_embed(shaped), places.probs_BCG
            believed = shaped.softmax(dim=-1)[..., list(encoding.DIGITS)]
            assert torch.allclose(probs[open_cells], believed[open_cells], atol=1e-4)
            accepted = torch.isin(places.ids_BC, torch.tensor([*encoding.DIGITS, *encoding.CLUES]))
            assert accepted[state.accepted_BC].all()  # elsewhere noise may be a digit too
            assert torch.equal(places.ids_BC[~open_cells], state.ids_BC[~open_cells])


def test_a_solved_puzzle_leaves_and_an_unsolved_one_is_given_up(puzzles):
    places, pool = Places.empty(2, torch.device("cpu")), Pool(puzzles, torch.device("cpu"))
    sudoku_task.refill(places, pool, puzzles, chance())
    first = places.puzzle_BC.clone()
    sure = torch.nn.functional.one_hot(places.solution_BC - 1, 9).float() * 20
    doubt = torch.stack([sure[0], torch.zeros(CELLS, 9)])
    for number in range(4):
        places.over_B[:] = False
        sudoku_task.advance(places, doubt, 4, chance(number))
        assert places.over_B.tolist() == [number >= 1, number == 3]
    sudoku_task.refill(places, pool, puzzles, chance(9))
    assert (places.puzzle_BC != first).any(dim=-1).all()
    assert places.passes_B.tolist() == [0, 0]
    assert not places.probs_BCG.any()


def test_resumed_is_unbroken(puzzles, tmp_path):
    cfg = config(replace(puzzles, together=2), microbatches=2)
    whole = Trainer(cfg, tmp_path / "whole")
    *_, last = list(whole.run())
    list(Trainer(replace(cfg, steps=3), tmp_path / "parts").run())
    second = Trainer(cfg, tmp_path / "parts")
    assert second.step == 3
    list(second.run())
    for name, tensor in whole._tensors().items():
        assert torch.equal(tensor, second._tensors()[name]), name
    assert last.why == "done"


@pytest.mark.parametrize("causal", [False, True])
def test_a_few_steps_learn_puzzles_by_heart(puzzles, tmp_path, causal):
    """Digits that follow from the board beat chance (2.2 nats) soon; without looking at it they never do."""
    optim = OptimConfig(muon_lr=2e-2, adamw_lr=1e-2, warmup=5)
    cfg = config(replace(puzzles, causal=causal, top_probs=(0.99,)), steps=80, rows=32, report_every=5, optim=optim)
    reports = [event for event in Trainer(cfg, tmp_path).run() if hasattr(event, "solved")]
    assert reports[-1].denoiser < 2.15 < 2.4 < reports[0].denoiser


def test_passes_of_one_step_are_learned_together(puzzles):
    """The first pass has a gradient from the second's loss, through what it believed; alone it has none of that."""
    cfg = config(replace(puzzles, together=2, turned=0.0))
    task = Boards(cfg, CONFIG, sudoku_task.tokenizer(), torch.device("cpu"), [0])
    objective, seen = task.objective(fresh(CONFIG, 0)), []

    def compute(ids, probs, *rest):
        losses, logits = objective(ids, probs, *rest)
        if seen:
            (gradient,) = torch.autograd.grad(losses.denoiser, seen[-1][1], retain_graph=True)
            assert gradient.abs().sum() > 0
            assert torch.allclose(probs, sudoku_task.tempered(seen[-1][1], task.places[0]).exp())
        else:
            assert not probs.requires_grad
        seen.append((losses, logits))
        return losses, logits

    found = task.losses(compute, 0, chance())
    assert len(seen) == 2
    assert torch.allclose(found.total, (seen[0][0].total + seen[1][0].total) / 2)
    assert task.places[0].passes_B.tolist() == [2] * 4
    assert not task.places[0].probs_BCG.requires_grad


def test_turned_boards_keep_what_is_believed_of_them(puzzles):
    """Half of the boards turned: belief and canvas go with the cells and the digits, and the belief keeps its gradient."""
    task = Boards(
        config(replace(puzzles, together=2, turned=0.5)), CONFIG, sudoku_task.tokenizer(), torch.device("cpu"), [0]
    )
    objective, seen = task.objective(fresh(CONFIG, 0)), []

    def compute(ids, probs, puzzle, solution):
        losses, logits = objective(ids, probs, puzzle, solution)
        seen.append((probs, puzzle.clone(), solution.clone(), logits))
        return losses, logits

    task.losses(compute, 0, chance())
    (_, puzzle, solution, logits), (probs, turned_puzzle, turned_solution, _) = seen
    believed = sudoku_task.tempered(logits, task.places[0]).exp()
    moved = (puzzle != turned_puzzle).any(dim=1)
    assert 0 < moved.sum() < len(moved)
    assert torch.equal(probs[~moved], believed[~moved])
    assert torch.equal((puzzle > 0).sum(dim=1), (turned_puzzle > 0).sum(dim=1))
    held, turned = (b.gather(2, (s - 1)[..., None])[..., 0] for b, s in ((believed, solution), (probs, turned_solution)))
    assert torch.allclose(held.sort(dim=1).values, turned.sort(dim=1).values)  # the right digits are held as much as before
    assert torch.autograd.grad(probs.square().sum(), logits)[0].abs().sum() > 0


def test_what_cannot_be_learned_from_is_refused(puzzles, tmp_path):
    with pytest.raises(ValueError, match="2 files of puzzles have 1 shares"):
        replace(puzzles, files=("a", "b"))
    with pytest.raises(ValueError, match="something must be generated"):
        replace(puzzles, top_probs=(1.0,))
    for change, words in (
        ({"passes": 0}, "passes must be at least 1, got 0"),
        ({"bounds": (0.0, 1.0)}, "from above 0 upwards, got 0.0 to 1.0"),
        ({"given": 2.0}, "given, turned and shares are shares, got 2.0"),
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
            sudoku_task.read_puzzles(str(tmp_path / "bad.csv"))
    wrong = replace(config(puzzles), model=replace(CONFIG, vocab_size=200))
    with pytest.raises(ValueError, match="a vocabulary of 112 tokens, the model 200"):
        Boards(wrong, wrong.model, sudoku_task.tokenizer(), torch.device("cpu"), [0])
