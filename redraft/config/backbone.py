"""BackboneConfig: what the shapes of all architectures have in common."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

from redraft.config.values import ConfigError, require_ids, require_int, require_number, show_value

SLIDING = "sliding_attention"
FULL = "full_attention"

# The largest values that a configuration takes, far above those of any model that exists. A file with larger ones is refused
# before anything is built from it.
LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "num_experts": 2**14,
    "top_k_experts": 2**14,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "num_global_key_value_heads": 2**12,
    "head_dim": 2**14,
    "global_head_dim": 2**14,
    "canvas_length": 2**20,
}
LARGEST_DRAFT_HEAD = 2**16
MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class BackboneConfig(ABC):
    """What the shapes of all architectures have in common. A causal-only model has no canvas: `canvas_length` means nothing.

    `ModelConfig` is Gemma's, `LlamaConfig` that of Llama and its relatives.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]  # SLIDING or FULL, by layer
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    rms_norm_eps: float
    max_position_embeddings: int
    canvas_length: int = 256
    pad_token_id: int = 0
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    is_causal_only: bool = False  # it has no denoiser: it only writes left to right
    draft_head_size: int = 0  # inner size of the draft head; 0: the model has none
    has_joined_images: bool = False  # the tokens of an image attend to one another in both directions, in the causal half
    quant: str | None = None  # "fp8": compressed-tensors' layout, weights scaled by channel, activations by token

    causal_kind: ClassVar[str]  # what a causal-only model of this architecture is, for error messages

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.name == "draft_head_size":
                require_int(f.name, self.draft_head_size, 0, LARGEST_DRAFT_HEAD)
            elif f.type is int and not f.name.endswith("token_id"):
                require_int(f.name, getattr(self, f.name), 1, LARGEST.get(f.name, 2**31 - 1))
            elif f.type is float:
                require_number(f.name, getattr(self, f.name))
        if self.is_causal_only and self.draft_head_size:
            raise ConfigError(f"a causal-only model drafts nothing, but draft_head_size is {self.draft_head_size}")
        require_int("sliding_window", self.sliding_window, 2)  # a window of 1 would leave the cache of a layer empty
        if not self.layer_types or any(kind not in (SLIDING, FULL) for kind in self.layer_types):
            raise ConfigError(f"layer_types may hold {SLIDING!r} and {FULL!r}, got {show_value(self.layer_types)}")
        require_int("num_hidden_layers", len(self.layer_types), 1, MOST_LAYERS)
        self._check_heads(self.num_key_value_heads, self.head_dim)
        require_ids("pad_token_id", self.pad_token_id, self.vocab_size)
        require_ids("bos_token_id", self.bos_token_id, self.vocab_size)
        require_ids("eos_token_id", self.eos_token_ids, self.vocab_size)
        if not self.eos_token_ids:
            raise ConfigError("eos_token_id is empty; a model needs at least one stop token")

    def _check_heads(self, kv_heads: int, head_dim: int) -> None:
        if self.num_attention_heads % kv_heads:
            raise ConfigError(f"{self.num_attention_heads} attention heads cannot share {kv_heads} key-value heads evenly")
        if head_dim % 2:
            raise ConfigError(f"head sizes must be even for RoPE, got {head_dim}")

    @property
    def num_hidden_layers(self) -> int:
        """The number of layers."""
        return len(self.layer_types)

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of a layer; None for a full layer."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def layer_heads(self, layer: int) -> tuple[int, int]:
        """Key-value heads and head size of a layer."""
        return self.num_key_value_heads, self.head_dim

    @abstractmethod
    def parameter_counts(self) -> dict[str, int]:
        """The number of weights by part. `active` counts the weights that one token uses in one forward."""

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> tuple[int, int]:
        """Cache bytes of one token: in all full layers, and in all sliding layers, which store no more than their window."""
        cost = {SLIDING: 0, FULL: 0}
        for layer, kind in enumerate(self.layer_types):
            heads, size = self.layer_heads(layer)
            cost[kind] += 2 * heads * size * bytes_per_value
        return cost[FULL], cost[SLIDING]
