"""Experts as a grouped gated MLP: tokens are sorted by expert, and each expert sees its own as one slice.

Shapes: N tokens, K experts chosen per token, M = N * K pairs sorted by expert, E experts, D model size, F expert size
(gate and up stacked: 2F).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.kernels.fp8 import Fp8Tensor, linear_fp8


def gated_experts(
    x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, gate_up_E2FD: Tensor | Fp8Tensor, down_EDF: Tensor | Fp8Tensor
) -> Tensor:
    """Weighted sum over each token's experts. The sum runs in router order, so it does not depend on the batch."""
    n, k = experts_NK.shape
    packed = isinstance(gate_up_E2FD, Fp8Tensor)
    experts = len(gate_up_E2FD.qdata if packed else gate_up_E2FD)
    if not packed and experts * down_EDF.shape[2] <= x_ND.shape[1]:
        return _all_read(x_ND, experts_NK, weights_NK, gate_up_E2FD, down_EDF)
    expert_M, order_M = experts_NK.flatten().sort(stable=True)
    ends_E = torch.searchsorted(expert_M, torch.arange(experts, device=expert_M.device), right=True)
    back_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(n * k, device=order_M.device))
    # The grouped product wants rows of whole 16 bytes.
    whole = not packed and x_ND.shape[1] % 8 == 0 and down_EDF.shape[2] % 8 == 0
    grouped = x_ND.is_cuda and x_ND.dtype == torch.bfloat16 and whole
    answer = _one_product if grouped else _expert_by_expert
    sorted_MD = answer(_SortByExpert.apply(x_ND, order_M, back_M, k), ends_E, gate_up_E2FD, down_EDF)
    by_token_NKD = _SortByToken.apply(sorted_MD, order_M, back_M).view(n, k, -1)
    return (weights_NK[..., None].float() * by_token_NKD).sum(dim=1).to(x_ND.dtype)


class _SortByExpert(torch.autograd.Function):
    """Each token to its K experts. Its gradient is a gather too; torch's own would add up by atomics, slow and unordered."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, back_M: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(back_M)
        ctx.k = k
        return x_ND.index_select(0, order_M // k)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None, None]:
        (back_M,) = ctx.saved_tensors
        return grad_MD.index_select(0, back_M).unflatten(0, (-1, ctx.k)).sum(dim=1), None, None, None


class _SortByToken(torch.autograd.Function):
    """The experts' answers in the order of the tokens again."""

    @staticmethod
    def forward(ctx: Any, sorted_MD: Tensor, order_M: Tensor, back_M: Tensor) -> Tensor:
        ctx.save_for_backward(order_M)
        return sorted_MD.index_select(0, back_M)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None]:
        (order_M,) = ctx.saved_tensors
        return grad_MD.index_select(0, order_M), None, None


def _expert_by_expert(
    x_MD: Tensor, ends_E: Tensor, gate_up_E2FD: Tensor | Fp8Tensor, down_EDF: Tensor | Fp8Tensor
) -> Tensor:
    """The definition: each expert with tokens reads its slice."""
    product = linear_fp8 if isinstance(gate_up_E2FD, Fp8Tensor) else F.linear
    outputs = []
    for expert, x in enumerate(x_MD.tensor_split(ends_E[:-1].cpu())):
        if len(x):
            outputs.append(product(_gate(product(x, gate_up_E2FD[expert])), down_EDF[expert]))
    return torch.cat(outputs)


def _all_read(x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """Experts so small that all of them together are no wider than the model: all read every token, in two plain products.

    Those not chosen count nothing. Sorting, dealing and collecting would cost more than the arithmetic it saves.
    """
    experts = len(down_EDF)
    weights_NE = weights_NK.new_zeros(len(x_ND), experts).scatter(1, experts_NK, weights_NK)
    inner_NEF = _gate(F.linear(x_ND, gate_up_E2FD.flatten(0, 1)).unflatten(-1, (experts, -1)))
    inner_NEF = (inner_NEF * weights_NE[..., None]).to(x_ND.dtype)
    return F.linear(inner_NEF.flatten(1), down_EDF.transpose(0, 1).flatten(1))


def _one_product(x_MD: Tensor, ends_E: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """The same as two grouped products on the GPU: no wait for the counts, no launch per expert."""
    ends_E = ends_E.int()
    inner = _gate(F.grouped_mm(x_MD, gate_up_E2FD.transpose(1, 2), offs=ends_E))
    return F.grouped_mm(inner, down_EDF.transpose(1, 2), offs=ends_E)


def _gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
