"""The draft head has a file of its own: saved = loaded, transformers loads the folder, wrong shapes are refused."""

import os
from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import DiffusionGemmaForBlockDiffusion

from redraft import checkpoint
from redraft.checkpoint import CheckpointError
from redraft.model import quant

CONFIG = replace(tiny.BASE, draft_head_size=12)
FILE = "draft_head.safetensors"


@pytest.fixture(name="folder")
def _folder(tmp_path):
    return tiny.save_folder(tmp_path / "model", CONFIG)


def test_a_draft_head_is_saved_in_its_own_file_and_loaded(folder):
    model = tiny.decided(CONFIG)
    loaded = checkpoint.load_model(folder)
    assert loaded.config == model.config == checkpoint.read_model_config(folder)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert not any("draft_head" in name for name in load_file(folder / "model.safetensors"))
    assert sorted(load_file(folder / FILE)) == ["draft_head.inner.weight", "draft_head.outer.weight"]


def test_sharded_weights_leave_the_draft_head_alone(folder):
    model = checkpoint.load_model(folder)
    checkpoint.save(model, folder, shard_bytes=30_000, force=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    assert checkpoint.load_model(folder).config == model.config


def test_a_model_without_a_draft_head_removes_the_file(folder):
    checkpoint.save(tiny.decided(tiny.BASE), folder, force=True)
    assert FILE not in os.listdir(folder)
    assert checkpoint.load_model(folder).draft_head is None


def test_without_its_file_a_model_has_no_draft_head(folder):
    (folder / FILE).rename(folder.parent / FILE)
    with pytest.raises(CheckpointError, match=r"draft_head\.safetensors is missing"):
        checkpoint.load_model(folder)
    assert checkpoint.load_model(tiny.remove_manifest(folder)).config == tiny.BASE


def test_a_draft_head_of_another_save_is_refused(folder, tmp_path):
    other = tiny.save_folder(tmp_path / "other", CONFIG, seed=1)
    (other / FILE).replace(folder / FILE)
    with pytest.raises(CheckpointError, match="is not the file that was saved with this checkpoint"):
        checkpoint.load_model(folder)
    plain = tiny.save_folder(tmp_path / "plain")
    (folder / FILE).replace(plain / FILE)
    with pytest.raises(CheckpointError, match="is not the file that was saved with this checkpoint"):
        checkpoint.load_model(plain)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"draft_head.inner.weight": torch.zeros(12, 64)},
        {"draft_head.inner.weight": torch.zeros(12, 60), "draft_head.outer.weight": torch.zeros(32, 12)},
        {"draft_head.inner.weight": torch.zeros(12, 64), "draft_head.outer.weight": torch.zeros(32, 11)},
        {"draft_head.inner.weight": torch.zeros(()), "draft_head.outer.weight": torch.zeros(32, 12)},
        {"draft_head.inner.weight": torch.zeros(0, 64), "draft_head.outer.weight": torch.zeros(32, 0)},
        {"model.decoder.norm.weight": torch.zeros(32)},
    ],
)
def test_wrong_shapes_are_refused_in_one_sentence(folder, tensors):
    tiny.remove_manifest(folder)
    save_file(tensors, folder / FILE)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_model(folder)
    assert "draft head" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_named(folder):
    tiny.remove_manifest(folder)
    (folder / FILE).write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=r"draft_head\.safetensors is damaged"):
        checkpoint.load_model(folder)


def test_transformers_loads_the_folder_and_misses_nothing(folder):
    model, info = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    assert model.config.canvas_length == CONFIG.canvas_length


def test_quantized_and_laid_out_models_keep_their_draft_head(folder, tmp_path):
    hidden_ND = torch.randn(5, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    previous_N = torch.tensor([3, 7, 200, 11, 0])
    model = checkpoint.load_model(folder)
    expected = model.draft_logits(hidden_ND, previous_N)
    assert not torch.equal(expected, model.head(hidden_ND))
    checkpoint.save(quant.quantize_fp8(checkpoint.load_model(folder)), tmp_path / "fp8")
    quantized = checkpoint.load_model(tmp_path / "fp8")
    assert quantized.config == replace(CONFIG, quant="fp8")
    assert torch.equal(quantized.draft_logits(hidden_ND, previous_N), expected)
    laid_out = checkpoint.lay_out_for_cpu(checkpoint.load_model(folder))
    assert torch.allclose(laid_out.draft_logits(hidden_ND, previous_N), expected, atol=1e-5)


def test_settings_of_checked_mode_are_saved(tmp_path):
    sampler = tiny.sampler(check="checked", tolerance=1.5, draft_length=6, draft_steps=3, draft_token=0, temperature=0.7)
    checkpoint.save(tiny.decided(tiny.BASE), tmp_path / "model", sampler=sampler)
    assert checkpoint.read_sampler_config(tmp_path / "model", tiny.BASE) == sampler
