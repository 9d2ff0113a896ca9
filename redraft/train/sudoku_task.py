"""What a run needs to learn to solve puzzles: boards as the sampler leaves them between two steps, and a loss on them.

Every row of a batch is a place for a puzzle. A step is one pass over all places: the model reads the canvas, is told what it
believed before, and learns to say the solution in every open cell; then each canvas moves as the sampler would move it,
and some are turned by a symmetry. A puzzle leaves when it was solved twice in a row, or after `passes`, and another takes
its place: so the passes go to those that need them, and what the model learns on are its own half-solved boards, errors
included.

A model that reads from left to right learns here too, for comparison: the puzzle, then the solution, cell after cell.
Shapes: B places, C = 81 cells, G = 9 digits, S prompt tokens, P puzzles, D model size.
"""

import csv
import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Vocabulary
from torch import Tensor, nn

from redraft.config import ModelConfig
from redraft.diffusion import sampler
from redraft.kernels import softcap_
from redraft.model import masks
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.tasks.sudoku import encoding, text_encoding
from redraft.tasks.sudoku import generator as boards
from redraft.tasks.sudoku.board import CELLS, Board, BoardError, parse
from redraft.tasks.sudoku.views import View
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train import checkpoints
from redraft.train.data import MARKS, open_text
from redraft.train.loss import Losses, imbalance

if TYPE_CHECKING:
    from redraft.train.loop import TrainConfig

AT_ONCE = 8192  # puzzles made together
FEWEST, MOST = 24, 45  # clues of those that are not dug as far as they go


