"""Loading and saving: saved = loaded, sharded = whole, little memory; an error names the damaged file or tensor."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from redraft import checkpoint
from redraft.checkpoint import CheckpointError
from redraft.checkpoint.tensors import CheckpointTensors
from redraft.model import quant
from redraft.model.diffusion_gemma import DiffusionGemma


@pytest.fixture(name="folder")
def _folder(tmp_path):
    return tiny.save_folder(tmp_path / "model")


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    first = a.state_dict()
    second = b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def rewrite(folder: Path, change) -> None:
    """Loads all tensors, changes them, writes them back, as somebody else would."""
    tiny.remove_manifest(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_saved_equals_loaded(folder):
    model = tiny.decided(tiny.BASE)
    loaded = checkpoint.load_model(folder)
    assert same(model, loaded)
    assert loaded.config == model.config
    assert not any(p.requires_grad for p in loaded.parameters())
    assert checkpoint.read_sampler_config(folder, loaded.config) == tiny.sampler(max_new_tokens=32)
    assert os.listdir(folder.parent) == ["model"]
    assert sorted(os.listdir(folder)) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "redraft.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_all_files_have_the_same_permissions(folder):
    """The safetensors library makes files for the owner alone; others share the folder."""
    modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
    assert "model.safetensors" in modes
    assert len(set(modes.values())) == 1, modes


def test_sharded_equals_whole_and_old_shards_are_deleted(folder):
    model = checkpoint.load_model(folder, dtype=torch.float32)
    checkpoint.save(model, folder, shard_bytes=30_000, force=True)
    shards = sorted(f.name for f in folder.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].startswith("model-00001-of-")
    assert same(model, checkpoint.load_model(folder))
    checkpoint.save(model, folder, force=True)
    assert [f.name for f in folder.glob("*.safetensors*")] == ["model.safetensors"]
    assert same(model, checkpoint.load_model(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_is_that_of_the_file_or_the_given_one(folder, tmp_path, dtype):
    checkpoint.save(tiny.decided(tiny.BASE).to(torch.bfloat16), tmp_path / "half")
    assert checkpoint.load_model(tmp_path / "half").dtype == torch.bfloat16
    assert {t.dtype for t in checkpoint.load_model(tmp_path / "half", dtype=dtype).state_dict().values()} == {dtype}


def test_float16_becomes_bf16_unless_it_is_asked_for(tmp_path):
    """The kernels are made for bf16. What is rounded on the way is said."""
    model = tiny.decided(tiny.BASE).half()
    checkpoint.save(model, tmp_path / "half")
    loaded = checkpoint.load_model(tmp_path / "half")
    assert same(model.bfloat16(), loaded)
    assert "attention, 11 weights: float16 -> bfloat16" in loaded.conversions
    for dtype in (torch.float16, torch.float32):
        asked = checkpoint.load_model(tmp_path / "half", dtype=dtype)
        assert asked.dtype == dtype
        assert asked.conversions == ()


def test_duplicates_must_equal_the_tensor_they_are_tied_to(folder):
    def duplicate(tensors):
        tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"].clone()
        for name in [n for n in tensors if n.startswith("model.decoder.layers.") and not n.endswith("layer_scalar")]:
            tensors[name.replace("model.decoder.", "model.encoder.language_model.")] = tensors[name].clone()

    rewrite(folder, duplicate)
    assert same(tiny.decided(tiny.BASE), checkpoint.load_model(folder))
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        checkpoint.load_model(folder)


def test_missing_encoder_scalars_are_taken_from_the_decoder(folder):
    def drop(tensors):
        for name in [n for n in tensors if n.startswith("model.encoder.language_model.")]:
            del tensors[name]

    rewrite(folder, drop)
    model = checkpoint.load_model(folder)
    assert all(torch.equal(layer.layer_scalar, layer.encoder_layer_scalar) for layer in model.layers)


def test_vision_weights_are_skipped_and_can_be_copied(folder, tmp_path):
    tower = "model.encoder.vision_tower.encoder.layers.0.input_layernorm.weight"
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["hidden_size"] = 16
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, lambda tensors: tensors.update({tower: torch.arange(5.0)}))
    model = checkpoint.load_model(folder)
    checkpoint.save(model, tmp_path / "with", vision_from=folder)
    assert load_file(tmp_path / "with" / "model.safetensors")[tower].tolist() == [0, 1, 2, 3, 4]
    assert checkpoint.read_model_config(tmp_path / "with").vision["hidden_size"] == 16
    checkpoint.save(model, tmp_path / "without")
    assert checkpoint.read_model_config(tmp_path / "without").vision["hidden_size"] == 8
    assert tower not in load_file(tmp_path / "without" / "model.safetensors")


def cut(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "model.safetensors").unlink(), ["model.safetensors", "missing"]),
        (lambda f: cut(f / "model.safetensors", 0.5), ["model.safetensors", "cut short"]),
        (lambda f: cut(f / "model.safetensors", 0.0), ["model.safetensors", "cut short"]),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 1000), ["model.safetensors", "damaged"]),
        (lambda f: rewrite(f, lambda t: t.pop("model.decoder.norm.weight")), ["no tensor model.decoder.norm.weight"]),
        (
            lambda f: rewrite(f, lambda t: t.update({"model.decoder.norm.weight": torch.ones(7)})),
            ["model.decoder.norm.weight", "[7]", "[32]"],
        ),
        (
            lambda f: rewrite(f, lambda t: t.update({"model.decoder.norm.weight": torch.ones(32, dtype=torch.int8)})),
            ["model.decoder.norm.weight", "int8"],
        ),
        (lambda f: rewrite(f, lambda t: t.update({"model.decoder.extra": torch.ones(1)})), ["model.decoder.extra"]),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), ["index.json"]),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": []}'), ["index.json"]),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}'),
            ["model-2.safetensors", "missing"],
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}'), ["../x"]),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": null}}'), ["None"]),
        (
            lambda f: rewrite(f, lambda t: t.update({"model.decoder.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)})),
            ["model.decoder.norm.weight", "float8"],
        ),
        (lambda f: (f / "config.json").unlink(), ["config.json"]),
        (lambda f: (f / "config.json").write_text(json.dumps({"architectures": ["GPT2"]})), ["GPT2"]),
    ],
)
def test_an_error_names_the_damaged_file_or_tensor(folder, damage, words):
    tiny.remove_manifest(folder)
    damage(folder)
    with pytest.raises(ValueError) as caught:
        checkpoint.load_model(folder)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_finding_a_folder(folder, tmp_path, monkeypatch):
    assert checkpoint.find(folder) == folder
    for name, words in (
        (tmp_path / "nowhere" / "at" / "all", "there is no folder"),
        ("just-a-name", "there is no folder"),
        ("~nobody-of-that-name/x", "there is no folder"),
        (folder / "config.json", "is a file"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checkpoint.find(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("nobody/nothing", "hf.co/nobody/nothing"):
        with pytest.raises(CheckpointError, match="'nobody/nothing' is no local folder, and the hub did not deliver it"):
            checkpoint.find(name)


def test_a_hub_id_is_downloaded_once_into_the_hubs_cache(folder, tmp_path, monkeypatch):
    downloads = []

    def snapshot_download(name, allow_patterns, ignore_patterns):
        downloads.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert checkpoint.find("owner/model.v1-it") == folder
    assert checkpoint.find("owner/model.v1-it", weights=False) == folder
    small = ["*.json", "*.jinja", "README.md", "LICENSE*"]
    assert downloads == [("owner/model.v1-it", [*small, *more]) for more in (["*.safetensors"], [])]


def test_a_connection_that_breaks_is_one_sentence(monkeypatch):
    def snapshot_download(name, allow_patterns, ignore_patterns):
        raise RuntimeError("peer closed connection\nwithout sending complete message body")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=r"did not deliver it: peer closed connection$"):
        checkpoint.find("owner/model")


MEASURE = """
import sys, torch
from redraft import checkpoint

