"""Attention for wide heads, as two matrix products with the softmax weights in memory between them.

    q, keys    -> [1 _score_tiles]   -> weights relative to the largest score of their tile, and that score
    weights, v -> [2 _sum_values]    -> sums of values, relative to the largest score of their split
               -> [3 _combine_splits of `attention.py`, where there are several splits]

`attention.py` keeps the result of a row in registers while it reads the keys. A row of 512 numbers leaves room for 64 rows
only, and each program then reads all keys and values for few rows: the L2 cache limits it to a fifth of the tensor cores'
peak. Two products have tiles of 128 rows. The weights take memory: slices of the tokens, then splits of the keys, are
computed one after another where they would take more than MAX_WEIGHTS. This is for layers without a window, and
for caches in the dtype of the queries.

Keys are numbered in blocks that lie in the cache or among the new tokens, never in both: the numbers behind the last cached
key up to a multiple of a block have no key.

Shapes: B requests, S new tokens each, H query heads, G key-value heads, R = S * H / G rows of a key-value head, K head size,
T keys of a split, I blocks of keys of a split, J splits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.backend import Card
from redraft.kernels.triton.attention import COMBINED_ROWS, KVLocations, _combine_splits
from redraft.kernels.triton.pdl import _pdl_wait, pdl_options
from redraft.kernels.triton.tiles import LARGE_LIMIT

MIN_HEAD = 512  # below this `attention.py` is faster
MIN_ROWS = 512  # of a key-value head
MAX_WEIGHTS = 2**26  # numbers in memory at a time for a request: as many as a canvas of the released model has logits
# The same for one request with a long context: a canvas behind the 32,768 tokens of a graph, in two splits at once.
MAX_LONG_WEIGHTS = 130 * 2**20
MIN_SLICE = 256  # new tokens that are computed together where the weights of all would take more memory
MAX_SPLITS = 8  # with more, the sums of the splits take longer than the products save
MAX_KEY_TILES = 64  # programs of the first product that share the keys of a split
MIN_SPLIT_BLOCKS = 16  # blocks of keys of a split that only gives the second product more programs
STATS_BLOCK = 16  # tiles of keys whose statistics are loaded together
PROGRAMS = 128  # of the second product: about the number of processors. With half as many or fewer, it is split further


class WideTiles(NamedTuple):
    """Tile sizes and launch options of the two products."""

    rows: int = 128
    keys: int = 256  # of the first product
    inner: int = 64  # the summed axis of both
    columns: int = 256  # of the second product; half as many where programs would be too few
    stages: int = 3
    warps: int = 8


TILES = WideTiles()  # tuned on an H200


def is_wide(q_BSHK: Tensor, groups: int, cached: KVLocations, window: int | None, context: int, card: Card) -> bool:
    """Whether `attend_wide` computes this attention: a large head, many rows, weights that fit, a card with large tiles."""
    _, s, heads, size = q_BSHK.shape
    if min(s, MIN_SLICE) * heads * (context + s) > MAX_SPLITS * MAX_WEIGHTS:
        return False
    is_large = size >= MIN_HEAD and size % TILES.columns == 0 and s * heads // groups >= MIN_ROWS
    is_plain = window is None and q_BSHK.element_size() == 2 and cached.base.dtype == q_BSHK.dtype
    return is_large and is_plain and card.shared_memory >= LARGE_LIMIT


def attend_wide(
    q_BSHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    cached: KVLocations,
    *,
    causal: bool,
    context: int,
    tiles: WideTiles = TILES,
    max_weights: int = MAX_WEIGHTS,
    max_long_weights: int = 0,
) -> Tensor:
    """Returns softmax(q k) v as [B, S, H * K]. `context` is at least the number of cached tokens of every request.

    At most `max_weights` for each request are in memory at a time. Where these are too few, `max_long_weights` may be.
    """
    b, s, heads, size = q_BSHK.shape
    blocks = triton.cdiv(context, tiles.keys) + triton.cdiv(s, tiles.keys)  # of keys, at most
    token_weights = b * heads * blocks * tiles.keys
    max_weights *= b
    if s * token_weights > max_weights:
        max_weights = max(max_weights, max_long_weights)
    slice_tokens = s
    if s * token_weights > max_weights:
        groups = k_BSGK.shape[2]
        tile_tokens = triton.cdiv(tiles.rows * groups, heads)  # that fill a tile of rows
        wave_tokens = tile_tokens * max(1, PROGRAMS * tiles.columns // (b * groups * size))  # that fill the GPU
        most = max_weights // token_weights
        unit = wave_tokens if most >= wave_tokens else tile_tokens
        slice_tokens = max(MIN_SLICE, most // unit * unit)
    outputs = [
        _attend_slice(
            q_BSHK[:, begin : begin + slice_tokens], begin, k_BSGK, v_BSGK, cached, causal, blocks, tiles, max_weights
        )
        for begin in range(0, s, slice_tokens)
    ]
    return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


def _attend_slice(
    q_BSHK: Tensor,
    first_token: int,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    cached: KVLocations,
    causal: bool,
    blocks: int,
    tiles: WideTiles,
    max_weights: int,
) -> Tensor:
    """The attention of some of the new tokens, from `first_token` on, over all keys."""
    b, tokens, heads, size = q_BSHK.shape
    s, groups = k_BSGK.shape[1:3]
    rows = tokens * heads // groups
    device = q_BSHK.device
    row_tiles = triton.cdiv(rows, tiles.rows)
    splits, launched = choose_num_splits(b * groups, rows, size, blocks, tiles, max_weights)
    if 2 * b * groups * row_tiles * (size // tiles.columns) * launched <= PROGRAMS:
        tiles = tiles._replace(columns=tiles.columns // 2)
        splits, launched = choose_num_splits(b * groups, rows, size, blocks, tiles, max_weights)
    split_blocks = triton.cdiv(blocks, splits)
    out_BSHK = torch.empty(b, tokens, heads, size, dtype=q_BSHK.dtype, device=device)
    # Always the same size, so that the logits find room in the same memory later.
    weight_count = max(max_weights, launched * b * groups * rows * split_blocks * tiles.keys)
    weights = torch.empty(weight_count, dtype=q_BSHK.dtype, device=device)
    stats = torch.empty(2, launched, b * groups, rows, split_blocks, dtype=torch.float32, device=device)
    partial_JRK = out_BSHK  # unused without splits
    softmax_JR2 = out_BSHK
    if splits > 1:
        partial_JRK = torch.empty(splits, b * tokens * heads, size, dtype=torch.float32, device=device)
        softmax_JR2 = torch.empty(splits, b * tokens * heads, 2, dtype=torch.float32, device=device)
    key_tiles = min(split_blocks, MAX_KEY_TILES)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages, **pdl_options()}
    for first_split in range(0, splits, launched):
        _score_tiles[(row_tiles, b * groups, launched * key_tiles)](
            q_BSHK, k_BSGK, cached.base, cached.key_offsets_B, cached.slots_B, cached.lengths_B, weights, *stats,
            q_BSHK.stride(0), q_BSHK.stride(1), k_BSGK.stride(0), k_BSGK.stride(1),
            s, tokens, first_token, heads, groups, split_blocks, first_split, splits, key_tiles, causal,
            size, tiles.rows, tiles.keys, tiles.inner, **options,
        )  # fmt: skip
        _sum_values[(row_tiles, size // tiles.columns, b * groups * launched)](
            weights, *stats, v_BSGK, cached.base, cached.value_offsets_B, cached.slots_B, cached.lengths_B,
            out_BSHK, partial_JRK, softmax_JR2, v_BSGK.stride(0), v_BSGK.stride(1),
            b, s, tokens, first_token, heads, groups, split_blocks, first_split, splits, causal, splits == 1,
            size, tiles.rows, tiles.keys, tiles.inner, tiles.columns, STATS_BLOCK, **options,
        )  # fmt: skip
    if splits > 1:
        total_rows = b * tokens * heads
        _combine_splits[(triton.cdiv(total_rows, COMBINED_ROWS),)](
            partial_JRK, softmax_JR2, out_BSHK, total_rows, size, splits, triton.next_power_of_2(size), COMBINED_ROWS,
            **pdl_options(),
        )  # fmt: skip
    return out_BSHK.flatten(2)


def choose_num_splits(pairs: int, rows: int, size: int, blocks: int, tiles: WideTiles, max_weights: int) -> tuple[int, int]:
    """Returns into how many splits to divide the blocks of keys, and how many of them fit the memory of weights at once.

    Both are powers of two. More splits than memory asks for give the second product enough programs.
    """
    programs = pairs * triton.cdiv(rows, tiles.rows) * (size // tiles.columns)
    splits = 1
    while splits < blocks // MIN_SPLIT_BLOCKS and 2 * splits * programs <= PROGRAMS:
        splits *= 2
    launched = splits
    while launched > 1 and launched * pairs * rows * triton.cdiv(blocks, splits) * tiles.keys > max_weights:
        launched //= 2
    while splits < blocks and pairs * rows * triton.cdiv(blocks, splits) * tiles.keys > max_weights:
        splits *= 2
    return splits, launched


@triton.jit
def _locate_blocks(length, S, first_split, split, split_blocks, SPLITS, BLOCK_N: tl.constexpr):
    """The padded number of cached keys, and the range of key numbers of one split."""
    padded = tl.cdiv(length, BLOCK_N) * BLOCK_N
    used_blocks = tl.cdiv(padded + S, BLOCK_N)
    keys = tl.minimum(tl.cdiv(used_blocks, SPLITS), split_blocks) * BLOCK_N
    begin = (first_split + split) * keys
    return padded, begin, tl.minimum(begin + keys, padded + S)


@triton.jit
def _find_row_end(tile, padded, S, OFFSET, group_heads, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr):
    """The number behind the last key that any row of a tile attends to."""
    end = padded + S
    if CAUSAL:
        end = padded + tl.minimum(OFFSET + (tile * BLOCK_M + BLOCK_M - 1) // group_heads + 1, S)
    return end


@triton.jit
def _multiply_heads(
    q_ptr, key_ptr, mask_m, mask_n, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The scores of a tile of rows and keys."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    for start in range(0, K, BLOCK_K):
        query = tl.load(q_ptr[:, None] + start + offs_k[None, :], mask=mask_m[:, None], other=0.0)
        key = tl.load(key_ptr[:, None] + start + offs_k[None, :], mask=mask_n[:, None], other=0.0)
        acc = tl.dot(query, tl.trans(key), acc, input_precision="ieee")
    return acc


@triton.jit
def _score_tiles(
    q, k, base, key_offsets, slots, lengths, weights, tile_max, tile_sum,
    q_row, q_token, k_row, k_token, S, TOKENS, OFFSET, H, G, BLOCKS, FIRST, SPLITS, KEY_TILES, CAUSAL: tl.constexpr,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one request and key-value head, and one tile of keys."""
    _pdl_wait(PDL)
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    split = tl.program_id(2) // KEY_TILES
    request = pair // G
    group = pair % G
    group_heads = H // G
    length = tl.load(lengths + request)
    slot_count = tl.load(slots + request)
    padded, begin, end = _locate_blocks(length, S, FIRST, split, BLOCKS, SPLITS, BLOCK_N)
    end = tl.minimum(end, _find_row_end(tile, padded, S, OFFSET, group_heads, CAUSAL, BLOCK_M))
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = row < TOKENS * group_heads
    token = row // group_heads
    head = group * group_heads + row % group_heads
    q_ptr = q + request.to(tl.int64) * q_row + token * q_token + head * K
    out_row = (split * tl.num_programs(1) + pair).to(tl.int64) * TOKENS * group_heads + row
    offs_n = tl.arange(0, BLOCK_N)
    # New keys are addressed from `base` too: a choice between two pointers would lose their alignment.
    item_size: tl.constexpr = k.dtype.element_ty.primitive_bitwidth // 8
    new_base = (k.to(tl.int64) - base.to(tl.int64)) // item_size + request.to(tl.int64) * k_row
    for start in range(begin + tl.program_id(2) % KEY_TILES * BLOCK_N, end, KEY_TILES * BLOCK_N):
        key_tile = (start - begin) // BLOCK_N
        is_cached = start < padded
        number = tl.where(is_cached, start, start - padded) + offs_n
        mask_n = number < tl.where(is_cached, length, S)
        slot = start % slot_count + offs_n
        slot = tl.where(slot < slot_count, slot, slot - slot_count)
        cached_offs = tl.load(key_offsets + request) + (slot.to(tl.int64) * G + group) * K
        new_offs = new_base + number.to(tl.int64) * k_token + group * K
        key_ptr = base + tl.multiple_of(tl.where(is_cached, cached_offs, new_offs), 16)
        score = _multiply_heads(q_ptr, key_ptr, mask_m, mask_n, K, BLOCK_M, BLOCK_N, BLOCK_K)
        visible = mask_n[None, :] & mask_m[:, None]
        if CAUSAL:
            visible = visible & ((number[None, :] <= OFFSET + token[:, None]) | is_cached)
        score = tl.where(visible, score, -1e30)
        largest = tl.max(score, axis=1)
        weight = tl.where(visible, tl.exp(score - largest[:, None]), 0.0)
        tl.store(tile_max + out_row * BLOCKS + key_tile, largest, mask=mask_m)
        tl.store(tile_sum + out_row * BLOCKS + key_tile, tl.sum(weight, axis=1), mask=mask_m)
        weight_ptr = weights + (out_row * BLOCKS + key_tile)[:, None] * BLOCK_N + offs_n[None, :]
        tl.store(weight_ptr, weight.to(weights.dtype.element_ty), mask=mask_m[:, None])


