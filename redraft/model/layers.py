"""Parts that the layers of both architectures share: RMS norm, gated MLP, linear layers with adapters, rounding.

Shapes: B rows, S tokens, I inputs, O outputs, G key-value heads, K head size.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from redraft.kernels import rms_norm
from redraft.model.kv_cache import to_stored
from redraft.model.lora import ActiveAdapters

Rope = tuple[Tensor, Tensor]  # cosines and sines
Mask: TypeAlias = Tensor | BlockMask | None


class RMSNorm(nn.Module):
    """RMS norm with a weight. Norms without a weight call `rms_norm` directly."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norms along the last axis and multiplies by the weight."""
        return rms_norm(x, self.weight, self.eps)


def project(linear: nn.Module, x_BSI: Tensor, adapters: ActiveAdapters | None, name: str) -> Tensor:
    """The output of a linear layer, with what the adapters add to it. `name` is the layer's name in its module."""
    y_BSO = linear(x_BSI)
    return y_BSO if adapters is None else adapters.add(name, x_BSI, y_BSO)


def gelu(x: Tensor) -> Tensor:
    """Gemma's activation: GELU, approximated with tanh."""
    return F.gelu(x, approximate="tanh")


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, size: int, inner: int, activation: Callable[[Tensor], Tensor] = gelu) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor, adapters: ActiveAdapters | None = None) -> Tensor:
        """Returns a tensor of the same shape as x."""
        gate = project(self.gate_proj, x, adapters, "gate_proj")
        inner = self.activation(gate) * project(self.up_proj, x, adapters, "up_proj")
        return project(self.down_proj, inner, adapters, "down_proj")


class Rounding(NamedTuple):
    """Rounds the keys and values of the first `tokens` new tokens as the cache will.

    A token then attends to the same numbers whether they come from the cache or from its own forward, so the result does
    not depend on how a prompt is divided into chunks.
    """

    dtype: torch.dtype
    tokens: int

    def apply(self, x_BSGK: Tensor) -> Tensor:
        """Keys or values, the first ones rounded."""
        rounded = to_stored(x_BSGK[:, : self.tokens], self.dtype).to(x_BSGK.dtype)
        return torch.cat([rounded, x_BSGK[:, self.tokens :]], dim=1)
