"""Writes GGUF files of tiny Llama, Qwen2 and Qwen3 models with the `gguf` package, as llama.cpp's converter does.

Names come from the package's own tables. The converter interleaves the rows of queries and keys of "llama"; so does
`interleave`, and `separate` is its inverse.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_files import Raw, decode, encode, write_file
from tokenizers import Tokenizer as Vocabulary
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedModel

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = (Path(__file__).parent.parent / "docs" / "tour.md").read_text(encoding="utf-8")


def interleave(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """The halves of each head, element by element in turn."""
    first, second = matrix.unflatten(0, (heads, 2, -1)).unbind(1)
    return torch.stack([first, second], dim=2).flatten(0, 2)


def separate(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `interleave`."""
    by_head = matrix.unflatten(0, (heads, -1))
    return torch.cat([by_head[:, 0::2], by_head[:, 1::2]], dim=1).flatten(0, 1)


def make_file(
    path: Path, reference: PreTrainedModel, kind: str = "F32", changes: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Writes a model of transformers to a file. Returns its weights as the package reads them, under transformers' names."""
    config = reference.config
    architecture = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors: dict[str, Raw] = {}
    numbers: dict[str, torch.Tensor] = {}
    for seed, (name, tensor) in enumerate(reference.state_dict().items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, _, last = name.rpartition(".")
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module.rpartition(".")[2])
        is_interleaved = heads is not None and architecture == gguf.MODEL_ARCH.LLAMA
        stored = interleave(tensor, heads) if is_interleaved else tensor
        raw = encode(stored.numpy(), kind if tensor.dim() > 1 else "F32", seed)
        tensors[f"{names.get_name(module)}.{last}"] = raw
        numbers[name] = separate(decode(raw), heads) if is_interleaved else decode(raw)
    values = {**metadata(config, gguf.MODEL_ARCH_NAMES[architecture]), **byte_level_metadata(config.vocab_size)}
    extra = {"rope_freqs.weight": rope_freqs(config)} if config.rope_parameters["rope_type"] == "llama3" else {}
    write_file(path, tensors | extra, values | dict(changes or {}))
    return numbers


def rope_freqs(config: Any) -> Raw:
    """What the converter writes for the RoPE of Llama 3: by how much each frequency is divided."""
    rope = config.rope_parameters
    base = 1.0 / rope["rope_theta"] ** (np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    waves = 2 * np.pi / base
    context = rope["original_max_position_embeddings"]
    smooth = (context / waves - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    blended = 1 / ((1 - smooth) / rope["factor"] + smooth)
    divisors = np.where(waves < context / rope["high_freq_factor"], 1.0, blended)
    divisors = np.where(waves > context / rope["low_freq_factor"], rope["factor"], divisors)
    return divisors.astype(np.float32), gguf.GGMLQuantizationType.F32


def metadata(config: Any, prefix: str) -> dict[str, Any]:
    """The settings of a model of transformers."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    settings = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": head_dim,
    }
    if config.rope_parameters["rope_type"] == "linear":
        settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_parameters["factor"]}
    return {"general.architecture": prefix, **{f"{prefix}.{name}": value for name, value in settings.items()}}


def byte_level_vocabulary(pre_tokenizer: Any, size: int, *, ignore_merges: bool = False) -> Vocabulary:
    """Byte-level BPE with the tokens of ChatML, trained on our own documents."""
    vocabulary = Vocabulary(models.BPE(ignore_merges=ignore_merges))
    vocabulary.pre_tokenizer = pre_tokenizer
    vocabulary.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=CHATML,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    vocabulary.train_from_iterator(TEXT.split("\n\n"), trainer)
    return vocabulary


def tokens_of(vocabulary: Vocabulary) -> list[str]:
    """All tokens in the order of their ids."""
    return sorted(vocabulary.get_vocab(), key=vocabulary.get_vocab().get)


def bpe_metadata(vocabulary: Vocabulary, pre: str, **changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary as the converter writes it."""
    tokens = tokens_of(vocabulary)
    merges = json.loads(vocabulary.to_str())["model"]["merges"]
    settings = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in CHATML else 1 for token in tokens],
        "merges": [" ".join(merge) if isinstance(merge, list) else merge for merge in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 2,
        **changes,
    }
    return {**{f"tokenizer.ggml.{name}": value for name, value in settings.items()}, "tokenizer.chat_template": TEMPLATE}


def byte_level_metadata(size: int) -> dict[str, Any]:
    """A vocabulary for models of so many tokens: ChatML's, and some bytes without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*CHATML, *alphabet][:size]
    settings = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3 if token in CHATML else 1 for token in tokens],
        "merges": [],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "padding_token_id": 2,
    }
    return {**{f"tokenizer.ggml.{name}": value for name, value in settings.items()}, "tokenizer.chat_template": TEMPLATE}


def sentencepiece_vocabulary() -> tuple[Vocabulary, list[str]]:
    """A BPE vocabulary with byte fallback, as those of Llama 2: what transformers makes of a SentencePiece model."""
    trained = Vocabulary(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    trained.train_from_iterator(TEXT.split("\n\n"), trainer)
    trained.pre_tokenizer = None
    return trained, special


def sentencepiece_metadata(vocabulary: Vocabulary, special: list[str]) -> dict[str, Any]:
    """A SentencePiece vocabulary as the converter writes it: scores in place of merges."""
    merges = json.loads(vocabulary.to_str())["model"]["merges"]
    pairs = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in merges]
    rank = {left + right: -float(number) for number, (left, right) in reversed(list(enumerate(pairs)))}
    tokens = tokens_of(vocabulary)
    lowest = -float(len(tokens))
    kinds = {"<unk>": 2, **dict.fromkeys(special[1:3], 3), **dict.fromkeys(special[3:], 6)}
    settings = {
        "model": "llama",
        "tokens": tokens,
        "scores": [rank.get(token, lowest) for token in tokens],
        "token_type": [kinds.get(token, 1) for token in tokens],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in settings.items()}
