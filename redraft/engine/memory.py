"""Memory: what a model takes, and what is free."""

from pathlib import Path

import torch

from redraft.model.diffusion_gemma import DiffusionGemma

UNKNOWN_FREE_BYTES = 8 * 2**30  # assumed where the operating system does not report free memory


def weight_bytes(model: DiffusionGemma) -> int:
    """Memory of a model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def free_bytes(device: torch.device) -> int:
    """Memory that is free now on this device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return UNKNOWN_FREE_BYTES
