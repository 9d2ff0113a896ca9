"""The experts of a mixture-of-experts layer: tokens are sorted by expert, and each expert processes its tokens as one slice.

Shapes: N tokens, K experts per token, M = N * K (token, expert) pairs sorted by expert, E experts, D model size,
F expert size (gate and up stacked: 2F).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.kernels.fp8 import Fp8Tensor
from redraft.kernels.linear_fp8 import linear_fp8
from redraft.kernels.packed import PackedTensor, dequantize_packed


def gated_experts(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up_E2FD: Tensor | PackedTensor,
    down_EDF: Tensor | PackedTensor,
) -> Tensor:
    """Returns the weighted sum of each token's experts. The sum runs in router order, so it does not depend on the batch."""
    experts = len(gate_up_E2FD if isinstance(gate_up_E2FD, Tensor) else gate_up_E2FD[0])
    run_experts: Callable[..., Tensor] = _run_each_expert
    if isinstance(gate_up_E2FD, Tensor) and isinstance(down_EDF, Tensor):
        if experts * down_EDF.shape[2] <= x_ND.shape[1]:
            return _run_all_experts(x_ND, experts_NK, weights_NK, gate_up_E2FD, down_EDF)
        # F.grouped_mm needs rows of a multiple of 16 bytes.
        is_aligned = x_ND.shape[1] % 8 == 0 and down_EDF.shape[2] % 8 == 0
        if x_ND.is_cuda and x_ND.dtype == torch.bfloat16 and is_aligned:
            run_experts = _run_grouped_mm
    n, k = experts_NK.shape
    expert_M, order_M = experts_NK.flatten().sort(stable=True)
    ends_E = torch.searchsorted(expert_M, torch.arange(experts, device=expert_M.device), right=True)
    inverse_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(n * k, device=order_M.device))
    x_MD = _SortByExpert.apply(x_ND, order_M, inverse_M, k)
    sorted_MD = run_experts(x_MD, ends_E, gate_up_E2FD, down_EDF)
    by_token_NKD = _SortByToken.apply(sorted_MD, order_M, inverse_M).view(n, k, -1)
    return (weights_NK[..., None].float() * by_token_NKD).sum(dim=1).to(x_ND.dtype)


class _SortByExpert(torch.autograd.Function):
    """Copies each token to its K places in expert order.

    The gradient is a gather too; the one that torch derives adds with atomics, which is slow and has no fixed order.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order_M: Tensor, inverse_M: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse_M)
        ctx.k = k
        return x_ND.index_select(0, order_M // k)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_M,) = ctx.saved_tensors
        return grad_MD.index_select(0, inverse_M).unflatten(0, (-1, ctx.k)).sum(dim=1), None, None, None


class _SortByToken(torch.autograd.Function):
    """Puts the experts' outputs back in token order."""

    @staticmethod
    def forward(ctx: Any, sorted_MD: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
        ctx.save_for_backward(order_M)
        return sorted_MD.index_select(0, inverse_M)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None]:
        (order_M,) = ctx.saved_tensors
        return grad_MD.index_select(0, order_M), None, None


def _run_each_expert(
    x_MD: Tensor, ends_E: Tensor, gate_up_E2FD: Tensor | PackedTensor, down_EDF: Tensor | PackedTensor
) -> Tensor:
    """The definition: a loop over the experts that have tokens."""
    outputs = []
    for expert, x in enumerate(x_MD.tensor_split(ends_E[:-1].cpu())):
        if len(x):
            inner = _gelu_and_mul(_linear(x, gate_up_E2FD, expert))
            outputs.append(_linear(inner, down_EDF, expert))
    return torch.cat(outputs)


def _linear(x: Tensor, weights: Tensor | PackedTensor, expert: int) -> Tensor:
    """The product with one matrix of a stack. Four-bit weights are dequantized to the dtype of x, fp8 ones are not."""
    if isinstance(weights, Tensor):
        return F.linear(x, weights[expert])
    if isinstance(weights, Fp8Tensor):
        return linear_fp8(x, weights.select(expert))
    return F.linear(x, dequantize_packed(weights.select(expert), x.shape[-1], x.dtype))


def _run_all_experts(x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """Runs every expert on every token, in two dense products, with weight 0 for the experts that a token did not choose.

    For experts that are together no wider than the model: sorting the tokens would cost more than the arithmetic it saves.
    """
    experts = len(down_EDF)
    weights_NE = weights_NK.new_zeros(len(x_ND), experts).scatter(1, experts_NK, weights_NK)
    inner_NEF = _gelu_and_mul(F.linear(x_ND, gate_up_E2FD.flatten(0, 1)).unflatten(-1, (experts, -1)))
    inner_NEF = (inner_NEF * weights_NE[..., None]).to(x_ND.dtype)
    return F.linear(inner_NEF.flatten(1), down_EDF.transpose(0, 1).flatten(1))


def _run_grouped_mm(x_MD: Tensor, ends_E: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """Runs all experts in two grouped products on the GPU: no copy of the counts to the host, no launch per expert."""
    ends_E = ends_E.int()
    inner_MF = _gelu_and_mul(F.grouped_mm(x_MD, gate_up_E2FD.transpose(1, 2), offs=ends_E))
    return F.grouped_mm(inner_MF, down_EDF.transpose(1, 2), offs=ends_E)


def _gelu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
