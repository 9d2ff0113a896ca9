"""Router and experts: which few of the experts read a token, and what they make of it.

Shapes: N tokens, D model size, E experts, K chosen per token.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from redraft.config import ModelConfig
from redraft.kernels import gated_experts, rms_norm


class Routing(NamedTuple):
    """Who reads which token, and how much that counts."""

    experts_NK: Tensor
    weights_NK: Tensor
    probs_NE: Tensor  # before the choice; training keeps them from collapsing onto a few


class Router(nn.Module):
    """Scores experts from the raw residual stream (it has a norm of its own) and mixes the best K of them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k, self.eps = config.top_k_experts, config.rms_norm_eps
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))

    def forward(self, residual_ND: Tensor) -> Routing:
        """The best K of each token. Their probabilities are renormalised, then scaled per expert."""
        x_ND = rms_norm(residual_ND, None, self.eps) * self.scale * residual_ND.shape[-1] ** -0.5
        probs_NE = torch.softmax(self.proj(x_ND), dim=-1, dtype=torch.float32)
        weights_NK, experts_NK = probs_NE.topk(self.top_k, dim=-1)
        weights_NK = weights_NK / weights_NK.sum(dim=-1, keepdim=True)
        # Not scale[experts]: the gradient of that adds up all tokens in E places, one atomic addition after another.
        scale_NK = self.per_expert_scale.expand_as(probs_NE).gather(-1, experts_NK)
        return Routing(experts_NK, weights_NK * scale_NK, probs_NE)


class Experts(nn.Module):
    """All experts of a layer in two tensors, as published: gate above up in `gate_up_proj`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, size, expert_size = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * expert_size, size))
        self.down_proj = nn.Parameter(torch.empty(experts, size, expert_size))

    def forward(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """The weighted answers of each token's experts."""
        return gated_experts(x_ND, experts_NK, weights_NK, self.gate_up_proj, self.down_proj)
