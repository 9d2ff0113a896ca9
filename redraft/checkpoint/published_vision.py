"""Reads what a published checkpoint says about images. Text-only use does not.

config.json: vision_config                       -> VisionConfig
processor_config.json, preprocessor_config.json  -> ImageConfig
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from redraft.checkpoint.names import CONFIG, PREPROCESSOR_CONFIG, PROCESSOR_CONFIG
from redraft.checkpoint.published_values import refuse_variants
from redraft.config import ConfigError, read_json, require_object, show_value
from redraft.config.vision import ImageConfig, VisionConfig

# Settings that change the mathematics, and the values that redraft runs. None means that the key is absent.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "model_type": (None, "gemma4_vision"),
    "attention_bias": (None, False),
    "hidden_activation": (None, "gelu_pytorch_tanh"),
    "output_proj_dims": (None,),
}
ROPE_TYPES = (None, "default", "axial")  # transformers takes "default" of older files for "axial"
IMAGES_ALLOWED: dict[str, tuple[Any, ...]] = {
    "do_convert_rgb": (None, True),
    "do_resize": (None, True),
    "do_rescale": (None, True),
    "rescale_factor": (None, 1 / 255),
    "resample": (None, 3),  # bicubic
}


def parse_vision_config(raw: Mapping[str, Any], source: str = CONFIG) -> VisionConfig:
    """Makes a VisionConfig from `vision_config`. A missing key has transformers' default."""
    source = f"{source}: vision_config"
    refuse_variants(raw, ALLOWED, source)
    rope = require_object(f"{source}: rope_parameters", raw.get("rope_parameters"))
    if rope.get("rope_type") not in ROPE_TYPES:
        raise ConfigError(f"{source}: rope_type is {show_value(rope['rope_type'])}; redraft runs 'axial' only")
    names = {field.name for field in fields(VisionConfig)} - {"rope_theta"}
    settings = {name: raw[name] for name in sorted(names) if raw.get(name) is not None}
    if rope.get("rope_theta") is not None:
        settings["rope_theta"] = rope["rope_theta"]
    return VisionConfig(**settings)


def read_image_config(folder: str | Path, vision: VisionConfig) -> ImageConfig:
    """Reads how pictures become patches. A folder without such a file has transformers' defaults."""
    settings: Mapping[str, Any] = {}
    source = PROCESSOR_CONFIG
    for name in (PREPROCESSOR_CONFIG, PROCESSOR_CONFIG):
        path = Path(folder) / name
        if path.exists():
            raw = read_json(path)
            found = (
                raw
                if name == PREPROCESSOR_CONFIG
                else require_object(f"{path}: image_processor", raw.get("image_processor"))
            )
            settings = found or settings
            source = str(path) if found else source
    return parse_image_config(settings, vision, source)


def parse_image_config(raw: Mapping[str, Any], vision: VisionConfig, source: str = PROCESSOR_CONFIG) -> ImageConfig:
    """Makes an ImageConfig from the settings of an image processor. It must make the patches that the tower takes."""
    refuse_variants(raw, IMAGES_ALLOWED, source)
    mean, std = raw.get("image_mean") or [0.0] * 3, raw.get("image_std") or [1.0] * 3
    if raw.get("do_normalize") and (mean != [0.0] * 3 or std != [1.0] * 3):
        raise ConfigError(f"{source}: pixels are normalized with {show_value(mean)} and {show_value(std)}; redraft does not")
    settings: dict[str, Any] = {"patch_size": vision.patch_size, "pooling_kernel_size": vision.pooling_kernel_size}
    for name, value in settings.items():
        if raw.get(name) not in (None, value):
            raise ConfigError(f"{source}: {name} is {show_value(raw[name])}, and the vision tower takes {value}")
    if raw.get("max_soft_tokens") is not None:
        settings["max_soft_tokens"] = raw["max_soft_tokens"]
    return ImageConfig(**settings)
