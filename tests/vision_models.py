"""Tiny vision towers with random weights, models with one, pictures of all kinds as files, and transformers' processor."""

import base64
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import tiny
import torch
import transformers_reference
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from redraft import checkpoint
from redraft.checkpoint.names import VISION, VISION_PARENT
from redraft.checkpoint.published_vision import parse_vision_config
from redraft.config import ModelConfig
from redraft.config.vision import ImageConfig
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.vision import Vision
from redraft.tokenizer.chat_tokens import IMAGE, IMAGE_END, IMAGE_START
from redraft.tokenizer.images import Picture, Source, read_picture
from redraft.tokenizer.tokenizer import Tokenizer

RAW = tiny.VISION
RELEASED = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "head_dim": 72,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "standardize": True,
}
RAWS = {
    "as released": RAW,
    "not standardized": RAW | {"standardize": False},
    "grouped heads": RAW | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
    "squares of three": RAW | {"pooling_kernel_size": 3, "position_embedding_size": 250},
    "clipped": RAW | {"use_clipped_linears": True},
    "other frequencies": RAW | {"rope_parameters": {"rope_type": "axial", "rope_theta": 30.0}},
}
IMAGE_IDS = (tiny.VOCAB - 256, tiny.VOCAB - 255, tiny.VOCAB - 254)  # behind the other special tokens
IMAGES = ImageConfig(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)


def text_config(raw: dict = RAW, **changes: object) -> ModelConfig:
    """A text model whose vocabulary has the three special tokens of images, as its tokenizer."""
    sizes = {"vocab_size": tiny.VOCAB + 3, "max_position_embeddings": 4096}
    return replace(tiny.BASE, vision=raw, image_token_ids=IMAGE_IDS, **sizes, **changes)


def build(raw: dict = RAW, text_size: int = tiny.BASE.hidden_size, seed: int = 0) -> Vision:
    """A vision tower in which every weight affects the output."""
    vision = Vision(parse_vision_config(raw), text_size)
    generator = torch.Generator().manual_seed(seed + 50)
    with torch.no_grad():
        for name, tensor in vision.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith(("_min", "_max")):
                tensor.copy_((1.2 + 0.3 * noise.abs()) * (-1 if name.endswith("_min") else 1))
            else:
                scale = 0.1 if tensor.dim() == 1 else 1.5 * tensor.shape[-1] ** -0.5
                tensor.copy_(noise * scale + (tensor.dim() == 1))
    return vision.eval().requires_grad_(False)


def reference(text: DiffusionGemma, vision: Vision) -> DiffusionGemmaForBlockDiffusion:
    """transformers' model with the weights of both."""
    model = transformers_reference.same_weights(text)
    tensors = {f"model.encoder.{name}": tensor for name, tensor in vision.state_dict().items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert not [name for name in missing if "vision" in name]
    return model


def published(folder: Path, seed: int = 0, raw: dict = RAW) -> Path:
    """A checkpoint folder with a vision tower, in the published layout, with a tokenizer and a processor.

    transformers' save_pretrained does not write it: other tests have it register other names of experts.
    """
    sizes = {"moe_intermediate_size": 32, "intermediate_size": 64}  # whole groups of every packed format
    text = tiny.decided(text_config(raw, **sizes), seed)
    tiny.remove_manifest(checkpoint.save(text, folder, tokenizer=byte_tokenizer()))
    stored = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if not name.startswith(VISION)}
    tensors |= {VISION_PARENT + name: tensor for name, tensor in build(raw, seed=seed).state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vision_config": raw}))
    settings = json.loads(processor().to_json_string())
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings, "image_seq_length": 70}))
    return folder


def byte_tokenizer() -> Tokenizer:
    """The tiny tokenizer with the special tokens of images."""
    return Tokenizer.byte_level([*tiny.SPECIAL_TOKENS, IMAGE_START, IMAGE, IMAGE_END])


def processor(config: ImageConfig = IMAGES) -> Gemma4ImageProcessorPil:
    """transformers' image processor."""
    return Gemma4ImageProcessorPil(
        patch_size=config.patch_size,
        pooling_kernel_size=config.pooling_kernel_size,
        max_soft_tokens=config.max_soft_tokens,
    )


def read(source: Source, name: str = "the image") -> Picture:
    """Reads a picture for the tiny towers."""
    return read_picture(source, IMAGES, name=name)


def random_pixels(height: int, width: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    """Noise over a gradient, so that resizing has something to keep."""
    generator = np.random.default_rng(seed)
    gradient = np.linspace(0, 150, width)[None, :, None] + np.linspace(0, 50, height)[:, None, None]
    noise = generator.integers(0, 56, (height, width, channels))
    return (gradient + noise).astype(np.uint8)


def save(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The bytes of a picture's file."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """A file as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _rotated(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x112] = orientation
    return save(Image.fromarray(random_pixels(30, 50)), "JPEG", exif=exif)


def _frames(kind: str) -> bytes:
    first, second = (Image.fromarray(random_pixels(20, 30, seed)) for seed in (1, 2))
    return save(first, kind, save_all=True, append_images=[second], duration=50)


def _picture(height: int, width: int, channels: int = 3) -> Image.Image:
    pixels = random_pixels(height, width, channels=channels)
    return Image.fromarray(pixels if channels > 1 else pixels[..., 0])


# The bytes of a file of each kind.
FILES: dict[str, Callable[[], bytes]] = {
    "landscape": lambda: save(_picture(40, 90)),
    "portrait": lambda: save(_picture(120, 50)),
    "square": lambda: save(_picture(64, 64)),
    "the size it gets": lambda: save(_picture(64, 64).resize((64, 64))),
    "one pixel": lambda: save(_picture(1, 1)),
    "three pixels": lambda: save(_picture(3, 1)),
    "very wide": lambda: save(_picture(2, 1500)),
    "very high": lambda: save(_picture(1500, 2)),
    "large": lambda: save(_picture(700, 900), "JPEG"),
    "grey": lambda: save(_picture(30, 40, 1)),
    "black and white": lambda: save(_picture(30, 40, 1).convert("1")),
    "palette": lambda: save(_picture(30, 40).quantize(16)),
    "palette with a transparent color": lambda: save(_picture(30, 40).quantize(16), transparency=3),
    "alpha": lambda: save(_picture(30, 40, 4)),
    "grey with alpha": lambda: save(_picture(30, 40, 4).convert("LA")),
    "16-bit": lambda: save(Image.fromarray(random_pixels(30, 40)[..., 0].astype(np.uint16) * 257)),
    "CMYK": lambda: save(_picture(30, 40).convert("CMYK"), "JPEG"),
    **{f"EXIF {orientation}": lambda orientation=orientation: _rotated(orientation) for orientation in range(1, 9)},
    "WebP": lambda: save(_picture(30, 40, 4), "WEBP"),
    "BMP": lambda: save(_picture(30, 40), "BMP"),
    "GIF": lambda: save(_picture(30, 40).quantize(16), "GIF"),
    **{f"animated {kind}": lambda kind=kind: _frames(kind) for kind in ("GIF", "PNG", "WEBP", "MPO")},
}
