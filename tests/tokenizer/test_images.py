"""Pictures become patches as in transformers, bit for bit; files that are no pictures get one sentence."""

import base64
import importlib.util
import random
import re
import socket
import struct
import threading
import zlib
from pathlib import Path

import pytest
import torch
import vision_models
from PIL import Image
from vision_models import data_url

from redraft.config.vision import SOFT_TOKENS, ImageConfig
from redraft.engine import StopEvent
from redraft.tokenizer import helper_process, images
from redraft.tokenizer.image_decoder import fit_size
from redraft.tokenizer.images import ImageError, decode_base64, expand_images, read_picture


def check_equal(data: bytes, config: ImageConfig) -> None:
    """Compares with transformers' processor, which is given the file as a data URL."""
    processor = vision_models.processor(config)
    expected = processor(processor.fetch_images(data_url(data)), return_tensors="pt")
    picture = read_picture(data, config)
    count = len(picture.patches_NP)
    assert torch.equal(picture.patches_NP, expected["pixel_values"][0, :count])
    assert torch.equal(picture.positions_N2, expected["image_position_ids"][0, :count])
    assert (expected["image_position_ids"][0, count:] == -1).all()
    assert picture.token_count == int(expected["num_soft_tokens_per_image"][0])


@pytest.mark.parametrize("name", vision_models.FILES)
def test_pixel_values_equal_transformers(name):
    check_equal(vision_models.FILES[name](), vision_models.IMAGES)
    check_equal(vision_models.FILES[name](), ImageConfig(max_soft_tokens=70))


@pytest.mark.parametrize("count", SOFT_TOKENS)
def test_every_token_limit_equals_transformers(count):
    check_equal(vision_models.FILES["large"](), ImageConfig(max_soft_tokens=count))


def test_sources_are_bytes_data_urls_and_paths(tmp_path):
    data = vision_models.FILES["landscape"]()
    (tmp_path / "picture").write_bytes(data)
    pictures = [read_picture(source) for source in (data, bytearray(data), data_url(data), tmp_path / "picture")]
    assert all(torch.equal(picture.patches_NP, pictures[0].patches_NP) for picture in pictures)


def test_sizes_equal_transformers():
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    generator = random.Random(0)
    for _ in range(5000):
        height, width = (int(2 ** generator.uniform(0, 14)) for _ in range(2))
        soft = generator.choice(SOFT_TOKENS)
        kernel, patch = generator.choice([(3, 16), (2, 4), (1, 14)])
        expected = get_aspect_ratio_preserving_size(height, width, patch, soft * kernel**2, kernel)
        assert fit_size(height, width, patch, soft * kernel**2, kernel) == expected, (height, width, soft, kernel, patch)
        assert expected[0] * expected[1] <= soft * (kernel * patch) ** 2


def test_only_pictures_of_several_frames_have_a_note():
    for name, make in vision_models.FILES.items():
        note = read_picture(make(), vision_models.IMAGES).note
        assert note == ("the image has several frames: the first one is used" if name.startswith("animated") else None), name


def test_the_size_is_that_of_the_upright_picture():
    assert read_picture(vision_models.FILES["EXIF 1"]()).size == (50, 30)
    assert read_picture(vision_models.FILES["EXIF 6"]()).size == (30, 50)


# Hostile files


