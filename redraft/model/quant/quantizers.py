"""Quantizers: a weight becomes NVFP4, int4 or fp8, by rounding to nearest. No calibration data is needed.

The scale of a 4-bit block is searched: every candidate is rounded to the precision in which it is stored, then codes are
chosen, and the candidate with the least squared error wins. The scale that fits the largest number of a block is among the
candidates, so a search is never worse than it. Shapes: O rows, I inputs, K blocks of inputs that share a scale, G inputs of
a block.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.kernels import int4, nvfp4
from redraft.kernels.fp8 import FP8_DTYPE, FP8_MAX, quantize
from redraft.kernels.int4 import Int4Tensor
from redraft.kernels.nibbles import BLOCK, pack_e2m1, pack_nibbles
from redraft.kernels.nvfp4 import E2M1, Nvfp4Tensor
from redraft.kernels.packed import PackedTensor, dequantize_packed

FP8_SCALE_DTYPE = torch.bfloat16  # as published
SMALLEST_E4M3 = 2.0**-9
SMALLEST_AMAX = 1e-30  # a matrix of zeros has a global scale too
# The largest number of a block is mapped to these numbers of e2m1, whose own largest is 6. A tie goes to the first.
NVFP4_TARGETS = (7.32, 6.6, 6.0, 5.4, 4.8, 4.2, 4.0)
# The same for integers from -8 to 7. 7 and 8 are among them, so that weights which are rounded already stay as they are.
INT4_TARGETS = (7.0, 7.075, 7.5, 8.0, 8.52, 9.15, 9.87)
RANGE_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of a block's range, for int4 with a minimum
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours of e2m1


def e2m1_codes(numbers: Tensor) -> Tensor:
    """Rounds float32 numbers to e2m1 and returns their codes, uint8. A tie goes to the even code; large numbers become 6.

    A negative number that rounds to zero keeps its sign, as in compressed-tensors and ModelOpt.
    """
    midpoints = torch.tensor(_MIDPOINTS, device=numbers.device)
    # A number is above boundary i exactly if its code is above i. Where the tie goes up, the boundary is just below it.
    boundaries = midpoints.clone()
    boundaries[1::2] = torch.nextafter(midpoints[1::2], torch.zeros_like(midpoints[1::2]))
    codes = torch.bucketize(numbers.abs(), boundaries, out_int32=True).to(torch.uint8)
    return codes | (numbers < 0).to(torch.uint8) << 3


class _Rounded(NamedTuple):
    """One candidate: what the blocks become with it."""

    codes: Tensor  # uint8 [..., K, G]
    fields: tuple[Tensor, ...]  # scale, and minimum if there is one, [..., K]
    numbers: Tensor  # float32 [..., K, G]


def _search(
    blocks: Tensor, candidates: tuple[float, ...], round_with: Callable[[float], _Rounded]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns codes and fields: block by block those of the candidate with the least squared error."""
    codes, fields, numbers = round_with(candidates[0])
    least = numbers.sub_(blocks).square_().sum(dim=-1)
    for candidate in candidates[1:]:
        rounded = round_with(candidate)
        error = rounded.numbers.sub_(blocks).square_().sum(dim=-1)
        is_better = error < least
        least = torch.where(is_better, error, least)
        codes = torch.where(is_better[..., None], rounded.codes, codes)
        fields = tuple(torch.where(is_better, new, old) for new, old in zip(rounded.fields, fields, strict=True))
    return codes, fields


def _to_blocks(weight: Tensor, group: int) -> Tensor:
    """Returns float32 blocks [..., O, K, G]. The inputs are filled with zeros to a multiple of 64, as packed tensors are."""
    padded = F.pad(weight.float(), (0, -weight.shape[-1] % BLOCK)).contiguous()  # weights may be stored by columns
    return padded.unflatten(-1, (-1, group))


def _clear_padding(scale: Tensor, inputs: int, group: int) -> Tensor:
    """Packed tensors have scale 0 where a block holds no input."""
    used = -(-inputs // group)
    scale[..., used:] = 0
    return scale


def quantize_nvfp4(weight: Tensor, parts: int = 1, *, search: bool = True) -> Nvfp4Tensor:
    """Quantizes matrices [..., O, I]. The parts of a matrix share one global scale, which vLLM asks of gate and up.

    Without a search, the largest number of every block becomes 6: the codes of ModelOpt's and compressed-tensors' rule.
    """
    inputs = weight.shape[-1]
    blocks = _to_blocks(weight, nvfp4.GROUP)
    amax = blocks.abs().amax(dim=-1)
    # As compressed-tensors computes it: the reciprocal of the global scale.
    reciprocal = FP8_MAX * E2M1[-1] / amax.amax(dim=(-1, -2)).clamp(min=SMALLEST_AMAX)
    values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=weight.device)

    def round_with(target: float) -> _Rounded:
        wished = reciprocal[..., None, None] * (amax / target)
        scale = wished.clamp(SMALLEST_E4M3, FP8_MAX).to(FP8_DTYPE).float()
        step = (scale / reciprocal[..., None, None])[..., None]
        codes = e2m1_codes(blocks / step)
        return _Rounded(codes, (scale,), values[codes.int()] * step)

    codes, fields = _search(blocks, NVFP4_TARGETS if search else (E2M1[-1],), round_with)
    scale = _clear_padding(fields[0], inputs, nvfp4.GROUP).to(FP8_DTYPE)
    global_scale = (1 / reciprocal)[..., None].repeat_interleave(parts, dim=-1)
    return Nvfp4Tensor(pack_e2m1(codes.flatten(-2)[..., :inputs]), scale, global_scale)


