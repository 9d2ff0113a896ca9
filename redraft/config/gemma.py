"""ModelConfig: the shape of a DiffusionGemma or Gemma 4 model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from redraft.config.backbone import FULL, SLIDING, BackboneConfig
from redraft.config.values import ConfigError, require_ids

RELEASED_LAYERS = ((SLIDING,) * 5 + (FULL,)) * 5

# transformers always builds a vision tower, at full size when `vision_config` is missing. This is the smallest it accepts.
SMALLEST_VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 0,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "position_embedding_size": 1,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(BackboneConfig):
    """The shape of a DiffusionGemma model. Full layers always share keys and values; every layer has experts.

    A causal-only model (a standard Gemma 4 checkpoint) is the same stack without self-conditioning and without the
    denoiser's layer scalars; it has no canvas, so `canvas_length` means nothing there.
    """

    vocab_size: int = 262_144
    hidden_size: int = 2816
    intermediate_size: int = 2112  # of the dense MLP beside the experts and of the self-conditioning MLP
    moe_intermediate_size: int = 704
    num_experts: int = 128
    top_k_experts: int = 8
    layer_types: tuple[str, ...] = RELEASED_LAYERS
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    num_global_key_value_heads: int = 2
    head_dim: int = 256
    global_head_dim: int = 512
    sliding_window: int = 1024
    rope_theta: float = 10_000.0
    global_rope_theta: float = 1_000_000.0
    global_rotary_fraction: float = 0.25
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float = 30.0
    max_position_embeddings: int = 262_144
    bos_token_id: int = 2
    eos_token_ids: tuple[int, ...] = (1, 106)
    image_token_ids: tuple[int, int, int] = (255_999, 258_880, 258_882)  # begin of image, image, end of image
    has_joined_images: bool = True
    # As published; `checkpoint/published_vision.py` reads it when an image comes.
    vision: Mapping[str, Any] = field(default_factory=lambda: dict(SMALLEST_VISION), repr=False)

    causal_kind: ClassVar[str] = "a standard Gemma 4"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_heads(self.num_global_key_value_heads, self.global_head_dim)
        if self.layer_types[-1] != FULL:
            raise ConfigError(f"the last layer must be {FULL!r}, got {self.layer_types[-1]!r}")
        if self.top_k_experts > self.num_experts:
            raise ConfigError(f"top_k_experts is {self.top_k_experts}, but there are only {self.num_experts} experts")
        if self.global_rotary_fraction > 1:
            raise ConfigError(f"partial_rotary_factor must be at most 1, got {self.global_rotary_fraction!r}")
        require_ids("image token ids", self.image_token_ids)

    def layer_heads(self, layer: int) -> tuple[int, int]:
        """Key-value heads and head size of a layer."""
        if self.layer_types[layer] == SLIDING:
            return self.num_key_value_heads, self.head_dim
        return self.num_global_key_value_heads, self.global_head_dim

    def parameter_counts(self) -> dict[str, int]:
        """The number of weights by part. `active` counts the weights that one token uses in one forward."""
        d = self.hidden_size
        attention = 0
        # Seven norms and two scalars per layer, q and k norms (added below), and two norms outside the layers. A
        # causal-only model has no scalar for the denoiser and no norm for self-conditioning.
        halves = 1 if self.is_causal_only else 2
        norms = self.num_hidden_layers * (7 * d + halves) + halves * d
        for layer in range(self.num_hidden_layers):
            heads, size = self.layer_heads(layer)
            kv = 2 if self.layer_types[layer] == SLIDING else 1
            norms += 2 * size
            attention += 2 * d * self.num_attention_heads * size + kv * d * heads * size
        expert = 3 * d * self.moe_intermediate_size * self.num_hidden_layers
        parts = {
            "embedding": self.vocab_size * d,
            "attention": attention,
            "dense MLP": 3 * d * self.intermediate_size * self.num_hidden_layers,
            "experts": expert * self.num_experts,
            "router": (d * self.num_experts + d + self.num_experts) * self.num_hidden_layers,
            "self-conditioning": 0 if self.is_causal_only else 3 * d * self.intermediate_size,
            "draft head": 3 * d * self.draft_head_size,
            "norms and scalars": norms,
        }
        total = sum(parts.values())
        return parts | {"total": total, "active": total - expert * (self.num_experts - self.top_k_experts)}
