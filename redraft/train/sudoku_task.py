"""Training on Sudoku puzzles: the model learns from its own half-solved boards.

Every row of a batch is a slot that holds one puzzle. A training step runs one denoising forward over all slots with the
probabilities of the step before as self-conditioning, and the loss asks for the solution in every open cell. Then each
canvas advances as the sampler would advance it, and symmetries transform some boards. A puzzle leaves its slot after two
correct steps in a row, or after `max_steps`; a new one replaces it. So hard puzzles get more steps, and the model sees its
own errors.

For comparison an autoregressive model can be trained on the same puzzles: the puzzle, then the solution, cell by cell.
Shapes: B slots, C = 81 cells, G = 9 digits, S prompt tokens, D hidden size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.config import BackboneConfig
from redraft.diffusion import sampler
from redraft.kernels import softcap_
from redraft.model import masks
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.lora import Adapter
from redraft.tasks.sudoku import encoding
from redraft.tasks.sudoku.board import CELLS
from redraft.tasks.sudoku.generator import SYMMETRY_DRAWS
from redraft.tasks.sudoku.symmetry import Symmetry
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.config import TrainConfig
from redraft.train.loss import Losses, load_balance
from redraft.train.sudoku_data import PuzzleConfig, PuzzlePool

# 1. Slots


@dataclass
class Slots:
    """The puzzles in progress. Tensors are updated in place, so that a checkpoint can load into them."""

    puzzle_BC: Tensor
    solution_BC: Tensor
    ids_BC: Tensor  # the canvas
    probs_BCG: Tensor  # probabilities of the digits at the last step; zeros before the first
    steps_B: Tensor
    correct_B: Tensor  # steps in a row at which the argmax board was the solution
    finished_B: Tensor  # the slot needs a new puzzle
    temperature_B: Tensor
    entropy_bound_B: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> "Slots":
        """Slots that all need a puzzle."""

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        return cls(
            puzzle_BC=zeros(CELLS),
            solution_BC=zeros(CELLS),
            ids_BC=zeros(CELLS),
            probs_BCG=zeros(CELLS, 9, dtype=torch.float32),
            steps_B=zeros(),
            correct_B=zeros(),
            finished_B=torch.ones(rows, dtype=torch.bool, device=device),
            temperature_B=zeros(dtype=torch.float32),
            entropy_bound_B=zeros(dtype=torch.float32),
        )

    def update(self, where_B: Tensor, **changes: Tensor) -> None:
        """Overwrites these fields in the selected rows."""
        for name, new in changes.items():
            old = getattr(self, name)
            old.copy_(torch.where(where_B.view(-1, *[1] * (old.dim() - 1)), new, old))


def refill(slots: Slots, pool: PuzzlePool, cfg: PuzzleConfig, rng: torch.Generator) -> None:
    """Puts new puzzles into finished slots: clues, and in open cells noise or, with hints, some digits."""
    rows = len(slots.finished_B)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, generator=rng, device=rng.device)

    puzzle_BC, solution_BC = pool.draw(rows, rng)
    noise_BC = torch.randint(encoding.VOCAB_SIZE, (rows, CELLS), generator=rng, device=rng.device)
    hint_share_B = (uniform(0, 1) < cfg.hint_share) * uniform(0, 1)
    is_hint_BC = torch.rand((rows, CELLS), generator=rng, device=rng.device) < hint_share_B[:, None]
    is_wrong_BC = torch.rand((rows, CELLS), generator=rng, device=rng.device) < 0.1
    digit_BC = torch.where(is_wrong_BC, noise_BC % 9, solution_BC - 1) + encoding.DIGITS.start
    low, high = (float(np.log(bound)) for bound in cfg.entropy_bounds)
    slots.update(
        slots.finished_B,
        puzzle_BC=puzzle_BC,
        solution_BC=solution_BC,
        ids_BC=pin_clues(torch.where(is_hint_BC, digit_BC, noise_BC), puzzle_BC),
        probs_BCG=torch.zeros_like(slots.probs_BCG),
        steps_B=torch.zeros_like(slots.steps_B),
        correct_B=torch.zeros_like(slots.correct_B),
        temperature_B=uniform(*cfg.temperatures),
        entropy_bound_B=uniform(low, high).exp(),
    )


def pin_clues(ids_BC: Tensor, puzzle_BC: Tensor) -> Tensor:
    """Returns the canvas with clue tokens where the puzzle has clues."""
    return torch.where(puzzle_BC > 0, puzzle_BC + (encoding.CLUES.start - 1), ids_BC)


def digit_logprobs(logits_BCG: Tensor, slots: Slots) -> Tensor:
    """Returns log probabilities of the digits at each slot's temperature."""
    return (logits_BCG.float() / slots.temperature_B[:, None, None]).log_softmax(dim=-1)


