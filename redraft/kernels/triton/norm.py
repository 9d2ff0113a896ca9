"""What stands between the products of a layer: residual sums and the norms around them, a token at a time.

References: `Layer.forward` in `model.py`, made of `kernels/norm.py`. Shapes: N tokens, D model size, K experts per token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels.fp8 import Fp8Tensor
from redraft.kernels.triton.fp8 import _store_packed, empty_fp8
from redraft.kernels.triton.pdl import pdl_options, pdl_wait


def rms_norm(x_ND: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    """x over its root mean square, times the weight where there is one."""
    out_ND, (n, size) = torch.empty_like(x_ND), x_ND.shape
    weighted = weight_D is not None
    _rms_norm[(n,)](x_ND, weight_D if weighted else x_ND, out_ND, size, weighted, eps, **_wide(size), **pdl_options())
    return out_ND


def add_attention_and_norm(
    x_ND: Tensor,
    answer_ND: Tensor,
    post_D: Tensor,
    dense_D: Tensor,
    sparse_D: Tensor,
    router_D: Tensor,
    eps: float,
    packs: bool = False,
) -> tuple[Tensor, Tensor | Fp8Tensor, Tensor | Fp8Tensor, Tensor]:
    """The residual with attention's answer in it, and its norms for the dense MLP, for the experts and for the router.

    `packs`: those for dense MLP and experts are rounded to 8 bits on the way.
    """
    n, size = x_ND.shape
    out_ND, router_ND = torch.empty_like(x_ND), torch.empty_like(x_ND)
    dense, sparse = (_room(x_ND, packs) for _ in range(2))
    _add_attention_and_norm[(n,)](
        x_ND, answer_ND, post_D, dense_D, sparse_D, router_D, out_ND, *_both(dense), *_both(sparse), router_ND,
        size, eps, size**-0.5, packs, **_wide(size), **pdl_options(),
    )  # fmt: skip
    return out_ND, dense, sparse, router_ND


def add_mlp_and_norm(
    x_ND: Tensor,
    dense_ND: Tensor,
    answers_NKD: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    scalars: tuple[Tensor, Tensor],
    causal: int,
    next_D: Tensor,
    eps: float,
    packs: bool = False,
) -> tuple[Tensor, Tensor | Fp8Tensor]:
    """The residual with both answers in it, experts summed, and its norm for whoever comes next.

    `weights` are those behind the dense MLP, behind the experts, and behind their sum. The first `causal` tokens end with
    the first scalar, the others with the second. `packs`: that norm is rounded to 8 bits on the way.
    """
    out_ND, following, (n, chosen, size) = torch.empty_like(x_ND), _room(x_ND, packs), answers_NKD.shape
    _add_mlp_and_norm[(n,)](
        x_ND, dense_ND, answers_NKD, *weights, *scalars, next_D, out_ND, *_both(following),
        causal, size, chosen, eps, packs, **_wide(size), **pdl_options(),
    )  # fmt: skip
    return out_ND, following


def _room(x_ND: Tensor, packs: bool) -> Tensor | Fp8Tensor:
    return empty_fp8(*x_ND.shape, x_ND.device) if packs else torch.empty_like(x_ND)


def _both(found: Tensor | Fp8Tensor) -> tuple[Tensor, Tensor]:
    """Where numbers go, and where scales do; without scales, the second is not looked at."""
    return found if isinstance(found, Fp8Tensor) else (found, found)


def _wide(size: int) -> dict[str, int]:
    wide = triton.next_power_of_2(size)
    return {"WIDE": wide, "num_warps": 4 if wide <= 2048 else 8}


@triton.jit
def _unit(x, D, EPS):
    """Over the root mean square of D numbers; the rest are zeros."""
    return x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + EPS))


@triton.jit
def _rms_norm(x, weight, out, D, WEIGHTED: tl.constexpr, EPS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr):
    pdl_wait(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    here = at < D
    value = _unit(tl.load(x + row * D + at, mask=here, other=0.0).to(tl.float32), D, EPS)
    if WEIGHTED:
        value = value * tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * D + at, value.to(out.dtype.element_ty), mask=here)


@triton.jit
def _add_attention_and_norm(
    x, answer, post, dense, sparse, router, out, dense_out, dense_scale, sparse_out, sparse_scale, router_out,
    D, EPS: tl.constexpr, SHRINK, PACKS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    here, place = at < D, row * D + at
    kind = out.dtype.element_ty
    read = _unit(tl.load(answer + place, mask=here, other=0.0).to(tl.float32), D, EPS)
    read = (read * tl.load(post + at, mask=here, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    value = (tl.load(x + place, mask=here, other=0.0).to(tl.float32) + read).to(kind)
    tl.store(out + place, value, mask=here)
    unit = _unit(value.to(tl.float32), D, EPS)
    to_dense = (unit * tl.load(dense + at, mask=here, other=0.0).to(tl.float32)).to(kind)
    to_sparse = (unit * tl.load(sparse + at, mask=here, other=0.0).to(tl.float32)).to(kind)
    if PACKS:
        _store_packed(to_dense.to(tl.float32), dense_out, dense_scale, row, at, D)
        _store_packed(to_sparse.to(tl.float32), sparse_out, sparse_scale, row, at, D)
    else:
        tl.store(dense_out + place, to_dense, mask=here)
        tl.store(sparse_out + place, to_sparse, mask=here)
    scale = tl.load(router + at, mask=here, other=0.0).to(tl.float32) * SHRINK
    tl.store(router_out + place, (unit * scale).to(kind), mask=here)


@triton.jit
def _add_mlp_and_norm(
    x, dense, answers, dense_weight, sparse_weight, post, first, second, next_weight, out, next_out, next_scale,
    CAUSAL, D, K: tl.constexpr, EPS: tl.constexpr, PACKS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    here, place = at < D, row * D + at
    kind = out.dtype.element_ty
    total = tl.zeros((WIDE,), tl.float32)
    for k in tl.static_range(K):
        total += tl.load(answers + (row * K + k) * D + at, mask=here, other=0.0).to(tl.float32)
    sparse = _unit(total.to(kind).to(tl.float32), D, EPS) * tl.load(sparse_weight + at, mask=here, other=0.0).to(tl.float32)
    both = _unit(tl.load(dense + place, mask=here, other=0.0).to(tl.float32), D, EPS)
    both = both * tl.load(dense_weight + at, mask=here, other=0.0).to(tl.float32)
    both = _unit((both + sparse).to(kind).to(tl.float32), D, EPS) * tl.load(post + at, mask=here, other=0.0).to(tl.float32)
    value = tl.load(x + place, mask=here, other=0.0).to(tl.float32) + both
    scalar = tl.where(row < CAUSAL, tl.load(first).to(tl.float32), tl.load(second).to(tl.float32))
    value = (value * scalar).to(kind)
    tl.store(out + place, value, mask=here)
    unit = _unit(value.to(tl.float32), D, EPS) * tl.load(next_weight + at, mask=here, other=0.0).to(tl.float32)
    if PACKS:
        _store_packed(unit.to(kind).to(tl.float32), next_out, next_scale, row, at, D)
    else:
        tl.store(next_out + place, unit.to(kind), mask=here)
