"""Mixture of experts: the router picks K experts for each token, the experts compute, and their outputs are mixed.

Shapes: N tokens, D model size, E experts, K experts per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from redraft.config import ModelConfig
from redraft.kernels import NO_ADAPTER, ExpertAdapter, gated_experts, rms_norm


class Routing(NamedTuple):
    """The experts of each token and their weights in the mix."""

    experts_NK: Tensor
    weights_NK: Tensor
    probs_NE: Tensor  # over all experts, before the top K are taken; the load-balancing loss of training needs them


class Router(nn.Module):
    """Scores all experts from the raw residual stream, which it norms itself, and takes the best K."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k_experts
        self.eps = config.rms_norm_eps
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))

    def forward(self, residual_ND: Tensor) -> Routing:
        """Routes each token. The probabilities of its K experts are renormalised, then scaled per expert."""
        x_ND = rms_norm(residual_ND, None, self.eps) * self.scale * residual_ND.shape[-1] ** -0.5
        probs_NE = torch.softmax(self.proj(x_ND), dim=-1, dtype=torch.float32)
        weights_NK, experts_NK = probs_NE.topk(self.top_k, dim=-1)
        weights_NK = weights_NK / weights_NK.sum(dim=-1, keepdim=True)
        # Not per_expert_scale[experts_NK]: its gradient is a scatter of all tokens into E slots, one atomic add at a time.
        scale_NK = self.per_expert_scale.expand_as(probs_NE).gather(-1, experts_NK)
        return Routing(experts_NK, weights_NK * scale_NK, probs_NE)


class Experts(nn.Module):
    """All experts of a layer in two stacked tensors, as published. `gate_up_proj` holds the gate rows, then the up rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts = config.num_experts
        size = config.hidden_size
        expert_size = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * expert_size, size))
        self.down_proj = nn.Parameter(torch.empty(experts, size, expert_size))

    def forward(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, adapter: ExpertAdapter = NO_ADAPTER) -> Tensor:
        """The weighted sum of the outputs of each token's experts."""
        return gated_experts(x_ND, experts_NK, weights_NK, self.gate_up_proj, self.down_proj, adapter)
