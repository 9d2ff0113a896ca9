"""Files of untrusted checkpoints: none can stall a loader, fill its memory or make it build an absurd model."""

import json
import os
import socket
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

import redraft
from redraft import checkpoint, config
from redraft.config import ConfigError, ModelConfig

LOAD = sys.modules["redraft.checkpoint.load"]
READ_WHOLE = (
    "config.json generation_config.json redraft.json tokenizer.json tokenizer_config.json chat_template.jinja".split()
)
INDEX = "model.safetensors.index.json"


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch):
    """A checkpoint like a published one, in the working directory: the path of a socket must be short."""
    monkeypatch.chdir(tmp_path)
    return tiny.remove_manifest(tiny.save_folder(Path("model")))


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


KINDS = {
    "a pipe": os.mkfifo,
    "a socket": bind_socket,
    "a folder": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


def refuse(load, folder: Path) -> str:
    """The one sentence with which a folder is refused."""
    with pytest.raises(ValueError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


@pytest.mark.parametrize("name", [*READ_WHOLE, INDEX, "model.safetensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(folder, name, kind):
    """A pipe would wait for its other end, and /dev/zero has no end."""
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name)
    assert f"{name} is {kind}, but redraft needs a regular file there" in refuse(redraft.load, folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_the_manifest_is_checked_without_opening_a_pipe(tmp_path, name):
    folder = tiny.save_folder(tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert name in refuse(redraft.load, folder)


def test_links_to_regular_files_are_followed(folder):
    """The hub's cache is made of links."""
    elsewhere = Path("blobs")
    folder.rename(elsewhere)
    folder.mkdir()
    for path in elsewhere.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    assert redraft.load(folder).write("Once", seed=1).ids == redraft.load(elsewhere).write("Once", seed=1).ids


@pytest.mark.parametrize("name", [*READ_WHOLE, INDEX])
def test_a_file_that_is_read_whole_has_a_largest_size(folder, monkeypatch, name):
    monkeypatch.setattr("redraft.config.files.MAX_FILE_BYTES", 1 << 20)
    (folder / name).unlink(missing_ok=True)
    (folder / name).touch()
    os.truncate(folder / name, 1 << 40)  # a sparse file: it takes no space on the disk
    assert f"{name} has more than 1 MiB" in refuse(redraft.load, folder)


def test_the_largest_size_leaves_room_for_the_released_tokenizer():
    assert config.MAX_FILE_BYTES >= 2 * 33_000_000


HOSTILE_JSON = {
    "digits": '{"canvas_length": ' + "9" * 5000 + "}",
    "nesting": '{"a":' * 100_000,
    "no number": '{"canvas_length": NaN, "text_config": NaN}',
    "a long text": '{"model_type": "' + "x" * 100_000 + '"}',
    "no UTF-8": '{"a": "\udcff"}',
}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "redraft.json", "tokenizer_config.json", INDEX])
@pytest.mark.parametrize("kind", HOSTILE_JSON)
def test_hostile_json_is_refused_in_a_plain_sentence(folder, name, kind):
    (folder / name).write_bytes(HOSTILE_JSON[kind].encode("utf-8", "surrogateescape"))
    is_harmless = name not in ("config.json", INDEX) and kind in ("no number", "a long text")
    if is_harmless:  # the keys mean nothing there
        redraft.load(folder)
        return
    sentence = refuse(redraft.load, folder)
    for words in ("set_int_max_str_digits", "recursion", "Exceeds the limit"):
        assert words not in sentence
    if kind == "digits":
        assert f"{name} is not readable JSON: it holds a number with thousands of digits" in sentence
    if kind == "nesting":
        assert f"{name} is not readable JSON: it is nested too deeply" in sentence


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 200_000, b"\xff" * 100, b'{"model": {"type": "BPE", "vocab": {"a": -1}}}']
)
def test_hostile_tokenizers_are_refused(folder, content):
    (folder / "tokenizer.json").write_bytes(content)
    assert "tokenizer.json is not a readable tokenizer" in refuse(redraft.load, folder)


# Sizes


def change_config(folder: Path, **changes) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= changes
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("changes", "field", "described", "stored"),
    [
        ({"num_hidden_layers": 9999, "layer_types": ["full_attention"] * 9999}, "num_hidden_layers", 9999, 3),
        ({"num_hidden_layers": 9999, "layer_types": None}, "num_hidden_layers", 9999, 3),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "num_hidden_layers", 2, 3),
        ({"num_experts": 16_384}, "num_experts", 16_384, 4),
        ({"vocab_size": 2**24}, "vocab_size", 2**24, tiny.VOCAB),
        ({"hidden_size": 2**17}, "hidden_size", 2**17, 32),
    ],
)
def test_a_model_that_the_weights_are_not_of_is_never_built(folder, monkeypatch, changes, field, described, stored):
    change_config(folder, **changes)
    monkeypatch.setattr(LOAD, "build_model", lambda _: pytest.fail("the model was built"))
    sentence = refuse(checkpoint.load_model, folder)
    assert f"{field} is {described} in config.json and {stored} in the weights" in sentence


