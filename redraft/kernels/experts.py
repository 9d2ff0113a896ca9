"""Experts as a grouped gated MLP: tokens are sorted by expert, and each expert sees its own as one slice.

Shapes: N tokens, K experts chosen per token, E experts, D model size, F expert size (gate and up stacked: 2F).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_experts(x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """Weighted sum over each token's experts. The sum runs in router order, so it does not depend on the batch."""
    n, k = experts_NK.shape
    order = experts_NK.flatten().argsort(stable=True)
    counts = torch.bincount(experts_NK.flatten(), minlength=gate_up_E2FD.shape[0]).tolist()
    slices = x_ND.index_select(0, order // k).split(counts)
    outputs = []
    for expert, x in enumerate(slices):
        if len(x):
            gate, up = F.linear(x, gate_up_E2FD[expert]).chunk(2, dim=-1)
            outputs.append(F.linear(F.gelu(gate, approximate="tanh") * up, down_EDF[expert]))
    back = torch.empty_like(order).scatter_(0, order, torch.arange(n * k, device=order.device))
    by_token_NKD = torch.cat(outputs).index_select(0, back).view(n, k, -1)
    return torch.bmm(weights_NK[:, None].float(), by_token_NKD.float()).squeeze(1).to(x_ND.dtype)
