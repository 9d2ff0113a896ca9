"""The experts' grouped products over 4-bit weights, dequantized in registers. Reference: `kernels/experts.py`.

The two products of `experts.py`, with another inner loop: a load of 16-bit units (`kernels/nibbles.py`) gives four factors
of 16 inputs per block. They are multiplied one by one, or joined and multiplied as one. Activations and products are bf16.

On an H200 the number of instructions per weight decides the speed, not the memory. The conversion in PTX handles two weights
at a time; the loop takes three to four instructions per weight. The plain conversion is its reference, and the one that
Triton's interpreter runs.

Shapes: N tokens, K experts per token, M = N * K (token, expert) pairs, E experts, D model size, F expert size,
J blocks of 64 inputs.
"""

from typing import NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.backend import Card, select_card
from redraft.kernels.int4 import Int4Tensor
from redraft.kernels.nibbles import BLOCK, UNITS
from redraft.kernels.nvfp4 import Nvfp4Tensor
from redraft.kernels.triton.mlp import _gelu
from redraft.kernels.triton.pdl import _pdl_wait, pdl_options
from redraft.kernels.triton.tiles import NO_LIMIT, Tiles, select_by_size

FourbitTensor: TypeAlias = Nvfp4Tensor | Int4Tensor

# Formats, as the kernels' constant FORMAT.
_NVFP4 = tl.constexpr(0)
_INT4 = tl.constexpr(1)
_INT4_MINIMUM = tl.constexpr(2)
_BLOCK = tl.constexpr(BLOCK)
_UNITS = tl.constexpr(UNITS)

# Bytes per weight by FORMAT: half a byte for the code, 4 bytes per block for its scales, 4 more for its minimums.
WEIGHT_BYTES = {_NVFP4.value: 36 / BLOCK, _INT4.value: 36 / BLOCK, _INT4_MINIMUM.value: 40 / BLOCK}

# The key: the largest average number of tokens per expert. The values: tiles of the gate_up product, tiles of the down
# product; `inner` is a multiple of 64. Measured on an H200 (`benchmarks/bench_experts.py --tiles`): the conversion is the
# limit, so tiles with many programs per processor win, and those fit 99 KiB as well.
TILES = {
    24: (Tiles(32, 128, 128, 3, 4), Tiles(32, 128, 64, 4, 4)),
    48: (Tiles(64, 128, 64, 4, 4), Tiles(64, 128, 64, 4, 4)),
    NO_LIMIT: (Tiles(64, 128, 64, 3, 4, 2), Tiles(64, 128, 64, 3, 4, 2)),
}
FLOAT32_TILES = Tiles(16, 32, 64, 2, 4)  # products in float32 keep both factors in registers