@triton.jit
def _sum_values(
    weights, tile_max, tile_sum, v, base, value_offsets, slots, lengths, out, partial, softmax, v_row, v_token,
    B, S, TOKENS, OFFSET, H, G, BLOCKS, FIRST, SPLITS, CAUSAL: tl.constexpr, WHOLE: tl.constexpr,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one request and key-value head, and some columns of the values, over one split of the keys."""
    _pdl_wait(PDL)
    tile = tl.program_id(0)
    pairs = B * G
    split = tl.program_id(2) // pairs
    pair = tl.program_id(2) % pairs
    request = pair // G
    group = pair % G
    group_heads = H // G
    length = tl.load(lengths + request)
    padded, begin, end = _locate_blocks(length, S, FIRST, split, BLOCKS, SPLITS, BLOCK_N)
    end = tl.minimum(end, _find_row_end(tile, padded, S, OFFSET, group_heads, CAUSAL, BLOCK_M))
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = row < TOKENS * group_heads
    in_row = (split * pairs + pair).to(tl.int64) * TOKENS * group_heads + row
    # The largest score and the sum of the split.
    row_max = tl.full((BLOCK_M,), -1e30, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    stats_ptr = in_row[:, None] * BLOCKS + tl.arange(0, BLOCK_I)[None, :]
    for first in range(0, tl.cdiv(end - begin, BLOCK_N), BLOCK_I):
        mask_i = mask_m[:, None] & (begin + (first + tl.arange(0, BLOCK_I)) * BLOCK_N < end)[None, :]
        maxima = tl.load(tile_max + stats_ptr + first, mask=mask_i, other=-1e30)
        sums = tl.load(tile_sum + stats_ptr + first, mask=mask_i, other=0.0)
        new_max = tl.maximum(row_max, tl.max(maxima, axis=1))
        row_sum = row_sum * tl.exp(row_max - new_max) + tl.sum(tl.exp(maxima - new_max[:, None]) * sums, axis=1)
        row_max = new_max
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    offs_n = tl.arange(0, BLOCK_K)
    slot_count = tl.load(slots + request)
    value_base = base + tl.multiple_of(tl.load(value_offsets + request), 16)
    new_base = v + request.to(tl.int64) * v_row
    weight_ptr = weights + in_row[:, None] * BLOCKS * BLOCK_N + offs_n[None, :]
    max_ptr = tile_max + in_row * BLOCKS
    last_tile = tl.maximum(tl.cdiv(end - begin, BLOCK_N) - 1, 0)
    largest = tl.load(max_ptr, mask=mask_m, other=0.0)
    for start in range(begin, tl.minimum(end, padded), BLOCK_K):
        slot = start % slot_count + offs_n
        slot = tl.where(slot < slot_count, slot, slot - slot_count)
        offs = (slot.to(tl.int64) * G + group)[:, None] * K + column[None, :]
        value = tl.load(value_base + offs, mask=(start + offs_n < length)[:, None], other=0.0)
        weight = tl.load(weight_ptr + (start - begin), mask=mask_m[:, None], other=0.0)
        factor = tl.exp(largest - row_max)
        next_tile = tl.minimum((start - begin + BLOCK_K) // BLOCK_N, last_tile)
        largest = tl.load(max_ptr + next_tile, mask=mask_m, other=0.0)  # one iteration ahead of its use
        weight = (weight.to(tl.float32) * factor[:, None]).to(value.dtype)
        acc = tl.dot(weight, value, acc, input_precision="ieee")
    for start in range(tl.maximum(begin, padded), end, BLOCK_K):
        number = start - padded + offs_n
        offs = number.to(tl.int64)[:, None] * v_token + group * K + column[None, :]
        value = tl.load(new_base + offs, mask=(number < S)[:, None], other=0.0)
        weight = tl.load(weight_ptr + (start - begin), mask=mask_m[:, None], other=0.0)
        factor = tl.exp(largest - row_max)
        next_tile = tl.minimum((start - begin + BLOCK_K) // BLOCK_N, last_tile)
        largest = tl.load(max_ptr + next_tile, mask=mask_m, other=0.0)  # one iteration ahead of its use
        weight = (weight.to(tl.float32) * factor[:, None]).to(value.dtype)
        acc = tl.dot(weight, value, acc, input_precision="ieee")
    head = group * group_heads + row % group_heads
    out_row = (request * TOKENS + row // group_heads).to(tl.int64) * H + head
    if WHOLE:
        acc = (acc / row_sum[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_row[:, None] * K + column[None, :], acc, mask=mask_m[:, None])
    else:
        out_row = out_row + (FIRST + split).to(tl.int64) * B * TOKENS * H
        tl.store(partial + out_row[:, None] * K + column[None, :], acc, mask=mask_m[:, None])
        is_first = mask_m & (tl.program_id(1) == 0)
        tl.store(softmax + out_row * 2, row_max, mask=is_first)
        tl.store(softmax + out_row * 2 + 1, row_sum, mask=is_first)
