"""Writer.chat and Writer.stream with images: the same answer as transformers, and the vision tower loads when needed."""

import logging
import threading
from pathlib import Path

import pytest
import tiny
import torch
import transformers_reference
import vision_models
from transformers import DiffusionGemmaForBlockDiffusion

import redraft
from redraft.checkpoint import CheckpointError
from redraft.engine import Stopped
from redraft.tokenizer.images import encode_image_chat
from redraft.writer import Writer

IMAGE = vision_models.IMAGE_IDS[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return vision_models.published(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def writer(folder) -> Writer:
    return redraft.load(folder, device="cpu")


def ask(*names: str) -> list[dict]:
    parts = [{"type": "image", "image": vision_models.FILES[name]()} for name in names]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


SETTINGS = {"max_tokens": 32, "max_steps": 6, "entropy_bound": 1.0, "confidence_threshold": 0.1, "seed": 9}


def test_an_answer_equals_transformers(writer, folder, monkeypatch):
    messages = ask("landscape", "EXIF 6")
    prompt = encode_image_chat(writer.tokenizer, messages, vision_models.IMAGES)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder).eval()
    processed = vision_models.processor()(list(map(open_upright, ("landscape", "EXIF 6"))), return_tensors="pt")
    ids_BS = torch.tensor([prompt.ids])
    cfg = writer.sampler.changed(max_new_tokens=32, max_steps=6, entropy_bound=1.0, confidence_threshold=0.1)
    images = {name: processed[name] for name in ("pixel_values", "image_position_ids")}
    with transformers_reference.our_draws(monkeypatch, [9]):
        expected = transformers_reference.generate(model, ids_BS, cfg, **images, mm_token_type_ids=(ids_BS == IMAGE).long())
    answer = writer.chat(messages, **SETTINGS)
    assert answer.ids == tuple(expected.sequences[0, len(prompt.ids) :].tolist()[: len(answer.ids)])
    assert answer.stats.prompt_tokens == len(prompt.ids)


def open_upright(name: str):
    return vision_models.processor().fetch_images(vision_models.data_url(vision_models.FILES[name]()))


def test_streaming_equals_chat(writer):
    answer = writer.chat(ask("portrait"), **SETTINGS)
    *_, end = writer.stream(ask("portrait"), **SETTINGS)
    assert tuple(end.ids_BT[0].tolist()[: len(answer.ids)]) == answer.ids
    chosen = writer.chat(ask("portrait"), **SETTINGS, choices=["yes", "no"])
    assert chosen.text in ("yes", "no")


def test_the_vision_tower_is_loaded_with_the_first_image(folder):
    fresh = redraft.load(folder, device="cpu")
    fresh.chat("hello", **SETTINGS)
    assert "_parts" not in vars(fresh.images)
    fresh.chat(ask("grey"), **SETTINGS)
    assert fresh.images.load_vision() is fresh.images.load_vision()
    assert "_parts" in vars(redraft.load(folder, device="cpu", vision=True).images)


def test_text_answers_do_not_change(folder, writer):
    before = redraft.load(folder, device="cpu").chat("hello", **SETTINGS)
    writer.chat(ask("grey"), **SETTINGS)
    assert writer.chat("hello", **SETTINGS).ids == before.ids


def test_an_animated_picture_is_announced(writer, caplog):
    with caplog.at_level(logging.WARNING, "redraft"):
        writer.chat(ask("animated GIF", "animated PNG"), **SETTINGS)
    assert [record.getMessage() for record in caplog.records] == ["the image has several frames: the first one is used"]


def test_stop_ends_an_answer(writer):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        writer.chat(ask("grey"), **SETTINGS, stop=stop)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"best_of": 2}, "takes no best_of, got 2"),
        ({"seconds": 5.0}, "takes no seconds"),
        ({"check": "exact"}, "needs check 'off', got 'exact'"),
        ({"streamer": object()}, "takes no streamer"),
    ],
)
def test_what_only_the_engine_does_is_refused(writer, options, words):
    settings = {name: value for name, value in SETTINGS.items() if name in ("seed", "max_tokens")}
    with pytest.raises(ValueError, match=words):
        writer.chat(ask("grey"), **settings, **options)


def test_models_without_vision_say_so(tmp_path):
    text_only = redraft.load(tiny.save_folder(tmp_path / "text"), device="cpu")
    with pytest.raises(CheckpointError, match="is a text-only model"):
        text_only.chat(ask("grey"))
    with pytest.raises(CheckpointError, match="made without a checkpoint"):
        tiny.writer().chat(ask("grey"))
    with pytest.raises(CheckpointError, match="is a text-only model"):
        redraft.load(tmp_path / "text", device="cpu", vision=True)
