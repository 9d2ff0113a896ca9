"""Programmatic dependent launch (PDL): a kernel's start overlaps its predecessor's end, which hides the launch cost.

Needs Hopper or later. Every kernel first waits for the memory writes of its predecessor, then allows its successor to start.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def _supports_pdl() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def pdl_options() -> dict[str, Any]:
    """Returns the keyword arguments that every launch of a kernel passes."""
    return {"PDL": True, "launch_pdl": True} if _supports_pdl() else {"PDL": False}


@triton.jit
def _pdl_wait(PDL: tl.constexpr):
    """Waits until the preceding kernel's writes are visible, then lets the following kernel start."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
