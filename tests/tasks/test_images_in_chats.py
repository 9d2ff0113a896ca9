"""Writer.chat and Writer.stream with images: the same answer as transformers, and the vision tower loads when needed."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
import transformers_reference
import vision_models
from transformers import DiffusionGemmaForBlockDiffusion

import redraft
from redraft import checkpoint
from redraft.checkpoint import CheckpointError
from redraft.checkpoint.published_vision import parse_vision_config
from redraft.checkpoint.vision_files import load_vision
from redraft.config import EngineConfig, ModelConfig
from redraft.diffusion.generate import generate
from redraft.diffusion.verified import generate_verified
from redraft.engine import RequestError, StopEvent, Stopped
from redraft.engine.vision_memory import count_vision_bytes
from redraft.model.kv_cache import KVCache
from redraft.model.vision import ImageSpan, Vision
from redraft.tasks import best_of
from redraft.tasks.answer import Answer
from redraft.tasks.feature_cache import EncodedImage, FeatureCache
from redraft.tasks.generation import GenerationOptions
from redraft.tasks.images import ImageReader
from redraft.tasks.infill import sequence_logprobs
from redraft.tokenizer.images import ImageError, encode_image_chat
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
    prompt = encode_image_chat(writer.tokenizer, messages, vision_models.read)
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
    assert not fresh.images.has_vision
    fresh.chat(ask("grey"), **SETTINGS)
    assert fresh.images.has_vision
    assert fresh.images.load_vision() is fresh.images.load_vision()
    assert redraft.load(folder, device="cpu", vision=True).images.has_vision


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


def expect(writer: Writer, messages: list[dict], adapter=None, **changes) -> list[int]:
    """The tokens that `generate` or `generate_verified` gives, without an engine."""
    prompt = encode_image_chat(writer.tokenizer, messages, vision_models.read)
    vision = writer.images.load_vision().vision
    spans = [
        ImageSpan(start, vision.encode_image(picture.patches_NP, picture.positions_N2))
        for start, picture in zip(prompt.starts, prompt.images, strict=True)
    ]
    cfg = writer.sampler.changed(max_new_tokens=32, max_steps=6, entropy_bound=1.0, confidence_threshold=0.1, **changes)
    if cfg.check == "off":
        *_, end = generate(writer.model, [prompt.ids], cfg, seeds=[9], images=[spans], adapter=adapter)
    else:
        policy = tiny.engine_policy(cfg)
        *_, end = generate_verified(writer.model, prompt.ids, cfg, seed=9, images=spans, policy=policy, adapter=adapter)
    return end.ids_BT[0].tolist()


def starts_with(ids: list[int], answer: Answer) -> bool:
    return len(answer.ids) > 0 and tuple(ids[: len(answer.ids)]) == answer.ids


@pytest.mark.parametrize("check", ["checked", "exact"])
def test_verified_answers_equal_generate_verified(writer, check):
    messages = ask("landscape", "grey")
    changes = {"check": check, "draft_length": 2}
    assert starts_with(expect(writer, messages, **changes), writer.chat(messages, **SETTINGS, **changes))


def test_an_adapter_and_a_streamer(writer):
    messages = ask("portrait")
    adapter = tiny.trained(writer.model.config)
    adapted = writer.with_adapter(adapter).chat(messages, **SETTINGS)
    assert starts_with(expect(writer, messages, adapter), adapted)
    put = []
    streamer = SimpleNamespace(put=put.append, end=lambda: put.append("end"))
    answer = writer.chat(messages, **SETTINGS, streamer=streamer)
    assert starts_with(expect(writer, messages), answer)
    assert put[0].shape == (1, answer.stats.prompt_tokens)
    assert put[-1] == "end"


def test_the_best_of_several_answers(writer):
    """The answers are compared with the image in view; the streamed one is the same."""
    best = writer.chat(ask("landscape"), **SETTINGS, best_of=3)
    seeds = best_of.seeds_of(9, 3)
    alone = [writer.chat(ask("landscape"), **(SETTINGS | {"seed": seed})) for seed in seeds]
    assert best.ids in [answer.ids for answer in alone]
    prompt = writer.encode(ask("landscape"), GenerationOptions())
    totals = sequence_logprobs(writer.engine, prompt.ids, [answer.ids for answer in alone], images=prompt.images)
    means = [total / len(answer.ids) for total, answer in zip(totals, alone, strict=True)]
    assert best.ids == alone[means.index(max(means))].ids
    *_, end = writer.stream(ask("landscape"), **SETTINGS, best_of=3)
    assert starts_with(end.ids_BT[0].tolist(), best)


def test_the_second_turn_reuses_the_image(folder):
    fresh = redraft.load(folder, device="cpu")
    messages = ask("landscape")
    first = fresh.chat(messages, **SETTINGS)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And?"}]
    second = fresh.chat(messages, **SETTINGS)
    assert second.stats.reused > 70  # the image and its question
    assert starts_with(expect(fresh, messages), second)
    other = [ask("portrait")[0], *messages[1:]]
    third = fresh.chat(other, **SETTINGS)
    assert third.stats.reused < 30  # the text before the image
    assert starts_with(expect(fresh, other), third)


# A server's threads


@pytest.fixture
def towers(writer, monkeypatch) -> list[int]:
    """The patches of every picture that went through the vision tower."""
    vision = writer.images.load_vision().vision
    counts = []
    encode = vision.encode_in_parts

    def count(patches_NP, positions_N2, layers):
        counts.append(len(patches_NP))
        return encode(patches_NP, positions_N2, layers)

    monkeypatch.setattr(vision, "encode_in_parts", count)
    monkeypatch.setattr(writer.images, "features", FeatureCache(max_images=2))
    return counts


def test_a_repeated_image_is_encoded_once(writer, towers):
    options = GenerationOptions()
    first, second = (writer.encode(ask("square"), options) for _ in range(2))
    assert first.images[0].features_ME is second.images[0].features_ME
    assert len(towers) == 1
    writer.encode(ask("grey", "square", "animated GIF", "square"), options)
    assert len(towers) == 3
    assert len(writer.images.features) == 2
    assert writer.encode(ask("animated GIF"), options).notes == ("the image has several frames: the first one is used",)
    assert len(towers) == 3  # the note is kept with the features
    writer.encode(ask("grey"), options)  # forgotten
    assert len(towers) == 4
    other = [{"role": "user", "content": [{"type": "image", "image": vision_models.FILES["grey"]() + b"."}]}]
    writer.encode(other, options)  # another file
    assert len(towers) == 5


def test_the_features_are_bounded_in_bytes(writer, towers, monkeypatch):
    size = writer.encode(ask("square"), GenerationOptions()).images[0].features_ME.nbytes
    monkeypatch.setattr(writer.images, "features", FeatureCache(max_bytes=2 * size))
    for name in ("square", "landscape", "portrait", "grey"):
        writer.encode(ask(name), GenerationOptions())
        assert writer.images.features.nbytes <= 2 * size
    assert len(writer.images.features) > 0


def test_images_of_many_threads_at_once(writer, towers, monkeypatch):
    """In a server's threads: the same image at the same time is encoded once, and all answers are those of one thread."""
    names = ["landscape", "landscape", "portrait", None, "landscape", None]
    prompts = ["Hello" if name is None else ask(name) for name in names]
    expected = [writer.chat(prompt, **SETTINGS).ids for prompt in prompts]
    towers.clear()
    monkeypatch.setattr(writer.images, "features", FeatureCache())
    with writer.engine.run_in_background(), ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: writer.chat(prompt, **SETTINGS, stop=StopEvent("a")), prompts))
    assert [answer.ids for answer in answers] == expected
    assert len(towers) == 2
    assert not writer.engine.scheduler.turns


