"""Vision weights are loaded from published checkpoints when they are needed, and saved again unchanged."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiny
import torch
import vision_models
from safetensors.torch import load_file, save_file
from transformers import DiffusionGemmaForBlockDiffusion

from redraft import checkpoint
from redraft.checkpoint.names import VISION
from redraft.checkpoint.published_vision import parse_image_config, parse_vision_config
from redraft.checkpoint.quantize import QuantizeOptions, quantize_checkpoint
from redraft.checkpoint.tensors import CheckpointTensors
from redraft.checkpoint.vision_files import load_vision
from redraft.config import SMALLEST_VISION, ConfigError
from redraft.config.vision import ImageConfig, VisionConfig
from redraft.model.vision import Vision


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    return vision_models.published(tmp_path_factory.mktemp("published"))


def vision_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name.startswith(VISION)}


def test_published_vision_weights_load(published):
    parts = load_vision(published)
    expected = vision_models.build().state_dict()
    loaded = parts.vision.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert parts.images == vision_models.IMAGES
    assert parts.token_ids == vision_models.IMAGE_IDS
    assert load_vision(published, dtype=torch.bfloat16).vision.vision_tower.std_bias.dtype == torch.bfloat16


def test_loading_vision_reads_no_other_tensor(published, monkeypatch):
    reads: Counter[str] = Counter()
    read = CheckpointTensors.__getitem__
    monkeypatch.setattr(CheckpointTensors, "__getitem__", lambda self, name: reads.update([name]) or read(self, name))
    load_vision(published, dtype=torch.float32)
    assert reads == dict.fromkeys(vision_tensors(published), 1)


def test_text_only_loading_reads_no_vision_tensor(published, monkeypatch):
    read = CheckpointTensors.__getitem__

    def read_text(self, name):
        assert not name.startswith(VISION)
        return read(self, name)

    monkeypatch.setattr(CheckpointTensors, "__getitem__", read_text)
    model = checkpoint.load_model(published)
    assert all("vision" not in name for name in model.state_dict())


TEXT_ONLY = """
import sys, redraft
writer = redraft.load(sys.argv[1], device="cpu")
writer.chat("hello", max_tokens=16, seed=1)
print([name for name in sys.modules if name.split(".")[0] == "PIL" or "vision" in name and name.startswith("redraft")
       or name == "redraft.tokenizer.images"])
