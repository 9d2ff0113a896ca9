"""Image parts of messages become begin mark, image tokens and end mark, as transformers' processor makes them."""

import base64

import pytest
import tiny
import torch
import vision_models
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

from redraft.tokenizer.images import ImageError, encode_image_chat
from redraft.tokenizer.messages import TokenizerError
from redraft.tokenizer.tokenizer import DEFAULT_TEMPLATE, Tokenizer

BEGIN, IMAGE, END = vision_models.IMAGE_IDS
TOKENIZER = vision_models.byte_tokenizer()


def url(name: str) -> str:
    return "data:image/png;base64," + base64.b64encode(vision_models.FILES[name]()).decode()


def image(name: str) -> dict:
    return {"type": "image", "image": url(name)}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


CONVERSATIONS = {
    "image, text": [{"role": "user", "content": [image("landscape"), text("What is this?")]}],
    "text, image": [{"role": "user", "content": [text("Look: "), image("portrait")]}],
    "text between": [{"role": "user", "content": [text("One"), image("grey"), text("two"), image("EXIF 8"), text("three")]}],
    "image alone": [{"role": "user", "content": [image("one pixel")]}],
    "later turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image("square"), image("alpha"), text("These?")]},
        {"role": "assistant", "content": "Two pictures."},
        {"role": "user", "content": "And?"},
        {"role": "user", "content": [text("This?"), image("very wide")]},
    ],
}


@pytest.fixture(scope="module")
def processor(tmp_path_factory) -> Gemma4Processor:
    """transformers' processor without its parts for audio and video, which need torchvision."""
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save(folder)
    names = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
    names |= {"audio_token": "<|tool>", "boa_token": "<|tool>", "eoa_token": "<tool|>"}  # it asks for some
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens=names, bos_token="<bos>", pad_token="<pad>"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma4Processor, "check_argument_for_proper_class", lambda *_: None)
        return Gemma4Processor(None, vision_models.processor(), tokenizer, None)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_and_pixels_equal_transformers(name, processor):
    messages = CONVERSATIONS[name]
    prompt = encode_image_chat(TOKENIZER, messages, vision_models.read)
    sources = [
        part["image"] for message in messages if isinstance(message["content"], list)
        for part in message["content"] if part["type"] == "image"
    ]  # fmt: skip
    rendered = TOKENIZER.render(messages)
    expected = processor(text=rendered, images=[sources], return_tensors="pt", add_special_tokens=False)
    assert prompt.ids == expected["input_ids"][0].tolist()
    assert len(prompt.images) == len(sources)
    for row, (picture, start) in enumerate(zip(prompt.images, prompt.starts, strict=True)):
        assert torch.equal(picture.patches_NP, expected["pixel_values"][row, : len(picture.patches_NP)])
        end = start + picture.token_count
        assert prompt.ids[start - 1 : end + 1] == [BEGIN, *[IMAGE] * picture.token_count, END]
    marked = [index for start, picture in zip(prompt.starts, prompt.images, strict=True)
              for index in range(start, start + picture.token_count)]  # fmt: skip
    assert expected["mm_token_type_ids"][0].nonzero().flatten().tolist() == marked


def test_our_template_writes_image_parts_as_gemma_does():
    messages = [{"role": "user", "content": [text(" One "), image("grey"), text("two"), image("grey")]}]
    assert TOKENIZER.render(messages).startswith("<bos><|turn>user\nOne<|image|>two<|image|><turn|>\n")


def test_a_template_of_a_checkpoint_gets_the_parts():
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.type }}:{{ p.text }}]{% endfor %}{% endfor %}"
    tokenizer = Tokenizer(TOKENIZER.vocabulary, template=source)
    messages = [{"role": "user", "content": [text("hi"), {"type": "image", "image": b"\xff"}]}]
    assert tokenizer.render(messages) == "[text:hi][image:]"
    with pytest.raises(ImageError, match="the chat template gives 0 of 1 images a place"):
        encode_image_chat(tokenizer, [{"role": "user", "content": [image("grey")]}], vision_models.read)


def test_text_in_parts_is_joined_as_before():
    parts = [{"role": "user", "content": [text("a "), text(" b")]}]
    assert TOKENIZER.encode_chat(parts) == TOKENIZER.encode_chat([{"role": "user", "content": "a  b"}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "assistant", "content": [image("grey")]}], r"message 0 \(assistant\) has an image; only user messages"),
        ([{"role": "user", "content": [{"type": "image"}]}], 'an image needs the key "image"'),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content that is not text"),
        ([{"role": "user", "content": [image("grey"), text("<|image|>")]}], "2 places for images and 1 images"),
        ([{"role": "user", "content": [image("grey"), {"type": "image", "image": b"no"}]}], "image 2 is no PNG"),
        ([{"role": "user", "content": [{"type": "image", "image": "https://a.b/c.png"}]}], "redraft fetches nothing"),
        ([{"role": "user", "content": [{"type": "image", "image": {"url": 5}}]}], "must be bytes, a data URL"),
    ],
)
def test_mistakes_are_one_sentence(messages, words):
    with pytest.raises(ValueError, match=words):
        encode_image_chat(TOKENIZER, messages, vision_models.read)


def test_more_images_than_the_context_holds_are_one_sentence():
    """Those behind the limit are not read."""
    count = vision_models.read(url("square")).token_count
    names = []

    def read(source, name):
        names.append(name)
        return vision_models.read(source, name)

    messages = [{"role": "user", "content": [image("square")] * 5}]
    with pytest.raises(ImageError, match=rf"the first 3 of 5 images have {3 * count} tokens beside .* context is 180"):
        encode_image_chat(TOKENIZER, messages, read, limit=180)
    assert names == ["image 1", "image 2", "image 3"]
    with pytest.raises(ImageError, match=rf"the images have {count} tokens .*: send fewer images"):
        encode_image_chat(TOKENIZER, [{"role": "user", "content": [image("square")]}], read, limit=50)


def test_where_images_are_not_read_they_are_refused():
    with pytest.raises(TokenizerError, match="images are not read here: send text only"):
        TOKENIZER.encode_chat([{"role": "user", "content": [image("grey")]}])
    with pytest.raises(ImageError, match="vocabulary has no special tokens of images"):
        encode_image_chat(tiny.byte_tokenizer(), CONVERSATIONS["image alone"], vision_models.read)


def test_the_template_is_the_one_that_ships():
    assert "<|image|>" in DEFAULT_TEMPLATE.read_text(encoding="utf-8")
