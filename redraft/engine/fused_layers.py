"""FusedLayers: the model's layers on the kernels of `kernels/triton`. Fewer passes over memory, the same results.

`model/diffusion_gemma.py` is the definition. Here q, k and v are one matrix product, and so are gate and up, unless a
checkpoint has them in different formats. The work between two products is one kernel. Attention reads KV caches by address,
so the caches of a batch are not copied together.

Shapes: B requests, S new tokens of each, N = B * S, D model size, L layers, K experts per token, F inner size of the MLP.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.config import SLIDING
from redraft.engine.cache_table import CacheTable, TokenGroup
from redraft.engine.graph_capture import capture_graph
from redraft.engine.memory import has_memory_limit
from redraft.engine.offload import borrow_weights, expert_weights, find_stream
from redraft.kernels import rope_frequencies
from redraft.kernels.backend import select_card
from redraft.kernels.fp8 import FP8_DTYPE, Fp8Tensor
from redraft.kernels.linear_fp8 import linear_fp8, multiply_fp8, packs_activations
from redraft.kernels.triton import attention, attention_wide, mlp, norm, qkv_rope, routing
from redraft.kernels.triton.experts import gated_experts
from redraft.model.diffusion_gemma import DiffusionGemma, Layer
from redraft.model.quant.layers import PackedLinear

JoinedRows: TypeAlias = Tensor | Fp8Tensor | list[Tensor | Fp8Tensor]  # the rows of several weights; a list: apart


class FusedLayers:
    """Runs a model's layers. Weights that are used together are moved into one tensor, which the model then shares."""

    def __init__(self, model: DiffusionGemma) -> None:
        config = model.config
        device = model.device
        self.model = model
        self.side_stream = SideStream(device)
        self.expert_stream = find_stream(model)
        self.qkv = []
        self.gate_up = []
        for layer in model.layers:
            projections = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
            self.qkv.append(concat_weights([linear for linear in projections if linear is not None]))
            self.gate_up.append(concat_weights([layer.mlp.gate_proj, layer.mlp.up_proj]))
        # A plan for a limit does not count them.
        self.max_long_weights = 0 if has_memory_limit(device) else attention_wide.MAX_LONG_WEIGHTS
        # By layer: whether the kernel before a product packs its tokens. Each product has the format of its own weight.
        can_pack = device.type == "cuda" and model.dtype == torch.bfloat16 and packs_activations(device)
        self.packs_qkv_inputs = [can_pack and isinstance(weight, Fp8Tensor) for weight in self.qkv]
        self.packs_mlp_inputs = [can_pack and isinstance(weight, Fp8Tensor) for weight in self.gate_up]
        self.packs_expert_inputs = [can_pack and has_fp8_experts(layer) for layer in model.layers]
        sliding = rope_frequencies(config.head_dim, config.rope_theta, 1.0, device)
        full = rope_frequencies(config.global_head_dim, config.global_rope_theta, config.global_rotary_fraction, device)
        self.frequencies = [sliding if kind == SLIDING else full for kind in config.layer_types]

    def capture(self, body: Callable[[], None], graph_pool: object) -> Callable[[], None]:
        """Captures a body that runs these layers as a CUDA graph and returns its replay."""
        device = self.model.device
        if self.expert_stream is not None:
            return self.expert_stream.capture(body, device, graph_pool)
        return capture_graph(body, device, graph_pool)

    def encode(self, ids_BS: Tensor, table: CacheTable, context: int) -> None:
        """Writes tokens into the KV caches, causally. The caller advances the caches' lengths.

        `context` is at least the number of cached tokens of every request: it decides how attention is split over programs.
        """
        self._run_layers([TokenGroup(self.model.embed(ids_BS), table, True)], context)

    def denoise(
        self,
        canvas_BC: Tensor,
        soft_BCD: Tensor | None,
        table: CacheTable,
        context: int,
        encode_buffers: tuple[Tensor, CacheTable] | None = None,
    ) -> Tensor:
        """Final hidden states [N, D] of canvases, normed. The caller applies the head.

        `encode_buffers`, tokens [P, S] and their table, are encoded in the same pass, as `encode` would before it. A canvas
        may come right after some of these tokens; its own table counts them as cached already.
        """
        groups = []
        if encode_buffers is not None:
            ids_PS, encode_table = encode_buffers
            groups.append(TokenGroup(self.model.embed(ids_PS), encode_table, True))
        x_BCD = self.model.self_conditioning(self.model.embed(canvas_BC), soft_BCD)
        canvas_group = TokenGroup(x_BCD, table, False)
        return self._run_layers([*groups, canvas_group], context)[-canvas_group.count :]

    def joint(
        self, clean_BS: Tensor, table: CacheTable, canvas_BSC: Tensor | None, canvas_table: CacheTable, context: int
    ) -> tuple[Tensor, Tensor | None]:
        """Encodes clean tokens and denoises a canvas behind each of them, as `DiffusionGemma.joint` does.

        The clean tokens are written to the KV caches. `canvas_table` has a row for each canvas, which counts the clean
        tokens before it as cached. Returns final hidden states, normed: [N, D] of both; None without canvases.
        """
        clean_group = TokenGroup(self.model.embed(clean_BS), table, True)
        context += clean_BS.shape[1]  # the canvases' tables count them as cached
        if canvas_BSC is None:
            return self._run_layers([clean_group], context), None
        x_NCD = self.model.self_conditioning(self.model.embed(canvas_BSC.flatten(0, 1)))
        hidden_ND = self._run_layers([clean_group, TokenGroup(x_NCD, canvas_table, False)], context)
        return hidden_ND[: clean_group.count], hidden_ND[clean_group.count :]

    def _run_layers(self, groups: Sequence[TokenGroup], context: int) -> Tensor:
        """Final hidden states of all groups. Causal groups come first."""
        model = self.model
        eps = model.config.rms_norm_eps
        positions_N = torch.cat([group.positions_N for group in groups])
        x_ND = torch.cat([group.x_BSD.flatten(0, 1) for group in groups])
        causal_count = sum(group.count for group in groups if group.is_causal)
        normed_ND = norm.rms_norm(x_ND, model.layers[0].input_layernorm.weight, eps)
        next_norms = [layer.input_layernorm.weight for layer in model.layers[1:]] + [model.norm.weight]
        for index, layer in enumerate(model.layers):
            attended_ND = self._attention(index, normed_ND, positions_N, groups, context)
            packs = (self.packs_mlp_inputs[index], self.packs_expert_inputs[index])
            x_ND, dense_ND, sparse_ND, router_ND = norm.add_attention_and_norm(
                x_ND, attended_ND, layer.post_attention_layernorm.weight, layer.pre_feedforward_layernorm.weight,
                layer.pre_feedforward_layernorm_2.weight, layer.router.scale, eps, *packs,
            )  # fmt: skip
            with self.side_stream:  # names are kept until `wait`, see SideStream
                gate_up_NF = linear(dense_ND, self.gate_up[index])
                inner_NF = mlp.gelu_and_mul(gate_up_NF)
                mlp_ND = linear(inner_NF, weight_of(layer.mlp.down_proj))
            experts_NKD = self._experts(layer, sparse_ND, router_ND)
            self.side_stream.wait()
            norm_weights = (
                layer.post_feedforward_layernorm_1.weight,
                layer.post_feedforward_layernorm_2.weight,
                layer.post_feedforward_layernorm.weight,
            )
            packs_next = (*self.packs_qkv_inputs, False)[index + 1]  # the last norm is the head's
            x_ND, normed_ND = norm.add_mlp_and_norm(
                x_ND, mlp_ND, experts_NKD, norm_weights, layer.scalars, causal_count, next_norms[index], eps, packs_next
            )
        return normed_ND

    def _attention(
        self, index: int, normed_ND: Tensor | Fp8Tensor, positions_N: Tensor, groups: Sequence[TokenGroup], context: int
    ) -> Tensor:
        config = self.model.config
        self_attn = self.model.layers[index].self_attn
        kv_heads, _ = config.layer_heads(index)
        qkv = qkv_rope.split_qkv_rope(
            linear(normed_ND, self.qkv[index]), self_attn.q_norm.weight, self_attn.k_norm.weight, positions_N,
            self.frequencies[index], config.num_attention_heads, kv_heads, config.rms_norm_eps,
        )  # fmt: skip
        window = config.layer_window(index)
        counts = [group.count for group in groups]
        outputs = []
        for group, *parts in zip(groups, *(part.split(counts) for part in qkv), strict=True):
            q, k, v = (part.unflatten(0, group.x_BSD.shape[:2]) for part in parts)
            key_count = (min(context, window - 1) if window else context) + q.shape[1]
            past = group.table.past(index)
            if group.is_causal and self.model.cache_dtype == FP8_DTYPE:
                attention.round_kv_(k, v)
            if attention_wide.is_wide(q, kv_heads, past, window, context, select_card(q.device)):
                attended = attention_wide.attend_wide(
                    q, k, v, past, causal=group.is_causal, context=context, max_long_weights=self.max_long_weights
                )
            else:
                splits = attention.choose_num_splits(q, key_count)
                attended = attention.attend(q, k, v, past, window=window, causal=group.is_causal, splits=splits)
            outputs.append(attended.flatten(0, 1))
            if group.is_causal:
                attention.write_kv(k, v, past)
        return linear(torch.cat(outputs) if len(outputs) > 1 else outputs[0], weight_of(self_attn.o_proj))

    def _experts(self, layer: Layer, sparse_ND: Tensor | Fp8Tensor, router_ND: Tensor) -> Tensor:
        router = layer.router
        chosen_NK, weights_NK = routing.route(router_ND, router.proj.weight, router.per_expert_scale, router.top_k)
        with borrow_weights(layer.experts) as weights:
            return gated_experts(sparse_ND, chosen_NK, weights_NK, *weights)


