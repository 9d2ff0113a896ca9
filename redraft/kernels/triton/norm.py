"""Residual additions and RMS norms between the products of a layer, one token per program.

References: `Layer.forward` in `model/diffusion_gemma.py`, and `kernels/norm.py`.
Shapes: N tokens, D model size, K experts per token.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.fp8 import Fp8Tensor
from redraft.kernels.triton.fp8 import _store_quantized, data_and_scale, empty_fp8
from redraft.kernels.triton.pdl import _pdl_wait, pdl_options


def rms_norm(x_ND: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """Divides each token by its root mean square and multiplies by the weight."""
    n, size = x_ND.shape
    out_ND = torch.empty_like(x_ND)
    has_weight = weight_D is not None
    weight_or_x = weight_D if has_weight else x_ND  # without a weight the kernel does not read the argument
    _rms_norm[(n,)](x_ND, weight_or_x, out_ND, size, has_weight, eps, **_row_options(size), **pdl_options())
    return out_ND


def add_and_norm(x_ND: Tensor, added_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x + added, and its norm."""
    n, size = x_ND.shape
    sum_ND = torch.empty_like(x_ND)
    normed_ND = torch.empty_like(x_ND)
    _add_and_norm[(n,)](
        x_ND, added_ND, weight_D, sum_ND, normed_ND, size, eps, **_row_options(size), **pdl_options()
    )  # fmt: skip
    return sum_ND, normed_ND


def add_attention_and_norm(
    x_ND: Tensor,
    attention_ND: Tensor,
    post_D: Tensor,
    mlp_D: Tensor,
    experts_D: Tensor,
    router_D: Tensor,
    eps: float,
    mlp_to_fp8: bool = False,
    experts_to_fp8: bool = False,
) -> tuple[Tensor, Tensor | Fp8Tensor, Tensor | Fp8Tensor, Tensor]:
    """Adds the normed attention output to the residual and norms the sum for dense MLP, experts and router.

    Returns the new residual and the three norms. `mlp_to_fp8` and `experts_to_fp8` quantize the first and the second.
    """
    n, size = x_ND.shape
    out_ND = torch.empty_like(x_ND)
    router_ND = torch.empty_like(x_ND)
    mlp_in = _empty_rows(x_ND, mlp_to_fp8)
    experts_in = _empty_rows(x_ND, experts_to_fp8)
    _add_attention_and_norm[(n,)](
        x_ND, attention_ND, post_D, mlp_D, experts_D, router_D,
        out_ND, *data_and_scale(mlp_in), *data_and_scale(experts_in), router_ND,
        size, eps, size**-0.5, mlp_to_fp8, experts_to_fp8, **_row_options(size), **pdl_options(),
    )  # fmt: skip
    return out_ND, mlp_in, experts_in, router_ND


def add_mlp_and_norm(
    x_ND: Tensor,
    mlp_ND: Tensor,
    experts_NKD: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    scalars: tuple[Tensor, Tensor],
    causal: int,
    next_D: Tensor,
    eps: float,
    to_fp8: bool = False,
) -> tuple[Tensor, Tensor | Fp8Tensor]:
    """Adds the outputs of dense MLP and experts to the residual, and norms the result for the next layer.

    `weights` are the norms after the dense MLP, after the experts, and after their sum. The result is multiplied by the
    first scalar for the first `causal` tokens, by the second for the others. `to_fp8` quantizes the norm for the next layer.
    """
    n, chosen, size = experts_NKD.shape
    out_ND = torch.empty_like(x_ND)
    next_in = _empty_rows(x_ND, to_fp8)
    _add_mlp_and_norm[(n,)](
        x_ND, mlp_ND, experts_NKD, *weights, *scalars, next_D, out_ND, *data_and_scale(next_in),
        causal, size, chosen, eps, to_fp8, **_row_options(size), **pdl_options(),
    )  # fmt: skip
    return out_ND, next_in


def _empty_rows(x_ND: Tensor, to_fp8: bool) -> Tensor | Fp8Tensor:
    return empty_fp8(x_ND.shape[0], x_ND.shape[1], x_ND.device) if to_fp8 else torch.empty_like(x_ND)


def _row_options(size: int) -> dict[str, Any]:
    """Returns the launch options of kernels that hold a whole row."""
    padded = triton.next_power_of_2(size)
    return {"D_PADDED": padded, "num_warps": 4 if padded <= 2048 else 8}


@triton.jit
def _divide_by_rms(x, D, EPS):
    """Divides D numbers by their root mean square. Numbers past the row's end must be 0."""
    return x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + EPS))


