"""Sudoku on canvases: clues pinned, noise in the open cells, redrafted until the board stands still.

Every canvas is what `generate` makes of it, token for token; here many of them run at once, and one that is done leaves the
batch. With `check` a finished board is held against the rules, which is not the model's doing and is counted apart: a wrong
one is tried again, from itself partly noised or from noise, on ever more canvases at a time, up to a limit.

Shapes: N canvases in the batch, C = 81 cells.
"""

import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from redraft import random, rules, sampler
from redraft.config import SamplerConfig
from redraft.model import DiffusionGemma
from redraft.rules import Rules
from redraft.sudoku import tokens
from redraft.sudoku.board import CELLS, Board, clashing, solves
from redraft.sudoku.generator import symmetries, turned

ROWS = 64  # canvases in a batch
STRUCK = 0.4  # of the cells of a wrong board, noised for another try
ATTEMPT = 1 << 32  # between the seeds of two tries of one puzzle
FORBIDDEN = tuple(token for token in range(tokens.SIZE) if token not in tokens.DIGITS)  # but where pinned


@dataclass(frozen=True)
class Solution:
    """What became of a puzzle."""

    number: int  # of the puzzle, in the order given
    puzzle: Board
    board: Board
    solved: bool  # by the rules
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

    def way(self, seed: int) -> tuple[Tensor, Tensor]:
        """The symmetry under which the model sees the puzzle: what it cannot find one way it may find another.

        The first try has the puzzle as it is given.
        """
        if not self.attempt:
            return torch.arange(CELLS), torch.arange(1, 10)
        chance = torch.Generator().manual_seed((seed + self.number + self.attempt * ATTEMPT) % 2**63)
        from_1C, digits_1G = symmetries(1, chance)
        return from_1C[0], digits_1G[0]


@dataclass(frozen=True)
class Outcome:
    """One canvas that is done."""

    of: Try
    board: Board
    settled: bool
    steps: int
    revisions: int
    beside: int  # canvases of the same puzzle still at work then


def fits(model: DiffusionGemma) -> bool:
    """Whether this is a model for boards."""
    return model.config.vocab_size == tokens.SIZE and model.config.canvas_length == CELLS


