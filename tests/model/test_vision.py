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
    pictures = [
        read(kind, pooling_kernel_size=raw["pooling_kernel_size"]) for kind in ("landscape", "very wide", "one pixel")
    ]
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
    "text between": (["landscape", "EXIF 6", "grey"], [3, 4, 2, 5]),
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


FIRST = next(iter(TEXTS))
PAIRS = [(FIRST, prompt) for prompt in PROMPTS] + [(text, "text between") for text in TEXTS if text != FIRST]


@pytest.mark.parametrize(("text", "prompt"), PAIRS)
def test_logits_of_images_agree_in_float32(text, prompt):
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


@pytest.mark.parametrize(("prompt", "seed"), [*((prompt, 0) for prompt in PROMPTS), ("three", 1)])
def test_generations_with_images_agree_token_for_token(prompt, seed, monkeypatch):
    ours = tiny.decided(vision_models.text_config(has_joined_images=seed == 0), seed)
    vision = vision_models.build(seed=seed)
    reference = vision_models.reference(ours, vision)
    cfg = tiny.sampler(max_new_tokens=32)
    ids, pictures, starts = make_prompt(prompt, seed)
    ids_BS = torch.tensor([ids])
    images = theirs(pictures, vision_models.IMAGES.max_patches) | {"mm_token_type_ids": (ids_BS == IMAGE).long()}
    with transformers_reference.our_draws(monkeypatch, [77 + seed]):
        expected = transformers_reference.generate(reference, ids_BS, cfg, **images)
    mine = run_ours(ours, vision, [(ids, pictures, starts)], cfg, [77 + seed])
    assert torch.equal(mine, expected.sequences[:, len(ids) : len(ids) + mine.shape[1]])


def test_the_mask_joins_the_tokens_of_an_image():
    """Two cached tokens, five new ones; the second to the fourth are an image. The window is two."""
    keys = torch.arange(7)[None]
    mask = masks.causal(keys[:, 2:], keys, window=2)
    joined = masks.join_images(mask, torch.tensor([[-1, 0, 0, 0, -1], [-1, -1, 0, 1, 1]]))
    rows = [["".join(".x"[int(cell)] for cell in line) for line in row] for row in joined]
    assert rows == [
        [".xx....", "..xxxx.", "...xxx.", "...xxx.", ".....xx"],
        [".xx....", "..xx...", "...xx..", "....xxx", ".....xx"],
    ]


def test_image_features_change_the_answer():
    """Otherwise the tests above would compare text."""
    ours = tiny.decided(vision_models.text_config())
    vision = vision_models.build()
    cfg = tiny.sampler(max_new_tokens=32)
    ids, pictures, starts = make_prompt("image first")
    other = read("landscape")
    other = replace(other, patches_NP=1 - other.patches_NP)
    answers = [run_ours(ours, vision, [(ids, each, starts)], cfg, [5]) for each in (pictures, [other])]
    assert not torch.equal(*answers)
    joined, causal = (tiny.decided(vision_models.text_config(has_joined_images=value)) for value in (True, False))
    spans = [spans_of(vision, pictures, starts)]
    states = [model.encode(torch.tensor([ids]), model.new_cache(1, len(ids)), images=spans) for model in (joined, causal)]
    assert not close(*states, 0.01)


def test_batched_with_text_and_other_images_equals_alone():
    ours = tiny.decided(vision_models.text_config())
    vision = vision_models.build()
    cfg = tiny.sampler(max_new_tokens=32)
    prompts = [make_prompt(name, seed) for seed, name in enumerate(("three", "image last", "two side by side"))]
    prompts.append(([2, 40, 41, 42, 43], [], []))
    together = run_ours(ours, vision, prompts, cfg, [1, 2, 3, 4])
    for row, prompt in enumerate(prompts):
        alone = run_ours(ours, vision, [prompt], cfg, [row + 1])
        assert torch.equal(alone[0], together[row, : alone.shape[1]])
        assert (together[row, alone.shape[1] :] == cfg.pad_token_id).all()
    events = list(generate(ours, [prompts[3][0]], cfg, seeds=[4]))  # as without the argument
    assert torch.equal(events[-1].ids_BT[0], together[3, : events[-1].ids_BT.shape[1]])


@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 1000])
def test_chunks_do_not_divide_images(chunk, monkeypatch):
    monkeypatch.setattr("redraft.diffusion.generate.PREFILL_CHUNK", chunk)
    ours = tiny.build(vision_models.text_config())
    vision = vision_models.build()
    prompts = [make_prompt(name) for name in ("three", "text between")]
    spans = [spans_of(vision, pictures, starts) for _, pictures, starts in prompts]
    for (ids, _, _), images in zip(prompts, spans, strict=True):
        chunks = split_prompt(len(ids), images)
        assert [begin for begin, _ in chunks] == [0, *(end for _, end in chunks[:-1])]
        assert chunks[-1][1] == len(ids)
        assert not any(span.start < end < span.end for span in images for _, end in chunks)
    longest = max(len(ids) for ids, _, _ in prompts)
    cache = ours.new_cache(2, longest)
    with torch.inference_mode():
        prefill(ours, [ids for ids, _, _ in prompts], cache, spans)
        canvas_BC = torch.full((2, 16), 50)
        logits = ours.denoise(canvas_BC, None, cache)
        for row, (ids, _, _) in enumerate(prompts):
            alone = ours.new_cache(1, len(ids))
            ours.encode(torch.tensor([ids]), alone, images=[spans[row]])
            assert close(logits[row : row + 1], ours.denoise(canvas_BC[:1], None, alone))


def test_images_outside_of_a_prompt_are_refused():
    ours = tiny.build(vision_models.text_config())
    features = torch.zeros(3, ours.config.hidden_size)
    for spans in ([ImageSpan(3, features)], [ImageSpan(-1, features)], [ImageSpan(0, features), ImageSpan(2, features)]):
        with pytest.raises(ValueError, match="overlap or are outside"):
            next(generate(ours, [[2, 30, 31, 32, 33]], tiny.sampler(), seeds=[1], images=[spans]))
    with pytest.raises(ValueError, match="1 prompts and the images of 2"):
        next(generate(ours, [[2]], tiny.sampler(), seeds=[1], images=[(), ()]))


def test_bf16_agrees_within_two_percent_of_the_spread():
    vision = vision_models.build().to(torch.bfloat16)
    text = tiny.build(vision_models.text_config(), dtype=torch.bfloat16)
    picture = read("landscape")
    with torch.inference_mode():
        encoder = vision_models.reference(text, vision).model.encoder
        expected = encoder.get_image_features(**theirs([picture], 280), return_dict=True).pooler_output
    features = vision.encode_image(picture.patches_NP, picture.positions_N2)
    assert features.dtype == torch.bfloat16
    assert (features - expected).abs().max() <= 0.02 * (expected.max() - expected.min())