class SideStream:
    """A second CUDA stream: work inside the `with` block overlaps the work after it, until `wait`.

    The experts are bound by memory and the dense MLP is not, so they run well together. All tensors that the block reads
    and makes must stay referenced until `wait`, or the allocator may give their memory to others too early.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._context: Any = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            self._context = torch.cuda.stream(self.stream)
            self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self._context.__exit__(*error)

    def wait(self) -> None:
        """The current stream waits for the work of the block."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


def has_fp8_experts(layer: Layer) -> bool:
    """Whether the experts' first product has an fp8 weight."""
    return isinstance(expert_weights(layer.experts)[0], Fp8Tensor)


def linear(x_ND: Tensor | Fp8Tensor, weight: JoinedRows) -> Tensor:
    """The matrix product with a weight; both may be packed in 8 bits."""
    if isinstance(weight, list):
        return torch.cat([linear(x_ND, rows) for rows in weight], dim=-1)
    if isinstance(x_ND, Fp8Tensor):
        return multiply_fp8(x_ND, weight)
    return linear_fp8(x_ND, weight) if isinstance(weight, Fp8Tensor) else F.linear(x_ND, weight)


def weight_of(module: nn.Module) -> Tensor | Fp8Tensor:
    """The weight of a linear module, packed or not."""
    return module.packed("weight") if isinstance(module, PackedLinear) else module.weight


