"""Dense products with fp8 weights. References: `kernels/fp8.py`, and `soft_embed_fp8` in `kernels/vocabulary.py`.

    matmul_fp8       fp8 activations (a scale per token) times an fp8 weight (a scale per row): both scales after the sum
    matmul_widened   activations in bf16 or float32; the weight is widened in registers, for cards without fp8 products
    sum_rows         the rows of an fp8 table, summed with given factors: the soft embedding

The weight is on the M side of the product, as in `experts.py`, so few tokens need no padding to 64. Where the tiles of the
result are fewer than the processors, the summed axis is split among programs, and a second kernel adds the partial sums.

Shapes: N tokens, O features (F in the kernels), D summed axis, J splits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.backend import Card, select_card
from redraft.kernels.fp8 import Fp8Tensor
from redraft.kernels.triton.fp8 import _widen_e4m3, data_and_scale
from redraft.kernels.triton.pdl import _pdl_wait, pdl_options
from redraft.kernels.triton.tiles import NO_LIMIT, Tiles, select_by_size, select_table

MAX_SPLITS = 8
MIN_SPLIT_TILES = 4  # tiles of the summed axis per program
SUM_BLOCK = 1024  # features per program of `_sum_splits`
# The key: the largest number of tokens. Chosen by formula; `benchmarks/bench_kernels.py --tiles` tries others.
LARGE_TILES = {
    16: Tiles(16, 64, 256, 4, 4),
    64: Tiles(64, 64, 256, 4, 4),
    256: Tiles(128, 64, 128, 5, 8),  # measured on an H200
    NO_LIMIT: Tiles(128, 128, 128, 4, 8),
}
SMALL_TILES = {  # for 99 KiB
    16: Tiles(16, 64, 256, 4, 4),
    64: Tiles(64, 64, 128, 4, 4),
    NO_LIMIT: Tiles(128, 128, 128, 3, 8),
}
SMALL_WIDENED_TILES = {16: Tiles(16, 64, 128, 4, 4), 64: Tiles(64, 64, 64, 4, 4), NO_LIMIT: Tiles(128, 128, 64, 3, 8)}
# Measured on an H200: a tile with all tokens of a canvas widens each weight once.
LARGE_WIDENED_TILES = {
    16: Tiles(16, 64, 128, 4, 4),
    64: Tiles(64, 64, 64, 4, 4),
    128: Tiles(128, 128, 64, 3, 8),
    NO_LIMIT: Tiles(256, 128, 64, 4, 8),
}


def matmul_fp8(x_ND: Fp8Tensor, weight_OD: Fp8Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns x times the transposed weight, y_NO."""
    out_NO = torch.empty(len(x_ND.qdata), len(weight_OD.qdata), dtype=dtype, device=x_ND.qdata.device)
    return _multiply(x_ND, weight_OD, out_NO, by_input=False)


def matmul_widened(x_ND: Tensor, weight_OD: Fp8Tensor) -> Tensor:
    """Returns x times the transposed weight, y_NO in the dtype of x."""
    return _multiply(x_ND, weight_OD, x_ND.new_empty(len(x_ND), len(weight_OD.qdata)), by_input=False)


def sum_rows(factors_ND: Tensor, table_DO: Fp8Tensor, dtype: torch.dtype) -> Tensor:
    """Returns factors times the table's fp8 numbers, y_NO. The factors include the scales of the table's rows already.

    The table is widened on every card: an fp8 product sums along contiguous memory, and a table's rows are the other way.
    """
    out_NO = torch.empty(len(factors_ND), table_DO.qdata.shape[1], dtype=dtype, device=factors_ND.device)
    return _multiply(factors_ND, table_DO, out_NO, by_input=True)


def select_tiles(tokens: int, card: Card, token_bytes: int) -> Tiles:
    """Returns the tiles for this many tokens of elements of this size. Elements of more than a byte mean widened weights."""
    tables = (LARGE_WIDENED_TILES, SMALL_WIDENED_TILES) if token_bytes > 1 else (LARGE_TILES, SMALL_TILES)
    return select_by_size(select_table(card, *tables), tokens).fit(card, 1, token_bytes)


