"""Metadata of a GGUF file of Llama, Mistral, Qwen2 or Qwen3 -> LlamaConfig and SamplerConfig.

llama.cpp calls Mistral and SmolLM2 "llama" too. What a file does not say is as llama.cpp takes it.
"""

from typing import Any

import torch

from redraft.checkpoint.gguf.header import GgufFile
from redraft.checkpoint.gguf.values import ROPE_FREQUENCIES, as_written, read_embedding_rows, require_setting
from redraft.config import (
    FULL,
    MOST_LAYERS,
    SLIDING,
    ConfigError,
    LlamaConfig,
    RopeScaling,
    SamplerConfig,
    require_ids,
    require_int,
    require_number,
    show_value,
)
from redraft.kernels.rope import rope_frequencies
from redraft.model.llama import scale_frequencies
from redraft.tokenizer.chat_tokens import TEXT_ENDS, TURN_ENDS

ARCHITECTURES = ("llama", "qwen2", "qwen3")
HEAD = "output.weight"
DEFAULT_THETA = 10_000.0
DEFAULT_WINDOW = 4096
MOST_SCALING = 1e6
# What a file of Llama 3 has as numbers, and not as settings.
LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
TOKENIZER = "tokenizer.ggml."
STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
CONTROL = 3  # the type of special tokens
SAMPLING = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}  # ours -> general.sampling.*