def solve(
    model: DiffusionGemma,
    puzzles: Sequence[Board],
    cfg: SamplerConfig,
    *,
    seed: int,
    canvases: int = 64,
    check: bool = True,
    rows: int = ROWS,
) -> Iterator[Pass | Solution]:
    """Solves puzzles, in batches, and tells each when it is done. Puzzle number i has the seed `seed + i`.

    Without `check` every puzzle has one canvas, right or wrong. What cannot be run is refused at once.
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
    return _solve(model, puzzles, cfg, seed, canvases if check else 1, rows)


def _solve(
    model: DiffusionGemma, puzzles: Sequence[Board], cfg: SamplerConfig, seed: int, most: int, rows: int
) -> Iterator[Pass | Solution]:
    for begin in range(0, len(puzzles), rows):
        numbers = range(begin, min(begin + rows, len(puzzles)))
        books = {number: _Book(number, puzzles[number], seed + number) for number in numbers}
        while books:
            tries = [one for book in books.values() for one in book.next_tries(most)]
            for some in _batches(tries, rows):
                for event in run(model, puzzles, some, cfg, seed, books):
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
        """One at first, then as many as there were: half of them begin from wrong boards, half from noise."""
        count = min(max(1, self.tried), most - self.tried)
        found = []
        for attempt in range(self.tried, self.tried + count):
            again = attempt % 2 and self.outcomes
            start = self._doubted(self.outcomes[-1 - (attempt // 2) % self.tried].board, attempt) if again else None
            found.append(Try(self.number, attempt, start))
        return found

    def _doubted(self, board: Board, attempt: int) -> Board:
        """A wrong board without the digits that contradict one another, and without some of the others."""
        draws = random.draws([self.seed + attempt * ATTEMPT], 1)
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


@torch.inference_mode()
def run(
    model: DiffusionGemma,
    puzzles: Sequence[Board],
    tries: Sequence[Try],
    cfg: SamplerConfig,
    seed: int,
    wanted: Container[int],
) -> Iterator[Pass | Outcome]:
    """Canvases side by side, as `generate` would run each. One that is done leaves, as do those no longer wanted."""
    device, tries = model.device, list(tries)
    from_NC, digits_NG = (torch.stack(column) for column in zip(*(one.way(seed) for one in tries), strict=True))
    seen_NC = turned(torch.tensor([puzzles[one.number] for one in tries]), from_NC, digits_NG)
    given_NC = turned(torch.tensor([one.start or (0,) * CELLS for one in tries]), from_NC, digits_NG).to(device)
    back = _Back(from_NC.to(device), digits_NG.to(device))
    cache = model.new_cache(1, 1 + CELLS)
    model.encode(torch.tensor([[model.config.bos_token_id, *tokens.NAMES]], device=device), cache)  # the same for all
    cache = cache.rows_of([0] * len(tries))
    constraints = [Rules(pins=tokens.pins(tuple(board)), forbidden=FORBIDDEN) for board in seen_NC.tolist()]
    draws = random.draws([seed + one.number + one.attempt * ATTEMPT for one in tries], 0, device)
    fixed = rules.on_canvas(constraints, 0, CELLS, tokens.SIZE, cfg.eos_token_ids, device)
    noise_NC = draws.noise(0, CELLS, tokens.SIZE)
    ids_NC = torch.where(given_NC > 0, given_NC + (tokens.DIGITS.start - 1), noise_NC)
    state = sampler.start(ids_NC, fixed)
    revised_N, soft_NCD = torch.zeros(len(tries), dtype=torch.long, device=device), None
    while tries:
        logits_NCV = model.denoise(state.ids_BC, soft_NCD, cache)
        before_NC = state.best_BC if state.step else None
        state, shaped_NCV = sampler.step(logits_NCV, state, cfg, draws, fixed)
        if before_NC is not None:
            revised_N = revised_N + (state.best_BC != before_NC).sum(dim=-1)
        whose = tuple(one.number for one in tries), tuple(one.attempt for one in tries)
        boards_NC = back.boards(state.best_BC)
        yield Pass(*whose, state.step, boards_NC, back.places(state.accepted_BC))
        out = state.step >= cfg.max_steps
        done = [row for row, settled in enumerate(state.settled_B.tolist()) if settled or out]
        for row in done:
            if tries[row].number in wanted:
                board, settled = tuple(boards_NC[row].tolist()), bool(state.settled_B[row])
                yield Outcome(tries[row], board, settled, state.step, int(revised_N[row]), _beside(tries, row, done))
        left = [row for row in range(len(tries)) if row not in done and tries[row].number in wanted]
        if len(left) < len(tries):
            at_N = torch.tensor(left, dtype=torch.long, device=device)
            tries = [tries[row] for row in left]
            if not tries:
                return
            state, fixed, draws = _rows(state, at_N), _rows(fixed, at_N), _rows(draws, at_N)
            cache, back, shaped_NCV, revised_N = cache.rows_of(left), _rows(back, at_N), shaped_NCV[at_N], revised_N[at_N]
        soft_NCD = model.soft_embed(shaped_NCV)


@dataclass(frozen=True)
class _Back:
    """From what the model sees to the puzzle as it was given."""

    from_NC: Tensor
    digits_NG: Tensor

    def places(self, values_NC: Tensor) -> Tensor:
        """Cells where they belong."""
        return torch.empty_like(values_NC).scatter_(1, self.from_NC, values_NC)

    def boards(self, ids_NC: Tensor) -> Tensor:
        """Digits of token ids; 0 where a token is none."""
        digit_V = torch.tensor(tokens.board(list(range(tokens.SIZE))), device=ids_NC.device)
        names_NG = torch.zeros(len(ids_NC), 10, dtype=torch.long, device=ids_NC.device)
        names_NG.scatter_(1, self.digits_NG, torch.arange(1, 10, device=ids_NC.device).expand_as(self.digits_NG))
        return self.places(names_NG.gather(1, digit_V[ids_NC]))


def _beside(tries: Sequence[Try], row: int, done: Sequence[int]) -> int:
    """How many canvases of this row's puzzle go on, or are done at the same step and further down."""
    return sum(one.number == tries[row].number and (at > row or at not in done) for at, one in enumerate(tries) if at != row)


def _rows(record: Any, at_N: Tensor) -> Any:
    """Some rows of a record of tensors."""
    parts = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **{name: value[at_N] for name, value in parts.items() if isinstance(value, Tensor)})
