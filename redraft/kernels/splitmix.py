"""splitmix64: hashes counters into random bits, in int64 arithmetic that wraps the same way on every device.

`diffusion/rng.py` draws with it; `triton/sampler_step.py` computes the same numbers in a kernel.
"""

from torch import Tensor

# Each step and position has two independent draws: the sampled token, and the noise that replaces a rejected one.
SAMPLE = 1
NOISE = 2
# Checked and exact mode: the Gumbel numbers of an answer position, and the noise of the canvases that drafts come from.
VERIFY = 3
DRAFT = 4

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 / golden ratio, odd; as a signed 64-bit value
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts right and fills with zeros; torch's `>>` on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor, counter: int | Tensor) -> Tensor:
    """Mixes a counter into the state: one round of splitmix64."""
    if isinstance(counter, int):  # the product must wrap at 64 bits, and a CUDA graph allows no copy from the host
        factor: int | Tensor = ((counter + 1) * GOLDEN + (1 << 63)) % (1 << 64) - (1 << 63)
    else:
        factor = (counter + 1) * GOLDEN
    x = x ^ factor
    x = (x ^ shift_right(x, 30)) * MIX_1
    x = (x ^ shift_right(x, 27)) * MIX_2
    return x ^ shift_right(x, 31)