def test_sizes_are_compared_without_reading_a_tensor(folder, monkeypatch):
    monkeypatch.setattr(LOAD.CheckpointTensors, "__getitem__", lambda self, name: pytest.fail(f"{name} was read"))
    change_config(folder, num_experts=5)
    assert "num_experts is 5 in config.json and 4 in the weights" in refuse(checkpoint.load_model, folder)


@pytest.mark.parametrize("name", ["layers.{}.norm.weight", "layers.0.experts.{}.gate_proj.weight", "embed_tokens.weight"])
def test_odd_names_and_shapes_of_tensors_are_refused(folder, name):
    tensors = load_file(folder / "model.safetensors")
    for number in ("9" * 5000, "999999999", "٣"):
        odd = {"model.decoder." + name.format(number): torch.zeros(())}
        save_file({**tensors, **odd}, folder / "model.safetensors")
        refuse(checkpoint.load_model, folder)


@pytest.mark.parametrize("name", sorted(config.LARGEST))
def test_whole_numbers_are_bounded_far_above_the_released_model(name):
    released = getattr(ModelConfig(), name)
    assert config.LARGEST[name] >= 10 * released
    for value in (config.LARGEST[name] + 1, 10**30, 0, -1):
        with pytest.raises(
            ConfigError, match=rf"{name} must be a whole number from 1 to {config.LARGEST[name]}, got {value}"
        ):
            ModelConfig(**{name: value})


def test_every_size_of_a_model_is_bounded():
    counts = {field.name for field in fields(ModelConfig) if field.type is int and not field.name.endswith("token_id")}
    assert counts - set(config.LARGEST) == {
        "sliding_window",  # these two only limit other sizes
        "max_position_embeddings",
        "draft_head_size",  # may be 0, so it has a limit of its own
    }
    with pytest.raises(ConfigError, match="num_hidden_layers must be a whole number from 1 to 10000, got 10006"):
        replace(
            tiny.BASE, layer_types=ModelConfig().layer_types * 333 + ModelConfig().layer_types[:10] + ("full_attention",) * 6
        )


def test_ten_times_the_released_model_is_described():
    """A config of that size is valid, and nothing is allocated for it."""
    large = {name: 10 * getattr(ModelConfig(), name) for name in config.LARGEST if name != "canvas_length"}
    assert ModelConfig(**large, layer_types=ModelConfig().layer_types * 10).num_hidden_layers == 300


def test_an_error_shows_no_more_than_the_start_of_a_long_value():
    for call in (config.require_int, config.require_number, config.require_object):
        with pytest.raises(ConfigError) as caught:
            call("x", "y" * 10**6)
        assert len(str(caught.value)) < 300
