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

from redraft.engine.cache_table import CacheTable, TokenGroup
from redraft.engine.fused_layers import concat_weights
from redraft.engine.graph_capture import capture_graph
from redraft.engine.memory import free_bytes, weight_bytes
from redraft.kernels.triton import attention, mlp, norm, qkv_rope
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
    """The weights of one matrix product: of clean tokens, and of canvas tokens if they have their own."""

    weight: Tensor
    canvas_weight: Tensor | None
    bias: Tensor | None

    def run(self, x_ND: Tensor, clean: int) -> Tensor:
        """Multiplies tokens, of which the first `clean` ones are no canvas tokens."""
        if self.canvas_weight is None or clean == len(x_ND):
            return F.linear(x_ND, self.weight, self.bias)
        y_NO = x_ND.new_empty(len(x_ND), len(self.weight))
        for tokens, weight in ((slice(clean), self.weight), (slice(clean, None), self.canvas_weight)):
            if self.bias is None:
                torch.mm(x_ND[tokens], weight.t(), out=y_NO[tokens])
            else:
                torch.addmm(self.bias, x_ND[tokens], weight.t(), out=y_NO[tokens])
        return y_NO


class FusedLlama:
    """Runs a model's layers. Weights that are used together are moved into one tensor, which the model then shares."""

    def __init__(self, model: Llama) -> None:
        self.model = model
        drafter = model.drafter.adapter if model.drafter is not None else None
        self.products = [
            {names: join_product(model, index, names, drafter) for names in PRODUCTS} for index in range(len(model.layers))
        ]
        self.frequencies = model.rope_frequencies()

    def capture(self, body: Callable[[], None], graph_pool: object) -> Callable[[], None]:
        """Captures a body that runs these layers as a CUDA graph and returns its replay."""
        return capture_graph(body, self.model.device, graph_pool)

    def encode(self, ids_BS: Tensor, table: CacheTable, context: int) -> None:
        """Writes tokens into the KV caches, causally. The caller advances the caches' lengths.

        `context` is at least the number of cached tokens of every request: it decides how attention is split over programs.
        """
        self._run_layers([TokenGroup(self.model.embed(ids_BS), table, True)], context)

    def joint(
        self, clean_BS: Tensor, table: CacheTable, canvas_BSC: Tensor | None, canvas_table: CacheTable, context: int
    ) -> tuple[Tensor, Tensor | None]:
        """Encodes clean tokens and denoises a canvas behind each of them, as `Backbone.joint` does (see FusedLayers)."""
        clean_group = TokenGroup(self.model.embed(clean_BS), table, True)
        context += clean_BS.shape[1]  # the canvases' tables count them as cached
        if canvas_BSC is None:
            return self._run_layers([clean_group], context), None
        x_NCD = self.model.embed_canvas(canvas_BSC.flatten(0, 1), None, None)
        hidden_ND = self._run_layers([clean_group, TokenGroup(x_NCD, canvas_table, False)], context)
        return hidden_ND[: clean_group.count], hidden_ND[clean_group.count :]

    def _run_layers(self, groups: Sequence[TokenGroup], context: int) -> Tensor:
        """Final hidden states of all groups, normed. Causal groups come first."""
        model = self.model
        eps = model.config.rms_norm_eps
        positions_N = torch.cat([group.positions_N for group in groups])
        x_ND = torch.cat([group.x_BSD.flatten(0, 1) for group in groups])
        clean = sum(group.count for group in groups if group.is_causal)
        normed_ND = norm.rms_norm(x_ND, model.layers[0].input_layernorm.weight, eps)
        next_norms = [layer.input_layernorm.weight for layer in model.layers[1:]] + [model.norm.weight]
        for index, layer in enumerate(model.layers):
            products = self.products[index]
            attended_ND = self._attention(index, products[QKV].run(normed_ND, clean), positions_N, groups, context)
            added_ND = products[OUTPUT].run(attended_ND, clean)
            x_ND, normed_ND = norm.add_and_norm(x_ND, added_ND, layer.post_attention_layernorm.weight, eps)
            inner_NF = mlp.silu_and_mul(products[GATE_UP].run(normed_ND, clean))
            x_ND, normed_ND = norm.add_and_norm(x_ND, products[DOWN].run(inner_NF, clean), next_norms[index], eps)
        return normed_ND

    def _attention(
        self, index: int, qkv_NX: Tensor, positions_N: Tensor, groups: Sequence[TokenGroup], context: int
    ) -> Tensor:
        config = self.model.config
        self_attn = self.model.layers[index].self_attn
        norms = None
        if self_attn.q_norm is not None and self_attn.k_norm is not None:
            norms = (self_attn.q_norm.weight, self_attn.k_norm.weight)
        heads = (config.num_attention_heads, config.num_key_value_heads)
        qkv = qkv_rope.split_llama_rope(qkv_NX, norms, positions_N, self.frequencies, *heads, config.rms_norm_eps)
        window = config.layer_window(index)
        counts = [group.count for group in groups]
        outputs = []
        for group, *parts in zip(groups, *(part.split(counts) for part in qkv), strict=True):
            q, k, v = (part.unflatten(0, group.x_BSD.shape[:2]) for part in parts)
            past = group.table.past(index)
            splits = attention.choose_num_splits(q, (min(context, window - 1) if window else context) + q.shape[1])
            attended = attention.attend(q, k, v, past, window=window, causal=group.is_causal, splits=splits)
            outputs.append(attended.flatten(0, 1))
            if group.is_causal:
                attention.write_kv(k, v, past)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def join_product(model: Llama, index: int, names: Sequence[str], drafter: Adapter | None) -> Product:
    """The weights of some matrices of a layer as one product."""
    modules = [model.layers[index].get_submodule(name) for name in names]
    weight = concat_weights(modules)
    assert isinstance(weight, Tensor)  # `can_fuse` refuses others
    biases = [module.bias for module in modules]
    bias = torch.cat(biases) if biases[0] is not None else None  # all modules have one, or none
    if drafter is None:
        return Product(weight, None, bias)
    parts = []
    for module, name in zip(modules, names, strict=True):
        pair = drafter.pair(DENOISE, f"layers.{index}.{name}")
        added = pair.delta() if pair is not None else 0.0
        parts.append((module.weight.float() + added).to(weight.dtype))
    return Product(weight, torch.cat(parts), bias)
