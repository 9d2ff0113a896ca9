"""Experts as two grouped products over tokens sorted by expert. Reference: `kernels/experts.py`.

A canvas gives each expert few tokens (16 on average at 256 tokens, 8 of 128 experts), so the weights are what moves: each is
read once, by one program for every expert and some of its features, with the weights on the M side of the product and the
few tokens on its N side. Gate and up are one product: rows of both in turn, so that their halves meet in registers.

Shapes: N tokens, K experts chosen per token, M = N * K pairs, E experts, D model size, F expert size.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.fp8 import Fp8Tensor
from redraft.kernels.triton.fp8 import quantize_rows
from redraft.kernels.triton.pdl import pdl_options, pdl_wait
from redraft.kernels.triton.routing import sort_by_expert


@dataclass(frozen=True)
class Tiles:
    """How the work is cut."""

    tokens: int
    features: int  # rows of weights
    inner: int
    stages: int
    warps: int
    at_once: int = 1  # tiles of an expert's tokens in work together: they find its weights in the GPU's cache


MANY = 2**30
# For an H200; benchmarks/bench_kernels.py --tiles tries others.
# By whether weights have 8 bits, and by how many tokens an expert has on average at most: gate and up, then down.
TILES = {
    False: {
        24: (Tiles(32, 128, 128, 5, 8), Tiles(32, 64, 64, 5, 4)),
        48: (Tiles(64, 128, 128, 4, 8), Tiles(64, 128, 64, 4, 4)),
        80: (Tiles(64, 128, 128, 4, 8, 2), Tiles(64, 128, 64, 4, 4, 2)),
        MANY: (Tiles(128, 128, 64, 3, 4, 2), Tiles(128, 256, 64, 4, 8, 2)),
    },
    True: {
        24: (Tiles(32, 64, 128, 5, 4), Tiles(32, 64, 128, 4, 4)),
        48: (Tiles(32, 128, 128, 5, 8, 2), Tiles(64, 128, 128, 4, 4)),
        80: (Tiles(64, 128, 128, 4, 4, 2), Tiles(64, 128, 128, 4, 4, 2)),
        MANY: (Tiles(128, 128, 128, 3, 4, 2), Tiles(128, 64, 128, 3, 4, 2)),
    },
}


def gated_experts(
    x_ND: Tensor | Fp8Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    gate_up_E2FD: Tensor | Fp8Tensor,
    down_EDF: Tensor | Fp8Tensor,
) -> Tensor:
    """The answers of every token's experts, weighted: answers_NKD, still to be summed over K."""
    eight = isinstance(gate_up_E2FD, Fp8Tensor)
    up, down = (w.qdata if eight else w for w in (gate_up_E2FD, down_EDF))
    experts, size, inner = down.shape
    chosen = experts_NK.shape[1]
    order_M, ends_E = sort_by_expert(experts_NK, experts)
    kind, device = torch.bfloat16 if isinstance(x_ND, Fp8Tensor) else x_ND.dtype, order_M.device
    inner_MF = torch.empty(order_M.numel(), inner, dtype=kind, device=device)
    x_in, x_scale = (x_ND, x_ND) if not eight else x_ND if isinstance(x_ND, Fp8Tensor) else quantize_rows(x_ND)
    tiles, narrow = select_tiles(down.element_size(), len(order_M), experts)
    _gate_up[(tiles.at_once, experts, triton.cdiv(2 * inner, tiles.features))](
        x_in, x_scale, order_M, ends_E, up, gate_up_E2FD.scale if eight else up, inner_MF,
        size, inner, chosen, eight, tiles.tokens, tiles.features, tiles.inner,
        num_stages=tiles.stages, num_warps=tiles.warps, **pdl_options(),
    )  # fmt: skip
    h_in, h_scale = quantize_rows(inner_MF) if eight else (inner_MF, inner_MF)
    answers_NKD = torch.empty(*experts_NK.shape, size, dtype=kind, device=device)
    _down[(narrow.at_once, experts, triton.cdiv(size, narrow.features))](
        h_in, h_scale, order_M, ends_E, down, down_EDF.scale if eight else down, weights_NK, answers_NKD,
        size, inner, eight, narrow.tokens, narrow.features, narrow.inner,
        num_stages=narrow.stages, num_warps=narrow.warps, **pdl_options(),
    )  # fmt: skip
    return answers_NKD


