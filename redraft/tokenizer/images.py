"""Images: the file of a picture -> patches for the vision tower, and the number of its tokens in a prompt.

    bytes, a data URL or a path -> [helper process: image_decoder.py] -> RGB pixels -> patches_NP, positions_N2

The numbers equal those of transformers 5.22.2 given the file's path, with its Pillow backend, bit for bit: bicubic resizing
of 8-bit values, then a factor of 1/255. Its torchvision backend resizes with other rounding, which may differ by 1/255.
Nothing is ever fetched from a network, and a string is never taken for a path. Shapes: N patches, P numbers of a patch.
"""

import binascii
import importlib.util
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from redraft.config import read_file
from redraft.config.vision import ImageConfig
from redraft.tokenizer.helper_pool import HelperPool
from redraft.tokenizer.helper_process import (
    HelperError,
    HelperMemoryError,
    HelperProcess,
    HelperStoppedError,
    HelperTimeoutError,
)
from redraft.tokenizer.image_decoder import FORMAT_WORDS
from redraft.tokenizer.messages import Message, image_sources
from redraft.tokenizer.tokenizer import Tokenizer

MODULE = "redraft.tokenizer.image_decoder"  # what the helper process runs
DECODE_SECONDS = 20.0
DECODERS = 3  # helper processes; a client has two of them at most, so that its slow pictures leave one to others
MAX_FILE_BYTES = 20 * 2**20
DATA_URL = re.compile(r"data:([\w.+/-]*)((?:;[\w.+-]+=[\w.+-]*)*)(;base64)?,", re.IGNORECASE)
NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/=]")

Source = bytes | str | Path  # a file's bytes; a data URL or base64; a path


class ImageError(ValueError):
    """A picture that cannot be used; the message says why."""


@dataclass(frozen=True)
class Picture:
    """A picture as the vision tower takes it."""

    patches_NP: Tensor  # float32 from 0 to 1, row by row of the picture
    positions_N2: Tensor  # x and y of each patch, counted in patches
    token_count: int  # of its tokens in a prompt
    format: str
    size: tuple[int, int]  # width and height of the file's picture, upright
    has_frames: bool = False

    @property
    def note(self) -> str | None:
        """A sentence for the user about what was left out."""
        return "the image has several frames: the first one is used" if self.has_frames else None


def read_picture(
    source: Source, config: ImageConfig | None = None, *, name: str = "the image", stop: threading.Event | None = None
) -> Picture:
    """Reads a picture: bytes of a file, a data URL or base64 (str), or a path (Path). Messages of errors begin with `name`.

    Setting `stop` ends it early, with HelperStoppedError.
    """
    config = config or ImageConfig()
    data = read_bytes(source, name)
    kernel = config.pooling_kernel_size
    sizes = {"patch_size": config.patch_size, "max_patches": config.max_patches, "kernel": kernel}
    described, pixels = _call_decoder(json.dumps(sizes).encode() + b"\n" + data, name, stop)
    shape = (described["new_height"], described["new_width"], 3)
    pixels_HWC = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(shape)
    patches_NP, positions_N2 = to_patches(pixels_HWC, config.patch_size)
    return Picture(
        patches_NP,
        positions_N2,
        len(patches_NP) // kernel**2,
        described["format"],
        (described["width"], described["height"]),
        described["has_frames"],
    )


def to_patches(pixels_HWC: Tensor, patch_size: int) -> tuple[Tensor, Tensor]:
    """Patches float32 [N, patch_size * patch_size * 3], from 0 to 1, and their positions (x, y) [N, 2]."""
    height, width, channels = pixels_HWC.shape
    rows = height // patch_size
    columns = width // patch_size
    values = (pixels_HWC.double() * (1 / 255)).float()  # in float64 first, as transformers
    grid = values.view(rows, patch_size, columns, patch_size, channels).transpose(1, 2)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return grid.reshape(rows * columns, -1), torch.stack([x.flatten(), y.flatten()], dim=1)


def read_bytes(source: Source, name: str = "the image") -> bytes:
    """The bytes of a picture's file, of limited size."""
    if isinstance(source, str):
        return decode_base64(source, name)
    if isinstance(source, Path):
        try:
            if (size := source.stat().st_size) > MAX_FILE_BYTES:
                raise _too_large(size, name)
            data = read_file(source)
        except OSError as error:
            if re.match(r"https?:/", str(source), re.IGNORECASE):  # a Path has one of its slashes only
                raise ImageError(
                    f"{name} is the address {str(source)[:100]!r}: save the picture, and give its file"
                ) from None
            raise ImageError(f"{name} cannot be read: {error.strerror or error}: {source}") from None
    elif isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    else:
        kind = type(source).__name__
        raise ImageError(f"{name} must be bytes, a data URL or a pathlib.Path, got {kind}")
    if not data:
        raise ImageError(f"{name} is empty: send a {FORMAT_WORDS} file")
    if len(data) > MAX_FILE_BYTES:
        raise _too_large(len(data), name)
    return data


def _too_large(size: int, name: str) -> ImageError:
    return ImageError(f"{name} has {size:,} bytes, and redraft reads {MAX_FILE_BYTES:,} at most: make it smaller")


