"""Which kernels run, and why: Triton's where a GPU is, PyTorch's own elsewhere or where they are asked for.

And what a device computes in, where nobody says.
"""

import importlib.util
import logging
import os
from typing import NamedTuple

import torch

LOG = logging.getLogger("redraft")
MIN_SHARED_MEMORY = 200 * 1024  # bytes: attention's tiles
ENV_VARIABLE = "REDRAFT_KERNELS"  # "reference" forces PyTorch's

OPERATIONS = {  # and what runs them where our own kernels do
    "experts": "Triton: grouped products over sorted tokens, gate, up and GELU in one",
    "routing": "Triton: softmax, best experts, sort",
    "attention": "Triton: over caches where they lie, heads of any size",
    "norms, residuals, heads": "Triton: one kernel between two products",
    "vocabulary": "Triton: softcap, temperature, sample, best and entropy in one pass",
    "sampler": "Triton: acceptance, noise and the stop, on the device",
    "8-bit rounding": "Triton",
    "dense products": "cuBLAS",
}


def has_bf16(device: torch.device | str) -> bool:
    """Whether a device multiplies in bf16 by itself. A CPU that does not takes a hundred times as long as in float32."""
    if torch.device(device).type != "cpu":
        return True
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a build of torch that does not know
        return False


def select_dtype(device: torch.device | str, asked: torch.dtype | None = None) -> torch.dtype | None:
    """What to compute in: what is asked for; else as it is stored, None, or float32 where a CPU has no bf16."""
    if has_bf16(device):
        return asked
    if asked == torch.bfloat16:
        LOG.warning("this CPU does not multiply in bf16: in float32 it is a hundred times as fast")
    return asked or torch.float32


class Backend(NamedTuple):
    """The kernels that run on a device, and the reason for the choice."""

    uses_triton: bool  # the kernels of `kernels/triton`; else those of PyTorch
    reason: str


def select_backend(device: torch.device | str) -> Backend:
    """Chooses Triton or PyTorch kernels for a device. The environment variable REDRAFT_KERNELS overrides the choice."""
    requested = os.environ.get(ENV_VARIABLE, "")
    if requested not in ("", "reference", "triton"):
        raise ValueError(f"{ENV_VARIABLE} may be reference or triton, got {requested!r}")
    if requested == "reference":
        return Backend(False, f"{ENV_VARIABLE}=reference")
    if importlib.util.find_spec("triton") is None:
        return Backend(False, "Triton is not installed")
    if requested == "triton":
        return Backend(True, f"{ENV_VARIABLE}=triton")
    if torch.device(device).type != "cuda":
        return Backend(False, "no GPU")
    name = torch.cuda.get_device_name(device)
    shared_memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if shared_memory < MIN_SHARED_MEMORY:
        available = f"{name} has {shared_memory // 1024} KiB of shared memory per block"
        return Backend(False, f"{available}, the Triton kernels need {MIN_SHARED_MEMORY // 1024}")
    return Backend(True, name)