def quantize_int4(
    weight: Tensor, *, with_minimum: bool = False, with_zero_points: bool = False, search: bool = True
) -> Int4Tensor:
    """Quantizes matrices [..., O, I] to 4-bit integers. Scale and minimum are rounded to bf16 before codes are chosen.

    With zero points, the code of 0 is a whole number in every block, as compressed-tensors stores minimums.
    """
    inputs = weight.shape[-1]
    blocks = _to_blocks(weight, int4.GROUP)
    if with_minimum:
        low = blocks.amin(dim=-1)
        high = blocks.amax(dim=-1)
        if with_zero_points:  # 0 is among the numbers of every block
            low = low.clamp(max=0)
            high = high.clamp(min=0)
        candidates: tuple[float, ...] = RANGE_SHARES
    else:
        amax = blocks.abs().amax(dim=-1)
        candidates = INT4_TARGETS

    def round_symmetric(target: float) -> _Rounded:
        scale = (amax / target).clamp(min=SMALLEST_AMAX).bfloat16().float()
        steps = (blocks / scale[..., None]).round_().clamp_(-int4.ZERO, int4.ZERO - 1)
        return _Rounded((steps + int4.ZERO).to(torch.uint8), (scale,), steps * scale[..., None])

    def round_range(share: float) -> _Rounded:
        cut = (high - low) * ((1 - share) / 2)
        minimum = (low + cut).bfloat16().float()
        scale = ((high - cut - minimum) / 15).clamp(min=SMALLEST_AMAX).bfloat16().float()
        if with_zero_points:
            minimum = (-(-minimum / scale).round().clamp(0, 15) * scale).bfloat16().float()
        steps = ((blocks - minimum[..., None]) / scale[..., None]).round_().clamp_(0, 15)
        return _Rounded(steps.to(torch.uint8), (scale, minimum), steps * scale[..., None] + minimum[..., None])

    round_with = round_range if with_minimum else round_symmetric
    plain = 1.0 if with_minimum else 7.5
    codes, fields = _search(blocks, candidates if search else (plain,), round_with)
    return Int4Tensor(
        pack_nibbles(codes.flatten(-2)[..., :inputs]),
        *(_clear_padding(field, inputs, int4.GROUP).bfloat16() for field in fields),
    )


def quantize_weight(weight: Tensor, to: str, parts: int = 1) -> PackedTensor:
    """Quantizes matrices [..., O, I] to "nvfp4", "int4" or "fp8"."""
    if to == "nvfp4":
        return quantize_nvfp4(weight, parts)
    if to == "int4":
        return quantize_int4(weight)
    assert to == "fp8", to
    return quantize(weight, FP8_SCALE_DTYPE)


class RoundingError(NamedTuple):
    """What rounding did to some matrices, as sums, so that parts of a stack can be added up."""

    squares: Tensor  # of the weights
    errors: Tensor  # squared
    largest_block: Tensor  # the largest relative error of a block

    def __add__(self, other: object) -> "RoundingError":
        assert isinstance(other, RoundingError)
        largest = torch.maximum(self.largest_block, other.largest_block)
        return RoundingError(self.squares + other.squares, self.errors + other.errors, largest)

    @property
    def relative(self) -> float:
        """The root of the mean squared error, relative to the weights'."""
        return float((self.errors / self.squares.clamp(min=SMALLEST_AMAX)).sqrt())


def measure_error(weight: Tensor, packed: PackedTensor) -> RoundingError:
    """Compares matrices [..., O, I] with what they became. Blocks of fp8 are whole rows."""
    inputs = weight.shape[-1]
    group = {Nvfp4Tensor: nvfp4.GROUP, Int4Tensor: int4.GROUP}.get(type(packed), inputs)
    fill = (0, -inputs % group)
    weight = F.pad(weight.float(), fill).unflatten(-1, (-1, group))
    rounded = F.pad(dequantize_packed(packed, inputs), fill).view_as(weight)
    errors = (rounded - weight).square_().sum(dim=-1)
    squares = weight.square().sum(dim=-1)
    largest = (errors / squares.clamp(min=SMALLEST_AMAX)).amax().sqrt()
    return RoundingError(squares.sum(dtype=torch.float64), errors.sum(dtype=torch.float64), largest.double())