def decode_base64(text: str, name: str = "the image") -> bytes:
    """The bytes of a data URL, or of plain base64."""
    text = text.lstrip() if text[:1].isspace() else text
    if re.match(r"(?:https?|ftp|file):", text, re.IGNORECASE):
        raise ImageError(f"{name} is the address {text[:100]!r}, and redraft fetches nothing: send the file as a data URL")
    if len(text) > MAX_FILE_BYTES * 4 // 3 + 4096:
        raise ImageError(
            f"{name} has {len(text):,} characters of base64, and redraft reads files of {MAX_FILE_BYTES:,} bytes at most: "
            "make it smaller"
        )
    begin = 0
    if text[:5].lower() == "data:":
        match = DATA_URL.match(text[:4096])
        if match is None or not match[3]:
            raise ImageError(f"{name} is a data URL without ';base64,': {text[:60]!r}")
        if match[1] and not match[1].lower().startswith(("image/", "application/octet-stream")):
            raise ImageError(f"{name} says that it is {match[1][:60]!r}: send a {FORMAT_WORDS} file")
        begin = match.end()
    encoded = "".join(text[begin:].split())
    try:
        # Not base64.b64decode, which copies a string first.
        data = binascii.a2b_base64(encoded + "=" * (-len(encoded) % 4), strict_mode=True)
    except (binascii.Error, ValueError):
        wrong = NOT_BASE64.search(encoded)
        reason = f"it begins with {encoded[:40]!r}" if wrong is None else f"it holds {wrong[0]!r}"
        raise ImageError(f"{name} is not base64: {reason}") from None
    return read_bytes(data, name)


def expand_images(ids: Sequence[int], marks: tuple[int, int, int], counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Puts the tokens of images into a prompt in which one image token stands for each image.

    `marks` are the ids of begin, image and end; `counts` the tokens of each image. An image becomes begin, its tokens, end.
    Returns the ids, and the index of the first token of each image.
    """
    begin, image, end = marks
    places = sum(token == image for token in ids)
    if places != len(counts):
        raise ImageError(
            f"the prompt has {places} places for images and {len(counts)} images: write no <|image|> into a text"
            if places > len(counts)
            else f"the chat template gives {places} of {len(counts)} images a place: this model's template takes no images"
        )
    waiting = iter(counts)
    expanded: list[int] = []
    starts = []
    for token in ids:
        if token != image:
            expanded.append(token)
            continue
        starts.append(len(expanded) + 1)
        expanded += [begin, *[image] * next(waiting), end]
    return expanded, starts


class Readable(Protocol):
    """What `encode_image_chat` must know of an image that was read."""

    @property
    def token_count(self) -> int:
        """How many tokens it has in a prompt."""


Read = TypeVar("Read", bound=Readable)


@dataclass(frozen=True)
class ImagePrompt(Generic[Read]):
    """A conversation with images: its ids, the images in order, and the index of the first token of each."""

    ids: list[int]
    images: list[Read]
    starts: list[int]


def encode_image_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    read: Callable[[Source, str], Read],
    *,
    limit: int | None = None,
    **options: Any,
) -> ImagePrompt[Read]:
    """Ids and images of a conversation. `read` gets each image and its name for messages; it decides what an image is.

    `limit` is the model's context: images that exceed it are not read. `options` are those of Tokenizer.encode_chat.
    """
    if tokenizer.image_ids is None:
        raise ImageError("this model's vocabulary has no special tokens of images: it takes text only")
    ids = tokenizer.encode_chat(messages, limit=limit, has_images=True, **options)
    sources = image_sources(messages)
    images: list[Read] = []
    tokens = 0
    for number, source in enumerate(sources, 1):
        images.append(read(source, "the image" if len(sources) == 1 else f"image {number}"))
        tokens += images[-1].token_count
        if limit is not None and len(ids) + tokens > limit:
            counted = f"the first {number} of {len(sources)} images have" if number < len(sources) else "the images have"
            room = f"beside {len(ids):,} of text, and the model's context is {limit:,}"
            raise ImageError(f"{counted} {tokens:,} tokens {room}: send fewer images")
    expanded, starts = expand_images(ids, tokenizer.image_ids, [image.token_count for image in images])
    return ImagePrompt(expanded, images, starts)


@lru_cache(maxsize=1)
def _decoders() -> HelperPool[HelperProcess]:
    if importlib.util.find_spec("PIL") is None:
        raise ImageError("reading images needs Pillow: pip install 'redraft[vision]'")
    return HelperPool(
        lambda: HelperProcess(MODULE, seconds=DECODE_SECONDS),
        DECODERS,
        per_client=DECODERS - 1,
    )


def _call_decoder(message: bytes, name: str, stop: threading.Event | None) -> tuple[dict[str, Any], bytes]:
    try:
        with _decoders().lend(stop) as decoder:
            answer = decoder.call(message, stop)
    except HelperStoppedError:
        raise
    except HelperTimeoutError:
        raise ImageError(f"{name} takes longer than {DECODE_SECONDS:g} s to decode: save it again, smaller") from None
    except HelperMemoryError:
        raise ImageError(f"{name} needs more memory to decode than an image may use: make it smaller") from None
    except HelperError as error:
        raise RuntimeError(f"the image decoder failed: {error}") from None
    header, _, pixels = answer.partition(b"\n")
    described = json.loads(header)
    if "error" in described:
        raise ImageError(f"{name} {' '.join(described['error'].split())}")
    return described, pixels
