"""The memory plan: what a GPU's memory is used for when `--gpu-memory` limits it. A pure function of numbers.

    weights + KV caches + graphs + other buffers + CUDA context + reserve <= limit

Weights keep the formats that the user asks for if the model fits like that without offloading. If not, more of them are
rounded (`QuantPolicy.alternatives`), until it does. If it never does, the smallest formats are used and as few layers'
experts as possible are offloaded. Then the plan makes the prefill chunks as long as asked for, or as fits, and runs as
many canvases at once as asked for, or as fit: these choices change no token of an answer. What is left belongs to KV caches:
those of running requests and the prefix cache.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from redraft.checkpoint.placement import plan_bytes
from redraft.config import ConfigError, EngineConfig, ModelConfig, require_int, show_value
from redraft.engine.graph_capture import bucket_contexts, next_power_of_two
from redraft.engine.memory import count_token_bytes
from redraft.engine.offload import ALIGNMENT, SLOTS, choose_offloaded, copied_layers
from redraft.engine.runner import MAX_ROWS
from redraft.kernels.attention import SCORES_AT_ONCE
from redraft.kernels.fp8 import FP8_DTYPE
from redraft.kernels.packed import count_packed_bytes
from redraft.kernels.vocabulary import CHUNK_LOGITS
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.kv_cache import KVCache
from redraft.model.quant import QuantPolicy
from redraft.model.quant.policy import part_of
from redraft.model.quant.stored import StoredFormat

DEFAULT_CONTEXT = 16_384
MIN_CHUNK = 256  # tokens of the shortest prefill chunk
CONTEXT_BYTES = 500_000_000  # of CUDA: context, modules and what libraries allocate by themselves; measured 0.4 to 0.6e9
WORKSPACE_BYTES = 270_000_000  # of cuBLAS: 32 MiB on Hopper for every stream that multiplies
RESERVE_SHARE = 200  # a two-hundredth of the limit is for fragmentation

UNITS = {"": 1, "gb": 10**9, "g": 10**9, "gib": 2**30, "mb": 10**6, "m": 10**6, "mib": 2**20, "b": 1}


class MemoryLimitError(ConfigError):
    """A model does not fit the memory that it may use. The message says what would have to be smaller."""


def parse_bytes(text: str | int | float) -> int:
    """Bytes from "18GB", "18GiB", "18000MB", "18e9" or "18"; a bare number below 1024 counts gigabytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\+?\d{1,2})?)\s*([gmb]?i?b?)\s*", str(text).lower())
    unit = UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{show_value(text)} is not an amount of memory; write 18GB, 18GiB or 18e9")
    number = float(match[1])
    if not match[2] and number < 1024:
        unit = 10**9
    if not 10**6 <= number * unit <= 2**50:
        raise ConfigError(f"{show_value(text)} is {number * unit:.0f} bytes, too few or too many; write 18GB, 18GiB or 18e9")
    return int(number * unit)


