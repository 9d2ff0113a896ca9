"""The model's layers on the kernels of `kernels/triton`: fewer passes over memory, caches used in place, the same results.

`model.py` is the definition. Here q, k and v are one product, as are gate and up; what stands between two products is one
kernel; new tokens look at caches by address, so that requests need not be brought together first.

Shapes: B requests, S new tokens of each, N = B * S, D model size, L layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.config import SLIDING
from redraft.kernels import rope_frequencies
from redraft.kernels.fp8 import Fp8Tensor, linear_fp8, matmul_fp8
from redraft.kernels.triton import attention, mlp, norm, qkv_rope, routing
from redraft.kernels.triton.experts import gated_experts
from redraft.model.diffusion_gemma import DiffusionGemma, Layer
from redraft.model.kv_cache import KVCache

ALL = 2**30  # tokens: however many come


@dataclass(frozen=True)
class Table:
    """Where the caches of some requests lie, for a kernel to find them. Written in place: a CUDA graph reads it anew."""

    keys_LB: Tensor  # as in `attention.KVLocations`, counted from `nowhere`
    values_LB: Tensor
    sizes_LB: Tensor  # slots
    lengths_B: Tensor  # tokens
    counts_B: Tensor  # of the tokens that come, those that are kept
    nowhere: Tensor  # one slot, for places without a request

    @classmethod
    def empty(cls, model: DiffusionGemma, rows: int) -> "Table":
        """Room for that many requests."""
        config, layers = model.config, model.config.num_hidden_layers
        slot = max(math.prod(config.layer_heads(layer)) for layer in range(layers))
        nowhere = torch.zeros(slot, dtype=model.dtype, device=model.device)
        places = [torch.zeros(layers, rows, dtype=torch.int64, device=model.device) for _ in range(2)]
        sizes_LB = torch.ones(layers, rows, dtype=torch.int32, device=model.device)
        numbers = [torch.zeros(rows, dtype=torch.int32, device=model.device) for _ in range(2)]
        return cls(*places, sizes_LB, *numbers, nowhere)

    def fill(self, caches: Sequence[KVCache], counts: Sequence[int] | None = None) -> None:
        """The caches of one row each; places left over have nothing cached.

        `counts` are tokens that each cache counts already but does not hold: they are what comes. Without, all of it is new.
        """
        layers, begin, each = len(self.keys_LB), self.nowhere.data_ptr(), self.nowhere.element_size()
        places = [cache.slot_addresses for cache in caches]
        places += [([begin] * layers, [begin] * layers, [1] * layers)] * (self.lengths_B.numel() - len(caches))
        keys, values, sizes = (torch.tensor(column).t() for column in zip(*places, strict=True))
        self.keys_LB.copy_((keys - begin) // each)
        self.values_LB.copy_((values - begin) // each)
        self.sizes_LB.copy_(sizes)
        missing = counts if counts is not None else [0] * len(caches)
        lengths = [cache.lengths[0] - count for cache, count in zip(caches, missing, strict=True)]
        kept = counts if counts is not None else [ALL] * len(caches)
        for numbers_B, known in ((self.lengths_B, lengths), (self.counts_B, kept)):
            numbers_B.copy_(torch.tensor([*known, *[0] * (len(numbers_B) - len(caches))], dtype=torch.int32))

    def past(self, layer: int) -> attention.KVLocations:
        """What one layer's attention is told."""
        numbers = (self.keys_LB[layer], self.values_LB[layer], self.sizes_LB[layer], self.lengths_B, self.counts_B)
        return attention.KVLocations(self.nowhere, *numbers)


