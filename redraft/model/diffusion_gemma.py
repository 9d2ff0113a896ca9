"""DiffusionGemma: one stack of weights with two forwards.

`encode` runs committed tokens causally and writes the KV cache. `denoise` runs a canvas bidirectionally and only reads the
cache. `joint` does both in one forward, for checked and exact mode. `soft_embed` turns the logits of one denoising step into
the self-conditioning input of the next. Weights have the names of the published checkpoints; `checkpoint/names.py` adds the
prefix. A causal-only model (a standard Gemma 4 checkpoint, which has the same backbone) has `encode` and `head` only.
Shapes: B rows, S tokens, C canvas positions, J canvases, T cached tokens, D model size, H heads, G key-value heads, K head
size, V vocabulary, N tokens of all rows, L tokens of a training row.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from redraft.config import FULL, SLIDING, ModelConfig
from redraft.kernels import apply_rope, attend, rms_norm, rope_table, softcap_
from redraft.model import masks
from redraft.model.embedding import Embedding, PackedEmbedding
from redraft.model.kv_cache import ContextCache, KVCache, to_stored
from redraft.model.lora import DENOISE, ENCODE, EVERYTHING, ActiveAdapters, Adapter, adapters_of_rows
from redraft.model.moe import Experts, Router, Routing

Rope = tuple[Tensor, Tensor]  # cosines and sines
Mask: TypeAlias = Tensor | BlockMask | None


class CausalOnlyError(ValueError):
    """The user asked a causal-only model for something that needs a denoiser."""


class RMSNorm(nn.Module):
    """RMS norm with a weight. Norms without a weight call `rms_norm` directly."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norms along the last axis and multiplies by the weight."""
        return rms_norm(x, self.weight, self.eps)


def project(linear: nn.Module, x_BSI: Tensor, adapters: ActiveAdapters | None, name: str) -> Tensor:
    """The output of a linear layer, with what the adapters add to it. `name` is the layer's name in its module."""
    y_BSO = linear(x_BSI)
    return y_BSO if adapters is None else adapters.add(name, x_BSI, y_BSO)


class GatedMLP(nn.Module):
    """down(GELU(gate(x)) * up(x))."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor, adapters: ActiveAdapters | None = None) -> Tensor:
        """Returns a tensor of the same shape as x."""
        gate = project(self.gate_proj, x, adapters, "gate_proj")
        inner = F.gelu(gate, approximate="tanh") * project(self.up_proj, x, adapters, "up_proj")
        return project(self.down_proj, inner, adapters, "down_proj")


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


class DraftHead(nn.Module):
    """Adds to a draft position's hidden state what the token before it says: h + outer(GELU(inner([h ; embedding]))).

    The positions of a canvas are denoised at once and do not know one another's tokens, so neighbours may contradict each
    other. Drafts are therefore sampled from left to right, and this head is all that runs again for each of them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.eps = config.rms_norm_eps
        self.inner = nn.Linear(2 * size, config.draft_head_size, bias=False)
        self.outer = nn.Linear(config.draft_head_size, size, bias=False)

    def forward(self, hidden_ND: Tensor, previous_ND: Tensor) -> Tensor:
        """`previous_ND` are the embeddings of the tokens before."""
        both = torch.cat([hidden_ND, rms_norm(previous_ND, None, self.eps)], dim=-1)
        return hidden_ND + self.outer(F.gelu(self.inner(both), approximate="tanh"))


class Rounding(NamedTuple):
    """Rounds the keys and values of the first `tokens` new tokens as the cache will.

    A token then attends to the same numbers whether they come from the cache or from its own forward, so the result does
    not depend on how a prompt is divided into chunks.
    """

    dtype: torch.dtype
    tokens: int

    def apply(self, x_BSGK: Tensor) -> Tensor:
        """Keys or values, the first ones rounded."""
        rounded = to_stored(x_BSGK[:, : self.tokens], self.dtype).to(x_BSGK.dtype)
        return torch.cat([rounded, x_BSGK[:, self.tokens :]], dim=1)


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