"""


def test_text_only_use_imports_no_pillow_and_no_vision_module(published):
    run = subprocess.run([sys.executable, "-c", TEXT_ONLY, published], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def check_saved(folder: Path, published: Path) -> None:
    before, after = vision_tensors(published), vision_tensors(folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    settings = "processor_config.json"
    assert (folder / settings).read_bytes() == (published / settings).read_bytes()
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, published)]
    assert configs[0]["vision_config"] == configs[1]["vision_config"]
    assert configs[0]["image_token_id"] == configs[1]["image_token_id"]
    assert load_vision(folder).images == vision_models.IMAGES


def test_saving_keeps_vision_weights_and_processor(published, tmp_path):
    model = checkpoint.load_model(published)
    checkpoint.save(model, tmp_path / "out", tokenizer=vision_models.byte_tokenizer(), vision_from=published)
    check_saved(tmp_path / "out", published)
    checkpoint.save(model, tmp_path / "out", vision_from=tmp_path / "out", force=True)
    check_saved(tmp_path / "out", published)
    loaded, report = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), report
    assert torch.equal(loaded.model.encoder.vision_tower.std_bias, vision_models.build().vision_tower.std_bias)


@pytest.mark.parametrize("to", ["fp8", "nvfp4", "int4"])
def test_quantizing_leaves_vision_as_it_is(to, published, tmp_path):
    for _ in quantize_checkpoint(published, tmp_path / "out", QuantizeOptions(to=to)):
        pass
    check_saved(tmp_path / "out", published)
    assert checkpoint.load_model(tmp_path / "out").config.quant


def rewrite(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors", metadata={"format": "pt"})


def test_wrong_vision_weights_are_one_sentence(tmp_path):
    folder = vision_models.published(tmp_path / "published")
    bias = "model.encoder.vision_tower.std_bias"
    for tensor, words in ((None, f"no tensor {bias}"), (torch.ones(5), r"shape \[5\], config.json describes \[24\]")):
        rewrite(folder, bias, tensor)
        with pytest.raises(checkpoint.CheckpointError, match=words):
            load_vision(folder)
    rewrite(folder, bias, torch.ones(24))
    rewrite(folder, "model.encoder.vision_tower.extra", torch.ones(5))
    with pytest.raises(checkpoint.CheckpointError, match=r"does not have: model\.encoder\.vision_tower\.extra"):
        load_vision(folder)
    rewrite(folder, "model.encoder.vision_tower.encoder.layers.7.input_layernorm.weight", torch.ones(24))
    with pytest.raises(checkpoint.CheckpointError, match="vision_config has 2 layers and the weights have 8"):
        load_vision(folder)


def test_a_table_of_positions_that_is_too_short_is_one_sentence(tmp_path):
    """Wide pictures would look up positions that are not there."""
    raw = vision_models.RAW | {"position_embedding_size": 139}
    folder = vision_models.published(tmp_path / "published", raw=raw)
    with pytest.raises(
        checkpoint.CheckpointError, match="position_embedding_size is 139, and a picture of 70 tokens may be 140"
    ):
        load_vision(folder)


def test_checkpoints_without_vision_are_one_sentence(tmp_path):
    tiny.save_folder(tmp_path / "text")
    with pytest.raises(checkpoint.CheckpointError, match="is a text-only model: its vision tower has no layers"):
        load_vision(tmp_path / "text")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(checkpoint.CheckpointError, match="is a GGUF file, which has no vision tower"):
        load_vision(tmp_path / "model.gguf")


def test_defaults_are_those_of_transformers():
    from transformers import Gemma4VisionConfig
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    theirs = Gemma4VisionConfig().to_dict()
    assert parse_vision_config({}) == parse_vision_config(theirs) == VisionConfig()
    assert parse_image_config(json.loads(Gemma4ImageProcessorPil().to_json_string()), VisionConfig()) == ImageConfig()
    assert parse_vision_config(SMALLEST_VISION).is_empty


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 0}, "vision hidden_size must be a whole number from 1"),
        ({"hidden_size": 10**9}, "vision hidden_size must be a whole number from 1"),
        ({"head_dim": 6}, "multiple of 4"),
        ({"num_key_value_heads": 2}, "cannot share"),
        ({"num_hidden_layers": 10**6}, "vision num_hidden_layers"),
        ({"standardize": "yes"}, "must be true or false"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({"model_type": "siglip"}, "model_type is 'siglip'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_parameters": 5}, "must be an object"),
    ],
)
def test_other_vision_towers_are_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        parse_vision_config(vision_models.RAW | changes)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_soft_tokens": 100}, "must be one of 70, 140, 280, 560, 1120, got 100"),
        ({"patch_size": 14}, "patch_size is 14, and the vision tower takes 16"),
        ({"resample": 2}, "resample is 2"),
        ({"do_normalize": True, "image_mean": [0.5] * 3}, "normalized"),
    ],
)
def test_other_processors_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        parse_image_config(settings, VisionConfig())
    assert parse_image_config({"do_normalize": True, "image_mean": [0.0] * 3}, VisionConfig()) == ImageConfig()


def test_the_released_tower_has_the_published_tensors():
    """Names and shapes are those of the released checkpoint: 386 tensors of the encoder, 30 of them layer scalars."""
    with torch.device("meta"):
        vision = Vision(parse_vision_config(vision_models.RELEASED), 2816)
    shapes = {name: list(tensor.shape) for name, tensor in vision.state_dict().items()}
    assert len(shapes) == 386 - 30
    layer = "vision_tower.encoder.layers.26."
    projections = {f"{layer}self_attn.{name}_proj.linear.weight": [1152, 1152] for name in "qkvo"}
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    assert (
        shapes.items()
        >= {
            "embed_vision.embedding_projection.weight": [2816, 1152],
            "vision_tower.patch_embedder.input_proj.weight": [1152, 768],
            "vision_tower.patch_embedder.position_embedding_table": [2, 10240, 1152],
            "vision_tower.std_bias": [1152],
            "vision_tower.std_scale": [1152],
            **projections,
            **{f"{layer}{name}_layernorm.weight": [1152] for name in norms},
            f"{layer}self_attn.q_norm.weight": [72],
            f"{layer}self_attn.k_norm.weight": [72],
            f"{layer}mlp.gate_proj.linear.weight": [4304, 1152],
            f"{layer}mlp.up_proj.linear.weight": [4304, 1152],
            f"{layer}mlp.down_proj.linear.weight": [1152, 4304],
        }.items()
    )
    assert sum(tensor.numel() for tensor in vision.state_dict().values()) == 572_794_416
