"""GpuLimit: keeps a process within `--gpu-memory`, from the start of loading on.

Torch's allocator refuses what goes beyond the limit, so a plan that is wrong ends in an error and not in more memory. What
CUDA takes for itself (context, modules) is measured and subtracted from what torch may allocate. Segments of the allocator
are expandable: weights that are freed while others are joined would otherwise leave holes that no KV cache fits. The limit
ends with its Writer.
"""

import gc
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from redraft.checkpoint.placement import Placement
from redraft.config import BackboneConfig, ConfigError, EngineConfig, ModelConfig
from redraft.engine.memory_plan import (
    CONTEXT_BYTES,
    DEFAULT_CONTEXT,
    Demand,
    MemoryLimitError,
    MemoryPlan,
    WeightBytes,
    choose_policy,
    parse_bytes,
)
from redraft.engine.offload import measure_bus, offload_experts
from redraft.kernels.backend import select_device
from redraft.model.backbone import Backbone
from redraft.model.quant import QuantPolicy

MODULE_BYTES = 100_000_000  # that kernels and libraries add to a fresh CUDA context


class GpuLimit:
    """The limit of one process, and the plan that divides it once the sizes of the weights are known."""

    def __init__(self, device: torch.device, limit: str | int | float, demand: Demand) -> None:
        if device.type != "cuda":
            raise ConfigError(f"gpu_memory is {limit!r}, but the model runs on {device}: leave it out, or choose a GPU")
        self.device = device
        self.limit = parse_bytes(limit)
        self.demand = demand
        self.plan: MemoryPlan | None = None
        self.bus: float | None = None  # bytes per second, measured when experts are offloaded
        total = torch.cuda.get_device_properties(device).total_memory
        if self.limit > total:
            raise ConfigError(f"gpu_memory is {self.limit / 1e9:.2f} GB, but {device} has {total / 1e9:.2f} GB: lower it")
        gc.collect()
        torch.cuda.empty_cache()  # memory that torch has kept from an earlier model would be used without a check
        self.cuda_context = measure_cuda_context(device)
        use_expandable_segments()
        share = max(0.0, (self.limit - self.cuda_context) / total)
        torch.cuda.set_per_process_memory_fraction(share, device)
        self.lift = weakref.finalize(self, _lift_limit, device, share)  # called when this limit is gone, or before
        self.lift.atexit = False

    def place(self, config: BackboneConfig, sizes: Mapping[QuantPolicy, Mapping[str, int]], dtype: torch.dtype) -> Placement:
        """Plans the memory of a model; the loader calls it before it loads weights. Raises MemoryLimitError."""
        if not isinstance(config, ModelConfig):
            raise ConfigError("gpu_memory plans the experts of DiffusionGemma and Gemma 4; leave it out for other models")
        weights = {policy: WeightBytes.from_sizes(each, config.num_hidden_layers) for policy, each in sizes.items()}
        options = {"dtype": dtype, "cuda_context": self.cuda_context}
        policy, self.plan = choose_policy(config, weights, self.limit, self.demand, **options)
        return Placement(self.device, policy, frozenset(self.plan.offloaded_layers))

    def offload(self, model: Backbone) -> EngineConfig:
        """Pins the experts that the loader left in host memory, and streams them. Returns the engine's settings."""
        assert self.plan is not None
        if self.plan.offloaded:
            self.bus = measure_bus(self.device)
            torch.cuda.empty_cache()
            offload_experts(model, self.plan.offloaded_layers)
        return self.plan.engine_config

    @property
    def context_bytes(self) -> int:
        """The KV cache of one request of the longest context that was planned."""
        return self.plan.context_bytes if self.plan is not None else 0

    @property
    def advice(self) -> str:
        """What to do if memory runs out in spite of the limit."""
        return self.plan.advice if self.plan is not None else f"the limit is {self.limit / 1e9:.2f} GB; raise --gpu-memory"

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The plan as lines of a table."""
        return self.plan.rows(self.bus) if self.plan is not None else []

    @property
    def peak(self) -> str:
        """The most memory that was used, beside the limit."""
        reserved = torch.cuda.max_memory_reserved(self.device)
        outside = _outside_torch(self.device)
        return (
            f"GPU memory: at most {(reserved + outside) / 1e9:.2f} of {self.limit / 1e9:.2f} GB, "
            f"{reserved / 1e9:.2f} by torch and {outside / 1e9:.2f} by CUDA and other programs"
        )


@contextmanager
def explain_lack_of_memory(limit: GpuLimit | None) -> Iterator[None]:
    """Inside the block, which loads a model within a limit, a lack of memory becomes a MemoryLimitError."""
    try:
        yield
    except torch.OutOfMemoryError:
        if limit is None:
            raise
        raise MemoryLimitError(f"out of GPU memory while the model is loaded: {limit.advice}") from None


def limit_gpu(
    device: torch.device | str | None,
    gpu_memory: str | float | None,
    context: int | None,
    kv: str | None,
    verify_with: object,
    adapters: Iterable[str | Path] = (),
    *,
    vision: bool = False,
) -> GpuLimit | None:
    """The limit that a user asks for; None without one. Refuses settings that cannot be, before anything is loaded.

    `adapters` are the folders of the adapters that will be loaded. With `vision` the plan has room for the vision tower.
    """
    folders = list(adapters)
    if folders and verify_with is not None:
        raise ConfigError(
            f"verify_with decides what is written, so the adapter {folders[0]} would not show: leave one of them out"
        )
    kv = EngineConfig(kv=kv).kv
    if gpu_memory is None:
        if context is not None:
            raise ConfigError(f"context is {context}, but only gpu_memory plans for a context: give both, or leave it out")
        return None
    if verify_with is not None:
        raise ConfigError("gpu_memory plans the memory of one model: leave verify_with out")
    adapter_bytes = sum(file.stat().st_size for folder in folders for file in Path(folder).glob("*.safetensors"))
    context = DEFAULT_CONTEXT if context is None else context
    demand = Demand(context=context, kv=kv, adapter_bytes=adapter_bytes, has_vision=vision)
    return GpuLimit(select_device(device), gpu_memory, demand)


def _lift_limit(device: torch.device, share: float) -> None:
    """Lets torch allocate all memory again, unless the process has another limit by now."""
    if math.isclose(torch.cuda.get_per_process_memory_fraction(device), share, rel_tol=1e-6):  # torch keeps whole bytes
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def use_expandable_segments() -> None:
    """Lets torch's allocator give back parts of a segment. It has no public setting for this at run time."""
    set_option: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    set_option = set_option or torch.cuda.memory._set_allocator_settings  # before torch 2.10
    set_option("expandable_segments:True")


def measure_cuda_context(device: torch.device) -> int:
    """Memory that CUDA takes for itself, with what its modules will add.

    The driver reports the whole card: what other processes use is counted too, up to twice the usual size of a context.
    """
    torch.zeros(1, device=device)
    return min(max(_outside_torch(device) + MODULE_BYTES, CONTEXT_BYTES), 2 * CONTEXT_BYTES)


def _outside_torch(device: torch.device) -> int:
    """Memory of the card that is in use, but not by torch: CUDA's own, and that of other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def peak_bytes(device: torch.device) -> int:
    """The most memory that was used: what torch has reserved, and what CUDA and other programs use now. 0 without a GPU."""
    return torch.cuda.max_memory_reserved(device) + _outside_torch(device) if device.type == "cuda" else 0
