"""FeatureCache: the features of the images that were used last, by content. An image that comes again is not encoded again.

Features are in host memory: they are small (1.5 MiB for an image of the released model), and a GPU's memory is planned
without them.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from redraft.engine import Stopped

MAX_IMAGES = 64
MAX_BYTES = 64 * 2**20
POLL_SECONDS = 0.05  # how often a waiting thread checks its stop event


@dataclass(frozen=True)
class EncodedImage:
    """An image as it stands in a prompt."""

    features_ME: Tensor
    digest: bytes  # of the file
    note: str | None = None  # a sentence for the user about what was left out

    @property
    def token_count(self) -> int:
        """How many tokens it has in a prompt."""
        return len(self.features_ME)


class FeatureCache:
    """Keeps images by their digest, and forgets the least recently used ones."""

    def __init__(self, max_images: int = MAX_IMAGES, max_bytes: int = MAX_BYTES) -> None:
        self.max_images = max_images
        self.max_bytes = max_bytes
        self._images: OrderedDict[bytes, EncodedImage] = OrderedDict()
        self._in_work: set[bytes] = set()  # digests of images that a thread encodes now
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._images)

    @property
    def nbytes(self) -> int:
        """Bytes of all features."""
        return sum(image.features_ME.nbytes for image in self._images.values())

    def get(self, digest: bytes, encode: Callable[[], EncodedImage], stop: threading.Event | None = None) -> EncodedImage:
        """The image with this digest; `encode` makes it. If another thread does that already, waits for its result.

        Raises Stopped once `stop` is set while it waits.
        """
        with self._changed:
            while True:
                if digest in self._images:
                    self._images.move_to_end(digest)
                    return self._images[digest]
                if digest not in self._in_work:
                    break
                if stop is not None and stop.is_set():
                    raise Stopped
                self._changed.wait(timeout=POLL_SECONDS)
            self._in_work.add(digest)
        try:
            image = encode()
            self._put(image)
            return image
        finally:
            with self._changed:
                self._in_work.remove(digest)
                self._changed.notify_all()

    def _put(self, image: EncodedImage) -> None:
        with self._changed:
            self._images[image.digest] = image
            while self._images and (len(self._images) > self.max_images or self.nbytes > self.max_bytes):
                self._images.popitem(last=False)
