"""Products with 8-bit floats (e4m3): weights with a scale for each output channel, activations with one for each token.

Activations are rounded on the way in, so the product is between 8-bit numbers, which a GPU multiplies twice as fast and a
memory hands out twice as fast. Shapes: N tokens, D in, O out.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from redraft.kernels.backend import chosen

EIGHT, LARGEST = torch.float8_e4m3fn, 448.0
LEAST = 1e-12  # a scale of zero would make nothing of nothing


class Packed(NamedTuple):
    """A weight [..., O, D] in 8 bits and its scales [..., O, 1], float32."""

    weight: Tensor
    scale: Tensor

    def __getitem__(self, at: int) -> "Packed":  # type: ignore[override]
        """One of a stack."""
        return Packed(self.weight[at], self.scale[at])


def pack(x: Tensor, scale_as: torch.dtype = torch.float32) -> Packed:
    """Rounded to 8 bits along the last axis, each row by its largest number. Scales are rounded as they will be stored."""
    scale = (x.float().abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=LEAST).to(scale_as).float()
    return Packed((x.float() / scale).clamp(-LARGEST, LARGEST).to(EIGHT), scale)


def unpack(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that 8 bits stand for."""
    return (packed.weight.float() * packed.scale).to(dtype)


@cache
def _kernels(device: torch.device) -> bool:
    """CompletionParams for every product, found once."""
    return chosen(device)[0]


def _rows(x_ND: Tensor) -> Packed:
    """Activations, packed in one pass where a kernel can."""
    if not x_ND.is_cuda or not _kernels(x_ND.device):
        return pack(x_ND)
    from redraft.kernels.triton.fp8 import pack_rows  # Triton takes long to import

    return pack_rows(x_ND)


def linear8(x: Tensor, packed: Packed) -> Tensor:
    """x times the weight, in x's precision."""
    return product8(_rows(x.reshape(-1, x.shape[-1])), packed).to(x.dtype).view(*x.shape[:-1], -1)


def product8(x_ND: Packed, packed: Packed) -> Tensor:
    """y_NO, in bf16 on a GPU and in float32 elsewhere."""
    if x_ND.weight.is_cuda:
        scales = {"scale_a": x_ND.scale, "scale_b": packed.scale.t()}
        return torch._scaled_mm(x_ND.weight, packed.weight.t(), **scales, out_dtype=torch.bfloat16)
    return (x_ND.weight.float() @ packed.weight.float().t()) * x_ND.scale * packed.scale.t()
