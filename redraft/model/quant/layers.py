"""Layers with packed weights. They compute the layers that they replace, up to rounding.

The buffers of a packed weight are named after it: the codes have the name of the weight, the other fields follow it
(`gate_up_proj`, `gate_up_proj_scale`, `gate_up_proj_global_scale`). Shapes: N tokens, D model size, K experts per token.
"""

from torch import Tensor, nn

from redraft.kernels import NO_ADAPTER, ExpertAdapter, gated_experts
from redraft.kernels.linear_packed import linear_packed
from redraft.kernels.packed import PackedTensor


class _PackedLayer(nn.Module):
    """Holds packed weights as buffers."""

    def __init__(self, **weights: PackedTensor) -> None:
        super().__init__()
        self._types = {name: type(weight) for name, weight in weights.items()}
        for name, weight in weights.items():
            for buffer, tensor in zip(self._buffer_names(name), weight, strict=True):
                self.register_buffer(buffer, tensor)

    def _buffer_names(self, name: str) -> list[str]:
        return [name, *(f"{name}_{field}" for field in self._types[name]._fields[1:])]

    @property
    def formats(self) -> set[type[PackedTensor]]:
        """The formats of the packed weights."""
        return set(self._types.values())

    def packed(self, name: str) -> PackedTensor:
        """The packed weight of this name."""
        return self._types[name](*(getattr(self, buffer) for buffer in self._buffer_names(name)))

    def set_packed(self, name: str, weight: PackedTensor) -> None:
        """Replaces a packed weight by another of the same format."""
        assert type(weight) is self._types[name], (type(weight), self._types[name])
        for buffer, tensor in zip(self._buffer_names(name), weight, strict=True):
            setattr(self, buffer, tensor)


class PackedLinear(_PackedLayer):
    """A linear layer. With an fp8 weight it quantizes its activations too."""

    def __init__(self, weight: PackedTensor) -> None:
        super().__init__(weight=weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x times the transposed weight."""
        return linear_packed(x, self.packed("weight"))


class PackedExperts(_PackedLayer):
    """All experts of a layer. The two weights may have different formats."""

    def __init__(self, gate_up: PackedTensor, down: PackedTensor) -> None:
        super().__init__(gate_up_proj=gate_up, down_proj=down)

    def forward(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, adapter: ExpertAdapter = NO_ADAPTER) -> Tensor:
        """The weighted sum of the outputs of each token's experts."""
        gate_up = self.packed("gate_up_proj")
        return gated_experts(x_ND, experts_NK, weights_NK, gate_up, self.packed("down_proj"), adapter)