@triton.jit
def _rms_norm(x, weight, out, D, HAS_WEIGHT: tl.constexpr, EPS: tl.constexpr, D_PADDED: tl.constexpr, PDL: tl.constexpr):
    """One token."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, D_PADDED)
    mask = offs < D
    value = _divide_by_rms(tl.load(x + row * D + offs, mask=mask, other=0.0).to(tl.float32), D, EPS)
    if HAS_WEIGHT:
        value = value * tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * D + offs, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_and_norm(
    x, added, weight, sums, normed, D, EPS: tl.constexpr, D_PADDED: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One token. The sum is rounded before it is normed, as if it had been stored."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, D_PADDED)
    mask = offs < D
    value = tl.load(x + row * D + offs, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(added + row * D + offs, mask=mask, other=0.0).to(tl.float32)
    stored = value.to(sums.dtype.element_ty)
    tl.store(sums + row * D + offs, stored, mask=mask)
    value = _divide_by_rms(stored.to(tl.float32), D, EPS) * tl.load(weight + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row * D + offs, value.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _add_attention_and_norm(
    x, attention, post_weight, mlp_weight, moe_weight, router_weight,
    out, mlp_out, mlp_scale, moe_out, moe_scale, router_out,
    D, EPS: tl.constexpr, ROUTER_SCALE, MLP_TO_FP8: tl.constexpr, MOE_TO_FP8: tl.constexpr,
    D_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token. Sums and norms are rounded where the layers of the model round theirs."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, D_PADDED)
    mask = offs < D
    row_offs = row * D + offs
    dtype = out.dtype.element_ty
    update = _divide_by_rms(tl.load(attention + row_offs, mask=mask, other=0.0).to(tl.float32), D, EPS)
    update = (update * tl.load(post_weight + offs, mask=mask, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    value = (tl.load(x + row_offs, mask=mask, other=0.0).to(tl.float32) + update).to(dtype)
    tl.store(out + row_offs, value, mask=mask)
    normed = _divide_by_rms(value.to(tl.float32), D, EPS)
    mlp_in = (normed * tl.load(mlp_weight + offs, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    moe_in = (normed * tl.load(moe_weight + offs, mask=mask, other=0.0).to(tl.float32)).to(dtype)
    if MLP_TO_FP8:
        _store_quantized(mlp_in.to(tl.float32), mlp_out, mlp_scale, row, offs, D)
    else:
        tl.store(mlp_out + row_offs, mlp_in, mask=mask)
    if MOE_TO_FP8:
        _store_quantized(moe_in.to(tl.float32), moe_out, moe_scale, row, offs, D)
    else:
        tl.store(moe_out + row_offs, moe_in, mask=mask)
    scale = tl.load(router_weight + offs, mask=mask, other=0.0).to(tl.float32) * ROUTER_SCALE
    tl.store(router_out + row_offs, (normed * scale).to(dtype), mask=mask)


@triton.jit
def _add_mlp_and_norm(
    x, mlp, moe, mlp_weight, moe_weight, post_weight, causal_scalar, canvas_scalar, next_weight,
    out, next_out, next_scale,
    CAUSAL, D, K: tl.constexpr, EPS: tl.constexpr, TO_FP8: tl.constexpr, D_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token. The first CAUSAL tokens have another scalar than the canvas."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, D_PADDED)
    mask = offs < D
    row_offs = row * D + offs
    dtype = out.dtype.element_ty
    moe_sum = tl.zeros((D_PADDED,), tl.float32)
    for k in tl.static_range(K):
        moe_sum += tl.load(moe + (row * K + k) * D + offs, mask=mask, other=0.0).to(tl.float32)
    moe_sum = _divide_by_rms(moe_sum.to(dtype).to(tl.float32), D, EPS)
    moe_sum = moe_sum * tl.load(moe_weight + offs, mask=mask, other=0.0).to(tl.float32)
    update = _divide_by_rms(tl.load(mlp + row_offs, mask=mask, other=0.0).to(tl.float32), D, EPS)
    update = update * tl.load(mlp_weight + offs, mask=mask, other=0.0).to(tl.float32)
    update = _divide_by_rms((update + moe_sum).to(dtype).to(tl.float32), D, EPS)
    update = update * tl.load(post_weight + offs, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row_offs, mask=mask, other=0.0).to(tl.float32) + update
    scalar = tl.where(row < CAUSAL, tl.load(causal_scalar).to(tl.float32), tl.load(canvas_scalar).to(tl.float32))
    value = (value * scalar).to(dtype)
    tl.store(out + row_offs, value, mask=mask)
    normed = _divide_by_rms(value.to(tl.float32), D, EPS)
    normed = normed * tl.load(next_weight + offs, mask=mask, other=0.0).to(tl.float32)
    if TO_FP8:
        _store_quantized(normed.to(dtype).to(tl.float32), next_out, next_scale, row, offs, D)
    else:
        tl.store(next_out + row_offs, normed.to(dtype), mask=mask)
