"""Rotary position embedding (RoPE): element i of a head is paired with element i + K / 2, and each pair is rotated.

The angle is position times the pair's frequency, in float32. Proportional RoPE (full-attention layers) computes frequencies
over the whole head but rotates only the first fraction of the pairs; the other pairs have frequency zero. With head size 512
and fraction 0.25, pairs 0..63 of 256 are rotated.
Shapes: B rows (1 if all rows have the same positions), S positions, H heads, K head size.
"""

import torch
from torch import Tensor


def rope_table(
    positions_BS: Tensor, head_dim: int, theta: float, fraction: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines for `apply_rope`, each [B, S, 1, K]."""
    return tabulate_rope(positions_BS, rope_frequencies(head_dim, theta, fraction, positions_BS.device), dtype)


def tabulate_rope(positions_BS: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `rope_table`, from the rotation per position of each pair."""
    angles_BSK = (positions_BS[..., None].float() * frequencies).repeat(1, 1, 2)
    return angles_BSK.cos().to(dtype)[:, :, None], angles_BSK.sin().to(dtype)[:, :, None]


def rope_frequencies(head_dim: int, theta: float, fraction: float, device: torch.device | str) -> Tensor:
    """Returns the rotation per position of each of the K / 2 pairs, in radians."""
    rotated_pairs = int(fraction * head_dim // 2)
    exponents = torch.arange(0, 2 * rotated_pairs, 2, device=device).float() / head_dim
    frequencies = torch.zeros(head_dim // 2, device=device)
    frequencies[:rotated_pairs] = 1.0 / theta**exponents
    return frequencies


def apply_rope(x_BSHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates queries or keys by the angles of their positions."""
    first, second = x_BSHK.chunk(2, dim=-1)
    return x_BSHK * cos + torch.cat([-second, first], dim=-1) * sin
