"""Attention of new tokens over [KV cache ; new tokens], with each cache read in place. Reference: `kernels/attention.py`.

The kernel gets the memory address of each request's cache, so one launch serves requests with separate caches and nothing is
copied together. A cache is a ring buffer: position p is in slot p % slots. Query heads that share a key-value head are
rows of one product. When there are few rows, the keys are split among programs (split-K), and a second kernel combines the
partial results.

A canvas position attends to the whole canvas and to the last `window - 1` cached tokens. A causal token attends to itself
and the tokens before it, `window` tokens in all. The masks are those of `model/masks.py`.

An fp8 cache holds e4m3 bytes without a scale. GPUs before sm_89 have no such type, so bytes become numbers by integer
operations there, and numbers become bytes by integer operations everywhere.

Shapes: B requests, S new tokens each, H query heads, G key-value heads (H is a multiple of G), K head size, J splits.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.backend import Card, select_card
from redraft.kernels.triton.fp8 import _encode_e4m3, _widen_e4m3
from redraft.kernels.triton.pdl import _pdl_wait, pdl_options
from redraft.kernels.triton.tiles import NO_LIMIT, Tiles, check_fits, count_buffers, select_by_size, select_table

COMBINED_ROWS = 4  # rows per program of `_combine_splits`
MIN_SPLIT_KEYS = 128  # per program
FEW_TOKENS = 512  # up to here the rows alone do not fill a GPU


# Tuned on an H200. The keys: the largest head size, then the largest number of new tokens.
LARGE_TILES = {
    256: {FEW_TOKENS: Tiles(64, 256, 32, 2, 4, 4), NO_LIMIT: Tiles(128, 256, 64, 2, 8)},
    NO_LIMIT: {FEW_TOKENS: Tiles(32, 512, 32, 2, 4, 2), NO_LIMIT: Tiles(64, 512, 32, 2, 8)},
}
SMALL_TILES = {  # for 99 KiB
    256: {FEW_TOKENS: Tiles(64, 256, 32, 2, 8, 4), NO_LIMIT: Tiles(64, 256, 32, 2, 8)},
    NO_LIMIT: {FEW_TOKENS: Tiles(32, 512, 32, 2, 8, 2), NO_LIMIT: Tiles(32, 512, 32, 2, 8)},
}


class KVLocations(NamedTuple):
    """Where one layer's KV caches are in memory.

    Offsets are relative to `base`, a tensor of the same dtype: from a bare address the compiler could not infer an
    alignment. The base of fp8 caches is uint8.
    """

    base: Tensor
    key_offsets_B: Tensor  # elements from `base` to the keys [slots, G, K], int64, multiples of 16
    value_offsets_B: Tensor
    slots_B: Tensor  # int32
    lengths_B: Tensor  # cached tokens, int32
    counts_B: Tensor  # new tokens that `write_kv` stores, int32


def attend(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    cached: KVLocations,
    *,
    window: int | None,
    causal: bool,
    splits: int,
    tree_N: Tensor | None = None,
) -> Tensor:
    """Returns softmax(q k) v as [B, S, H * K]. The last two axes of q, k and v must be contiguous.

    `tree_N`, int64: the clean tokens are the N nodes of a tree of drafts, and bit m of entry n says that node n attends to
    node m. With `causal`, the queries are the nodes. Without it, row r of the batch is the canvas behind node r % N, and the
    caches hold all N nodes as their last tokens. There is no window then.
    """
    assert tree_N is None or window is None
    b, s, heads, size = q_BSHK.shape
    groups = k_BSGK.shape[2]
    tiles = _select_tiles_of(q_BSHK)
    has_fp8_type = select_card(q_BSHK.device).has_fp8
    rows = max(16, min(tiles.tokens, triton.next_power_of_2(s * heads // groups)))
    out_BSHK = torch.empty(b, s, heads, size, dtype=q_BSHK.dtype, device=q_BSHK.device)
    partial_JRK = out_BSHK  # unused without splits
    softmax_JR2 = out_BSHK
    if splits > 1:
        partial_JRK = torch.empty(splits, b * s * heads, size, dtype=torch.float32, device=q_BSHK.device)
        softmax_JR2 = torch.empty(splits, b * s * heads, 2, dtype=torch.float32, device=q_BSHK.device)
    grid = (triton.cdiv(s * heads // groups, rows), b * groups, splits)
    _attend[grid](
        q_BSHK, k_BSGK, v_BSGK, *cached, out_BSHK, partial_JRK, softmax_JR2,
        q_BSHK.stride(0), q_BSHK.stride(1), k_BSGK.stride(0), k_BSGK.stride(1), v_BSGK.stride(0), v_BSGK.stride(1),
        b, s, heads, groups, cached.lengths_B if tree_N is None else tree_N, 0 if tree_N is None else len(tree_N),
        window or 0, causal, splits == 1, cached.base.dtype == torch.uint8, has_fp8_type,
        size, tiles.features, rows, tiles.inner,
        num_warps=tiles.warps, num_stages=tiles.stages, **pdl_options(),
    )  # fmt: skip
    if splits > 1:
        total_rows = b * s * heads
        _combine_splits[(triton.cdiv(total_rows, COMBINED_ROWS),)](
            partial_JRK, softmax_JR2, out_BSHK, total_rows, size, splits, triton.next_power_of_2(size), COMBINED_ROWS,
            **pdl_options(),
        )  # fmt: skip
    return out_BSHK.flatten(2)


def select_tiles(head_size: int, tokens: int, card: Card, token_bytes: int) -> Tiles:
    """Returns the tiles for this many new tokens. Their features are the head size, padded. Raises TileError if none fit."""
    by_tokens = select_by_size(select_table(card, LARGE_TILES, SMALL_TILES), head_size)
    tiles = replace(select_by_size(by_tokens, tokens), features=max(16, triton.next_power_of_2(head_size)))
    if token_bytes > 2:
        large = replace(tiles, tokens=32, inner=16)
        tiles = select_table(card, large, replace(tiles, tokens=16, inner=16, warps=16))
    check_fits(f"attention with {tiles}", shared_memory(tiles, card, token_bytes), card)
    return tiles


def shared_memory(tiles: Tiles, card: Card, token_bytes: int) -> int:
    """Returns the bytes of shared memory: queries, buffers of keys and values, and weights where registers hold none."""
    has_shared_products = card.has_shared_products and tiles.tokens >= 64 and token_bytes == 2
    buffers = count_buffers(card, tiles.stages) if has_shared_products else max(1, tiles.stages - 1)
    queries = tiles.tokens * tiles.features
    keys_and_values = 2 * tiles.inner * tiles.features * buffers
    weights = 0 if has_shared_products else tiles.tokens * tiles.inner
    return (queries + keys_and_values + weights) * token_bytes


def choose_num_splits(q_BSHK: Tensor, keys: int) -> int:
    """Returns among how many programs to split this many keys, a power of two: each gets MIN_SPLIT_KEYS at least."""
    splits = max(1, min(_select_tiles_of(q_BSHK).concurrent, keys // MIN_SPLIT_KEYS))
    return 1 << (splits.bit_length() - 1)


def _select_tiles_of(q_BSHK: Tensor) -> Tiles:
    b, s, _, size = q_BSHK.shape
    return select_tiles(size, b * s, select_card(q_BSHK.device), q_BSHK.element_size())


@triton.jit
def _attend(
    q, k, v, base, key_offsets, value_offsets, slots, lengths, counts, out, partial, softmax,
    q_row, q_token, k_row, k_token, v_row, v_token,
    B, S, H, G, tree, TREE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr,
    FP8: tl.constexpr, HAS_FP8_TYPE: tl.constexpr,
    K: tl.constexpr, K_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one request and key-value head, over one split of the keys. WHOLE: there is one split.

    FP8: the caches hold e4m3 bytes. TREE: the nodes of a tree of drafts, or 0.
    """
    _pdl_wait(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(2)
    request = tl.program_id(1) // G
    group = tl.program_id(1) % G
    group_heads = H // G
    length = tl.load(lengths + request)
    slot_count = tl.load(slots + request)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # rows: the query heads of this group, token after token
    mask_m = offs_m < S * group_heads
    token = offs_m // group_heads
    head = group * group_heads + offs_m % group_heads
    offs_k = tl.arange(0, K_PADDED)
    mask_k = tl.arange(0, K_PADDED) < K
    q_ptr = q + request.to(tl.int64) * q_row + token[:, None] * q_token + head[:, None] * K + offs_k[None, :]
    query = tl.load(q_ptr, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
    # The oldest cached position that any row attends to. Keys are numbered from there: first the cached, then the new ones.
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(length - (WINDOW - 1), 0)
    cached = length - oldest
    first_key, end_key = _find_key_range(tile, length, oldest, S, group_heads, WINDOW, CAUSAL and TREE == 0, BLOCK_M)
    split_keys = tl.cdiv(tl.cdiv(end_key - first_key, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    begin = first_key + split * split_keys
    end = tl.minimum(begin + split_keys, end_key)
    row_max = tl.full((BLOCK_M,), -1e30, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, K_PADDED), tl.float32)
    key_base = base + tl.multiple_of(tl.load(key_offsets + request), 16)
    value_base = base + tl.multiple_of(tl.load(value_offsets + request), 16)
    for start in range(begin, tl.minimum(end, cached), BLOCK_N):
        number = start + tl.arange(0, BLOCK_N)
        mask_n = (number < cached) & (number < end)
        slot = (oldest + start) % slot_count + tl.arange(0, BLOCK_N)  # a modulo per key would cost more than the product
        offs = (tl.where(slot < slot_count, slot, slot - slot_count) * G + group)[:, None] * K + offs_k[None, :]
        mask = mask_n[:, None] & mask_k[None, :]
        key = tl.load(key_base + offs, mask=mask, other=0)
        value = tl.load(value_base + offs, mask=mask, other=0)
        if FP8:
            key = _widen_e4m3(key, query.dtype, HAS_FP8_TYPE)
            value = _widen_e4m3(value, query.dtype, HAS_FP8_TYPE)
        visible = mask_n[None, :]
        if CAUSAL and WINDOW:
            visible = visible & (length + token[:, None] - (oldest + number)[None, :] < WINDOW)
        if TREE and not CAUSAL:
            visible = visible & _is_on_path(tree, request, number - (length - TREE), TREE)[None, :]
        row_max, row_sum, acc = _online_softmax(query, key, value, visible, row_max, row_sum, acc)
    for start in range(tl.maximum(begin - cached, 0), end - cached, BLOCK_N):
        number = start + tl.arange(0, BLOCK_N)
        mask_n = (number < S) & (number < end - cached)
        mask = mask_n[:, None] & mask_k[None, :]
        column = group * K + offs_k[None, :]
        key = tl.load(k + request.to(tl.int64) * k_row + number[:, None] * k_token + column, mask=mask, other=0.0)
        value = tl.load(v + request.to(tl.int64) * v_row + number[:, None] * v_token + column, mask=mask, other=0.0)
        visible = mask_n[None, :]
        if CAUSAL:
            visible = visible & _is_before(tree, token[:, None], number[None, :], mask_m[:, None], TREE, WINDOW)
        row_max, row_sum, acc = _online_softmax(query, key, value, visible, row_max, row_sum, acc)
    out_row = (request * S + token).to(tl.int64) * H + head
    mask = mask_m[:, None] & mask_k[None, :]
    if WHOLE:
        acc = (acc / row_sum[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_row[:, None] * K + offs_k[None, :], acc, mask=mask)
    else:
        out_row = out_row + split.to(tl.int64) * B * S * H
        tl.store(partial + out_row[:, None] * K + offs_k[None, :], acc, mask=mask)
        tl.store(softmax + out_row * 2, row_max, mask=mask_m)
        tl.store(softmax + out_row * 2 + 1, row_sum, mask=mask_m)


@triton.jit
def _is_on_path(tree, request, node, TREE: tl.constexpr):
    """Whether a canvas of a tree attends to cached tokens: all before the tree, and the nodes of its path."""
    bits = tl.load(tree + request % TREE)
    return (node < 0) | (((bits >> tl.maximum(node, 0).to(tl.int64)) & 1) != 0)


@triton.jit
def _is_before(tree, token, number, mask, TREE: tl.constexpr, WINDOW: tl.constexpr):
    """Whether a new token attends to the new token of a number: one before it or itself, or a node of its path."""
    if TREE:
        is_before = ((tl.load(tree + token, mask=mask, other=1) >> number.to(tl.int64)) & 1) != 0
    else:
        is_before = number <= token
        if WINDOW:
            is_before = is_before & (token - number < WINDOW)
    return is_before


@triton.jit
def _find_key_range(tile, length, oldest, S, group_heads, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr):
    """The numbers of the first key that a row of this tile attends to, and of the one behind the last."""
    first_key = 0
    end_key = length - oldest + S
    if CAUSAL:
        end_key = length - oldest + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // group_heads + 1, S)
        if WINDOW:
            first_key = tl.maximum(length + tile * BLOCK_M // group_heads - (WINDOW - 1) - oldest, 0)
    return first_key, end_key


@triton.jit
def _online_softmax(query, key, value, visible, row_max, row_sum, acc):
    """Adds a block of keys to the running softmax: sums so far are rescaled to the new maximum."""
    score = tl.where(visible, tl.dot(query, tl.trans(key), input_precision="ieee"), -1e30)
    new_max = tl.maximum(row_max, tl.max(score, axis=1))
    weight = tl.where(visible, tl.exp(score - new_max[:, None]), 0.0)
    rescale = tl.exp(row_max - new_max)
    acc = tl.dot(weight.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")
    return new_max, row_sum * rescale + tl.sum(weight, axis=1), acc


@triton.jit
def _combine_splits(
    partial, softmax, out, R, K, J: tl.constexpr, K_PADDED: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    """Combines the splits of some rows. Each split was computed relative to its own maximum."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_k = tl.arange(0, K_PADDED)
    mask_row = row < R
    mask = (row < R)[:, None] & (offs_k < K)[None, :]
    row_max = tl.full((ROWS,), -1e30, tl.float32)
    for j in tl.static_range(J):
        row_max = tl.maximum(row_max, tl.load(softmax + (j * R + row) * 2, mask=mask_row, other=0.0))
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, K_PADDED), tl.float32)
    for j in tl.static_range(J):
        rescale = tl.exp(tl.load(softmax + (j * R + row) * 2, mask=mask_row, other=0.0) - row_max)
        row_sum += rescale * tl.load(softmax + (j * R + row) * 2 + 1, mask=mask_row, other=1.0)
        split_acc = tl.load(partial + (j * R + row)[:, None] * K + offs_k[None, :], mask=mask, other=0.0)
        acc += rescale[:, None] * split_acc
    tl.store(out + row[:, None] * K + offs_k[None, :], (acc / row_sum[:, None]).to(out.dtype.element_ty), mask=mask)


def round_kv_(k_BSGK: Tensor, v_BSGK: Tensor) -> None:
    """Rounds keys and values to e4m3, in place: new tokens then attend to the numbers that an fp8 cache will hold."""
    b, s, groups, size = k_BSGK.shape
    _round_kv[(b * s, groups)](
        k_BSGK, v_BSGK, k_BSGK.stride(0), k_BSGK.stride(1), v_BSGK.stride(0), v_BSGK.stride(1),
        s, size, triton.next_power_of_2(size), num_warps=1, **pdl_options(),
    )  # fmt: skip


@triton.jit
def _round_kv(k, v, k_row, k_token, v_row, v_token, S, K, K_PADDED: tl.constexpr, PDL: tl.constexpr):
    """One token and one key-value head."""
    _pdl_wait(PDL)
    request = (tl.program_id(0) // S).to(tl.int64)
    token = tl.program_id(0) % S
    offs_k = tl.arange(0, K_PADDED)
    offs = tl.program_id(1) * K + offs_k
    k_ptr = k + request * k_row + token * k_token + offs
    v_ptr = v + request * v_row + token * v_token + offs
    key = _widen_e4m3(_encode_e4m3(tl.load(k_ptr, mask=offs_k < K, other=0.0)), tl.float32)
    value = _widen_e4m3(_encode_e4m3(tl.load(v_ptr, mask=offs_k < K, other=0.0)), tl.float32)
    tl.store(k_ptr, key.to(k.dtype.element_ty), mask=offs_k < K)
    tl.store(v_ptr, value.to(v.dtype.element_ty), mask=offs_k < K)


def write_kv(k_BSGK: Tensor, v_BSGK: Tensor, cached: KVLocations) -> None:
    """Writes the first `counts_B` new keys and values into the caches, the last of them where a ring is smaller.

    Does not change `lengths_B`.
    """
    b, s, groups, size = k_BSGK.shape
    width = groups * size
    _write_kv[(b * s,)](
        k_BSGK, v_BSGK, *cached, k_BSGK.stride(0), k_BSGK.stride(1), v_BSGK.stride(0), v_BSGK.stride(1),
        s, width, cached.base.dtype == torch.uint8, triton.next_power_of_2(width), num_warps=4, **pdl_options(),
    )  # fmt: skip


@triton.jit
def _write_kv(
    k, v, base, key_offsets, value_offsets, slots, lengths, counts, k_row, k_token, v_row, v_token, S, WIDTH,
    FP8: tl.constexpr, WIDTH_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All key-value heads of one token."""
    _pdl_wait(PDL)
    request = tl.program_id(0) // S
    token = tl.program_id(0) % S
    column = tl.arange(0, WIDTH_PADDED)
    slot_count = tl.load(slots + request)
    count = tl.minimum(tl.load(counts + request), S)
    mask = (column < WIDTH) & (token >= count - slot_count) & (token < count)
    offs = ((tl.load(lengths + request) + token) % slot_count).to(tl.int64) * WIDTH + column
    key = tl.load(k + request.to(tl.int64) * k_row + token.to(tl.int64) * k_token + column, mask=mask, other=0.0)
    value = tl.load(v + request.to(tl.int64) * v_row + token.to(tl.int64) * v_token + column, mask=mask, other=0.0)
    if FP8:
        key = _encode_e4m3(key)
        value = _encode_e4m3(value)
    tl.store(base + tl.multiple_of(tl.load(key_offsets + request), 16) + offs, key, mask=mask)
    tl.store(base + tl.multiple_of(tl.load(value_offsets + request), 16) + offs, value, mask=mask)


def keep_path(
    base: Tensor,
    keys_LB: Tensor,
    values_LB: Tensor,
    slots_LB: Tensor,
    lengths_B: Tensor,
    path_BD: Tensor,
    width: int,
) -> None:
    """Moves the keys and values of a path of nodes to where its tokens belong, in all layers.

    Node n of a tree was written as token `lengths_B + n`. Node path_BD[b, d] becomes token `lengths_B + d + 1`; a path of
    fewer nodes has the numbers d + 1 behind its end, which stay. `width` are the numbers of a token, G * K.
    """
    layers, rows = keys_LB.shape
    depth = path_BD.shape[1]
    _keep_path[(layers, rows)](
        base, keys_LB, values_LB, slots_LB, lengths_B, path_BD.contiguous(), rows, depth, width,
        triton.next_power_of_2(depth), triton.next_power_of_2(width), num_warps=4, **pdl_options(),
    )  # fmt: skip


@triton.jit
def _keep_path(
    base, key_offsets, value_offsets, slots, lengths, path, B, D, WIDTH,
    D_PADDED: tl.constexpr, WIDTH_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One layer of one request. All is loaded before anything is stored: both may be the same slots."""
    _pdl_wait(PDL)
    request = tl.program_id(1)
    entry = tl.program_id(0) * B + request
    step = tl.arange(0, D_PADDED)
    column = tl.arange(0, WIDTH_PADDED)
    mask = (step < D)[:, None] & (column < WIDTH)[None, :]
    length = tl.load(lengths + request)
    slot_count = tl.load(slots + entry)
    node = tl.load(path + request * D + step, mask=step < D, other=0).to(tl.int32)
    source = ((length + node) % slot_count).to(tl.int64)[:, None] * WIDTH + column[None, :]
    target = ((length + step + 1) % slot_count).to(tl.int64)[:, None] * WIDTH + column[None, :]
    keys = base + tl.multiple_of(tl.load(key_offsets + entry), 16)
    values = base + tl.multiple_of(tl.load(value_offsets + entry), 16)
    key = tl.load(keys + source, mask=mask)
    value = tl.load(values + source, mask=mask)
    tl.debug_barrier()
    tl.store(keys + target, key, mask=mask)
    tl.store(values + target, value, mask=mask)
