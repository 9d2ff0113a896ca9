"""The experts of a mixture-of-experts layer: tokens are sorted by expert, and each expert processes its tokens as one slice.

Shapes: N tokens, K experts per token, M = N * K (token, expert) pairs sorted by expert, E experts, D model size,
F expert size (gate and up stacked: 2F), R rank of an adapter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.kernels.linear_packed import linear_packed
from redraft.kernels.packed import PackedTensor, dequantize_packed

MANY_TOKENS = 1024
EXPERTS_AT_ONCE = 8


class LowRank(NamedTuple):
    """What an adapter adds to a stack of matrices: each expert's own b times a. The scale is in b."""

    a_ERI: Tensor
    b_EOR: Tensor

    def apply(self, x: Tensor, expert: int) -> Tensor:
        """The addition to one expert's output."""
        return F.linear(F.linear(x, self.a_ERI[expert]), self.b_EOR[expert])


class ExpertAdapter(NamedTuple):
    """The additions to the experts' two stacks; None: nothing is added to that stack."""

    gate_up: LowRank | None
    down: LowRank | None


NO_ADAPTER = ExpertAdapter(None, None)


def gated_experts(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up_E2FD: Tensor | PackedTensor,
    down_EDF: Tensor | PackedTensor,
    adapter: ExpertAdapter = NO_ADAPTER,
) -> Tensor:
    """Returns the weighted sum of each token's experts. The sum runs in router order, so it does not depend on the batch."""
    experts = len(gate_up_E2FD if isinstance(gate_up_E2FD, Tensor) else gate_up_E2FD[0])
    if isinstance(gate_up_E2FD, Tensor) and isinstance(down_EDF, Tensor) and experts * down_EDF.shape[2] <= x_ND.shape[1]:
        return _run_all_experts(x_ND, experts_NK, weights_NK, gate_up_E2FD, down_EDF, adapter)
    run_experts: Callable[..., Tensor] = _run_each_expert
    if _can_group(x_ND, gate_up_E2FD, down_EDF, adapter):
        run_experts = _run_grouped_mm
    n, k = experts_NK.shape
    expert_M, order_M = experts_NK.flatten().sort(stable=True)
    ends_E = torch.searchsorted(expert_M, torch.arange(experts, device=expert_M.device), right=True)
    inverse_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(n * k, device=order_M.device))
    x_MD = _SortByExpert.apply(x_ND, order_M, inverse_M, k)
    sorted_MD = run_experts(x_MD, ends_E, gate_up_E2FD, down_EDF, adapter)
    by_token_NKD = _SortByToken.apply(sorted_MD, order_M, inverse_M).view(n, k, -1)
    return (weights_NK[..., None].float() * by_token_NKD).sum(dim=1).to(x_ND.dtype)


def _can_group(
    x_ND: Tensor, gate_up_E2FD: Tensor | PackedTensor, down_EDF: Tensor | PackedTensor, adapter: ExpertAdapter
) -> bool:
    """Whether F.grouped_mm runs all experts at once. It needs bf16 on a GPU, and rows of a multiple of 16 bytes.

    Packed weights are dequantized for it, a stack at a time, which pays for many tokens: they use all experts anyway.
    """
    if not x_ND.is_cuda or x_ND.dtype != torch.bfloat16:
        return False
    is_packed = not (isinstance(gate_up_E2FD, Tensor) and isinstance(down_EDF, Tensor))
    if is_packed and not x_ND.requires_grad and len(x_ND) < MANY_TOKENS:
        return False
    sizes = [x_ND.shape[1], _expert_size(gate_up_E2FD)]
    sizes += [part.a_ERI.shape[1] for part in adapter if part is not None]
    return all(size % 8 == 0 for size in sizes)


def _expert_size(gate_up_E2FD: Tensor | PackedTensor) -> int:
    rows = gate_up_E2FD if isinstance(gate_up_E2FD, Tensor) else gate_up_E2FD[0]
    return rows.shape[1] // 2


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
    x_MD: Tensor,
    ends_E: Tensor,
    gate_up_E2FD: Tensor | PackedTensor,
    down_EDF: Tensor | PackedTensor,
    adapter: ExpertAdapter,
) -> Tensor:
    """The definition: a loop over the experts that have tokens."""
    outputs = []
    for expert, x in enumerate(x_MD.tensor_split(ends_E[:-1].cpu())):
        if len(x):
            inner = _gelu_and_mul(_linear(x, gate_up_E2FD, expert, adapter.gate_up))
            outputs.append(_linear(inner, down_EDF, expert, adapter.down))
    return torch.cat(outputs)


