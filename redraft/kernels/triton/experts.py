"""The experts as two grouped products over tokens sorted by expert. Reference: `kernels/experts.py`.

A canvas gives each expert few tokens (16 on average: 256 tokens, 8 of 128 experts), so loading the weights takes most of the
time. Each weight is loaded once, by one program per expert and tile of features. The weights are on the M side of the
product and the few tokens on the N side. Gate and up are one product with interleaved rows, so that both halves of a
feature are in the registers of one program. With many tokens, those of an expert are a tile and a few more: with `rest`
tokens in a second result, a program reads the weight once for both. `experts_fourbit.py` has the products with 4-bit
weights.

Shapes: N tokens, K experts per token, M = N * K (token, expert) pairs, E experts, D model size, F expert size.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.backend import Card, select_card
from redraft.kernels.fp8 import Fp8Tensor
from redraft.kernels.packed import PackedTensor
from redraft.kernels.triton import experts_fourbit
from redraft.kernels.triton.experts_fourbit import FourbitTensor
from redraft.kernels.triton.fp8 import _widen_e4m3, data_and_scale, quantize_rows
from redraft.kernels.triton.mlp import _gelu
from redraft.kernels.triton.pdl import _pdl_wait, pdl_options
from redraft.kernels.triton.routing import sort_by_expert
from redraft.kernels.triton.tiles import NO_LIMIT, Tiles, select_by_size, select_table

# Tuned on an H200; `benchmarks/bench_kernels.py --tiles` tries others. The keys: whether weights are fp8, then the largest
# average number of tokens per expert. The values: tiles of the gate_up product, tiles of the down product.
LARGE_TILES = {
    False: {
        24: (Tiles(32, 128, 128, 5, 8, by_expert=True), Tiles(32, 64, 64, 4, 4, by_expert=True)),
        48: (Tiles(64, 128, 128, 4, 8, by_expert=True), Tiles(64, 128, 64, 4, 4, by_expert=True)),
        80: (Tiles(64, 128, 128, 4, 8, 2, by_expert=True), Tiles(128, 128, 64, 3, 4, by_expert=True)),
        192: (Tiles(128, 128, 64, 3, 4, rest=32, by_expert=True), Tiles(128, 128, 64, 3, 4, rest=32, by_expert=True)),
        NO_LIMIT: (Tiles(256, 128, 64, 3, 8, 2, by_expert=True), Tiles(128, 128, 64, 3, 4, 4, by_expert=True)),
    },
    True: {
        24: (Tiles(32, 64, 128, 5, 4, by_expert=True), Tiles(32, 128, 128, 3, 4, by_expert=True)),
        48: (Tiles(32, 128, 128, 5, 8, 2), Tiles(64, 128, 128, 4, 4, by_expert=True)),
        80: (Tiles(64, 128, 128, 4, 4, 2), Tiles(128, 128, 128, 3, 4, by_expert=True)),
        192: (Tiles(128, 128, 128, 3, 4, 2, by_expert=True), Tiles(128, 128, 128, 3, 4, 2, by_expert=True)),
        NO_LIMIT: (Tiles(256, 128, 128, 3, 8, 2, by_expert=True), Tiles(128, 128, 128, 3, 4, 4, by_expert=True)),
    },
}
SMALL_TILES = {  # for 99 KiB
    False: {
        24: (Tiles(32, 128, 64, 5, 8), Tiles(32, 64, 64, 5, 4)),
        48: (Tiles(64, 128, 64, 4, 8), Tiles(64, 128, 64, 4, 8)),
        80: (Tiles(64, 128, 64, 4, 8, 2), Tiles(64, 128, 64, 4, 8, 2)),
        NO_LIMIT: (Tiles(128, 128, 64, 3, 8, 2), Tiles(128, 128, 64, 3, 8, 2)),
    },
    True: {
        24: (Tiles(32, 64, 128, 5, 4), Tiles(32, 64, 128, 4, 4)),
        48: (Tiles(32, 128, 128, 4, 8, 2), Tiles(64, 128, 128, 4, 8)),
        80: (Tiles(64, 128, 128, 4, 8, 2), Tiles(64, 128, 128, 4, 8, 2)),
        NO_LIMIT: (Tiles(128, 128, 128, 3, 8, 2), Tiles(128, 64, 128, 3, 8, 2)),
    },
}


def gated_experts(
    x_ND: Tensor | Fp8Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up_E2FD: Tensor | PackedTensor,
    down_EDF: Tensor | PackedTensor,
) -> Tensor:
    """Returns the weighted outputs of every token's experts, outputs_NKD. The caller sums over K.

    Each of the two weights may have any format. With an fp8 weight the activations are quantized too, except on a card
    without fp8: there the weight is widened.
    """
    order_M, ends_E = sort_by_expert(experts_NK, len(gate_up_E2FD if isinstance(gate_up_E2FD, Tensor) else gate_up_E2FD[0]))
    chosen = experts_NK.shape[1]
    if isinstance(gate_up_E2FD, FourbitTensor):
        assert isinstance(x_ND, Tensor), "4-bit weights are multiplied with bf16 tokens"
        inner_MF = experts_fourbit.multiply_gate_up(x_ND, order_M, ends_E, gate_up_E2FD, chosen)
    else:
        inner_MF = multiply_gate_up(x_ND, order_M, ends_E, gate_up_E2FD, chosen)
    if isinstance(down_EDF, FourbitTensor):
        return experts_fourbit.multiply_down(inner_MF, order_M, ends_E, down_EDF, weights_NK)
    return multiply_down(inner_MF, order_M, ends_E, down_EDF, weights_NK)


def multiply_gate_up(
    x_ND: Tensor | Fp8Tensor, order_M: Tensor, ends_E: Tensor, gate_up_E2FD: Tensor | Fp8Tensor, chosen: int
) -> Tensor:
    """Returns GELU(gate) * up of every (token, expert) pair, inner_MF, sorted by expert."""
    card = select_card(order_M.device)
    is_fp8 = isinstance(gate_up_E2FD, Fp8Tensor)
    widens = is_fp8 and not card.has_fp8
    gate_up, scale = data_and_scale(gate_up_E2FD, widens)
    experts, rows, size = gate_up.shape
    dtype = torch.bfloat16 if isinstance(x_ND, Fp8Tensor) else x_ND.dtype
    inner_MF = torch.empty(len(order_M), rows // 2, dtype=dtype, device=order_M.device)
    if is_fp8 and not widens and isinstance(x_ND, Tensor):
        x_ND = quantize_rows(x_ND)
    x, x_scale = data_and_scale(x_ND)
    tiles, _ = select_tiles(gate_up.element_size(), len(order_M), experts, card, x.element_size())
    grid = order_programs(tiles, experts, rows)
    _gate_up[grid](
        x, x_scale, order_M, ends_E, gate_up, scale, inner_MF,
        size, rows // 2, chosen, is_fp8, widens, tiles.tokens, tiles.rest, tiles.features, tiles.inner, tiles.by_expert,
        num_stages=tiles.stages, num_warps=tiles.warps, **pdl_options(),
    )  # fmt: skip
    return inner_MF


def multiply_down(
    inner_MF: Tensor, order_M: Tensor, ends_E: Tensor, down_EDF: Tensor | Fp8Tensor, weights_NK: Tensor
) -> Tensor:
    """Returns the down products times the router's weights, in token order, outputs_NKD."""
    card = select_card(order_M.device)
    is_fp8 = isinstance(down_EDF, Fp8Tensor)
    widens = is_fp8 and not card.has_fp8
    down, scale = data_and_scale(down_EDF, widens)
    experts, size, inner = down.shape
    outputs_NKD = torch.empty(*weights_NK.shape, size, dtype=inner_MF.dtype, device=order_M.device)
    h, h_scale = data_and_scale(quantize_rows(inner_MF) if is_fp8 and not widens else inner_MF)
    _, tiles = select_tiles(down.element_size(), len(order_M), experts, card, h.element_size())
    grid = order_programs(tiles, experts, size)
    _down[grid](
        h, h_scale, order_M, ends_E, down, scale, weights_NK, outputs_NKD,
        size, inner, is_fp8, widens, tiles.tokens, tiles.rest, tiles.features, tiles.inner, tiles.by_expert,
        num_stages=tiles.stages, num_warps=tiles.warps, **pdl_options(),
    )  # fmt: skip
    return outputs_NKD


