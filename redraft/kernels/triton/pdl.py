"""Kernels that come up while the one before them ends: what a launch costs is hidden behind it (Hopper and later).

Every kernel waits first thing for all that was written before it, then lets the next one come up.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def _can() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def pdl_options() -> dict[str, Any]:
    """What a launch is told."""
    return {"PDL": True, "launch_pdl": True} if _can() else {"PDL": False}


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Until what came before has been written; the next kernel may come up then."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
