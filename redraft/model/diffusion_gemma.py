"""DiffusionGemma: the Gemma 4 backbone, with layers of attention, a dense MLP and experts.

`Backbone` runs the layers: causally in `encode`, bidirectionally in `denoise`. Here are the layers themselves, the
self-conditioning of canvases, and the head. Weights have the names of the published checkpoints; `checkpoint/names.py` adds
the prefix. A causal-only model (a standard Gemma 4 checkpoint, which has the same backbone) has `encode` and `head` only.
Shapes: B rows, S tokens, C canvas positions, D model size, H heads, G key-value heads, K head size, V vocabulary, N tokens
of all rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from redraft.config import FULL, SLIDING, ModelConfig
from redraft.kernels import apply_rope, attend, rms_norm, rope_table, softcap_
from redraft.model.backbone import Backbone, DraftHead, Halves
from redraft.model.layers import GatedMLP, Mask, RMSNorm, Rope, Rounding, project
from redraft.model.lora import DENOISE, ENCODE, ActiveAdapters
from redraft.model.moe import Experts, Router, Routing


class SelfConditioning(GatedMLP):
    """Adds the previous step's soft embeddings, through an MLP, to the canvas embeddings, and norms the sum."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size)
        self.eps = config.rms_norm_eps
        self.pre_norm = RMSNorm(config.hidden_size, self.eps)

    def forward(  # type: ignore[override]  # GatedMLP is its inner part
        self, x_BCD: Tensor, soft_BCD: Tensor | None = None, adapters: ActiveAdapters | None = None
    ) -> Tensor:
        """On a canvas's first step there are no soft embeddings; the MLP of zeros is zero, so only the norm remains."""
        if soft_BCD is not None:
            x_BCD = x_BCD + super().forward(self.pre_norm(soft_BCD), adapters)
        return rms_norm(x_BCD, None, self.eps)


class Attention(nn.Module):
    """Grouped-query attention over [cache ; new tokens]. Full layers have no v_proj: values are the raw keys, normed."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        kv_heads, self.head_dim = config.layer_heads(layer)
        self.eps = config.rms_norm_eps
        size = config.hidden_size
        is_sliding = config.layer_types[layer] == SLIDING
        self.q_proj = nn.Linear(size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(size, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(size, kv_heads * self.head_dim, bias=False) if is_sliding else None
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, self.eps)
        self.k_norm = RMSNorm(self.head_dim, self.eps)

    def forward(
        self,
        x_BSD: Tensor,
        rope: Rope,
        mask: Mask,
        past: tuple[Tensor, Tensor],
        rounding: Rounding | None = None,
        adapters: ActiveAdapters | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the layer's output, and the keys and values of the new tokens, which `encode` puts into the cache."""
        heads = (-1, self.head_dim)
        q_BSHK = apply_rope(self.q_norm(project(self.q_proj, x_BSD, adapters, "q_proj").unflatten(-1, heads)), *rope)
        raw_BSGK = project(self.k_proj, x_BSD, adapters, "k_proj").unflatten(-1, heads)
        k_BSGK = apply_rope(self.k_norm(raw_BSGK), *rope)
        v_BSGK = raw_BSGK
        if self.v_proj is not None:
            v_BSGK = project(self.v_proj, x_BSD, adapters, "v_proj").unflatten(-1, heads)
        v_BSGK = rms_norm(v_BSGK, None, self.eps)
        if rounding is not None:
            k_BSGK = rounding.apply(k_BSGK)
            v_BSGK = rounding.apply(v_BSGK)
        past_keys, past_values = past
        keys = torch.cat([past_keys, k_BSGK], dim=1)
        values = torch.cat([past_values, v_BSGK], dim=1)
        return project(self.o_proj, attend(q_BSHK, keys, values, mask), adapters, "o_proj"), k_BSGK, v_BSGK