class DiffusionGemma(nn.Module):
    """The model. Generation calls `encode`, `denoise` and `soft_embed`; training calls `forward_train`.

    Of these, a causal-only model has `encode` alone; the others raise RuntimeError.
    """

    self_conditioning: SelfConditioning  # a causal-only model does not have it
    conversions: tuple[str, ...] = ()  # sentences: which weights loading rounded or dequantized

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.kv_dtype: torch.dtype | None = None  # in which KV caches are stored; None: as the weights
        # Empty: random initialisation, overwritten at once, would make torch import its compiler (1.7 s) on "meta".
        table_VD = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens: Embedding | PackedEmbedding = Embedding(config.vocab_size, config.hidden_size, _weight=table_VD)
        layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.layers = cast(Sequence[Layer], layers)  # for the type checker, which takes a ModuleList for any modules
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.is_causal_only:
            self.self_conditioning = SelfConditioning(config)
        self.draft_head = DraftHead(config) if config.draft_head_size else None

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights and of the residual stream."""
        return self.embed_tokens.dtype

    @property
    def cache_dtype(self) -> torch.dtype:
        """The precision in which KV caches are stored."""
        return self.kv_dtype or self.dtype

    def _rounding(self, count: int) -> Rounding | None:
        """How the keys and values of so many new tokens are rounded; None when the cache stores them as they are."""
        return Rounding(self.kv_dtype, count) if self.kv_dtype is not None else None

    def require_denoiser(self, what: str) -> None:
        """Raises CausalOnlyError, which speaks to the user, if the model has no denoiser. `what` names what needs one."""
        if self.config.is_causal_only:
            raise CausalOnlyError(
                f"{what} needs a diffusion model; this one is causal-only (a standard Gemma 4): it writes left to right"
            )

    def _assert_denoiser(self, method: str) -> None:
        if self.config.is_causal_only:
            raise RuntimeError(f"{method}() was called on a causal-only model; the caller must call require_denoiser first")

    def new_cache(self, rows: int, capacity: int, rewind: int | None = None, adapter: Adapter | None = None) -> KVCache:
        """Allocates an empty cache for this model. What is encoded into it or denoised after it goes through the adapter."""
        dtypes = {"dtype": self.dtype, "stored": self.cache_dtype}
        cache = KVCache(self.config, rows, capacity, **dtypes, device=self.device, rewind=rewind)
        cache.adapter = adapter
        return cache

    def encode(self, ids_BS: Tensor, cache: ContextCache, counts: Sequence[int] | None = None) -> Tensor:
        """Runs tokens causally after the cached context and appends them to it. Returns the final hidden states [B, S, D].

        `counts` is the number of real tokens of each row. The other tokens are padding on the right: they are not cached.
        """
        counts = counts if counts is not None else [ids_BS.shape[1]] * ids_BS.shape[0]
        positions = cache.next_positions(ids_BS.shape[1])
        ropes = self.rope_tables(positions)
        mask_of = {}
        for kind, index in self._example_layers.items():
            keys = torch.cat([cache.key_positions(index), positions], dim=1)
            mask_of[kind] = masks.causal(positions, keys, self.config.layer_window(index))
        x_BSD = self.embed(ids_BS)
        rounding = self._rounding(ids_BS.shape[1])
        adapters = adapters_of_rows(cache.adapters, [(ENCODE, EVERYTHING)])
        for index, layer in enumerate(self.layers):
            kind = self.config.layer_types[index]
            past = cache.view(index)
            of_layer = _of_layer(adapters, index)
            scalar = layer.encoder_layer_scalar
            x_BSD, k, v, _ = layer(x_BSD, ropes[kind], mask_of[kind], past, scalar, rounding, of_layer)
            cache.append(index, k, v, counts)
        cache.advance(counts)
        return self.norm(x_BSD)

    def denoise(self, canvas_BC: Tensor, soft_BCD: Tensor | None, cache: ContextCache) -> Tensor:
        """Runs a canvas bidirectionally after the cached context, which it only reads.

        Returns logits [B, C, V] for all canvas positions at once, float32 and soft-capped.
        """
        self._assert_denoiser("denoise")
        length = canvas_BC.shape[1]
        ropes = self.rope_tables(cache.next_positions(length))
        mask_of: dict[str, Tensor | None] = {SLIDING: None, FULL: None}
        if not cache.has_equal_lengths:
            for kind, index in self._example_layers.items():
                window = self.config.layer_window(index)
                mask_of[kind] = masks.canvas(cache.lengths_B, cache.key_positions(index), length, window)
        adapters = adapters_of_rows(cache.adapters, [(DENOISE, EVERYTHING)])
        of_conditioning = adapters and adapters.at("self_conditioning")
        x_BCD = self.self_conditioning(self.embed(canvas_BC), soft_BCD, of_conditioning)
        for index, layer in enumerate(self.layers):
            kind = self.config.layer_types[index]
            past = cache.view(index)
            of_layer = _of_layer(adapters, index)
            x_BCD, _, _, _ = layer(x_BCD, ropes[kind], mask_of[kind], past, layer.layer_scalar, None, of_layer)
        return self.head(self.norm(x_BCD))

    def joint(
        self,
        clean_BS: Tensor,
        canvas_BJC: Tensor,
        after: Sequence[int],
        cache: ContextCache,
        counts: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Encodes clean tokens and denoises canvases behind some of them, in one forward.

        Canvas j of a row stands behind clean token after[j]. Equal to `encode` of the tokens up to that one and `denoise`
        after it, for every j. The clean tokens are appended to the cache. Returns hidden states [B, S, D] and [B, J, C, D].
        """
        rows, clean_count = clean_BS.shape
        length = canvas_BJC.shape[2]
        counts = counts if counts is not None else [clean_count] * rows
        after_J = torch.tensor(after, dtype=torch.long, device=self.device)
        starts_B = cache.lengths_B
        offsets_JC = after_J[:, None] + 1 + torch.arange(length, device=self.device)
        offsets_N = torch.cat([torch.arange(clean_count, device=self.device), offsets_JC.flatten()])
        ropes = self.rope_tables(starts_B[:, None] + offsets_N)
        mask_of = {}
        for kind, index in self._example_layers.items():
            keys = cache.key_positions(index)
            mask_of[kind] = masks.joint(starts_B, keys, clean_count, after_J, length, self.config.layer_window(index))
        canvases_BND = self.self_conditioning(self.embed(canvas_BJC.flatten(1)))
        x_BND = torch.cat([self.embed(clean_BS), canvases_BND], dim=1)
        rounding = self._rounding(clean_count)
        halves = [(ENCODE, slice(clean_count)), (DENOISE, slice(clean_count, None))]
        adapters = adapters_of_rows(cache.adapters, halves)
        for index, layer in enumerate(self.layers):
            kind = self.config.layer_types[index]
            of_layer = _of_layer(adapters, index)
            scalars = [layer.encoder_layer_scalar.expand(clean_count), layer.layer_scalar.expand(canvas_BJC[0].numel())]
            scalar_N1 = torch.cat(scalars)[:, None]
            past = cache.view(index)
            x_BND, k, v, _ = layer(x_BND, ropes[kind], mask_of[kind], past, scalar_N1, rounding, of_layer)
            cache.append(index, k[:, :clean_count], v[:, :clean_count], counts)
        cache.advance(counts)
        hidden_BND = self.norm(x_BND)
        return hidden_BND[:, :clean_count], hidden_BND[:, clean_count:].unflatten(1, canvas_BJC.shape[1:])

    def forward_train(
        self,
        noisy_BL: Tensor,
        clean_BL: Tensor,
        soft_BLD: Tensor | None,
        positions_BL: Tensor,
        mask_of: Mapping[str, Tensor | BlockMask],
        *,
        adapter: Adapter | None = None,
        recomputes: bool = False,
    ) -> tuple[Tensor, Tensor, list[Routing]]:
        """Denoises and encodes in one forward without a cache. Returns hidden states of noisy and clean, and the routings.

        `mask_of` is `masks.training` by layer type. With it the noisy half equals `denoise` after a cache of the clean text
        before each canvas, and the clean half equals `encode`. `recomputes` saves memory: the backward pass computes each
        layer's activations again (gradient checkpointing).
        """
        self._assert_denoiser("forward_train")
        length = noisy_BL.shape[1]
        ropes = self.rope_tables(positions_BL.repeat(1, 2))
        adapters = _training_adapters(adapter, length)
        of_noisy = adapters_of_rows([adapter], [(DENOISE, EVERYTHING)])
        of_conditioning = of_noisy and of_noisy.at("self_conditioning")
        noisy_BLD = self.self_conditioning(self.embed(noisy_BL), soft_BLD, of_conditioning)
        x_BSD = torch.cat([noisy_BLD, self.embed(clean_BL)], dim=1)
        if adapter is not None and torch.is_grad_enabled():
            x_BSD.requires_grad_()  # else the first layer's packed weights would run as in inference, with rounded inputs
        routings = []
        for index, layer in enumerate(self.layers):
            kind = self.config.layer_types[index]
            empty_past = x_BSD.new_empty(len(x_BSD), 0, *self.config.layer_heads(index))
            halves = (layer.layer_scalar.expand(length), layer.encoder_layer_scalar.expand(length))
            scalar = torch.cat(halves)[:, None]
            past = (empty_past, empty_past)
            arguments = (x_BSD, ropes[kind], mask_of[kind], past, scalar, None, _of_layer(adapters, index))
            if recomputes:
                x_BSD, _, _, routing = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                x_BSD, _, _, routing = layer(*arguments)
            routings.append(routing)
        noisy_BLD, clean_BLD = self.norm(x_BSD).chunk(2, dim=1)
        return noisy_BLD, clean_BLD, routings

    def soft_embed(self, logits_BCV: Tensor) -> Tensor:
        """The expected embedding [B, C, D] under softmax(logits): the self-conditioning input of the next step."""
        self._assert_denoiser("soft_embed")
        # Logits are rounded to the weights' precision first, as in transformers: in bf16 the rounding is part of the model.
        return self.embed_tokens.expect(logits_BCV.to(self.dtype)) * self.embed_scale

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, scaled by sqrt(D) in the weights' precision."""
        return self.embed_tokens(ids) * self.embed_scale

    def head(self, hidden: Tensor) -> Tensor:
        """Logits from final hidden states. The weights are tied to the embedding."""
        return softcap_(self.embed_tokens.project(hidden), self.config.final_logit_softcapping)

    def draft_logits(self, hidden_ND: Tensor, previous_N: Tensor) -> Tensor:
        """Logits of draft positions, given the token before each. Without a draft head, the token before does not matter."""
        if self.draft_head is not None:
            hidden_ND = self.draft_head(hidden_ND, self.embed(previous_N))
        return self.head(hidden_ND)

    @property
    def embed_scale(self) -> Tensor:
        """The factor of all embeddings: sqrt(D), rounded to the weights' precision."""
        # sqrt(2816) is 53.066 in float32 and 53.0 in bf16; the product must use the rounded value, as in transformers.
        return torch.full((), self.config.hidden_size**0.5, dtype=self.dtype, device=self.device)

    @property
    def _example_layers(self) -> dict[str, int]:
        """One layer index for each layer type. All layers of a type share masks and RoPE tables."""
        return {kind: layer for layer, kind in enumerate(self.config.layer_types)}

    def rope_tables(self, positions_BS: Tensor) -> dict[str, Rope]:
        """Cosines and sines for RoPE at these positions, by layer type."""
        c = self.config
        return {
            SLIDING: rope_table(positions_BS, c.head_dim, c.rope_theta, 1.0, self.dtype),
            FULL: rope_table(positions_BS, c.global_head_dim, c.global_rope_theta, c.global_rotary_fraction, self.dtype),
        }


def _of_layer(adapters: ActiveAdapters | None, layer: int) -> ActiveAdapters | None:
    """The adapters of a forward, seen from one of its layers."""
    return adapters and adapters.at("layers").at(str(layer))


def _training_adapters(adapter: Adapter | None, length: int) -> ActiveAdapters | None:
    """The adapter of a training forward over [noisy | clean], of so many tokens each."""
    if adapter is None:
        return None
    if adapter.is_tied:
        return adapters_of_rows([adapter], [(DENOISE, EVERYTHING)])
    return adapters_of_rows([adapter], [(DENOISE, slice(length)), (ENCODE, slice(length, None))])
