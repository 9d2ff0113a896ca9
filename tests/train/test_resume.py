"""Resumed = unbroken to the bit, for all that a Trainer trains."""

from dataclasses import replace
from pathlib import Path

import pytest
import test_draft_loss
import test_draft_training
import test_page_training
import test_sudoku_task
import test_tuning
import torch
from safetensors.torch import load_file

from redraft.train.config import TrainConfig
from redraft.train.held_out import Evaluated
from redraft.train.loop import Report, Saved, Trainer

SAVED = {"steps": 4, "save_every": 2, "report_every": 1}


def train_puzzles(folder: Path) -> TrainConfig:
    puzzles = replace(test_sudoku_task.write_puzzles(folder), unrolled_steps=2)
    return test_sudoku_task.config(puzzles, microbatches=2, **SAVED)


def train_drafter(folder: Path) -> TrainConfig:
    return test_draft_training.make_config(test_draft_training.write_answers(folder), **SAVED)


def train_page_adapter(folder: Path) -> TrainConfig:
    return test_page_training.make_config(test_page_training.write_texts(folder), evaluate_every=1, **SAVED)


TRAINABLES = {
    "a model and its draft head": lambda folder: test_draft_loss.drafting_config(folder, **SAVED),
    "the adapter of a model, with dropout": lambda folder: test_tuning.config(folder, steps=4, save_every=2),
    "a drafter": train_drafter,
    "an adapter for canvases": train_page_adapter,
    "a model of puzzles": train_puzzles,
}


def figures(event: object) -> object:
    """What an event says of the training; None if it says nothing of it."""
    if isinstance(event, Report):
        return event.step, event.loss
    return event.scores if isinstance(event, Evaluated) else None


def exported(folder: Path) -> dict[str, torch.Tensor]:
    files = [path for path in sorted(folder.rglob("*.safetensors")) if "checkpoint" not in str(path.relative_to(folder))]
    assert files
    return {f"{path.relative_to(folder)} {name}": tensor for path in files for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("name", TRAINABLES)
def test_resumed_equals_unbroken_to_the_bit(name, tmp_path):
    """Positions in the data, averages, the best score and the optimizer included."""
    cfg = TRAINABLES[name](tmp_path)
    whole = Trainer(cfg, tmp_path / "whole")
    unbroken = [figures(event) for event in whole.run()]
    run = Trainer(cfg, tmp_path / "broken").run()
    began = []
    for event in run:
        began.append(figures(event))
        if isinstance(event, Saved):
            break
    next(run)  # what is done after the checkpoint is lost, as by a kill
    run.close()
    second = Trainer(cfg, tmp_path / "broken")
    assert second.step == 2
    resumed = [figures(event) for event in second.run()]
    assert [*filter(None, began), *filter(None, resumed)] == [*filter(None, unbroken)]
    for one, two in ((whole._tensors(), second._tensors()), (exported(tmp_path / "whole"), exported(tmp_path / "broken"))):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert getattr(second.task, "positions", None) == getattr(whole.task, "positions", None)
