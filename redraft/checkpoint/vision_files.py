"""Vision weights: loaded when the first image comes, since text-only use needs neither their memory nor their time.

The vision tower and the projection are in full precision in every published checkpoint, the quantized ones too. Saving
copies their tensors and the settings of the image processor from the checkpoint they came with.
"""

import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from redraft.checkpoint.gguf import is_gguf
from redraft.checkpoint.load import default_dtype, fetch_weight
from redraft.checkpoint.manifest import verify_files
from redraft.checkpoint.names import CONFIG, DECODER, VISION, VISION_PARENT, CheckpointError
from redraft.checkpoint.published_config import read_model_config
from redraft.checkpoint.published_vision import parse_vision_config, read_image_config
from redraft.checkpoint.tensors import CheckpointTensors
from redraft.config import ModelConfig
from redraft.config.vision import ImageConfig
from redraft.model.vision import Vision


class VisionParts(NamedTuple):
    """What a text model lacks to take images."""

    vision: Vision
    images: ImageConfig
    token_ids: tuple[int, int, int]  # begin of image, image, end of image


def load_vision(path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> VisionParts:
    """Loads the vision tower of a checkpoint folder. No other weight is read. Without a dtype it has that of the text."""
    path = Path(path)
    if is_gguf(path):
        raise CheckpointError(f"{path} is a GGUF file, which has no vision tower: use the checkpoint it was made from")
    with verify_files(path):
        config = read_model_config(path)
        if not isinstance(config, ModelConfig) or config.is_causal_only:
            raise CheckpointError(f"{path} is a causal-only model; redraft takes images with DiffusionGemma only")
        source = str(path / CONFIG)
        vision_config = parse_vision_config(config.vision, source)
        if vision_config.is_empty:
            raise CheckpointError(f"{path} is a text-only model: its vision tower has no layers, so it takes no images")
        images = read_image_config(path, vision_config)
        longest = images.max_patches // images.pooling_kernel_size  # the side of the widest picture, in patches
        if vision_config.position_embedding_size < longest:
            raise CheckpointError(
                f"{path}: position_embedding_size is {vision_config.position_embedding_size}, and a picture of "
                f"{images.max_soft_tokens} tokens may be {longest} patches wide"
            )
        tensors = CheckpointTensors(path)
        available = set(tensors)
        _compare_layers(available, vision_config.num_hidden_layers, path)
        with torch.device("meta"):
            vision = Vision(vision_config, config.hidden_size)
        expected = vision.state_dict()
        stored = {name: fetch_weight(tensors, available, VISION_PARENT + name, each) for name, each in expected.items()}
    unknown = sorted(
        name for name in available if name.startswith(VISION) and name.removeprefix(VISION_PARENT) not in expected
    )
    if unknown:
        raise CheckpointError(f"{path} has a vision tensor that this model does not have: {unknown[0][:200]}")
    dtype = dtype or default_dtype(tensors[DECODER + "embed_tokens.weight"])
    weights = {name: _to(tensor, dtype, device) for name, tensor in stored.items()}
    vision.load_state_dict(weights, assign=True)
    return VisionParts(vision.eval().requires_grad_(False), images, config.image_token_ids)


def _to(tensor: object, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    assert isinstance(tensor, Tensor)  # the plain tensors of the file
    return tensor.to(device, dtype)


def _compare_layers(names: set[str], layers: int, path: Path) -> None:
    """Compares config.json with the headers of the weights before a tower is built."""
    layer_name = re.compile(re.escape(VISION[0]) + r"encoder\.layers\.(\d{1,9})\.")
    stored = max((int(match[1]) for name in names if (match := layer_name.match(name))), default=-1) + 1
    if stored != layers:
        raise CheckpointError(f"{path}: vision_config has {layers} layers and the weights have {stored}")