def test_a_waiting_thread_takes_over_an_image_whose_reader_has_left():
    cache = FeatureCache()
    image = EncodedImage(torch.zeros(3, 4), b"a")
    is_in_work = threading.Event()
    leaves = threading.Event()

    def leave():
        is_in_work.set()
        assert leaves.wait(600)
        raise Stopped

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, b"a", leave)
        assert is_in_work.wait(600)
        second = pool.submit(cache.get, b"a", lambda: image)
        stop = threading.Event()
        stop.set()
        with pytest.raises(Stopped):
            cache.get(b"a", lambda: image, stop)
        leaves.set()
        with pytest.raises(Stopped):
            first.result(600)
        assert second.result(600) is image


def test_steps_run_between_the_layers_of_the_tower(writer, monkeypatch):
    """A turn has few layers, steps of other requests come between, and the features are those of one run, bit for bit."""
    parts = writer.images.load_vision()
    picture = vision_models.read(vision_models.FILES["landscape"]())
    whole = parts.vision.encode_image(picture.patches_NP, picture.positions_N2)
    assert writer.images.plan_turn(parts, len(picture.patches_NP))[0] == 1
    monkeypatch.setattr(writer.images, "features", FeatureCache())
    order = []
    layers = parts.vision.vision_tower.encoder.layers
    hooks = [layer.register_forward_hook(lambda *_: order.append("layer")) for layer in layers]
    step = writer.engine.runner.step
    monkeypatch.setattr(writer.engine.runner, "step", lambda batch: (order.append("step"), step(batch)))
    stop = StopEvent("text")
    never_ends = {
        "max_tokens": 4000,
        "max_steps": 50,
        "confidence_threshold": 1e-9,
        "logit_bias": ((1, -100.0), (5, -100.0)),
    }
    text = writer.stream("Hello", **(SETTINGS | never_ends), stop=stop)
    with writer.engine.run_in_background():
        next(text)
        encoded = writer.encode(ask("landscape"), GenerationOptions(stop=StopEvent("image")))
        stop.set()
        list(text)
    for hook in hooks:
        hook.remove()
    first, last = (order.index("layer"), len(order) - 1 - order[::-1].index("layer"))
    assert order.count("layer") == 2
    assert "step" in order[first:last]
    assert torch.equal(encoded.images[0].features_ME, whole)


