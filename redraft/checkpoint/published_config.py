"""Reads and writes the JSON files of a checkpoint folder: config.json, generation_config.json and redraft.json.

    config.json             <-> ModelConfig      the published file, in transformers' keys (LlamaConfig: published_llama.py)
    generation_config.json  <-> SamplerConfig    the published file, in transformers' keys
    redraft.json            <-> SamplerConfig    sampler settings that transformers has no field for and would refuse

One field of ModelConfig is in none of them: the size of the draft head is read from the header of its weights.

For each record there are three functions: `read_...` takes a folder, `parse_...` takes the JSON objects, `publish_...` makes
the JSON objects. Parsing refuses every variant of the architecture that would silently change the mathematics.

Standard Gemma 4 checkpoints of the same shape (a mixture of experts in every layer, no per-layer inputs) are read as
causal-only models: Gemma4ForConditionalGeneration, whose vision and audio parts are skipped, and Gemma4ForCausalLM, whose
config.json is flat. Causal-only models are written as Gemma4ForCausalLM.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from redraft.checkpoint.names import CONFIG, GENERATION_CONFIG, REDRAFT_CONFIG
from redraft.checkpoint.published_llama import LLAMA_ARCHITECTURES, parse_llama_config, publish_llama_config
from redraft.checkpoint.published_values import first_value, refuse_variants, require_value
from redraft.checkpoint.quantization import parse_quantization, read_quantization
from redraft.checkpoint.tensors import read_draft_head_size
from redraft.config import (
    FULL,
    MOST_LAYERS,
    SLIDING,
    SMALLEST_VISION,
    BackboneConfig,
    ConfigError,
    LlamaConfig,
    ModelConfig,
    SamplerConfig,
    read_json,
    require_ids,
    require_int,
    require_number,
    require_object,
    show_value,
)

ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"
CAUSAL_ARCHITECTURE = "Gemma4ForCausalLM"
MODEL_TYPES = {  # by architecture
    ARCHITECTURE: "diffusion_gemma",
    "Gemma4ForConditionalGeneration": "gemma4",
    CAUSAL_ARCHITECTURE: "gemma4_text",
}
ENTROPY_BOUND_SAMPLER = "EntropyBoundSamplerConfig"  # transformers' class name, written as `_cls_name`
# Fields of ModelConfig that text_config has under the same name, in the order in which they are written.
PUBLISHED_KEYS = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_experts top_k_experts num_hidden_layers "
    "num_attention_heads num_key_value_heads num_global_key_value_heads head_dim global_head_dim sliding_window "
    "rms_norm_eps final_logit_softcapping max_position_embeddings pad_token_id bos_token_id"
).split()
# These must be in the file: the class defaults of other libraries differ from the released values.
REQUIRED_KEYS = (
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_experts top_k_experts "
    "num_attention_heads num_key_value_heads head_dim sliding_window max_position_embeddings"
).split()
OPTIONAL_KEYS = ("rms_norm_eps", "final_logit_softcapping")
# Settings that change the mathematics, and the values that redraft runs. None means that the key is absent.
ALLOWED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "hidden_activation": (None, "gelu_pytorch_tanh"),
    "use_bidirectional_attention": (None, "vision"),
    "tie_word_embeddings": (None, True),
    "attention_k_eq_v": (None, True),
    "enable_moe_block": (None, True),
}
GEMMA4_ALLOWED = ALLOWED | {
    "attention_k_eq_v": (True,),
    "enable_moe_block": (True,),
    "hidden_size_per_layer_input": (0,),
    "num_kv_shared_layers": (None, 0),
    "use_double_wide_mlp": (None, False),
}
# What transformers takes for keys that a Gemma 4 file leaves out. redraft runs none of these values.
GEMMA4_DEFAULTS = {"hidden_size_per_layer_input": 256, "attention_k_eq_v": False, "enable_moe_block": False}
# Fields of SamplerConfig that generation_config.json has under the same name.
GENERATION_KEYS = ("max_new_tokens", "t_min", "t_max", "stability_threshold", "confidence_threshold", "pad_token_id")
CAUSAL_GENERATION_KEYS = ("max_new_tokens", "pad_token_id", "repetition_penalty")
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p")  # of causal-only checkpoints, used where do_sample is true
TRANSFORMERS_TOP_K = 50
REDRAFT_KEYS = (
    "canvas_length canvas_lengths settle_prefix quota accept_at_end spread stops_last check tolerance draft_length "
    "draft_steps draft_token temperature top_k top_p min_p repetition_penalty"
).split()


# 1. ModelConfig


def read_model_config(folder: str | Path) -> BackboneConfig:
    """Reads config.json of a checkpoint folder, and the size of its draft head."""
    path = Path(folder) / CONFIG
    raw = read_json(path)
    config = parse_model_config(raw, str(path))
    if not isinstance(config, ModelConfig):
        return config
    quantization = read_quantization(Path(folder), raw, str(path))
    return replace(
        config,
        quant=quantization.name if quantization else None,
        draft_head_size=read_draft_head_size(Path(folder), config.hidden_size),
    )


def parse_model_config(raw: Mapping[str, Any], source: str = CONFIG) -> BackboneConfig:
    """Makes a ModelConfig or a LlamaConfig from the content of config.json. Error messages name `source`."""
    architecture = _read_architecture(raw, source)
    if architecture in LLAMA_ARCHITECTURES:
        return parse_llama_config(raw, LLAMA_ARCHITECTURES[architecture], source)
    text = raw if architecture == CAUSAL_ARCHITECTURE else raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"{source} has no text_config")
    if architecture == ARCHITECTURE:
        refuse_variants(text, ALLOWED, source)
    else:
        _refuse_gemma4_variants(raw, text, source)
    quantization = parse_quantization(raw, source)
    layer_types = _parse_layer_types(text, source)
    rope = _parse_rope(text, source)
    required = {name: require_value(text, name, source) for name in REQUIRED_KEYS}
    optional = {name: text[name] for name in OPTIONAL_KEYS if text.get(name) is not None}
    only_diffusion = _parse_diffusion_parts(raw, text, source) if architecture == ARCHITECTURE else {"is_causal_only": True}
    return ModelConfig(
        **required,
        **optional,
        **_parse_full_layer_heads(text, layer_types, source),
        **rope,
        **only_diffusion,
        layer_types=layer_types,
        quant=quantization.name if quantization else None,
        pad_token_id=first_value(text.get("pad_token_id"), 0),
        bos_token_id=first_value(text.get("bos_token_id"), 2),
        eos_token_ids=require_ids("eos_token_id", first_value(raw.get("eos_token_id"), text.get("eos_token_id"), 1)),
    )


def publish_model_config(config: BackboneConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """Makes the content of config.json, in the keys of the released file. The caller adds `quantization_config`."""
    if isinstance(config, LlamaConfig):
        return publish_llama_config(config, dtype)
    assert isinstance(config, ModelConfig)
    text = _publish_text_config(config, dtype)
    if config.is_causal_only:
        return {
            "architectures": [CAUSAL_ARCHITECTURE],
            "model_type": MODEL_TYPES[CAUSAL_ARCHITECTURE],
            **text,
            "eos_token_id": list(config.eos_token_ids),
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": config.vocab_size,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
        }
    begin_image, image, end_image = config.image_token_ids
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPES[ARCHITECTURE],
        "canvas_length": config.canvas_length,
        "boi_token_id": begin_image,
        "image_token_id": image,
        "eoi_token_id": end_image,
        "eos_token_id": list(config.eos_token_ids),
        "tie_word_embeddings": True,
        "dtype": dtype,
        "text_config": {
            "model_type": "diffusion_gemma_text",
            **text,
            "use_bidirectional_attention": "vision" if config.has_joined_images else None,
        },
        "vision_config": dict(config.vision),
    }


def _publish_text_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The text settings that all architectures share."""
    full_rope = {
        "rope_type": "proportional",
        "rope_theta": config.global_rope_theta,
        "partial_rotary_factor": config.global_rotary_fraction,
    }
    sliding_rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    return {
        **{name: getattr(config, name) for name in PUBLISHED_KEYS},
        "eos_token_id": config.eos_token_ids[0],
        "layer_types": list(config.layer_types),
        "rope_parameters": {FULL: full_rope, SLIDING: sliding_rope},
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": "vision",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "dtype": dtype,
    }


