"""Whether a checkpoint takes images, from config.json and the headers of its weights. No weight is read."""

from pathlib import Path

from redraft.checkpoint.gguf import is_gguf
from redraft.checkpoint.names import CONFIG, VISION, CheckpointError
from redraft.checkpoint.parts import find_base
from redraft.checkpoint.published_config import read_model_config
from redraft.checkpoint.published_vision import parse_vision_config, read_image_config
from redraft.checkpoint.tensors import CheckpointTensors
from redraft.config import ConfigError, ModelConfig
from redraft.config.vision import ImageConfig

LAYERS = VISION[0] + "encoder.layers."


def find_image_config(path_or_id: str | Path | None) -> ImageConfig | str:
    """How a model's pictures become patches; a few words about what the model is if it takes none."""
    if path_or_id is None:
        return "one that was made without a checkpoint"
    try:
        path, _ = find_base(path_or_id)
        return _read_image_config(path)
    except (CheckpointError, ConfigError, OSError):  # the folder has gone, or its vision tower is of another kind
        return "one whose vision tower redraft cannot read"


def _read_image_config(path: Path) -> ImageConfig | str:
    if is_gguf(path):
        return "a GGUF file, which has no vision tower"
    config = read_model_config(path)
    if not isinstance(config, ModelConfig) or config.is_causal_only:
        return "a causal-only model"
    vision = parse_vision_config(config.vision, str(path / CONFIG))
    if vision.is_empty:
        return "a text-only diffusion model"
    if not any(name.startswith(LAYERS) for name in CheckpointTensors(path)):  # an empty tower has tensors too
        return "a checkpoint without the weights of its vision tower"
    return read_image_config(path, vision)
