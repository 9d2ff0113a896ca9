"""Solving Sudoku by diffusion: clues are pinned, open cells start as noise, and the canvas is denoised until it settles.

Without symmetries a canvas gives the same tokens as `generate`. By default the model sees the board under another symmetry
every few steps: a board that does not settle in one form may settle in an equivalent one. Many canvases run in one batch,
and a finished canvas leaves it.

With `check`, a finished board is tested against the rules of Sudoku. The test is not the model's work and is reported
separately. A wrong board is attempted again on a growing number of canvases, up to a limit. New attempts start from noise or
from the wrong board with part of its cells noised, and pin one or two digits in cells where the first canvas was uncertain:
a wrong guess cannot settle, a right one helps.

Shapes: N canvases in the batch, C = 81 cells, G = 9 digits, V vocabulary.
"""

import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.constraints.constraints import CanvasConstraints, Constraints, build_canvas_constraints
from redraft.diffusion import rng, sampler
from redraft.diffusion.rng import Draws
from redraft.diffusion.sampler import Canvas
from redraft.model.backbone import Backbone
from redraft.model.kv_cache import KVCache
from redraft.model.lora import Adapter
from redraft.tasks.canvas_html import render_board
from redraft.tasks.sudoku import encoding
from redraft.tasks.sudoku.board import CELLS, Board, conflicting_cells, is_solution, to_line
from redraft.tasks.sudoku.generator import SYMMETRY_DRAWS
from redraft.tasks.sudoku.symmetry import Symmetry

BATCH_ROWS = 64  # canvases in a batch
SYMMETRY_EVERY = 4  # steps until the model sees the board under another symmetry
RETRY_MAX_STEPS = 32  # steps of a canvas after the first
RETRY_NOISE = 0.4  # share of the cells of a wrong board that is noised for another attempt
FIRST_ONE_GUESS = 2  # attempts from this one on pin one guessed cell
FIRST_TWO_GUESSES = 16  # attempts from this one on pin two
ATTEMPT_SEED_STRIDE = 1 << 32  # between the seeds of two attempts at one puzzle
NOISE_BLOCK, GUESS_BLOCK, SYMMETRY_BLOCK = 1, 2, 3  # blocks of random draws; block 0 is the canvas's own
FORBIDDEN = tuple(token for token in range(encoding.VOCAB_SIZE) if token not in encoding.DIGITS)  # in cells without a pin


@dataclass(frozen=True)
class Solution:
    """The result for one puzzle."""

    number: int  # index of the puzzle
    puzzle: Board
    board: Board
    solved: bool  # the board obeys the rules and keeps the clues
    settled: bool  # the last canvas settled; else it ran out of steps
    at_first: bool  # the first canvas was right, without any check
    canvases: int
    forwards: int  # denoising forwards for this puzzle, summed over its canvases
    revisions: int  # digits that changed between two steps, on the canvas that is shown
    seconds: float  # since the start of the first canvas
    seed: int

    def __repr__(self) -> str:
        state = "solved" if self.solved else "not solved"
        return f"Solution({to_line(self.board)!r}, {state}, {self.canvases} canvases, seed={self.seed})"

    def _repr_html_(self) -> str:
        """The board in a notebook: clues bold, the model's digits violet, conflicts red."""
        notes = [
            "solved" if self.solved else "not solved",
            f"{self.canvases} canvases, {self.forwards} forwards",
            f"seed {self.seed}",
        ]
        return render_board(self.board, self.puzzle, conflicting_cells(self.board), notes)


@dataclass(frozen=True)
class SolveStep:
    """The batch after one denoising step, for display."""

    numbers: tuple[int, ...]  # puzzle index of each row
    attempts: tuple[int, ...]  # attempt index of each row
    step: int
    boards_NC: Tensor  # digits
    accepted_NC: Tensor