def test_a_turn_multiplies_no_more_than_a_step(writer):
    """At the released shape: 27 layers over 2,520 patches take two turns, each at most a canvas of 256 tokens."""
    released = ModelConfig()
    with torch.device("meta"):
        vision = Vision(parse_vision_config(vision_models.RELEASED), released.hidden_size)
    reader = ImageReader(SimpleNamespace(config=released), writer.tokenizer)
    layers, tokens = reader.plan_turn(SimpleNamespace(vision=vision), 2520)
    assert 9 <= layers < 27
    assert tokens <= released.canvas_length
    assert reader.plan_turn(SimpleNamespace(vision=vision), 1)[0] == 27
    assert reader.plan_turn(SimpleNamespace(vision=vision), 10**6)[0] == 1


def test_stop_ends_the_reading_of_an_image(writer, monkeypatch):
    """While the tower runs, and while it waits for a turn."""
    stop = StopEvent("a")
    vision = writer.images.load_vision().vision
    monkeypatch.setattr(writer.images, "features", FeatureCache())
    encode = vision.encode_in_parts

    def stop_at_first(*arguments):
        for output in encode(*arguments):
            stop.set()
            yield output

    monkeypatch.setattr(vision, "encode_in_parts", stop_at_first)
    with writer.engine.run_in_background(), pytest.raises(Stopped):
        writer.encode(ask("landscape"), GenerationOptions(stop=stop))
    assert len(writer.images.features) == 0


# Memory


def test_a_tower_that_comes_later_is_taken_from_the_kv_caches(folder):
    model, tokenizer, sampler = checkpoint.load_checkpoint(folder, device="cpu")

    def make(budget: int, least: int = 0) -> Writer:
        images = ImageReader(model, tokenizer, folder, least)
        return Writer(model, tokenizer, sampler, config=EngineConfig(cache_bytes=budget), images=images)

    vision = load_vision(folder).vision
    size = count_vision_bytes(vision.config, model.config.hidden_size, 4)
    assert size > sum(weight.nbytes for weight in vision.state_dict().values())
    roomy = make(size + 2**20)
    roomy.chat(ask("grey"), **SETTINGS)
    assert roomy.engine.scheduler.budget == 2**20
    roomy.chat(ask("grey"), **SETTINGS)
    assert roomy.engine.scheduler.budget == 2**20
    for tight in (make(size - 1), make(size + 2**20, 2**20 + 1)):
        with pytest.raises(
            RequestError, match=r"the vision tower needs .* MiB, and the KV caches need .*: load it .*--vision"
        ):
            tight.chat(ask("grey"), **SETTINGS)
        assert not tight.images.has_vision
        assert len(tight.chat("hello", **SETTINGS).ids) > 0
    planned = make(2**20)
    planned.images.load_vision()
    planned.chat(ask("grey"), **SETTINGS)
    assert planned.engine.scheduler.budget == 2**20