def select_tiles(bytes_each: int, pairs: int, experts: int) -> tuple[Tiles, Tiles]:
    """For gate and up, and for down, weights of so many bytes: more tokens at once where experts have more."""
    wide, narrow = next(both for most, both in TILES[bytes_each == 1].items() if pairs <= most * experts)
    if bytes_each > 2:
        wide, narrow = (replace(one, inner=32) for one in (wide, narrow))
    return wide, narrow


@triton.jit
def _gelu(x):
    """With tanh, written as a sigmoid: tanh(y) = 2 sigmoid(2 y) - 1."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _gate_up(
    x, x_scale, order, ends, weight, scale, out,
    D, F, K: tl.constexpr, FP8: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    expert, tile = tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    row = tl.arange(0, BF)
    feature = tile * (BF // 2) + row // 2  # gate and up of a feature are neighbours
    line = expert * 2 * F + (row % 2) * F + feature
    w_ptr = weight + line[:, None] * D + tl.arange(0, BK)[None, :]
    fits = feature < F
    for start in range(begin + tl.program_id(0) * BT, end, tl.num_programs(0) * BT):
        at = start + tl.arange(0, BT)
        here = at < end
        token = tl.load(order + at, mask=here, other=0).to(tl.int64) // K
        x_ptr = x + token[None, :] * D + tl.arange(0, BK)[:, None]
        total = tl.zeros((BF, BT), tl.float32)
        for k in range(0, D, BK):
            left = k + tl.arange(0, BK) < D
            w = tl.load(w_ptr + k, mask=fits[:, None] & left[None, :], other=0.0)
            t = tl.load(x_ptr + k, mask=here[None, :] & left[:, None], other=0.0)
            total = tl.dot(w, t, total, input_precision="ieee")
        if FP8:
            channel = tl.load(scale + line, mask=fits, other=0.0)
            total = total * channel[:, None] * tl.load(x_scale + token, mask=here, other=0.0)[None, :]
        pair = tl.permute(tl.reshape(total, (BF // 2, 2, BT)), (0, 2, 1))
        gate, up = tl.split(pair)
        found = _gelu(gate) * up
        place = tile * (BF // 2) + tl.arange(0, BF // 2)
        o_ptr = out + at[None, :].to(tl.int64) * F + place[:, None]
        tl.store(o_ptr, found.to(out.dtype.element_ty), mask=here[None, :] & (place < F)[:, None])


@triton.jit
def _down(
    h, h_scale, order, ends, weight, scale, shares, out,
    D, F, FP8: tl.constexpr, BT: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    expert, tile = tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    feature = tile * BF + tl.arange(0, BF)
    line = expert * D + feature
    w_ptr = weight + line[:, None] * F + tl.arange(0, BK)[None, :]
    fits = feature < D
    for start in range(begin + tl.program_id(0) * BT, end, tl.num_programs(0) * BT):
        at = start + tl.arange(0, BT)
        here = at < end
        pair = tl.load(order + at, mask=here, other=0).to(tl.int64)
        h_ptr = h + at[None, :].to(tl.int64) * F + tl.arange(0, BK)[:, None]
        total = tl.zeros((BF, BT), tl.float32)
        for k in range(0, F, BK):
            left = k + tl.arange(0, BK) < F
            w = tl.load(w_ptr + k, mask=fits[:, None] & left[None, :], other=0.0)
            t = tl.load(h_ptr + k, mask=here[None, :] & left[:, None], other=0.0)
            total = tl.dot(w, t, total, input_precision="ieee")
        if FP8:
            channel = tl.load(scale + line, mask=fits, other=0.0)
            total = total * channel[:, None] * tl.load(h_scale + at, mask=here, other=0.0)[None, :]
        total = total * tl.load(shares + pair, mask=here, other=0.0)[None, :]
        o_ptr = out + pair[None, :] * D + feature[:, None]
        tl.store(o_ptr, total.to(out.dtype.element_ty), mask=here[None, :] & fits[:, None])
