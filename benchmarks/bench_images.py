"""Images at the released 26B-A4B shape with random weights: milliseconds of one image, memory, and what others wait for it.

    python benchmarks/bench_images.py [--shape released|small] [--quant none|fp8] [--rounds 10]

A Writer answers conversations with pictures of several sizes: `read` is the helper process that decodes and resizes, `tower`
the vision tower and the projection alone, `encode` all of it through `Writer.encode` in the turns that the engine grants,
and `again` the same picture a second time. Memory is that of the tower's weights and the peak of activations beside them.
`gaps` are the times between two drafts of a text request in a background engine, without and with pictures that come
meanwhile. Every picture differs from all others. The last line is JSON.
"""

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench_engine import SHAPES
from PIL import Image
from random_weights import fill_randomly, random_model
from rehearse import SMALL_VISION, VISION, publish
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

import redraft
from redraft.checkpoint.names import VISION_PARENT
from redraft.checkpoint.published_vision import parse_vision_config
from redraft.config import SamplerConfig
from redraft.model.quant import quantize_fp8
from redraft.model.vision import Vision
from redraft.tasks.generation import GenerationOptions
from redraft.tasks.text_events import TextDraft
from redraft.tokenizer.images import read_picture
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.writer import Writer

SPECIAL = ("<pad>", "<eos>", "<bos>", "<|image>", "<|image|>", "<image|>", "<|turn>", "<turn|>")
IMAGE_IDS = (3, 4, 5)
SIZES = {"photo 4000x3000": (4000, 3000), "screen 1920x1080": (1920, 1080), "icon 64x64": (64, 64)}
TEXT = "Once upon a time there was a model that looked at pictures while it wrote. " * 8


def make_writer(shape: str, quant: str, device: torch.device, folder: Path) -> Writer:
    """A Writer whose text model is in memory, and whose vision tower lies in `folder`."""
    raw = VISION if shape == "released" else SMALL_VISION
    config = replace(SHAPES[shape], image_token_ids=IMAGE_IDS, vision=raw)
    model = random_model(config, device)
    if quant == "fp8":
        quantize_fp8(model)
    vision = Vision(parse_vision_config(raw), config.hidden_size).to("meta").to(model.dtype)
    fill_randomly(vision, torch.Generator().manual_seed(1))
    tensors = {VISION_PARENT + name: tensor.contiguous() for name, tensor in vision.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(publish(config, raw)), encoding="utf-8")
    sampler = SamplerConfig(canvas_length=config.canvas_length, eos_token_ids=(1,), max_steps=16)
    writer = Writer(model, Tokenizer.byte_level(SPECIAL), sampler)
    writer.images.path_or_id = folder
    return writer


def make_picture(size: tuple[int, int]) -> bytes:
    """A JPEG file that no other call makes: coarse noise, as large as a photo."""
    width, height = size
    coarse = Image.frombytes("RGB", (width // 8, height // 8), os.urandom(3 * (width // 8) * (height // 8)))
    file = io.BytesIO()
    coarse.resize(size, Image.Resampling.BILINEAR).save(file, "JPEG", quality=90)
    return file.getvalue()


def conversation(*pictures: bytes) -> list[dict[str, Any]]:
    """A question about these pictures."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def median_ms(run: Callable[[], object], rounds: int) -> float:
    """The median of several runs. The GPU has finished before the clock is read."""
    times = []
    for _ in range(rounds):
        synchronize()
        began = time.perf_counter()
        run()
        synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def synchronize() -> None:
    """Waits until the GPU has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def used_bytes() -> int:
    """Bytes of all tensors on the GPU; 0 without one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def measure_memory(writer: Writer) -> dict[str, float]:
    """Seconds to load the vision tower with the first image, and its memory."""
    before = used_bytes()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    writer.encode(conversation(make_picture(SIZES["icon 64x64"])), GenerationOptions())
    seconds = time.perf_counter() - began
    weights = used_bytes() - before
    writer.encode(conversation(make_picture(SIZES["photo 4000x3000"])), GenerationOptions())
    peak = torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else 0
    return {"first image seconds": seconds, "tower GiB": weights / 2**30, "tower and activations GiB": peak / 2**30}


def measure_sizes(writer: Writer, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds for pictures of each size."""
    parts = writer.images.load_vision(writer.engine)
    found = {}
    for name, size in SIZES.items():
        pictures = iter([make_picture(size) for _ in range(rounds + 2)])
        first = next(pictures)
        picture = read_picture(first, parts.images)

        def run_tower(picture: Any = picture) -> None:
            parts.vision.encode_image(picture.patches_NP, picture.positions_N2)

        def encode(pictures: Any = pictures) -> None:
            writer.encode(conversation(next(pictures)), GenerationOptions())

        run_tower()
        encode()
        found[name] = {
            "file KiB": len(first) / 1024,
            "tokens": picture.token_count,
            "read ms": median_ms(lambda first=first: read_picture(first, parts.images), rounds),  # type: ignore[misc]
            "tower ms": median_ms(run_tower, rounds),
            "encode ms": median_ms(encode, rounds),
        }
        writer.encode(conversation(first), GenerationOptions())
        again = median_ms(lambda first=first: writer.encode(conversation(first), GenerationOptions()), rounds)  # type: ignore[misc]
        found[name]["again ms"] = again
    return found


def measure_gaps(writer: Writer, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds between two drafts of a text request, without and with pictures that come meanwhile."""
    pictures = [make_picture(SIZES["photo 4000x3000"]) for _ in range(rounds)]
    found = {}
    with writer.engine.run_in_background(), ThreadPoolExecutor(1) as reader:
        drafts = list(writer.stream(TEXT, max_tokens=256, seed=0))  # warms up
        for name, sent in (("alone", []), ("beside images", pictures)):

            def read_all(sent: list[bytes] = sent) -> None:
                for picture in sent:
                    writer.encode(conversation(picture), GenerationOptions())

            reading = reader.submit(read_all)
            gaps: list[float] = []
            while not gaps or not reading.done():
                last = None
                for event in writer.stream(TEXT, max_tokens=256, seed=len(gaps)):
                    now = time.perf_counter()
                    if isinstance(event, TextDraft) and last is not None:
                        gaps.append(1000 * (now - last))
                    last = now
            reading.result()  # raises what it raised
            gaps.sort()
            found[name] = {"drafts": len(gaps), "median ms": statistics.median(gaps), "longest ms": gaps[-1]}
    assert drafts
    return found


def main() -> None:
    """Measures everything, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("released", "small"), default="released")
    parser.add_argument("--quant", choices=("none", "fp8"), default="none")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        writer = make_writer(options.shape, options.quant, device, Path(folder))
        memory = measure_memory(writer)
        sizes = measure_sizes(writer, options.rounds)
        gaps = measure_gaps(writer, options.rounds)
    console = Console()
    table = Table(title="one image, medians")
    columns = list(next(iter(sizes.values())))
    for column in ("picture", *columns):
        table.add_column(column, justify="right")
    for name, row in sizes.items():
        table.add_row(name, *(f"{row[column]:,.1f}" for column in columns))
    console.print(table)
    console.print(memory, gaps)
    versions = {"redraft": redraft.__version__, "torch": torch.__version__}
    print(
        json.dumps(
            {
                "bench": "images",
                "shape": options.shape,
                "quant": options.quant,
                "versions": versions,
                "memory": memory,
                "sizes": sizes,
                "gaps": gaps,
            }
        )
    )


if __name__ == "__main__":
    main()