def parse_llama_settings(file: GgufFile) -> LlamaConfig:
    """The shape of the model. Raises ConfigError."""
    family = file.metadata["general.architecture"]
    layers = require_int("block_count", require_setting(file, "block_count"), 1, MOST_LAYERS)
    if file.metadata.get(f"{family}.expert_count", 0) != 0:
        experts = show_value(file.metadata[f"{family}.expert_count"])
        raise ConfigError(f"the model has {experts} experts; redraft runs experts of DiffusionGemma and Gemma 4 only")
    heads = require_int("attention.head_count", require_setting(file, "attention.head_count"))
    size = require_int("embedding_length", require_setting(file, "embedding_length"))
    head_dim = _read_head_dim(file, size, heads)
    theta = as_written(file.metadata.get(f"{family}.rope.freq_base", DEFAULT_THETA))
    window = _read_window(file)
    stops = read_stops(file)
    return LlamaConfig(
        family=family,
        vocab_size=read_embedding_rows(file),
        hidden_size=size,
        intermediate_size=require_setting(file, "feed_forward_length"),
        layer_types=(FULL if window is None else SLIDING,) * layers,
        sliding_window=window or DEFAULT_WINDOW,
        num_attention_heads=heads,
        num_key_value_heads=file.metadata.get(f"{family}.attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=require_setting(file, "attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_read_scaling(file, head_dim, theta),
        has_qkv_bias=family == "qwen2",
        has_qk_norm=family == "qwen3",
        has_tied_head=HEAD not in file.tensors,
        max_position_embeddings=require_setting(file, "context_length"),
        bos_token_id=file.metadata.get(f"{TOKENIZER}bos_token_id", stops[0]),
        eos_token_ids=stops,
        pad_token_id=file.metadata.get(f"{TOKENIZER}padding_token_id", stops[0]),
    )


def parse_llama_sampler(file: GgufFile, model: LlamaConfig) -> SamplerConfig:
    """How text is generated: autoregressively; greedy unless the file has sampling settings. Raises ConfigError."""
    prefix = "general.sampling."
    given = {ours: prefix + key for ours, key in SAMPLING.items() if prefix + key in file.metadata}
    sampling = {ours: as_written(file.metadata[key]) for ours, key in given.items()}
    return SamplerConfig(
        check="exact",
        draft_length=0,
        eos_token_ids=model.eos_token_ids,
        pad_token_id=model.pad_token_id,
        **({"temperature": 0.0} | sampling),
    )


def read_stops(file: GgufFile) -> tuple[int, ...]:
    """The tokens that end a text or a turn: those that the file names, and special tokens of well-known names."""
    ids = [file.metadata[TOKENIZER + key] for key in STOP_KEYS if TOKENIZER + key in file.metadata]
    if not ids:
        raise ConfigError(f"the metadata has no {TOKENIZER}{STOP_KEYS[0]}, and redraft assumes no value")
    tokens: Any = file.metadata.get(f"{TOKENIZER}tokens")
    types: Any = file.metadata.get(f"{TOKENIZER}token_type")
    if isinstance(tokens, list) and isinstance(types, list) and len(tokens) == len(types):
        found = (tokens.index(name) for name in (*TURN_ENDS, *TEXT_ENDS) if name in tokens)
        ids += [token for token in found if types[token] == CONTROL]
    return tuple(dict.fromkeys(require_ids("stop token", ids)))


def _read_head_dim(file: GgufFile, size: int, heads: int) -> int:
    family = file.metadata["general.architecture"]
    head_dim = require_int("head size", file.metadata.get(f"{family}.attention.key_length", size // heads), 2, 2**14)
    for name in ("attention.value_length", "rope.dimension_count"):
        other = file.metadata.get(f"{family}.{name}", head_dim)
        if other != head_dim:
            raise ConfigError(f"{name} is {show_value(other)} and the head size {head_dim}; redraft runs equal ones")
    return head_dim


def _read_window(file: GgufFile) -> int | None:
    """The sliding window of all layers; None: full attention. Qwen's files cannot say which layers have one."""
    family = file.metadata["general.architecture"]
    window = file.metadata.get(f"{family}.attention.sliding_window", 0)
    if window == 0:
        return None
    if family != "llama":
        raise ConfigError(f"attention.sliding_window is {show_value(window)}; redraft runs files of {family} without one")
    return require_int("attention.sliding_window", window, 2)


def _read_scaling(file: GgufFile, head_dim: int, theta: Any) -> RopeScaling | None:
    family = file.metadata["general.architecture"]
    kind = file.metadata.get(f"{family}.rope.scaling.type", "none")
    old_factor = file.metadata.get(f"{family}.rope.scale_linear", 0)  # of older files
    factor = as_written(file.metadata.get(f"{family}.rope.scaling.factor", old_factor))
    if kind not in ("none", "linear"):
        raise ConfigError(
            f"rope.scaling.type is {show_value(kind)}; redraft runs none and linear, and Llama 3's frequencies"
        )
    if ROPE_FREQUENCIES in file.tensors:
        return _read_llama3_scaling(file, head_dim, theta)
    is_scaled = factor not in (0, 1) and (kind == "linear" or old_factor)
    return RopeScaling(kind="linear", factor=factor) if is_scaled else None


def _read_llama3_scaling(file: GgufFile, head_dim: int, theta: Any) -> RopeScaling:
    """The scaling whose divisors `rope_freqs` holds: 1 for short waves, the factor for long ones, a blend between."""
    info = file.tensors[ROPE_FREQUENCIES]
    if info.type.dtype is None or info.shape != (head_dim // 2,):
        raise ConfigError(f"tensor {ROPE_FREQUENCIES} must hold {head_dim // 2} plain numbers, and is {list(info.shape)}")
    divisors = file.rows(ROPE_FREQUENCIES).view(info.type.dtype).float()
    factor = float(divisors.max())
    if not 1 <= factor <= MOST_SCALING:
        raise ConfigError(f"tensor {ROPE_FREQUENCIES} holds {factor}; redraft runs the scaling of Llama 3 only")
    scaling = RopeScaling(kind="llama3", factor=as_written(factor), **LLAMA3)
    frequencies = rope_frequencies(head_dim, require_number("rope.freq_base", theta), 1.0, "cpu")
    if not torch.allclose(frequencies / divisors, scale_frequencies(frequencies, scaling), rtol=1e-4, atol=0):
        raise ConfigError(f"tensor {ROPE_FREQUENCIES} has other numbers than the scaling of Llama 3, which redraft runs")
    return scaling