@dataclass(frozen=True, kw_only=True)
class PuzzleConfig:
    """Which puzzles, and how long each is worked on."""

    files: tuple[str, ...] = ()  # CSV with columns puzzle and solution; .xz and .gz are read too
    shares: tuple[float, ...] = ()  # of the puzzles, one for each file; the rest is generated
    generated: int = 100_000  # puzzles made when the run begins, unless `kept` has some already; half of them minimal
    kept: str = "puzzles.npz"
    passes: int = 24  # a puzzle that is not solved by then is given up
    turned: float = 0.25  # of canvases, after a pass: shown another way from then on, as `solving.py` does
    together: int = 1  # passes of a step; what one of them believes is learned with what the next makes of it
    causal: bool = False  # learn left to right instead, for comparison
    given: float = 0.2  # of puzzles: begin with some cells filled in, one in ten of them wrongly
    temperatures: tuple[float, float] = (0.3, 1.0)  # each puzzle has its own,
    bounds: tuple[float, float] = (0.03, 1.0)  # and its own entropy bound
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.files) != len(self.top_probs):
            raise ValueError(f"{len(self.files)} files of puzzles have {len(self.top_probs)} shares")
        if self.generated < 1 or not 0 <= sum(self.top_probs) < 1:
            raise ValueError(f"something must be generated: {self.generated} puzzles, files have {sum(self.top_probs):.2f}")
        for low, high in (self.temperatures, self.bounds):
            if not 0 < low <= high:
                raise ValueError(f"temperatures and bounds go from above 0 upwards, got {low} to {high}")
        if not all(0 <= share <= 1 for share in (self.given, self.turned, *self.top_probs)):
            raise ValueError(f"given, turned and shares are shares, got {self.given}, {self.turned} and {self.top_probs}")
        for name in ("passes", "together"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def length(self) -> int:
        """Tokens of a row that a step reads."""
        return CELLS * (1 if self.causal else self.together)


def tokenizer() -> Tokenizer:
    """The vocabulary of `sudoku/tokens.py`, words parted by spaces."""
    vocabulary = Vocabulary(models.WordLevel({word: i for i, word in enumerate([*MARKS, *encoding.WORDS])}, MARKS[0]))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    vocabulary.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return Tokenizer(vocabulary)


# 1. Puzzles


def read_puzzles(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Puzzles and solutions of a CSV file, digits [P, C]."""
    found: tuple[list[Board], list[Board]] = ([], [])
    with open_text(path) as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            for name, column in zip(("puzzle", "solution"), found, strict=True):
                try:
                    column.append(parse(row.get(name) or ""))
                except BoardError as error:
                    raise BoardError(f"{path}, line {number}, {name}: {error}") from None
    if not found[0]:
        raise BoardError(f"{path} has no puzzles")
    puzzles, solutions = (np.array(column, dtype=np.uint8) for column in found)
    return puzzles, solutions


def make_puzzles(cfg: PuzzleConfig, device: torch.device) -> tuple[np.ndarray, np.ndarray]:
    """Generated puzzles, from the file of an earlier call where there is one."""
    if checkpoints.first() and not Path(cfg.kept).exists():
        chance, found = torch.Generator(device).manual_seed(cfg.seed), []
        for begin in range(0, cfg.generated, AT_ONCE):
            full_NC = boards.full_boards(min(AT_ONCE, cfg.generated - begin), chance, device)
            clues_N = torch.randint(FEWEST, MOST + 1, (len(full_NC),), generator=chance, device=device)
            clues_N[::2] = 0
            found.append(torch.stack([boards.dig(full_NC, clues_N, chance), full_NC]).to(torch.uint8).cpu())
        puzzles, solutions = torch.cat(found, dim=1).numpy()
        part = Path(cfg.kept + ".part.npz")
        part.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(part, puzzles=puzzles, solutions=solutions)
        part.replace(cfg.kept)
    checkpoints.barrier()
    with np.load(cfg.kept) as file:
        return file["puzzles"], file["solutions"]


class Pool:
    """All puzzles on the device, and puzzles drawn from it: a source by its share, one of its puzzles, turned by chance."""

    def __init__(self, cfg: PuzzleConfig, device: torch.device) -> None:
        parts = [*(read_puzzles(file) for file in cfg.files), make_puzzles(cfg, device)]
        both = [torch.from_numpy(np.concatenate(column)).to(device) for column in zip(*parts, strict=True)]
        self.puzzles_PC, self.solutions_PC = both
        sizes = torch.tensor([len(puzzles) for puzzles, _ in parts], device=device)
        self.sizes_F, self.firsts_F = sizes, sizes.cumsum(0) - sizes
        self.upto_F = torch.tensor([*cfg.top_probs, 1 - sum(cfg.top_probs)], device=device).cumsum(0)

    def draw(self, count: int, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        """That many puzzles with their solutions, [count, C]."""
        file_N = torch.searchsorted(self.upto_F, torch.rand(count, generator=chance, device=chance.device))
        file_N = file_N.clamp(max=len(self.upto_F) - 1)
        place_N = torch.rand(count, generator=chance, device=chance.device, dtype=torch.float64) * self.sizes_F[file_N]
        at_N = self.firsts_F[file_N] + place_N.long()
        way = boards.symmetries(count, chance)
        return boards.turned(self.puzzles_PC[at_N].long(), *way), boards.turned(self.solutions_PC[at_N].long(), *way)


def write_texts(cfg: PuzzleConfig, path: Path, count: int, clues: tuple[int, int], seed: int = 0) -> None:
    """Puzzles of the pool with so many clues, digits of the solution added, as prompts and completions: JSON lines.

    Written once, by the first process; the others wait.
    """
    pool = Pool(cfg, torch.device("cpu"))  # all processes make one, since they wait for one another in it
    if checkpoints.first() and not path.exists():
        _write(pool, path, count, clues, torch.Generator().manual_seed(seed))
    checkpoints.barrier()


def _write(pool: Pool, path: Path, count: int, clues: tuple[int, int], chance: torch.Generator) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with gzip.open(part, "wt", encoding="utf-8", compresslevel=1) as file:
        for begin in range(0, count, AT_ONCE):
            puzzle_NC, solution_NC = pool.draw(min(AT_ONCE, count - begin), chance)
            puzzle_NC = with_more(puzzle_NC, solution_NC, clues, chance)
            for puzzle, solution in zip(puzzle_NC.tolist(), solution_NC.tolist(), strict=True):
                file.write(
                    json.dumps({"prompt": text_encoding.prompt(puzzle), "completion": text_encoding.answer(solution)}) + "\n"
                )
    part.rename(path)


def with_more(puzzle_NC: Tensor, solution_NC: Tensor, clues: tuple[int, int], chance: torch.Generator) -> Tensor:
    """Puzzles with digits of their solutions added, up to a number of clues between these two."""
    wanted_N = torch.randint(clues[0], clues[1] + 1, (len(puzzle_NC),), generator=chance)
    order_NC = torch.rand(puzzle_NC.shape, generator=chance) - (puzzle_NC > 0).float()  # clues come first
    rank_NC = order_NC.argsort(dim=-1).argsort(dim=-1)
    return torch.where((rank_NC < wanted_N[:, None]) | (puzzle_NC > 0), solution_NC, 0)


# 2. Places


@dataclass
class Places:
    """Puzzles being worked on. Tensors stay where they are and are written over: a checkpoint reads into them."""

    puzzle_BC: Tensor
    solution_BC: Tensor
    ids_BC: Tensor  # the canvas
    probs_BCG: Tensor  # what the last pass believed; zeros before the first
    passes_B: Tensor
    right_B: Tensor  # passes in a row that the likeliest board was the solution
    over_B: Tensor  # to be replaced
    temperature_B: Tensor
    bound_B: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> "Places":
        """All of them to be filled."""
        board, number = torch.zeros(rows, CELLS, dtype=torch.long), torch.zeros(rows)
        probs, over = torch.zeros(rows, CELLS, 9), torch.ones(rows, dtype=torch.bool)
        whole = (board, board, board, probs, number.long(), number.long(), over, number, number)
        return cls(*(tensor.clone().to(device) for tensor in whole))

    def put(self, where_B: Tensor, **changes: Tensor) -> None:
        """Writes these fields in these rows."""
        for name, new in changes.items():
            old = getattr(self, name)
            old.copy_(torch.where(where_B.view(-1, *[1] * (old.dim() - 1)), new, old))


def refill(places: Places, pool: Pool, cfg: PuzzleConfig, chance: torch.Generator) -> None:
    """New puzzles where the old ones are over: clues, and noise, or some digits by chance, in the open cells."""
    rows = len(places.over_B)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, generator=chance, device=chance.device)

    puzzle_BC, solution_BC = pool.draw(rows, chance)
    noise_BC = torch.randint(encoding.SIZE, (rows, CELLS), generator=chance, device=chance.device)
    told_B = (uniform(0, 1) < cfg.given) * uniform(0, 1)
    told_BC = torch.rand((rows, CELLS), generator=chance, device=chance.device) < told_B[:, None]
    wrong_BC = torch.rand((rows, CELLS), generator=chance, device=chance.device) < 0.1
    digit_BC = torch.where(wrong_BC, noise_BC % 9, solution_BC - 1) + encoding.DIGITS.start
    low, high = (float(np.log(bound)) for bound in cfg.bounds)
    places.put(
        places.over_B,
        puzzle_BC=puzzle_BC,
        solution_BC=solution_BC,
        ids_BC=with_clues(torch.where(told_BC, digit_BC, noise_BC), puzzle_BC),
        probs_BCG=torch.zeros_like(places.probs_BCG),
        passes_B=torch.zeros_like(places.passes_B),
        right_B=torch.zeros_like(places.right_B),
        temperature_B=uniform(*cfg.temperatures),
        bound_B=uniform(low, high).exp(),
    )


def with_clues(ids_BC: Tensor, puzzle_BC: Tensor) -> Tensor:
    """A canvas with the clues pinned."""
    return torch.where(puzzle_BC > 0, puzzle_BC + (encoding.CLUES.start - 1), ids_BC)


def tempered(logits_BCG: Tensor, places: Places) -> Tensor:
    """Logarithms of the digits' probabilities at each puzzle's temperature."""
    return (logits_BCG.float() / places.temperature_B[:, None, None]).log_softmax(dim=-1)


def advance(places: Places, logits_BCG: Tensor, passes: int, chance: torch.Generator) -> None:
    """Moves every canvas as `sampler.step` would: sample, accept under the bound, noise elsewhere."""
    open_BC = places.puzzle_BC == 0
    logs_BCG = tempered(logits_BCG, places)
    probs_BCG = logs_BCG.exp()
    entropy_BC = -(probs_BCG * logs_BCG).sum(dim=-1) * open_BC
    uniform_BC1 = torch.rand((*open_BC.shape, 1), generator=chance, device=chance.device)
    sampled_BC = (probs_BCG.cumsum(dim=-1) < uniform_BC1).sum(dim=-1).clamp(max=8)
    noise_BC = torch.randint(encoding.SIZE, open_BC.shape, generator=chance, device=chance.device)
    accepted_BC = sampler.accept_by_entropy(entropy_BC, places.bound_B[:, None])
    ids_BC = torch.where(accepted_BC, sampled_BC + encoding.DIGITS.start, noise_BC)
    right_B = ((logits_BCG.argmax(dim=-1) + 1 == places.solution_BC) | ~open_BC).all(dim=-1)
    everywhere = torch.ones_like(right_B)
    places.put(
        everywhere,
        ids_BC=with_clues(ids_BC, places.puzzle_BC),
        probs_BCG=probs_BCG,
        passes_B=places.passes_B + 1,
        right_B=torch.where(right_B, places.right_B + 1, 0),
    )
    places.put(everywhere, over_B=(places.right_B >= 2) | (places.passes_B >= passes))


def turn(places: Places, which_B: Tensor, view: View) -> None:
    """Shows some of the boards another way from now on, with all that is believed of them."""
    places.put(
        which_B,
        puzzle_BC=view.boards(places.puzzle_BC),
        solution_BC=view.boards(places.solution_BC),
        ids_BC=view.ids(places.ids_BC),
        probs_BCG=view.beliefs(places.probs_BCG),
    )


# 3. The objectives


class BoardObjective(nn.Module):
    """A pass over boards, and the cross-entropy of the digits in open cells. The prompt is the same for all: read once."""

    def __init__(self, model: DiffusionGemma, balance_weight: float) -> None:
        super().__init__()
        self.model, self.balance_weight = model, balance_weight
        self.register_buffer("prompt_1S", torch.tensor([[model.config.bos_token_id, *encoding.NAMES]]))

    def compile(self, **options: Any) -> None:
        """Part by part, as the objective of texts."""
        for part in (*self.model.layers, self.model.self_conditioning, self.model.norm):
            part.compile(**options)

    def forward(self, ids_BC: Tensor, probs_BCG: Tensor, puzzle_BC: Tensor, solution_BC: Tensor) -> tuple[Losses, Tensor]:
        """The loss, and the logits of the digits."""
        model, prompt_1S, device = self.model, self.prompt_1S, ids_BC.device
        digits_GD = model.embed_tokens.weight[encoding.DIGITS.start : encoding.DIGITS.stop]
        length = prompt_1S.shape[1]
        table_VD = model.embed_tokens.weight.detach()
        # What was believed: digits, or for certain the clue; zeros before the first pass.
        soft_BCD = probs_BCG.to(model.dtype) @ table_VD[encoding.DIGITS.start : encoding.DIGITS.stop]
        begun_B11 = probs_BCG.detach().flatten(1).any(dim=-1)[:, None, None]
        clues_BCD = F.embedding(with_clues(torch.zeros_like(ids_BC), puzzle_BC), table_VD) * begun_B11
        soft_BCD = torch.where(puzzle_BC[..., None] > 0, clues_BCD, soft_BCD) * model.embed_scale
        at_1S = torch.arange(length, device=device)[None]
        prompt_ropes, ropes = model.rope_tables(at_1S), model.rope_tables(length + torch.arange(CELLS, device=device)[None])
        x_1SD, x_BCD = model.embed(prompt_1S), model.self_conditioning(model.embed(ids_BC), soft_BCD)
        routings = []
        for index, layer in enumerate(model.layers):
            kind, window = model.config.layer_types[index], model.config.layer_window(index)
            nothing = x_1SD.new_empty(1, 0, *model.config.layer_heads(index))
            mask = masks.causal(at_1S, at_1S, window)
            x_1SD, k, v, _ = layer(x_1SD, prompt_ropes[kind], mask, (nothing, nothing), layer.encoder_layer_scalar)
            past = tuple(t.expand(len(x_BCD), -1, -1, -1) for t in (k, v))
            x_BCD, _, _, routing = layer(x_BCD, ropes[kind], None, past, layer.layer_scalar)
            routings.append(routing)
        logits_BCG = softcap_(F.linear(model.norm(x_BCD), digits_GD), model.config.final_logit_softcapping)
        return _total(logits_BCG, puzzle_BC, solution_BC, routings, self.balance_weight), logits_BCG


class CausalObjective(nn.Module):
    """The same from left to right: all 81 cells of the puzzle, then its solution, each digit from what stands before it."""

    def __init__(self, model: DiffusionGemma, balance_weight: float) -> None:
        super().__init__()
        self.model, self.balance_weight = model, balance_weight

    def compile(self, **options: Any) -> None:
        """Part by part."""
        for part in (*self.model.layers, self.model.norm):
            part.compile(**options)

    def forward(self, puzzle_BC: Tensor, solution_BC: Tensor) -> tuple[Losses, Tensor]:
        """The loss, and the logits of the digits."""
        model = self.model
        digits_GD = model.embed_tokens.weight[encoding.DIGITS.start : encoding.DIGITS.stop]
        ids_BS = left_to_right(puzzle_BC, solution_BC[:, :-1], model.config.bos_token_id)
        at_1S = torch.arange(ids_BS.shape[1], device=ids_BS.device)[None]
        ropes, x_BSD, routings = model.rope_tables(at_1S), model.embed(ids_BS), []
        for index, layer in enumerate(model.layers):
            kind, window = model.config.layer_types[index], model.config.layer_window(index)
            nothing = x_BSD.new_empty(len(x_BSD), 0, *model.config.layer_heads(index))
            mask = masks.causal(at_1S, at_1S, window)
            x_BSD, _, _, routing = layer(x_BSD, ropes[kind], mask, (nothing, nothing), layer.encoder_layer_scalar)
            routings.append(routing)
        hidden_BCD = model.norm(x_BSD)[:, -CELLS:]
        logits_BCG = softcap_(F.linear(hidden_BCD, digits_GD), model.config.final_logit_softcapping)
        return _total(logits_BCG, puzzle_BC, solution_BC, routings, self.balance_weight), logits_BCG


def left_to_right(puzzle_BC: Tensor, digits_BN: Tensor, bos: int) -> Tensor:
    """The puzzle, blanks included, and behind it the first digits of a solution."""
    start_B1 = torch.full_like(puzzle_BC[:, :1], bos)
    blank_BC = torch.full_like(puzzle_BC, encoding.BLANK)
    return torch.cat([start_B1, with_clues(blank_BC, puzzle_BC), digits_BN + (encoding.DIGITS.start - 1)], dim=1)


def _total(logits_BCG: Tensor, puzzle_BC: Tensor, solution_BC: Tensor, routings: list, balance_weight: float) -> Losses:
    open_BC = puzzle_BC == 0
    each_N = F.cross_entropy(logits_BCG.flatten(0, 1), (solution_BC - 1).flatten(), reduction="none")
    loss = (each_N * open_BC.flatten()).sum() / open_BC.sum().clamp(min=1)
    uneven, share_E = imbalance(routings)
    return Losses(loss + balance_weight * uneven, loss, torch.zeros_like(loss), share_E)


# 4. The task


class Boards:
    """The task of a run whose data are puzzles; see `text_encoding.py` for what a task is."""

    def __init__(
        self, cfg: "TrainConfig", config: ModelConfig, words: Tokenizer, device: torch.device, numbers: Iterable[int]
    ) -> None:
        if config.vocab_size != encoding.SIZE:
            raise ValueError(f"puzzles have a vocabulary of {encoding.SIZE} tokens, the model {config.vocab_size}")
        self.cfg, self.device = cfg, device
        self.pool = Pool(cfg.data, device)
        self.places = {m: Places.empty(cfg.rows, device) for m in numbers}
        self.counts = torch.zeros(2, device=device)  # left, solved
        self.positions: dict[str, Any] = {}

    def objective(self, model: DiffusionGemma) -> nn.Module:
        """What is compiled, sharded and differentiated."""
        kind = CausalObjective if self.cfg.data.causal else BoardObjective
        return kind(model, self.cfg.loss.balance_weight)

    def open(self) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing to close."""

    def losses(self, compute: Callable[..., Any], m: int, generator: torch.Generator) -> Losses:
        """One pass over the places of microbatch m, which move on."""
        places, cfg = self.places[m], self.cfg.data
        chance = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=generator)))
        refill(places, self.pool, cfg, chance)
        if cfg.causal:
            losses, logits_BCG = compute(places.puzzle_BC, places.solution_BC)
            advance(places, logits_BCG.detach(), 1, chance)
        else:
            losses = self._passes(compute, places, chance)
        self.counts += torch.stack([places.over_B.sum(), (places.over_B & (places.right_B > 0)).sum()])
        return losses

    def _passes(self, compute: Callable[..., Any], places: Places, chance: torch.Generator) -> Losses:
        """The mean of some passes, each told with its gradient what the one before believed."""
        found, probs_BCG = [], places.probs_BCG.clone()  # the gradient needs it after the places have moved on
        for _ in range(self.cfg.data.together):
            losses, logits_BCG = compute(places.ids_BC.clone(), probs_BCG, places.puzzle_BC, places.solution_BC)
            found.append(losses)
            probs_BCG = tempered(logits_BCG, places).exp()
            advance(places, logits_BCG.detach(), self.cfg.data.passes, chance)
            view = View.drawn(torch.rand((len(probs_BCG), boards.CHANCE), generator=chance, device=chance.device))
            which_B = torch.rand(len(probs_BCG), generator=chance, device=chance.device) < self.cfg.data.turned
            turn(places, which_B, view)
            probs_BCG = torch.where(which_B[:, None, None], view.beliefs(probs_BCG), probs_BCG)
        return Losses(*(torch.stack(part).mean(dim=0) for part in zip(*found, strict=True)))

    def tensors(self) -> dict[str, Tensor]:
        """The places: half-solved boards outlive a step."""
        return {f"places.{m}.{f.name}": getattr(places, f.name) for m, places in self.places.items() for f in fields(Places)}

    def told(self) -> dict[str, Any]:
        """The share of puzzles that left solved."""
        left, solved = self.counts.tolist()
        self.counts.zero_()
        return {"epoch": 0, "bad": 0, "solved": solved / left if left else None}
