"""Configuration records: frozen, and they refuse values that cannot run.

`ModelConfig()` and `SamplerConfig()` without arguments describe the released 26B-A4B checkpoint. The package `checkpoint`
reads them from published files and writes them.

backbone.py   BackboneConfig: what the shapes of all architectures have in common
gemma.py      ModelConfig: DiffusionGemma and Gemma 4
llama.py      LlamaConfig: Llama, SmolLM2, Mistral, Qwen2 and Qwen3
vision.py     VisionConfig and ImageConfig: a vision tower, and how pictures become patches
sampler.py    SamplerConfig: how tokens are generated
engine.py     EngineConfig: how many requests run at once
values.py     checks of single values
files.py      reads and replaces single files
json_text.py  parses JSON text of limited depth
"""

from redraft.config.backbone import FULL, LARGEST, LARGEST_DRAFT_HEAD, MOST_LAYERS, SLIDING, BackboneConfig
from redraft.config.engine import EngineConfig
from redraft.config.files import MAX_FILE_BYTES, read_file, read_json, replace_file, require_regular_file, write_text
from redraft.config.gemma import RELEASED_LAYERS, SMALLEST_VISION, ModelConfig
from redraft.config.json_text import MAX_DEPTH, JSONDepthError, parse_json
from redraft.config.llama import FAMILIES, LlamaConfig, RopeScaling
from redraft.config.sampler import (
    AUTO,
    AUTO_LENGTHS,
    CHECKS,
    COLDEST_TEMPERATURE_SCALE,
    DEFAULT_EDIT_STRENGTH,
    MAX_DRAFT_LENGTH,
    SamplerConfig,
    parse_logit_bias,
)
from redraft.config.values import (
    MOST_LENGTHS,
    ConfigError,
    require_ids,
    require_int,
    require_lengths,
    require_number,
    require_object,
    require_range,
    show_value,
)

__all__ = [
    "AUTO",
    "AUTO_LENGTHS",
    "CHECKS",
    "COLDEST_TEMPERATURE_SCALE",
    "DEFAULT_EDIT_STRENGTH",
    "FAMILIES",
    "FULL",
    "LARGEST",
    "LARGEST_DRAFT_HEAD",
    "MAX_DEPTH",
    "MAX_DRAFT_LENGTH",
    "MAX_FILE_BYTES",
    "MOST_LAYERS",
    "MOST_LENGTHS",
    "RELEASED_LAYERS",
    "SLIDING",
    "SMALLEST_VISION",
    "BackboneConfig",
    "ConfigError",
    "EngineConfig",
    "JSONDepthError",
    "LlamaConfig",
    "ModelConfig",
    "RopeScaling",
    "SamplerConfig",
    "parse_json",
    "parse_logit_bias",
    "read_file",
    "read_json",
    "replace_file",
    "require_ids",
    "require_int",
    "require_lengths",
    "require_number",
    "require_object",
    "require_range",
    "require_regular_file",
    "show_value",
    "write_text",
]
