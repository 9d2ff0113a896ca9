"""The commands for people who make models: redraft train and redraft eval. `cli.py` puts them on the command line."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

METRICS, CURVES, CONFIG = "metrics.jsonl", "curves.png", "recipe.json"


# 1. redraft train


def train(
    recipe: Annotated[str, typer.Argument(help="A name from recipes/ (toy, tiny, sudoku), or the path of a recipe.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a value: --set steps=100 --set optim.warmup=20.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="The run's folder. [runs/RECIPE]")] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda. [a GPU if there is one]")] = None,
) -> None:
    """Train a model. A run that was stopped goes on where its last checkpoint is; torchrun spreads it over processes."""
    from redraft.train.loop import Trainer, describe
    from redraft.train.recipe import load_recipe

    folder = Path(out or f"runs/{Path(recipe).stem}")
    with _processes(device) as (place, first):
        config = load_recipe(recipe, folder, changes or [])
        trainer = Trainer(config, folder, place)
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CONFIG).write_text(describe(config), encoding="utf-8")
        _follow(trainer, folder, first)


@contextmanager
def _processes(device: str | None) -> Iterator[tuple[str, bool]]:
    """This process's device, and whether it is the one that speaks. Joins the others where torchrun started several."""
    import torch.distributed as dist

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield place, True
        return
    if place == "cuda":
        place = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.startswith("cuda") else "gloo")
    try:
        yield place, dist.get_rank() == 0
        dist.barrier()  # who leaves while another still talks to it may abort
    finally:
        dist.destroy_process_group()


def _follow(trainer: Any, folder: Path, first: bool) -> None:
    """Runs a trainer to its end: a bar on a terminal, lines elsewhere, metrics in the folder, a picture at the end."""
    from redraft.train import plot
    from redraft.train.loop import Ended, Report, Saved

    console = Console(stderr=True, highlight=False)
    if not first:
        for _ in trainer.run():
            pass
        return
    trim(folder / METRICS, trainer.step)
    with (folder / METRICS).open("a", encoding="utf-8") as metrics, _bar(console, trainer.cfg.steps) as bar:
        for event in trainer.run():
            if isinstance(event, Report):
                metrics.write(json.dumps(asdict(event)) + "\n")
                metrics.flush()
                bar(event)
            elif isinstance(event, Saved) and not console.is_terminal:
                console.print(f"saved {event.folder}", soft_wrap=True)
            elif isinstance(event, Ended):
                ended = event
    try:
        plot.draw(folder / METRICS, folder / CURVES)
        console.print(f"losses: {folder / CURVES}", soft_wrap=True)
    except ValueError as error:
        console.print(str(error), markup=False)
    last = f"{ended.why} at step {ended.step} of {trainer.cfg.steps}; try it: redraft -m {ended.model} PROMPT"
    console.print(last, soft_wrap=True)
    print(ended.model)
    if ended.why == "stopped":
        raise KeyboardInterrupt  # the exit code of a run that someone stopped


def trim(metrics: Path, step: int) -> None:
    """Forgets reports of steps that will be done again."""
    if metrics.exists():
        lines = metrics.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.strip() and json.loads(line)["step"] <= step]
        metrics.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


@contextmanager
def _bar(console: Console, steps: int) -> Iterator[Any]:
    if not console.is_terminal:
        yield lambda report: console.print(sentence(report), soft_wrap=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=steps)
        yield lambda report: progress.update(task, completed=report.step, description=sentence(report))


def sentence(report: Any) -> str:
    """A report in one line."""
    return (
        f"step {report.step}  loss {report.loss:.3f} (denoiser {report.denoiser:.3f}, next token {report.ar:.3f})  "
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
            help="stories, samples, code, infill, edit, schema, sudoku, sudoku-spoken, sudoku-written. [stories, or sudoku]",
        ),
    ] = None,
    data: Annotated[
        str, typer.Option("--data", envvar="REDRAFT_DATA", help="Folder with stories/, code/ and sudoku/.")
    ] = "data",
    judge: Annotated[str, typer.Option("--judge", help="samples: a Llama checkpoint with tokens.jsonl.")] = "data/teacher",
    count: Annotated[int, typer.Option("--count", "-n", help="Texts, samples, holes, or puzzles of a list.")] = 150,
    levels: Annotated[int, typer.Option("--levels", help="stories: noise levels of the bound.")] = 16,
    canvases: Annotated[int, typer.Option("--canvases", help="sudoku: most canvases of a puzzle.")] = 64,
    canvas: Annotated[int | None, typer.Option("--canvas-length", help="Tokens on a canvas. [64; checkpoint's]")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="Change a sampler setting: --set max_steps=40 --set t_max=1.0.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda. [a GPU if there is one]")] = None,
    quant: Annotated[str | None, typer.Option("--quant", help="fp8: pack the layers on the way in.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Write the scores here, as JSON.")] = None,
) -> None:
    """Score a model: likelihood and repair on stories, samples under a judge, lines of code put back, edits, puzzles."""
    from redraft import writer
    from redraft.tasks.sudoku import solve
    from redraft.train.evals import tasks
    from redraft.train.recipe import change_setting

    known = {"stories": tasks.stories, "samples": tasks.samples, "code": tasks.code, "edit": tasks.edit}
    known |= {"infill": tasks.infill, "schema": tasks.schema}
    known |= {"sudoku": tasks.sudoku, "sudoku-spoken": tasks.sudoku_spoken, "sudoku-written": tasks.sudoku_written}
    if count < 1:
        raise ValueError(f"--count must be at least 1, got {count}")
    if task is not None and task not in known:
        raise ValueError(f"there is no task {task!r}; known are {', '.join(known)}")
    subject = writer.load(model, device=device, dtype="float32", quant=quant)
    task = task or ("sudoku" if solve.fits(subject.model) else "stories")
    console = Console(stderr=True, highlight=False)
    options = {"data": Path(data), "judge": judge, "count": count, "levels": levels, "canvas": canvas, "canvases": canvases}
    options["picture"] = Path(out).with_suffix(".png") if out else None
    sampler = subject.sampler
    for change in changes or []:
        sampler = change_setting(sampler, change)
    with console.status("scoring") as status:
        found = known[task](subject.model, subject.tokenizer, sampler, tasks.Options(**options, tell=status.update))
    table = Table("score", "", box=None, pad_edge=False)
    for name, value in flat(found):
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    console.print(table)
    text = json.dumps({"model": model, "task": task, "quant": quant, "changes": changes or [], **found})
    print(text)
    if out:
        Path(out).write_text(text + "\n", encoding="utf-8")


def flat(found: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Scores by name, those of parts behind their part's; long lists are left to the JSON."""
    for name, value in found.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{name} ")
        elif not isinstance(value, list):
            yield f"{before}{name}", value
