"""Placement: on which device each weight of a model is put while it is loaded."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from redraft.config import ModelConfig


@dataclass(frozen=True)
class Placement:
    """All weights go to one device, but the experts of some layers stay in host memory."""

    device: torch.device
    host_layers: frozenset[int] = frozenset()

    def device_of(self, name: str) -> torch.device:
        """Where the weight of this name goes; names are those of the model, `layers.3.experts.down_proj`."""
        match = re.match(r"layers\.(\d+)\.experts\.", name)
        return torch.device("cpu") if match and int(match[1]) in self.host_layers else self.device


# Called before weights are loaded: the configuration, the bytes of every weight by its name in the model, and the dtype.
Place: TypeAlias = Callable[[ModelConfig, Mapping[str, int], torch.dtype], Placement]