class FusedLayers:
    """Runs a model's layers. The model shares its memory: weights that are used together are made to lie together."""

    def __init__(self, model: DiffusionGemma) -> None:
        self.model, config = model, model.config
        self.beside = Beside(model.device)
        packed = hasattr(model.layers[0].mlp.gate_proj, "weight_scale")
        self.packs = packed and model.device.type == "cuda" and model.dtype == torch.bfloat16
        self.qkv, self.gate_up = [], []
        for layer in model.layers:
            parts = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
            self.qkv.append(joined([part for part in parts if part is not None]))
            self.gate_up.append(joined([layer.mlp.gate_proj, layer.mlp.up_proj]))
        device = model.device
        full = (config.global_head_dim, config.global_rope_theta, config.global_rotary_fraction)
        sliding = rope_frequencies(config.head_dim, config.rope_theta, 1.0, device)
        full = rope_frequencies(*full, device)
        self.frequencies = [sliding if kind == SLIDING else full for kind in config.layer_types]

    def read(self, ids_BS: Tensor, table: Table, longest: int) -> None:
        """Tokens into the caches behind what they hold; whoever owns the lengths moves them on.

        `longest` is about how much is cached; it decides how attention is shared out, not what it finds.
        """
        self._layers([_Tokens(self.model.embed(ids_BS), table, True)], longest)

    def denoise(
        self,
        canvas_BC: Tensor,
        soft_BCD: Tensor | None,
        table: Table,
        longest: int,
        pages: tuple[Tensor, Table] | None = None,
    ) -> Tensor:
        """Final hidden states [N, D] of canvases, normed; the head is the caller's.

        `pages` are read in the same pass, as `read` would before: tokens [P, S] and where they go. A canvas may stand behind
        one of them; its own table counts the page already.
        """
        groups = [] if pages is None else [_Tokens(self.model.embed(pages[0]), pages[1], True)]
        x_BCD = self.model.self_conditioning(self.model.embed(canvas_BC), soft_BCD)
        return self._layers([*groups, _Tokens(x_BCD, table, False)], longest)

    def _layers(self, groups: "Sequence[_Tokens]", longest: int) -> Tensor:
        """Final hidden states of the last group. Causal ones come first."""
        model, eps = self.model, self.model.config.rms_norm_eps
        positions_N = torch.cat([one.positions_N for one in groups])
        x_ND = torch.cat([one.x_BSD.flatten(0, 1) for one in groups])
        causal = sum(one.count for one in groups if one.causal)
        read_ND = norm.rms_norm(x_ND, model.layers[0].input_layernorm.weight, eps)
        following = [layer.input_layernorm.weight for layer in model.layers[1:]] + [model.norm.weight]
        for index, layer in enumerate(model.layers):
            answer_ND = self._attention(index, read_ND, positions_N, groups, longest)
            x_ND, dense_ND, sparse_ND, router_ND = norm.add_attention_and_norm(
                x_ND, answer_ND, layer.post_attention_layernorm.weight, layer.pre_feedforward_layernorm.weight,
                layer.pre_feedforward_layernorm_2.weight, layer.router.scale, eps, self.packs,
            )  # fmt: skip
            with self.beside:
                both_NF = product(dense_ND, self.gate_up[index])
                inner_NF = mlp.gelu_and_mul(both_NF)
                read_ND = product(inner_NF, weight_of(layer.mlp.down_proj))
            answers_NKD = self._experts(layer, sparse_ND, router_ND)
            self.beside.wait()
            behind = (
                layer.post_feedforward_layernorm_1,
                layer.post_feedforward_layernorm_2,
                layer.post_feedforward_layernorm,
            )
            weights, scalars = tuple(one.weight for one in behind), (layer.encoder_layer_scalar, layer.layer_scalar)
            packs = self.packs and layer is not model.layers[-1]
            x_ND, read_ND = norm.add_mlp_and_norm(
                x_ND, read_ND, answers_NKD, weights, scalars, causal, following[index], eps, packs
            )
        return read_ND[-groups[-1].count :]

    def _attention(
        self, index: int, read_ND: Tensor | Fp8Tensor, positions_N: Tensor, groups: "Sequence[_Tokens]", longest: int
    ) -> Tensor:
        config, own = self.model.config, self.model.layers[index].self_attn
        shared, _ = config.layer_heads(index)
        found = qkv_rope.split_qkv_rope(
            product(read_ND, self.qkv[index]), own.q_norm.weight, own.k_norm.weight, positions_N, self.frequencies[index],
            config.num_attention_heads, shared, config.rms_norm_eps,
        )  # fmt: skip
        window, answers, counts = config.layer_window(index), [], [one.count for one in groups]
        for one, *parts in zip(groups, *(part.split(counts) for part in found), strict=True):
            q, k, v = (part.unflatten(0, one.x_BSD.shape[:2]) for part in parts)
            keys = (min(longest, window - 1) if window else longest) + q.shape[1]
            past, share = one.table.past(index), attention.choose_num_splits(q, keys)
            seen = attention.attend(q, k, v, past, window=window, causal=one.causal, splits=share)
            answers.append(seen.flatten(0, 1))
            if one.causal:
                attention.write_kv(k, v, past)
        return product(torch.cat(answers) if len(answers) > 1 else answers[0], weight_of(own.o_proj))

    def _experts(self, layer: Layer, sparse_ND: Tensor | Fp8Tensor, router_ND: Tensor) -> Tensor:
        router, experts = layer.router, layer.experts
        chosen_NK, weights_NK = routing.route(router_ND, router.proj.weight, router.per_expert_scale, router.top_k)
        up, down = experts.gate_up_proj, experts.down_proj
        if hasattr(experts, "gate_up_proj_scale"):
            up, down = Fp8Tensor(up, experts.gate_up_proj_scale), Fp8Tensor(down, experts.down_proj_scale)
        return gated_experts(sparse_ND, chosen_NK, weights_NK, up, down)