class Layer(nn.Module):
    """Attention, then dense MLP and experts in parallel, then a learned scalar: one for `encode`, one for `denoise`."""

    layer_scalar: Tensor  # of `denoise`; a causal-only model does not have it
    encoder_layer_scalar: Tensor

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.self_attn = Attention(config, layer)
        self.mlp = GatedMLP(size, config.intermediate_size)
        self.router = Router(config)
        self.experts = Experts(config)
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        self.post_feedforward_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm_2 = RMSNorm(size, eps)
        self.post_feedforward_layernorm_1 = RMSNorm(size, eps)
        self.post_feedforward_layernorm_2 = RMSNorm(size, eps)
        if not config.is_causal_only:
            self.register_buffer("layer_scalar", torch.ones(1))
        self.register_buffer("encoder_layer_scalar", torch.ones(1))

    @property
    def scalars(self) -> tuple[Tensor, Tensor]:
        """The scalars of `encode` and `denoise`. A causal-only layer repeats its only one, for kernels that take two."""
        return self.encoder_layer_scalar, getattr(self, "layer_scalar", self.encoder_layer_scalar)

    def forward(
        self,
        x_BSD: Tensor,
        rope: Rope,
        mask: Mask,
        past: tuple[Tensor, Tensor],
        scalar: Tensor,
        rounding: Rounding | None = None,
        adapters: ActiveAdapters | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Routing]:
        """Returns the next residual stream, the keys and values of the new tokens, and the routing."""
        of_attention = adapters and adapters.at("self_attn")
        x = self.input_layernorm(x_BSD)
        attended_BSD, k_BSGK, v_BSGK = self.self_attn(x, rope, mask, past, rounding, of_attention)
        x_BSD = x_BSD + self.post_attention_layernorm(attended_BSD)
        dense_BSD = self.mlp(self.pre_feedforward_layernorm(x_BSD), adapters and adapters.at("mlp"))
        dense_BSD = self.post_feedforward_layernorm_1(dense_BSD)
        x_ND = x_BSD.flatten(0, 1)
        routing = self.router(x_ND)  # the router takes the raw residual stream, the experts take its norm
        normed_ND = self.pre_feedforward_layernorm_2(x_ND)
        if adapters is None:
            mixed_ND = self.experts(normed_ND, routing.experts_NK, routing.weights_NK)
        else:
            mixed_ND = adapters.at("experts").run_experts(self.experts, normed_ND, routing, x_BSD.shape)
        sparse_BSD = self.post_feedforward_layernorm_2(mixed_ND.view_as(x_BSD))
        x_BSD = (x_BSD + self.post_feedforward_layernorm(dense_BSD + sparse_BSD)) * scalar
        return x_BSD, k_BSGK, v_BSGK, routing


class DiffusionGemma(Backbone):
    """The Gemma 4 backbone. Embeddings are scaled by sqrt(D), canvases are self-conditioned, logits are soft-capped."""

    config: ModelConfig
    layers: Sequence[Layer]
    self_conditioning: SelfConditioning  # a causal-only model does not have it

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, (Layer(config, layer) for layer in range(config.num_hidden_layers)))
        if not config.is_causal_only:
            self.self_conditioning = SelfConditioning(config)
        self.draft_head = DraftHead(config) if config.draft_head_size else None

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, scaled by sqrt(D) in the weights' precision."""
        return self.embed_tokens(ids) * self.embed_scale

    def embed_canvas(self, ids: Tensor, soft: Tensor | None, adapters: ActiveAdapters | None) -> Tensor:
        """Embeddings of canvas tokens, self-conditioned: `soft` comes from the logits of the step before."""
        return self.self_conditioning(self.embed(ids), soft, adapters and adapters.at("self_conditioning"))

    def soft_embed(self, logits_BCV: Tensor) -> Tensor:
        """The expected embedding [B, C, D] under softmax(logits), scaled as the embeddings of tokens are."""
        return super().soft_embed(logits_BCV) * self.embed_scale

    def run_layer(
        self,
        index: int,
        x_BSD: Tensor,
        rope: Rope,
        mask: Mask,
        past: tuple[Tensor, Tensor],
        halves: Halves,
        rounding: Rounding | None = None,
        adapters: ActiveAdapters | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Routing]:
        """Runs a layer, each token with the scalar of its half."""
        layer = self.layers[index]
        scalar_of = {ENCODE: layer.scalars[0], DENOISE: layer.scalars[1]}
        if len(halves) == 1:
            scalar = scalar_of[halves[0][0]]
        else:
            scalar = torch.cat([scalar_of[half].expand(count) for half, count in halves])[:, None]
        return layer(x_BSD, rope, mask, past, scalar, rounding, adapters)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits from final hidden states. The weights are tied to the embedding."""
        return softcap_(self.embed_tokens.project(hidden), self.config.final_logit_softcapping)

    @property
    def embed_scale(self) -> Tensor:
        """The factor of all embeddings: sqrt(D), rounded to the weights' precision."""
        # sqrt(2816) is 53.066 in float32 and 53.0 in bf16; the product must use the rounded value, as in transformers.
        return torch.full((), self.config.hidden_size**0.5, dtype=self.dtype, device=self.device)

    def rope_tables(self, positions_BS: Tensor) -> dict[str, Rope]:
        """Cosines and sines for RoPE at these positions, by layer type."""
        c = self.config
        return {
            SLIDING: rope_table(positions_BS, c.head_dim, c.rope_theta, 1.0, self.dtype),
            FULL: rope_table(positions_BS, c.global_head_dim, c.global_rope_theta, c.global_rotary_fraction, self.dtype),
        }
