"""Tiny random models of Llama's families, made by transformers, and folders of them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from redraft import checkpoint
from redraft.model.backbone import Backbone
from redraft.model.drafter import DrafterConfig, new_drafter
from redraft.model.page import PageConfig, new_page_adapter
from redraft.tokenizer.tokenizer import Tokenizer

VOCAB = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # model type and settings
    "llama 2": ("llama", SHAPE | {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama 3": ("llama", SHAPE | {"rope_parameters": LLAMA3, "head_dim": 16, "eos_token_id": [2, 5]}),
    "smollm2": ("llama", SHAPE | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "linear RoPE": (
        "llama",
        SHAPE | {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5}},
    ),
    "mistral": ("mistral", SHAPE | {"sliding_window": 7, "num_key_value_heads": 1}),
    "mistral without a window": ("mistral", SHAPE | {"sliding_window": None}),
    "qwen2": ("qwen2", SHAPE | {"tie_word_embeddings": True}),
    "qwen2 with windows": ("qwen2", SHAPE | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", SHAPE | {"head_dim": 24, "tie_word_embeddings": True}),
}


def make_reference(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of transformers, float32. Biases and norms are random too, as those of a trained model."""
    model_type, settings = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**settings, **changes})
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = name.endswith("norm.weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else noise * (0.3 if parameter.dim() == 1 else 0.15))
    return model


def save_reference(folder: Path, family: str, **changes: Any) -> PreTrainedModel:
    """A random model, saved as transformers saves it."""
    model = make_reference(family, **changes)
    model.save_pretrained(folder)
    return model


def save_with_bytes(base: Path, **changes: Any) -> Backbone:
    """A random Llama with a byte vocabulary; returns it, loaded."""
    save_reference(base, "smollm2", vocab_size=260, max_position_embeddings=128, **changes)
    Tokenizer.byte_level(("<pad>", "<bos>", "<eos>")).save(base)
    return checkpoint.load_model(base)


def save_with_page(folder: Path) -> Path:
    """A random Llama with a byte vocabulary in folder/base, and a random page adapter for it in folder/page."""
    save_page(folder, save_with_bytes(folder / "base"))
    return folder


def save_page(folder: Path, model: Backbone) -> None:
    """A random page adapter for the model, which is in folder/base, in folder/page."""
    cfg = PageConfig(rank=2, alpha=4.0, canvas_lengths=(8, 16))
    page = new_page_adapter(cfg, model.config, torch.zeros(model.config.hidden_size))
    with torch.no_grad():
        for p in page.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p))))
    checkpoint.save_drafter(page, folder / "page", base="../base", fingerprint=checkpoint.fingerprint(model))


def save_with_drafter(folder: Path) -> Path:
    """A random Llama with a byte vocabulary in folder/base, which is returned, and a drafter for it in folder/drafter."""
    base = folder / "base"
    model = save_with_bytes(base)
    cfg = DrafterConfig(rank=2, head_size=8, canvas_length=5)
    drafter = new_drafter(cfg, model.config, torch.zeros(model.config.hidden_size))
    checkpoint.save_drafter(drafter, folder / "drafter", base="../base", fingerprint=checkpoint.fingerprint(model))
    return base


def random_ids(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """Tokens without the special ones."""
    return torch.randint(6, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
