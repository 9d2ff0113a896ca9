"""EngineConfig: how many requests run at once, and the memory of their KV caches."""

from dataclasses import dataclass

from redraft.config.values import ConfigError, require_int, show_value


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How many requests the engine runs at once, and how much memory their KV caches may use."""

    max_running: int = 8  # requests in one batch
    cache_bytes: int | None = None  # budget for KV caches; None: measured, see Engine
    prefill_chunk: int = 2048  # prompt tokens that one step prefills
    # The prefill chunk of a request that runs alone on a GPU: large products are faster, and no other request has to wait.
    # None: chosen by the GPU's memory, see CudaGraphRunner. Never below prefill_chunk.
    prefill_chunk_alone: int | None = None
    prefix_cache_entries: int = 8  # KV caches of finished requests, kept for prompts that begin alike
    rewind: int = 512  # how many tokens a prefix cache entry can be cut back
    kv: str | None = None  # "fp8": KV caches in 8 bits, half of the memory of bf16; None: as the model says

    def __post_init__(self) -> None:
        for name in ("max_running", "prefill_chunk"):
            require_int(name, getattr(self, name))
        for name in ("prefix_cache_entries", "rewind"):
            require_int(name, getattr(self, name), 0)
        if self.cache_bytes is not None:
            require_int("cache_bytes", self.cache_bytes, 1, 2**63 - 1)
        if self.prefill_chunk_alone is not None:
            require_int("prefill_chunk_alone", self.prefill_chunk_alone, self.prefill_chunk)
        if self.kv not in (None, "fp8"):
            raise ConfigError(f"a KV cache can be stored in fp8 or as the weights are, got {show_value(self.kv)}")
