"""Symmetries of Sudoku applied to batches: cells and digits are permuted, and the puzzle stays equivalent.

A model that cannot settle a board in one form may settle an equivalent one.
Shapes: N boards, C = 81 cells, G = 9 digits, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redraft.tasks.sudoku import encoding, generator
from redraft.tasks.sudoku.board import CELLS


@dataclass(frozen=True)
class Symmetry:
    """One symmetry for each board of a batch."""

    from_NC: Tensor  # the cell that each cell's content comes from
    digits_NG: Tensor  # the digit that each digit becomes

    @classmethod
    def identity(cls, count: int, device: torch.device | str = "cpu") -> "Symmetry":
        """The symmetry that changes nothing."""
        cells = torch.arange(CELLS, device=device)
        digits = torch.arange(1, 10, device=device)
        return cls(cells.repeat(count, 1), digits.repeat(count, 1))

    @classmethod
    def from_uniform(cls, uniform_NU: Tensor) -> "Symmetry":
        """Makes random symmetries from `generator.SYMMETRY_DRAWS` uniform numbers per board."""
        return cls(*generator.symmetries_from(uniform_NU))

    def where(self, condition_N: Tensor, other: "Symmetry") -> "Symmetry":
        """Takes this symmetry for rows where the condition holds, `other` elsewhere."""
        pairs = ((self.from_NC, other.from_NC), (self.digits_NG, other.digits_NG))
        return Symmetry(*(torch.where(condition_N[:, None], first, second) for first, second in pairs))

    @property
    def tokens_NV(self) -> Tensor:
        """The token that each token becomes: digits and clues are permuted, other tokens stay."""
        tokens_NV = torch.arange(encoding.VOCAB_SIZE, device=self.digits_NG.device).repeat(len(self.digits_NG), 1)
        for ids in (encoding.DIGITS, encoding.CLUES):
            tokens_NV[:, ids.start : ids.stop] = self.digits_NG + (ids.start - 1)
        return tokens_NV

    def apply_to_boards(self, boards_NC: Tensor) -> Tensor:
        """Transforms boards of digits; open cells (0) stay open."""
        return generator.apply_symmetry(boards_NC, self.from_NC, self.digits_NG)

    def apply_to_ids(self, ids_NC: Tensor) -> Tensor:
        """Transforms canvases of token ids."""
        return self.tokens_NV.gather(1, ids_NC.gather(1, self.from_NC))

    def apply_to_logits(self, logits_NCV: Tensor) -> Tensor:
        """Transforms one number per cell and token."""
        return _permute(logits_NCV, self.from_NC, self.tokens_NV)

    def apply_to_probs(self, probs_NCG: Tensor) -> Tensor:
        """Transforms one number per cell and digit."""
        return _permute(probs_NCG, self.from_NC, self.digits_NG - 1)

    def invert_logits(self, logits_NCV: Tensor) -> Tensor:
        """Undoes `apply_to_logits`."""
        renamed_NCV = logits_NCV.gather(2, self.tokens_NV[:, None].expand_as(logits_NCV))
        return torch.empty_like(renamed_NCV).scatter(1, self.from_NC[..., None].expand_as(renamed_NCV), renamed_NCV)


def _permute(values_NCX: Tensor, from_NC: Tensor, names_NX: Tensor) -> Tensor:
    """Permutes the cells by from_NC and the last axis by names_NX."""
    moved_NCX = values_NCX.gather(1, from_NC[..., None].expand_as(values_NCX))
    return torch.empty_like(moved_NCX).scatter(2, names_NX[:, None].expand_as(moved_NCX), moved_NCX)
