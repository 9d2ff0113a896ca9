"""The middle of a gated MLP: GELU of the gate times up, from one product. Reference: `GatedMLP` in `model.py`.

Shapes: N tokens, F inner size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.triton.experts import _gelu
from redraft.kernels.triton.pdl import pdl_options, pdl_wait


def gelu_and_mul(gate_up_N2F: Tensor) -> Tensor:
    """inner_NF."""
    n, both = gate_up_N2F.shape
    inner_NF = torch.empty(n, both // 2, dtype=gate_up_N2F.dtype, device=gate_up_N2F.device)
    wide = min(1024, triton.next_power_of_2(both // 2))
    _gelu_and_mul[(n, triton.cdiv(both // 2, wide))](gate_up_N2F, inner_NF, both // 2, wide, num_warps=4, **pdl_options())
    return inner_NF


@triton.jit
def _gelu_and_mul(gate_up, out, F, WIDE: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    here = at < F
    gate = tl.load(gate_up + row * 2 * F + at, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * F + at, (_gelu(gate) * up).to(out.dtype.element_ty), mask=here)
