"""Images of requests: content parts of every wire format become parts of a message, and a model's images are read.

    {"type": "image_url", ...} -> {"type": "image", "image": base64 or RemoteImage} -> ServedImages.encode -> EncodedPrompt

A picture is decoded and encoded by `Writer.encode`. Here are the limits of a server: which models take images, how many a
request may have, from where they are fetched, and who is next.
"""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from redraft.checkpoint import CheckpointError
from redraft.config import ConfigError
from redraft.config.vision import ImageConfig
from redraft.constraints.errors import shorten
from redraft.engine import RequestError, Stopped
from redraft.server.errors import BadRequestError, ModelLoadError
from redraft.server.image_urls import ImageFetcher, RemoteImage, is_url
from redraft.tasks.generation import GenerationOptions, Prompt, is_text_prompt, to_messages
from redraft.tasks.text_events import EncodedPrompt
from redraft.tokenizer.helper_pool import HelperPool
from redraft.tokenizer.helper_process import HelperStoppedError
from redraft.tokenizer.images import encode_image_chat, read_picture
from redraft.tokenizer.messages import Message, check_messages, image_sources, is_image
from redraft.writer import Writer

TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image_url", "input_image", "image")
MAX_IMAGES = 100  # of a request; each is decoded before the prompt is known to fit the context
AT_ONCE = 8  # requests whose images are read at the same time, which bounds the memory that this takes
AT_ONCE_OF_CLIENT = 6
NEEDS_DATA = "needs its file as a data URL, as base64 or as an address"


# 1. Content parts


def text_of_content(content: Any, param: str) -> str:
    """Returns the text of a content that may come in parts. Images and audio are a bad request."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "".join(_text_of_part(part, param, "only text input is supported here") for part in parts)


def parts_of_content(content: Any, param: str) -> str | list[dict[str, Any]]:
    """Returns a message's content as the chat template reads it: a text, or parts of text and images."""
    if isinstance(content, str):
        return content
    content = content if isinstance(content, list) else [content]
    if not any(_is_image_part(part) for part in content):
        return text_of_content(content, param)
    lack = "only text and images are supported"
    return [
        image_part(part, param) if _is_image_part(part) else {"type": "text", "text": _text_of_part(part, param, lack)}
        for part in content
    ]


