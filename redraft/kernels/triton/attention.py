"""Attention of new tokens over [cache ; new tokens] where the cache lies. Reference: `kernels/attention.py`, `masks.py`.

Keys of a request lie in its own memory, which the kernel is told the place of, position p in slot p % size; so one launch
serves requests with caches of their own, and nothing is gathered. Query heads that share keys are rows of one product. Keys
are split among programs where there are few rows, and the parts are put together by a second kernel.

A canvas looks at all of itself and at the last `window - 1` cached tokens, the same for all its positions; a causal token at
itself and what is before it, `window` tokens in all.

Shapes: B requests, S new tokens of each, H query heads, G key-value heads (H a multiple of G), K head size, J splits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.triton.pdl import pdl_options, pdl_wait

JOINED = 4  # rows whose parts one program puts together
KEYS = 128  # that one program reads, at least
SHORT = 512  # new tokens up to which programs are few


class Tiles(NamedTuple):
    """How the work is cut."""

    rows: int
    keys: int
    splits: int  # at most
    warps: int
    stages: int


# For an H200, by whether heads are larger than 256 and new tokens are many.
TILES = {
    (False, False): Tiles(64, 32, 4, 4, 2),
    (True, False): Tiles(32, 32, 2, 4, 2),
    (False, True): Tiles(128, 64, 1, 8, 2),
    (True, True): Tiles(64, 32, 1, 8, 2),
}


class KVLocations(NamedTuple):
    """What the requests have cached in one layer.

    Places are counted from a tensor of the same kind: an address by itself would not tell a kernel how it is aligned.
    """

    base: Tensor
    keys_B: Tensor  # numbers from the base to where [slots, G, K] lie, int64, multiples of 16
    values_B: Tensor
    sizes_B: Tensor  # slots, int32
    lengths_B: Tensor  # tokens, int32
    counts_B: Tensor  # how many of the new tokens are to be kept, int32


def attend(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, past: KVLocations, *, window: int | None, causal: bool, splits: int
) -> Tensor:
    """Softmax(q k) v as [B, S, H * K]. The last two axes of q, k and v must be whole; tokens may be apart."""
    b, s, heads, size = q_BSHK.shape
    groups, tiles = k_BSGK.shape[2], select_tiles(q_BSHK)
    rows = max(16, min(tiles.rows, triton.next_power_of_2(s * heads // groups)))
    out_BSHK = torch.empty(b, s, heads, size, dtype=q_BSHK.dtype, device=q_BSHK.device)
    whole = splits == 1
    shape = (0,) if whole else (splits, b * s * heads)
    part_JRK = torch.empty(*shape, size, dtype=torch.float32, device=q_BSHK.device) if not whole else out_BSHK
    mass_JR2 = torch.empty(*shape, 2, dtype=torch.float32, device=q_BSHK.device) if not whole else out_BSHK
    grid = (triton.cdiv(s * heads // groups, rows), b * groups, splits)
    _attend[grid](
        q_BSHK, k_BSGK, v_BSGK, *past, out_BSHK, part_JRK, mass_JR2,
        q_BSHK.stride(0), q_BSHK.stride(1), k_BSGK.stride(0), k_BSGK.stride(1), v_BSGK.stride(0), v_BSGK.stride(1),
        b, s, heads, groups, window or 0, causal, whole, size, max(16, triton.next_power_of_2(size)), rows, tiles.keys,
        num_warps=tiles.warps, num_stages=tiles.stages, **pdl_options(),
    )  # fmt: skip
    if not whole:
        many = b * s * heads
        _combine_splits[(triton.cdiv(many, JOINED),)](
            part_JRK, mass_JR2, out_BSHK, many, size, splits, triton.next_power_of_2(size), JOINED, **pdl_options()
        )
    return out_BSHK.flatten(2)


def select_tiles(q_BSHK: Tensor) -> Tiles:
    """How these queries are cut up."""
    b, s, _, size = q_BSHK.shape
    tiles = TILES[size > 256, b * s > SHORT]
    return tiles if q_BSHK.element_size() <= 2 else tiles._replace(rows=32, keys=16, stages=2)


def choose_num_splits(q_BSHK: Tensor, keys: int) -> int:
    """Among how many programs about so many keys are shared out, a power of two: none with too little to do."""
    wanted = max(1, min(select_tiles(q_BSHK).splits, keys // KEYS))
    return 1 << (wanted.bit_length() - 1)


@triton.jit
def _attend(
    q, k, v, base, keys_at, values_at, sizes, lengths, counts, out, part, mass,
    q_row, q_token, k_row, k_token, v_row, v_token,
    B, S, H, G, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr,
    K: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    tile, split = tl.program_id(0), tl.program_id(2)
    row, group, shared = tl.program_id(1) // G, tl.program_id(1) % G, H // G
    length, size = tl.load(lengths + row), tl.load(sizes + row)
    at = tile * BM + tl.arange(0, BM)  # rows of the product: a token's heads of this group, token after token
    here, token, head = at < S * shared, at // shared, group * shared + at % shared
    feature, whole = tl.arange(0, WIDE), tl.arange(0, WIDE) < K
    q_ptr = q + row.to(tl.int64) * q_row + token[:, None] * q_token + head[:, None] * K + feature[None, :]
    query = tl.load(q_ptr, mask=here[:, None] & whole[None, :], other=0.0)
    # Cached keys that anybody here sees begin at `oldest`; all keys are numbered from there, the new ones last.
    oldest = 0
    if WINDOW:
        oldest = tl.maximum(length - (WINDOW - 1), 0)
    seen = length - oldest
    every = tl.cdiv(tl.cdiv(seen + S, BN), tl.num_programs(2)) * BN
    begin, end = split * every, tl.minimum((split + 1) * every, seen + S)
    top = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    answer = tl.zeros((BM, WIDE), tl.float32)
    key_base = base + tl.multiple_of(tl.load(keys_at + row), 16)
    value_base = base + tl.multiple_of(tl.load(values_at + row), 16)
    for start in range(begin, tl.minimum(end, seen), BN):
        number = start + tl.arange(0, BN)
        held = (number < seen) & (number < end)
        slot = (oldest + start) % size + tl.arange(0, BN)  # a remainder for each would take longer than the product
        place = (tl.where(slot < size, slot, slot - size) * G + group)[:, None] * K + feature[None, :]
        valid = held[:, None] & whole[None, :]
        key = tl.load(key_base + place, mask=valid, other=0.0)
        value = tl.load(value_base + place, mask=valid, other=0.0)
        may = held[None, :]
        if CAUSAL and WINDOW:
            may = may & (length + token[:, None] - (oldest + number)[None, :] < WINDOW)
        top, total, answer = _online_softmax(query, key, value, may, top, total, answer)
    for start in range(tl.maximum(begin - seen, 0), end - seen, BN):
        number = start + tl.arange(0, BN)
        held = (number < S) & (number < end - seen)
        valid, column = held[:, None] & whole[None, :], group * K + feature[None, :]
        key = tl.load(k + row.to(tl.int64) * k_row + number[:, None] * k_token + column, mask=valid, other=0.0)
        value = tl.load(v + row.to(tl.int64) * v_row + number[:, None] * v_token + column, mask=valid, other=0.0)
        may = held[None, :]
        if CAUSAL:
            may = may & (number[None, :] <= token[:, None])
            if WINDOW:
                may = may & (token[:, None] - number[None, :] < WINDOW)
        top, total, answer = _online_softmax(query, key, value, may, top, total, answer)
    line, valid = (row * S + token).to(tl.int64) * H + head, here[:, None] & whole[None, :]
    if WHOLE:
        answer = (answer / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + line[:, None] * K + feature[None, :], answer, mask=valid)
    else:
        line = line + split.to(tl.int64) * B * S * H
        tl.store(part + line[:, None] * K + feature[None, :], answer, mask=valid)
        tl.store(mass + line * 2, top, mask=here)
        tl.store(mass + line * 2 + 1, total, mask=here)


@triton.jit
def _online_softmax(query, key, value, may, top, total, answer):
    """Some more keys: sums so far fade as larger scores come."""
    score = tl.where(may, tl.dot(query, tl.trans(key), input_precision="ieee"), -1e30)
    now = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.where(may, tl.exp(score - now[:, None]), 0.0)
    fade = tl.exp(top - now)
    answer = tl.dot(weight.to(value.dtype), value, answer * fade[:, None], input_precision="ieee")
    return now, total * fade + tl.sum(weight, axis=1), answer


@triton.jit
def _combine_splits(part, mass, out, R, K, J: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    """The parts of some rows: each was computed against its own largest score."""
    pdl_wait(PDL)
    row, feature = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    here, valid = row < R, (row < R)[:, None] & (feature < K)[None, :]
    top = tl.full((ROWS,), -1e30, tl.float32)
    for j in tl.static_range(J):
        top = tl.maximum(top, tl.load(mass + (j * R + row) * 2, mask=here, other=0.0))
    total, answer = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, WIDE), tl.float32)
    for j in tl.static_range(J):
        share = tl.exp(tl.load(mass + (j * R + row) * 2, mask=here, other=0.0) - top)
        total += share * tl.load(mass + (j * R + row) * 2 + 1, mask=here, other=1.0)
        read = tl.load(part + (j * R + row)[:, None] * K + feature[None, :], mask=valid, other=0.0)
        answer += share[:, None] * read
    tl.store(out + row[:, None] * K + feature[None, :], (answer / total[:, None]).to(out.dtype.element_ty), mask=valid)


def write_kv(k_BSGK: Tensor, v_BSGK: Tensor, past: KVLocations) -> None:
    """Writes new keys and values where they belong in the caches, the last `size` that are kept. The lengths stay."""
    b, s, groups, size = k_BSGK.shape
    wide = triton.next_power_of_2(size)
    _write_kv[(b * s, groups)](
        k_BSGK, v_BSGK, *past, k_BSGK.stride(0), k_BSGK.stride(1), v_BSGK.stride(0), v_BSGK.stride(1),
        s, groups, size, wide, num_warps=1, **pdl_options(),
    )  # fmt: skip


@triton.jit
def _write_kv(
    k, v, base, keys_at, values_at, sizes, lengths, counts, k_row, k_token, v_row, v_token, S, G, K,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, token, group = tl.program_id(0) // S, tl.program_id(0) % S, tl.program_id(1)
    at = tl.arange(0, WIDE)
    size = tl.load(sizes + row)
    count = tl.minimum(tl.load(counts + row), S)
    here = (at < K) & (token >= count - size) & (token < count)
    place = (((tl.load(lengths + row) + token) % size).to(tl.int64) * G + group) * K + at
    key = tl.load(k + row.to(tl.int64) * k_row + token * k_token + group * K + at, mask=here, other=0.0)
    value = tl.load(v + row.to(tl.int64) * v_row + token * v_token + group * K + at, mask=here, other=0.0)
    tl.store(base + tl.multiple_of(tl.load(keys_at + row), 16) + place, key, mask=here)
    tl.store(base + tl.multiple_of(tl.load(values_at + row), 16) + place, value, mask=here)