# 2. SamplerConfig


def read_sampler_config(folder: str | Path, model: BackboneConfig) -> SamplerConfig:
    """Reads generation_config.json and redraft.json of a checkpoint folder. Either file may be missing."""
    generation, ours = (
        read_json(path) if path.exists() else {}
        for path in (Path(folder) / GENERATION_CONFIG, Path(folder) / REDRAFT_CONFIG)
    )
    return parse_sampler_config(generation, model, ours)


def parse_sampler_config(
    generation: Mapping[str, Any], model: BackboneConfig, ours: Mapping[str, Any] | None = None
) -> SamplerConfig:
    """Makes a SamplerConfig from the contents of generation_config.json and redraft.json.

    A missing setting has the value of the released checkpoint; canvas length and special tokens default to the model's.
    """
    settings = _parse_causal_settings(generation) if model.is_causal_only else _parse_diffusion_settings(generation)
    settings.setdefault("pad_token_id", model.pad_token_id)
    eos_token_ids = require_ids("eos_token_id", first_value(generation.get("eos_token_id"), model.eos_token_ids))
    config = SamplerConfig(canvas_length=model.canvas_length, eos_token_ids=eos_token_ids, **settings)
    return config.changed(**require_object(f"{REDRAFT_CONFIG}: sampler", (ours or {}).get("sampler")))