def advance(slots: Slots, logits_BCG: Tensor, max_steps: int, rng: torch.Generator) -> None:
    """Advances every canvas as `sampler.step` would: sample, accept by entropy, renoise the rest."""
    open_BC = slots.puzzle_BC == 0
    logprobs_BCG = digit_logprobs(logits_BCG, slots)
    probs_BCG = logprobs_BCG.exp()
    entropy_BC = -(probs_BCG * logprobs_BCG).sum(dim=-1) * open_BC
    uniform_BC1 = torch.rand((*open_BC.shape, 1), generator=rng, device=rng.device)
    sampled_BC = (probs_BCG.cumsum(dim=-1) < uniform_BC1).sum(dim=-1).clamp(max=8)
    noise_BC = torch.randint(encoding.VOCAB_SIZE, open_BC.shape, generator=rng, device=rng.device)
    accepted_BC = sampler.accept_by_entropy(entropy_BC, slots.entropy_bound_B[:, None])
    ids_BC = torch.where(accepted_BC, sampled_BC + encoding.DIGITS.start, noise_BC)
    is_correct_B = ((logits_BCG.argmax(dim=-1) + 1 == slots.solution_BC) | ~open_BC).all(dim=-1)
    all_rows_B = torch.ones_like(is_correct_B)
    slots.update(
        all_rows_B,
        ids_BC=pin_clues(ids_BC, slots.puzzle_BC),
        probs_BCG=probs_BCG,
        steps_B=slots.steps_B + 1,
        correct_B=torch.where(is_correct_B, slots.correct_B + 1, 0),
    )
    slots.update(all_rows_B, finished_B=(slots.correct_B >= 2) | (slots.steps_B >= max_steps))


def transform(slots: Slots, where_B: Tensor, symmetry: Symmetry) -> None:
    """Applies a symmetry to the selected boards, with their canvases and probabilities."""
    slots.update(
        where_B,
        puzzle_BC=symmetry.apply_to_boards(slots.puzzle_BC),
        solution_BC=symmetry.apply_to_boards(slots.solution_BC),
        ids_BC=symmetry.apply_to_ids(slots.ids_BC),
        probs_BCG=symmetry.apply_to_probs(slots.probs_BCG),
    )


# 2. Objectives