class Beside:
    """What is done inside of it runs beside what comes after, up to `wait`: experts wait for memory, the dense MLP does not.

    Whatever it reads and makes must be held until then, or its memory may be given to others too early.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._inside: Any = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            self._inside = torch.cuda.stream(self.stream)
            self._inside.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self._inside.__exit__(*error)

    def wait(self) -> None:
        """Until it is done."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


@dataclass(frozen=True)
class _Tokens:
    """New tokens of some requests, on their way through the layers."""

    x_BSD: Tensor
    table: Table  # what stands before them
    causal: bool

    @property
    def count(self) -> int:
        return self.x_BSD.shape[0] * self.x_BSD.shape[1]

    @property
    def positions_N(self) -> Tensor:
        return (self.table.lengths_B[:, None] + torch.arange(self.x_BSD.shape[1], device=self.x_BSD.device)).flatten()


def product(x_ND: Tensor | Fp8Tensor, weight: Tensor | Fp8Tensor) -> Tensor:
    """x times the weight, packed or not."""
    if isinstance(x_ND, Fp8Tensor):
        return matmul_fp8(x_ND, weight)
    return linear_fp8(x_ND, weight) if isinstance(weight, Fp8Tensor) else F.linear(x_ND, weight)


def weight_of(linear: nn.Module) -> Tensor | Fp8Tensor:
    """The weight of a product, packed or not."""
    return Fp8Tensor(linear.weight, linear.weight_scale) if hasattr(linear, "weight_scale") else linear.weight


def joined(linears: Sequence[nn.Module]) -> Tensor | Fp8Tensor:
    """The weights of some products below one another. The products keep theirs, as parts of it."""
    sizes = [len(linear.weight) for linear in linears]
    with torch.no_grad():
        whole = torch.cat([linear.weight for linear in linears])
        for linear, part in zip(linears, whole.split(sizes), strict=True):
            linear.weight.data = part
        if not hasattr(linears[0], "weight_scale"):
            return whole
        scale = torch.cat([linear.weight_scale for linear in linears])
        for linear, part in zip(linears, scale.split(sizes), strict=True):
            linear.weight_scale.data = part
    return Fp8Tensor(whole, scale)
