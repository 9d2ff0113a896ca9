"""Rotary positions: each head's first half is paired with its second, and each pair turned by position times frequency.

Proportional RoPE (full layers) takes its frequencies over the whole head but turns only the first share of the pairs;
the rest have frequency zero. With head size 512 and fraction 0.25, pairs 0..63 of 256 turn. Angles are float32.
Shapes: B rows (1 where all rows agree), S positions, H heads, K head size.
"""

import torch
from torch import Tensor


def rope_table(
    positions_BS: Tensor, head_dim: int, theta: float, fraction: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [B, S, 1, K], for `rotate`."""
    frequencies = rope_frequencies(head_dim, theta, fraction, positions_BS.device)
    angles_BSK = (positions_BS[..., None].float() * frequencies).repeat(1, 1, 2)
    return angles_BSK.cos().to(dtype)[:, :, None], angles_BSK.sin().to(dtype)[:, :, None]


def rope_frequencies(head_dim: int, theta: float, fraction: float, device: torch.device | str) -> Tensor:
    """How far each of the K / 2 pairs turns from one position to the next."""
    turning = int(fraction * head_dim // 2)
    exponents = torch.arange(0, 2 * turning, 2, device=device).float() / head_dim
    frequencies = torch.zeros(head_dim // 2, device=device)
    frequencies[:turning] = 1.0 / theta**exponents
    return frequencies


def rotate(x_BSHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns queries or keys to their positions."""
    first, second = x_BSHK.chunk(2, dim=-1)
    return x_BSHK * cos + torch.cat([-second, first], dim=-1) * sin
