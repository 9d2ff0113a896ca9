"""The commands `redraft train` and `redraft eval`; `main.py` registers them."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from redraft.cli.options import Adapter, KeepBf16, LongThreads, Quant, Threads
from redraft.config import write_text

if TYPE_CHECKING:
    from redraft.train.config import TrainConfig

METRICS = "metrics.jsonl"
CURVES = "curves.png"
CONFIG = "recipe.json"
NOTES = "records.jsonl"  # which records were shortened or skipped, and why
DATA_ADVICE = (
    "redraft ships no data. docs/training.md says where it comes from, redraft data stories samples stories from a "
    "teacher, and REDRAFT_DATA (eval: also --data) names the folder"
)


# 1. redraft train


def train(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe: toy, tiny, tiny_draft, sudoku, tiny_sudoku, tune_sudoku, tune_style, or the path of a file."
        ),
    ],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a value: --set steps=100 --set optim.warmup=20.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="The run's folder. [runs/RECIPE]")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda. [a GPU if there is one]")] = None,
    threads: Threads = None,
) -> None:
    """Train a model. A stopped run resumes from its last checkpoint; torchrun starts it on several processes."""
    from redraft.train.loop import Trainer
    from redraft.train.recipe import load_recipe

    folder = Path(out or f"runs/{Path(recipe).stem}")
    with join_processes(device) as (local_device, is_main):
        config = load_recipe(recipe, folder, changes or [])
        require_data(config)
        trainer = Trainer(config, folder, local_device)
        if is_main:
            write_config(config, folder)
        run_trainer(trainer, folder, is_main)


def write_config(config: "TrainConfig", folder: Path) -> None:
    """Writes the configuration of a run into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / CONFIG, config.to_json())


def require_data(config: "TrainConfig") -> None:
    """Refuses a recipe whose files are not there, before a model is built."""
    from redraft.train.records import DataConfig

    for data in (config.data, config.draft_data):
        for source in data.sources if isinstance(data, DataConfig) else ():
            for file in source.files:
                if not Path(file).exists():
                    raise ValueError(f"{file} is missing: {DATA_ADVICE}")


@contextmanager
def join_processes(device: str | None) -> Iterator[tuple[str, bool]]:
    """Yields this process's device and whether it is the main process. Joins the others if torchrun started several."""
    import torch
    import torch.distributed as dist

    local_device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield local_device, True
        return
    if local_device == "cuda":
        local_device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(local_device)
    dist.init_process_group("nccl" if local_device.startswith("cuda") else "gloo")
    try:
        yield local_device, dist.get_rank() == 0
        dist.barrier()  # a process that leaves early may abort the others
    finally:
        dist.destroy_process_group()


def run_trainer(trainer: Any, folder: Path, is_main: bool) -> None:
    """Runs a trainer to its end: a progress bar on a terminal, lines elsewhere, metrics in the folder, a plot at the end."""
    from redraft.train import plot
    from redraft.train.held_out import Evaluated
    from redraft.train.loop import Ended, Report, Saved

    console = Console(stderr=True, highlight=False)
    if not is_main:
        for _ in trainer.run():
            pass
        return
    drop_later_reports(folder / METRICS, trainer.step)
    with (folder / METRICS).open("a", encoding="utf-8") as metrics, _progress_bar(console, trainer.cfg.steps) as show:
        for event in trainer.run():
            if isinstance(event, Report):
                metrics.write(json.dumps(asdict(event)) + "\n")
                metrics.flush()
                show(event)
                write_notes(trainer.task, folder / NOTES)
            elif isinstance(event, Evaluated):
                metrics.write(json.dumps({"step": event.step, "held_out": asdict(event)}) + "\n")
                console.print(format_evaluation(event), soft_wrap=True)
            elif isinstance(event, Saved) and not console.is_terminal:
                console.print(f"saved {event.folder}", soft_wrap=True)
            elif isinstance(event, Ended):
                ended = event
    try:
        plot.draw_metrics(folder / METRICS, folder / CURVES)
        console.print(f"losses: {folder / CURVES}", soft_wrap=True)
    except ValueError as error:
        console.print(str(error), markup=False)
    use = f"-m {ended.model}" if trainer.cfg.adapter is None else f"-m {trainer.cfg.init} --adapter {ended.model}"
    example = f"fill FILE {use}" if trainer.cfg.page is not None else f"{use} PROMPT"
    console.print(f"{ended.why} at step {ended.step} of {trainer.cfg.steps}; try it: redraft {example}", soft_wrap=True)
    print(ended.model)
    if ended.why == "stopped":
        raise KeyboardInterrupt  # gives the exit code of an interrupted command


def write_notes(task: Any, path: Path) -> None:
    """Appends the names of records that were shortened or skipped to a file of JSON lines."""
    notes = task.take_notes() if hasattr(task, "take_notes") else []
    if notes:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"record": where, "note": note}) + "\n" for where, note in notes)


def format_evaluation(event: Any) -> str:
    """Formats an evaluation in one line."""
    best = ", the best so far" if event.is_best else ""
    scores = ", ".join(f"{name.replace('_', ' ')} {score:.3f}" for name, score in event.scores.items())
    return f"step {event.step}  held out: {scores}{best}"


def drop_later_reports(metrics: Path, step: int) -> None:
    """Removes reports of steps that will be repeated after a resume, and a last line that a killed run did not finish."""
    if metrics.exists():
        lines = metrics.read_text(encoding="utf-8").split("\n")[:-1]
        kept = [line for line in lines if line.strip() and json.loads(line)["step"] <= step]
        write_text(metrics, "".join(line + "\n" for line in kept))