def multiply_gate_up(
    x_ND: Tensor,
    order_M: Tensor,
    ends_E: Tensor,
    gate_up_E2FD: FourbitTensor,
    chosen: int,
    tiles: Tiles | None = None,
    uses_ptx: bool = True,
    joins: bool | None = None,
) -> Tensor:
    """Returns GELU(gate) * up of every (token, expert) pair, inner_MF, sorted by expert.

    `tiles`, `uses_ptx` and `joins` are for benchmarks and tests: tiles, conversion and products other than the device's.
    """
    card = select_card(x_ND.device)
    tiles = tiles or select_tiles(format_of(gate_up_E2FD), len(order_M), len(ends_E), card, x_ND.element_size())[0]
    weight = _kernel_weight(gate_up_E2FD)
    number, rows, _ = weight.codes.shape
    inner_MF = torch.empty(len(order_M), rows // 2, dtype=x_ND.dtype, device=x_ND.device)
    size = x_ND.shape[1]
    _gate_up_fourbit[(tiles.concurrent, number, triton.cdiv(rows, tiles.features))](
        x_ND, order_M, ends_E, *weight, inner_MF, size, rows // 2, triton.cdiv(size, BLOCK), chosen,
        **_constants(x_ND, gate_up_E2FD, tiles, uses_ptx, joins),
        num_stages=tiles.stages, num_warps=tiles.warps, **pdl_options(),
    )  # fmt: skip
    return inner_MF


def multiply_down(
    inner_MF: Tensor,
    order_M: Tensor,
    ends_E: Tensor,
    down_EDF: FourbitTensor,
    weights_NK: Tensor,
    tiles: Tiles | None = None,
    uses_ptx: bool = True,
    joins: bool | None = None,
) -> Tensor:
    """Returns the down products times the router's weights, in token order, outputs_NKD. Options as above."""
    card = select_card(inner_MF.device)
    tiles = tiles or select_tiles(format_of(down_EDF), len(order_M), len(ends_E), card, inner_MF.element_size())[1]
    weight = _kernel_weight(down_EDF)
    number, size, _ = weight.codes.shape
    outputs_NKD = torch.empty(*weights_NK.shape, size, dtype=inner_MF.dtype, device=inner_MF.device)
    inner = inner_MF.shape[1]
    _down_fourbit[(tiles.concurrent, number, triton.cdiv(size, tiles.features))](
        inner_MF, order_M, ends_E, *weight, weights_NK, outputs_NKD, size, inner, triton.cdiv(inner, BLOCK),
        **_constants(inner_MF, down_EDF, tiles, uses_ptx, joins),
        num_stages=tiles.stages, num_warps=tiles.warps, **pdl_options(),
    )  # fmt: skip
    return outputs_NKD


def select_tiles(format: int, pairs: int, experts: int, card: Card, token_bytes: int = 2) -> tuple[Tiles, Tiles]:
    """Returns the tiles of the gate_up product and of the down product, for a FORMAT of the kernels."""
    up_tiles, down_tiles = select_by_size(TILES, pairs / experts)
    if token_bytes > 2:
        up_tiles, down_tiles = FLOAT32_TILES, FLOAT32_TILES
    weight_bytes = WEIGHT_BYTES[format]
    return up_tiles.fit(card, weight_bytes, token_bytes), down_tiles.fit(card, weight_bytes, token_bytes)


class _KernelWeight(NamedTuple):
    """The tensors of a 4-bit weight as the kernels load them. Those that a format lacks are the scales again, unread."""

    codes: Tensor  # int16 [E, O, 16 J]: units
    scale: Tensor  # int32 [E, O, J]: the scales of a block in one word; single bytes would be loaded without prefetching
    minimum: Tensor  # int32 [E, O, J]
    global_scale: Tensor  # float32 [E, P]


def _kernel_weight(weight: FourbitTensor) -> _KernelWeight:
    codes = weight.codes.view(torch.int16)
    scale = weight.scale.view(torch.int32)
    if isinstance(weight, Nvfp4Tensor):
        return _KernelWeight(codes, scale, scale, weight.global_scale)
    minimum = scale if weight.minimum is None else weight.minimum.view(torch.int32)
    return _KernelWeight(codes, scale, minimum, scale)


def _constants(x: Tensor, weight: FourbitTensor, tiles: Tiles, uses_ptx: bool, joins: bool | None) -> dict[str, int | bool]:
    """The kernels' constants.

    JOINED, unless `joins` says otherwise: on cards whose products run asynchronously. `mma.sync`, on other cards, wants the
    joined factor in another order, which would take a detour through shared memory.
    """
    return {
        "FORMAT": format_of(weight),
        "PARTS": weight.global_scale.shape[-1] if isinstance(weight, Nvfp4Tensor) else 1,
        "PTX": uses_ptx and x.is_cuda and x.dtype == torch.bfloat16,
        "JOINED": select_card(x.device).has_shared_products if joins is None else joins,
        "EVEN": x.shape[1] % tiles.inner == 0,
        "BLOCK_T": tiles.tokens,
        "BLOCK_F": tiles.features,
        "BLOCK_J": tiles.inner // BLOCK,
    }


def format_of(weight: FourbitTensor) -> int:
    """Returns the kernels' constant FORMAT of a weight."""
    if isinstance(weight, Nvfp4Tensor):
        return int(_NVFP4.value)
    return int((_INT4 if weight.minimum is None else _INT4_MINIMUM).value)


@triton.jit
def _gate_up_fourbit(
    x, order, ends, codes, scale, minimum, global_scale, out, D, F, J, K: tl.constexpr,
    FORMAT: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr, JOINED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_J: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GELU(gate) * up of one expert's tokens, for one tile of features."""
    _pdl_wait(PDL)
    expert = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(2)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    row = tl.arange(0, BLOCK_F)
    feature = tl.minimum(tile * (BLOCK_F // 2) + row // 2, F - 1)  # gate and up of a feature are neighbours
    matrix_row = (row % 2) * F + feature
    weight_row = expert * 2 * F + matrix_row
    for start in range(begin + tl.program_id(0) * BLOCK_T, end, tl.num_programs(0) * BLOCK_T):
        pair = start + tl.arange(0, BLOCK_T)
        mask_t = pair < end
        token = tl.load(order + pair, mask=mask_t, other=0).to(tl.int64) // K
        acc = _multiply(x + token[None, :] * D, codes, scale, minimum, weight_row, D, J,
                        FORMAT, PTX, JOINED, EVEN, BLOCK_T, BLOCK_F, BLOCK_J)  # fmt: skip
        acc = acc * _row_scale(global_scale, expert, matrix_row, 2 * F, FORMAT, PARTS, PTX)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_F // 2, 2, BLOCK_T)), (0, 2, 1)))
        inner = _gelu(gate) * up
        out_feature = tile * (BLOCK_F // 2) + tl.arange(0, BLOCK_F // 2)
        out_ptr = out + pair[None, :].to(tl.int64) * F + out_feature[:, None]
        tl.store(out_ptr, inner.to(out.dtype.element_ty), mask=mask_t[None, :] & (out_feature < F)[:, None])


@triton.jit
def _down_fourbit(
    h, order, ends, codes, scale, minimum, global_scale, router_weights, out, D, F, J,
    FORMAT: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr, JOINED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_J: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The down product of one expert's tokens, times the router's weights, stored in token order."""
    _pdl_wait(PDL)
    expert = tl.program_id(1).to(tl.int64)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    out_feature = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    feature = tl.minimum(out_feature, D - 1)
    weight_row = expert * D + feature
    for start in range(begin + tl.program_id(0) * BLOCK_T, end, tl.num_programs(0) * BLOCK_T):
        sorted_pair = start + tl.arange(0, BLOCK_T)
        mask_t = sorted_pair < end
        pair = tl.load(order + sorted_pair, mask=mask_t, other=0).to(tl.int64)
        h_row = tl.minimum(sorted_pair, end - 1).to(tl.int64)
        acc = _multiply(h + h_row[None, :] * F, codes, scale, minimum, weight_row, F, J,
                        FORMAT, PTX, JOINED, EVEN, BLOCK_T, BLOCK_F, BLOCK_J)  # fmt: skip
        acc = acc * _row_scale(global_scale, expert, feature, D, FORMAT, PARTS, PTX)[:, None]
        acc = acc * tl.load(router_weights + pair, mask=mask_t, other=0.0)[None, :]
        out_ptr = out + pair[None, :] * D + out_feature[:, None]
        tl.store(out_ptr, acc.to(out.dtype.element_ty), mask=mask_t[None, :] & (out_feature < D)[:, None])


@triton.jit
def _multiply(
    x_row, codes, scale, minimum, weight_row, INPUTS, J,
    FORMAT: tl.constexpr, PTX: tl.constexpr, JOINED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The product of some rows of a weight with some tokens, [BLOCK_F, BLOCK_T]. `_row_scale` completes it.

    Rows and tokens past the end repeat others and are not stored, so only the last blocks of inputs are masked. EVEN: all
    blocks are whole. JOINED: the four factors become one, and tensor cores start on it before all of it is converted.
    """
    unit = tl.arange(0, BLOCK_J * _UNITS)
    block = tl.arange(0, BLOCK_J)
    codes_ptr = codes + weight_row[:, None] * (J * _UNITS) + unit[None, :]
    scale_ptr = scale + weight_row[:, None] * J + block[None, :]
    minimum_ptr = minimum + weight_row[:, None] * J + block[None, :]
    acc = tl.zeros((BLOCK_F, BLOCK_T), tl.float32)
    for j in range(0, J, BLOCK_J):
        mask_u = None if EVEN else (unit < (J - j) * _UNITS)[None, :]
        mask_j = None if EVEN else (block < J - j)[None, :]
        q = tl.load(codes_ptr + j * _UNITS, mask=mask_u, other=None if EVEN else 0)
        s = tl.load(scale_ptr + j, mask=mask_j, other=None if EVEN else 0)
        m = s
        if FORMAT == _INT4_MINIMUM:
            m = tl.load(minimum_ptr + j, mask=mask_j, other=None if EVEN else 0)
        if PTX:
            if FORMAT == _NVFP4:
                w0, w1, w2, w3 = _convert_nvfp4(q, s)
            else:
                w0, w1, w2, w3 = _convert_int4(q, s, m, FORMAT)
        else:
            dtype: tl.constexpr = x_row.dtype.element_ty
            w0 = _convert_plainly(q, s, m, 0, FORMAT).to(dtype)
            w1 = _convert_plainly(q, s, m, 1, FORMAT).to(dtype)
            w2 = _convert_plainly(q, s, m, 2, FORMAT).to(dtype)
            w3 = _convert_plainly(q, s, m, 3, FORMAT).to(dtype)
        if JOINED:
            w = tl.join(tl.join(w0, w2), tl.join(w1, w3))
            w = tl.permute(tl.reshape(w, (BLOCK_F, BLOCK_J, _UNITS, 4)), (0, 1, 3, 2))
            x = _load_inputs(x_row, tl.arange(0, BLOCK_J * _BLOCK)[:, None] + j * _BLOCK, INPUTS, EVEN)
            acc = tl.dot(tl.reshape(w, (BLOCK_F, BLOCK_J * _BLOCK)), x, acc, input_precision="ieee")
        else:
            k = (unit // _UNITS * _BLOCK + unit % _UNITS)[:, None] + j * _BLOCK
            acc = tl.dot(w0, _load_inputs(x_row, k, INPUTS, EVEN), acc, input_precision="ieee")
            acc = tl.dot(w1, _load_inputs(x_row, k + _UNITS, INPUTS, EVEN), acc, input_precision="ieee")
            acc = tl.dot(w2, _load_inputs(x_row, k + 2 * _UNITS, INPUTS, EVEN), acc, input_precision="ieee")
            acc = tl.dot(w3, _load_inputs(x_row, k + 3 * _UNITS, INPUTS, EVEN), acc, input_precision="ieee")
    return acc


@triton.jit
def _load_inputs(x_row, k, INPUTS, EVEN: tl.constexpr):
    """The inputs k, a column, of tokens, a row of pointers."""
    return tl.load(x_row + k) if EVEN else tl.load(x_row + k, mask=k < INPUTS, other=0.0)


@triton.jit
def _row_scale(global_scale, expert, matrix_row, rows, FORMAT: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr):
    """The factor of each row's sum: the global scale of its part, and the power of two that the conversion left out."""
    if FORMAT == _NVFP4:
        part = matrix_row * PARTS // rows
        return tl.load(global_scale + expert * PARTS + part) * (2.0**119 if PTX else 1.0)
    return tl.full(matrix_row.shape, 2.0**33 if PTX else 1.0, tl.float32)


@triton.jit
def _spread(words, UNITS_OF_TILE: tl.constexpr):
    """Repeats the number of each block for its units: [O, J] to [O, 16 J]."""
    rows: tl.constexpr = words.shape[0]
    blocks: tl.constexpr = words.shape[1]
    return tl.reshape(tl.broadcast_to(words[:, :, None], (rows, blocks, _UNITS)), (rows, UNITS_OF_TILE))


@triton.jit
def _convert_plainly(q, s, m, INDEX: tl.constexpr, FORMAT: tl.constexpr):
    """One of the four factors of a tile in float32: units q, words of scales s and of minimums m."""
    units: tl.constexpr = q.shape[1]
    if FORMAT == _NVFP4:
        value = _float_of_bits((q.to(tl.int32) >> (3 * INDEX)) & 7, 22, 126, 2, 0.5)
        is_negative = (q.to(tl.int32) >> (12 + (INDEX ^ 1))) & 1
        value = tl.where(is_negative != 0, -value, value)
        byte = (s >> (8 * INDEX)) & 127
        return value * _spread(_float_of_bits(byte, 20, 120, 8, 0.001953125), units)
    code = ((q.to(tl.int32) >> (4 * INDEX)) & 15).to(tl.float32)
    half: tl.constexpr = 16 * (INDEX // 2)
    factor = _spread(((s >> half) << 16).to(tl.float32, bitcast=True), units)
    if FORMAT == _INT4_MINIMUM:
        return code * factor + _spread(((m >> half) << 16).to(tl.float32, bitcast=True), units)
    return (code - 8) * factor


@triton.jit
def _float_of_bits(bits, SHIFT: tl.constexpr, BIAS: tl.constexpr, SUBNORMALS: tl.constexpr, STEP: tl.constexpr):
    """The float32 of a smaller float's bits without sign. The first numbers, subnormals, are multiples of STEP."""
    normal = ((bits << SHIFT) + (BIAS << 23)).to(tl.float32, bitcast=True)
    return tl.where(bits < SUBNORMALS, bits.to(tl.float32) * STEP, normal)


# The conversions in PTX. A register holds two 16-bit numbers: two units, or two bf16 numbers. Small integers and the bits of
# small floats are subnormal bf16 numbers as they are; a multiplication by a scale times a power of two makes them weights.
# `fma` is used for products too: sm_80 has no `mul` for bf16.

# Four e4m3 scales in a word: their bits are scale * 2^-120. Results: scales 0 and 2, scales 1 and 3, times 2^7.
_SCALES_NVFP4 = tl.constexpr("""{
    .reg .b32 first, second, factor, zero;
    mov.b32 factor, 0x7F007F00;
    mov.b32 zero, 0x80008000;
    and.b32 first, $2, 0x00FF00FF;
    shl.b32 first, first, 4;
    fma.rn.bf16x2 $0, first, factor, zero;
    shr.b32 second, $2, 4;
    and.b32 second, second, 0x0FF00FF0;
    fma.rn.bf16x2 $1, second, factor, zero;
}""")
# The four factors of units $1 with scales $2: sign and magnitude are moved to their bits of a bf16 number, value * 2^-126.
_NVFP4_0 = tl.constexpr("""{
    .reg .b32 bits, sign, zero;
    mov.b32 zero, 0x80008000;
    shl.b32 sign, $1, 2;
    and.b32 sign, sign, 0x80008000;
    shl.b32 bits, $1, 6;
    lop3.b32 bits, bits, 0x01C001C0, sign, 0xEA;
    fma.rn.bf16x2 $0, bits, $2, zero;
}""")
_NVFP4_1 = tl.constexpr("""{
    .reg .b32 bits, zero;
    mov.b32 zero, 0x80008000;
    shl.b32 bits, $1, 3;
    and.b32 bits, bits, 0x81C081C0;
    fma.rn.bf16x2 $0, bits, $2, zero;
}""")
_NVFP4_2 = tl.constexpr("""{
    .reg .b32 bits, zero;
    mov.b32 zero, 0x80008000;
    and.b32 bits, $1, 0x81C081C0;
    fma.rn.bf16x2 $0, bits, $2, zero;
}""")
_NVFP4_3 = tl.constexpr("""{
    .reg .b32 bits, sign, zero;
    mov.b32 zero, 0x80008000;
    shl.b32 sign, $1, 1;
    and.b32 sign, sign, 0x80008000;
    shr.b32 bits, $1, 3;
    lop3.b32 bits, bits, 0x01C001C0, sign, 0xEA;
    fma.rn.bf16x2 $0, bits, $2, zero;
}""")
# Two bf16 numbers times a power of two.
_TIMES = "{{ .reg .b32 factor, zero; mov.b32 factor, {0}; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, factor, zero; }}"
_TIMES_2_100 = tl.constexpr(_TIMES.format("0x71807180"))
_TIMES_2_MINUS_4 = tl.constexpr(_TIMES.format("0x3D803D80"))
_TIMES_2_MINUS_33 = tl.constexpr(_TIMES.format("0x2F002F00"))
_TIMES_MINUS_2_MINUS_130 = tl.constexpr(_TIMES.format("0x80088008"))
# The four factors of units $1 with scales $2 and minimums $3: a code is code * 2^-133 in the lowest nibble, code * 2^-129 in
# the next one.
_INT4_0 = tl.constexpr("{ .reg .b32 code; and.b32 code, $1, 0x000F000F; fma.rn.bf16x2 $0, code, $2, $3; }")
_INT4_1 = tl.constexpr("{ .reg .b32 code; and.b32 code, $1, 0x00F000F0; fma.rn.bf16x2 $0, code, $2, $3; }")
_INT4_2 = tl.constexpr("""{
    .reg .b32 code;
    shr.b32 code, $1, 8;
    and.b32 code, code, 0x000F000F;
    fma.rn.bf16x2 $0, code, $2, $3;
}""")
_INT4_3 = tl.constexpr("""{
    .reg .b32 code;
    shr.b32 code, $1, 8;
    and.b32 code, code, 0x00F000F0;
    fma.rn.bf16x2 $0, code, $2, $3;
}""")


@triton.jit
def _convert_nvfp4(q, s):
    """The four factors of a tile, bf16, times 2^-119: units q, words of scales s.

    Exact: code times scale is a multiple of 2^-10 with 6 significant bits, and bf16 has multiples of 2^-133.
    """
    first, second = tl.inline_asm_elementwise(
        _SCALES_NVFP4, "=r,=r,r", [s], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )
    w0 = _pairs_times_scale(_NVFP4_0, q, first)
    w1 = _pairs_times_scale(_NVFP4_1, q, second)
    w2 = _pairs_times_scale(_NVFP4_2, q, first >> 16)
    w3 = _pairs_times_scale(_NVFP4_3, q, second >> 16)
    return w0, w1, w2, w3


@triton.jit
def _pairs_times_scale(ASSEMBLY: tl.constexpr, q, s):
    """Units q and the scales in the low halves of words s."""
    scale = _spread(s.to(tl.int16), q.shape[1])
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r", [q, scale], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _convert_int4(q, s, m, FORMAT: tl.constexpr):
    """The four factors of a tile, bf16, times 2^-33: units q, words of scales s and of minimums m. Rounded once."""
    low = tl.inline_asm_elementwise(_TIMES_2_100, "=r,r", [s], dtype=tl.int32, is_pure=True, pack=1)
    high = tl.inline_asm_elementwise(_TIMES_2_MINUS_4, "=r,r", [low], dtype=tl.int32, is_pure=True, pack=1)
    if FORMAT == _INT4_MINIMUM:
        least = tl.inline_asm_elementwise(_TIMES_2_MINUS_33, "=r,r", [m], dtype=tl.int32, is_pure=True, pack=1)
    else:
        least = tl.inline_asm_elementwise(_TIMES_MINUS_2_MINUS_130, "=r,r", [low], dtype=tl.int32, is_pure=True, pack=1)
    w0 = _pairs_times_scale_plus(_INT4_0, q, low, least)
    w1 = _pairs_times_scale_plus(_INT4_1, q, high, least)
    w2 = _pairs_times_scale_plus(_INT4_2, q, low >> 16, least >> 16)
    w3 = _pairs_times_scale_plus(_INT4_3, q, high >> 16, least >> 16)
    return w0, w1, w2, w3


@triton.jit
def _pairs_times_scale_plus(ASSEMBLY: tl.constexpr, q, s, m):
    """Units q, and the scales and minimums in the low halves of words s and m."""
    scale = _spread(s.to(tl.int16), q.shape[1])
    minimum = _spread(m.to(tl.int16), q.shape[1])
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r", [q, scale, minimum], dtype=tl.bfloat16, is_pure=True, pack=2)
