"""Every draw is a pure function of (seed, block, step, position): no generator, no state.

A row therefore draws the same numbers alone and in a batch, and a run can be resumed from any step. The function is
splitmix64's finaliser applied to a chain of counters, in int64 arithmetic that wraps the same way on every device.
Shapes: B rows (each with its own seed), C canvas positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Two draws a step and position: which token is sampled, and which noise replaces a refused one.
SAMPLE, NOISE = 1, 2

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 / golden ratio, odd; as a signed 64-bit value
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right; torch's `>>` on int64 drags the sign along."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor, counter: int | Tensor) -> Tensor:
    """One round: fold a counter in, then scramble all 64 bits."""
    x = x ^ (torch.as_tensor(counter, device=x.device) + 1) * GOLDEN  # as a tensor the product wraps at 64 bits
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


@dataclass(frozen=True)
class Draws:
    """The random numbers of one canvas: seeds_B of the rows, and the block (canvas index) they are for."""

    seeds_B: Tensor
    block: int

    def bits(self, stream: int, step: int, length: int) -> Tensor:
        """64 random bits for each row and canvas position, as int64_BC."""
        x_B = _mix(torch.zeros_like(self.seeds_B), self.seeds_B)
        for counter in (stream, self.block, step):
            x_B = _mix(x_B, counter)
        return _mix(x_B[:, None], torch.arange(length, device=x_B.device))

    def uniform(self, step: int, length: int) -> Tensor:
        """Numbers in [0, 1) with 53 random bits, float64_BC, for sampling tokens."""
        return _shift(self.bits(SAMPLE, step, length), 11).double() * 2.0**-53

    def noise(self, step: int, length: int, vocab_size: int) -> Tensor:
        """Uniform token ids, int64_BC. Step 0 is the canvas a block starts from; step s is what step s refused."""
        return _shift(_shift(self.bits(NOISE, step, length), 32) * vocab_size, 32)


def draws(seeds: list[int], block: int, device: torch.device | str = "cpu") -> Draws:
    """Draws for rows with these seeds. Any whole number is a seed; only its lowest 64 bits count."""
    wrapped = [(seed + (1 << 63)) % (1 << 64) - (1 << 63) for seed in seeds]
    return Draws(torch.tensor(wrapped, dtype=torch.int64, device=device), block)