def png(width: int, height: int, rows: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def webp_header(width: int, height: int) -> bytes:
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + canvas + b"ANIM" + struct.pack("<IIH", 6, 0, 0)
    return b"RIFF" + struct.pack("<I", len(body)) + body


JPEG = vision_models.FILES["large"]()
HOSTILE = {
    "empty": (b"", "is empty"),
    "text": (b"hello", r"is no PNG, JPEG, WebP, GIF or BMP file: it begins with b'hello'"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>", "is no PNG, JPEG"),
    "HTML": (b"<!doctype html><img src='http://127.0.0.1/x'>", "is no PNG, JPEG"),
    "PDF": (b"%PDF-1.7\n%", "is no PNG, JPEG"),
    "TIFF": (vision_models.save(Image.new("RGB", (4, 4)), "TIFF"), "is no PNG, JPEG"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is no PNG, JPEG"),
    "a bomb": (png(30_000, 30_000, bytes(30_000 * 3751)), "has 30000 x 30000 pixels, and redraft reads 50,000,000 at most"),
    "a bomb without pixels": (png(2**31 - 1, 2**31 - 1, b""), "pixels, and redraft reads|cannot be read"),
    "a WebP bomb": (webp_header(2**24, 256), "cannot be read|is no PNG|pixels, and redraft reads|memory"),
    "cut JPEG": (JPEG[: len(JPEG) // 2], r"is a JPEG file that is damaged or cut short \(.*\): send it whole"),
    "cut PNG": (vision_models.FILES["landscape"]()[:3000], "is a PNG file that is damaged or cut short"),
    "cut WebP": (vision_models.FILES["WebP"]()[:500], "damaged|cannot be read"),
    "a PNG header alone": (vision_models.FILES["landscape"]()[:40], "damaged|cannot be read|is no PNG"),
    "an address": (
        "https://example.com/cat.png",
        "is the address 'https://example.com/cat.png', and redraft fetches nothing",
    ),
    "a file address": ("file:///etc/passwd", "redraft fetches nothing"),
    "a path as text": ("/etc/passwd", "begins with|is no PNG|not base64"),
    "8 MiB that are no base64": ("%" * (8 << 20), "is not base64: it holds '%'$"),
    "base64 for URLs": (base64.urlsafe_b64encode(bytes([255] * 30)).decode(), "is not base64: it holds '_'$"),
    "base64 that is cut": ("QUJDR=A", "is not base64: it begins with 'QUJDR=A'$"),
    "8 MiB of base64 that is none of a picture": (base64.b64encode(bytes(6 << 20)).decode(), "is no PNG, JPEG"),
    "text of another script": ("é" * 1000, "is not base64"),
    "another kind": (data_url(b"<p>", "text/html"), "says that it is 'text/html'"),
    "mislabelled HTML": (data_url(b"<p>hello", "image/png"), "is no PNG, JPEG"),
    "a data URL without base64": ("data:image/png,abc", "without ';base64,'"),
    "an endless data URL": ("data:" + ";a=b" * 100_000, "without ';base64,'"),
    "too many bytes": (bytes(images.MAX_FILE_BYTES + 1), "has 20,971,521 bytes, and redraft reads 20,971,520 at most"),
    "too much base64": ("A" * (images.MAX_FILE_BYTES * 3 // 2), "characters of base64"),
    "a missing file": (Path("/nonexistent/cat.png"), "cannot be read: No such file"),
    "a device": (Path("/dev/zero"), "/dev/zero"),
    "a folder": (Path("/tmp"), "/tmp"),
    "a number": (5, "must be bytes, a data URL or a pathlib.Path, got int"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_get_one_sentence(name, monkeypatch):
    source, words = HOSTILE[name]
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("something was fetched"))
    with pytest.raises(ValueError, match=words) as raised:
        read_picture(source, name="image 2")
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 700
    assert "image 2" in message or isinstance(source, Path)
    assert read_picture(vision_models.FILES["square"]()).token_count == 256  # the decoder goes on


def test_content_decides_and_not_the_label():
    text = data_url(vision_models.FILES["EXIF 1"](), "image/png")
    assert read_picture(text).format == "JPEG"


def test_base64_may_have_line_breaks_and_no_padding():
    data = vision_models.FILES["square"]()[:100]
    encoded = base64.encodebytes(data).decode()
    assert decode_base64(encoded) == data
    assert decode_base64(encoded.replace("\n", "").rstrip("=")) == data
    assert decode_base64("DATA:image/png;charset=utf-8;BASE64," + encoded) == data


def test_reading_stops_with_its_caller():
    stop = threading.Event()
    stop.set()
    with pytest.raises(helper_process.HelperStoppedError):
        read_picture(vision_models.FILES["square"](), stop=stop)


def test_a_decoder_that_takes_too_long_or_too_much_or_crashes_is_one_sentence(monkeypatch):
    data = vision_models.FILES["square"]()
    for error, words in (
        (helper_process.HelperTimeoutError(""), "takes longer than 20 s to decode"),
        (helper_process.HelperMemoryError(""), "needs more memory to decode than an image may use"),
    ):
        monkeypatch.setattr(helper_process.HelperProcess, "call", lambda *_, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(ImageError, match=words):
            read_picture(data)


def test_a_slow_picture_does_not_hold_the_others(monkeypatch):
    """While a client's picture is decoded for ever, its next one and those of others are read."""
    data = vision_models.FILES["square"]()
    slow = vision_models.FILES["portrait"]()
    is_in_work = threading.Semaphore(0)
    call = helper_process.HelperProcess.call

    def wait_if_slow(self, message, stop=None):
        if not message.endswith(slow):
            return call(self, message, stop)
        is_in_work.release()
        assert stop.wait(600)
        raise helper_process.HelperStoppedError

    monkeypatch.setattr(helper_process.HelperProcess, "call", wait_if_slow)
    stop = StopEvent("hostile")
    outcomes = []

    def read_slowly():
        try:
            read_picture(slow, stop=stop)
        except helper_process.HelperStoppedError:
            outcomes.append("stopped")

    threads = [threading.Thread(target=read_slowly)]
    threads[0].start()
    assert is_in_work.acquire(timeout=600)
    assert read_picture(data, stop=StopEvent("hostile")).format == "PNG"
    threads += [threading.Thread(target=read_slowly) for _ in range(3)]
    for thread in threads[1:]:
        thread.start()
    assert is_in_work.acquire(timeout=600)
    assert read_picture(data, stop=StopEvent("honest")).format == "PNG"
    assert not is_in_work.acquire(blocking=False)  # the others of this client wait
    stop.set()
    for thread in threads:
        thread.join(600)
    assert outcomes == ["stopped"] * 4


def test_without_pillow_there_is_one_sentence(monkeypatch):
    images._decoders.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImageError, match=r"needs Pillow: pip install 'redraft\[vision\]'"):
        read_picture(vision_models.FILES["square"]())


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="reads /proc")
def test_the_memory_of_the_decoder_is_limited():
    read_picture(vision_models.FILES["square"]())
    process = images._decoders()._processes[0]._process
    assert process is not None
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    assert re.search(rf"Max address space +{helper_process.MEMORY_BYTES} ", limits)


def test_image_tokens_are_put_into_a_prompt():
    marks = (91, 92, 93)
    assert expand_images([1, 92, 2, 92, 92], marks, [2, 1, 3]) == (
        [1, 91, 92, 92, 93, 2, 91, 92, 93, 91, 92, 92, 92, 93],
        [2, 7, 10],
    )
    assert expand_images([1, 2], marks, []) == ([1, 2], [])
    with pytest.raises(ImageError, match=r"2 places for images and 1 images: write no <\|image\|> into a text"):
        expand_images([92, 92], marks, [4])
    with pytest.raises(ImageError, match="gives 0 of 1 images a place"):
        expand_images([1], marks, [4])


def damage(data: bytes, generator: random.Random) -> bytes:
    """A file with some bytes changed, removed, repeated or cut off."""
    changed = bytearray(data)
    for _ in range(generator.choice([1, 1, 2, 4, 16])):
        at = generator.randrange(len(changed))
        match generator.randrange(5):
            case 0:
                changed[at] = generator.randrange(256)
            case 1:
                changed[at] ^= 1 << generator.randrange(8)
            case 2:
                del changed[at : at + generator.randrange(1, 30)]
            case 3:
                changed[at:at] = changed[at : at + generator.randrange(1, 30)]
            case 4:
                changed[at : at + 4] = generator.choice([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff"])
        if len(changed) < 30:
            break
    return bytes(changed[: generator.randrange(1, len(changed))] if generator.random() < 0.2 else changed)


def count_starts() -> int:
    """How many processes decoders have started."""
    return sum(process.starts for process in images._decoders()._processes)


def fuzz(first: int, count: int) -> None:
    """Damaged files give a picture or one sentence, and the decoder's process lives on."""
    starts = count_starts()
    files = [make() for name, make in vision_models.FILES.items() if name not in ("large", "very wide", "very high")]
    outcomes = {"picture": 0, "sentence": 0}
    for number in range(first, first + count):
        generator = random.Random(number)
        message = ""
        try:
            picture = read_picture(damage(generator.choice(files), generator), vision_models.IMAGES)
            assert picture.patches_NP.shape == (4 * picture.token_count, 48)
            assert 1 <= picture.token_count <= 70
        except ImageError as error:
            message = str(error)
        assert "\n" not in message
        assert len(message) < 700
        outcomes["sentence" if message else "picture"] += 1
    assert min(outcomes.values()) > count // 20, outcomes
    assert count_starts() <= starts + 1 + count // 1000  # the process is not killed by damaged files


def test_fuzzed_files():
    fuzz(0, 300)


@pytest.mark.soak
def test_ten_thousand_fuzzed_files():
    fuzz(1000, 10_000)