def memory(name):  # getrusage would include the parent's peak
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

torch.ones(64, 64) @ torch.ones(64, 64)
checkpoint.load_model(sys.argv[2])  # the first load of any checkpoint has costs of its own
before = memory("VmRSS")
model = checkpoint.load_model(sys.argv[1])
total = sum(float(p.sum()) for p in model.parameters())  # touch every weight
print(memory("VmHWM") - before)
"""


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")
def test_loading_takes_little_more_memory_than_the_file(folder, tmp_path):
    big = replace(tiny.BASE, hidden_size=512, moe_intermediate_size=512, num_experts=64, intermediate_size=512)
    checkpoint.save(DiffusionGemma(big).to(torch.bfloat16), tmp_path / "big", shard_bytes=120_000_000)
    size = sum(f.stat().st_size for f in (tmp_path / "big").glob("*.safetensors"))
    assert size > 250e6
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "big"), str(folder)], capture_output=True, text=True, check=True
    )
    assert 0.9 * size < int(run.stdout) < 1.15 * size, (int(run.stdout) / size, size)


@pytest.mark.parametrize("quantized", [False, True])
def test_every_tensor_is_read_once(tmp_path, quantized, monkeypatch):
    """At 51.6e9 bytes a second reading of the file is seconds of the user's time."""
    model = tiny.decided(tiny.BASE)
    checkpoint.save(quant.quantize_fp8(model) if quantized else model, tmp_path)
    reads: Counter[str] = Counter()
    read = CheckpointTensors.__getitem__
    monkeypatch.setattr(CheckpointTensors, "__getitem__", lambda self, name: reads.update([name]) or read(self, name))
    checkpoint.load_model(tmp_path)
    is_vision = re.compile(r"model\.encoder\.(vision_tower|embed_vision)\.")
    stored = load_file(tmp_path / "model.safetensors")
    assert reads == {name: 1 for name in stored if not is_vision.match(name)}


def test_asking_for_a_name_reads_no_tensor(folder, monkeypatch):
    tensors = CheckpointTensors(folder)
    monkeypatch.setattr(CheckpointTensors, "__getitem__", lambda self, name: pytest.fail(f"{name} was read"))
    assert "model.decoder.norm.weight" in tensors
    assert "model.decoder.extra" not in tensors
