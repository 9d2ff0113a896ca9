"""LlamaConfig: the shape of Llama and its relatives (SmolLM2, Mistral, Qwen2, Qwen3)."""

from dataclasses import dataclass
from typing import ClassVar

from redraft.config.backbone import SLIDING, BackboneConfig
from redraft.config.values import ConfigError, require_int, require_number, show_value

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}  # names by transformers' model type


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How RoPE's frequencies are lowered, so that a model reads texts longer than those it was pretrained on.

    "linear" divides all frequencies by the factor. "llama3" divides those whose wave is longer than the pretrained context
    divided by `low_freq_factor`, keeps those whose wave is shorter than that context divided by `high_freq_factor`, and
    blends the others.
    """

    kind: str  # "linear" or "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ConfigError(f"redraft scales RoPE by 'linear' or 'llama3', got {show_value(self.kind)}")
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            require_number(name, getattr(self, name))
        require_int("original_max_position_embeddings", self.original_max_position_embeddings)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"high_freq_factor must be above low_freq_factor, got {self.high_freq_factor} and {self.low_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(BackboneConfig):
    """The shape of a Llama model. The families differ in biases, norms of queries and keys, and sliding windows."""

    family: str = "llama"  # of FAMILIES
    sliding_window: int = 4096  # of sliding layers, if there are any
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    has_qkv_bias: bool = False  # Qwen2: biases of queries, keys and values
    has_qk_norm: bool = False  # Qwen3: an RMS norm over each head of queries and keys
    has_tied_head: bool = False  # the head is the embedding
    is_causal_only: bool = True

    causal_kind: ClassVar[str] = "a standard decoder"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.family not in FAMILIES:
            raise ConfigError(f"family must be one of {', '.join(FAMILIES)}, got {show_value(self.family)}")

    def parameter_counts(self) -> dict[str, int]:
        """The number of weights by part. All are active: there are no experts."""
        d = self.hidden_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        biases = queries + 2 * keys if self.has_qkv_bias else 0
        norms = 2 * d + (2 * self.head_dim if self.has_qk_norm else 0)
        layers = self.num_hidden_layers
        parts = {
            "embedding": self.vocab_size * d,
            "head": 0 if self.has_tied_head else self.vocab_size * d,
            "attention": layers * (2 * d * (queries + keys) + biases),
            "dense MLP": layers * 3 * d * self.intermediate_size,
            "norms": layers * norms + d,
        }
        total = sum(parts.values())
        return parts | {"total": total, "active": total}

    @property
    def has_sliding_layers(self) -> bool:
        """Whether some layer has a sliding window."""
        return SLIDING in self.layer_types
