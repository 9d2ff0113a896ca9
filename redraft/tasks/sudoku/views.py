"""The same board seen another way: cells and digits trade places by a symmetry of the game.

What a model cannot see one way it may see another. Shapes: N boards, C = 81 cells, G = 9 digits, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redraft.tasks.sudoku import encoding, generator
from redraft.tasks.sudoku.board import CELLS


@dataclass(frozen=True)
class View:
    """A symmetry for each board."""

    from_NC: Tensor  # where each cell comes from
    digits_NG: Tensor  # what each digit becomes

    @classmethod
    def straight(cls, count: int, device: torch.device | str = "cpu") -> "View":
        """As the boards are."""
        cells, digits = torch.arange(CELLS, device=device), torch.arange(1, 10, device=device)
        return cls(cells.repeat(count, 1), digits.repeat(count, 1))

    @classmethod
    def drawn(cls, uniform_NU: Tensor) -> "View":
        """From `generator.CHANCE` uniform numbers for each board."""
        return cls(*generator.symmetries_of(uniform_NU))

    def where(self, which_N: Tensor, other: "View") -> "View":
        """This for some boards, another for the rest."""
        pairs = ((self.from_NC, other.from_NC), (self.digits_NG, other.digits_NG))
        return View(*(torch.where(which_N[:, None], mine, theirs) for mine, theirs in pairs))

    @property
    def tokens_NV(self) -> Tensor:
        """What each token becomes: digits and clues are renamed, the rest is not."""
        names_NV = torch.arange(encoding.SIZE, device=self.digits_NG.device).repeat(len(self.digits_NG), 1)
        for kind in (encoding.DIGITS, encoding.CLUES):
            names_NV[:, kind.start : kind.stop] = self.digits_NG + (kind.start - 1)
        return names_NV

    def boards(self, boards_NC: Tensor) -> Tensor:
        """Digits, 0 where a cell is open."""
        return generator.turned(boards_NC, self.from_NC, self.digits_NG)

    def ids(self, ids_NC: Tensor) -> Tensor:
        """A canvas."""
        return self.tokens_NV.gather(1, ids_NC.gather(1, self.from_NC))

    def logits(self, logits_NCV: Tensor) -> Tensor:
        """A number for each cell and token."""
        return _moved(logits_NCV, self.from_NC, self.tokens_NV)

    def beliefs(self, probs_NCG: Tensor) -> Tensor:
        """A number for each cell and digit."""
        return _moved(probs_NCG, self.from_NC, self.digits_NG - 1)

    def back(self, logits_NCV: Tensor) -> Tensor:
        """From what is seen to what is: `logits` undone."""
        named_NCV = logits_NCV.gather(2, self.tokens_NV[:, None].expand_as(logits_NCV))
        return torch.empty_like(named_NCV).scatter(1, self.from_NC[..., None].expand_as(named_NCV), named_NCV)


def _moved(values_NCX: Tensor, from_NC: Tensor, names_NX: Tensor) -> Tensor:
    """Values under other names in other cells."""
    moved_NCX = values_NCX.gather(1, from_NC[..., None].expand_as(values_NCX))
    return torch.empty_like(moved_NCX).scatter(2, names_NX[:, None].expand_as(moved_NCX), moved_NCX)
