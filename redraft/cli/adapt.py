"""The command `redraft adapt`: a left-to-right model learns to draft for itself, from answers that it writes itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from redraft.cli.options import Device, LongThreads, name_flags, option, parse_float, parse_int

if TYPE_CHECKING:
    from redraft.train.adapting import AdaptOptions

FLAGS = {"rate": "--lr", "canvas_length": "--canvas", "head_size": "--head-size", "tokens": "--tokens"}
FLAGS |= {name: f"--{name}" for name in ("rank", "batch", "rows", "steps", "minutes", "length", "epochs")}
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
MOST_CPU_TOKENS = 1_000_000
OWN_TEXT = "own"  # the folder of the model's own answers, in the run's folder


def parse_tokens(text: str) -> int:
    """A number of tokens: 500000, 500k, 50M."""
    match = re.fullmatch(r"\s*(\d{1,12})\s*([kmb]?)\s*", text.lower())
    if match is None or not int(match[1]):
        raise ValueError(f"--tokens takes a number such as 500k or 50M, got {text!r}")
    return int(match[1]) * UNITS[match[2]]


def adapt(
    model: Annotated[str, typer.Argument(help="A left-to-right model: folder, GGUF file, pulled model, or hub id.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The drafter's folder; the run keeps its checkpoints there.")],
    tokens: Annotated[str, typer.Option("--tokens", help="Tokens of its own answers to learn from: 500k, 50M.")] = "50M",
    prompts: Annotated[
        str | None, typer.Option("--prompts", "-p", help="File: a prompt a line, or JSON lines. [it writes its own]")
    ] = None,
    rank: Annotated[int, option("--rank", "-r", help="Rank of the pairs.", parser=parse_int)] = 24,
    head_size: Annotated[int, option("--head-size", help="Inner size of the draft head.", parser=parse_int)] = 1024,
    canvas: Annotated[
        int, option("--canvas", help="Positions of a canvas: one more than the longest draft.", parser=parse_int)
    ] = 8,
    minutes: Annotated[
        float | None, option("--minutes", help="Train so long, instead of an epoch.", parser=parse_float)
    ] = None,
    steps: Annotated[int | None, option("--steps", help="Train so many steps.", parser=parse_int)] = None,
    epochs: Annotated[float, option("--epochs", help="Passes over the answers.", parser=parse_float)] = 1.0,
    rate: Annotated[float, option("--lr", help="Learning rate.", parser=parse_float)] = 1e-3,
    batch: Annotated[int, option("--batch", "-b", help="Rows of a step.", parser=parse_int)] = 64,
    rows: Annotated[
        int | None, option("--rows", help="Rows of a forward; fewer need less memory. [as --batch]", parser=parse_int)
    ] = None,
    length: Annotated[int, option("--length", help="Tokens of a row.", parser=parse_int)] = 1024,
    sample_rows: Annotated[
        int | None, option("--sample-rows", help="Answers sampled at once. [by memory]", parser=parse_int)
    ] = None,
    seed: Annotated[int, option("--seed", help="Own answers, order, first weights.", parser=parse_int)] = 0,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the layers: minutes at first, then faster.")] = False,
    device: Device = None,
    threads: LongThreads = None,
) -> None:
    """Teach a left-to-right model to draft for itself: the same text, in fewer forwards. The same command resumes."""
    from redraft.model.drafter import DrafterConfig
    from redraft.train.adapting import AdaptOptions
    from redraft.train.own_answers import OwnAnswerConfig

    with name_flags(FLAGS):
        count = parse_tokens(tokens)
        options = AdaptOptions(
            drafter=DrafterConfig(rank=rank, alpha=2.0 * rank, head_size=head_size, canvas_length=canvas),
            own=OwnAnswerConfig(tokens=count, part_tokens=min(count, 10**6), seed=seed),
            length=length,
            batch=batch,
            rows=batch if rows is None else rows,
            epochs=epochs,
            steps=steps,
            minutes=minutes,
            rate=rate,
            seed=seed,
            compile=compiled,
        )
        for name, number in (("--steps", steps), ("--sample-rows", sample_rows)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        run_adapting(model, Path(out), prompts, options, sample_rows, device)


def run_adapting(
    base: str, out: Path, prompts: str | None, options: AdaptOptions, sample_rows: int | None, device: str | None
) -> None:
    """Samples the model's own answers, trains the drafter, measures it, and writes its scores."""
    import torch

    from redraft import checkpoint
    from redraft.cli.train import run_trainer, write_config
    from redraft.kernels.backend import select_device
    from redraft.train.adapting import adapting_config, measure_drafts, name_base, read_held_out_prompts
    from redraft.train.loop import Trainer
    from redraft.train.own_answers import read_prompts, write_own_answers
    from redraft.train.records import DataConfig

    if prompts is not None and not Path(prompts).is_file():
        raise ValueError(f"--prompts: there is no file {prompts}")
    local_device = select_device(device)
    console = Console(stderr=True, highlight=False)
    model, tokenizer, sampler = checkpoint.load_checkpoint(base, device=local_device, drafter=False)
    require_adaptable(model, base)
    config_of = partial(adapting_config, name_base(base))  # now: `out` may have the name of the base
    own = options.own.within(model.config.max_position_embeddings)
    own = replace(own, rows=sample_rows or choose_rows(model, own.length))
    given = read_prompts(Path(prompts), tokenizer, own.length // 2) if prompts is not None else None
    if model.device.type == "cpu" and own.tokens > MOST_CPU_TOKENS:
        console.print(f"{own.tokens:,} tokens take days on a CPU; --tokens 200k is a start there, a GPU takes minutes")
    progress = write_own_answers(model, tokenizer, out / OWN_TEXT, own, sampler.eos_token_ids, given)
    show_sampling(console, progress, own.tokens)
    del model
    config = config_of(out / OWN_TEXT, options, torch.device(local_device))
    trainer = Trainer(config, out, local_device)
    write_config(config, out)
    run_trainer(trainer, out, is_main=True)
    del trainer
    model, _, _ = checkpoint.load_checkpoint(out, device=local_device)
    assert isinstance(config.data, DataConfig)
    prompts_held_out = read_held_out_prompts(config.data.sources[0])
    scores = measure_drafts(model, prompts_held_out, options.drafter.canvas_length)
    for score in scores:
        console.print(str(score), soft_wrap=True)
    add_scores(out, {f"T={score.temperature:g}": round(score.exact, 3) for score in scores})


def require_adaptable(model: Any, base: str) -> None:
    """Refuses models that draft already, and architectures that no drafter is made for."""
    from redraft import checkpoint
    from redraft.config import LlamaConfig

    if not model.config.is_causal_only:
        raise ValueError(f"{base} is a diffusion model and drafts already: adapt a left-to-right one")
    folder = Path(base).expanduser()
    if checkpoint.is_drafter(folder):
        trained_for = checkpoint.read_drafter_config(folder)[1]["base"]
        raise ValueError(f"{base} is a drafter already: adapt its base, {trained_for}")
    if not isinstance(model.config, LlamaConfig):
        raise ValueError(f"{base} is {model.config.causal_kind}; redraft adapts Llama, SmolLM2, Mistral and Qwen")


def choose_rows(model: Any, length: int) -> int:
    """How many answers are sampled at once: their KV caches take at most a quarter of the free memory."""
    from redraft.engine.memory import free_bytes

    row_bytes = length * sum(model.config.kv_bytes_per_token(model.dtype.itemsize))
    most = 1024 if model.device.type == "cuda" else 32
    return max(1, min(most, free_bytes(model.device) // 4 // row_bytes))


def show_sampling(console: Console, progress: Any, total: int) -> None:
    """Samples to the end, with a progress bar on a terminal."""
    columns = (TextColumn("the model writes its own answers"), BarColumn(), TextColumn("{task.completed:,} tokens"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("sampling", total=total)
        for tokens in progress:
            bar.update(task, completed=min(tokens, total))
    console.print(f"{total:,} tokens of its own answers")


def add_scores(folder: Path, tokens_per_round: dict[str, float]) -> None:
    """Adds the measured tokens a round to the drafter's file."""
    from redraft.checkpoint.drafter_files import DRAFTER_CONFIG
    from redraft.config import read_json, write_text

    settings = dict(read_json(folder / DRAFTER_CONFIG))
    settings["scores"] = {**settings.get("scores", {}), "tokens_per_round": tokens_per_round}
    write_text(folder / DRAFTER_CONFIG, json.dumps(settings, indent=2) + "\n")
