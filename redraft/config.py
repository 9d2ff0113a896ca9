"""What a checkpoint is (ModelConfig) and how a page is redrafted (SamplerConfig): frozen records that refuse nonsense.

Knows nothing of torch, files of weights, or text. The dictionaries it reads and writes are the published `config.json`,
`generation_config.json`, and our own `redraft.json` (settings that transformers has no field for, and would refuse).
`ModelConfig()` without arguments is the released 26B-A4B model.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"
COLDEST_TEMPERATURE_SCALE = 0.02  # of the checkpoint's schedule: what a temperature of 0 means
GENERATION, OURS = "generation_config.json", "redraft.json"
SLIDING, FULL = "sliding_attention", "full_attention"
RELEASED_LAYERS = ((SLIDING,) * 5 + (FULL,)) * 5

# transformers always builds a vision tower, at full size when `vision_config` is missing; this is the smallest it accepts.
SMALLEST_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 0,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "position_embedding_size": 1,
}


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the value and, where there is one, the way out."""


def _whole(name: str, value: Any, low: int = 1, high: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
    return value


def _real(name: str, value: Any, low: float = 0.0) -> float:
    """A finite number above `low`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= 1e30:
        raise ConfigError(f"{name} must be a number above {low:g}, got {value!r}")
    return float(value)


def _object(name: str, value: Any) -> Mapping[str, Any]:
    """A JSON object; None counts as an empty one."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be an object, got {value!r}")
    return value or {}


