"""VisionConfig: the shape of a vision tower. ImageConfig: how pictures become patches.

Both are read from a published checkpoint by `checkpoint/published_vision.py`. The defaults are those of transformers, which
a file that leaves a key out means.
"""

from dataclasses import dataclass, fields

from redraft.config.backbone import LARGEST, MOST_LAYERS
from redraft.config.values import ConfigError, require_int, require_number, show_value

SOFT_TOKENS = (70, 140, 280, 560, 1120)  # the numbers of tokens that an image may have at most, as in transformers
LARGEST_OF_VISION = {
    "hidden_size": LARGEST["hidden_size"],
    "intermediate_size": LARGEST["intermediate_size"],
    "num_attention_heads": LARGEST["num_attention_heads"],
    "num_key_value_heads": LARGEST["num_key_value_heads"],
    "head_dim": LARGEST["head_dim"],
    "patch_size": 256,
    "pooling_kernel_size": 16,
    "position_embedding_size": 2**20,
}


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The shape of a vision tower: Gemma 4's, a transformer over patches with two-dimensional RoPE, and pooling."""

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100.0
    patch_size: int = 16  # pixels of a patch's side
    pooling_kernel_size: int = 3  # patches of the side of the square that becomes one token
    position_embedding_size: int = 10_240  # the most patches of a side
    use_clipped_linears: bool = False  # linear layers clamp what goes in and what comes out
    standardize: bool = False  # pooled features are shifted and scaled

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "num_hidden_layers":
                require_int(f"vision {field.name}", value, 0, MOST_LAYERS)
            elif field.type is int:
                require_int(f"vision {field.name}", value, 1, LARGEST_OF_VISION[field.name])
            elif field.type is float:
                require_number(f"vision {field.name}", value)
            elif not isinstance(value, bool):
                raise ConfigError(f"vision {field.name} must be true or false, got {show_value(value)}")
        if self.num_attention_heads % self.num_key_value_heads:
            heads = f"{self.num_attention_heads} attention heads"
            raise ConfigError(f"vision: {heads} cannot share {self.num_key_value_heads} key-value heads evenly")
        if self.head_dim % 4:
            raise ConfigError(f"vision head_dim must be a multiple of 4 for RoPE in two dimensions, got {self.head_dim}")

    @property
    def is_empty(self) -> bool:
        """Whether the tower has no layers: text-only checkpoints carry such a one, since transformers always builds one."""
        return self.num_hidden_layers == 0

    @property
    def patch_values(self) -> int:
        """The numbers of a patch: red, green and blue of its pixels."""
        return 3 * self.patch_size**2


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """How pictures become patches: they are resized so that no more than `max_soft_tokens` tokens result."""

    patch_size: int = 16
    pooling_kernel_size: int = 3
    max_soft_tokens: int = 280

    def __post_init__(self) -> None:
        require_int("patch_size", self.patch_size, 1, LARGEST_OF_VISION["patch_size"])
        require_int("pooling_kernel_size", self.pooling_kernel_size, 1, LARGEST_OF_VISION["pooling_kernel_size"])
        if self.max_soft_tokens not in SOFT_TOKENS:
            known = ", ".join(map(str, SOFT_TOKENS))
            raise ConfigError(f"max_soft_tokens must be one of {known}, got {show_value(self.max_soft_tokens)}")

    @property
    def max_patches(self) -> int:
        """The most patches of an image."""
        return self.max_soft_tokens * self.pooling_kernel_size**2