@dataclass(frozen=True, kw_only=True)
class WeightBytes:
    """Bytes of a model's weights by part."""

    embedding: int
    attention: int
    dense: int
    experts: tuple[int, ...]  # of each layer
    other: int  # router, self-conditioning, draft head, norms, scalars

    @classmethod
    def by_policy(
        cls, config: ModelConfig, stored: Mapping[str, StoredFormat], policies: Iterable[QuantPolicy]
    ) -> dict[QuantPolicy, "WeightBytes"]:
        """Counts the weights of a file under each policy. It stores whole parts in these formats, the others in bf16."""
        with torch.device("meta"):
            weights = DiffusionGemma(config).state_dict()
        formats = {name: stored.get(part_of(name)) for name in weights}
        sizes = {policy: plan_bytes(weights, formats, policy, torch.bfloat16) for policy in policies}
        return {policy: cls.from_sizes(each, config.num_hidden_layers) for policy, each in sizes.items()}

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, int], layers: int) -> "WeightBytes":
        """Adds up the bytes of single weights, given by their names in the model."""
        experts = [0] * layers
        parts = {"embedding": 0, "attention": 0, "dense": 0, "other": 0}
        for name, size in sizes.items():
            layer = re.match(r"layers\.(\d+)\.(experts|self_attn\.\w_proj|mlp)\.", name)
            if name.startswith("embed_tokens."):
                parts["embedding"] += size
            elif layer is None:
                parts["other"] += size
            elif layer[2] == "experts":
                experts[int(layer[1])] += size
            else:
                parts["dense" if layer[2] == "mlp" else "attention"] += size
        return cls(**parts, experts=tuple(experts))

    @property
    def total(self) -> int:
        """All weights."""
        return self.embedding + self.attention + self.dense + sum(self.experts) + self.other


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What the user asks for. The plan may run fewer canvases and prefill shorter chunks."""

    context: int = DEFAULT_CONTEXT  # tokens of the longest request, answer included
    canvases: int = EngineConfig.max_running
    prefill_chunk: int = EngineConfig.prefill_chunk
    prefix_cache_entries: int = EngineConfig.prefix_cache_entries
    rewind: int = EngineConfig.rewind
    kv: str | None = None  # "fp8", or None: as the weights
    has_constraints: bool = True  # room for constrained and watched requests, which the reference sampler runs
    adapter_bytes: int = 0  # of adapters, whose requests the reference forwards run
    has_vision: bool = False  # room for the vision tower, and for images in prompts, which the reference forwards run

    def __post_init__(self) -> None:
        for name in ("context", "canvases", "prefill_chunk"):
            require_int(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A division of the memory. `parts` adds up to at most the limit."""

    limit: int
    config: ModelConfig = field(repr=False)
    weights: WeightBytes
    demand: Demand
    canvases: int
    prefill_chunk: int
    offloaded: int = 0  # layers whose experts are in host memory
    full_weights: WeightBytes | None = None  # before any were rounded to fit; None: none were
    dtype: torch.dtype = torch.bfloat16
    cuda_context: int = CONTEXT_BYTES

    @cached_property
    def parts(self) -> dict[str, int]:
        """Bytes of everything on the GPU but the KV caches."""
        config = self.config
        itemsize = self.dtype.itemsize
        tokens = next_power_of_two(self.canvases) * config.canvas_length
        # Soft embeddings of the buckets for 1, 2, 4 canvases and so on, with the sampler in the graph and without it.
        buckets = 2 * len(bucket_contexts(self.demand.context)) * (2 * tokens - config.canvas_length)
        logits = config.canvas_length * config.vocab_size
        # The probabilities of the soft embedding are written in place of the logits.
        graphs = tokens * config.vocab_size * itemsize
        graphs += (next_power_of_two(self.prefill_chunk) + tokens) * self._token_bytes
        sampler = 0
        if self.demand.has_constraints:
            rows = min(MAX_ROWS, self.canvases)
            # Logits of all rows, shaped logits of one, and the temporary tensors of a chunk, all of them float32.
            sampler = 4 * rows * logits + 4 * logits + 16 * min(CHUNK_LOGITS["cuda"], logits)
        return {
            "embedding and head": self.weights.embedding,
            "attention": self.weights.attention,
            "dense MLP": self.weights.dense,
            "experts": sum(self.weights.experts) - self.host_bytes,
            "slots of offloaded experts": self.slot_bytes,
            "router, norms, others": self.weights.other,
            "adapters": self.demand.adapter_bytes,
            "vision tower": self._vision_bytes,
            "reference forwards": self._reference_bytes,
            "CUDA graphs: logits and activations": graphs + buckets * config.hidden_size * itemsize,
            # Before a graph is captured, its body runs once outside of the graphs' memory.
            "prefill, captures, constrained requests": max(self.prefill_chunk * self._token_bytes, graphs, sampler),
            "workspaces": WORKSPACE_BYTES + self._largest_cache_tensor,
            "CUDA context": self.cuda_context,
            "reserve": self.limit // RESERVE_SHARE,
        }

    @property
    def _token_bytes(self) -> int:
        return count_token_bytes(self.config, self.dtype.itemsize)

    @property
    def _vision_bytes(self) -> int:
        if not self.demand.has_vision:
            return 0
        from redraft.engine.vision_memory import plan_vision_bytes  # text-only use does not load it

        return plan_vision_bytes(self.config, self.dtype.itemsize)

    @property
    def _reference_bytes(self) -> int:
        """What a reference forward takes that runs adapters or images: activations, attention, a stack of experts.

        It keeps about twice the activations of a fused layer. Its logits are those of constrained requests. Chunks with
        images are one row, and may be as long as an image.
        """
        config = self.config
        if not self.demand.adapter_bytes and not self.demand.has_vision:
            return 0
        rows = min(MAX_ROWS, self.canvases) if self.demand.adapter_bytes else 1
        tokens = max(self.prefill_chunk, rows * config.canvas_length)
        if self.demand.has_vision:
            from redraft.engine.vision_memory import IMAGE_TOKENS  # text-only use does not load it

            tokens = max(tokens, IMAGE_TOKENS)
        scores = 3 * 4 * SCORES_AT_ONCE["cuda"]
        query_width = config.num_attention_heads * max(config.head_dim, config.global_head_dim)
        repeated = 2 * rows * self.demand.context * query_width * self.dtype.itemsize  # keys and values, for every head
        stack = 2 * config.num_experts * config.moe_intermediate_size * config.hidden_size * self.dtype.itemsize
        return 2 * tokens * self._token_bytes + scores + repeated + stack

    @property
    def _largest_cache_tensor(self) -> int:
        """A KV cache that changes its capacity holds one tensor twice for a moment."""
        config = self.config
        width = max(math.prod(config.layer_heads(layer)) for layer in range(config.num_hidden_layers))
        return self.demand.context * width * self.kv_dtype.itemsize

    @property
    def kv_dtype(self) -> torch.dtype:
        """In which KV caches are stored."""
        return FP8_DTYPE if self.demand.kv == "fp8" else self.dtype

    @property
    def context_bytes(self) -> int:
        """The KV cache of one request of the longest context."""
        return KVCache.count_bytes(self.config, self.demand.context, self.kv_dtype, self.demand.rewind)

    @property
    def cache_bytes(self) -> int:
        """What is left for KV caches."""
        return self.limit - sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether every canvas can have the longest context."""
        return self.cache_bytes >= self.canvases * self.context_bytes

    @property
    def missing(self) -> int:
        """Bytes by which it does not fit."""
        return max(0, self.canvases * self.context_bytes - self.cache_bytes)

    @property
    def offloaded_layers(self) -> tuple[int, ...]:
        """The layers whose experts are in host memory."""
        return choose_offloaded(len(self.weights.experts), self.offloaded)

    @property
    def host_bytes(self) -> int:
        """Pinned host memory of offloaded experts."""
        return sum(self.weights.experts[layer] for layer in self.offloaded_layers)

    @property
    def slot_bytes(self) -> int:
        """Device memory through which offloaded experts pass. Tensors in a slot are aligned."""
        if not self.offloaded:
            return 0
        return min(SLOTS, self.offloaded) * (max(self.weights.experts) + 8 * ALIGNMENT)

    @property
    def step_bytes(self) -> int:
        """Bytes that one step copies to the GPU."""
        layers = self.offloaded_layers
        return sum(self.weights.experts[layers[number]] for number in copied_layers(self.offloaded))

    @property
    def allocator_bytes(self) -> int:
        """What torch may allocate: the rest is CUDA's own."""
        return self.limit - self.cuda_context

    @property
    def engine_config(self) -> EngineConfig:
        """The settings of an engine that keeps to the plan."""
        return EngineConfig(
            max_running=self.canvases,
            cache_bytes=self.cache_bytes,
            prefill_chunk=self.prefill_chunk,
            prefill_chunk_alone=self.prefill_chunk,
            prefix_cache_entries=self.demand.prefix_cache_entries,
            rewind=self.demand.rewind,
            kv=self.demand.kv,
        )

    @property
    def advice(self) -> str:
        """What to do if memory runs out in spite of the plan."""
        parts = {"weights": self.weights.total - self.host_bytes, "KV caches": self.cache_bytes}
        parts["buffers and CUDA"] = self.limit - sum(parts.values())
        planned = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
        return (
            f"the limit is {self.limit / 1e9:.2f} GB (planned: {planned}); raise --gpu-memory, lower --context "
            f"({self.demand.context:,}), send shorter prompts or fewer at once, or close other programs that use the GPU"
        )

    def rows(self, bus: float | None = None) -> list[tuple[str, str]]:
        """The plan as lines of a table: the bytes of each part, then what was chosen. `bus` is its speed in bytes/s."""
        lines = [(name, f"{size / 1e9:.2f} GB") for name, size in self.parts.items() if size]
        lines.append(("KV caches", f"{self.cache_bytes / 1e9:.2f} GB"))
        lines.append(("limit", f"{self.limit / 1e9:.2f} GB"))
        canvases = f"{self.canvases} at once, each with {self.demand.context:,} tokens of context ({self._kv_name} KV cache)"
        lines.append(("canvases", canvases + self._asked(self.canvases, self.demand.canvases)))
        chunk = f"{self.prefill_chunk:,} tokens"
        lines.append(("prefill chunk", chunk + self._asked(self.prefill_chunk, self.demand.prefill_chunk)))
        if self.full_weights is not None:
            lines.append(("rounded to fit", self._describe_rounding(self.full_weights)))
        if self.offloaded:
            where = f"experts of {self.offloaded} of {len(self.weights.experts)} layers, {self.host_bytes / 1e9:.2f} GB"
            lines.append(("in host memory", where))
            copies = f"{self.step_bytes / 1e9:.2f} GB a step"
            if bus:
                copies += f": {1e3 * self.step_bytes / bus:.0f} ms at {bus / 1e9:.1f} GB/s, measured"
            lines.append(("over the bus", copies))
        return lines

    def _describe_rounding(self, full_weights: WeightBytes) -> str:
        """Which parts have fewer bytes than without rounding, and what would be missing then."""
        formats = {"attention": "fp8", "dense": "fp8", "embedding": "fp8", "experts": "NVFP4"}
        changed = [part for part in formats if getattr(self.weights, part) != getattr(full_weights, part)]
        rounded = ", ".join(f"{part} to {formats[part]}" for part in changed).replace("dense", "dense MLP")
        chunk = min(MIN_CHUNK, self.demand.prefill_chunk)
        full = replace(self, weights=full_weights, offloaded=0, canvases=1, prefill_chunk=chunk)
        return f"{rounded}; otherwise {full.missing / 1e9:.2f} GB are missing on the GPU"

    @property
    def _kv_name(self) -> str:
        return str(self.kv_dtype).removeprefix("torch.").replace("float8_e4m3fn", "fp8").replace("bfloat16", "bf16")

    @staticmethod
    def _asked(chosen: int, asked: int) -> str:
        return f"; asked for {asked:,}" if chosen != asked else ""


