"""What images take of the memory. Text-only use does not load this."""

from functools import lru_cache

import torch

from redraft.checkpoint.published_vision import parse_vision_config
from redraft.config import ModelConfig
from redraft.config.vision import ImageConfig, VisionConfig
from redraft.model.vision import Vision

IMAGE_TOKENS = ImageConfig.max_soft_tokens  # of an image of the usual size


@lru_cache(maxsize=4)  # a plan asks again and again
def count_vision_bytes(config: VisionConfig, text_size: int, itemsize: int) -> int:
    """The weights of a vision tower, and the activations of a layer over an image of the usual size, as if all were kept."""
    with torch.device("meta"):
        weights = sum(tensor.numel() for tensor in Vision(config, text_size).state_dict().values())
    patches = IMAGE_TOKENS * config.pooling_kernel_size**2
    heads = config.num_attention_heads * config.head_dim
    per_patch = 6 * config.hidden_size + 6 * heads + 3 * config.intermediate_size
    pixels = 8 * patches * config.patch_values  # in float32, before and after they are scaled
    return itemsize * (weights + patches * per_patch) + pixels


def plan_vision_bytes(config: ModelConfig, itemsize: int) -> int:
    """The same for the vision tower of a model; 0 if it has none."""
    vision_config = parse_vision_config(config.vision)
    return 0 if vision_config.is_empty else count_vision_bytes(vision_config, config.hidden_size, itemsize)
