"""The activation of a gated MLP: GELU(gate) * up or SiLU(gate) * up, from one gate_up product. Reference: `GatedMLP`.

Shapes: N tokens, F inner size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.triton.pdl import _pdl_wait, pdl_options


def gelu_and_mul(gate_up_N2F: Tensor) -> Tensor:
    """Returns GELU(gate) * up, inner_NF."""
    return _activate(gate_up_N2F, is_silu=False)


def silu_and_mul(gate_up_N2F: Tensor) -> Tensor:
    """Returns SiLU(gate) * up, inner_NF."""
    return _activate(gate_up_N2F, is_silu=True)


def _activate(gate_up_N2F: Tensor, *, is_silu: bool) -> Tensor:
    n, gate_up_size = gate_up_N2F.shape
    inner = gate_up_size // 2
    inner_NF = torch.empty(n, inner, dtype=gate_up_N2F.dtype, device=gate_up_N2F.device)
    block = min(1024, triton.next_power_of_2(inner))
    grid = (n, triton.cdiv(inner, block))
    _activate_and_mul[grid](gate_up_N2F, inner_NF, inner, is_silu, block, num_warps=4, **pdl_options())
    return inner_NF


@triton.jit
def _gelu(x):
    """The tanh approximation, with tanh(y) = 2 sigmoid(2 y) - 1."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _activate_and_mul(gate_up, out, F, IS_SILU: tl.constexpr, BLOCK_F: tl.constexpr, PDL: tl.constexpr):
    """One block of one token's features."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    mask = offs < F
    gate = tl.load(gate_up + row * 2 * F + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + offs, mask=mask, other=0.0).to(tl.float32)
    active = gate * tl.sigmoid(gate) if IS_SILU else _gelu(gate)
    tl.store(out + row * F + offs, (active * up).to(out.dtype.element_ty), mask=mask)
