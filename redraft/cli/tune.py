"""The command `redraft tune`: trains an adapter for a checkpoint on files of conversations, texts or prompts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from redraft.cli.options import Device, LongThreads, Quant, name_flags, option, parse_float, parse_int

if TYPE_CHECKING:
    from redraft.train.data_check import DataCheck, TokenEstimate
    from redraft.train.records import DataConfig
    from redraft.train.tuning import TuneOptions

FLAGS = {"rate": "--lr", "held_out": "--held-out", "ar_weight": "--ar-weight", "length": "--length", "batch": "--batch"}
FLAGS |= {name: f"--{name}" for name in ("rank", "alpha", "dropout", "epochs", "layers", "halves", "rows")}


def tune(
    model: Annotated[str, typer.Argument(help="Base checkpoint: folder, GGUF file, or hub id OWNER/NAME.")],
    data: Annotated[
        list[str], typer.Option("--data", "-d", help="JSON lines with messages, prompt and completion, or text.")
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="The adapter's folder; the run keeps its checkpoints there.")],
    rank: Annotated[int, option("--rank", "-r", help="Rank of the pairs.", parser=parse_int)] = 16,
    alpha: Annotated[float | None, option("--alpha", help="Scale: alpha / rank. [2 * rank]", parser=parse_float)] = None,
    dropout: Annotated[float, option("--dropout", help="Of the pairs' inputs.", parser=parse_float)] = 0.0,
    targets: Annotated[
        str, typer.Option("--targets", help="attention, dense, experts, self_conditioning; joined by commas.")
    ] = "attention,dense",
    layers: Annotated[str | None, typer.Option("--layers", help="Which layers: 0-9, or 3,7. [all]")] = None,
    halves: Annotated[str, typer.Option("--halves", help="both, or denoise: the causal half stays as it is.")] = "both",
    epochs: Annotated[float, option("--epochs", help="Passes over the records.", parser=parse_float)] = 3.0,
    steps: Annotated[int | None, option("--steps", help="Instead of --epochs.", parser=parse_int)] = None,
    rate: Annotated[float, option("--lr", help="Learning rate.", parser=parse_float)] = 2e-4,
    batch: Annotated[int, option("--batch", "-b", help="Rows of a step.", parser=parse_int)] = 8,
    rows: Annotated[int, option("--rows", help="Rows of a forward; more need more memory.", parser=parse_int)] = 1,
    length: Annotated[int | None, option("--length", help="Tokens of a row. [2048, or context]", parser=parse_int)] = None,
    ar_weight: Annotated[float, option("--ar-weight", help="Weight of the next-token loss.", parser=parse_float)] = 1.0,
    held_out: Annotated[float, option("--held-out", help="Share of records to evaluate on.", parser=parse_float)] = 0.05,
    save_every: Annotated[
        int | None, option("--save-every", help="Steps between checkpoints. [a twentieth of the run]", parser=parse_int)
    ] = None,
    seed: Annotated[int, option("--seed", help="Order of the records, noise, first weights.", parser=parse_int)] = 0,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip and count bad records instead of stopping.")] = False,
    start: Annotated[
        str | None, typer.Option("--from", help="Folder of an adapter of the same shape to start with. [a new one]")
    ] = None,
    quant: Quant = None,
    device: Device = None,
    threads: LongThreads = None,
) -> None:
    """Train an adapter (LoRA) on your own records. The same command resumes; torchrun starts it on several processes."""
    from redraft import checkpoint
    from redraft.model.lora import AdapterConfig
    from redraft.train.tuning import TuneOptions

    with name_flags(FLAGS):
        options = TuneOptions(
            adapter=AdapterConfig(
                rank=rank,
                alpha=2.0 * rank if alpha is None else alpha,
                dropout=dropout,
                targets=tuple(part.strip().replace("-", "_") for part in targets.split(",") if part.strip()),
                layers=parse_layers(layers),
                halves=halves,
            ),
            length=length,
            batch=batch,
            rows=rows,
            epochs=epochs,
            steps=steps,
            rate=rate,
            ar_weight=ar_weight,
            held_out=held_out,
            save_every=save_every,
            seed=seed,
            quant=quant,
            skip_bad=skip_bad,
            start_adapter=str(checkpoint.find_adapter(start).resolve()) if start else "",
        )
        run_tuning(model, data, Path(out), options, device)


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Layer numbers: "0-3,7" -> 0, 1, 2, 3, 7."""
    if text is None:
        return None
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?", part)
        if match is None:
            raise ValueError(f"--layers takes numbers and ranges such as 0-9 or 3,7, got {text!r}")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(sorted(set(numbers)))


def run_tuning(model: str, files: list[str], out: Path, options: TuneOptions, device: str | None) -> None:
    """Checks the records, then trains."""
    import torch

    from redraft import checkpoint
    from redraft.checkpoint.parts import open_checkpoint
    from redraft.cli.train import join_processes, run_trainer, write_config
    from redraft.train.data_check import estimate_tokens
    from redraft.train.loop import Trainer
    from redraft.train.tuning import tuning_config, tuning_data

    for file in files:
        if not Path(file).is_file():
            raise ValueError(f"--data: there is no file {file}")
    opened = open_checkpoint(checkpoint.find(model))
    data = tuning_data(files, options, opened.sampler, opened.config.max_position_embeddings)
    console = Console(stderr=True, highlight=False)
    with join_processes(device) as (local_device, is_main):
        check = check_data(data, console if is_main else Console(quiet=True))
        estimate = estimate_tokens(check, data, opened.tokenizer, opened.config.eos_token_ids[0])
        config = tuning_config(model, data, options, check, estimate, torch.device(local_device))
        if is_main:
            describe_run(console, check, estimate, config)
        trainer = Trainer(config, out, local_device)
        if is_main:
            write_config(config, out)
        run_trainer(trainer, out, is_main)


def check_data(data: DataConfig, console: Console) -> DataCheck:
    """Reads all records once, with a progress bar. A bad one ends the command unless they are skipped."""
    from redraft.train.data_check import check_records
    from redraft.train.records import BadRecord

    columns = (TextColumn("checking the records"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("checking", total=None)
        try:
            for check in check_records(data):
                progress.update(task, completed=check.read_bytes, total=check.total_bytes)
        except BadRecord as error:
            raise ValueError(f"{error} (--skip-bad skips bad records)") from None
    for message in check.named:
        console.print(f"skipped {message}", markup=False, soft_wrap=True)
    if check.bad > len(check.named):
        console.print(f"skipped {check.bad - len(check.named):,} more")
    if not check.records:
        raise ValueError("there is nothing to learn from: the files have no usable record")
    return check


def describe_run(console: Console, check: DataCheck, estimate: TokenEstimate, config: Any) -> None:
    """Says in two lines what will be learned, and how long it is."""
    kinds = ", ".join(f"{count:,} with {kind}" for kind, count in sorted(check.kinds.items()))
    console.print(f"{check.records:,} records ({kinds}); {check.held_out:,} held out, {check.bad:,} skipped", soft_wrap=True)
    console.print(
        f"about {estimate.answer:,} tokens to learn an epoch; {config.steps:,} steps of "
        f"{config.rows * config.microbatches} rows of {config.data.length:,} tokens",
        soft_wrap=True,
    )