def test_a_tower_waits_for_memory_beside_running_requests(folder):
    """In a server's threads: a request holds most of the budget; the image is answered when it has ended."""
    loaded = checkpoint.load_checkpoint(folder, device="cpu")
    size = count_vision_bytes(load_vision(folder).vision.config, loaded[0].config.hidden_size, 4)
    config = EngineConfig(cache_bytes=size + 2**20, rewind=0)
    fresh = Writer(*loaded, config=config, images=ImageReader(*loaded[:2], folder))
    stop = StopEvent("text")
    with fresh.engine.run_in_background(), ThreadPoolExecutor(2) as pool:
        tokens = size // KVCache.count_bytes(fresh.model.config, 1, torch.float32)
        with fresh.engine.reserve(tokens, rewind=tokens):
            image = pool.submit(fresh.chat, ask("grey"), **SETTINGS)
            assert tiny.wait_until(lambda: len(fresh.engine.scheduler.reservations) == 2)
            stop.set()
            with pytest.raises(Stopped):  # another request that waits for the same tower, and leaves
                fresh.chat(ask("grey"), **SETTINGS, stop=stop)
            assert not image.done()
        answer = image.result(600)
    assert fresh.engine.scheduler.budget == 2**20
    assert starts_with(expect(fresh, ask("grey")), answer)


def test_a_tower_leaves_room_for_a_request_that_came_while_it_waited(folder):
    """Otherwise that request would wait for ever."""
    loaded = checkpoint.load_checkpoint(folder, device="cpu")
    size = count_vision_bytes(load_vision(folder).vision.config, loaded[0].config.hidden_size, 4)
    config = EngineConfig(cache_bytes=size + 2**16, rewind=10**6)
    fresh = Writer(*loaded, config=config, images=ImageReader(*loaded[:2], folder))
    tokens = 2**17 // KVCache.count_bytes(fresh.model.config, 1, torch.float32)  # more than the tower would leave
    with fresh.engine.run_in_background(), ThreadPoolExecutor(2) as pool:
        with fresh.engine.reserve(tokens, rewind=tokens):
            image = pool.submit(fresh.chat, ask("grey"), **SETTINGS)
            assert tiny.wait_until(lambda: len(fresh.engine.scheduler.reservations) == 2)
            text = pool.submit(fresh.write, "a" * tokens, **SETTINGS)
            assert tiny.wait_until(lambda: bool(fresh.engine.scheduler.waiting or fresh.engine.scheduler.running))
        assert len(text.result(600).ids) > 0
        with pytest.raises(RequestError, match="--vision"):
            image.result(600)
    assert fresh.engine.scheduler.budget == config.cache_bytes


def test_a_tower_that_does_not_fit_gives_its_memory_back(folder, monkeypatch):
    fresh = redraft.load(folder, device="cpu")
    budget = fresh.engine.scheduler.budget

    def fail(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Vision, "to", fail)
    with pytest.raises(RequestError, match="does not fit beside what is in memory: load it at the start, with --vision"):
        fresh.chat(ask("grey"), **SETTINGS)
    assert fresh.engine.scheduler.budget == budget
    assert not fresh.images.has_vision


def test_too_many_images_are_one_sentence(writer):
    with pytest.raises(ImageError, match=r"of 200 images have .* the model's context is 4,096: send fewer images"):
        writer.chat(ask(*["landscape"] * 200), **SETTINGS)
    engine = writer.engine
    tight = Writer(
        writer.model, writer.tokenizer, writer.sampler, config=EngineConfig(cache_bytes=20_000), images=writer.images
    )
    with pytest.raises(RequestError, match=r"MiB of KV cache for .* tokens, and the budget is 0.0 MiB: shorten"):
        tight.chat(ask("landscape"), **SETTINGS)
    assert engine.is_idle


def test_models_without_vision_say_so(tmp_path):
    text_only = redraft.load(tiny.save_folder(tmp_path / "text"), device="cpu")
    with pytest.raises(CheckpointError, match="is a text-only model"):
        text_only.chat(ask("grey"))
    with pytest.raises(CheckpointError, match="made without a checkpoint"):
        tiny.writer().chat(ask("grey"))
    with pytest.raises(CheckpointError, match="is a text-only model"):
        redraft.load(tmp_path / "text", device="cpu", vision=True)