@contextmanager
def _progress_bar(console: Console, steps: int) -> Iterator[Any]:
    if not console.is_terminal:
        yield lambda report: console.print(format_report(report), soft_wrap=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=steps)
        yield lambda report: progress.update(task, completed=report.step, description=format_report(report))


def format_report(report: Any) -> str:
    """Formats a report in one line."""
    drafts = f", drafts {report.draft:.3f}, {report.accepted:.2f} accepted" if report.accepted is not None else ""
    return (
        f"step {report.step}  loss {report.loss:.3f} (denoiser {report.denoiser:.3f}, next token {report.ar:.3f}{drafts})  "
        f"{report.tokens_per_second:,.0f} tokens/s"
    )


# 2. redraft eval


def evaluate(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or hub id OWNER/NAME.")],
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            "-t",
            help="stories, samples, code, infill, gaps, edit, schema, sudoku, sudoku-autoregressive, sudoku-written. "
            "[stories, or sudoku]",
        ),
    ] = None,
    data: Annotated[
        str, typer.Option("--data", envvar="REDRAFT_DATA", help="Folder with stories/, code/, sudoku/; gaps: or a file.")
    ] = "data",
    judge: Annotated[str, typer.Option("--judge", help="samples: a Llama checkpoint with tokens.jsonl.")] = "data/teacher",
    check: Annotated[
        str | None, typer.Option("--check", help="samples: off, checked or exact. [checkpoint's]", metavar="MODE")
    ] = None,
    rows: Annotated[int | None, typer.Option("--batch", help="samples: texts in a batch. [16; 64 on a GPU]")] = None,
    words: Annotated[
        str | None, typer.Option("--words", help="samples: a file of known words. [those of the stories in --data]")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", help="Texts, samples, gaps, or puzzles of a list.")] = 150,
    levels: Annotated[int, typer.Option("--levels", help="stories: noise levels of the bound.")] = 16,
    canvases: Annotated[int, typer.Option("--canvases", help="sudoku: most canvases of a puzzle.")] = 64,
    canvas: Annotated[int | None, typer.Option("--canvas-length", help="Tokens on a canvas. [64; checkpoint's]")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a sampler setting: --set max_steps=40 --set t_max=1.0.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda. [a GPU if there is one]")] = None,
    threads: LongThreads = None,
    quant: Quant = None,
    keep_bf16: KeepBf16 = False,
    adapter: Adapter = None,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="infill: run code that the model writes, in a sandbox.")
    ] = False,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Write the scores here, as JSON.")] = None,
) -> None:
    """Score a model: likelihood and repair on stories, samples under a judge, infilling, edits, JSON schemas, puzzles."""
    from redraft import writer
    from redraft.tasks.sudoku import solve
    from redraft.train.evals import tasks
    from redraft.train.recipe import change_settings

    _check_eval_options(task, tasks.TASKS, count, check=check, batch=rows, words=words)
    tasks.require_adapter_task(task, adapter)
    options = tasks.Options(
        data=Path(data),
        judge=judge,
        count=count,
        levels=levels,
        canvas=canvas,
        canvases=canvases,
        check=check,
        rows=rows,
        words=words,
        picture=Path(out).with_suffix(".png") if out else None,
        allow_code_execution=allow_code_execution,
    )
    if task == "infill":
        tasks.require_code_execution(options)  # before the model is loaded
    subject = writer.load(model, device=device, dtype="float32", quant=quant, keep_bf16=keep_bf16, adapter=adapter)
    task = task or ("sudoku" if solve.is_sudoku_model(subject.model) else "stories")
    console = Console(stderr=True, highlight=False)
    sampler = change_settings(subject.sampler, changes or [])
    with console.status("scoring") as status:
        options = replace(options, progress=status.update, adapter=subject.adapter)
        try:
            scores = tasks.TASKS[task](subject.model, subject.tokenizer, sampler, options)
        except FileNotFoundError as error:
            raise ValueError(f"{error.filename} is missing: {DATA_ADVICE}") from None
    asked = {"model": model, "adapter": adapter, "task": task, "quant": quant, "changes": changes or []}
    _show_scores(console, scores)
    text = json.dumps({**asked, **scores})
    print(text)
    if out:
        write_text(out, text + "\n")


def _show_scores(console: Console, scores: dict[str, Any]) -> None:
    table = Table("score", "", box=None, pad_edge=False)
    for name, value in flatten_scores(scores):
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    console.print(table)


def _check_eval_options(task: str | None, known: Iterable[str], count: int, **of_samples: str | int | None) -> None:
    """Refuses an unknown task, counts below 1, and options of the task `samples` with another one."""
    if task is not None and task not in known:
        raise ValueError(f"there is no task {task!r}; known are {', '.join(known)}")
    for flag, value in of_samples.items():
        if value is not None and task != "samples":
            raise ValueError(f"--{flag} is for --task samples: leave it out")
    for flag, number in (("count", count), ("batch", of_samples.get("batch"))):
        if isinstance(number, int) and number < 1:
            raise ValueError(f"--{flag} must be at least 1, got {number}")


def flatten_scores(scores: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, score); nested names are joined by a space. Lists appear in the JSON only."""
    for name, value in scores.items():
        if isinstance(value, dict):
            yield from flatten_scores(value, f"{prefix}{name} ")
        elif not isinstance(value, list):
            yield f"{prefix}{name}", value
