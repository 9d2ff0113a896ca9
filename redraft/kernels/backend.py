"""Backend selection: Triton kernels on a GPU, PyTorch elsewhere; the device that a user names, and the dtype on it.

The tile sizes of the Triton kernels follow the card: its architecture and its shared memory per block.
"""

import importlib.util
import logging
import os
import platform
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

LOG = logging.getLogger("redraft")
ENV_VARIABLE = "REDRAFT_KERNELS"  # "reference" or "triton" overrides the choice
SHARED_MEMORY_VARIABLE = "REDRAFT_SHARED_MEMORY"  # KiB per block: forces smaller tiles
KIB = 1024
MIN_ARCHITECTURE = 80  # the first with bf16
SMALLEST_LIMIT = 99 * KIB  # bytes per block on an RTX 3090, 4090 or 5090: every kernel has tiles that fit

OPERATIONS = {  # each operation, and the kernels that run it with the Triton backend
    "experts": "Triton: grouped products over sorted tokens, gate, up and GELU in one",
    "routing": "Triton: softmax, best experts, sort",
    "attention": "Triton: over caches in place, any head size",
    "norms, residuals, heads": "Triton: one kernel between two products",
    "vocabulary": "Triton: softcap, temperature, sample, argmax and entropy in one pass",
    "sampler": "Triton: acceptance, noise and the stopping test on the device",
    "fp8 quantization": "Triton",
    "fp8 products": "Triton, or torch._scaled_mm",
    "other dense products": "cuBLAS",
}


def select_device(asked: torch.device | str | None) -> torch.device:
    """The device that a user asked for, with its index; without a name, a GPU if there is one, which becomes the current."""
    has_gpu = torch.cuda.is_available()
    try:
        device = torch.device(asked if asked is not None else "cuda" if has_gpu else "cpu")
    except RuntimeError:
        raise ValueError(f"{asked!r} is not a device; try cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"redraft runs on cpu and cuda, not on {str(device)!r}")
    if device.type == "cuda":
        if not has_gpu or (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"there is no {str(device)!r} here: {torch.cuda.device_count()} GPUs found; try cpu")
        if device.index is None:  # "cuda" is the current one; torch.cuda.set_device and CUDA graphs want its index
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)  # kernels, streams and graphs go where the model is
    return device


def use_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside the block it is the current device of this thread. Kernels, streams and graphs go to the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def has_bf16(device: torch.device | str) -> bool:
    """Whether the device multiplies bf16 in hardware. A CPU that emulates bf16 is a hundred times slower than in float32."""
    if torch.device(device).type != "cpu":
        return True
    try:
        is_supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        if platform.machine() not in ("x86_64", "AMD64"):
            return is_supported
        # With AVX-512 alone oneDNN emulates bf16: `tiny` takes three times as long as in float32.
        return is_supported and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    except (AttributeError, RuntimeError):  # this build of torch has no such check
        return False


def select_dtype(device: torch.device | str, requested: torch.dtype | None = None) -> torch.dtype | None:
    """Returns the dtype to load weights in: the requested one, else None (as stored), or float32 on a CPU without bf16."""
    if has_bf16(device):
        return requested
    if requested == torch.bfloat16:
        LOG.warning("this CPU does not multiply bf16 in hardware: float32 is a hundred times as fast")
    return requested or torch.float32


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
    card = select_card(torch.device(device))
    if card.architecture < MIN_ARCHITECTURE or card.shared_memory < SMALLEST_LIMIT:
        limits = f"{name} is sm_{card.architecture} with {card.shared_memory // KIB} KiB of shared memory per block"
        return Backend(False, f"{limits}; the Triton kernels need sm_{MIN_ARCHITECTURE} and {SMALLEST_LIMIT // KIB} KiB")
    return Backend(True, name)


@cache
def uses_triton(device: torch.device) -> bool:
    """Whether the Triton kernels run on a device. Selects the backend once: every product asks for it."""
    return select_backend(device).uses_triton


class Card(NamedTuple):
    """What the tiles of the Triton kernels depend on."""

    architecture: int  # 10 * major + minor: an RTX 4090 is 89, an H200 is 90
    shared_memory: int  # bytes that one block may have
    processors: int = 132  # streaming multiprocessors

    @property
    def has_fp8(self) -> bool:
        """Whether tensor cores multiply fp8, and Triton has the type. Elsewhere fp8 weights are widened in registers."""
        return self.architecture >= 89

    @property
    def has_shared_products(self) -> bool:
        """Whether tensor cores read their factors from shared memory (sm_90, sm_100). `mma.sync` reads registers."""
        return 90 <= self.architecture < 120

    @property
    def has_tensor_memory(self) -> bool:
        """Whether tensor cores have a memory of their own, for results and one factor (sm_100)."""
        return 100 <= self.architecture < 120


SIMULATED_CARD = Card(90, 227 * KIB)  # where Triton's interpreter runs the kernels: an H200


@cache
def select_card(device: torch.device) -> Card:
    """Returns the card of a device. The environment variable REDRAFT_SHARED_MEMORY lowers its shared memory."""
    if device.type != "cuda":
        return SIMULATED_CARD._replace(shared_memory=shared_memory_limit(device))
    major, minor = torch.cuda.get_device_capability(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Card(10 * major + minor, shared_memory_limit(device), processors)


def shared_memory_limit(device: torch.device | str) -> int:
    """Returns the bytes of shared memory that a block may have: those of the device, or fewer if the user says so.

    REDRAFT_SHARED_MEMORY=99 runs the tiles of an RTX 4090 on any GPU. The variable never raises the limit of the device.
    """
    limit = SIMULATED_CARD.shared_memory
    if torch.device(device).type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)  # torch's type stubs lack the next attribute
        limit = properties.shared_memory_per_block_optin
    requested = os.environ.get(SHARED_MEMORY_VARIABLE, "")
    if not requested:
        return limit
    if not (requested.isascii() and requested.isdigit()) or int(requested) < SMALLEST_LIMIT // KIB:
        least = SMALLEST_LIMIT // KIB
        raise ValueError(f"{SHARED_MEMORY_VARIABLE} is a number of KiB, at least {least}, got {requested!r}; try {least}")
    return min(limit, int(requested) * KIB)