def _parse_diffusion_settings(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a DiffusionGemma checkpoint."""
    settings = {name: generation[name] for name in GENERATION_KEYS if generation.get(name) is not None}
    if generation.get("max_denoising_steps") is not None:
        settings["max_steps"] = generation["max_denoising_steps"]
    sampler = require_object(f"{GENERATION_CONFIG}: sampler_config", generation.get("sampler_config"))
    class_name = sampler.get("_cls_name", ENTROPY_BOUND_SAMPLER)
    if class_name != ENTROPY_BOUND_SAMPLER:
        raise ConfigError(
            f"{GENERATION_CONFIG} names the sampler {show_value(class_name)}; redraft has {ENTROPY_BOUND_SAMPLER} only"
        )
    if "entropy_bound" in sampler:
        settings["entropy_bound"] = sampler["entropy_bound"]
    return settings


def _parse_causal_settings(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a causal-only checkpoint: autoregressive, sampled as transformers' `generate` would.

    The file samples if `do_sample` is true, and is greedy if it is false or absent: temperature 0, whatever temperature the
    file gives. Where a file samples without naming top_k, transformers takes 50. (Gemma 4's released files say do_sample,
    temperature 1, top_k 64, top_p 0.95.)
    """
    settings = {name: generation[name] for name in CAUSAL_GENERATION_KEYS if generation.get(name) is not None}
    settings |= {"check": "exact", "draft_length": 0}
    if generation.get("do_sample") is not True:
        return settings | {"temperature": 0.0}
    sampling = {name: generation[name] for name in SAMPLING_KEYS if generation.get(name) is not None}
    return settings | {"top_k": TRANSFORMERS_TOP_K} | sampling


def _publish_causal_settings(config: SamplerConfig) -> dict[str, Any]:
    """The inverse of `_parse_causal_settings`. A greedy file does not name top_k and the like, which mean nothing there."""
    generation = {name: getattr(config, name) for name in CAUSAL_GENERATION_KEYS}
    generation |= {"do_sample": config.temperature > 0, "eos_token_id": list(config.eos_token_ids)}
    if config.temperature > 0:
        generation |= {name: getattr(config, name) for name in SAMPLING_KEYS}
    return generation


def publish_sampler_config(config: SamplerConfig, *, is_causal_only: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Makes the contents of generation_config.json, which transformers reads, and of redraft.json, which only we read."""
    if is_causal_only:
        return _publish_causal_settings(config), {"sampler": {}}
    generation = {
        "max_new_tokens": config.max_new_tokens,
        "max_denoising_steps": config.max_steps,
        "sampler_config": {"_cls_name": ENTROPY_BOUND_SAMPLER, "entropy_bound": float(config.entropy_bound)},
        "t_min": config.t_min,
        # transformers requires t_max > t_min. The next float64 is the same temperature in float32.
        "t_max": max(config.t_max, math.nextafter(config.t_min, math.inf)),
        "stability_threshold": config.stability_threshold,
        "confidence_threshold": float(config.confidence_threshold),
        "eos_token_id": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }
    return generation, {"sampler": {name: getattr(config, name) for name in REDRAFT_KEYS}}


# 3. Parts of config.json


def _read_architecture(raw: Mapping[str, Any], source: str) -> str:
    """The architecture that a file describes, by its model type or by name. Others than ours are refused."""
    architectures = raw.get("architectures") or []
    architectures = architectures if isinstance(architectures, list) else [architectures]
    model_type = raw.get("model_type")
    known = MODEL_TYPES | LLAMA_ARCHITECTURES
    for architecture, its_type in known.items():
        if model_type == its_type:
            return architecture
    for architecture in known:
        if architecture in architectures:
            return architecture
    described = architectures[0] if architectures else raw.get("model_type", "nothing")
    raise ConfigError(f"{source} describes {show_value(described)}; redraft runs {', '.join(known)}")


def _refuse_gemma4_variants(raw: Mapping[str, Any], text: Mapping[str, Any], source: str) -> None:
    """Refuses standard Gemma 4 models of another shape than 26B-A4B, such as the small ones with per-layer inputs."""
    is_tied = first_value(raw.get("tie_word_embeddings"), text.get("tie_word_embeddings"), True)  # the outer config decides
    refuse_variants({**GEMMA4_DEFAULTS, **text, "tie_word_embeddings": is_tied}, GEMMA4_ALLOWED, source)
    if text.get("final_logit_softcapping") is None:
        raise ConfigError(f"{source}: final_logit_softcapping is None; redraft runs soft-capped logits only")


def _parse_diffusion_parts(raw: Mapping[str, Any], text: Mapping[str, Any], source: str) -> dict[str, Any]:
    """What a causal-only model does not have: the canvas, and the settings of images.

    `vision_config` is kept as it is: published_vision.py reads it, when an image comes.
    """
    image_defaults = (("boi", 255_999), ("image", 258_880), ("eoi", 258_882))
    begin_image, image, end_image = (first_value(raw.get(f"{name}_token_id"), default) for name, default in image_defaults)
    return {
        "canvas_length": first_value(raw.get("canvas_length"), 256),
        "image_token_ids": (begin_image, image, end_image),
        "has_joined_images": text.get("use_bidirectional_attention") == "vision",
        "vision": require_object(f"{source}: vision_config", raw.get("vision_config")) or dict(SMALLEST_VISION),
    }


def _parse_layer_types(text: Mapping[str, Any], source: str) -> tuple[str, ...]:
    count = require_int("num_hidden_layers", require_value(text, "num_hidden_layers", source), 1, MOST_LAYERS)
    layer_types = text.get("layer_types") or [FULL if (layer + 1) % 6 == 0 else SLIDING for layer in range(count)]
    if not isinstance(layer_types, list):
        raise ConfigError(f"{source}: layer_types must be a list, got {show_value(layer_types)}")
    if len(layer_types) != count:
        raise ConfigError(f"{source} lists {len(layer_types)} layer_types for {count} layers")
    return (*layer_types[:-1], FULL)  # the last layer is forced to be full, as in transformers


def _parse_full_layer_heads(text: Mapping[str, Any], layer_types: tuple[str, ...], source: str) -> dict[str, Any]:
    """Head size and key-value heads of full layers: two keys in released files, `per_layer_config` in re-saved ones."""
    if text.get("per_layer_config") is None:
        default_heads = require_value(text, "num_key_value_heads", source)
        return {
            "global_head_dim": require_value(text, "global_head_dim", source),
            "num_global_key_value_heads": first_value(text.get("num_global_key_value_heads"), default_heads),
        }
    per_layer = require_object(f"{source}: per_layer_config", text.get("per_layer_config"))
    sliding_shape = {"head_dim": text.get("head_dim"), "num_key_value_heads": text.get("num_key_value_heads")}
    full_layers = {str(layer) for layer, kind in enumerate(layer_types) if kind == FULL}
    shapes = [
        {**sliding_shape, **require_object(f"{source}: per_layer_config", per_layer.get(layer))}
        for layer in sorted(full_layers)
    ]
    has_other_layers = bool(set(per_layer) - full_layers)
    if has_other_layers or any(shape != shapes[0] or set(shape) - set(sliding_shape) for shape in shapes):
        raise ConfigError(f"{source}: per_layer_config must give the same head shape to every full layer and to no other")
    return {"global_head_dim": shapes[0]["head_dim"], "num_global_key_value_heads": shapes[0]["num_key_value_heads"]}


def _parse_rope(text: Mapping[str, Any], source: str) -> dict[str, Any]:
    rope = require_object(f"{source}: rope_parameters", text.get("rope_parameters"))
    sliding = require_object(f"{source}: rope_parameters", rope.get(SLIDING))
    full = require_object(f"{source}: rope_parameters", rope.get(FULL))
    types = (sliding.get("rope_type", "default"), full.get("rope_type", "proportional"))
    factor = full.get("factor", 1.0)
    if types != ("default", "proportional") or factor != 1.0:
        raise ConfigError(f"{source}: RoPE {types} with factor {factor}; redraft runs default, proportional, 1")
    if sliding.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{source}: partial_rotary_factor on sliding layers is {sliding['partial_rotary_factor']}, not 1")
    fraction = full.get("partial_rotary_factor", 1.0 if full else 0.25)
    return {
        "rope_theta": require_number(f"{source}: rope_theta", sliding.get("rope_theta", 10_000.0)),
        "global_rope_theta": require_number(f"{source}: rope_theta", full.get("rope_theta", 1_000_000.0)),
        "global_rotary_fraction": require_number(f"{source}: partial_rotary_factor", fraction),
    }