def _ids(name: str, value: Any, vocab_size: int = 2**31) -> tuple[int, ...]:
    """Token ids, given as one or as a list."""
    listed = value if isinstance(value, list | tuple) else (value,)
    return tuple(_whole(name, token, 0, vocab_size - 1) for token in listed)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a DiffusionGemma model. K=V on full layers and the mixture of experts are always on."""

    vocab_size: int = 262_144
    hidden_size: int = 2816
    intermediate_size: int = 2112  # the dense MLP beside the experts, and the one of self-conditioning
    moe_intermediate_size: int = 704
    num_experts: int = 128
    top_k_experts: int = 8
    layer_types: tuple[str, ...] = RELEASED_LAYERS
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    num_global_key_value_heads: int = 2
    head_dim: int = 256
    global_head_dim: int = 512
    sliding_window: int = 1024
    rope_theta: float = 10_000.0
    global_rope_theta: float = 1_000_000.0
    global_rotary_fraction: float = 0.25
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float = 30.0
    max_position_embeddings: int = 262_144
    canvas_length: int = 256
    pad_token_id: int = 0
    bos_token_id: int = 2
    eos_token_ids: tuple[int, ...] = (1, 106)
    image_token_ids: tuple[int, int, int] = (255_999, 258_880, 258_882)  # begin, soft token, end
    quant: str | None = None  # "fp8": weights by channel, activations by token, as compressed-tensors publishes it
    vision: Mapping[str, Any] = field(default_factory=lambda: dict(SMALLEST_VISION), repr=False)  # carried, never run

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.type is int and not f.name.endswith("token_id"):
                _whole(f.name, getattr(self, f.name))
            elif f.type is float:
                _real(f.name, getattr(self, f.name))
        _whole("sliding_window", self.sliding_window, 2)  # itself and one token of past, else there is nothing to keep
        if not self.layer_types or any(kind not in (SLIDING, FULL) for kind in self.layer_types):
            raise ConfigError(f"layer_types may hold {SLIDING!r} and {FULL!r}, got {list(self.layer_types)!r}")
        if self.layer_types[-1] != FULL:
            raise ConfigError(f"the last layer must be {FULL!r}, got {self.layer_types[-1]!r}")
        for heads in (self.num_key_value_heads, self.num_global_key_value_heads):
            if self.num_attention_heads % heads:
                raise ConfigError(
                    f"{self.num_attention_heads} attention heads cannot be shared among {heads} key-value heads"
                )
        if self.head_dim % 2 or self.global_head_dim % 2:
            raise ConfigError(f"head sizes must be even (RoPE pairs), got {self.head_dim} and {self.global_head_dim}")
        if self.top_k_experts > self.num_experts:
            raise ConfigError(f"top_k_experts is {self.top_k_experts}, but there are only {self.num_experts} experts")
        if self.global_rotary_fraction > 1:
            raise ConfigError(f"partial_rotary_factor must be at most 1, got {self.global_rotary_fraction!r}")
        specials = ("pad_token_id", self.pad_token_id), ("bos_token_id", self.bos_token_id)
        for name, value in (*specials, ("eos_token_id", self.eos_token_ids)):
            _ids(name, value, self.vocab_size)
        _ids("image token ids", self.image_token_ids)
        if not self.eos_token_ids:
            raise ConfigError("eos_token_id is empty; a model needs a token that ends its text")

    @property
    def num_hidden_layers(self) -> int:
        """Layers in the stack."""
        return len(self.layer_types)

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of a layer, None where it sees everything."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def layer_heads(self, layer: int) -> tuple[int, int]:
        """Key-value heads and head size of a layer."""
        if self.layer_types[layer] == SLIDING:
            return self.num_key_value_heads, self.head_dim
        return self.num_global_key_value_heads, self.global_head_dim

    def parameter_counts(self) -> dict[str, int]:
        """Weights by part. `active` is what one token of one forward is multiplied with."""
        d, attention = self.hidden_size, 0
        # Seven norms and two scalars a layer, q and k norms, two norms outside.
        norms = self.num_hidden_layers * (7 * d + 2) + 2 * d
        for layer in range(self.num_hidden_layers):
            heads, size = self.layer_heads(layer)
            kv = 2 if self.layer_types[layer] == SLIDING else 1
            norms += 2 * size
            attention += 2 * d * self.num_attention_heads * size + kv * d * heads * size
        expert = 3 * d * self.moe_intermediate_size * self.num_hidden_layers
        parts = {
            "embedding": self.vocab_size * d,
            "attention": attention,
            "dense MLP": 3 * d * self.intermediate_size * self.num_hidden_layers,
            "experts": expert * self.num_experts,
            "router": (d * self.num_experts + d + self.num_experts) * self.num_hidden_layers,
            "self-conditioning": 3 * d * self.intermediate_size,
            "norms and scalars": norms,
        }
        total = sum(parts.values())
        return parts | {"total": total, "active": total - expert * (self.num_experts - self.top_k_experts)}

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> tuple[int, int]:
        """Cache bytes one more token costs: in full layers (for ever), in sliding layers (up to the window)."""
        cost = {SLIDING: 0, FULL: 0}
        for layer, kind in enumerate(self.layer_types):
            heads, size = self.layer_heads(layer)
            cost[kind] += 2 * heads * size * bytes_per_value
        return cost[FULL], cost[SLIDING]

    @classmethod
    def from_json(cls, path: str | Path) -> "ModelConfig":
        """Reads a checkpoint's config.json."""
        return cls.from_published(read_json(path), str(path))

    @classmethod
    def from_published(cls, raw: Mapping[str, Any], source: str = "config.json") -> "ModelConfig":
        """From the published dictionary. Sizes must be in it: the class defaults of other libraries are traps."""
        _refuse_other_models(raw, source)
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError(f"{source} has no text_config")
        _refuse_variants(text, source)
        layer_types = _layer_types(text, source)
        rope = _rope(text, source)
        known = {
            name: _required(text, name, source)
            for name in (
                "vocab_size hidden_size intermediate_size moe_intermediate_size num_experts top_k_experts "
                "num_attention_heads num_key_value_heads head_dim sliding_window max_position_embeddings"
            ).split()
        }
        optional = {n: text[n] for n in ("rms_norm_eps", "final_logit_softcapping") if text.get(n) is not None}
        return cls(
            **known,
            **optional,
            **_full_layer_heads(text, layer_types, source),
            **rope,
            layer_types=layer_types,
            quant=_quant(raw, source),
            canvas_length=_first(raw.get("canvas_length"), 256),
            pad_token_id=_first(text.get("pad_token_id"), 0),
            bos_token_id=_first(text.get("bos_token_id"), 2),
            eos_token_ids=_ids("eos_token_id", _first(raw.get("eos_token_id"), text.get("eos_token_id"), 1)),
            image_token_ids=tuple(
                _first(raw.get(f"{name}_token_id"), default)
                for name, default in (("boi", 255_999), ("image", 258_880), ("eoi", 258_882))
            ),
            vision=_object(f"{source}: vision_config", raw.get("vision_config")) or dict(SMALLEST_VISION),
        )

    def to_published(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The dictionary of config.json, in the released file's own keys."""
        same = (
            "vocab_size hidden_size intermediate_size moe_intermediate_size num_experts top_k_experts num_hidden_layers "
            "num_attention_heads num_key_value_heads num_global_key_value_heads head_dim global_head_dim sliding_window "
            "rms_norm_eps final_logit_softcapping max_position_embeddings pad_token_id bos_token_id"
        ).split()
        full_rope = {
            "rope_type": "proportional",
            "rope_theta": self.global_rope_theta,
            "partial_rotary_factor": self.global_rotary_fraction,
        }
        boi, image, eoi = self.image_token_ids
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "diffusion_gemma",
            "canvas_length": self.canvas_length,
            "boi_token_id": boi,
            "image_token_id": image,
            "eoi_token_id": eoi,
            "eos_token_id": list(self.eos_token_ids),
            "tie_word_embeddings": True,
            "dtype": dtype,
            "text_config": {
                "model_type": "diffusion_gemma_text",
                **{name: getattr(self, name) for name in same},
                "eos_token_id": self.eos_token_ids[0],
                "layer_types": list(self.layer_types),
                "rope_parameters": {FULL: full_rope, SLIDING: {"rope_type": "default", "rope_theta": self.rope_theta}},
                "hidden_activation": "gelu_pytorch_tanh",
                "use_bidirectional_attention": "vision",
                "attention_bias": False,
                "tie_word_embeddings": True,
                "dtype": dtype,
            },
            "vision_config": dict(self.vision),
        }


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How many requests run at once, and what they may use."""

    max_running: int = 8  # requests that run at once
    cache_bytes: int | None = None  # for keys and values; None: half of the memory that is free
    prefill_chunk: int = 2048  # tokens of a prompt read in one round
    keep_contexts: int = 8  # of finished requests, for prompts that begin alike
    rewind: int = 512  # tokens a kept context can be cut back by

    def __post_init__(self) -> None:
        for name in ("max_running", "prefill_chunk"):
            _whole(name, getattr(self, name))
        for name in ("keep_contexts", "rewind"):
            _whole(name, getattr(self, name), 0)
        if self.cache_bytes is not None:
            _whole("cache_bytes", self.cache_bytes, 1, 2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How one canvas is denoised and when it is done. Defaults are those of the released checkpoint."""

    canvas_length: int = 256
    max_new_tokens: int = 256
    max_steps: int = 48
    entropy_bound: float = 0.1  # nats: summed entropy of what one step accepts, its least sure token excepted
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1  # steps the argmax canvas must stay the same
    confidence_threshold: float = 0.005  # nats: mean entropy must be strictly below
    eos_token_ids: tuple[int, ...] = (1, 106, 50)
    pad_token_id: int = 0
    # For small models, whose entropies never fit the bound (see docs/tour.md, stop 5). Off for published checkpoints.
    quota: bool = False
    accept_at_end: bool = False
    spread: int = 0  # of the unsure within this many positions, a step accepts only the surest; 0: no such rule
    stops_last: bool = False  # stop tokens are accepted behind everything else

    def __post_init__(self) -> None:
        for name in ("canvas_length", "max_new_tokens", "max_steps"):
            _whole(name, getattr(self, name))
        _whole("stability_threshold", self.stability_threshold, 0)
        _ids("pad_token_id", self.pad_token_id)
        object.__setattr__(self, "eos_token_ids", _ids("eos_token_ids", self.eos_token_ids))  # JSON has lists
        _real("entropy_bound", self.entropy_bound)
        _real("confidence_threshold", self.confidence_threshold)
        if self.t_min != 0 or isinstance(self.t_min, bool):
            _real("t_min", self.t_min)
        _real("temperature (t_max)", self.t_max, 1e-4)  # colder than that, soft-capped logits overflow
        if self.t_max < self.t_min:
            raise ConfigError(f"t_max must not be below t_min, got {self.t_max} and {self.t_min}")
        _whole("spread", self.spread, 0)
        for name in ("quota", "accept_at_end", "stops_last"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")

    @property
    def max_canvases(self) -> int:
        """Canvases that max_new_tokens needs; the last one is whole even when it is not full."""
        return -(-self.max_new_tokens // self.canvas_length)

    def changed(self, **changes: Any) -> "SamplerConfig":
        """The same settings with some replaced; a value of None means: as it is."""
        names = {f.name for f in fields(self)}
        if unknown := sorted(set(changes) - names):
            raise ConfigError(f"unknown sampler setting {unknown[0]!r}; known are {', '.join(sorted(names))}")
        return replace(self, **{k: v for k, v in changes.items() if v is not None})

    def with_temperature(self, scale: float | None) -> "SamplerConfig":
        """Scales the temperature schedule: 1.0 (or None) leaves the checkpoint's own schedule unchanged.

        A scale of 0 asks for greedy sampling; it becomes COLDEST_TEMPERATURE_SCALE, since the sampler divides by temperature.
        """
        if scale is None:
            return self
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale <= 1e30:
            raise ConfigError(f"temperature scales the checkpoint's schedule and must be a number from 0 up, got {scale!r}")
        if scale == 1:
            return self
        scale = max(scale, COLDEST_TEMPERATURE_SCALE)
        return replace(self, t_min=self.t_min * scale, t_max=self.t_max * scale)

    @classmethod
    def from_folder(cls, folder: str | Path, model: ModelConfig) -> "SamplerConfig":
        """Reads generation_config.json and redraft.json beside the weights; what they omit has the released value."""
        read = {name: read_json(path) if (path := Path(folder) / name).exists() else {} for name in (GENERATION, OURS)}
        return cls.from_published(read[GENERATION], model, read[OURS])

    @classmethod
    def from_published(
        cls, raw: Mapping[str, Any], model: ModelConfig, ours: Mapping[str, Any] | None = None
    ) -> "SamplerConfig":
        """From the dictionaries of generation_config.json and redraft.json."""
        same = ("max_new_tokens", "t_min", "t_max", "stability_threshold", "confidence_threshold", "pad_token_id")
        names = {"max_denoising_steps": "max_steps", **{name: name for name in same}}
        known = {mine: raw[theirs] for theirs, mine in names.items() if raw.get(theirs) is not None}
        sampler = _object(f"{GENERATION}: sampler_config", raw.get("sampler_config"))
        if (kind := sampler.get("_cls_name", "EntropyBoundSamplerConfig")) != "EntropyBoundSamplerConfig":
            raise ConfigError(f"{GENERATION} asks for the sampler {kind!r}; redraft has EntropyBoundSamplerConfig")
        if "entropy_bound" in sampler:
            known["entropy_bound"] = sampler["entropy_bound"]
        eos = _ids("eos_token_id", _first(raw.get("eos_token_id"), model.eos_token_ids))
        known.setdefault("pad_token_id", model.pad_token_id)
        base = cls(canvas_length=model.canvas_length, eos_token_ids=eos, **known)
        return base.changed(**_object(f"{OURS}: sampler", (ours or {}).get("sampler")))

    def to_published(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The dictionaries of generation_config.json (transformers reads it) and of redraft.json (only we do)."""
        theirs = {
            "max_new_tokens": self.max_new_tokens,
            "max_denoising_steps": self.max_steps,
            "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": float(self.entropy_bound)},
            "t_min": self.t_min,
            # transformers wants t_max above t_min; the next number up is the same temperature to float32
            "t_max": max(self.t_max, math.nextafter(self.t_min, math.inf)),
            "stability_threshold": self.stability_threshold,
            "confidence_threshold": float(self.confidence_threshold),
            "eos_token_id": list(self.eos_token_ids),
            "pad_token_id": self.pad_token_id,
        }
        names = ("canvas_length", "quota", "accept_at_end", "spread", "stops_last")
        return theirs, {"sampler": {name: getattr(self, name) for name in names}}


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a checkpoint folder needs it") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a JSON {type(raw).__name__}, not an object")
    return raw


def _required(raw: Mapping[str, Any], name: str, source: str) -> Any:
    if raw.get(name) is None:
        raise ConfigError(f"{source} does not say {name}")
    return raw[name]


def _first(*values: Any) -> Any:
    return next(v for v in values if v is not None)


def _refuse_other_models(raw: Mapping[str, Any], source: str) -> None:
    names = raw.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    if raw.get("model_type") != "diffusion_gemma" and ARCHITECTURE not in names:
        found = names[0] if names else raw.get("model_type", "nothing")
        raise ConfigError(f"{source} describes {found!r}; redraft runs {ARCHITECTURE!r}")


def _quant(raw: Mapping[str, Any], source: str) -> str | None:
    """How the weights are packed."""
    quant = _object(f"{source}: quantization_config", raw.get("quantization_config"))
    if not quant:
        return None
    kind = (quant.get("quant_method"), quant.get("format"))
    groups = list(_object(f"{source}: config_groups", quant.get("config_groups")).values())
    schemes = [_object(f"{source}: a group of quantization_config", group) for group in groups]
    weights = [_object(f"{source}: weights of a group", scheme.get("weights")) for scheme in schemes]
    known = all((w.get("num_bits"), w.get("type"), w.get("strategy")) == (8, "float", "channel") for w in weights)
    if kind == ("compressed-tensors", "float-quantized") and weights and known:
        return "fp8"
    raise ConfigError(
        f"{source} is quantized as {kind[0]!r}, format {kind[1]!r}; redraft reads compressed-tensors' fp8 by channel: "
        "load that or the bf16 checkpoint instead"
    )


def _refuse_variants(text: Mapping[str, Any], source: str) -> None:
    # Each of these would silently change the mathematics; None means the key is absent.
    allowed = {
        "attention_bias": (None, False),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "use_bidirectional_attention": (None, "vision"),
        "tie_word_embeddings": (None, True),
        "attention_k_eq_v": (None, True),
        "enable_moe_block": (None, True),
    }
    for name, values in allowed.items():
        if text.get(name) not in values:
            raise ConfigError(f"{source}: {name} is {text[name]!r}; redraft runs {values[-1]!r} only")


def _layer_types(text: Mapping[str, Any], source: str) -> tuple[str, ...]:
    count = _whole("num_hidden_layers", _required(text, "num_hidden_layers", source), 1, 10_000)
    listed = text.get("layer_types") or [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(count)]
    if not isinstance(listed, list):
        raise ConfigError(f"{source}: layer_types must be a list, got {listed!r}")
    if len(listed) != count:
        raise ConfigError(f"{source} lists {len(listed)} layer_types for {count} layers")
    return (*listed[:-1], FULL)  # forced, as transformers does


def _full_layer_heads(text: Mapping[str, Any], layer_types: tuple[str, ...], source: str) -> dict[str, int]:
    """Head size and key-value heads of full layers: two keys in released files, `per_layer_config` in re-saved ones."""
    usual = {"head_dim": text.get("head_dim"), "num_key_value_heads": text.get("num_key_value_heads")}
    per_layer = _object(f"{source}: per_layer_config", text.get("per_layer_config"))
    if text.get("per_layer_config") is None:
        if text.get("global_head_dim") is None:
            raise ConfigError(f"{source} does not say global_head_dim")
        heads = _first(text.get("num_global_key_value_heads"), _required(text, "num_key_value_heads", source))
        return {"global_head_dim": text["global_head_dim"], "num_global_key_value_heads": heads}
    full = {str(layer) for layer, kind in enumerate(layer_types) if kind == FULL}
    shapes = [usual | _object(f"{source}: per_layer_config", per_layer.get(layer)) for layer in sorted(full)]
    if set(per_layer) - full or any(shape != shapes[0] or set(shape) - set(usual) for shape in shapes):
        raise ConfigError(f"{source}: per_layer_config must give every full layer, and only those, the same head shape")
    return {"global_head_dim": shapes[0]["head_dim"], "num_global_key_value_heads": shapes[0]["num_key_value_heads"]}


def _rope(text: Mapping[str, Any], source: str) -> dict[str, float]:
    rope = _object(f"{source}: rope_parameters", text.get("rope_parameters"))
    sliding, full = (_object(f"{source}: rope_parameters", rope.get(kind)) for kind in (SLIDING, FULL))
    kinds = (sliding.get("rope_type", "default"), full.get("rope_type", "proportional"))
    if kinds != ("default", "proportional") or full.get("factor", 1.0) != 1.0:
        raise ConfigError(
            f"{source}: RoPE {kinds} with factor {full.get('factor', 1.0)}; redraft runs default, proportional, 1"
        )
    if sliding.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{source}: partial_rotary_factor on sliding layers is {sliding['partial_rotary_factor']}, not 1")
    fraction = full.get("partial_rotary_factor", 1.0 if full else 0.25)
    return {
        "rope_theta": _real(f"{source}: rope_theta", sliding.get("rope_theta", 10_000.0)),
        "global_rope_theta": _real(f"{source}: rope_theta", full.get("rope_theta", 1_000_000.0)),
        "global_rotary_fraction": _real(f"{source}: partial_rotary_factor", fraction),
    }
