"""Experts as a grouped gated MLP: tokens are sorted by expert, and each expert sees its own as one slice.

Shapes: N tokens, K experts chosen per token, M = N * K pairs sorted by expert, E experts, D model size, F expert size
(gate and up stacked: 2F).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_experts(x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """Weighted sum over each token's experts. The sum runs in router order, so it does not depend on the batch."""
    n, k = experts_NK.shape
    order = experts_NK.flatten().argsort(stable=True)
    counts_E = torch.bincount(experts_NK.flatten(), minlength=gate_up_E2FD.shape[0])
    # The grouped product wants rows of whole 16 bytes.
    whole = x_ND.shape[1] % 8 == 0 and down_EDF.shape[2] % 8 == 0
    grouped = x_ND.is_cuda and x_ND.dtype == torch.bfloat16 and whole
    answer = _one_product if grouped else _expert_by_expert
    sorted_MD = answer(x_ND.index_select(0, order // k), counts_E, gate_up_E2FD, down_EDF)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(n * k, device=order.device))
    by_token_NKD = sorted_MD.index_select(0, back).view(n, k, -1)
    return torch.bmm(weights_NK[:, None].float(), by_token_NKD.float()).squeeze(1).to(x_ND.dtype)


def _expert_by_expert(x_MD: Tensor, counts_E: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """The definition: each expert with tokens reads its slice."""
    outputs = []
    for expert, x in enumerate(x_MD.split(counts_E.tolist())):
        if len(x):
            outputs.append(F.linear(_gate(F.linear(x, gate_up_E2FD[expert])), down_EDF[expert]))
    return torch.cat(outputs)


def _one_product(x_MD: Tensor, counts_E: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """The same as two grouped products on the GPU: no wait for the counts, no launch per expert."""
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    inner = _gate(F.grouped_mm(x_MD, gate_up_E2FD.transpose(1, 2), offs=ends_E))
    return F.grouped_mm(inner, down_EDF.transpose(1, 2), offs=ends_E)


def _gate(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
