"""Llama: the standard decoder, with layers of attention and a SiLU-gated MLP. Also SmolLM2, Mistral, Qwen2 and Qwen3.

`Backbone` runs the layers. Llama's own are the 1/sqrt(K) scale of attention, two norms a layer, unscaled embeddings, and a
head of its own unless it is tied to the embedding. Qwen2 has biases of queries, keys and values, Qwen3 norms their heads.
Weights have the names of the published checkpoints; `checkpoint/names.py` adds the prefix.
Shapes: B rows, S tokens, D model size, H heads, G key-value heads, K head size, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.config import ConfigError, LlamaConfig, RopeScaling
from redraft.kernels import apply_rope, attend, rope_frequencies, tabulate_rope
from redraft.model.backbone import Backbone, Halves
from redraft.model.layers import GatedMLP, Mask, RMSNorm, Rope, Rounding, project
from redraft.model.lora import ActiveAdapters


class LlamaAttention(nn.Module):
    """Grouped-query attention over [cache ; new tokens]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(size, queries, bias=config.has_qkv_bias)
        self.k_proj = nn.Linear(size, keys, bias=config.has_qkv_bias)
        self.v_proj = nn.Linear(size, keys, bias=config.has_qkv_bias)
        self.o_proj = nn.Linear(queries, size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.has_qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.has_qk_norm else None

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
        q_BSHK = project(self.q_proj, x_BSD, adapters, "q_proj").unflatten(-1, heads)
        k_BSGK = project(self.k_proj, x_BSD, adapters, "k_proj").unflatten(-1, heads)
        v_BSGK = project(self.v_proj, x_BSD, adapters, "v_proj").unflatten(-1, heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHK = self.q_norm(q_BSHK)
            k_BSGK = self.k_norm(k_BSGK)
        q_BSHK = apply_rope(q_BSHK, *rope)
        k_BSGK = apply_rope(k_BSGK, *rope)
        if rounding is not None:
            k_BSGK = rounding.apply(k_BSGK)
            v_BSGK = rounding.apply(v_BSGK)
        past_keys, past_values = past
        keys = torch.cat([past_keys, k_BSGK], dim=1)
        values = torch.cat([past_values, v_BSGK], dim=1)
        attended_BSI = attend(q_BSHK, keys, values, mask, self.scale)
        return project(self.o_proj, attended_BSI, adapters, "o_proj"), k_BSGK, v_BSGK


class LlamaLayer(nn.Module):
    """Attention, then the MLP, each on the norm of the residual stream and added to it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, F.silu)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x_BSD: Tensor,
        rope: Rope,
        mask: Mask,
        past: tuple[Tensor, Tensor],
        rounding: Rounding | None = None,
        adapters: ActiveAdapters | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the next residual stream, and the keys and values of the new tokens."""
        of_attention = adapters and adapters.at("self_attn")
        x = self.input_layernorm(x_BSD)
        attended_BSD, k_BSGK, v_BSGK = self.self_attn(x, rope, mask, past, rounding, of_attention)
        x_BSD = x_BSD + attended_BSD
        x_BSD = x_BSD + self.mlp(self.post_attention_layernorm(x_BSD), adapters and adapters.at("mlp"))
        return x_BSD, k_BSGK, v_BSGK


class Llama(Backbone):
    """The standard decoder. Its checkpoints are causal-only; a drafter or a page adapter gives it canvases."""

    config: LlamaConfig
    layers: Sequence[LlamaLayer]

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, (LlamaLayer(config) for _ in range(config.num_hidden_layers)))
        self.lm_head = None if config.has_tied_head else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.draft_head = None

    def store_cache_in_fp8(self) -> None:
        """Refused: fp8 caches have no scales, and keys and values that are not normed may be larger than fp8 holds."""
        raise ConfigError("KV caches in fp8 need normed keys and values, as Gemma's are; leave kv out for this model")

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings."""
        return self.embed_tokens(ids)

    def embed_canvas(self, ids: Tensor, soft: Tensor | None, adapters: ActiveAdapters | None) -> Tensor:
        """Embeddings of canvas tokens. The id V stands for the drafter's vector; without one, for the page adapter's."""
        if self.drafter is not None:
            vector_D = self.drafter.blank_D
        elif self.page is not None:
            vector_D = self.page.begin_D
        else:
            return self.embed(ids)
        vocab_size = self.config.vocab_size
        x = self.embed(ids.clamp(max=vocab_size - 1))
        return torch.where((ids == vocab_size)[..., None], vector_D.to(x.dtype), x)

    def soft_embed(self, logits_BCV: Tensor) -> Tensor:
        """Zeros [B, C, D], without a look at the logits: canvases of a Llama are not self-conditioned."""
        self._assert_denoiser("soft_embed")
        return torch.zeros(*logits_BCV.shape[:-1], self.config.hidden_size, dtype=self.dtype, device=self.device)

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
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """Runs a layer, the same for both halves."""
        x_BSD, k_BSGK, v_BSGK = self.layers[index](x_BSD, rope, mask, past, rounding, adapters)
        return x_BSD, k_BSGK, v_BSGK, None

    def head(self, hidden: Tensor) -> Tensor:
        """Logits from final hidden states, float32."""
        return self.logits(hidden).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """The same in the model's precision, in which they are computed."""
        return self.embed_tokens.project(hidden) if self.lm_head is None else self.lm_head(hidden)

    def rope_tables(self, positions_BS: Tensor) -> dict[str, Rope]:
        """Cosines and sines for RoPE at these positions: the same for all layer types."""
        table = tabulate_rope(positions_BS, self.rope_frequencies(), self.dtype)
        return dict.fromkeys(set(self.config.layer_types), table)

    def rope_frequencies(self) -> Tensor:
        """RoPE's frequencies, scaled as the configuration says."""
        c = self.config
        frequencies = rope_frequencies(c.head_dim, c.rope_theta, 1.0, self.device)
        return frequencies if c.rope_scaling is None else scale_frequencies(frequencies, c.rope_scaling)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """RoPE's frequencies for longer texts, as RopeScaling describes."""
    lowered = frequencies / scaling.factor
    if scaling.kind == "linear":
        return lowered
    context = scaling.original_max_position_embeddings
    waves = context * frequencies / (2 * math.pi)  # that fit into the pretrained context
    low = scaling.low_freq_factor
    kept_share = ((waves - low) / (scaling.high_freq_factor - low)).clamp(0, 1)
    return (1 - kept_share) * lowered + kept_share * frequencies