class BoardObjective(nn.Module):
    """One denoising forward over boards, and the cross-entropy of the digits in open cells.

    All boards share the prompt, so it is encoded once.
    """

    def __init__(self, model: DiffusionGemma, balance_weight: float) -> None:
        super().__init__()
        self.model = model
        self.balance_weight = balance_weight
        self.prompt_1S: Tensor
        self.register_buffer("prompt_1S", torch.tensor([[model.config.bos_token_id, *encoding.NAMES]]))

    def forward(self, ids_BC: Tensor, probs_BCG: Tensor, puzzle_BC: Tensor, solution_BC: Tensor) -> tuple[Losses, Tensor]:
        """Returns the losses and the logits of the digits."""
        model = self.model
        device = ids_BC.device
        prompt_length = self.prompt_1S.shape[1]
        positions_1S = torch.arange(prompt_length, device=device)[None]
        prompt_ropes = model.rope_tables(positions_1S)
        ropes = model.rope_tables(prompt_length + torch.arange(CELLS, device=device)[None])
        x_1SD = model.embed(self.prompt_1S)
        x_BCD = model.self_conditioning(model.embed(ids_BC), self._soft_embed(probs_BCG, puzzle_BC))
        routings = []
        for index, layer in enumerate(model.layers):
            kind = model.config.layer_types[index]
            no_past = x_1SD.new_empty(1, 0, *model.config.layer_heads(index))
            mask = masks.causal(positions_1S, positions_1S, model.config.layer_window(index))
            x_1SD, k, v, _ = layer(x_1SD, prompt_ropes[kind], mask, (no_past, no_past), layer.encoder_layer_scalar)
            past = tuple(t.expand(len(x_BCD), -1, -1, -1) for t in (k, v))
            x_BCD, _, _, routing = layer(x_BCD, ropes[kind], None, past, layer.layer_scalar)
            routings.append(routing)
        logits_BCG = digit_logits(model, x_BCD)
        return board_losses(logits_BCG, puzzle_BC, solution_BC, routings, self.balance_weight), logits_BCG

    def _soft_embed(self, probs_BCG: Tensor, puzzle_BC: Tensor) -> Tensor:
        """The expected embedding of the digits; the clue's embedding where a clue stands; zeros before the first step."""
        table_VD = self.model.embed_tokens.weight.detach()
        soft_BCD = probs_BCG.to(self.model.dtype) @ table_VD[encoding.DIGITS.start : encoding.DIGITS.stop]
        has_probs_B11 = probs_BCG.detach().flatten(1).any(dim=-1)[:, None, None]
        clues_BCD = F.embedding(pin_clues(torch.zeros_like(puzzle_BC), puzzle_BC), table_VD) * has_probs_B11
        return torch.where(puzzle_BC[..., None] > 0, clues_BCD, soft_BCD) * self.model.embed_scale


class CausalObjective(nn.Module):
    """The autoregressive objective: the 81 cells of the puzzle, then each digit of the solution from all before it."""

    def __init__(self, model: DiffusionGemma, balance_weight: float) -> None:
        super().__init__()
        self.model = model
        self.balance_weight = balance_weight

    def forward(self, puzzle_BC: Tensor, solution_BC: Tensor) -> tuple[Losses, Tensor]:
        """Returns the losses and the logits of the digits."""
        model = self.model
        ids_BS = autoregressive_ids(puzzle_BC, solution_BC[:, :-1], model.config.bos_token_id)
        positions_1S = torch.arange(ids_BS.shape[1], device=ids_BS.device)[None]
        ropes = model.rope_tables(positions_1S)
        x_BSD = model.embed(ids_BS)
        routings = []
        for index, layer in enumerate(model.layers):
            kind = model.config.layer_types[index]
            no_past = x_BSD.new_empty(len(x_BSD), 0, *model.config.layer_heads(index))
            mask = masks.causal(positions_1S, positions_1S, model.config.layer_window(index))
            x_BSD, _, _, routing = layer(x_BSD, ropes[kind], mask, (no_past, no_past), layer.encoder_layer_scalar)
            routings.append(routing)
        logits_BCG = digit_logits(model, x_BSD[:, -CELLS:])
        return board_losses(logits_BCG, puzzle_BC, solution_BC, routings, self.balance_weight), logits_BCG


def autoregressive_ids(puzzle_BC: Tensor, digits_BN: Tensor, bos: int) -> Tensor:
    """Returns the tokens of the puzzle, blanks included, followed by the first digits of a solution."""
    start_B1 = torch.full_like(puzzle_BC[:, :1], bos)
    blank_BC = torch.full_like(puzzle_BC, encoding.BLANK)
    return torch.cat([start_B1, pin_clues(blank_BC, puzzle_BC), digits_BN + (encoding.DIGITS.start - 1)], dim=1)


def digit_logits(model: DiffusionGemma, hidden_BCD: Tensor) -> Tensor:
    """Applies the final norm and the rows of the output head that belong to digits."""
    digits_GD = model.embed_tokens.weight[encoding.DIGITS.start : encoding.DIGITS.stop]
    return softcap_(F.linear(model.norm(hidden_BCD), digits_GD), model.config.final_logit_softcapping)


def board_losses(
    logits_BCG: Tensor, puzzle_BC: Tensor, solution_BC: Tensor, routings: list, balance_weight: float
) -> Losses:
    """Returns the mean cross-entropy over open cells plus the weighted load-balance loss."""
    open_BC = puzzle_BC == 0
    nats_N = F.cross_entropy(logits_BCG.flatten(0, 1), (solution_BC - 1).flatten(), reduction="none")
    loss = (nats_N * open_BC.flatten()).sum() / open_BC.sum().clamp(min=1)
    balance, share_E = load_balance(routings)
    return Losses(loss + balance_weight * balance, loss, torch.zeros_like(loss), share_E)


