"""redraft = transformers for images: features of the vision tower, logits, and whole generations."""

from dataclasses import replace

import pytest
import tiny
import torch
import transformers_reference
import vision_models
from transformers import DynamicCache

from redraft.config import FULL, SLIDING
from redraft.diffusion.generate import Finished, generate, prefill, split_prompt
from redraft.model import masks
from redraft.model.vision import ImageSpan, Vision
from redraft.tokenizer.images import Picture, expand_images, read_picture

BEGIN, IMAGE, END = vision_models.IMAGE_IDS


def read(name: str, **changes: object) -> Picture:
    return read_picture(vision_models.FILES[name](), replace(vision_models.IMAGES, **changes))


def theirs(pictures: list[Picture], max_patches: int) -> dict[str, torch.Tensor]:
    """Pictures as transformers takes them: padded to the most patches of an image."""
    values = torch.zeros(len(pictures), max_patches, pictures[0].patches_NP.shape[1])
    positions = torch.full((len(pictures), max_patches, 2), -1)
    for row, picture in enumerate(pictures):
        values[row, : len(picture.patches_NP)] = picture.patches_NP
        positions[row, : len(picture.patches_NP)] = picture.positions_N2
    return {"pixel_values": values, "image_position_ids": positions}


def close(mine: torch.Tensor, other: torch.Tensor, share: float = 1e-4) -> bool:
    return mine.shape == other.shape and bool((mine - other).abs().max() <= share * other.abs().max())


@pytest.mark.parametrize("name", vision_models.RAWS)
def test_features_agree_in_float32(name):
    raw = vision_models.RAWS[name]
    vision = vision_models.build(raw)
    text = tiny.build(vision_models.text_config(raw))
    pictures = [read(kind, pooling_kernel_size=raw["pooling_kernel_size"]) for kind in ("landscape", "very wide", "one pixel")]
    most = 70 * raw["pooling_kernel_size"] ** 2
    with torch.inference_mode():
        encoder = vision_models.reference(text, vision).model.encoder
        expected = encoder.get_image_features(**theirs(pictures, most), return_dict=True).pooler_output
    features = [vision.encode_image(picture.patches_NP, picture.positions_N2) for picture in pictures]
    assert [len(each) for each in features] == [picture.token_count for picture in pictures]
    assert close(torch.cat(features), expected, 1e-5)


# Prompts: text and the names of pictures, in order.
PROMPTS = {
    "image first": (["landscape"], [0, 7]),
    "image last": (["portrait"], [9, 0]),
    "text around": (["square"], [5, 6]),
    "two with text between": (["landscape", "EXIF 6"], [3, 4, 5]),
    "two side by side": (["one pixel", "very wide"], [3, 0, 4]),
    "three": (["alpha", "palette", "16-bit"], [1, 2, 20, 3]),
}


def make_prompt(name: str, seed: int = 0) -> tuple[list[int], list[Picture], list[int]]:
    """Ids, pictures, and the index of the first token of each."""
    kinds, lengths = PROMPTS[name]
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(END + 1, tiny.VOCAB, (length,), generator=generator).tolist() for length in lengths]
    ids = [2, *texts[0]]
    for text in texts[1:]:
        ids += [IMAGE, *text]
    pictures = [read(kind) for kind in kinds]
    expanded, starts = expand_images(ids, (BEGIN, IMAGE, END), [picture.token_count for picture in pictures])
    return expanded, pictures, starts


def spans_of(vision: Vision, pictures: list[Picture], starts: list[int]) -> list[ImageSpan]:
    return [
        ImageSpan(start, vision.encode_image(picture.patches_NP, picture.positions_N2))
        for start, picture in zip(starts, pictures, strict=True)
    ]


TEXTS = {
    "window shorter than an image": {},
    "causal images": {"has_joined_images": False},
    "one full layer": {"layer_types": (FULL,)},
    "long window": {"sliding_window": 300, "layer_types": (SLIDING, FULL)},
}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("text", TEXTS)
def test_logits_and_cache_agree_in_float32(text, prompt):
    ours = tiny.build(vision_models.text_config(**TEXTS[text]))
    vision = vision_models.build()
    reference = vision_models.reference(ours, vision)
    ids, pictures, starts = make_prompt(prompt)
    ids_BS = torch.tensor([ids])
    canvas_BC = torch.randint(END + 1, tiny.VOCAB, (1, 16), generator=torch.Generator().manual_seed(5))
    encoder = reference.model.encoder
    past = DynamicCache(config=reference.config.text_config)
    with torch.inference_mode():
        mask = encoder.create_masks_for_generate(  # calling the encoder without it leaves out the mask of images
            config=reference.config,
            inputs_embeds=encoder.get_input_embeddings()(ids_BS),
            attention_mask=None,
            past_key_values=past,
            position_ids=torch.arange(len(ids))[None],
            mm_token_type_ids=(ids_BS == IMAGE).long(),
        )
        images = theirs(pictures, vision_models.IMAGES.max_patches)
        expected = encoder(input_ids=ids_BS, attention_mask=mask, past_key_values=past, **images)
        logits = reference(past_key_values=past, decoder_input_ids=canvas_BC).logits

        cache = ours.new_cache(1, len(ids))
        hidden = ours.encode(ids_BS, cache, images=[spans_of(vision, pictures, starts)])
        assert close(hidden, expected.last_hidden_state)
        assert close(ours.denoise(canvas_BC, None, cache), logits)
        for layer, theirs_layer in enumerate(past.layers):
            for mine, other in zip(cache.view(layer), (theirs_layer.keys, theirs_layer.values), strict=True):
                assert close(mine.transpose(1, 2), other)


def run_ours(ours, vision, prompts, cfg, seeds) -> torch.Tensor:
    spans = [spans_of(vision, pictures, starts) for _, pictures, starts in prompts]
    events = list(generate(ours, [ids for ids, _, _ in prompts], cfg, seeds=seeds, images=spans))
    assert isinstance(events[-1], Finished)
    return events[-1].ids_BT


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_whole_generations_agree_token_for_token(prompt, seed, monkeypatch):
    ours = tiny.decided(vision_models.text_config(has_joined_images=seed == 0), seed)
    vision = vision_models.build(seed=seed)
    reference = vision_models.reference(ours, vision)
    cfg = tiny.sampler(max_new_tokens=40)
    ids, pictures, starts = make_prompt(prompt, seed)
    ids_BS = torch.tensor([ids])
    images = theirs(pictures, vision_models.IMAGES.max_patches) | {"mm_token_type_ids": (ids_BS == IMAGE).long()}
    with transformers_reference.our_draws(monkeypatch, [77 + seed]):
        expected = transformers_reference.generate(reference, ids_BS, cfg, **images)
    mine = run_ours(ours, vision, [(ids, pictures, starts)], cfg, [77 + seed])
    assert torch.equal(mine, expected.sequences[:, len(ids) : len(ids) + mine.shape[1]])
