"""Placement: on which device each weight of a model is put while it is loaded, and how many bytes it will take."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from redraft.config import BackboneConfig
from redraft.model.quant.conversion import count_bytes
from redraft.model.quant.policy import QuantPolicy
from redraft.model.quant.stored import StoredFormat


@dataclass(frozen=True)
class Placement:
    """All weights go to one device, but the experts of some layers stay in host memory."""

    device: torch.device
    policy: QuantPolicy  # in which formats
    host_layers: frozenset[int] = frozenset()

    def device_of(self, name: str) -> torch.device:
        """Where the weight of this name goes; names are those of the model, `layers.3.experts.down_proj`."""
        match = re.match(r"layers\.(\d+)\.experts\.", name)
        return torch.device("cpu") if match and int(match[1]) in self.host_layers else self.device


# Called before weights are loaded: the configuration, the bytes of every weight by its name in the model, and the dtype. The
# bytes are those of several policies, of which the placement has one; the first is the one that the user asks for.
Place: TypeAlias = Callable[[BackboneConfig, Mapping[QuantPolicy, Mapping[str, int]], torch.dtype], Placement]


def plan_bytes(
    weights: Mapping[str, Tensor], stored: Mapping[str, StoredFormat | None], policy: QuantPolicy, dtype: torch.dtype
) -> dict[str, int]:
    """The bytes that every weight will take, by its name in the model: exactly those of the loaded model.

    `weights` may be on the meta device. `stored` are their formats in the file.
    """
    targets = policy.targets(stored)
    return {name: count_bytes(name, tensor.shape, targets[name], stored[name], dtype) for name, tensor in weights.items()}