def order_programs(tiles: Tiles, experts: int, rows: int) -> tuple[int, int, int]:
    """Returns the grid of a product. Programs start in its order, the first axis first."""
    feature_tiles = triton.cdiv(rows, tiles.features)
    return (tiles.concurrent, feature_tiles, experts) if tiles.by_expert else (tiles.concurrent, experts, feature_tiles)


def select_tiles(weight_bytes: int, pairs: int, experts: int, card: Card, token_bytes: int) -> tuple[Tiles, Tiles]:
    """Returns the tiles of the gate_up product and of the down product, for elements of these sizes."""
    by_tokens = select_table(card, LARGE_TILES, SMALL_TILES)[weight_bytes == 1]
    up_tiles, down_tiles = select_by_size(by_tokens, pairs / experts)
    if weight_bytes > 2:
        up_tiles, down_tiles = replace(up_tiles, inner=32), replace(down_tiles, inner=32)
    elif token_bytes > weight_bytes:  # weights are widened in registers, so the tokens' tile is larger than the weights'
        up_tiles, down_tiles = replace(up_tiles, inner=64, warps=8), replace(down_tiles, inner=64, warps=8)
    return up_tiles.fit(card, weight_bytes, token_bytes), down_tiles.fit(card, weight_bytes, token_bytes)


