"""Memory: what a model takes, and what is free."""

import math
from pathlib import Path

import torch

from redraft.config import BackboneConfig, ModelConfig
from redraft.engine.runner import Runner
from redraft.model.backbone import Backbone

UNKNOWN_FREE_BYTES = 8 * 2**30  # assumed where the operating system does not report free memory


def weight_bytes(model: Backbone) -> int:
    """Memory of a model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def count_token_bytes(config: BackboneConfig, itemsize: int) -> int:
    """Activations of one token while it is in a layer: those of attention, experts and dense MLP, as if all were kept.

    A layer keeps less (`fused_layers`); the difference covers split sums of attention and of fp8 products.
    """
    head_width = max(math.prod(config.layer_heads(layer)) for layer in range(config.num_hidden_layers))
    query_width = config.num_attention_heads * max(config.layer_heads(n)[1] for n in range(config.num_hidden_layers))
    attention = 3 * query_width + 4 * head_width
    experts = 0
    if isinstance(config, ModelConfig):
        experts = config.top_k_experts * (config.hidden_size + config.moe_intermediate_size)
    return itemsize * (attention + experts + 4 * config.intermediate_size + 8 * config.hidden_size)


def has_memory_limit(device: torch.device) -> bool:
    """Whether this process may use a part of the GPU's memory only."""
    return device.type == "cuda" and torch.cuda.get_per_process_memory_fraction(device) < 1.0


def free_bytes(device: torch.device) -> int:
    """Memory that is free now on this device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return UNKNOWN_FREE_BYTES


def measure_budget(runner: Runner, max_running: int) -> int:
    """Bytes for KV caches.

    On a GPU that the weights fill to a good part: 90% of the memory that is free after a full step and a prefill chunk
    were run once. For a small model that run would only delay the first answer, so an eighth of the GPU is set aside
    for steps. On a CPU: half of the free memory, because other programs use it too.
    """
    device = runner.model.device
    if device.type != "cuda":
        return free_bytes(device) // 2
    total = torch.cuda.get_device_properties(device).total_memory
    activation_bytes = total // 8
    if weight_bytes(runner.model) > total // 8:
        activation_bytes = runner.warm_up(max_running)
        torch.cuda.empty_cache()  # the memory that is still in use after this belongs to the CUDA graphs
    return int(0.9 * max(0, free_bytes(device) - activation_bytes))
