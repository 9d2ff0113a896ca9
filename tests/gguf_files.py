"""Writes GGUF files of tiny models with the `gguf` package: any format, with a small vocabulary of Gemma's kind.

The package's table for Gemma 4 gives the names of most tensors, so they do not come from the code under test.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
import torch
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer as Vocabulary
from tokenizers import models, normalizers, pre_tokenizers, trainers

from redraft import checkpoint
from redraft.config import FULL, SLIDING, ModelConfig
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.tokenizer.tokenizer import Tokenizer

SPECIAL_TOKENS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<mask>",
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<|tool_response>",
]
VISIBLE = ("<|channel>", "<channel|>", "<|tool_response>")  # special tokens that llama.cpp's converter marks as text
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
NO_ROTATION = 1e30
GEMMA4_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, 4)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn>{{ message['role'] }}\n{{ message['content'] }}<turn|>\n{% endfor %}"
)
# Where the fp16 scales of a block are, for formats that the package cannot quantize to; and a usual size of such a scale.
RANDOM_BLOCKS = {"Q4_K": ((0, 2), 2e-4), "Q5_K": ((0, 2), 1e-4), "Q6_K": ((208,), 2e-5), "NVFP4": ((), 0)}
OUR_NAMES = {  # those that the package's table lacks
    "layers.{}.router.scale": "blk.{}.ffn_gate_inp.scale",
    "layers.{}.router.per_expert_scale": "blk.{}.ffn_down_exps.scale",
    "layers.{}.encoder_layer_scalar": "blk.{}.enc_layer_output_scale.weight",
    "self_conditioning.pre_norm.weight": "self_cond_pre_norm.weight",
    "self_conditioning.gate_proj.weight": "self_cond_gate.weight",
    "self_conditioning.up_proj.weight": "self_cond_up.weight",
    "self_conditioning.down_proj.weight": "self_cond_down.weight",
}
Raw = tuple[np.ndarray, gguf.GGMLQuantizationType]  # bytes of a quantized tensor, or its numbers


@lru_cache
def tokenizer_json() -> str:
    """tokenizer.json of a small vocabulary of Gemma's kind: special tokens, bytes, BPE trained on our own documents."""
    trained = Vocabulary(models.BPE(fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    text = (Path(__file__).parent.parent / "docs" / "tour.md").read_text(encoding="utf-8")
    trained.train_from_iterator(text.split("\n\n"), trainers.BpeTrainer(vocab_size=420, show_progress=False))
    raw = json.loads(trained.to_str())
    tokens = [*SPECIAL_TOKENS, *BYTES, *sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].get)]
    raw["model"] |= {"vocab": {token: i for i, token in enumerate(tokens)}, "unk_token": "<unk>", "byte_fallback": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    raw["added_tokens"] = [{"id": i, "content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)]
    space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    raw["decoder"] = {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    return json.dumps(raw)


def reference_tokenizer() -> Tokenizer:
    """The tokenizer that the files hold, read from tokenizer.json."""
    return Tokenizer(Vocabulary.from_str(tokenizer_json()), template=TEMPLATE)


def _config() -> ModelConfig:
    return replace(
        tiny.BASE,
        vocab_size=Vocabulary.from_str(tokenizer_json()).get_vocab_size(),
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_experts=2,
        layer_types=(FULL,),
        top_k_experts=1,
        head_dim=64,
        global_head_dim=64,
        eos_token_ids=(1, 6),
        image_token_ids=ModelConfig().image_token_ids,
    )


CONFIG = _config()  # every matrix has whole blocks of 256
SMALL = replace(
    CONFIG,
    layer_types=(SLIDING, FULL),
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=32,
    head_dim=8,
    global_head_dim=8,
)


@lru_cache
def file_name(ours: str) -> str:
    """Our name of a tensor -> its name in a file."""
    layer = ours.split(".")[1] if ours.startswith("layers.") else ""
    pattern = ours.replace(f"layers.{layer}.", "layers.{}.", 1) if layer else ours
    if pattern in OUR_NAMES:
        return OUR_NAMES[pattern].format(layer)
    return f"{GEMMA4_NAMES.get_name('model.' + ours.removesuffix('.weight'))}.weight"


def encode(numbers: np.ndarray, kind: str, seed: int = 0) -> Raw:
    """Numbers in a format. Where the package cannot quantize, random blocks of that shape."""
    quant_type = gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        return numbers, quant_type
    if kind not in RANDOM_BLOCKS:
        return quantize(numbers, quant_type), quant_type
    generator = np.random.default_rng(seed)
    size, nbytes = gguf.GGML_QUANT_SIZES[quant_type]
    blocks = generator.integers(0, 256, (*numbers.shape[:-1], numbers.shape[-1] // size, nbytes), dtype=np.uint8)
    starts, scale = RANDOM_BLOCKS[kind]
    for start in starts:
        scales = (generator.standard_normal(blocks.shape[:-1]) * scale).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    if kind == "NVFP4":
        blocks[..., :4] = generator.integers(0, 0x7F, (*blocks.shape[:-1], 4), dtype=np.uint8)
    return blocks.reshape(*numbers.shape[:-1], -1), quant_type


def decode(raw: Raw) -> torch.Tensor:
    """The numbers that the package reads, in float32."""
    return torch.from_numpy(np.ascontiguousarray(dequantize(*raw)).astype(np.float32))


def make_tensors(model: DiffusionGemma, format_of: Callable[[str], str] | str = "F32") -> dict[str, Raw]:
    """The tensors of a file. Matrices have the format asked for; embedding and router too; vectors are F32."""
    choose = format_of if callable(format_of) else lambda _: format_of
    tensors = {}
    for seed, (ours, tensor) in enumerate(model.state_dict().items()):
        kind = choose(file_name(ours)) if tensor.dim() > 1 else "F32"
        tensors[file_name(ours)] = encode(tensor.float().numpy(), kind, seed)
    return tensors


def rope_freqs(config: ModelConfig) -> Raw:
    """The tensor that says which pairs of a full layer's heads turn."""
    pairs = config.global_head_dim // 2
    turning = int(config.global_rotary_fraction * pairs)
    return np.array([1.0] * turning + [NO_ROTATION] * (pairs - turning), np.float32), gguf.GGMLQuantizationType.F32


def metadata(config: ModelConfig) -> dict[str, Any]:
    """The metadata of a file, without the tokenizer. Integers are u32, floats f32, as the converter writes them."""
    heads = [config.layer_heads(layer)[0] for layer in range(config.num_hidden_layers)]
    settings = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": heads,
        "attention.key_length": config.global_head_dim,
        "attention.value_length": config.global_head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in config.layer_types],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.shared_kv_layers": 0,
        "attention.causal": False,
        "rope.freq_base": config.global_rope_theta,
        "rope.freq_base_swa": config.rope_theta,
        "rope.dimension_count": config.global_head_dim,
        "rope.dimension_count_swa": config.head_dim,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "final_logit_softcapping": config.final_logit_softcapping,
        "embedding_length_per_layer_input": 0,
    }
    prefixed = {f"diffusion-gemma.{name}": value for name, value in settings.items()}
    return {"general.architecture": "diffusion-gemma", **prefixed, "diffusion.canvas_length": config.canvas_length}


def tokenizer_metadata() -> dict[str, Any]:
    """The vocabulary as llama.cpp's converter writes it."""
    model = json.loads(tokenizer_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = {**dict.fromkeys(SPECIAL_TOKENS, 3), **dict.fromkeys(VISIBLE, 4), **dict.fromkeys(BYTES, 6)}
    ids = {"bos_token_id": 2, "eos_token_id": 1, "padding_token_id": 0, "unknown_token_id": 3, "mask_token_id": 4}
    settings = {
        "model": "gemma4",
        "tokens": tokens,
        "scores": [0.0] * len(tokens),
        "token_type": [kinds.get(token, 1) for token in tokens],
        "merges": [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]],
        "add_bos_token": True,
        "add_space_prefix": False,
        **ids,
    }
    return {**{f"tokenizer.ggml.{name}": value for name, value in settings.items()}, "tokenizer.chat_template": TEMPLATE}


def add_metadata(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    """Writes metadata; the types of the values follow from Python's. None leaves a key out."""
    for key, value in values.items():
        if key == "general.architecture" or value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            kinds[type(value)](key, value)


def write_file(path: Path, tensors: Mapping[str, Raw], values: Mapping[str, Any]) -> Path:
    """Writes a file with these tensors and this metadata."""
    writer = gguf.GGUFWriter(path, values["general.architecture"])
    add_metadata(writer, values)
    for name, (raw, quant_type) in tensors.items():
        is_plain = raw.dtype == np.float32
        writer.add_tensor(name, raw, raw_dtype=None if is_plain else quant_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(
    path: Path,
    model: DiffusionGemma,
    format_of: Callable[[str], str] | str = "F32",
    *,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a whole file. `changes` replaces metadata."""
    config = model.config
    values = {**metadata(config), **tokenizer_metadata(), **(changes or {})}
    return write_file(path, {**make_tensors(model, format_of), "rope_freqs.weight": rope_freqs(config)}, values)


def model_with(config: ModelConfig, tensors: Mapping[str, Raw]) -> DiffusionGemma:
    """The model whose weights are what the package reads from these tensors, in float32."""
    ours = list(DiffusionGemma(config).state_dict())
    weights = {checkpoint.published_name(name): decode(tensors[file_name(name)]) for name in ours}
    return checkpoint.from_state_dict(config, weights)
