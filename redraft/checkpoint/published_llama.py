"""config.json of Llama, Mistral, Qwen2 and Qwen3 <-> LlamaConfig.

SmolLM2 is a Llama by its file. As for Gemma, every variant that would silently change the mathematics is refused: other
activations, biases elsewhere, other kinds of RoPE, experts, quantized weights.
"""

from collections.abc import Mapping
from typing import Any

from redraft.checkpoint.published_values import first_value, refuse_variants, require_value
from redraft.config import (
    FULL,
    MOST_LAYERS,
    SLIDING,
    ConfigError,
    LlamaConfig,
    RopeScaling,
    require_ids,
    require_int,
    require_number,
    require_object,
    show_value,
)

LLAMA_ARCHITECTURES = {  # architecture -> model type, which is the family of LlamaConfig
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Settings that change the mathematics, and the values that redraft runs. None means that the key is absent.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),  # Qwen2 has its biases without this key
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "quantization_config": (None,),
}
REQUIRED_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
# What transformers takes where a file leaves these out. The others of its defaults are taken by no file.
DEFAULT_EPS = 1e-6
DEFAULT_THETA = 10_000.0
DEFAULT_WINDOW = 4096
DEFAULT_FULL_LAYERS = 28  # max_window_layers
LLAMA_STOP = 2
LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def parse_llama_config(raw: Mapping[str, Any], family: str, source: str) -> LlamaConfig:
    """Makes a LlamaConfig from the content of config.json. Error messages name `source`."""
    refuse_variants(raw, ALLOWED, source)
    required = {name: require_value(raw, name, source) for name in REQUIRED_KEYS}
    layer_types, window = _parse_layers(raw, family, source)
    theta, scaling = _parse_rope(raw, source)
    default_stop = LLAMA_STOP if family in ("llama", "mistral") else None
    if raw.get("eos_token_id") is None and default_stop is None:
        raise ConfigError(f"{source} has no value for eos_token_id, and redraft assumes none")
    stops = require_ids("eos_token_id", first_value(raw.get("eos_token_id"), default_stop))
    if not stops:
        raise ConfigError(f"{source}: eos_token_id is empty; a model needs at least one stop token")
    tied = first_value(raw.get("tie_word_embeddings"), False)
    if not isinstance(tied, bool):
        raise ConfigError(f"{source}: tie_word_embeddings must be true or false, got {show_value(tied)}")
    return LlamaConfig(
        **required,
        family=family,
        layer_types=layer_types,
        sliding_window=window,
        num_key_value_heads=_parse_key_value_heads(raw, family, source),
        head_dim=_parse_head_dim(raw, family, source),
        rms_norm_eps=first_value(raw.get("rms_norm_eps"), DEFAULT_EPS),
        rope_theta=theta,
        rope_scaling=scaling,
        has_qkv_bias=family == "qwen2",
        has_qk_norm=family == "qwen3",
        has_tied_head=tied,
        bos_token_id=_parse_token(raw.get("bos_token_id"), stops),
        eos_token_ids=stops,
        pad_token_id=_parse_token(raw.get("pad_token_id"), stops),
    )


