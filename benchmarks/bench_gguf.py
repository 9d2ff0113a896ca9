"""Writes a GGUF file of the released shape with random weights, and times how it is read: header, tokenizer, model.

    python benchmarks/bench_gguf.py --layers 2               # the sizes of 26B-A4B, but two layers
    python benchmarks/bench_gguf.py --layers 30 --device cuda --file /tmp/q4_k_m.gguf --keep

The formats are those of the published Q4_K_M file. The vocabulary has 262,144 tokens and 514,906 merges. Seconds of the
processor are printed beside seconds of the clock. `more_mib` is the host memory that was in use at most while the model was
loaded, beyond what the loaded model takes; pages of the mapped file do not count. The last line is JSON.
"""

import argparse
import json
import math
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from redraft.checkpoint.gguf import open_gguf
from redraft.checkpoint.gguf.blocks import BLOCK_TYPES, TYPE_NAMES
from redraft.checkpoint.gguf.tensors import LAYER_NAMES, MODEL_NAMES
from redraft.checkpoint.load import from_state_dict
from redraft.config import FULL, SLIDING, ModelConfig
from redraft.model.diffusion_gemma import DiffusionGemma

TYPE_NUMBERS = {name: number for number, name in TYPE_NAMES.items()}
ALIGNMENT = 32
VOCABULARY = 262_144
MERGES = 514_906
SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|channel>", "<channel|>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz\u2581"
SCALES = {"Q4_K": (1e-4, 8e-4), "Q6_K": (2e-5,), "Q5_0": (4e-3,), "Q8_0": (5e-4,)}  # they make weights of about 0.03
CHUNK = 2**24  # bytes written at once


def make_vocabulary() -> tuple[list[str], list[str]]:
    """As many tokens and merges as Gemma has: every token is a shorter one and a letter."""
    grown = list(LETTERS)
    tokens = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS]
    merges = []
    for token in grown:
        joined = [token + letter for letter in LETTERS][: VOCABULARY - len(tokens)]
        if not joined:
            break
        merges += [f"{token} {text[-1]}" for text in joined]
        tokens += joined
        grown += joined
    known = set(tokens)
    splits = (f"{text[:1]} {text[1:]}" for text in tokens if len(text) > 2 and text[1:] in known)
    other = [split for split in splits if split.split(" ")[0] in LETTERS]
    return tokens, [*merges, *other][:MERGES]


def encode_value(value: Any) -> bytes:
    """A value of the metadata with its type."""
    if isinstance(value, list):
        items = [encode_value(item) for item in value]
        return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)
    if isinstance(value, str):
        return struct.pack("<I", 8) + encode_text(value)
    kinds: dict[type, tuple[int, str]] = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}
    number, form = kinds[type(value)]
    return struct.pack(f"<I{form}", number, value)


def encode_text(text: str) -> bytes:
    """A text after its length."""
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def make_metadata(config: ModelConfig) -> dict[str, Any]:
    """Settings and vocabulary."""
    tokens, merges = make_vocabulary()
    settings: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.layer_heads(layer)[0] for layer in range(config.num_hidden_layers)],
        "attention.key_length": config.global_head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in config.layer_types],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.global_rope_theta,
        "rope.freq_base_swa": config.rope_theta,
        "expert_count": config.num_experts,
        "expert_used_count": config.top_k_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    kinds = [3] * len(SPECIAL_TOKENS) + [6] * 256 + [1] * (len(tokens) - 256 - len(SPECIAL_TOKENS))
    vocabulary = {"model": "gemma4", "tokens": tokens, "merges": merges, "token_type": kinds, "scores": [0.0] * len(tokens)}
    ids = {"bos_token_id": 2, "eos_token_id": 1, "padding_token_id": 0, "unknown_token_id": 3}
    return {
        "general.architecture": "diffusion-gemma",
        **{f"diffusion-gemma.{name}": value for name, value in settings.items()},
        **{f"tokenizer.ggml.{name}": value for name, value in {**vocabulary, **ids}.items()},
    }


def choose_format(name: str, layer: int, shape: tuple[int, ...]) -> str:
    """The format that the published Q4_K_M file gives to a tensor of this kind."""
    if len(shape) == 1 or "ffn_gate_inp" in name:
        return "F32"
    if "token_embd" in name:
        return "Q6_K"
    if "down" in name:  # 704 and 2112 inputs are no whole blocks of 256
        return "Q8_0" if layer < 3 or layer > 25 or layer % 3 == 2 else "Q5_0"
    return "Q6_K" if "attn_v" in name and layer % 2 else "Q4_K"


