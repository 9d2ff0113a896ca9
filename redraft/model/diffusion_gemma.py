"""DiffusionGemma: one stack of weights, two ways to run it.

`encode` reads committed tokens causally and writes the cache; `denoise` reads a canvas bidirectionally and only looks at
the cache; `soft_embed` turns what one step believes into what the next step is told. Knows nothing of sampling or text.
Names of weights are those of the published checkpoints (`checkpoint.py` adds the prefix).
Shapes: B rows, S tokens, C canvas positions, T cached tokens, D model size, H heads, G key-value heads, K head size,
V vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from redraft.config import FULL, SLIDING, ModelConfig
from redraft.kernels import attend, rms_norm, rope_table, rotate, soft_embed, softcap_
from redraft.model import masks
from redraft.model.kv_cache import KVCache
from redraft.model.moe import Experts, Router, Routing

Rope = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """A norm with a weight; the weightless ones are plain calls of `rms_norm`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normed and weighted along the last axis."""
        return rms_norm(x, self.weight, self.eps)


class GatedMLP(nn.Module):
    """GELU(gate) times up, and down again."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape out as in."""
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class SelfConditioning(GatedMLP):
    """Adds what the last step believed to the canvas embeddings. The sum is normed, so a canvas is never raw embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden_size, config.intermediate_size)
        self.pre_norm, self.eps = RMSNorm(config.hidden_size, config.rms_norm_eps), config.rms_norm_eps

    def forward(self, x_BCD: Tensor, soft_BCD: Tensor | None) -> Tensor:
        """Without a belief (a canvas's first step) the MLP of zeros is zero, and only the norm remains."""
        if soft_BCD is not None:
            x_BCD = x_BCD + super().forward(self.pre_norm(soft_BCD))
        return rms_norm(x_BCD, None, self.eps)


class Attention(nn.Module):
    """Grouped-query attention over [cache ; own tokens]. Full layers have no v_proj: values are the raw keys, normed."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        groups, self.head_dim = config.layer_heads(layer)
        self.eps, size = config.rms_norm_eps, config.hidden_size
        self.q_proj = nn.Linear(size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(size, groups * self.head_dim, bias=False)
        sliding = config.layer_types[layer] == SLIDING
        self.v_proj = nn.Linear(size, groups * self.head_dim, bias=False) if sliding else None
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, size, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim, self.eps), RMSNorm(self.head_dim, self.eps)

    def forward(
        self, x_BSD: Tensor, rope: Rope, mask: Tensor | BlockMask | None, past: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's answer, and the keys and values of its own tokens, for whoever wants to keep them."""
        heads = (-1, self.head_dim)
        q_BSHK = rotate(self.q_norm(self.q_proj(x_BSD).unflatten(-1, heads)), *rope)
        raw_BSGK = self.k_proj(x_BSD).unflatten(-1, heads)
        k_BSGK = rotate(self.k_norm(raw_BSGK), *rope)
        v_BSGK = self.v_proj(x_BSD).unflatten(-1, heads) if self.v_proj is not None else raw_BSGK
        v_BSGK = rms_norm(v_BSGK, None, self.eps)
        keys, values = (torch.cat(pair, dim=1) for pair in zip(past, (k_BSGK, v_BSGK), strict=True))
        return self.o_proj(attend(q_BSHK, keys, values, mask)), k_BSGK, v_BSGK


class Layer(nn.Module):
    """Attention, then a dense MLP and the experts side by side. Ends with a learned scalar, one for each way of running."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, layer)
        self.mlp = GatedMLP(size, config.intermediate_size)
        self.router, self.experts = Router(config), Experts(config)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.pre_feedforward_layernorm_2 = RMSNorm(size, eps)
        self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = RMSNorm(size, eps), RMSNorm(size, eps)
        self.register_buffer("layer_scalar", torch.ones(1))
        self.register_buffer("encoder_layer_scalar", torch.ones(1))

    def forward(
        self, x_BSD: Tensor, rope: Rope, mask: Tensor | BlockMask | None, past: tuple[Tensor, Tensor], scalar: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Routing]:
        """The next residual stream, this layer's own keys and values, and who read what."""
        answer, k_BSGK, v_BSGK = self.self_attn(self.input_layernorm(x_BSD), rope, mask, past)
        x_BSD = x_BSD + self.post_attention_layernorm(answer)
        dense = self.post_feedforward_layernorm_1(self.mlp(self.pre_feedforward_layernorm(x_BSD)))
        x_ND = x_BSD.flatten(0, 1)
        routing = self.router(x_ND)  # the router reads the raw residual, the experts its norm
        read_ND = self.experts(self.pre_feedforward_layernorm_2(x_ND), routing.experts_NK, routing.weights_NK)
        sparse = self.post_feedforward_layernorm_2(read_ND.view_as(x_BSD))
        return (x_BSD + self.post_feedforward_layernorm(dense + sparse)) * scalar, k_BSGK, v_BSGK, routing


class DiffusionGemma(nn.Module):
    """The model. Generation needs `encode`, `denoise` and `soft_embed`; `learn` is both ways at once, for training."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # Left empty: drawing random weights only to overwrite them makes torch import its compiler (1.7 s) on "meta".
        table_VD = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(*table_VD.shape, _weight=table_VD)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_conditioning = SelfConditioning(config)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights, and of what flows between layers."""
        return self.embed_tokens.weight.dtype

    def new_cache(self, rows: int, capacity: int, rewind: int | None = None) -> KVCache:
        """An empty cache that fits this model."""
        return KVCache(self.config, rows, capacity, dtype=self.dtype, device=self.device, rewind=rewind)

    def encode(self, ids_BS: Tensor, cache: KVCache, counts: Sequence[int] | None = None) -> Tensor:
        """Reads tokens causally behind what the cache holds and appends them. Returns the last hidden states [B, S, D].

        `counts` says how many of the S tokens of each row are real; the rest is padding on the right and leaves no trace.
        """
        counts = counts if counts is not None else [ids_BS.shape[1]] * ids_BS.shape[0]
        positions = cache.next_positions(ids_BS.shape[1])
        ropes = self.rope_tables(positions)
        mask_of = {}
        for kind, layer in self._kinds.items():
            keys = torch.cat([cache.key_positions(layer), positions], dim=1)
            mask_of[kind] = masks.causal(positions, keys, self.config.layer_window(layer))
        x_BSD = self.embed(ids_BS)
        for index, layer in enumerate(self.layers):
            kind = self.config.layer_types[index]
            past = cache.view(index)
            x_BSD, k, v, _ = layer(x_BSD, ropes[kind], mask_of[kind], past, layer.encoder_layer_scalar)
            cache.append(index, k, v, counts)
        cache.advance(counts)
        return self.norm(x_BSD)

    def denoise(self, canvas_BC: Tensor, soft_BCD: Tensor | None, cache: KVCache) -> Tensor:
        """Logits [B, C, V] for every canvas position at once, float32, soft-capped. The cache is only read."""
        length = canvas_BC.shape[1]
        ropes = self.rope_tables(cache.next_positions(length))
        mask_of = dict.fromkeys((SLIDING, FULL))
        if not cache.has_equal_lengths:
            for kind, layer in self._kinds.items():
                window = self.config.layer_window(layer)
                mask_of[kind] = masks.canvas(cache.lengths_B, cache.key_positions(layer), length, window)
        x_BCD = self.self_conditioning(self.embed(canvas_BC), soft_BCD)
        for index, layer in enumerate(self.layers):
            kind = self.config.layer_types[index]
            x_BCD, _, _, _ = layer(x_BCD, ropes[kind], mask_of[kind], cache.view(index), layer.layer_scalar)
        return self.head(self.norm(x_BCD))

    def forward_train(
        self,
        noisy_BL: Tensor,
        clean_BL: Tensor,
        soft_BLD: Tensor | None,
        positions_BL: Tensor,
        mask_of: Mapping[str, Tensor | BlockMask],
    ) -> tuple[Tensor, Tensor, list[Routing]]:
        """Both ways of running at once, for training: final hidden states of noisy and of clean, without a cache.

        `mask_of` is `masks.training` by kind of layer. With it the noisy half gives what `denoise` gives behind a cache of
        the clean text before each block, and the clean half what `encode` gives.
        """
        length, ropes = noisy_BL.shape[1], self.rope_tables(positions_BL.repeat(1, 2))
        x_BSD = torch.cat([self.self_conditioning(self.embed(noisy_BL), soft_BLD), self.embed(clean_BL)], dim=1)
        routings = []
        for index, layer in enumerate(self.layers):
            kind = self.config.layer_types[index]
            nothing = x_BSD.new_empty(len(x_BSD), 0, *self.config.layer_heads(index))
            halves = (layer.layer_scalar.expand(length), layer.encoder_layer_scalar.expand(length))
            scalar = torch.cat(halves)[:, None]
            x_BSD, _, _, routing = layer(x_BSD, ropes[kind], mask_of[kind], (nothing, nothing), scalar)
            routings.append(routing)
        noisy_BLD, clean_BLD = self.norm(x_BSD).chunk(2, dim=1)
        return noisy_BLD, clean_BLD, routings

    def soft_embed(self, logits_BCV: Tensor) -> Tensor:
        """The expected embedding [B, C, D] under these logits: one step's belief, as the next step is told it."""
        # Rounded to the weights' precision first, as transformers does: in bf16 the rounding is part of the model.
        return soft_embed(logits_BCV.to(self.dtype), self.embed_tokens.weight) * self.embed_scale

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, scaled by sqrt(D) in the weights' precision."""
        return self.embed_tokens(ids) * self.embed_scale

    def head(self, hidden: Tensor) -> Tensor:
        """Logits from final hidden states; the weights are the embedding's."""
        return softcap_(F.linear(hidden, self.embed_tokens.weight), self.config.final_logit_softcapping)

    @property
    def embed_scale(self) -> Tensor:
        """What embeddings are multiplied with."""
        # sqrt(2816) is 53.066 in float32 and 53.0 in bf16; the product must see the rounded one.
        return torch.full((), self.config.hidden_size**0.5, dtype=self.dtype, device=self.device)

    @property
    def _kinds(self) -> dict[str, int]:
        """The kinds of layers, and a layer of each: what holds for one holds for all of its kind."""
        return {kind: layer for layer, kind in enumerate(self.config.layer_types)}

    def rope_tables(self, positions_BS: Tensor) -> dict[str, Rope]:
        """The turns of queries and keys at these positions, by kind of layer."""
        c = self.config
        full = rope_table(positions_BS, c.global_head_dim, c.global_rope_theta, c.global_rotary_fraction, self.dtype)
        return {SLIDING: rope_table(positions_BS, c.head_dim, c.rope_theta, 1.0, self.dtype), FULL: full}