# 3. The task


class SudokuTask:
    """The task of a run whose data are puzzles; `text_task.py` says what the training loop needs of a task."""

    def __init__(
        self,
        cfg: TrainConfig,
        config: BackboneConfig,
        tokenizer: Tokenizer,
        device: torch.device,
        microbatches: Iterable[int],
    ) -> None:
        assert isinstance(cfg.data, PuzzleConfig)
        if config.vocab_size != encoding.VOCAB_SIZE:
            raise ValueError(f"puzzles have a vocabulary of {encoding.VOCAB_SIZE} tokens, the model {config.vocab_size}")
        self.cfg = cfg
        self.data = cfg.data
        self.device = device
        self.pool = PuzzlePool(self.data, device)
        self.slots = {m: Slots.empty(cfg.rows, device) for m in microbatches}
        self.counts = torch.zeros(2, device=device)  # puzzles that left their slot, and solved ones among them
        self.positions: dict[str, Any] = {}

    def objective(self, model: DiffusionGemma, adapter: Adapter | None = None) -> nn.Module:
        """Returns the module that is compiled, sharded and differentiated."""
        if adapter is not None:
            raise ValueError("adapters are trained on text: write the puzzles as records, as recipes/tune_sudoku.py does")
        objective = CausalObjective if self.data.causal else BoardObjective
        return objective(model, self.cfg.loss.balance_weight)

    def open(self) -> None:
        """Does nothing: the pool is in memory."""

    def close(self) -> None:
        """Does nothing."""

    def losses(self, compute: Callable[..., Any], m: int, generator: torch.Generator) -> Losses:
        """Computes the losses of microbatch m and advances its slots."""
        slots = self.slots[m]
        rng = torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (), generator=generator)))
        refill(slots, self.pool, self.data, rng)
        if self.data.causal:
            losses, logits_BCG = compute(slots.puzzle_BC, slots.solution_BC)
            advance(slots, logits_BCG.detach(), 1, rng)
        else:
            losses = self._unrolled_losses(compute, slots, rng)
        self.counts += torch.stack([slots.finished_B.sum(), (slots.finished_B & (slots.correct_B > 0)).sum()])
        return losses

    def _unrolled_losses(self, compute: Callable[..., Any], slots: Slots, rng: torch.Generator) -> Losses:
        """Returns the mean over some denoising steps.

        Each step's gradient reaches the step before through its probabilities.
        """
        step_losses = []
        probs_BCG = slots.probs_BCG.clone()  # the backward pass needs it after the slots were updated in place
        for _ in range(self.data.unrolled_steps):
            losses, logits_BCG = compute(slots.ids_BC.clone(), probs_BCG, slots.puzzle_BC, slots.solution_BC)
            step_losses.append(losses)
            probs_BCG = digit_logprobs(logits_BCG, slots).exp()
            advance(slots, logits_BCG.detach(), self.data.max_steps, rng)
            rows = len(probs_BCG)
            symmetry = Symmetry.from_uniform(torch.rand((rows, SYMMETRY_DRAWS), generator=rng, device=rng.device))
            where_B = torch.rand(rows, generator=rng, device=rng.device) < self.data.symmetry_share
            transform(slots, where_B, symmetry)
            probs_BCG = torch.where(where_B[:, None, None], symmetry.apply_to_probs(probs_BCG), probs_BCG)
        return Losses(*(torch.stack(part).mean(dim=0) for part in zip(*step_losses, strict=True)))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the slots for the checkpoint: half-solved boards outlive a step."""
        return {f"slots.{m}.{f.name}": getattr(slots, f.name) for m, slots in self.slots.items() for f in fields(Slots)}

    def report_fields(self) -> dict[str, Any]:
        """Returns this task's fields of a Report: the share of solved puzzles among those that left their slot."""
        left, solved = self.counts.tolist()
        self.counts.zero_()
        return {"epoch": 0, "bad": 0, "solved": solved / left if left else None}
