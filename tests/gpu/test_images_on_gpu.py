"""Images on the GPU: features to rounding, and the engine writes the tokens of `generate` on the CPU (float32)."""

from dataclasses import replace

import pytest
import tiny
import torch

from redraft.checkpoint.published_vision import parse_vision_config
from redraft.config import EngineConfig, ModelConfig
from redraft.diffusion.generate import generate
from redraft.engine import Engine
from redraft.model.vision import ImageSpan, Vision

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BEGIN, IMAGE, END = IMAGE_IDS = (tiny.VOCAB - 3, tiny.VOCAB - 2, tiny.VOCAB - 1)
CFG = tiny.sampler(max_new_tokens=32)


def make_config() -> ModelConfig:
    """A tiny text model that takes images."""
    return replace(tiny.BASE, vision=tiny.VISION, image_token_ids=IMAGE_IDS)


def make_features(device: str, rows: int, columns: int, seed: int) -> torch.Tensor:
    """The features of a random picture of so many squares of 2 x 2 patches."""
    vision = Vision(parse_vision_config(tiny.VISION), tiny.BASE.hidden_size).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(7)
    for tensor in vision.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + (tensor.dim() == 1))
    vision = vision.to(device)
    generator.manual_seed(seed)
    patches = torch.rand(4 * rows * columns, 3 * 4 * 4, generator=generator)
    positions = torch.cartesian_prod(torch.arange(2 * rows), torch.arange(2 * columns)).flip(1)
    return vision.encode_image(patches.to(device), positions.to(device))


def make_prompt(device: str) -> tuple[list[int], list[ImageSpan]]:
    """Text, an image, text, another image, text."""
    ids = [2, 40, 41]
    spans = []
    for seed, (rows, columns) in enumerate(((3, 4), (5, 2))):
        features = make_features(device, rows, columns, seed)
        spans.append(ImageSpan(len(ids) + 1, features, bytes([seed])))
        ids += [BEGIN, *[IMAGE] * len(features), END, *range(60, 70)]
    return ids, spans


def test_features_agree():
    here, there = (make_features(device, 3, 4, 0).cpu() for device in ("cpu", "cuda"))
    assert here.shape == (12, tiny.BASE.hidden_size)
    assert (here - there).abs().max() <= 1e-3 * here.abs().max()


@pytest.mark.parametrize("chunk", [16, 512])
def test_the_engine_writes_the_tokens_of_the_cpu(chunk):
    ids, spans = make_prompt("cpu")
    *_, expected = generate(tiny.decided(make_config()), [ids], CFG, seeds=[3], images=[spans])
    ids, spans = make_prompt("cuda")
    engine = Engine(tiny.decided(make_config()).cuda(), EngineConfig(prefill_chunk=chunk, prefix_cache_entries=4))
    for text_beside in (False, True, True):  # the last time from the prefix cache
        others = [engine.add([2, *range(50, 90)], CFG, seed=1)] if text_beside else []
        request = engine.add(ids, CFG, seed=3, images=spans)
        found = engine.run([request, *others])[request]
        assert torch.equal(found.ids_BT.cpu(), expected.ids_BT)
