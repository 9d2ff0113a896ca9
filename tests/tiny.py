"""Fixtures of the tests: tiny configurations, random models and adapters, a byte tokenizer, a checkpoint folder.

A model with plain random weights never settles, and a rounding error grows tenfold at every step. `decided` damps the layers
and sharpens the head: canvases settle, rows stop at different steps, and rounding errors vanish.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from redraft import checkpoint
from redraft.config import FULL, SLIDING, ModelConfig, SamplerConfig
from redraft.diffusion.draft_policy import TOKEN_COST, DraftPolicy
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.lora import TARGETS, Adapter, AdapterConfig, new_adapter
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.writer import Writer

SPECIAL_TOKENS = (
    "<pad> <eos> <bos> <unk> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|> "
    '<|tool_response> <tool_response|> <|"|>'
).split()
VOCAB = len(SPECIAL_TOKENS) + 256

BASE = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_experts=4,
    top_k_experts=2,
    layer_types=(SLIDING, SLIDING, FULL),
    num_attention_heads=4,
    num_key_value_heads=2,
    num_global_key_value_heads=2,
    head_dim=8,
    global_head_dim=8,
    sliding_window=16,
    max_position_embeddings=512,
    canvas_length=16,
    eos_token_ids=(1, 5),
    image_token_ids=(VOCAB - 3, VOCAB - 2, VOCAB - 1),
)

CONFIGS = {
    "plain": BASE,
    "wide full heads": replace(BASE, global_head_dim=24, num_global_key_value_heads=1),
    "short window": replace(BASE, sliding_window=5, layer_types=(SLIDING, SLIDING, SLIDING, FULL)),
    "window of two": replace(BASE, sliding_window=2),
    "one layer": replace(BASE, layer_types=(FULL,)),
    "more experts than tokens": replace(BASE, num_experts=40, top_k_experts=1),
    "every expert": replace(BASE, num_experts=3, top_k_experts=3, layer_types=(FULL, SLIDING, FULL)),
    "whole head turns": replace(BASE, global_rotary_fraction=1.0, rope_theta=100.0, hidden_size=40, num_key_value_heads=4),
}

# A vision_config as a published file has it. Patches of 4 pixels and squares of 2 x 2 of them keep pictures small.
VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 150,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "standardize": True,
}


def build(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> DiffusionGemma:
    """A model with random weights, in which every weight affects the output: norms and scalars differ from one."""
    generator = torch.Generator().manual_seed(seed)
    model = DiffusionGemma(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            scale = 0.1 if tensor.dim() == 1 else 1.5 * tensor.shape[-1] ** -0.5
            tensor.copy_(noise * scale + (tensor.dim() == 1) * (0.9 if "scalar" in name else 1.0))
        model.embed_tokens.weight.mul_(0.3)
    return model.eval().requires_grad_(False).to(dtype)


def decided(config: ModelConfig, seed: int = 0) -> DiffusionGemma:
    """A model with low entropies: most canvases settle after a few steps."""
    model = build(config, seed)
    with torch.no_grad():
        for layer in model.layers:
            layer.post_attention_layernorm.weight.mul_(0.3)
            layer.post_feedforward_layernorm.weight.mul_(0.3)
        model.self_conditioning.down_proj.weight.mul_(0.07)
        model.norm.weight.mul_(20.0)
    return model


def trained(config: ModelConfig, seed: int = 0, **changes: object) -> Adapter:
    """An adapter with random pairs: what training would leave."""
    cfg = AdapterConfig(**{"rank": 4, "alpha": 6.0, "targets": TARGETS, **changes})
    adapter = new_adapter(cfg, config, seed)
    randomize(adapter, seed)
    return adapter.eval().requires_grad_(False)


def randomize(module: torch.nn.Module, seed: int = 0, of: str = "") -> None:
    """Gives the parameters with this part of a name random numbers."""
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if of in name:
                p.copy_(torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with a token for each byte, after the special tokens of a chat."""
    return Tokenizer.byte_level(SPECIAL_TOKENS)


def sampler(**changes: object) -> SamplerConfig:
    """Sampler settings for the tiny models."""
    return checkpoint.parse_sampler_config({"eos_token_id": [1, 5]}, BASE).changed(
        **{"max_steps": 6, "entropy_bound": 1.0, "confidence_threshold": 0.1, **changes}
    )


def engine_policy(cfg: SamplerConfig) -> DraftPolicy | None:
    """The policy with which the engine drafts on a CPU; `generate_verified` then makes the same rounds."""
    return DraftPolicy(TOKEN_COST["cpu"], cfg.draft_length) if cfg.check == "exact" else None


def writer(seed: int = 0) -> Writer:
    """A Writer with a tiny random model."""
    return Writer(decided(BASE, seed), byte_tokenizer(), sampler(max_new_tokens=40))


def save_folder(folder: Path, config: ModelConfig = BASE, seed: int = 0) -> Path:
    """Saves a whole checkpoint folder: configuration, weights, tokenizer."""
    return checkpoint.save(
        decided(config, seed), folder, tokenizer=byte_tokenizer(), sampler=sampler(max_new_tokens=32), force=True
    )


def remove_manifest(folder: Path) -> Path:
    """Makes a folder like a published one: its files may be changed one by one."""
    raw = json.loads((folder / "redraft.json").read_text(encoding="utf-8"))
    raw.pop("files", None)
    (folder / "redraft.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


def wait_until(condition: Callable[[], bool], checks: int = 10**5) -> bool:
    """Checks a condition until it holds; False when it never does. Reads no clock: it gives up after 15 minutes."""
    for _ in range(checks):
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def has_ended(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
