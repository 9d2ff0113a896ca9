"""Metadata of a GGUF file -> configuration and SamplerConfig. What a DiffusionGemma file leaves out is as in the release."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redraft.checkpoint.gguf.header import GgufFile
from redraft.checkpoint.gguf.llama_settings import ARCHITECTURES, parse_llama_sampler, parse_llama_settings
from redraft.checkpoint.gguf.values import ROPE_FREQUENCIES, as_written, read_embedding_rows, require_setting
from redraft.checkpoint.names import CheckpointError
from redraft.config import (
    FULL,
    MOST_LAYERS,
    SLIDING,
    BackboneConfig,
    ConfigError,
    LlamaConfig,
    ModelConfig,
    SamplerConfig,
    require_int,
    show_value,
)
from redraft.kernels.rope import rope_frequencies

ARCHITECTURE = "diffusion-gemma"
PREFIX = f"{ARCHITECTURE}."
SPLIT = "split.count"
NO_ROTATION = 1e29  # a pair whose frequency is divided by this much or more does not turn; files have 1e30
TOKENS = "tokenizer.ggml.tokens"
STOP_TOKENS = ("<turn|>", "<|tool_response>")  # beside eos_token_id; the model's config.json has the first, the sampler both
# Settings of other Gemma 4 models that would change the mathematics. They must be absent or 0.
UNSUPPORTED = ("attention.shared_kv_layers", "embedding_length_per_layer_input")
SAMPLER_KEYS = {  # ours -> the file's
    "max_steps": "diffusion.eb_max_steps",
    "t_min": "diffusion.eb_t_min",
    "t_max": "diffusion.eb_t_max",
    "entropy_bound": "diffusion.eb_entropy_bound",
    "stability_threshold": "diffusion.eb_stability_threshold",
    "confidence_threshold": "diffusion.eb_confidence_threshold",
}


def check_architecture(path: Path, metadata: Mapping[str, Any]) -> None:
    """Refuses files of other models, and parts of a split file."""
    architecture = metadata.get("general.architecture")
    if architecture == "gemma4":
        raise CheckpointError(
            f"{path} is Gemma 4, the autoregressive model; redraft reads GGUF files of DiffusionGemma ({ARCHITECTURE})"
        )
    if architecture != ARCHITECTURE and architecture not in ARCHITECTURES:
        known = ", ".join((ARCHITECTURE, *ARCHITECTURES))
        raise CheckpointError(f"{path} has the architecture {show_value(architecture)}; redraft runs {known}")
    parts = metadata.get(SPLIT, 1)
    if parts not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {show_value(parts)} parts of a model; join them with llama-gguf-split --merge first"
        )


def parse_model_settings(file: GgufFile) -> BackboneConfig:
    """The shape of the model. Whatever is wrong is a CheckpointError that names the file."""
    try:
        if file.metadata["general.architecture"] in ARCHITECTURES:
            return parse_llama_settings(file)
        return _parse_model_settings(file)
    except ConfigError as error:
        raise CheckpointError(f"{file.path}: {error}") from None


def parse_sampler_settings(file: GgufFile, model: BackboneConfig) -> SamplerConfig:
    """How text is generated."""
    settings = {name: as_written(file.metadata[key]) for name, key in SAMPLER_KEYS.items() if key in file.metadata}
    try:
        if isinstance(model, LlamaConfig):
            return parse_llama_sampler(file, model)
        return SamplerConfig(
            canvas_length=model.canvas_length,
            eos_token_ids=_stop_tokens(file, STOP_TOKENS),
            pad_token_id=model.pad_token_id,
            **settings,
        )
    except ConfigError as error:
        raise CheckpointError(f"{file.path}: {error}") from None


def _parse_model_settings(file: GgufFile) -> ModelConfig:
    layers = require_int("block_count", require_setting(file, "block_count"), 1, MOST_LAYERS)
    for name in UNSUPPORTED:
        if file.metadata.get(PREFIX + name, 0) != 0:
            raise ConfigError(f"{name} is {show_value(file.metadata[PREFIX + name])}; redraft runs 0 only")
    pattern = require_setting(file, "attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != layers or not all(isinstance(item, bool) for item in pattern):
        raise ConfigError(f"sliding_window_pattern must hold {layers} booleans, got {show_value(pattern)}")
    layer_types = tuple(SLIDING if is_sliding else FULL for is_sliding in pattern)
    kv_heads, global_kv_heads = _by_layer_type(file, "attention.head_count_kv", layer_types)
    head_dim = _read_head_size(file, "_swa")
    global_head_dim = _read_head_size(file, "")
    return ModelConfig(
        vocab_size=read_embedding_rows(file),
        hidden_size=require_setting(file, "embedding_length"),
        intermediate_size=_same_in_all_layers(file, "feed_forward_length", layers),
        moe_intermediate_size=require_setting(file, "expert_feed_forward_length"),
        num_experts=require_setting(file, "expert_count"),
        top_k_experts=require_setting(file, "expert_used_count"),
        layer_types=layer_types,
        num_attention_heads=_same_in_all_layers(file, "attention.head_count", layers),
        num_key_value_heads=kv_heads,
        num_global_key_value_heads=global_kv_heads,
        head_dim=head_dim,
        global_head_dim=global_head_dim,
        sliding_window=require_setting(file, "attention.sliding_window"),
        rope_theta=require_setting(file, "rope.freq_base_swa"),
        global_rope_theta=require_setting(file, "rope.freq_base"),
        global_rotary_fraction=_read_rotary_fraction(file, global_head_dim),
        rms_norm_eps=require_setting(file, "attention.layer_norm_rms_epsilon"),
        final_logit_softcapping=require_setting(file, "final_logit_softcapping"),
        max_position_embeddings=require_setting(file, "context_length"),
        canvas_length=file.metadata.get("diffusion.canvas_length", 256),
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id", 0),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id", 2),
        eos_token_ids=_stop_tokens(file, STOP_TOKENS[:1]),
    )


def _same_in_all_layers(file: GgufFile, name: str, layers: int) -> Any:
    """A number, or a list with the same number for every layer."""
    value = require_setting(file, name)
    if isinstance(value, list):
        if len(value) != layers or len(set(value)) != 1:
            raise ConfigError(f"{name} must be the same number in all {layers} layers, got {show_value(value)}")
        return value[0]
    return value


def _by_layer_type(file: GgufFile, name: str, layer_types: tuple[str, ...]) -> tuple[Any, Any]:
    """The number of sliding layers and that of full ones, from one number or from a list by layer."""
    value = require_setting(file, name)
    by_layer = value if isinstance(value, list) else [value] * len(layer_types)
    if len(by_layer) != len(layer_types):
        raise ConfigError(f"{name} must hold {len(layer_types)} numbers, got {show_value(value)}")
    numbers = dict(zip(layer_types, by_layer, strict=True))
    if [numbers[kind] for kind in layer_types] != by_layer:
        raise ConfigError(f"{name} differs between layers of the same type: {show_value(value)}")
    return numbers.get(SLIDING, by_layer[0]), numbers.get(FULL, by_layer[0])


def _read_head_size(file: GgufFile, suffix: str) -> Any:
    """The head size of full layers, or of sliding ones with the suffix "_swa". Keys, values and RoPE must have the same."""
    size = require_setting(file, f"attention.key_length{suffix}")
    for name in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
        other = file.metadata.get(PREFIX + name, size)
        if other != size:
            raise ConfigError(f"{name} is {show_value(other)} and the head size {show_value(size)}; redraft runs equal ones")
    return size


def _read_rotary_fraction(file: GgufFile, head_dim: Any) -> float:
    """The share of a head's pairs that RoPE turns in full layers: `rope_freqs` has 1 for these, and 1e30 for the rest."""
    pairs = require_int("attention.key_length", head_dim, 2, 2**14) // 2
    info = file.tensors.get(ROPE_FREQUENCIES)
    if info is None or info.shape != (pairs,) or info.type.dtype is None:
        found = "is missing" if info is None else f"has the shape {list(info.shape)} and the format {info.type.name}"
        raise ConfigError(f"tensor {ROPE_FREQUENCIES} {found}; it must hold {pairs} plain numbers")
    divisors = file.rows(ROPE_FREQUENCIES).view(info.type.dtype).float()
    turning = int((divisors == 1).sum())
    is_proportional = bool((divisors[:turning] == 1).all()) and bool((divisors[turning:] >= NO_ROTATION).all())
    fraction = turning / pairs
    has_same_pairs = int(rope_frequencies(2 * pairs, 10.0, fraction, "cpu").count_nonzero()) == turning
    if not is_proportional or not turning or not has_same_pairs:
        raise ConfigError(f"tensor {ROPE_FREQUENCIES} must hold ones and then 1e30; redraft runs no other scaling of RoPE")
    return fraction


def _stop_tokens(file: GgufFile, names: tuple[str, ...]) -> tuple[int, ...]:
    """The end token of the file, and the tokens of these names where the vocabulary has them."""
    ids = [file.metadata.get("tokenizer.ggml.eos_token_id", 1)]
    tokens: Any = file.metadata.get(TOKENS)
    for name in names if isinstance(tokens, list) else ():
        if name in tokens and tokens.index(name) not in ids:
            ids.append(tokens.index(name))
    return tuple(ids)