def list_tensors(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, format and shape of every tensor."""
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in DiffusionGemma(config).state_dict().items()}
    names = {ours: name for name, ours in (MODEL_NAMES | LAYER_NAMES).items() if name != "self_cond_norm"}
    for ours, shape in shapes.items():
        _, layer, rest = ours.split(".", 2) if ours.startswith("layers.") else ("", "", ours)
        stem = names[rest] if names[rest].endswith(".scale") else f"{names[rest]}.weight"
        name = f"blk.{layer}.{stem}" if layer else stem
        yield name, choose_format(name, int(layer or 0), shape), shape
    yield "rope_freqs.weight", "F32", (config.global_head_dim // 2,)


def make_bytes(kind: str, nbytes: int) -> bytes:
    """Random blocks with usual scales. What is longer than a chunk repeats it."""
    block = BLOCK_TYPES[kind]
    count = min(nbytes, CHUNK) // block.nbytes
    blocks = torch.randint(0, 256, (count, block.nbytes), dtype=torch.uint8)
    for start, scale in zip(block.halves, SCALES[kind], strict=True):
        blocks[:, start : start + 2] = torch.full((count, 1), scale, dtype=torch.float16).view(torch.uint8)
    return blocks.numpy().tobytes()


def write_tensor(file: BinaryIO, name: str, kind: str, shape: tuple[int, ...], nbytes: int) -> None:
    """Writes the numbers of a tensor."""
    if kind == "F32" and name == "rope_freqs.weight":
        numbers = torch.cat([torch.ones(shape[0] // 4), torch.full((shape[0] - shape[0] // 4,), 1e30)])
        file.write(numbers.numpy().tobytes())
    elif kind == "F32":
        numbers = torch.ones(shape) if len(shape) == 1 else 0.03 * torch.randn(shape)
        file.write(numbers.numpy().tobytes())
    else:
        chunk = make_bytes(kind, nbytes)
        for start in range(0, nbytes, len(chunk)):
            file.write(chunk[: nbytes - start])


def write_file(path: Path, config: ModelConfig) -> None:
    """Writes the whole file."""
    metadata = make_metadata(config)
    tensors = []
    offset = 0
    infos = b""
    for name, kind, shape in list_tensors(config):
        block = BLOCK_TYPES[kind]
        nbytes = math.prod(shape) // block.size * block.nbytes
        infos += encode_text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        infos += struct.pack("<IQ", TYPE_NUMBERS[kind], offset)
        tensors.append((name, kind, shape, nbytes))
        offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    keys = b"".join(encode_text(key) + encode_value(value) for key, value in metadata.items())
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)) + keys + infos
    with open(path, "wb") as file:
        file.write(header)
        for tensor in tensors:
            file.write(bytes(-file.tell() % ALIGNMENT))
            write_tensor(file, *tensor)


def private_mib() -> float:
    """Memory of this process that is no page of a file."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def measure(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """Runs a function. Returns its result, seconds, and the most memory in use beyond what it left in use."""
    most = private_mib()
    is_done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_done.wait(0.005):
            most = max(most, private_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    start_cpu = time.process_time()
    result = work()
    figures = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - start_cpu}
    is_done.set()
    watcher.join()
    left = private_mib()
    return result, {**figures, "more_mib": max(0.0, most - left), "left_mib": left}


def main() -> None:
    """Writes the file, reads it, prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--file", type=Path, default=None, help="written if it does not exist")
    parser.add_argument("--keep", action="store_true", help="do not delete the file")
    options = parser.parse_args()
    kinds = ModelConfig().layer_types[: options.layers - 1]
    config = ModelConfig(layer_types=(*kinds, FULL))
    path = options.file or Path(tempfile.mkdtemp()) / "model.gguf"
    if not path.exists():
        write_file(path, config)
    figures: dict[str, Any] = {"layers": options.layers, "device": options.device, "file_bytes": path.stat().st_size}
    opened, figures["header"] = measure(lambda: open_gguf(path))
    _, figures["tokenizer"] = measure(opened.tokenizer)
    dtype = getattr(torch, options.dtype)
    _, figures["model"] = measure(
        lambda: from_state_dict(opened.config, opened.tensors(options.device), dtype=dtype, device=options.device)
    )
    if not options.keep:
        path.unlink()
    for part in ("header", "tokenizer", "model"):
        print(part, *(f"{name} {number:,.2f}" for name, number in figures[part].items()))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
