"""Conversations with images: pictures are read, run through the vision tower, and put into the prompt of a request.

    messages -> ids and files -> [helper processes] -> patches -> [vision tower, between steps] -> features of image tokens

The vision tower is loaded with the first image, or with `load_vision`. It runs a few layers at a time, beside the requests
of the engine. An image that comes again is neither decoded nor encoded again.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from redraft.checkpoint import CheckpointError, find_base
from redraft.config import ModelConfig
from redraft.engine import Engine, RequestError, Stopped
from redraft.model.backbone import Backbone
from redraft.tasks.feature_cache import POLL_SECONDS, EncodedImage, FeatureCache
from redraft.tasks.generation import GenerationOptions, Prompt, is_text_prompt, to_messages
from redraft.tasks.text_events import EncodedPrompt
from redraft.tokenizer.chat_parser import close_channel
from redraft.tokenizer.helper_process import HelperStoppedError
from redraft.tokenizer.messages import Message, check_messages, image_sources
from redraft.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:  # text-only use loads none of it
    from redraft.checkpoint.vision_files import VisionParts
    from redraft.tokenizer.images import Source

LOG = logging.getLogger("redraft")
ADVICE = "load it at the start, with --vision (or vision=True), so that the memory is planned with it"


def has_images(prompt: Prompt) -> bool:
    """Whether a prompt is a conversation with images."""
    return not is_text_prompt(prompt) and bool(image_sources(to_messages(prompt)))


class ImageReader:
    """Reads the images of conversations for one model. `path_or_id` is its checkpoint, which has the vision tower."""

    def __init__(
        self, model: Backbone, tokenizer: Tokenizer, path_or_id: str | Path | None = None, least_cache_bytes: int = 0
    ) -> None:
        """KV caches keep `least_cache_bytes` at least when the vision tower is loaded while the engine runs."""
        self.model = model
        self.tokenizer = tokenizer
        self.path_or_id = path_or_id
        self.least_cache_bytes = least_cache_bytes
        self.features = FeatureCache()
        self._parts: VisionParts | None = None
        self._lock = threading.Lock()  # held while the vision tower is loaded

    @property
    def has_vision(self) -> bool:
        """Whether the vision tower is loaded."""
        return self._parts is not None

    # 1. The vision tower

    def load_vision(self, engine: Engine | None = None, stop: threading.Event | None = None) -> VisionParts:
        """The vision tower and its settings, loaded once.

        Before there is an `engine`, which plans with the memory that is left, it goes to its device at once. Later its
        memory is taken from the KV caches, and it is copied between steps. Raises Stopped once `stop` is set.
        """
        while not self._lock.acquire(timeout=POLL_SECONDS):
            if stop is not None and stop.is_set():
                raise Stopped
        try:
            if self._parts is None:
                self._parts = self._load_to_device() if engine is None else self._load_beside(engine, stop)
            return self._parts
        finally:
            self._lock.release()

    def _read_vision(self) -> VisionParts:
        """The vision tower in host memory."""
        from redraft.checkpoint.vision_files import load_vision

        if self.path_or_id is None:
            raise CheckpointError("this Writer was made without a checkpoint, from which it could load a vision tower")
        path, _ = find_base(self.path_or_id)
        parts = load_vision(path, dtype=self.model.dtype)
        if self.tokenizer.image_ids != parts.token_ids:
            raise CheckpointError(
                f"config.json of {path} has the image tokens {parts.token_ids}, and its tokenizer "
                f"{self.tokenizer.image_ids}: one of them is of another model"
            )
        return parts

    def _load_to_device(self) -> VisionParts:
        parts = self._read_vision()
        parts.vision.to(self.model.device)
        return parts

    def _load_beside(self, engine: Engine, stop: threading.Event | None) -> VisionParts:
        """Loads the tower to the model's device, layer by layer between steps, within the budget of the KV caches."""
        from redraft.engine.vision_memory import plan_vision_bytes

        config = self.model.config
        nbytes = plan_vision_bytes(config, self.model.dtype.itemsize) if isinstance(config, ModelConfig) else 0
        if nbytes:  # before a weight is read
            engine.take_memory(nbytes, "the vision tower", ADVICE, least=self.least_cache_bytes, stop=stop)
        try:
            parts = self._read_vision()
            modules: list[torch.nn.Module] = [*parts.vision.vision_tower.encoder.layers, parts.vision]  # the rest at last
            for module in modules:
                with engine.take_turn(1, stop):
                    try:
                        module.to(self.model.device)
                    except torch.OutOfMemoryError:
                        raise RequestError(f"the vision tower does not fit beside what is in memory: {ADVICE}") from None
        except BaseException:
            engine.return_memory(nbytes)
            raise
        return parts

    # 2. Conversations

    def encode(self, messages: Sequence[Message], options: GenerationOptions, context: int, engine: Engine) -> EncodedPrompt:
        """A prompt with the features of its images. Raises Stopped once `options.stop` is set."""
        from redraft.model.vision import ImageSpan
        from redraft.tokenizer.images import encode_image_chat

        check_messages(messages)
        stop = options.stop
        parts = self.load_vision(engine, stop)

        def read(source: Source, name: str) -> EncodedImage:
            return self._read_image(parts, source, name, engine, stop)

        try:
            prompt = encode_image_chat(
                self.tokenizer, messages, read, tools=options.tools, think=options.think, limit=context, stop=stop
            )
        except HelperStoppedError:
            raise Stopped from None
        pairs = zip(prompt.starts, prompt.images, strict=True)
        spans = tuple(ImageSpan(start, image.features_ME, image.digest) for start, image in pairs)
        notes = tuple(dict.fromkeys(image.note for image in prompt.images if image.note is not None))
        for note in notes:
            LOG.warning("%s", note)
        ids = close_channel(self.tokenizer, prompt.ids) if options.pattern is not None else prompt.ids
        return EncodedPrompt(ids, is_chat=True, images=spans, notes=notes)

    def _read_image(
        self, parts: VisionParts, source: Source, name: str, engine: Engine, stop: threading.Event | None
    ) -> EncodedImage:
        """An image by its file's content: out of the cache, or decoded and encoded."""
        from redraft.tokenizer.images import read_bytes, read_picture

        data = read_bytes(source, name)
        digest = hashlib.sha256(data).digest()

        def encode() -> EncodedImage:
            picture = read_picture(data, parts.images, name=name, stop=stop)
            features_ME = self._run_tower(parts, picture.patches_NP, picture.positions_N2, engine, stop)
            return EncodedImage(features_ME, digest, picture.note)

        return self.features.get(digest, encode, stop)

    def _run_tower(
        self,
        parts: VisionParts,
        patches_NP: torch.Tensor,
        positions_N2: torch.Tensor,
        engine: Engine,
        stop: threading.Event | None,
    ) -> torch.Tensor:
        """The features of a picture, in host memory. Between two turns the engine may make a step."""
        layers, tokens = self.plan_turn(parts, len(patches_NP))
        outputs = parts.vision.encode_in_parts(patches_NP, positions_N2, layers)
        features_ME = None
        while features_ME is None:
            with engine.take_turn(tokens, stop):
                output = next(outputs)
                features_ME = output.cpu() if output is not None else None
        return features_ME

    def plan_turn(self, parts: VisionParts, patches: int) -> tuple[int, int]:
        """How many layers of the tower one turn runs, and as how many tokens of the text model they count.

        A turn multiplies no more than a step of one canvas, unless one layer does.
        """
        per_token = self.model.config.parameter_counts()["active"]
        per_layer = parts.vision.count_layer_products(patches)
        most = parts.vision.config.num_hidden_layers
        layers = min(most, max(1, self.model.config.canvas_length * per_token // per_layer))
        return layers, math.ceil(layers * per_layer / per_token)
