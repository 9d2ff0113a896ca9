"""Backbone: what the architectures share. One stack of weights with two forwards.

`encode` runs committed tokens causally and writes the KV cache. `denoise` runs a canvas bidirectionally and only reads the
cache. `joint` does both in one forward, for checked and exact mode. `soft_embed` turns the logits of one denoising step into
the self-conditioning input of the next. A causal-only model (a standard Gemma 4 checkpoint, or a Llama) has `encode` and
`head` only; a page adapter gives it the others.

An architecture (`diffusion_gemma.py`, `llama.py`) adds its layers and says how tokens are embedded, how a layer runs, and
how hidden states become logits.
Shapes: B rows, S tokens, C canvas positions, J canvases, D model size, V vocabulary, N tokens of all rows, L tokens of a
training row.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from redraft.config import FULL, SLIDING, BackboneConfig, LlamaConfig
from redraft.kernels.fp8 import FP8_DTYPE
from redraft.model import masks
from redraft.model.drafter import Drafter, DraftHead, shift_canvases
from redraft.model.embedding import Embedding, PackedEmbedding
from redraft.model.kv_cache import ContextCache, KVCache
from redraft.model.layers import Mask, RMSNorm, Rope, Rounding
from redraft.model.lora import DENOISE, ENCODE, EVERYTHING, ActiveAdapters, Adapter, Span, adapters_of_rows
from redraft.model.moe import Routing
from redraft.model.page import PageAdapter

if TYPE_CHECKING:  # text-only use does not load it
    from redraft.model.vision import ImageSpan

Halves = Sequence[tuple[str, int]]  # which half the tokens of a forward run through: [("encode", 5), ("denoise", 8)]


class CausalOnlyError(ValueError):
    """The user asked a causal-only model for something that needs a denoiser."""


class Backbone(nn.Module, ABC):
    """A model. Generation calls `encode`, `denoise` and `soft_embed`; training calls `forward_train`.

    Of these, a causal-only model has `encode` alone; the others raise RuntimeError.
    """

    layers: Sequence[nn.Module]
    draft_head: DraftHead | None
    drafter: Drafter | None  # lets a causal-only model draft; given after loading
    page: PageAdapter | None  # lets a causal-only model denoise canvases; given after loading
    conversions: tuple[str, ...] = ()  # sentences: which weights loading rounded or dequantized

    def __init__(self, config: BackboneConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.kv_dtype: torch.dtype | None = None  # in which KV caches are stored; None: as the weights
        # Empty: random initialisation, overwritten at once, would make torch import its compiler (1.7 s) on "meta".
        table_VD = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens: Embedding | PackedEmbedding = Embedding(config.vocab_size, config.hidden_size, _weight=table_VD)
        # For the type checker, which takes a ModuleList for any modules.
        self.layers = cast(Sequence[nn.Module], nn.ModuleList(layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.drafter = None
        self.page = None

    # What an architecture says.

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings, as the first layer takes them."""

    @abstractmethod
    def embed_canvas(self, ids: Tensor, soft: Tensor | None, adapters: ActiveAdapters | None) -> Tensor:
        """Embeddings of canvas tokens. The last axis of `ids` is one canvas; `soft` is the self-conditioning input."""

    @abstractmethod
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
    ) -> tuple[Tensor, Tensor, Tensor, Routing | None]:
        """Returns the next residual stream, the keys and values of the new tokens, and the routing if there are experts."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Logits from final hidden states."""

    @abstractmethod
    def rope_tables(self, positions_BS: Tensor) -> dict[str, Rope]:
        """Cosines and sines for RoPE at these positions, by layer type."""

    # What they share.

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

    def store_cache_in_fp8(self) -> None:
        """KV caches take half of the memory of bf16 from now on."""
        self.kv_dtype = FP8_DTYPE

    def _rounding(self, count: int) -> Rounding | None:
        """How the keys and values of so many new tokens are rounded; None when the cache stores them as they are."""
        return Rounding(self.kv_dtype, count) if self.kv_dtype is not None else None

    @property
    def has_denoiser(self) -> bool:
        """Whether the model denoises canvases: a diffusion model does, and a causal-only one with a page adapter."""
        return not self.config.is_causal_only or self.page is not None

    @property
    def draft_part(self) -> Drafter | PageAdapter | None:
        """What the canvases of training go through: the drafter, else the page adapter."""
        return self.drafter or self.page

    def require_denoiser(self, what: str) -> None:
        """Raises CausalOnlyError, which speaks to the user, if the model has no denoiser. `what` names what needs one."""
        if not self.has_denoiser:
            self._refuse(what, "redraft adapt --page teaches it to denoise")

    def require_drafts(self, what: str) -> None:
        """Raises CausalOnlyError if the model cannot draft: it is causal-only and has no drafter."""
        if self.config.is_causal_only and self.drafter is None:
            self._refuse(what, "redraft adapt teaches it to draft")

    def _refuse(self, what: str, way_out: str) -> NoReturn:
        """Raises CausalOnlyError. Only a Llama can be adapted, so only its message names the way out."""
        way_out = f", and {way_out}" if isinstance(self.config, LlamaConfig) else ""
        kind = self.config.causal_kind
        raise CausalOnlyError(
            f"{what} needs a diffusion model; this one is causal-only ({kind}): it writes left to right{way_out}"
        )

    def _assert_denoiser(self, method: str) -> None:
        if not self.has_denoiser:
            raise RuntimeError(f"{method}() was called on a causal-only model; the caller must call require_denoiser first")

    @staticmethod
    def _active_adapters(
        of_rows: Sequence[Adapter | None], halves: Sequence[tuple[str, slice]], part: Drafter | PageAdapter | None
    ) -> ActiveAdapters | None:
        """The adapters of each row, and the pairs that all canvas tokens have. `halves`: see adapters_of_rows."""
        active = adapters_of_rows(of_rows, halves)
        if part is None:
            return active
        tree = part.adapter.tree(DENOISE)
        spans = tuple(Span(tree, EVERYTHING, tokens) for half, tokens in halves if half == DENOISE)
        return ActiveAdapters(spans if active is None else (*active.spans, *spans))

    def new_cache(self, rows: int, capacity: int, rewind: int | None = None, adapter: Adapter | None = None) -> KVCache:
        """Allocates an empty cache for this model. What is encoded into it or denoised after it goes through the adapter."""
        dtypes = {"dtype": self.dtype, "stored": self.cache_dtype}
        cache = KVCache(self.config, rows, capacity, **dtypes, device=self.device, rewind=rewind)
        cache.adapter = adapter
        return cache

    def encode(
        self,
        ids_BS: Tensor,
        cache: ContextCache,
        counts: Sequence[int] | None = None,
        images: Sequence[Sequence["ImageSpan"]] | None = None,
    ) -> Tensor:
        """Runs tokens causally after the cached context and appends them to it. Returns the final hidden states [B, S, D].

        `counts` is the number of real tokens of each row. The other tokens are padding on the right: they are not cached.
        `images` are those of each row: their features take the place of embeddings, and their tokens attend to one another
        in both directions. An image must be in one call as a whole.
        """
        counts = counts if counts is not None else [ids_BS.shape[1]] * ids_BS.shape[0]
        positions = cache.next_positions(ids_BS.shape[1])
        ropes = self.rope_tables(positions)
        mask_of = {}
        for kind, index in self._example_layers.items():
            keys = torch.cat([cache.key_positions(index), positions], dim=1)
            mask_of[kind] = masks.causal(positions, keys, self.config.layer_window(index))
        x_BSD = self.embed(ids_BS)
        if images is not None and any(images):
            x_BSD, images_BS = put_images(x_BSD, images)
            if self.config.has_joined_images:
                mask_of = {kind: masks.join_images(mask, images_BS) for kind, mask in mask_of.items()}
        rounding = self._rounding(ids_BS.shape[1])
        halves = [(ENCODE, ids_BS.shape[1])]
        adapters = adapters_of_rows(cache.adapters, [(ENCODE, EVERYTHING)])
        for index, kind in enumerate(self.config.layer_types):
            past = cache.view(index)
            of_layer = _of_layer(adapters, index)
            x_BSD, k, v, _ = self.run_layer(index, x_BSD, ropes[kind], mask_of[kind], past, halves, rounding, of_layer)
            cache.append(index, k, v, counts)
        cache.advance(counts)
        return self.norm(x_BSD)

    def denoise(self, canvas_BC: Tensor, soft_BCD: Tensor | None, cache: ContextCache) -> Tensor:
        """Runs a canvas bidirectionally after the cached context, which it only reads.

        Returns logits [B, C, V] for all canvas positions at once. With a page adapter they come from the positions before.
        """
        self._assert_denoiser("denoise")
        adapters = self._active_adapters(cache.adapters, [(DENOISE, EVERYTHING)], self.page)
        x_BCD = self.embed_canvas(canvas_BC, soft_BCD, adapters)
        before = 0
        if self.page is not None:
            before = 1
            x_BCD = torch.cat([self.page.begin_D.to(x_BCD.dtype).expand(len(x_BCD), 1, -1), x_BCD], dim=1)
        length = x_BCD.shape[1]
        ropes = self.rope_tables(cache.next_positions(length) - before)
        mask_of: dict[str, Tensor | None] = {SLIDING: None, FULL: None}
        if not cache.has_equal_lengths:
            for kind, index in self._example_layers.items():
                window = self.config.layer_window(index)
                mask_of[kind] = masks.canvas(cache.lengths_B, cache.key_positions(index), length, window)
        halves = [(DENOISE, length)]
        for index, kind in enumerate(self.config.layer_types):
            past = cache.view(index)
            of_layer = _of_layer(adapters, index)
            x_BCD, _, _, _ = self.run_layer(index, x_BCD, ropes[kind], mask_of[kind], past, halves, None, of_layer)
        return self.head(self.norm(x_BCD[:, : length - before]))

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
        of_canvases = self._active_adapters(cache.adapters, [(DENOISE, EVERYTHING)], self.drafter)
        canvases_BJCD = self.embed_canvas(canvas_BJC, None, of_canvases)
        x_BND = torch.cat([self.embed(clean_BS), canvases_BJCD.flatten(1, 2)], dim=1)
        rounding = self._rounding(clean_count)
        halves = [(ENCODE, clean_count), (DENOISE, canvas_BJC[0].numel())]
        by_half = [(ENCODE, slice(clean_count)), (DENOISE, slice(clean_count, None))]
        adapters = self._active_adapters(cache.adapters, by_half, self.drafter)
        for index, kind in enumerate(self.config.layer_types):
            of_layer = _of_layer(adapters, index)
            past = cache.view(index)
            x_BND, k, v, _ = self.run_layer(index, x_BND, ropes[kind], mask_of[kind], past, halves, rounding, of_layer)
            cache.append(index, k[:, :clean_count], v[:, :clean_count], counts)
        cache.advance(counts)
        hidden_BND = self.norm(x_BND)
        clean_BSD = hidden_BND[:, :clean_count]
        canvas_BJCD = hidden_BND[:, clean_count:].unflatten(1, canvas_BJC.shape[1:])
        return clean_BSD, canvas_BJCD if self.drafter is None else shift_canvases(canvas_BJCD, clean_BSD[:, after_J])

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
        if self.drafter is None:
            self._assert_denoiser("forward_train")
        length = noisy_BL.shape[1]
        ropes = self.rope_tables(positions_BL.repeat(1, 2))
        adapters = self._training_adapters(adapter, length)
        of_noisy = self._active_adapters([adapter], [(DENOISE, EVERYTHING)], self.draft_part)
        noisy_BLD = self.embed_canvas(noisy_BL, soft_BLD, of_noisy)
        x_BSD = torch.cat([noisy_BLD, self.embed(clean_BL)], dim=1)
        if adapter is not None and torch.is_grad_enabled():
            x_BSD.requires_grad_()  # else the first layer's packed weights would run as in inference, with rounded inputs
        halves = [(DENOISE, length), (ENCODE, length)]
        routings = []
        for index, kind in enumerate(self.config.layer_types):
            empty_past = x_BSD.new_empty(len(x_BSD), 0, *self.config.layer_heads(index))
            past = (empty_past, empty_past)
            arguments = (index, x_BSD, ropes[kind], mask_of[kind], past, halves, None, _of_layer(adapters, index))
            if recomputes:
                x_BSD, _, _, routing = checkpoint(self.run_layer, *arguments, use_reentrant=False)
            else:
                x_BSD, _, _, routing = self.run_layer(*arguments)
            if routing is not None:
                routings.append(routing)
        noisy_BLD, clean_BLD = self.norm(x_BSD).chunk(2, dim=1)
        return noisy_BLD, clean_BLD, routings

    def _training_adapters(self, adapter: Adapter | None, length: int) -> ActiveAdapters | None:
        """The adapters of a training forward over [noisy | clean], of so many tokens each."""
        halves = [(DENOISE, slice(length)), (ENCODE, slice(length, None))]
        if adapter is not None and adapter.is_tied and self.draft_part is None:
            halves = [(DENOISE, EVERYTHING)]
        return self._active_adapters([adapter], halves, self.draft_part)

    def soft_embed(self, logits_BCV: Tensor) -> Tensor:
        """The expected embedding [B, C, D] under softmax(logits): the self-conditioning input of the next step."""
        self._assert_denoiser("soft_embed")
        # Logits are rounded to the weights' precision first, as in transformers: in bf16 the rounding is part of the model.
        return self.embed_tokens.expect(logits_BCV.to(self.dtype))

    def draft_logits(self, hidden_ND: Tensor, previous_N: Tensor) -> Tensor:
        """Logits of draft positions, given the token before each. Without a draft head, the token before does not matter."""
        head = self.draft_head if self.drafter is None else self.drafter.head
        if head is not None:
            hidden_ND = head(hidden_ND, self.embed(previous_N))
        return self.head(hidden_ND)

    @property
    def _example_layers(self) -> dict[str, int]:
        """One layer index for each layer type. All layers of a type share masks and RoPE tables."""
        return {kind: layer for layer, kind in enumerate(self.config.layer_types)}


def put_images(x_BSD: Tensor, images: Sequence[Sequence["ImageSpan"]]) -> tuple[Tensor, Tensor]:
    """Puts the features of images in the place of embeddings. Returns them, and the numbers that `join_images` takes."""
    x_BSD = x_BSD.clone()
    images_BS = torch.full(x_BSD.shape[:2], -1, device=x_BSD.device)
    for row, spans in enumerate(images):
        for number, span in enumerate(spans):
            if not 0 <= span.start < span.end <= x_BSD.shape[1]:
                raise ValueError(f"an image at {span.start} to {span.end} is not inside of {x_BSD.shape[1]} tokens")
            x_BSD[row, span.start : span.end] = span.features_ME.to(x_BSD)
            images_BS[row, span.start : span.end] = number
    return x_BSD, images_BS


def _of_layer(adapters: ActiveAdapters | None, layer: int) -> ActiveAdapters | None:
    """The adapters of a forward, seen from one of its layers."""
    return adapters and adapters.at("layers").at(str(layer))
