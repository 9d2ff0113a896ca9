"""Random numbers as a pure function of (seed, block, step, position). There is no generator and no state.

A row draws the same numbers alone and in a batch, and a run can be resumed from any step.
Shapes: B rows (each with its own seed), C canvas positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redraft.kernels.splitmix import NOISE, SAMPLE, mix, shift_right


@dataclass(frozen=True)
class Draws:
    """The random numbers of one canvas. `block` is the index of the canvas; each row has its own seed."""

    seeds_B: Tensor
    block: int

    def bits(self, stream: int, step: int, length: int) -> Tensor:
        """64 random bits for each row and canvas position, as int64_BC."""
        x_B = mix(torch.zeros_like(self.seeds_B), self.seeds_B)
        for counter in (stream, self.block, step):
            x_B = mix(x_B, counter)
        return mix(x_B[:, None], torch.arange(length, device=x_B.device))

    def uniform(self, step: int, length: int) -> Tensor:
        """Numbers in [0, 1) with 53 random bits, float64_BC. Step s samples its tokens with them."""
        return shift_right(self.bits(SAMPLE, step, length), 11).double() * 2.0**-53

    def noise(self, step: int, length: int, vocab_size: int) -> Tensor:
        """Uniform token ids, int64_BC. Step 0 fills the new canvas; step s renoises the positions that step s rejected."""
        return shift_right(shift_right(self.bits(NOISE, step, length), 32) * vocab_size, 32)


def draws(seeds: list[int], block: int, device: torch.device | str = "cpu") -> Draws:
    """Makes the Draws of rows with these seeds. Any whole number is a seed; only its lowest 64 bits count."""
    wrapped = [(seed + (1 << 63)) % (1 << 64) - (1 << 63) for seed in seeds]
    return Draws(torch.tensor(wrapped, dtype=torch.int64, device=device), block)
