"""Sudoku puzzles to train on: from CSV files and from the generator, drawn at random and transformed by symmetries.

Shapes: P puzzles in the pool, N puzzles drawn, C = 81 cells, F sources (files, then the generator).
"""

import csv
import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Vocabulary
from torch import Tensor

from redraft.tasks.sudoku import encoding, generator
from redraft.tasks.sudoku.board import CELLS, Board, BoardError, parse
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train import checkpoints
from redraft.train.data import SPECIAL_TOKENS
from redraft.train.records import open_text

PUZZLES_AT_ONCE = 8192  # generated or written together
MIN_CLUES, MAX_CLUES = 24, 45  # of generated puzzles that are not minimal


@dataclass(frozen=True, kw_only=True)
class PuzzleConfig:
    """The puzzles, and how long the model works on each."""

    files: tuple[str, ...] = ()  # CSV with columns puzzle and solution; .xz and .gz are decompressed
    shares: tuple[float, ...] = ()  # of the puzzles, one for each file; the rest is generated
    generated: int = 100_000  # puzzles to generate unless `cache_file` exists; half of them are minimal
    cache_file: str = "puzzles.npz"  # holds the generated puzzles
    max_steps: int = 24  # an unsolved puzzle is dropped after this many denoising steps
    symmetry_share: float = 0.25  # share of canvases that a random symmetry transforms after a step, as in solve.py
    unrolled_steps: int = 1  # denoising steps per training step; gradients flow from each step to the one before
    causal: bool = False  # train an autoregressive model instead, for comparison
    hint_share: float = 0.2  # share of puzzles that start with some cells filled in, one in ten of them wrongly
    temperatures: tuple[float, float] = (0.3, 1.0)  # each puzzle draws its temperature from this range
    entropy_bounds: tuple[float, float] = (0.03, 1.0)  # and its entropy bound from this one
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.files) != len(self.shares):
            raise ValueError(f"each file of puzzles needs a share: {len(self.files)} files have {len(self.shares)} shares")
        if self.generated < 1 or not 0 <= sum(self.shares) < 1:
            raise ValueError(
                f"generated must be at least 1 and the shares of files below 1 in all, got {self.generated} and "
                f"{sum(self.shares):.2f}"
            )
        for low, high in (self.temperatures, self.entropy_bounds):
            if not 0 < low <= high:
                raise ValueError(f"temperatures and entropy_bounds are ranges above 0, got {low} to {high}")
        if not all(0 <= share <= 1 for share in (self.hint_share, self.symmetry_share, *self.shares)):
            raise ValueError(
                "hint_share, symmetry_share and shares are between 0 and 1, "
                f"got {self.hint_share}, {self.symmetry_share} and {self.shares}"
            )
        for name in ("max_steps", "unrolled_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def length(self) -> int:
        """Tokens of a row in one training step."""
        return CELLS * (1 if self.causal else self.unrolled_steps)


def build_tokenizer() -> Tokenizer:
    """Builds the word-level tokenizer of the vocabulary in `tasks/sudoku/encoding.py`."""
    words = {word: index for index, word in enumerate([*SPECIAL_TOKENS, *encoding.WORDS])}
    vocabulary = Vocabulary(models.WordLevel(words, SPECIAL_TOKENS[0]))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    vocabulary.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return Tokenizer(vocabulary)


def read_puzzles(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads puzzles and solutions from a CSV file: digits [P, C]."""
    boards_of: dict[str, list[Board]] = {"puzzle": [], "solution": []}
    with open_text(path) as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            for column, boards in boards_of.items():
                try:
                    boards.append(parse(row.get(column) or ""))
                except BoardError as error:
                    raise BoardError(f"{path}, line {number}, {column}: {error}") from None
    if not boards_of["puzzle"]:
        raise BoardError(f"{path} has no puzzles")
    return np.array(boards_of["puzzle"], dtype=np.uint8), np.array(boards_of["solution"], dtype=np.uint8)


def generate_puzzles(cfg: PuzzleConfig, device: torch.device) -> tuple[np.ndarray, np.ndarray]:
    """Returns generated puzzles and solutions, from the cache file if it exists."""
    if checkpoints.is_main_process() and not Path(cfg.cache_file).exists():
        rng = torch.Generator(device).manual_seed(cfg.seed)
        parts = []
        for begin in range(0, cfg.generated, PUZZLES_AT_ONCE):
            full_NC = generator.full_boards(min(PUZZLES_AT_ONCE, cfg.generated - begin), rng, device)
            clues_N = torch.randint(MIN_CLUES, MAX_CLUES + 1, (len(full_NC),), generator=rng, device=device)
            clues_N[::2] = 0
            puzzles_NC = generator.remove_clues(full_NC, clues_N, rng)
            parts.append(torch.stack([puzzles_NC, full_NC]).to(torch.uint8).cpu())
        puzzles, solutions = torch.cat(parts, dim=1).numpy()
        partial = Path(cfg.cache_file + ".part.npz")
        partial.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(partial, puzzles=puzzles, solutions=solutions)
        partial.replace(cfg.cache_file)
    checkpoints.barrier()
    with np.load(cfg.cache_file) as file:
        return file["puzzles"], file["solutions"]


class PuzzlePool:
    """All puzzles on the device. A draw picks a source by its share, one of its puzzles, and a random symmetry."""

    def __init__(self, cfg: PuzzleConfig, device: torch.device) -> None:
        parts = [*(read_puzzles(file) for file in cfg.files), generate_puzzles(cfg, device)]
        self.puzzles_PC, self.solutions_PC = (
            torch.from_numpy(np.concatenate(column)).to(device) for column in zip(*parts, strict=True)
        )
        self.sizes_F = torch.tensor([len(puzzles) for puzzles, _ in parts], device=device)
        self.firsts_F = self.sizes_F.cumsum(0) - self.sizes_F
        self.cumulative_F = torch.tensor([*cfg.shares, 1 - sum(cfg.shares)], device=device).cumsum(0)

    def draw(self, count: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws puzzles with their solutions, [count, C]."""
        source_N = torch.searchsorted(self.cumulative_F, torch.rand(count, generator=rng, device=rng.device))
        source_N = source_N.clamp(max=len(self.cumulative_F) - 1)
        uniform_N = torch.rand(count, generator=rng, device=rng.device, dtype=torch.float64)
        index_N = self.firsts_F[source_N] + (uniform_N * self.sizes_F[source_N]).long()
        symmetry = generator.draw_symmetries(count, rng)
        puzzles_NC = generator.apply_symmetry(self.puzzles_PC[index_N].long(), *symmetry)
        solutions_NC = generator.apply_symmetry(self.solutions_PC[index_N].long(), *symmetry)
        return puzzles_NC, solutions_NC


def write_text_records(cfg: PuzzleConfig, path: Path, count: int, clues: tuple[int, int], seed: int = 0) -> None:
    """Writes puzzles as prompts and solutions as completions, JSON lines, for text models.

    Digits of the solution are added until a puzzle has a number of clues in the range `clues`. The main process writes the
    file once; the others wait.
    """
    pool = PuzzlePool(cfg, torch.device("cpu"))  # every process makes one, since its constructor has a barrier
    if checkpoints.is_main_process() and not path.exists():
        _write_records(pool, path, count, clues, torch.Generator().manual_seed(seed))
    checkpoints.barrier()


def _write_records(pool: PuzzlePool, path: Path, count: int, clues: tuple[int, int], rng: torch.Generator) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    with gzip.open(partial, "wt", encoding="utf-8", compresslevel=1) as file:
        for begin in range(0, count, PUZZLES_AT_ONCE):
            puzzle_NC, solution_NC = pool.draw(min(PUZZLES_AT_ONCE, count - begin), rng)
            puzzle_NC = add_clues(puzzle_NC, solution_NC, clues, rng)
            for puzzle, solution in zip(puzzle_NC.tolist(), solution_NC.tolist(), strict=True):
                record = {"prompt": encoding.prompt_text(puzzle), "completion": encoding.board_text(solution)}
                file.write(json.dumps(record) + "\n")
    partial.rename(path)


def add_clues(puzzle_NC: Tensor, solution_NC: Tensor, clues: tuple[int, int], rng: torch.Generator) -> Tensor:
    """Adds random digits of the solutions, up to a number of clues drawn from the range `clues`."""
    wanted_N = torch.randint(clues[0], clues[1] + 1, (len(puzzle_NC),), generator=rng)
    order_NC = torch.rand(puzzle_NC.shape, generator=rng) - (puzzle_NC > 0).float()  # clues sort first
    rank_NC = order_NC.argsort(dim=-1).argsort(dim=-1)
    return torch.where((rank_NC < wanted_N[:, None]) | (puzzle_NC > 0), solution_NC, 0)