def _linear(x: Tensor, weights: Tensor | PackedTensor, expert: int, added: LowRank | None) -> Tensor:
    """The product with one matrix of a stack, and what an adapter adds to it."""
    y = F.linear(x, weights[expert]) if isinstance(weights, Tensor) else linear_packed(x, weights.select(expert))
    return y if added is None else y + added.apply(x, expert)


def _run_all_experts(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    adapter: ExpertAdapter,
) -> Tensor:
    """Runs every expert on every token, in two dense products, with weight 0 for the experts that a token did not choose.

    For experts that are together no wider than the model: sorting the tokens would cost more than the arithmetic it saves.
    """
    experts = len(down_EDF)
    weights_NE = weights_NK.new_zeros(len(x_ND), experts).scatter(1, experts_NK, weights_NK)
    gate_up_NE2F = F.linear(x_ND, gate_up_E2FD.flatten(0, 1)).unflatten(-1, (experts, -1))
    if adapter.gate_up is not None:
        low_NER = torch.einsum("nd,erd->ner", x_ND, adapter.gate_up.a_ERI)
        gate_up_NE2F = gate_up_NE2F + torch.einsum("ner,eor->neo", low_NER, adapter.gate_up.b_EOR)
    inner_NEF = (_gelu_and_mul(gate_up_NE2F) * weights_NE[..., None]).to(x_ND.dtype)
    y_ND = F.linear(inner_NEF.flatten(1), down_EDF.transpose(0, 1).flatten(1))
    if adapter.down is not None:
        low_NER = torch.einsum("nef,erf->ner", inner_NEF, adapter.down.a_ERI)
        y_ND = y_ND + torch.einsum("ner,eor->no", low_NER, adapter.down.b_EOR)
    return y_ND


def _run_grouped_mm(
    x_MD: Tensor,
    ends_E: Tensor,
    gate_up_E2FD: Tensor | PackedTensor,
    down_EDF: Tensor | PackedTensor,
    adapter: ExpertAdapter,
) -> Tensor:
    """Runs all experts in two grouped products on the GPU: no copy of the counts to the host, no launch per expert."""
    ends_E = ends_E.int()
    inner_MF = _gelu_and_mul(_grouped_linear(x_MD, ends_E, gate_up_E2FD, adapter.gate_up))
    return _grouped_linear(inner_MF, ends_E, down_EDF, adapter.down)


def _grouped_linear(x_MI: Tensor, ends_E: Tensor, weights: Tensor | PackedTensor, added: LowRank | None) -> Tensor:
    """The product of each token with its expert's matrix, and what an adapter adds to it."""
    if isinstance(weights, Tensor):
        y_MO = F.grouped_mm(x_MI, weights.transpose(1, 2), offs=ends_E)
    else:
        y_MO = _PackedGroupedLinear.apply(x_MI, ends_E, weights)
    if added is None:
        return y_MO
    low_MR = F.grouped_mm(x_MI, added.a_ERI.transpose(1, 2), offs=ends_E)
    return y_MO + F.grouped_mm(low_MR, added.b_EOR.transpose(1, 2), offs=ends_E)


def _dequantize_stack(weights: PackedTensor, size: int, dtype: torch.dtype) -> Tensor:
    """Dequantizes a stack a few experts at a time: the float32 numbers in between take more memory than the result."""
    experts, rows = weights[0].shape[:2]
    dense_EOI = torch.empty(experts, rows, size, dtype=dtype, device=weights[0].device)
    for begin in range(0, experts, EXPERTS_AT_ONCE):
        part = slice(begin, begin + EXPERTS_AT_ONCE)
        dense_EOI[part] = dequantize_packed(weights.select(part), size, dtype)
    return dense_EOI


class _PackedGroupedLinear(torch.autograd.Function):
    """Grouped products with a packed stack. It is dequantized for each direction, so that only its codes stay in memory."""

    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, ends_E: Tensor, weights: PackedTensor) -> Tensor:
        ctx.save_for_backward(ends_E)
        ctx.weights = weights
        ctx.size = x_MI.shape[1]
        dense_EOI = _dequantize_stack(weights, ctx.size, x_MI.dtype)
        return F.grouped_mm(x_MI, dense_EOI.transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_MO: Tensor) -> tuple[Tensor, None, None]:
        (ends_E,) = ctx.saved_tensors
        dense_EOI = _dequantize_stack(ctx.weights, ctx.size, grad_MO.dtype)
        return F.grouped_mm(grad_MO, dense_EOI, offs=ends_E), None, None


def _gelu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
