"""Reads `quantization_config`: how the weights of a published checkpoint are quantized. Refuses what redraft does not read.

    quant_method        format or quant_algo                          becomes
    compressed-tensors  float-quantized (8 bits, by channel)          fp8
                        nvfp4-pack-quantized                          nvfp4
                        pack-quantized (4 bits, integers)             int4
                        mixed-precision: a format in each group       several of them
    modelopt            NVFP4, W4A16_NVFP4                            nvfp4

Which module has which format is not read here: the tensors of a module tell it. So the patterns in `targets` and `ignore`,
which may come from anywhere, are never run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.config import ConfigError, read_json, require_int, require_object, show_value
from redraft.model.quant.policy import QUANT_FORMATS

COMPRESSED_TENSORS = "compressed-tensors"
MODELOPT = "modelopt"
MODELOPT_CONFIG = "hf_quant_config.json"  # where ModelOpt writes the same beside config.json
MODELOPT_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")
FLOAT_QUANTIZED = "float-quantized"
NVFP4_PACKED = "nvfp4-pack-quantized"
INT4_PACKED = "pack-quantized"
MIXED = "mixed-precision"
READABLE = "compressed-tensors fp8 by channel, NVFP4 and 4-bit integers, and ModelOpt's NVFP4"
WAY_OUT = "load another file of this model, or the bf16 checkpoint"


@dataclass(frozen=True)
class Quantization:
    """The formats of a quantized checkpoint."""

    method: str
    formats: tuple[str, ...]  # ours: "nvfp4", "int4", "fp8", each once
    int4_groups: tuple[int | None, ...] = ()  # inputs that share a scale; None: a whole row does

    @property
    def name(self) -> str:
        """The formats in one word: "nvfp4+fp8"."""
        return "+".join(self.formats)


def read_quantization(folder: Path, raw: Mapping[str, Any], source: str) -> Quantization | None:
    """Reads the quantization of a folder, whose config.json is `raw`; None for plain weights."""
    if not raw.get("quantization_config") and (folder / MODELOPT_CONFIG).exists():
        source = str(folder / MODELOPT_CONFIG)
        settings = require_object(f"{source}: quantization", read_json(folder / MODELOPT_CONFIG).get("quantization"))
        return parse_quantization({"quantization_config": {**settings, "quant_method": MODELOPT}}, source)
    return parse_quantization(raw, source)


def parse_quantization(raw: Mapping[str, Any], source: str) -> Quantization | None:
    """Reads `quantization_config` of a config.json; None for plain weights."""
    settings = require_object(f"{source}: quantization_config", raw.get("quantization_config"))
    if not settings:
        return None
    method = settings.get("quant_method")
    if method == MODELOPT:
        return _parse_modelopt(settings, source)
    if method != COMPRESSED_TENSORS:
        raise ConfigError(f"{source} is quantized as {show_value(method)}; redraft reads {READABLE}: {WAY_OUT}")
    groups = require_object(f"{source}: config_groups", settings.get("config_groups"))
    if not groups:
        raise ConfigError(f"{source} has a quantization_config without config_groups; redraft reads {READABLE}: {WAY_OUT}")
    formats = []
    int4_groups = []
    for name, group in groups.items():
        group = require_object(f"{source}: {name} of quantization_config", group)
        ours, group_size = _parse_group(name, group, settings.get("format"), source)
        formats.append(ours)
        int4_groups += [group_size] if ours == "int4" else []
    known = tuple(name for name in QUANT_FORMATS if name in formats)
    return Quantization(COMPRESSED_TENSORS, known, tuple(dict.fromkeys(int4_groups)))


def _parse_modelopt(settings: Mapping[str, Any], source: str) -> Quantization:
    algorithm = settings.get("quant_algo")
    if algorithm not in MODELOPT_ALGORITHMS:
        layers = require_object(f"{source}: quantized_layers", settings.get("quantized_layers"))
        example = f" (module {show_value(next(iter(layers)))} among others)" if layers else ""
        raise ConfigError(
            f"{source} is quantized as {MODELOPT!r}, {show_value(algorithm)}{example}; redraft reads {READABLE}: {WAY_OUT}"
        )
    return Quantization(MODELOPT, ("nvfp4",))


def _parse_group(name: str, group: Mapping[str, Any], whole_format: Any, source: str) -> tuple[str, int | None]:
    """Our word for the format of one group, and the inputs that share a scale, if that is to be known."""
    file_format = group.get("format") or whole_format
    weights = require_object(f"{source}: weights of {name}", group.get("weights"))
    kind = (weights.get("num_bits"), weights.get("type", "int"))
    strategy = weights.get("strategy")
    if file_format == FLOAT_QUANTIZED and (*kind, strategy) == (8, "float", "channel"):
        return "fp8", None
    if file_format == NVFP4_PACKED and kind == (4, "float"):
        return "nvfp4", None
    if file_format == INT4_PACKED and kind == (4, "int") and strategy in (None, "group", "channel"):
        group_size = weights.get("group_size")
        if strategy == "channel" or group_size in (None, -1):
            return "int4", None
        return "int4", require_int(f"{source}: group_size of {name}", group_size, 1, 2**20)
    raise ConfigError(
        f"{source}: {name}, of modules {show_value(group.get('targets'))}, is quantized as {COMPRESSED_TENSORS!r}, format "
        f"{show_value(file_format)}, {show_value(kind[0])} bits ({show_value(kind[1])}, {show_value(strategy)}); redraft "
        f"reads {READABLE}: {WAY_OUT}"
    )