def choose_policy(
    config: ModelConfig, weights: Mapping[QuantPolicy, WeightBytes], limit: int, demand: Demand, **options: Any
) -> tuple[QuantPolicy, MemoryPlan]:
    """Plans with the first policy that needs no offloading; if all need it, with the last, which is the smallest.

    `options` are those of `plan_memory`. Raises MemoryLimitError if even the last does not fit.
    """
    smallest = {policy: _smallest_plan(config, each, limit, demand, **options) for policy, each in weights.items()}
    policy = next((policy for policy, plan in smallest.items() if plan.fits), list(weights)[-1])
    plan = plan_memory(config, weights[policy], limit, demand, **options)
    full_weights = next(iter(weights.values()))
    return policy, replace(plan, full_weights=full_weights if full_weights != plan.weights else None)


def plan_memory(
    config: ModelConfig,
    weights: WeightBytes,
    limit: int,
    demand: Demand | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    cuda_context: int = CONTEXT_BYTES,
) -> MemoryPlan:
    """Divides `limit` bytes. Raises MemoryLimitError if even the smallest settings do not fit."""
    demand = demand or Demand()
    smallest = _smallest_plan(config, weights, limit, demand, dtype=dtype, cuda_context=cuda_context)
    demand = smallest.demand
    layers = len(weights.experts)
    # Fewer layers than slots, or as many, would take as much memory in slots as they free.
    plans = [replace(smallest, offloaded=count) for count in (0, *range(SLOTS + 1, layers + 1))]
    plan = next((plan for plan in plans if plan.fits), None)
    if plan is None:
        raise MemoryLimitError(_explain_misfit(min(plans, key=lambda plan: plan.missing)))
    for chunk in _halvings(demand.prefill_chunk, plan.prefill_chunk):
        if replace(plan, prefill_chunk=chunk).fits:
            plan = replace(plan, prefill_chunk=chunk)
            break
    for canvases in _halvings(demand.canvases, 1):
        if replace(plan, canvases=canvases).fits:
            return replace(plan, canvases=canvases)
    return plan


