"""FusedLlama: the layers of a Llama on the kernels of `kernels/triton`, with the interface of FusedLayers.

`model/llama.py` is the definition. Here q, k and v are one matrix product, and so are gate and up. Where the model has a
drafter, canvas tokens have weights of their own: those of the model with the drafter's pairs added. That is a second copy
of the matrices, and one product instead of three.
Shapes: B requests, S new tokens of each, C canvas positions, N tokens of all, D model size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.engine.cache_table import CacheTable, TokenGroup, TreeTensors
from redraft.engine.fused_layers import SideStream, concat_weights
from redraft.engine.graph_capture import capture_graph
from redraft.engine.memory import free_bytes, weight_bytes
from redraft.kernels.triton import attention, mlp, norm, qkv_rope
from redraft.model.drafter import shift_canvases
from redraft.model.llama import Llama
from redraft.model.lora import DENOISE, Adapter
from redraft.model.quant.layers import PackedLinear

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = ("self_attn.o_proj",)
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = ("mlp.down_proj",)
PRODUCTS = (QKV, OUTPUT, GATE_UP, DOWN)  # of a layer


def can_fuse(model: Llama) -> bool:
    """Whether the kernels run this model: weights that are not packed, heads that they take, room for a drafter's copies."""
    has_packed = any(isinstance(module, PackedLinear) for module in model.modules())
    has_room = model.drafter is None or weight_bytes(model) < free_bytes(model.device) // 2
    return not has_packed and model.config.head_dim >= 16 and has_room


@dataclass(frozen=True)
class Product:
    """The weights of one matrix product: of clean tokens, and of canvas tokens, which may be the same."""

    weight: Tensor
    canvas_weight: Tensor
    bias: Tensor | None

    def run(self, x_ND: Tensor, is_canvas: bool) -> Tensor:
        """Multiplies tokens of one kind."""
        return F.linear(x_ND, self.canvas_weight if is_canvas else self.weight, self.bias)


@dataclass
class Progress:
    """How far a group of tokens has come: its residual stream and the norm of it, which the next product takes."""

    group: TokenGroup
    positions_N: Tensor
    x_ND: Tensor
    normed_ND: Tensor
    tree_N: Tensor | None  # which nodes of a tree of drafts attend to one another, as `attention.attend` takes it


