"""torch._scaled_mm, the fp8 product of cuBLAS: whether a GPU runs it, and whether it is faster than our own kernel.

With scales by row it fails on some cards and drivers, so our kernel is the default. A process measures both at the first
product of each kind (device, shape of the weight, class of token counts), with the operands of that product, and keeps the
choice until it ends. cuBLAS must take at most 0.9 of the time, so that noise does not decide. Two processes may still choose
differently where the two are close; REDRAFT_FP8_PRODUCT=triton or scaled_mm fixes the choice.
Shapes: N tokens, D in, O out.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor

ENV_VARIABLE = "REDRAFT_FP8_PRODUCT"
TOKEN_CLASSES = (64, 512, 2**62)  # the largest number of tokens of each class
MAX_TIME = 0.9  # of our kernel's
MAX_DIFFERENCE = 2**-6  # of the largest number: bf16 results of two orders of summation differ by less
MAX_PROBED = 2**24  # numbers of a result: a probe holds two results, and those of the head would be large
REPETITIONS = 10
ROUNDS = 3

Product = Callable[[], Tensor]
_choices: dict[tuple[torch.device, torch.Size, int], bool] = {}


def prefers_scaled_mm(tokens: int, weight_OD: Tensor, ours: Product, scaled_mm: Product) -> bool:
    """Whether `scaled_mm` computes what `ours` does, in less time. Measures once per kind of product."""
    requested = os.environ.get(ENV_VARIABLE, "")
    if requested not in ("", "triton", "scaled_mm"):
        raise ValueError(f"{ENV_VARIABLE} may be triton or scaled_mm, got {requested!r}")
    if requested:
        return requested == "scaled_mm"
    token_class = next(largest for largest in TOKEN_CLASSES if tokens <= largest)
    key = (weight_OD.device, weight_OD.shape, token_class)
    if torch.cuda.is_current_stream_capturing():  # nothing can be timed now; the run before the capture has chosen
        return _choices.get(key, False)
    if key not in _choices:
        if tokens * len(weight_OD) > MAX_PROBED:
            return False  # a smaller product of this kind may still be measured
        _choices[key] = agrees(ours, scaled_mm) and measure(scaled_mm) <= MAX_TIME * measure(ours)
    return _choices[key]


def agrees(ours: Product, scaled_mm: Product) -> bool:
    """Whether scaled_mm runs on this GPU and gives our result up to rounding."""
    expected = ours()
    try:
        result = scaled_mm()
        torch.cuda.synchronize(expected.device)
    except RuntimeError:  # CUBLAS_STATUS_NOT_SUPPORTED, or a build without it
        return False
    return bool((result - expected).abs().max() <= MAX_DIFFERENCE * expected.abs().max())


def measure(product: Product) -> float:
    """Milliseconds of one product: the shortest of several rounds."""
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPETITIONS):
            product()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / REPETITIONS)
    return min(times)