def choose_num_splits(tiles: Tiles, tokens: int, features: int, inner: int, card: Card) -> int:
    """Returns among how many programs to split the summed axis, so that all processors have work."""
    programs = triton.cdiv(tokens, tiles.tokens) * triton.cdiv(features, tiles.features)
    most = min(MAX_SPLITS, triton.cdiv(inner, tiles.inner) // MIN_SPLIT_TILES)
    return max(1, min(most, card.processors // programs))


def _multiply(x_ND: Tensor | Fp8Tensor, weight: Fp8Tensor, out_NO: Tensor, by_input: bool) -> Tensor:
    """Launches the product. `by_input`: the weight is stored as [D, O] and its scales belong to the summed axis."""
    widens = isinstance(x_ND, Tensor)
    x, x_scale = data_and_scale(x_ND)
    data, scale = data_and_scale(weight, as_bytes=widens)
    n, inner = x.shape
    features = out_NO.shape[1]
    card = select_card(x.device)
    tiles = select_tiles(n, card, x.element_size())
    splits = choose_num_splits(tiles, n, features, inner, card)
    sums = out_NO if splits == 1 else torch.empty(splits, n, features, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(n, tiles.tokens), triton.cdiv(features, tiles.features), splits)
    _multiply_fp8[grid](
        x, x_scale, data, scale, sums, n, features, inner, splits, widens, by_input,
        tiles.tokens, tiles.features, tiles.inner, num_stages=tiles.stages, num_warps=tiles.warps, **pdl_options(),
    )  # fmt: skip
    if splits > 1:
        _sum_splits[(n, triton.cdiv(features, SUM_BLOCK))](
            sums, x_scale, scale, out_NO, n, features, splits, widens, by_input, SUM_BLOCK, num_warps=4, **pdl_options()
        )
    return out_NO


@triton.jit
def _multiply_fp8(
    x, x_scale, weight, scale, out, N, F, D, SPLITS: tl.constexpr, WIDEN: tl.constexpr, BY_INPUT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of tokens and features, over one split of the summed axis. Neighbouring programs share a weight tile."""
    _pdl_wait(PDL)
    split = tl.program_id(2)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    feature = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = token < N
    mask_f = feature < F
    x_ptr = x + token[None, :].to(tl.int64) * D + offs_k[:, None]
    split_size = tl.cdiv(tl.cdiv(D, BLOCK_K), SPLITS) * BLOCK_K
    begin = split * split_size
    acc = tl.zeros((BLOCK_F, BLOCK_T), tl.float32)
    for k in range(begin, tl.minimum(begin + split_size, D), BLOCK_K):
        column = k + offs_k
        mask_k = column < D
        t = tl.load(x_ptr + k, mask=mask_t[None, :] & mask_k[:, None], other=0.0)
        if BY_INPUT:
            w_ptr = weight + column[None, :].to(tl.int64) * F + feature[:, None]
        else:
            w_ptr = weight + feature[:, None].to(tl.int64) * D + column[None, :]
        w = tl.load(w_ptr, mask=mask_f[:, None] & mask_k[None, :], other=0.0)
        if WIDEN:
            w = _widen_e4m3(w, t.dtype)
        acc = tl.dot(w, t, acc, input_precision="ieee")
    y = tl.trans(acc)
    offs = token[:, None].to(tl.int64) * F + feature[None, :]
    mask = mask_t[:, None] & mask_f[None, :]
    if SPLITS == 1:
        if not BY_INPUT:
            y = y * tl.load(scale + feature, mask=mask_f, other=0.0)[None, :]
        if not WIDEN:
            y = y * tl.load(x_scale + token, mask=mask_t, other=0.0)[:, None]
        tl.store(out + offs, y.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + split.to(tl.int64) * N * F + offs, y, mask=mask)


@triton.jit
def _sum_splits(
    sums, x_scale, scale, out, N, F,
    SPLITS: tl.constexpr, WIDEN: tl.constexpr, BY_INPUT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of one token, always in the same order, and applies the scales."""
    _pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = feature < F
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums + (split * N + token) * F + feature, mask=mask, other=0.0)
    if not BY_INPUT:
        total = total * tl.load(scale + feature, mask=mask, other=0.0)
    if not WIDEN:
        total = total * tl.load(x_scale + token)
    tl.store(out + token * F + feature, total.to(out.dtype.element_ty), mask=mask)