def publish_llama_config(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Makes the content of config.json, in keys that old and new versions of transformers read."""
    architecture = next(name for name, family in LLAMA_ARCHITECTURES.items() if family == config.family)
    content: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": config.family,
        **{name: getattr(config, name) for name in REQUIRED_KEYS},
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _publish_scaling(config.rope_scaling),
        "hidden_act": "silu",
        "tie_word_embeddings": config.has_tied_head,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) if len(config.eos_token_ids) > 1 else config.eos_token_ids[0],
        "pad_token_id": config.pad_token_id,
        "dtype": dtype,
    }
    if config.family == "mistral":
        content["sliding_window"] = config.sliding_window if config.has_sliding_layers else None
    elif config.family.startswith("qwen"):
        content |= {
            "use_sliding_window": config.has_sliding_layers,
            "sliding_window": config.sliding_window if config.has_sliding_layers else None,
            "max_window_layers": config.layer_types.index(SLIDING) if config.has_sliding_layers else len(config.layer_types),
            "layer_types": list(config.layer_types),
        }
    if config.family in ("llama", "qwen3"):
        content["attention_bias"] = False
    return content


def _parse_token(value: Any, stops: tuple[int, ...]) -> int:
    """A token that a file may leave out, or give as -1: the stop token stands for it."""
    is_absent = value is None or (isinstance(value, int) and value < 0)
    return stops[0] if is_absent else require_ids("token id", value)[0]


def _parse_key_value_heads(raw: Mapping[str, Any], family: str, source: str) -> int:
    if family == "llama" and raw.get("num_key_value_heads") is None:  # files of Llama 1 do not name them
        return require_int("num_attention_heads", raw["num_attention_heads"])
    heads: int = require_value(raw, "num_key_value_heads", source)
    return heads


def _parse_head_dim(raw: Mapping[str, Any], family: str, source: str) -> int:
    if raw.get("head_dim") is not None or family == "qwen3":
        head_dim: int = require_value(raw, "head_dim", source)
        return head_dim
    size = require_int("hidden_size", raw["hidden_size"])
    heads = require_int("num_attention_heads", raw["num_attention_heads"])
    if size % heads:
        raise ConfigError(f"{source}: a hidden_size of {size} is no multiple of {heads} attention heads")
    return size // heads


def _parse_layers(raw: Mapping[str, Any], family: str, source: str) -> tuple[tuple[str, ...], int]:
    """The types of the layers, and the window of the sliding ones."""
    count = require_int("num_hidden_layers", require_value(raw, "num_hidden_layers", source), 1, MOST_LAYERS)
    if family == "llama":
        refuse_variants(raw, {"sliding_window": (None,)}, source)
        return (FULL,) * count, DEFAULT_WINDOW
    window = raw.get("sliding_window", DEFAULT_WINDOW)
    if family != "mistral" and raw.get("use_sliding_window") is not True:
        window = None
    if window is not None:
        require_int(f"{source}: sliding_window", window, 2)
    layer_types = raw.get("layer_types") if family != "mistral" else None
    if layer_types is None:
        full = 0
        if family != "mistral":
            full = require_int("max_window_layers", raw.get("max_window_layers", DEFAULT_FULL_LAYERS), 0)
        layer_types = [SLIDING if window is not None and layer >= full else FULL for layer in range(count)]
    if not isinstance(layer_types, list) or len(layer_types) != count:
        raise ConfigError(f"{source}: layer_types must list {count} layers, got {show_value(layer_types)}")
    if window is None and SLIDING in layer_types:
        raise ConfigError(f"{source}: layer_types has {SLIDING!r}, but no sliding_window is in use")
    return tuple(layer_types), window or DEFAULT_WINDOW


def _parse_rope(raw: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling of RoPE: `rope_theta` and `rope_scaling` in older files, both in `rope_parameters` in newer ones."""
    name = "rope_parameters" if raw.get("rope_parameters") is not None else "rope_scaling"
    rope = require_object(f"{source}: {name}", raw.get(name))
    refuse_variants(rope, {"partial_rotary_factor": (None, 1.0)}, source)
    theta = first_value(rope.get("rope_theta"), raw.get("rope_theta"), DEFAULT_THETA)
    theta = require_number(f"{source}: rope_theta", theta)
    kind = first_value(rope.get("rope_type"), rope.get("type"), "default")
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise ConfigError(f"{source}: RoPE of the kind {show_value(kind)}; redraft runs default, linear and llama3")
    factor = require_value(rope, "factor", f"{source}: {name}")
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=factor)
    return theta, RopeScaling(
        kind=kind, factor=factor, **{key: require_value(rope, key, f"{source}: {name}") for key in LLAMA3_KEYS}
    )


def _publish_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    content: dict[str, Any] = {"rope_type": scaling.kind, "factor": float(scaling.factor)}
    if scaling.kind == "llama3":
        content |= {key: getattr(scaling, key) for key in LLAMA3_KEYS}
    return content