class FusedLlama:
    """Runs a model's layers. Weights that are used together are moved into one tensor, which the model then shares."""

    def __init__(self, model: Llama, canvases: bool = True) -> None:
        """Without `canvases` a drafter's copies of the weights are not made: canvas tokens would have the model's own."""
        self.model = model
        drafter = model.drafter.adapter if model.drafter is not None and canvases else None
        self.products = [
            {names: join_product(model, index, names, drafter) for names in PRODUCTS} for index in range(len(model.layers))
        ]
        self.frequencies = model.rope_frequencies()
        self.side_stream = SideStream(model.device)

    def capture(self, body: Callable[[], None], graph_pool: object) -> Callable[[], None]:
        """Captures a body that runs these layers as a CUDA graph and returns its replay."""
        return capture_graph(body, self.model.device, graph_pool)

    def encode(self, ids_BS: Tensor, table: CacheTable, context: int) -> None:
        """Writes tokens into the KV caches, causally. The caller advances the caches' lengths.

        `context` is at least the number of cached tokens of every request: it decides how attention is split over programs.
        """
        clean = self._begin(TokenGroup(self.model.embed(ids_BS), table, True))
        for index in range(len(self.products)):
            self._run_layer(index, clean, context)

    def joint(
        self,
        clean_BS: Tensor,
        table: CacheTable,
        canvas_BSC: Tensor | None,
        canvas_table: CacheTable,
        context: int,
        tree: TreeTensors | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Encodes clean tokens and denoises a canvas behind each of them, as `Backbone.joint` does (see FusedLayers).

        With a tree, the clean tokens are its nodes: each attends to the nodes of its path, and so does its canvas. The
        canvases' tables then count all nodes as cached.

        The kernels of a small model leave most of a GPU idle, so the canvases follow on a second stream, a layer behind the
        clean tokens, whose keys and values they read. All that they make is made on that stream, so its memory is reused
        there only.
        """
        context += clean_BS.shape[1]  # the canvases' tables count them as cached
        clean = self._begin(TokenGroup(self.model.embed(clean_BS), table, True), tree)
        if canvas_BSC is None:
            for index in range(len(self.products)):
                self._run_layer(index, clean, context)
            return clean.normed_ND, None
        with self.side_stream:
            x_NCD = self.model.embed_canvas(canvas_BSC.flatten(0, 1), None, None)
            canvas = self._begin(TokenGroup(x_NCD, canvas_table, False), tree)
        for index in range(len(self.products)):
            self._run_layer(index, clean, context)
            with self.side_stream:
                self._run_layer(index, canvas, context)
        self.side_stream.wait()
        canvas_NCD = canvas.normed_ND.view_as(x_NCD)
        if self.model.drafter is not None:
            canvas_NCD = shift_canvases(canvas_NCD, clean.normed_ND)
        return clean.normed_ND, canvas_NCD.flatten(0, 1)

    def _begin(self, group: TokenGroup, tree: TreeTensors | None = None) -> Progress:
        """Tokens before the first layer."""
        x_ND = group.x_BSD.flatten(0, 1)
        first = self.model.layers[0].input_layernorm.weight
        positions_N = group.positions_N if tree is None else tree.positions(group)
        normed_ND = norm.rms_norm(x_ND, first, self.model.config.rms_norm_eps)
        return Progress(group, positions_N, x_ND, normed_ND, None if tree is None else tree.visible_N)

    def _run_layer(self, index: int, tokens: Progress, context: int) -> None:
        """Runs a layer on a group of tokens. Behind the last one, the norm is the model's last."""
        model = self.model
        layer, products = model.layers[index], self.products[index]
        is_canvas = not tokens.group.is_causal
        eps = model.config.rms_norm_eps
        is_last = index + 1 == len(model.layers)
        next_norm = model.norm.weight if is_last else model.layers[index + 1].input_layernorm.weight
        attended_ND = self._attention(index, products[QKV].run(tokens.normed_ND, is_canvas), tokens, context)
        added_ND = products[OUTPUT].run(attended_ND, is_canvas)
        x_ND, normed_ND = norm.add_and_norm(tokens.x_ND, added_ND, layer.post_attention_layernorm.weight, eps)
        inner_NF = mlp.silu_and_mul(products[GATE_UP].run(normed_ND, is_canvas))
        added_ND = products[DOWN].run(inner_NF, is_canvas)
        tokens.x_ND, tokens.normed_ND = norm.add_and_norm(x_ND, added_ND, next_norm, eps)

    def _attention(self, index: int, qkv_NX: Tensor, tokens: Progress, context: int) -> Tensor:
        config = self.model.config
        self_attn = self.model.layers[index].self_attn
        norms = None
        if self_attn.q_norm is not None and self_attn.k_norm is not None:
            norms = (self_attn.q_norm.weight, self_attn.k_norm.weight)
        heads = (config.num_attention_heads, config.num_key_value_heads)
        split = qkv_rope.split_llama_rope(qkv_NX, norms, tokens.positions_N, self.frequencies, *heads, config.rms_norm_eps)
        q, k, v = (part.unflatten(0, tokens.group.x_BSD.shape[:2]) for part in split)
        window = config.layer_window(index)
        past = tokens.group.table.past(index)
        is_causal = tokens.group.is_causal
        splits = attention.choose_num_splits(q, (min(context, window - 1) if window else context) + q.shape[1])
        attended = attention.attend(q, k, v, past, window=window, causal=is_causal, splits=splits, tree_N=tokens.tree_N)
        if is_causal:
            attention.write_kv(k, v, past)
        return attended.flatten(0, 1)


def join_product(model: Llama, index: int, names: Sequence[str], drafter: Adapter | None) -> Product:
    """The weights of some matrices of a layer as one product."""
    modules = [model.layers[index].get_submodule(name) for name in names]
    weight = concat_weights(modules)
    assert isinstance(weight, Tensor)  # `can_fuse` refuses others
    biases = [module.bias for module in modules]
    bias = torch.cat(biases) if biases[0] is not None else None  # all modules have one, or none
    if drafter is None:
        return Product(weight, weight, bias)
    parts = []
    for module, name in zip(modules, names, strict=True):
        pair = drafter.pair(DENOISE, f"layers.{index}.{name}")
        added = pair.delta() if pair is not None else 0.0
        parts.append((module.weight.float() + added).to(weight.dtype))
    return Product(weight, torch.cat(parts), bias)