@triton.jit
def _sum_tokens(
    weight_ptr, mask_f, x_ptr, mask_t, D, WIDEN: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product of a tile of a weight with some tokens. The pointers are those of the rows."""
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_F, BLOCK_T), tl.float32)
    for k in range(0, D, BLOCK_K):
        mask_k = k + offs_k < D
        w = tl.load(weight_ptr[:, None] + (k + offs_k)[None, :], mask=mask_f[:, None] & mask_k[None, :], other=0.0)
        t = tl.load(x_ptr[None, :] + (k + offs_k)[:, None], mask=mask_t[None, :] & mask_k[:, None], other=0.0)
        if WIDEN:
            w = _widen_e4m3(w, t.dtype)
        acc = tl.dot(w, t, acc, input_precision="ieee")
    return acc


@triton.jit
def _sum_tokens_and_rest(
    weight_ptr, mask_f, x_ptr, mask_t, rest_ptr, mask_rest, D, WIDEN: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr, REST: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same with two tiles of tokens. Each tile of the weight is loaded once for both."""
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_F, BLOCK_T), tl.float32)
    rest = tl.zeros((BLOCK_F, REST), tl.float32)
    for k in range(0, D, BLOCK_K):
        mask_k = k + offs_k < D
        w = tl.load(weight_ptr[:, None] + (k + offs_k)[None, :], mask=mask_f[:, None] & mask_k[None, :], other=0.0)
        t = tl.load(x_ptr[None, :] + (k + offs_k)[:, None], mask=mask_t[None, :] & mask_k[:, None], other=0.0)
        r = tl.load(rest_ptr[None, :] + (k + offs_k)[:, None], mask=mask_rest[None, :] & mask_k[:, None], other=0.0)
        if WIDEN:
            w = _widen_e4m3(w, t.dtype)
        acc = tl.dot(w, t, acc, input_precision="ieee")
        rest = tl.dot(w, r, rest, input_precision="ieee")
    return acc, rest


