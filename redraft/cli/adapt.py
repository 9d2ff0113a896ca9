"""The command `redraft adapt`: a left-to-right model learns to draft for itself, or with --page to fill gaps.

It learns from answers that it writes itself; a page adapter also from texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from redraft.cli.options import Device, LongThreads, name_flags, option, parse_float, parse_int

if TYPE_CHECKING:
    from redraft.model.backbone import Backbone
    from redraft.tokenizer.tokenizer import Tokenizer
    from redraft.train.adapting import AdaptOptions
    from redraft.train.config import TrainConfig
    from redraft.train.evals.acceptance import Acceptance
    from redraft.train.records import DataConfig

FLAGS = {
    "rate": "--lr",
    "canvas_length": "--canvas",
    "canvas_lengths": "--canvas",
    "head_size": "--head-size",
    "tokens": "--tokens",
    "start_adapter": "--from",
}
FLAGS |= {name: f"--{name}" for name in ("rank", "batch", "rows", "steps", "minutes", "length", "epochs")}
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
DEFAULT_RANK = 24
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
    page: Annotated[bool, typer.Option("--page", help="Train a page adapter instead: redraft fill and edit.")] = False,
    tokens: Annotated[str, typer.Option("--tokens", help="Tokens of its own answers to learn from: 500k, 50M.")] = "50M",
    prompts: Annotated[
        str | None, typer.Option("--prompts", "-p", help="File: a prompt a line, or JSON lines. [it writes its own]")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", "-d", help="--page: files of texts, as of redraft tune. [its own answers]")
    ] = None,
    rank: Annotated[int | None, option("--rank", "-r", help="Rank of the pairs. [24]", parser=parse_int)] = None,
    head_size: Annotated[
        int | None, option("--head-size", help="Inner size of the draft head. [1024]", parser=parse_int)
    ] = None,
    canvas: Annotated[
        int | None,
        option(
            "--canvas", help="Positions of a canvas, at most. [8: one more than a draft; 128 for --page]", parser=parse_int
        ),
    ] = None,
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
    start: Annotated[
        str | None, typer.Option("--from", help="Go on from the drafter or page adapter in this folder. [new weights]")
    ] = None,
    seed: Annotated[int, option("--seed", help="Own answers, order, first weights.", parser=parse_int)] = 0,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the layers: minutes at first, then faster.")] = False,
    device: Device = None,
    threads: LongThreads = None,
) -> None:
    """Teach a left-to-right model to draft for itself: the same text, in fewer forwards. The same command resumes.

    With --page it learns to fill gaps and to edit instead.
    """
    from redraft.train.adapting import AdaptOptions
    from redraft.train.own_answers import OwnAnswerConfig

    with name_flags(FLAGS):
        count = parse_tokens(tokens)
        earlier = find_earlier(start) if start is not None else None
        if earlier is not None:
            part = earlier_part(earlier, page, {"--rank": rank, "--canvas": canvas, "--head-size": head_size})
        else:
            part = (page_part if page else drafter_part)(DEFAULT_RANK if rank is None else rank, canvas, head_size)
        options = AdaptOptions(
            **part,
            own=OwnAnswerConfig(tokens=count, part_tokens=min(count, 10**6), seed=seed),
            length=length,
            batch=batch,
            rows=batch if rows is None else rows,
            epochs=epochs,
            steps=steps,
            minutes=minutes,
            rate=rate,
            start_adapter=str(earlier.resolve()) if earlier is not None else "",
            seed=seed,
            compile=compiled,
        )
        for name, number in (("--steps", steps), ("--sample-rows", sample_rows)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if data:
            require_texts(data, page, prompts)
        run_adapting(model, Path(out), prompts, data or [], options, sample_rows, device)


def find_earlier(start: str) -> Path:
    """The folder of --from."""
    from redraft import checkpoint

    folder = Path(start).expanduser()
    if start and not folder.exists():
        raise ValueError(f"--from: there is no folder {folder}")
    if not start or not checkpoint.is_drafter(folder):
        given = folder if start else "an empty name"
        raise ValueError(f"--from: {given} is no drafter or page adapter: give the --out of an earlier redraft adapt")
    return folder


def earlier_part(start: Path, page: bool, sizes: dict[str, int | None]) -> dict[str, Any]:
    """The drafter or page adapter of AdaptOptions, with the sizes of the one in a folder. Other sizes are refused."""
    from redraft import checkpoint
    from redraft.checkpoint.drafter_files import NAMES
    from redraft.model.page import PageConfig

    cfg = checkpoint.read_drafter_config(start)[0]
    if isinstance(cfg, PageConfig) != page:
        way_out = "leave out --page" if page else "add --page"
        raise ValueError(f"--from: {start} is a {NAMES[type(cfg)]}: {way_out}, or give another folder")
    trained = {FLAGS[name]: value for name, value in vars(cfg).items() if name in FLAGS}
    for flag, number in sizes.items():
        value = trained.get(flag)
        if number is not None and number != (max(value) if isinstance(value, tuple) else value):
            raise ValueError(f"--from: {start} has sizes of its own: leave out {flag}")
    return {"page" if page else "drafter": cfg}


def check_start(start: str, out: Path, model: Backbone) -> None:
    """Refuses what the run cannot start with, before the model writes its answers. An empty `start` is new weights."""
    from redraft import checkpoint

    if start and Path(start) == out.resolve():
        raise ValueError(f"--from and --out are both {out}: give --out another folder")
    check_same_start(start, out)
    if start:
        checkpoint.load_drafter(start, model)  # refuses one of another model, and weights that are missing or damaged


def check_same_start(start: str, out: Path) -> None:
    """Refuses to resume a run in `out` with another --from than it began with."""
    from redraft.train import checkpoints

    folder = checkpoints.latest(out)
    began = checkpoints.read_state(folder)["batch"].get("start_adapter", "") if folder is not None else start
    if began != start:
        repeat = f"began with --from {began}: repeat it" if began else "began without --from: leave it out"
        raise ValueError(f"the run in {out} {repeat}, or give another --out")


def drafter_part(rank: int, canvas: int | None, head_size: int | None) -> dict[str, Any]:
    """The drafter of AdaptOptions."""
    from redraft.model.drafter import DrafterConfig

    given = {"canvas_length": canvas, "head_size": head_size}
    sizes = {name: number for name, number in given.items() if number is not None}
    return {"drafter": DrafterConfig(rank=rank, alpha=2.0 * rank, **sizes)}


def page_part(rank: int, canvas: int | None, head_size: int | None) -> dict[str, Any]:
    """The page adapter of AdaptOptions: canvases of the given length, its half and its quarter."""
    from redraft.model.page import PageConfig

    if head_size is not None:
        raise ValueError(f"--head-size {head_size} is the size of a drafter's head: leave it out with --page")
    longest = 128 if canvas is None else canvas
    lengths = (longest, *(part for part in (longest // 2, longest // 4) if part > 1))
    return {"page": PageConfig(rank=rank, alpha=2.0 * rank, canvas_lengths=lengths)}


def require_texts(files: list[str], page: bool, prompts: str | None) -> None:
    """Refuses files of texts that are not there, or where own answers are learned."""
    if not page:
        raise ValueError("--data is for --page: a drafter learns from the model's own answers only")
    if prompts is not None:
        raise ValueError("--data and --prompts are two sources of text: give one of them")
    for file in files:
        if not Path(file).is_file():
            raise ValueError(f"--data: there is no file {file}")


def run_adapting(
    base: str,
    out: Path,
    prompts: str | None,
    files: list[str],
    options: AdaptOptions,
    sample_rows: int | None,
    device: str | None,
) -> None:
    """Samples the model's own answers unless there are texts, trains, measures, and writes the scores."""
    import torch

    from redraft import checkpoint
    from redraft.cli.train import run_trainer, write_config
    from redraft.kernels.backend import select_device
    from redraft.train.adapting import adapting_config, adapting_data, name_base, own_source
    from redraft.train.loop import Trainer
    from redraft.train.own_answers import read_prompts, write_own_answers

    if prompts is not None and not Path(prompts).is_file():
        raise ValueError(f"--prompts: there is no file {prompts}")
    local_device = select_device(device)
    console = Console(stderr=True, highlight=False)
    model, tokenizer, sampler = checkpoint.load_checkpoint(base, device=local_device, drafter=False)
    require_adaptable(model, base)
    check_start(options.start_adapter, out, model)
    config_of = partial(adapting_config, name_base(base))  # now: `out` may have the name of the base
    context = model.config.max_position_embeddings
    if files:
        data, tokens = check_texts(files, context, options, tokenizer, model.config.eos_token_ids[0], console)
    else:
        own = options.own.within(context)
        own = replace(own, rows=sample_rows or choose_rows(model, own.length))
        given = read_prompts(Path(prompts), tokenizer, own.length // 2) if prompts is not None else None
        if model.device.type == "cpu" and own.tokens > MOST_CPU_TOKENS:
            console.print(f"{own.tokens:,} tokens take days on a CPU; --tokens 200k is a start there, a GPU takes minutes")
        progress = write_own_answers(model, tokenizer, out / OWN_TEXT, own, sampler.eos_token_ids, given)
        show_sampling(console, progress, own.tokens)
        data, tokens = adapting_data(own_source(out / OWN_TEXT, options), context, options), own.tokens
    del model
    config = config_of(data, tokens, options, torch.device(local_device))
    trainer = Trainer(config, out, local_device)
    write_config(config, out)
    run_trainer(trainer, out, is_main=True)
    del trainer
    add_scores(out, measure(out, config, local_device, console))


def check_texts(
    files: list[str], context: int, options: AdaptOptions, tokenizer: Tokenizer, stop: int, console: Console
) -> tuple[DataConfig, int]:
    """The texts of files, checked; and how many tokens they have in rows."""
    from redraft.cli.tune import check_data
    from redraft.train.adapting import HELD_OUT_EVERY, adapting_data
    from redraft.train.data_check import estimate_tokens
    from redraft.train.records import Source

    data = adapting_data(Source(files=tuple(files), every=HELD_OUT_EVERY), context, options)
    check = check_data(data, console)
    if not check.held_out:
        raise ValueError(f"--data has {check.records} texts, and every {HELD_OUT_EVERY}th is held out: give more")
    return data, estimate_tokens(check, data, tokenizer, stop).packed


def measure(out: Path, config: TrainConfig, device: Any, console: Console) -> dict[str, Any]:
    """Measures a drafter or a page adapter on held-out texts, and prints what it finds."""
    from dataclasses import asdict

    from redraft import checkpoint
    from redraft.train.adapting import measure_drafts, measure_gaps, read_held_out_prompts
    from redraft.train.records import DataConfig

    assert isinstance(config.data, DataConfig)
    model, tokenizer, sampler = checkpoint.load_checkpoint(out, device=device)
    if config.drafter is not None:
        prompts = read_held_out_prompts(config.data.sources[0])
        scores = measure_drafts(model, prompts, config.drafter.canvas_length)
        for score in scores:
            console.print(str(score), soft_wrap=True)
        return name_scores(scores)
    found = measure_gaps(model, tokenizer, sampler, config.data.sources[0])
    for name, gap_score in found.items():
        console.print(f"gaps, {name.replace('_', ' ')}: {gap_score}", soft_wrap=True)
    return {"gaps": {name: asdict(gap_score) for name, gap_score in found.items()}}


def name_scores(scores: Sequence[Acceptance]) -> dict[str, dict[str, float]]:
    """Tokens a round as the drafter's file has them: in trees only where the engine verifies trees."""
    rows = {f"T={score.temperature:g}": round(score.exact, 3) for score in scores}
    trees = {f"T={score.temperature:g}": round(score.tree, 3) for score in scores if score.tree is not None}
    return {"tokens_per_round": rows} | ({"tokens_per_round_in_trees": trees} if trees else {})


def require_adaptable(model: Any, base: str) -> None:
    """Refuses models that draft already, and architectures that no drafter is made for."""
    from redraft import checkpoint
    from redraft.checkpoint.drafter_files import NAMES
    from redraft.config import LlamaConfig

    if not model.config.is_causal_only:
        raise ValueError(f"{base} is a diffusion model and drafts already: adapt a left-to-right one")
    folder = Path(base).expanduser()
    if checkpoint.is_drafter(folder):
        cfg, settings = checkpoint.read_drafter_config(folder)
        raise ValueError(f"{base} is a {NAMES[type(cfg)]} already: adapt its base, {settings['base']}")
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


def add_scores(folder: Path, scores: dict[str, Any]) -> None:
    """Adds what was measured to the drafter's file."""
    from redraft.checkpoint.drafter_files import DRAFTER_CONFIG
    from redraft.config import read_json, write_text

    settings = dict(read_json(folder / DRAFTER_CONFIG))
    settings["scores"] = {**settings.get("scores", {}), **scores}
    write_text(folder / DRAFTER_CONFIG, json.dumps(settings, indent=2) + "\n")