@dataclass(frozen=True)
class Attempt:
    """One canvas to run."""

    number: int  # index of the puzzle
    index: int  # 0 is the first attempt
    start: Board | None = None  # digits to start from; 0 and None are noise
    guesses: tuple[tuple[int, int], ...] = ()  # (cell, digit) pairs that are pinned like clues


@dataclass(frozen=True)
class Outcome:
    """One finished canvas."""

    attempt: Attempt
    board: Board
    settled: bool
    steps: int
    revisions: int
    siblings: int  # canvases of the same puzzle that were still running
    mean_probs_CG: Tensor  # probabilities of the digits, averaged over the steps; meaningless in cells with a clue


def is_sudoku_model(model: Backbone) -> bool:
    """Whether the model's vocabulary and canvas are those of Sudoku boards."""
    return model.config.vocab_size == encoding.VOCAB_SIZE and model.config.canvas_length == CELLS


def solve(
    model: Backbone,
    puzzles: Sequence[Board],
    cfg: SamplerConfig,
    *,
    seed: int,
    canvases: int = 64,
    check: bool = True,
    symmetry_every: int = SYMMETRY_EVERY,
    rows: int = BATCH_ROWS,
    adapter: Adapter | None = None,
) -> Iterator[SolveStep | Solution]:
    """Solves puzzles in batches; yields every step, and each Solution when it is ready. Puzzle i has the seed `seed + i`.

    Without `check` every puzzle gets one canvas, right or wrong. With `symmetry_every` 0 the model always sees the board as
    it is. Wrong arguments raise ValueError at once, before the first event.
    """
    model.require_denoiser("Sudoku")
    if not is_sudoku_model(model):
        raise ValueError(
            f"this model has {model.config.vocab_size} tokens and canvases of {model.config.canvas_length}: "
            "it was not made for Sudoku boards; use redraft/weights/sudoku"
        )
    for name, value in (("seed", seed), ("canvases", canvases)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
    if canvases < 1:
        raise ValueError(f"a puzzle needs at least one canvas, got {canvases}")
    return _solve(model, puzzles, cfg, seed, canvases if check else 1, symmetry_every, rows, adapter)


def _solve(
    model: Backbone,
    puzzles: Sequence[Board],
    cfg: SamplerConfig,
    seed: int,
    max_canvases: int,
    symmetry_every: int,
    rows: int,
    adapter: Adapter | None,
) -> Iterator[SolveStep | Solution]:
    retry_cfg = replace(cfg, max_steps=min(cfg.max_steps, RETRY_MAX_STEPS))
    for begin in range(0, len(puzzles), rows):
        numbers = range(begin, min(begin + rows, len(puzzles)))
        pending = {number: _PuzzleState(number, puzzles[number], seed + number) for number in numbers}
        while pending:
            attempts = [attempt for state in pending.values() for attempt in state.next_attempts(max_canvases)]
            for batch in _batch_attempts(attempts, rows):
                batch_cfg = retry_cfg if batch[0].index else cfg  # a batch holds first attempts only, or later ones only
                for event in run_attempts(model, puzzles, batch, batch_cfg, seed, pending, symmetry_every, adapter):
                    if isinstance(event, SolveStep):
                        yield event
                        continue
                    state = pending[event.attempt.number]
                    state.outcomes.append(event)
                    if state.is_solved or state.attempted >= max_canvases:
                        yield pending.pop(state.number).solution()


def _batch_attempts(attempts: Sequence[Attempt], rows: int) -> Iterator[list[Attempt]]:
    """Groups attempts into batches of about `rows`. Attempts at one puzzle stay together, so that its result does not depend
    on other puzzles."""
    batch: list[Attempt] = []
    for _, group in groupby(attempts, key=lambda attempt: attempt.number):
        same_puzzle = list(group)
        if batch and len(batch) + len(same_puzzle) > rows:
            yield batch
            batch = []
        batch += same_puzzle
    if batch:
        yield batch


class _PuzzleState:
    """The outcomes of one puzzle so far, and the choice of its next attempts."""

    def __init__(self, number: int, puzzle: Board, seed: int) -> None:
        self.number = number
        self.puzzle = puzzle
        self.seed = seed
        self.start_time = time.perf_counter()
        self.outcomes: list[Outcome] = []

    @property
    def attempted(self) -> int:
        return len(self.outcomes)

    @property
    def is_solved(self) -> bool:
        return bool(self.outcomes) and is_solution(self.outcomes[-1].board, self.puzzle)

    def next_attempts(self, max_canvases: int) -> list[Attempt]:
        """One attempt at first, then as many as were made before.

        Every second one starts from a wrong board, the others from noise; most pin guesses.
        """
        count = min(max(1, self.attempted), max_canvases - self.attempted)
        attempts = []
        for index in range(self.attempted, self.attempted + count):
            start = None
            if index % 2 and self.outcomes:
                wrong_board = self.outcomes[-1 - (index // 2) % self.attempted].board
                start = self._renoise(wrong_board, index)
            attempts.append(Attempt(self.number, index, start, self._guesses(index)))
        return attempts

    def _guesses(self, index: int) -> tuple[tuple[int, int], ...]:
        """Draws cells in proportion to the first canvas's entropy, and for each a digit by its mean probability."""
        if index < FIRST_ONE_GUESS:
            return ()
        open_C = torch.tensor(self.puzzle) == 0
        probs_CG = self.outcomes[0].mean_probs_CG.double()
        entropy_C = torch.special.entr(probs_CG).sum(dim=-1) * open_C + 1e-9 * open_C
        uniform = rng.draws([self.seed + index * ATTEMPT_SEED_STRIDE], GUESS_BLOCK).uniform(0, 4)[0]
        guesses = {}
        for number in range(2 if index >= FIRST_TWO_GUESSES else 1):
            cell = _sample_index(entropy_C, uniform[2 * number])
            guesses[cell] = _sample_index(probs_CG[cell], uniform[2 * number + 1]) + 1
        return tuple(guesses.items())

    def _renoise(self, board: Board, index: int) -> Board:
        """Opens the conflicting cells of a wrong board, and a random share of the others."""
        draws = rng.draws([self.seed + index * ATTEMPT_SEED_STRIDE], NOISE_BLOCK)
        noised = (draws.uniform(0, CELLS)[0] < RETRY_NOISE).tolist()
        conflicting = conflicting_cells(board)
        return tuple(0 if noised[cell] or cell in conflicting else digit for cell, digit in enumerate(board))

    def solution(self) -> Solution:
        last = self.outcomes[-1]
        siblings = last.siblings if self.is_solved else 0
        return Solution(
            number=self.number,
            puzzle=self.puzzle,
            board=last.board,
            solved=self.is_solved,
            settled=last.settled,
            at_first=is_solution(self.outcomes[0].board, self.puzzle),
            canvases=self.attempted + siblings,
            forwards=sum(outcome.steps for outcome in self.outcomes) + siblings * last.steps,
            revisions=last.revisions,
            seconds=time.perf_counter() - self.start_time,
            seed=self.seed,
        )


def _sample_index(weights: Tensor, uniform: Tensor) -> int:
    """Samples an index in proportion to its weight."""
    cumulative = weights.cumsum(0)
    return int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True).clamp(max=len(weights) - 1))


@torch.inference_mode()
def run_attempts(
    model: Backbone,
    puzzles: Sequence[Board],
    attempts: Sequence[Attempt],
    cfg: SamplerConfig,
    seed: int,
    wanted: Container[int],
    symmetry_every: int = SYMMETRY_EVERY,
    adapter: Adapter | None = None,
) -> Iterator[SolveStep | Outcome]:
    """Runs canvases side by side. A row leaves the batch when it is finished or when its puzzle is no longer in `wanted`.

    Only the model sees transformed boards: canvas, pins, noise and probabilities are those of the puzzle as it was given.
    """
    attempts = list(attempts)
    device = model.device
    state, constraints, draws = _start_canvases(puzzles, attempts, cfg, seed, device)
    cache = _encode_prompt(model, adapter).select_rows([0] * len(attempts))
    digit_V = torch.tensor(encoding.board_from_ids(range(encoding.VOCAB_SIZE)), device=device)
    symmetry = Symmetry.identity(len(attempts), device)
    history = _StepHistory.empty(len(attempts), device)
    while attempts:
        if symmetry_every and state.step % symmetry_every == 0:
            symmetry = _draw_symmetry(attempts, draws, state.step)
        soft_NCD = model.soft_embed(symmetry.apply_to_logits(history.shaped_NCV)) if state.step else None
        logits_NCV = symmetry.invert_logits(model.denoise(symmetry.apply_to_ids(state.ids_BC), soft_NCD, cache))
        before = state
        state, shaped_NCV = sampler.step(logits_NCV, state, cfg, draws, constraints)
        history = history.extend(before, state, shaped_NCV)
        boards_NC = digit_V[state.best_BC]
        numbers = tuple(attempt.number for attempt in attempts)
        indices = tuple(attempt.index for attempt in attempts)
        yield SolveStep(numbers, indices, state.step, boards_NC, state.accepted_BC)
        is_last_step = state.step >= cfg.max_steps
        finished = [row for row, settled in enumerate(state.settled_B.tolist()) if settled or is_last_step]
        for row in finished:
            if attempts[row].number in wanted:
                yield Outcome(
                    attempt=attempts[row],
                    board=tuple(boards_NC[row].tolist()),
                    settled=bool(state.settled_B[row]),
                    steps=state.step,
                    revisions=int(history.revisions_N[row]),
                    siblings=_count_siblings(attempts, row, finished),
                    mean_probs_CG=history.summed_probs_NCG[row].cpu() / state.step,
                )
        remaining = [row for row in range(len(attempts)) if row not in finished and attempts[row].number in wanted]
        if len(remaining) < len(attempts):
            rows_N = torch.tensor(remaining, dtype=torch.long, device=device)
            cache = cache.select_rows(remaining)
            attempts = [attempts[row] for row in remaining]
            state, constraints, draws, symmetry, history = (
                _select_rows(record, rows_N) for record in (state, constraints, draws, symmetry, history)
            )


@torch.inference_mode()
def solve_in_reading_order(model: Backbone, puzzle: Board, *, seed: int) -> Iterator[SolveStep | Solution]:
    """For comparison: the same weights fill one cell per forward in reading order, with its likeliest digit, which stays."""
    model.require_denoiser("Sudoku")
    start_time = time.perf_counter()
    device = model.device
    board = list(puzzle)
    cache = _encode_prompt(model)
    draws = rng.draws([seed], 0, device)
    for step, cell in enumerate([cell for cell in range(CELLS) if not puzzle[cell]]):
        pins = Constraints(pins=encoding.clue_pins(tuple(board)), forbidden=FORBIDDEN)
        constraints = build_canvas_constraints([pins], 0, CELLS, encoding.VOCAB_SIZE, model.config.eos_token_ids, device)
        assert constraints is not None
        canvas_1C = constraints.apply_pins(draws.noise(step, CELLS, encoding.VOCAB_SIZE))
        logits_1CV = constraints.mask_logits(model.denoise(canvas_1C, None, cache))
        board[cell] = encoding.board_from_ids([int(logits_1CV[0, cell].argmax())])[0]
        board_1C = torch.tensor([board])
        yield SolveStep((0,), (0,), step + 1, board_1C, board_1C > 0)
    is_solved = is_solution(tuple(board), puzzle)
    yield Solution(
        number=0,
        puzzle=puzzle,
        board=tuple(board),
        solved=is_solved,
        settled=True,
        at_first=is_solved,
        canvases=1,
        forwards=puzzle.count(0),
        revisions=0,
        seconds=time.perf_counter() - start_time,
        seed=seed,
    )


def _encode_prompt(model: Backbone, adapter: Adapter | None = None) -> KVCache:
    """Prefills the prompt that all boards share: the names of the cells."""
    cache = model.new_cache(1, 1 + CELLS, adapter=adapter)
    model.encode(torch.tensor([[model.config.bos_token_id, *encoding.NAMES]], device=model.device), cache)
    return cache


def _start_canvases(
    puzzles: Sequence[Board], attempts: Sequence[Attempt], cfg: SamplerConfig, seed: int, device: torch.device
) -> tuple[Canvas, CanvasConstraints, Draws]:
    """Canvases before their first step: clues and guesses pinned, start digits where given, noise elsewhere."""
    pins = []
    for attempt in attempts:
        guessed = {cell: encoding.CLUES[digit - 1] for cell, digit in attempt.guesses}
        pins.append(Constraints(pins=encoding.clue_pins(puzzles[attempt.number]) | guessed, forbidden=FORBIDDEN))
    constraints = build_canvas_constraints(pins, 0, CELLS, encoding.VOCAB_SIZE, cfg.eos_token_ids, device)
    assert constraints is not None
    draws = rng.draws([seed + attempt.number + attempt.index * ATTEMPT_SEED_STRIDE for attempt in attempts], 0, device)
    start_NC = torch.tensor([attempt.start or (0,) * CELLS for attempt in attempts], device=device)
    noise_NC = draws.noise(0, CELLS, encoding.VOCAB_SIZE)
    ids_NC = torch.where(start_NC > 0, start_NC + (encoding.DIGITS.start - 1), noise_NC)
    return sampler.start(ids_NC, constraints), constraints, draws


@dataclass(frozen=True)
class _StepHistory:
    """Totals over the steps so far."""

    revisions_N: Tensor  # digits that changed between two steps
    summed_probs_NCG: Tensor  # probabilities of the digits, summed over the steps
    shaped_NCV: Tensor  # temperature-scaled logits of the last step, for self-conditioning

    @classmethod
    def empty(cls, count: int, device: torch.device) -> "_StepHistory":
        revisions_N = torch.zeros(count, dtype=torch.long, device=device)
        return cls(revisions_N, torch.zeros(count, CELLS, 9, device=device), torch.zeros(count, 0, 0, device=device))

    def extend(self, before: Canvas, now: Canvas, shaped_NCV: Tensor) -> "_StepHistory":
        changed_N = (now.best_BC != before.best_BC).sum(dim=-1) if before.step else 0
        probs_NCG = shaped_NCV[..., encoding.DIGITS.start : encoding.DIGITS.stop].softmax(dim=-1)
        return _StepHistory(self.revisions_N + changed_N, self.summed_probs_NCG + probs_NCG, shaped_NCV)


def _draw_symmetry(attempts: Sequence[Attempt], draws: Draws, step: int) -> Symmetry:
    """Draws the symmetry of each row for the next steps. A first attempt starts with the puzzle as it was given."""
    is_first_N = torch.tensor([step == 0 and attempt.index == 0 for attempt in attempts], device=draws.seeds_B.device)
    drawn = Symmetry.from_uniform(replace(draws, block=SYMMETRY_BLOCK).uniform(step, SYMMETRY_DRAWS))
    return Symmetry.identity(len(attempts), is_first_N.device).where(is_first_N, drawn)


def _count_siblings(attempts: Sequence[Attempt], row: int, finished: Sequence[int]) -> int:
    """Counts the other canvases of this row's puzzle that go on, or that finished at the same step in a later row."""
    return sum(
        attempt.number == attempts[row].number and (at > row or at not in finished)
        for at, attempt in enumerate(attempts)
        if at != row
    )


def _select_rows(record: Any, rows_N: Tensor) -> Any:
    """Takes some rows of every tensor in a dataclass."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{name: value[rows_N] for name, value in values.items() if isinstance(value, Tensor)})
