"""Hostile GGUF files: each is refused in one sentence, before anything of the size that it claims is allocated."""

import os
import random
import struct
import sys
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import pytest
import tiny
import torch
from gguf_files import SMALL

import redraft
from redraft.checkpoint.gguf import open_gguf
from redraft.checkpoint.gguf.blocks import BLOCK_TYPES
from redraft.checkpoint.gguf.header import MAX_HEADER_BYTES, read_gguf
from redraft.checkpoint.gguf.weights import GgufWeight
from redraft.checkpoint.names import CheckpointError

TENSORS = sys.modules["redraft.checkpoint.gguf.tensors"]
START = struct.Struct("<4sIQQ")
HUGE = (2**63, 2**60, 2**40, 2**32)


def text(value: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value.encode()) if length is None else length) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def tensor(
    name: str = "x", sizes: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, dimensions: int | None = None
) -> bytes:
    count = len(sizes) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", count, *sizes, kind, offset)


def header(*keys: bytes, tensors: tuple[bytes, ...] = (), version: int = 3, magic: bytes = b"GGUF", counts=None) -> bytes:
    tensor_count, key_count = counts or (len(tensors), len(keys))
    return START.pack(magic, version, tensor_count, key_count) + b"".join(keys) + b"".join(tensors)


def refuse(read, path: Path) -> str:
    """The one sentence with which a file is refused."""
    with pytest.raises(CheckpointError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    return str(caught.value)


ALIGNMENTS = {
    value: key("general.alignment", 10, struct.pack("<Q", value)) for value in (0, 1, 3, 4, 24, 2**17, 2**40, 2**63)
}
HEADERS = {
    "empty": (b"", "cannot be read"),
    "short": (b"GGU", "is not a GGUF file: it begins with b'GGU'"),
    "magic": (header(magic=b"GGML"), "is not a GGUF file: it begins with b'GGML'"),
    "a safetensors file": (b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", "is not a GGUF file"),
    "version 1": (header(version=1), "has GGUF version 1; redraft reads versions 2 and 3"),
    "big-endian": (header(version=3 << 24), "is a big-endian GGUF file"),
    **{f"{count} tensors": (header(counts=(count, 0)), f"its header names {count} tensors, and 8 bytes") for count in HUGE},
    **{f"{count} keys": (header(counts=(0, count)), f"its header names {count} metadata keys") for count in HUGE},
    **{f"{count} texts": (header(key("a", 9, array(8, count))), f"its header names {count} items of a") for count in HUGE},
    **{f"{count} bytes": (header(key("a", 9, array(0, count))), f"its header names {count} items of a") for count in HUGE},
    **{
        f"text of {size}": (header(key("a", 8, text("", size) + b"x" * 9)), "the file ends inside the header")
        for size in HUGE
    },
    **{f"key of {size}": (header(text("", size) + bytes(16)), "the file ends inside the header") for size in HUGE},
    **{
        f"align {value}": (header(block), f"must be a power of two from 8 to 65536, got {value}")
        for value, block in ALIGNMENTS.items()
    },
    "alignment a text": (header(key("general.alignment", 8, text("x"))), "must be a power of two from 8 to 65536, got 'x'"),
    "nested arrays": (header(key("a", 9, array(9, 1, array(9, 1)))), "the metadata key 'a' is an array of arrays"),
    "unknown type": (header(key("a", 13, bytes(8))), "the metadata key 'a' has a value of the unknown type 13"),
    "array of unknown": (header(key("a", 9, array(77, 1, bytes(8)))), "is an array of the unknown type 77"),
    "doubled key": (header(key("a", 0, b"1"), key("a", 0, b"2")), "has the metadata key 'a' twice"),
    "no UTF-8": (header(key("a", 8, struct.pack("<Q", 1) + b"\xff")), "'a' holds a text that is not UTF-8"),
    "no dimension": (header(tensors=(tensor(sizes=()),)) + bytes(99), "tensor 'x' has 0 dimensions, not 1 to 4"),
    "many dimensions": (header(tensors=(tensor(dimensions=2**31),)) + bytes(99), "has 2147483648 dimensions"),
    "zero size": (header(tensors=(tensor(sizes=(32, 0)),)) + bytes(99), "has the shape [0, 32]"),
    "half a block": (
        header(tensors=(tensor(sizes=(33,), kind=8),)) + bytes(99),
        "which is no whole number of Q8_0 blocks of 32",
    ),
    "huge sizes": (
        header(tensors=(tensor(sizes=(2**63,) * 4),)) + bytes(99),
        "damaged or cut short: tensor 'x' ends at byte",
    ),
    "far offset": (header(tensors=(tensor(offset=2**63),)) + bytes(999), "damaged or cut short: tensor 'x' ends at byte"),
    "odd offset": (header(tensors=(tensor(offset=1),)) + bytes(999), "tensor 'x' begins at 1, which is no multiple of 32"),
    "overlap": (header(tensors=(tensor(), tensor("y", offset=96))) + bytes(999), "tensor 'y' overlaps the one before it"),
    "doubled tensor": (header(tensors=(tensor(), tensor(offset=128))) + bytes(999), "has the tensor 'x' twice"),
    **{
        name: (
            header(tensors=(tensor("blk.3.some.weight", kind=number),)) + bytes(99),
            f"'blk.3.some.weight' has the format {name};",
        )
        for number, name in {
            10: "Q2_K",
            11: "Q3_K",
            22: "IQ2_S",
            20: "IQ4_NL",
            34: "TQ1_0",
            39: "MXFP4",
            28: "F64",
            99: "number 99",
        }.items()
    },
}


@pytest.fixture(name="no_large_allocations")
def _no_large_allocations(monkeypatch):
    """Fails where a header allocates much: the sizes that files claim are never handed on."""
    monkeypatch.setattr(torch, "empty", lambda *size, **options: pytest.fail(f"allocated {size}"))


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_is_refused(tmp_path, no_large_allocations, name):
    content, sentence = HEADERS[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert sentence in refuse(read_gguf, path)


def test_too_many_items_and_too_long_headers_are_refused(tmp_path):
    """Of sparse files, which take no space: their sizes would allow the counts that they claim."""
    path = tmp_path / "x.gguf"
    path.write_bytes(header(key("a", 9, array(8, 2**22 + 1))))
    os.truncate(path, 2**40)
    assert "the arrays of the metadata have more than 4194304 items" in refuse(read_gguf, path)
    path.write_bytes(header(key("a", 8, text("", 2**36))))
    os.truncate(path, 2**40)
    assert f"the header has more than {MAX_HEADER_BYTES} bytes" in refuse(read_gguf, path)
    path.write_bytes(header(counts=(0, 2**20)))
    os.truncate(path, 2**40)
    assert "has the metadata key '' twice" in refuse(read_gguf, path)


@pytest.mark.parametrize(("kind", "make"), [("a pipe", os.mkfifo), ("a folder", os.mkdir)])
def test_only_regular_files_are_opened(tmp_path, kind, make):
    make(tmp_path / "x.gguf")
    assert f"x.gguf is {kind}, but redraft needs a regular file there" in refuse(read_gguf, tmp_path / "x.gguf")


# Whole files


@pytest.fixture(name="parts")
def _parts():
    """Tensors and metadata of a small file, to be changed."""
    values = {**gguf_files.metadata(SMALL), **gguf_files.tokenizer_metadata()}
    tensors = {**gguf_files.make_tensors(tiny.build(SMALL), "Q8_0"), "rope_freqs.weight": gguf_files.rope_freqs(SMALL)}
    return tensors, values


def test_a_file_cut_anywhere_is_refused(tmp_path, parts):
    content = gguf_files.write_file(tmp_path / "x.gguf", *parts).read_bytes()
    places = [*range(0, 200, 7), *range(200, len(content), len(content) // 60), len(content) - 40]
    for place in places:
        (tmp_path / "x.gguf").write_bytes(content[:place])
        refuse(redraft.load, tmp_path / "x.gguf")


SETTINGS = {
    "general.architecture": [
        ("gemma4", "is Gemma 4, the autoregressive model; redraft reads GGUF files of DiffusionGemma (diffusion-gemma)"),
        ("mamba", "has the architecture 'mamba'; redraft runs diffusion-gemma, llama, qwen2, qwen3"),
    ],
    "split.count": [(3, "is one of 3 parts of a model; join them with llama-gguf-split --merge first")],
    "diffusion-gemma.block_count": [
        (9999, "sliding_window_pattern must hold 9999 booleans"),
        (0, "block_count must be a whole number from 1 to 10000, got 0"),
        (None, "the metadata has no diffusion-gemma.block_count, and redraft assumes no value"),
    ],
    "diffusion-gemma.embedding_length": [
        (2**31, "hidden_size must be"),
        (64, "has the shape"),
        ("x", "hidden_size must be"),
    ],
    "diffusion-gemma.expert_count": [(2**14, "the metadata describes [16384"), (0, "num_experts must be")],
    "diffusion-gemma.attention.head_count_kv": [([2], "head_count_kv must hold 2 numbers"), ([3, 2], "evenly")],
    "diffusion-gemma.attention.value_length": [(16, "value_length is 16 and the head size 8")],
    "diffusion-gemma.attention.key_length": [(2**30, "attention.value_length is 8"), ([8], "attention.value_length is 8")],
    "diffusion-gemma.attention.shared_kv_layers": [(4, "attention.shared_kv_layers is 4; redraft runs 0 only")],
    "diffusion-gemma.feed_forward_length": [([64, 32], "feed_forward_length must be the same number in all 2 layers")],
    "diffusion-gemma.attention.layer_norm_rms_epsilon": [(float("nan"), "rms_norm_eps must be a number above 0, got nan")],
    "diffusion-gemma.attention.sliding_window_pattern": [
        ([True, True], "the last layer must be 'full_attention'"),
        (6, "must hold 2 booleans"),
    ],
    "diffusion.canvas_length": [(0, "canvas_length must be a whole number from 1"), ("x", "canvas_length must be")],
    "diffusion.eb_t_min": [(float("nan"), "t_min must be a number above 0"), ("x", "t_min must be")],
    "tokenizer.ggml.eos_token_id": [(2**20, "eos_token_id must be a whole number")],
}


@pytest.mark.parametrize(("name", "value", "sentence"), [(n, v, s) for n, pairs in SETTINGS.items() for v, s in pairs])
def test_settings_that_cannot_run_are_refused(tmp_path, parts, name, value, sentence):
    tensors, values = parts
    path = gguf_files.write_file(tmp_path / "x.gguf", tensors, {**values, name: value})
    assert sentence in refuse(redraft.load, path)


def test_a_model_of_many_layers_is_never_built(tmp_path, parts, monkeypatch):
    tensors, values = parts
    layers = {"block_count": 9999, "attention.sliding_window_pattern": [False] * 9999, "attention.head_count_kv": 2}
    path = gguf_files.write_file(
        tmp_path / "x.gguf", tensors, values | {f"diffusion-gemma.{name}": value for name, value in layers.items()}
    )
    monkeypatch.setattr(TENSORS, "DiffusionGemma", lambda _: pytest.fail("the model was built"))
    assert "the metadata describes 9999 layers, the tensors are of 2" in refuse(redraft.load, path)


F32 = gguf.GGMLQuantizationType.F32
TENSOR_CHANGES = {
    "blk.1.attn_q.weight": (None, "has no tensor for layers.1.self_attn.q_proj.weight"),
    "rope_freqs.weight": (None, "tensor rope_freqs.weight is missing; it must hold 4 plain numbers"),
    "token_embd.weight": (None, "there is no tensor token_embd.weight"),
    "blk.1.attn_v.weight": ((np.zeros((16, 32), np.float32), F32), "does not have: 'blk.1.attn_v.weight'"),
    "blk.2.attn_q.weight": ((np.zeros((16, 32), np.float32), F32), "the metadata describes 2 layers, the tensors are of 3"),
    "blk.00.attn_q.weight": ((np.zeros((16, 32), np.float32), F32), "does not have: 'blk.00.attn_q.weight'"),
    "output.weight": ((np.zeros((16, 32), np.float32), F32), "does not have: 'output.weight'"),
    "self_cond_norm.weight": ((np.zeros(32, np.float32), F32), "has the same tensor twice, as self_cond_pre_norm.weight"),
    "blk.0.attn_norm": ((np.zeros(32, np.float32), F32), "has the same tensor twice, as blk.0.attn_norm.weight"),
    "blk.0.ffn_gate_exps.weight": ((np.zeros((2, 32, 32), np.float32), F32), "twice: in one tensor and apart"),
    "blk.0.attn_k.weight": (
        (np.zeros((16, 64), np.float32), F32),
        "has the shape [16, 64], the metadata describes [16, 32]",
    ),
    "blk.0.ffn_down.weight": (
        (np.zeros((64, 64), np.float32), F32),
        "has the shape [64, 64], the metadata describes [32, 64]",
    ),
    "blk.0.ffn_up.weight": ((np.zeros((64 + 256, 32), np.float32), F32), "the metadata describes [64, 32]"),
    "blk.1.ffn_gate_up_exps.weight": ((np.zeros((2, 67, 32), np.float32), F32), "the metadata describes [2, 64, 32]"),
    "blk.1.ffn_down_exps.weight": ((np.zeros((2, 32, 288), np.float32), F32), "the metadata describes [2, 32, 32]"),
    "blk.1.ffn_down.weight": ((np.zeros((32, 32), np.float32), F32), "the metadata describes [32, 64]"),
    "output_norm.weight": (gguf_files.encode(np.zeros(32, np.float32), "Q8_0"), "is a vector and has the format Q8_0"),
    "blk.0.post_ffw_norm.weight": ((np.full(32, np.nan, np.float32), F32), "has a number that is not finite"),
    "blk.1.ffn_down_exps.scale": ((np.full(2, np.inf, np.float32), F32), "has a number that is not finite"),
}


@pytest.mark.parametrize("name", TENSOR_CHANGES)
def test_tensors_that_are_missing_doubled_or_misshapen_are_refused(tmp_path, parts, name):
    tensors, values = parts
    raw, sentence = TENSOR_CHANGES[name]
    tensors = {other: kept for other, kept in tensors.items() if other != name} | ({name: raw} if raw else {})
    assert sentence in refuse(redraft.load, gguf_files.write_file(tmp_path / "x.gguf", tensors, values))


@pytest.mark.parametrize("numbers", [[1, 1e30, 1, 1e30], [1e30] * 4, [1, 2, 1e30, 1e30], [1, 1, float("nan"), 1e30], [1, 1]])
def test_another_scaling_of_rope_is_refused(tmp_path, parts, numbers):
    tensors, values = parts
    tensors["rope_freqs.weight"] = np.array(numbers, np.float32), F32
    assert "tensor rope_freqs.weight" in refuse(open_gguf, gguf_files.write_file(tmp_path / "x.gguf", tensors, values))


BAD_SCALES = {
    "Q8_0": (0,),
    "Q6_K": (208,),
    "Q5_K": (0, 2),
    "Q5_1": (0, 2),
    "Q5_0": (0,),
    "Q4_K": (0, 2),
    "Q4_1": (0, 2),
    "Q4_0": (0,),
}


@pytest.mark.parametrize(
    ("kind", "start", "scale"),
    [(kind, start, half) for kind, starts in BAD_SCALES.items() for start in starts for half in (b"\x00\x7e", b"\x00\xfc")]
    + [("NVFP4", start, byte) for start in range(4) for byte in (b"\x7f", b"\x80", b"\xff")],
)
def test_a_scale_that_is_no_number_is_refused(tmp_path, kind, start, scale):
    """NaN and infinity in fp16; NaN and a sign in NVFP4's scales, which are not negative."""
    raw, _ = gguf_files.encode(np.ones((4, 512), np.float32), kind)
    blocks = raw.reshape(4, -1, BLOCK_TYPES[kind].nbytes)
    blocks[2, 1, start : start + len(scale)] = np.frombuffer(scale, np.uint8)
    weight = GgufWeight("blk.1.x.weight", BLOCK_TYPES[kind], torch.from_numpy(raw), torch.device("cpu"))
    for read in (weight.dequantize, weight.pack) if BLOCK_TYPES[kind].pack else (weight.dequantize,):
        with pytest.raises(CheckpointError, match=r"tensor blk.1.x.weight has a scale that is not a finite number"):
            read()
    assert weight.select(slice(0, 2)).dequantize().isfinite().all()


# Mutations


def mutate(content: bytes, rng: random.Random, header_bytes: int) -> bytes:
    """Changes a few bytes, mostly of the header: random ones, extreme numbers, cuts, repetitions."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        place = rng.randrange(header_bytes if rng.random() < 0.9 else len(changed))
        action = rng.randrange(5)
        if action == 0:
            changed[place : place + 1] = bytes([rng.randrange(256)])
        elif action == 1:
            number = rng.choice((0, 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, len(content)))
            changed[place : place + 8] = struct.pack("<Q", number)
        elif action == 2:
            del changed[place : place + rng.choice((1, 4, 8, 100))]
        elif action == 3:
            changed[place:place] = changed[place : place + rng.choice((1, 8, 40, 1000))]
        else:
            changed[place] ^= 1 << rng.randrange(8)
        header_bytes = min(header_bytes, len(changed))
    return bytes(changed)


def run_mutations(tmp_path: Path, parts, count: int, seed: int) -> dict[bool, int]:
    """Loads mutations of a file: each gives a model or one sentence."""
    tensors, values = parts
    shortened = {name: value for name, value in values.items() if name != "tokenizer.ggml.scores"}
    path = gguf_files.write_file(tmp_path / "x.gguf", tensors, shortened)
    content = path.read_bytes()
    header_bytes = min(info.start for info in read_gguf(path).tensors.values())
    rng = random.Random(seed)
    refusals = []
    loaded = {True: 0, False: 0}
    for _ in range(count):
        path = tmp_path / "y.gguf"
        path.write_bytes(mutate(content, rng, header_bytes))
        try:
            opened = open_gguf(path)
            opened.tokenizer()
            for stored in opened.tensors().values():
                stored if isinstance(stored, torch.Tensor) else stored.dequantize()
            loaded[True] += 1
        except CheckpointError as error:
            refusals.append(str(error))
            loaded[False] += 1
        path.unlink()  # the next one is another file: this one may still be mapped
    assert all("\n" not in sentence and len(sentence) < 1000 for sentence in refusals)
    return loaded


def test_mutated_files_load_or_are_refused(tmp_path, parts):
    loaded = run_mutations(tmp_path, parts, 300, seed=1)
    assert loaded[True] > 10
    assert loaded[False] > 100


@pytest.mark.soak
def test_ten_thousand_mutated_files_load_or_are_refused(tmp_path, parts):
    loaded = run_mutations(tmp_path, parts, 10_000, seed=2)
    assert min(loaded.values()) > 500