def _smallest_plan(config: ModelConfig, weights: WeightBytes, limit: int, demand: Demand, **options: Any) -> MemoryPlan:
    """One canvas and the shortest prefill chunks, without offloading, whether it fits or not."""
    demand = replace(demand, context=min(demand.context, config.max_position_embeddings))
    chunk = min(MIN_CHUNK, demand.prefill_chunk)
    return MemoryPlan(limit=limit, config=config, weights=weights, demand=demand, canvases=1, prefill_chunk=chunk, **options)


def _halvings(number: int, smallest: int) -> list[int]:
    """The number, its half, and so on, all of them above the smallest."""
    numbers = []
    while number > smallest:
        numbers.append(number)
        number //= 2
    return numbers


def _explain_misfit(plan: MemoryPlan) -> str:
    """One sentence: what is missing, and what would free how much."""
    config = plan.config
    ways = []
    context = find_longest_context(plan, plan.demand.context)
    if context:
        ways.append(f"a context of {context:,} tokens instead of {plan.demand.context:,} (--context)")
    if plan.kv_dtype != FP8_DTYPE:
        ways.append(f"--kv fp8 ({plan.context_bytes * (1 - 1 / plan.dtype.itemsize) / 1e9:.2f} GB less)")
    embedding = plan.weights.embedding - count_packed_bytes(config.vocab_size, config.hidden_size, "fp8")
    if embedding > 0:
        ways.append(f"an embedding in fp8 ({embedding / 1e9:.2f} GB less: leave out --keep-bf16)")
    expert_size = config.hidden_size * config.moe_intermediate_size
    if max(plan.weights.experts) >= 3 * config.num_experts * expert_size:
        ways.append("experts in 4 bits (--quant nvfp4)")
    if plan.demand.has_vision:
        images = plan.parts["vision tower"] + (plan.parts["reference forwards"] if not plan.demand.adapter_bytes else 0)
        ways.append(f"text only, without --vision and --image ({images / 1e9:.2f} GB less)")
    ways.append(f"a limit of {(plan.limit + plan.missing * RESERVE_SHARE // (RESERVE_SHARE - 1) + 1) / 1e9:.2f} GB")
    where = f" with the experts of {plan.offloaded} layers in host memory" if plan.offloaded else ""
    return (
        f"the model does not fit {plan.limit / 1e9:.2f} GB{where}: {plan.missing / 1e9:.2f} GB are missing for one canvas "
        f"and {plan.demand.context:,} tokens of context; what would fit or help: {', '.join(ways)}"
    )


def find_longest_context(plan: MemoryPlan, most: int) -> int:
    """The longest context that fits with the other choices of a plan, in steps of 256 tokens; 0 if none does."""
    low, high = 0, most // 256
    while low < high:
        middle = (low + high + 1) // 2
        if replace(plan, demand=replace(plan.demand, context=256 * middle)).fits:
            low = middle
        else:
            high = middle - 1
    return 256 * low