def has_joined_rows(weights: Sequence[Tensor]) -> bool:
    """Whether matrices are the rows of one tensor already, one behind the other."""
    address = weights[0].data_ptr()
    for weight in weights:
        is_next = weight.data_ptr() == address and weight.is_contiguous()
        if not is_next or weight.untyped_storage().data_ptr() != weights[0].untyped_storage().data_ptr():
            return False
        address += weight.nbytes
    return True


def concat_weights(modules: Sequence[nn.Module]) -> JoinedRows:
    """The weights of several linear modules as one tensor. The modules' own weights become views of it.

    Some checkpoints have modules of one layer in different formats: their weights are returned as they are.
    """
    if len({isinstance(module, PackedLinear) for module in modules}) > 1:
        return [weight_of(module) for module in modules]
    sizes = [len(module.weight) for module in modules]
    if not isinstance(modules[0], PackedLinear) and has_joined_rows([module.weight for module in modules]):
        first = modules[0].weight.detach()
        return first.as_strided((sum(sizes), first.shape[1]), first.stride(), first.storage_offset())
    with torch.no_grad():
        weight = torch.cat([module.weight for module in modules])
        for module, part in zip(modules, weight.split(sizes), strict=True):
            module.weight.data = part
        if not isinstance(modules[0], PackedLinear):
            return weight
        scale = torch.cat([module.weight_scale for module in modules])
        for module, part in zip(modules, scale.split(sizes), strict=True):
            module.weight_scale.data = part
    return Fp8Tensor(weight, scale)
