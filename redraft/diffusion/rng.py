"""Random numbers as a pure function of (seed, block, step, position). There is no generator and no state.

A row draws the same numbers alone and in a batch, and a run can be resumed from any step.
Shapes: B rows (each with its own seed), C canvas positions, S answer positions, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from redraft.kernels.splitmix import DRAFT, NOISE, SAMPLE, VERIFY, mix, shift_right


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


def gumbel(seeds_S: Tensor, positions_S: Tensor, vocab_size: int) -> Tensor:
    """Gumbel numbers float64_SV of answer positions: a pure function of (seed, position, token).

    The argmax of log p + Gumbel is a sample of p. A position has the same numbers however its token is drafted, so an exact
    answer depends on prompt and seed only. 52 bits: with 53, the largest uniform number rounds to 1, whose Gumbel number is
    infinite. Float64: in float32 the tail is cut off, which lowers the entropy of the samples.
    """
    x_S = _answer_bits(VERIFY, seeds_S, positions_S)
    bits_SV = mix(x_S[:, None], torch.arange(vocab_size, device=x_S.device))
    uniform_SV = (shift_right(bits_SV, 12).double() + 0.5) * 2.0**-52
    return uniform_SV.log_().neg_().log_().neg_()


def draft_noise(seeds_S: Tensor, positions_S: Tensor, vocab_size: int) -> Tensor:
    """Uniform token ids int64_S that fill the canvases of drafts: one for each answer position."""
    return shift_right(shift_right(_answer_bits(DRAFT, seeds_S, positions_S), 32) * vocab_size, 32)


def _answer_bits(stream: int, seeds_S: Tensor, positions_S: Tensor) -> Tensor:
    """64 random bits for each answer position; positions count from the first token of the answer."""
    x_S = mix(torch.zeros_like(seeds_S), seeds_S)
    for counter in (stream, 0):
        x_S = mix(x_S, counter)
    return mix(x_S, positions_S)


def wrap_seed(seed: int) -> int:
    """The seed as a signed 64-bit number."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def draws(seeds: list[int], block: int, device: torch.device | str = "cpu") -> Draws:
    """Makes the Draws of rows with these seeds. Any whole number is a seed; only its lowest 64 bits count."""
    return Draws(torch.tensor([wrap_seed(seed) for seed in seeds], dtype=torch.int64, device=device), block)