def image_part(part: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Returns an image as OpenAI's or Anthropic's clients send it, as `Writer.encode` takes it."""
    match part:
        case {"type": "image_url" | "input_image", "image_url": str(url) | {"url": str(url)}}:
            return {"type": "image", "image": RemoteImage(url) if is_url(url) else url}
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return {"type": "image", "image": RemoteImage(url) if is_url(url) else url}
        case {"type": "image", "source": {"type": "base64", "data": str(data)}}:
            return image_from_base64(data, param)
        case {"file_id": str()} | {"source": {"type": "file"}}:
            raise BadRequestError("an image names a file that was uploaded, and the server keeps none: send its data", param)
    raise BadRequestError(f"an image of type {shorten(part.get('type'))} {NEEDS_DATA}", param)


def image_from_base64(data: str, param: str) -> dict[str, Any]:
    """Returns an image from base64, where no address is meant: none is fetched."""
    if is_url(data):
        raise BadRequestError(f"an image is not base64: it begins with {data[:40]!r}", param)
    return {"type": "image", "image": data}


def ignored_image_fields(messages: Sequence[Any]) -> list[str]:
    """The names of fields of image parts that were not applied: a picture always has as many tokens as the model allows."""
    contents = (message.get("content") if isinstance(message, dict) else message.content for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content if _is_image_part(part))
    for part in parts:
        image = part.get("image_url")
        if (image if isinstance(image, dict) else part).get("detail", "auto") != "auto":
            return ["image_url.detail"]
    return []


def _is_image_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def _text_of_part(part: Any, param: str, lack: str) -> str:
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise BadRequestError(f"{lack}, got a part of type {shorten(kind)}", param)
    return str(part["text"])


# 2. Reading them


class ReadPermit:
    """The permission to read the images of a request: lent to clients by the rule of helper processes."""

    def close(self) -> None:
        """Nothing runs that would have to end."""


def new_permits() -> HelperPool[ReadPermit]:
    """The permits of a server."""
    return HelperPool(ReadPermit, AT_ONCE, AT_ONCE_OF_CLIENT)


@dataclass(frozen=True)
class ServedImages:
    """How a server takes images for one model. Models share the permits: they share the memory."""

    config: ImageConfig | str  # of the model's card
    hosts: tuple[str, ...] = ()  # from which images are fetched
    permits: HelperPool[ReadPermit] = field(default_factory=new_permits)

    def encode(self, writer: Writer, prompt: Prompt, options: GenerationOptions) -> EncodedPrompt:
        """`Writer.encode` of a prompt that may have images."""
        if not image_count(prompt):
            return writer.encode(prompt, options)
        with self._permit(prompt, options):
            messages = self._fetch(prompt, options)
            load_vision(writer, options.stop)
            return writer.encode(messages, options)

    def count_tokens(self, writer: Writer, prompt: Prompt, options: GenerationOptions) -> int:
        """The tokens of a prompt that may have images. The vision tower is not needed, and not loaded."""
        if not image_count(prompt):
            return len(writer.encode_prompt(prompt, options.tools, options.think, options.stop))
        with self._permit(prompt, options):
            assert isinstance(self.config, ImageConfig)
            config = self.config
            messages = self._fetch(prompt, options)
            chat: dict[str, Any] = {"tools": options.tools, "think": options.think, "stop": options.stop}
            encoded = encode_image_chat(
                writer.tokenizer,
                messages,
                lambda source, name: read_picture(source, config, name=name, stop=options.stop),
                limit=writer.model.config.max_position_embeddings,
                **chat,
            )
            return len(encoded.ids)

    def check(self, prompt: Prompt) -> None:
        """Refuses images that this model does not take, before any is looked at."""
        count = image_count(prompt)
        if not count:
            return
        if isinstance(self.config, str):
            raise BadRequestError(f"this model is {self.config}, so it takes no images: send text only")
        if count > MAX_IMAGES:
            raise BadRequestError(f"the request has {count:,} images, at most {MAX_IMAGES} are accepted: send fewer at once")
        check_messages(to_messages(prompt))

    @contextmanager
    def _permit(self, prompt: Prompt, options: GenerationOptions) -> Iterator[None]:
        self.check(prompt)
        try:
            with self.permits.lend(options.stop):
                yield
        except HelperStoppedError:
            raise Stopped from None

    def _fetch(self, prompt: Prompt, options: GenerationOptions) -> list[Message]:
        """The conversation with the bytes of images that clients have named by their addresses."""
        fetcher = ImageFetcher(self.hosts, options.stop)
        numbers = itertools.count(1)
        has_one = image_count(prompt) == 1

        def fetch(part: Any) -> Any:
            if not is_image(part):
                return part
            name = "the image" if has_one else f"image {next(numbers)}"
            image = part["image"]
            return {**part, "image": image.fetch(fetcher, name)} if isinstance(image, RemoteImage) else part

        fetched: list[Message] = []
        for message in to_messages(prompt):
            content = message.get("content")
            if isinstance(content, list):
                message = {**message, "content": [fetch(part) for part in content]}
            fetched.append(message)
        return fetched


def load_vision(writer: Writer, stop: threading.Event | None) -> None:
    """Loads the vision tower if it is not there yet. That it cannot be loaded is no mistake of the client."""
    try:
        writer.images.load_vision(writer.engine, stop)
    except RequestError as error:  # no memory for it
        raise ModelLoadError(f"the server takes no image now: {error}") from error
    except (CheckpointError, ConfigError, OSError) as error:  # which name files of the server
        raise ModelLoadError("the vision tower of this model cannot be loaded; the server's log says why") from error


NO_IMAGES = ServedImages("used without a server")


def image_count(prompt: Prompt) -> int:
    """The number of images of a prompt."""
    return 0 if is_text_prompt(prompt) else len(image_sources(to_messages(prompt)))
