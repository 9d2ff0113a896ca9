"""Bits and bytes by part of a checkpoint, from the headers of its files: no weight is read."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from redraft.checkpoint.names import Layout, find_layout
from redraft.config import BackboneConfig
from redraft.model.quant.conversion import format_name
from redraft.model.quant.policy import part_of
from redraft.model.quant.stored import StoredWeight


class PartSize(NamedTuple):
    """The weights of one part that are stored in one format."""

    part: str  # "attention", "experts.down_proj"
    format: str  # the file's word
    weights: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits of a weight, scales included."""
        return 8 * self.nbytes / self.weights


def measure_parts(tensors: Mapping[str, Tensor | StoredWeight], config: BackboneConfig) -> list[PartSize]:
    """The sizes of all parts, in the order of the file. A weight that the file repeats is counted each time."""
    layout = find_layout(tensors, config)
    sizes: dict[tuple[str, str], list[int]] = {}
    for name in tensors:
        weight = tensors[name]  # on a CPU, a view of the mapped file or a description
        size = sizes.setdefault((_part(name, layout), format_name(weight)), [0, 0])
        size[0] += math.prod(weight.shape)
        size[1] += weight.nbytes
    return [PartSize(part, its_format, *size) for (part, its_format), size in sizes.items()]


def _part(name: str, layout: Layout) -> str:
    if layout.skipped and name.startswith(layout.skipped):
        return "vision"
    return part_of(name.removeprefix(layout.text))
