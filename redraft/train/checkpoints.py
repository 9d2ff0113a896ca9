"""Training checkpoints: one folder each, complete or absent.

    OUT/step-00001200/        tensors in torch's distributed format, and state.json for everything else
    OUT/step-00001300.part/   being written, or left behind by a run that was killed

A folder gets its final name in one rename, after everything is in it and on the disk; older checkpoints are removed after
that. Works with one process or many.
"""

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from redraft import checkpoint
from redraft.config import read_json, write_text

STATE = "state.json"


def save(out: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], keep: int) -> Path:
    """Writes a checkpoint, then removes all but the last `keep`. Every process calls it with its shards of the tensors."""
    final = out / f"step-{step:08}"
    partial = final.with_name(final.name + ".part")
    if is_main_process():
        shutil.rmtree(partial, ignore_errors=True)  # left behind by a run that was killed
        partial.mkdir(parents=True)
    barrier()
    with _ignore_warnings():
        dcp.save(tensors, checkpoint_id=partial, no_dist=not dist.is_initialized())
    if is_main_process():
        write_text(partial / STATE, json.dumps(state))
        checkpoint.sync_files(partial)
        checkpoint.put_in_place(partial, final)
        shutil.rmtree(partial, ignore_errors=True)  # an earlier run got to this step too: its checkpoint is there now
        for old_step in sorted(_saved_steps(out))[:-keep]:
            _remove(out / f"step-{old_step:08}")
    barrier()
    return final


def latest(out: Path) -> Path | None:
    """Returns the newest checkpoint, or None."""
    steps = _saved_steps(out)
    return out / f"step-{max(steps):08}" if steps else None


def read_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint, without its tensors."""
    return read_json(folder / STATE)


def load(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Loads tensors in place, whatever number of processes wrote them."""
    with _ignore_warnings():
        dcp.load(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())


def is_main_process() -> bool:
    """Whether this process writes the files that only one process may write."""
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    """Waits for the other processes, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def _remove(folder: Path) -> None:
    """Removes a checkpoint; renames it first, so that a half-removed folder never looks complete."""
    renamed = folder.with_name(folder.name + ".old")
    shutil.rmtree(renamed, ignore_errors=True)
    os.rename(folder, renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def _saved_steps(out: Path) -> list[int]:
    names = [path.name for path in out.glob("step-*")] if out.is_dir() else []
    return [int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d{8})", name))]


def _ignore_warnings() -> warnings.catch_warnings:
    """torch.distributed.checkpoint warns about its own deprecations, and when there is only one process."""
    return warnings.catch_warnings(action="ignore")