@triton.jit
def _gate_up(
    x, x_scale, order, ends, weight, scale, out, D, F, K: tl.constexpr, FP8: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr, REST: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
    BY_EXPERT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GELU(gate) * up of one expert's tokens, for one tile of features."""
    _pdl_wait(PDL)
    expert = tl.program_id(2 if BY_EXPERT else 1).to(tl.int64)
    tile = tl.program_id(1 if BY_EXPERT else 2)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0.0)
    end = tl.load(ends + expert)
    row = tl.arange(0, BLOCK_F)
    feature = tile * (BLOCK_F // 2) + row // 2  # gate and up of a feature are neighbours
    weight_row = expert * 2 * F + (row % 2) * F + feature
    w_ptr = weight + weight_row * D
    mask_f = feature < F
    scale_ptr = scale + weight_row
    for start in range(begin + tl.program_id(0) * (BLOCK_T + REST), end, tl.num_programs(0) * (BLOCK_T + REST)):
        pair = start + tl.arange(0, BLOCK_T)
        mask_t = pair < end
        token = tl.load(order + pair, mask=mask_t, other=0).to(tl.int64) // K
        if REST == 0:
            acc = _sum_tokens(w_ptr, mask_f, x + token * D, mask_t, D, WIDEN, BLOCK_F, BLOCK_T, BLOCK_K)
            _store_gate_up(acc, x_scale, token, scale_ptr, mask_f, out, pair, mask_t, tile, F, FP8, WIDEN, BLOCK_F, BLOCK_T)
        else:
            if end - start > BLOCK_T:
                more = start + BLOCK_T + tl.arange(0, REST)
                mask_m = more < end
                token_m = tl.load(order + more, mask=mask_m, other=0).to(tl.int64) // K
                acc, rest = _sum_tokens_and_rest(
                    w_ptr, mask_f, x + token * D, mask_t, x + token_m * D, mask_m, D, WIDEN, BLOCK_F, BLOCK_T, REST, BLOCK_K
                )
                _store_gate_up(
                    acc, x_scale, token, scale_ptr, mask_f, out, pair, mask_t, tile, F, FP8, WIDEN, BLOCK_F, BLOCK_T
                )
                _store_gate_up(
                    rest, x_scale, token_m, scale_ptr, mask_f, out, more, mask_m, tile, F, FP8, WIDEN, BLOCK_F, REST
                )
            elif end - start > REST:
                acc_t = _sum_tokens(w_ptr, mask_f, x + token * D, mask_t, D, WIDEN, BLOCK_F, BLOCK_T, BLOCK_K)
                _store_gate_up(
                    acc_t, x_scale, token, scale_ptr, mask_f, out, pair, mask_t, tile, F, FP8, WIDEN, BLOCK_F, BLOCK_T
                )
            else:
                few = start + tl.arange(0, REST)
                mask_r = few < end
                token_r = tl.load(order + few, mask=mask_r, other=0).to(tl.int64) // K
                acc_r = _sum_tokens(w_ptr, mask_f, x + token_r * D, mask_r, D, WIDEN, BLOCK_F, REST, BLOCK_K)
                _store_gate_up(
                    acc_r, x_scale, token_r, scale_ptr, mask_f, out, few, mask_r, tile, F, FP8, WIDEN, BLOCK_F, REST
                )


@triton.jit
def _store_gate_up(
    acc, x_scale, token, scale_ptr, mask_f, out, pair, mask_t, tile, F, FP8: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Applies scales and the activation to a tile of the product, and stores it sorted by expert."""
    if FP8:
        acc = acc * tl.load(scale_ptr, mask=mask_f, other=0.0)[:, None]
    if FP8 and not WIDEN:
        acc = acc * tl.load(x_scale + token, mask=mask_t, other=0.0)[None, :]
    gate_and_up = tl.permute(tl.reshape(acc, (BLOCK_F // 2, 2, BLOCK_T)), (0, 2, 1))
    gate, up = tl.split(gate_and_up)
    inner = _gelu(gate) * up
    feature = tile * (BLOCK_F // 2) + tl.arange(0, BLOCK_F // 2)
    out_ptr = out + pair[None, :].to(tl.int64) * F + feature[:, None]
    tl.store(out_ptr, inner.to(out.dtype.element_ty), mask=mask_t[None, :] & (feature < F)[:, None])


@triton.jit
def _down(
    h, h_scale, order, ends, weight, scale, router_weights, out, D, F, FP8: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_T: tl.constexpr, REST: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
    BY_EXPERT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The down product of one expert's tokens, times the router's weights, stored in token order."""
    _pdl_wait(PDL)
    expert = tl.program_id(2 if BY_EXPERT else 1).to(tl.int64)
    tile = tl.program_id(1 if BY_EXPERT else 2)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0.0)
    end = tl.load(ends + expert)
    feature = tile * BLOCK_F + tl.arange(0, BLOCK_F)
    mask_f = feature < D
    w_ptr = weight + (expert * D + feature) * F
    scale_ptr = scale + expert * D + feature
    for start in range(begin + tl.program_id(0) * (BLOCK_T + REST), end, tl.num_programs(0) * (BLOCK_T + REST)):
        row = start + tl.arange(0, BLOCK_T)
        mask_t = row < end
        h_ptr = h + row.to(tl.int64) * F
        if REST == 0:
            acc = _sum_tokens(w_ptr, mask_f, h_ptr, mask_t, F, WIDEN, BLOCK_F, BLOCK_T, BLOCK_K)
            _store_down(acc, h_scale, row, mask_t, order, router_weights, scale_ptr, feature, mask_f, out, D, FP8, WIDEN)
        else:
            if end - start > BLOCK_T:
                more = start + BLOCK_T + tl.arange(0, REST)
                mask_m = more < end
                more_ptr = h + more.to(tl.int64) * F
                acc, rest = _sum_tokens_and_rest(
                    w_ptr, mask_f, h_ptr, mask_t, more_ptr, mask_m, F, WIDEN, BLOCK_F, BLOCK_T, REST, BLOCK_K
                )
                _store_down(acc, h_scale, row, mask_t, order, router_weights, scale_ptr, feature, mask_f, out, D, FP8, WIDEN)
                _store_down(
                    rest, h_scale, more, mask_m, order, router_weights, scale_ptr, feature, mask_f, out, D, FP8, WIDEN
                )
            elif end - start > REST:
                acc_t = _sum_tokens(w_ptr, mask_f, h_ptr, mask_t, F, WIDEN, BLOCK_F, BLOCK_T, BLOCK_K)
                _store_down(
                    acc_t, h_scale, row, mask_t, order, router_weights, scale_ptr, feature, mask_f, out, D, FP8, WIDEN
                )
            else:
                few = start + tl.arange(0, REST)
                mask_r = few < end
                acc_r = _sum_tokens(w_ptr, mask_f, h + few.to(tl.int64) * F, mask_r, F, WIDEN, BLOCK_F, REST, BLOCK_K)
                _store_down(
                    acc_r, h_scale, few, mask_r, order, router_weights, scale_ptr, feature, mask_f, out, D, FP8, WIDEN
                )


@triton.jit
def _store_down(
    acc, h_scale, row, mask_t, order, router_weights, scale_ptr, feature, mask_f, out, D,
    FP8: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Applies scales and the router's weights to a tile of the product, and stores it in token order."""
    pair = tl.load(order + row, mask=mask_t, other=0).to(tl.int64)
    if FP8:
        acc = acc * tl.load(scale_ptr, mask=mask_f, other=0.0)[:, None]
    if FP8 and not WIDEN:
        acc = acc * tl.load(h_scale + row, mask=mask_t, other=0.0)[None, :]
    acc = acc * tl.load(router_weights + pair, mask=mask_t, other=0.0)[None, :]
    out_ptr = out + pair[None, :] * D + feature[:, None]
    tl.store(out_ptr, acc.to(out.dtype.element_ty), mask=mask_t[None, :] & mask_f[:, None])
