"""Sudoku on canvases: clues pinned, noise in the open cells, redrafted until the board stands still.

Every canvas is what `generate` makes of it, token for token, but that every few passes the model is shown the board another
way: what it cannot settle one way it may settle another. Many canvases run at once, and one that is done leaves the batch.

With `check` a finished board is held against the constraints, which is not the model's doing and is counted apart: a wrong one is
tried again on ever more canvases at a time, up to a limit. They begin from noise or from the wrong board partly noised,
and take a digit or two for granted that the first canvas was in doubt about: a wrong guess cannot settle, a right one helps.

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
from redraft.kernels.threads import adapt_threads
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.kv_cache import KVCache
from redraft.tasks.sudoku import encoding
from redraft.tasks.sudoku.board import CELLS, Board, clashing, solves
from redraft.tasks.sudoku.generator import CHANCE
from redraft.tasks.sudoku.views import View

ROWS = 64  # canvases in a batch
TURN = 4  # passes until the board is shown another way
AGAIN = 32  # passes of a canvas behind the first, at the most
STRUCK = 0.4  # of the cells of a wrong board, noised for another try
ONE, TWO = 2, 16  # the attempts from which one cell is guessed, and two
ATTEMPT = 1 << 32  # between the seeds of two tries of one puzzle
DOUBTS, GUESSES, VIEWS = 1, 2, 3  # blocks of draws; 0 is the canvas's own
FORBIDDEN = tuple(token for token in range(encoding.SIZE) if token not in encoding.DIGITS)  # but where pinned


@dataclass(frozen=True)
class Solution:
    """What became of a puzzle."""

    number: int  # of the puzzle, in the order given
    puzzle: Board
    board: Board
    solved: bool  # by the constraints
    settled: bool  # the last canvas stood still; else it ran out of steps
    at_first: bool  # the first canvas was right, without any check
    canvases: int
    forwards: int  # passes that worked on this puzzle, on all its canvases
    revisions: int  # digits that were thought better of, on the canvas that is shown
    seconds: float  # from the start of its first canvas
    seed: int


@dataclass(frozen=True)
class Pass:
    """The batch after one step: for whoever wants to look."""

    numbers: tuple[int, ...]  # which puzzles
    tries: tuple[int, ...]
    step: int
    boards_NC: Tensor  # digits
    accepted_NC: Tensor


@dataclass(frozen=True)
class Try:
    """One canvas to be run."""

    number: int
    attempt: int  # 0 is the first
    start: Board | None = None  # digits to begin from; 0 and None are noise
    guesses: tuple[tuple[int, int], ...] = ()  # cells and digits that are pinned as if they were clues


@dataclass(frozen=True)
class Outcome:
    """One canvas that is done."""

    of: Try
    board: Board
    settled: bool
    steps: int
    revisions: int
    beside: int  # canvases of the same puzzle still at work then
    belief_CG: Tensor  # probabilities of the digits, the mean of all passes; of no use where a clue stands


def fits(model: DiffusionGemma) -> bool:
    """Whether this is a model for boards."""
    return model.config.vocab_size == encoding.SIZE and model.config.canvas_length == CELLS


def solve(
    model: DiffusionGemma,
    puzzles: Sequence[Board],
    cfg: SamplerConfig,
    *,
    seed: int,
    canvases: int = 64,
    check: bool = True,
    turn: int = TURN,
    rows: int = ROWS,
) -> Iterator[Pass | Solution]:
    """Solves puzzles, in batches, and tells each when it is done. Puzzle number i has the seed `seed + i`.

    Without `check` every puzzle has one canvas, right or wrong. With `turn` 0 a canvas is seen the same way throughout.
    What cannot be run is refused at once.
    """
    if not fits(model):
        raise ValueError(
            f"this model has a vocabulary of {model.config.vocab_size} and pages of {model.config.canvas_length}: "
            "it was not made for boards; use redraft/weights/sudoku"
        )
    for name, value in (("seed", seed), ("canvases", canvases)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
    if canvases < 1:
        raise ValueError(f"a puzzle needs at least one canvas, got {canvases}")
    return _solve(model, puzzles, cfg, seed, canvases if check else 1, turn, rows)


def _solve(
    model: DiffusionGemma, puzzles: Sequence[Board], cfg: SamplerConfig, seed: int, most: int, turn: int, rows: int
) -> Iterator[Pass | Solution]:
    again = replace(cfg, max_steps=min(cfg.max_steps, AGAIN))
    for begin in range(0, len(puzzles), rows):
        numbers = range(begin, min(begin + rows, len(puzzles)))
        books = {number: _Book(number, puzzles[number], seed + number) for number in numbers}
        while books:
            tries = [one for book in books.values() for one in book.next_tries(most)]
            for some in _batches(tries, rows):  # of first tries, or of others
                for event in run(model, puzzles, some, again if some[0].attempt else cfg, seed, books, turn):
                    if isinstance(event, Pass):
                        yield event
                        continue
                    book = books[event.of.number]
                    book.outcomes.append(event)
                    if book.right or book.tried >= most:
                        yield books.pop(book.number).solution()


def _batches(tries: Sequence[Try], rows: int) -> Iterator[list[Try]]:
    """About so many canvases at once, those of one puzzle always together: what becomes of it depends on nobody else."""
    batch: list[Try] = []
    for _, group in groupby(tries, key=lambda one: one.number):
        some = list(group)
        if batch and len(batch) + len(some) > rows:
            yield batch
            batch = []
        batch += some
    if batch:
        yield batch


class _Book:
    """What is known of one puzzle."""

    def __init__(self, number: int, puzzle: Board, seed: int) -> None:
        self.number, self.puzzle, self.seed, self.began = number, puzzle, seed, time.perf_counter()
        self.outcomes: list[Outcome] = []

    @property
    def tried(self) -> int:
        return len(self.outcomes)

    @property
    def right(self) -> bool:
        return bool(self.outcomes) and solves(self.outcomes[-1].board, self.puzzle)

    def next_tries(self, most: int) -> list[Try]:
        """One at first, then as many as there were: half of them begin from wrong boards, half from noise; most guess."""
        count = min(max(1, self.tried), most - self.tried)
        found = []
        for attempt in range(self.tried, self.tried + count):
            again = attempt % 2 and self.outcomes
            start = self._doubted(self.outcomes[-1 - (attempt // 2) % self.tried].board, attempt) if again else None
            found.append(Try(self.number, attempt, start, self._guesses(attempt)))
        return found

    def _guesses(self, attempt: int) -> tuple[tuple[int, int], ...]:
        """Cells by how much the first canvas was in doubt about them, and a digit for each, as likely as it was held."""
        if attempt < ONE:
            return ()
        open_C = torch.tensor(self.puzzle) == 0
        belief_CG = self.outcomes[0].belief_CG.double()
        doubt_C = torch.special.entr(belief_CG).sum(dim=-1) * open_C + 1e-9 * open_C
        uniform = rng.draws([self.seed + attempt * ATTEMPT], GUESSES).uniform(0, 4)[0]
        found = {}
        for number in range(2 if attempt >= TWO else 1):
            cell = _drawn(doubt_C, uniform[2 * number])
            found[cell] = _drawn(belief_CG[cell], uniform[2 * number + 1]) + 1
        return tuple(found.items())

    def _doubted(self, board: Board, attempt: int) -> Board:
        """A wrong board without the digits that contradict one another, and without some of the others."""
        draws = rng.draws([self.seed + attempt * ATTEMPT], DOUBTS)
        struck = (draws.uniform(0, CELLS)[0] < STRUCK).tolist()
        wrong = clashing(board)
        return tuple(0 if struck[cell] or cell in wrong else digit for cell, digit in enumerate(board))

    def solution(self) -> Solution:
        last = self.outcomes[-1]
        return Solution(
            number=self.number,
            puzzle=self.puzzle,
            board=last.board,
            solved=self.right,
            settled=last.settled,
            at_first=solves(self.outcomes[0].board, self.puzzle),
            canvases=self.tried + (last.beside if self.right else 0),
            forwards=sum(outcome.steps for outcome in self.outcomes) + (last.beside * last.steps if self.right else 0),
            revisions=last.revisions,
            seconds=time.perf_counter() - self.began,
            seed=self.seed,
        )


def _drawn(weights: Tensor, uniform: Tensor) -> int:
    """An index, as likely as its weight."""
    upto = weights.cumsum(0)
    return int(torch.searchsorted(upto, uniform * upto[-1], right=True).clamp(max=len(weights) - 1))


@torch.inference_mode()
def run(
    model: DiffusionGemma,
    puzzles: Sequence[Board],
    tries: Sequence[Try],
    cfg: SamplerConfig,
    seed: int,
    wanted: Container[int],
    turn: int = TURN,
) -> Iterator[Pass | Outcome]:
    """Canvases side by side, as `generate` would run each. One that is done leaves, as do those no longer wanted.

    Only the model sees a board turned; canvas, pins, noise and belief are those of the puzzle as it was given.
    """
    tries, device = list(tries), model.device
    state, fixed, draws = _start(puzzles, tries, cfg, seed, device)
    cache = _names_read(model).select_rows([0] * len(tries))
    digit_V = torch.tensor(encoding.board(list(range(encoding.SIZE))), device=device)
    view, seen = View.straight(len(tries), device), _Seen.nothing(len(tries), device)
    while tries:
        if device.type == "cpu":
            adapt_threads()
        if turn and state.step % turn == 0:
            view = _view(tries, draws, state.step)
        soft_NCD = model.soft_embed(view.logits(seen.shaped_NCV)) if state.step else None
        logits_NCV = view.back(model.denoise(view.ids(state.ids_BC), soft_NCD, cache))
        before = state
        state, shaped_NCV = sampler.step(logits_NCV, state, cfg, draws, fixed)
        seen = seen.and_then(before, state, shaped_NCV)
        boards_NC = digit_V[state.best_BC]
        whose = tuple(one.number for one in tries), tuple(one.attempt for one in tries)
        yield Pass(*whose, state.step, boards_NC, state.accepted_BC)
        out = state.step >= cfg.max_steps
        done = [row for row, settled in enumerate(state.settled_B.tolist()) if settled or out]
        for row in done:
            if tries[row].number in wanted:
                yield Outcome(
                    of=tries[row],
                    board=tuple(boards_NC[row].tolist()),
                    settled=bool(state.settled_B[row]),
                    steps=state.step,
                    revisions=int(seen.revised_N[row]),
                    beside=_beside(tries, row, done),
                    belief_CG=seen.believed_NCG[row].cpu() / state.step,
                )
        left = [row for row in range(len(tries)) if row not in done and tries[row].number in wanted]
        if len(left) < len(tries):
            at_N, cache = torch.tensor(left, dtype=torch.long, device=device), cache.select_rows(left)
            tries = [tries[row] for row in left]
            state, fixed, draws, view, seen = (_rows(record, at_N) for record in (state, fixed, draws, view, seen))


@torch.inference_mode()
def in_reading_order(model: DiffusionGemma, puzzle: Board, *, seed: int) -> Iterator[Pass | Solution]:
    """The same weights in the ordinary order, for comparison: cell after cell its likeliest digit, which then stays."""
    began, device, board = time.perf_counter(), model.device, list(puzzle)
    cache, draws = _names_read(model), rng.draws([seed], 0, device)
    for step, cell in enumerate([cell for cell in range(CELLS) if not puzzle[cell]]):
        constraints = [Constraints(pins=encoding.pins(tuple(board)), forbidden=FORBIDDEN)]
        fixed = build_canvas_constraints(constraints, 0, CELLS, encoding.SIZE, model.config.eos_token_ids, device)
        logits_1CV = fixed.mask_logits(model.denoise(fixed.apply_pins(draws.noise(step, CELLS, encoding.SIZE)), None, cache))
        board[cell] = encoding.board([int(logits_1CV[0, cell].argmax())])[0]
        board_1C = torch.tensor([board])
        yield Pass((0,), (0,), step + 1, board_1C, board_1C > 0)
    found, passes, right = tuple(board), puzzle.count(0), solves(tuple(board), puzzle)
    told = {"solved": right, "settled": True, "at_first": right, "canvases": 1, "forwards": passes, "revisions": 0}
    yield Solution(number=0, puzzle=puzzle, board=found, **told, seconds=time.perf_counter() - began, seed=seed)


def _names_read(model: DiffusionGemma) -> KVCache:
    """A cache that holds what stands before every board."""
    cache = model.new_cache(1, 1 + CELLS)
    model.encode(torch.tensor([[model.config.bos_token_id, *encoding.NAMES]], device=model.device), cache)
    return cache


def _start(
    puzzles: Sequence[Board], tries: Sequence[Try], cfg: SamplerConfig, seed: int, device: torch.device
) -> tuple[Canvas, CanvasConstraints, Draws]:
    """Canvases before their first pass: clues and guesses pinned, digits to begin from, noise elsewhere."""
    constraints = []
    for one in tries:
        guessed = {cell: encoding.CLUES[digit - 1] for cell, digit in one.guesses}
        constraints.append(Constraints(pins=encoding.pins(puzzles[one.number]) | guessed, forbidden=FORBIDDEN))
    fixed = build_canvas_constraints(constraints, 0, CELLS, encoding.SIZE, cfg.eos_token_ids, device)
    draws = rng.draws([seed + one.number + one.attempt * ATTEMPT for one in tries], 0, device)
    given_NC = torch.tensor([one.start or (0,) * CELLS for one in tries], device=device)
    noise_NC = draws.noise(0, CELLS, encoding.SIZE)
    ids_NC = torch.where(given_NC > 0, given_NC + (encoding.DIGITS.start - 1), noise_NC)
    return sampler.start(ids_NC, fixed), fixed, draws


@dataclass(frozen=True)
class _Seen:
    """What the passes so far have brought."""

    revised_N: Tensor  # digits that changed
    believed_NCG: Tensor  # probabilities, added up
    shaped_NCV: Tensor  # the last logits, as the next pass is told them

    @classmethod
    def nothing(cls, count: int, device: torch.device) -> "_Seen":
        revised_N = torch.zeros(count, dtype=torch.long, device=device)
        return cls(revised_N, torch.zeros(count, CELLS, 9, device=device), torch.zeros(count, 0, 0, device=device))

    def and_then(self, before: Canvas, now: Canvas, shaped_NCV: Tensor) -> "_Seen":
        changed_N = (now.best_BC != before.best_BC).sum(dim=-1) if before.step else 0
        probs_NCG = shaped_NCV[..., encoding.DIGITS.start : encoding.DIGITS.stop].softmax(dim=-1)
        return _Seen(self.revised_N + changed_N, self.believed_NCG + probs_NCG, shaped_NCV)


def _view(tries: Sequence[Try], draws: Draws, step: int) -> View:
    """How the model sees the boards from this pass on; the first try begins with the puzzle as it is given."""
    first_N = torch.tensor([step == 0 and one.attempt == 0 for one in tries], device=draws.seeds_B.device)
    other = View.drawn(replace(draws, block=VIEWS).uniform(step, CHANCE))
    return View.straight(len(tries), first_N.device).where(first_N, other)


def _beside(tries: Sequence[Try], row: int, done: Sequence[int]) -> int:
    """How many canvases of this row's puzzle go on, or are done at the same step and further down."""
    return sum(one.number == tries[row].number and (at > row or at not in done) for at, one in enumerate(tries) if at != row)


def _rows(record: Any, at_N: Tensor) -> Any:
    """Some rows of a record of tensors."""
    parts = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{name: value[at_N] for name, value in parts.items() if isinstance(value, Tensor)})
