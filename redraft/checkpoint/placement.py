"""Placement: on which device each weight of a model is put while it is loaded, and how many bytes it will take."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from redraft.config import ModelConfig
from redraft.model.quant.conversion import choose_target, count_bytes
from redraft.model.quant.policy import EXPERT_DOWN, EXPERT_GATE_UP, QuantPolicy, Target
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
Place: TypeAlias = Callable[[ModelConfig, Mapping[QuantPolicy, Mapping[str, int]], torch.dtype], Placement]


def plan_bytes(
    weights: Mapping[str, Tensor], stored: Mapping[str, StoredFormat | None], policy: QuantPolicy, dtype: torch.dtype
) -> dict[str, int]:
    """The bytes that every weight will take, by its name in the model: exactly those of the loaded model.

    `weights` may be on the meta device. If one of the two expert weights of a layer is packed, the other one is too.
    """
    targets = {name: choose_target(policy, name, stored.get(name)) for name in weights}
    for name in [name for name in targets if name.endswith(EXPERT_GATE_UP)]:
        pair = (name, name.replace(EXPERT_GATE_UP, EXPERT_DOWN))
        is_packed = [targets[each].format is not None and not targets[each].is_dequantized for each in pair]
        if any(is_packed) and not all(is_packed):
            targets[pair[is_packed.index(False)]] = Target("fp8")
    return {
        name: count_bytes(name, tensor.shape, targets[name], stored.get(name), dtype) for name, tensor in weights.items()
    }
