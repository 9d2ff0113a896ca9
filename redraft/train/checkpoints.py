"""Training checkpoints: a folder for each, whole or not there at all.

    OUT/step-00001200/   tensors in torch's distributed format, and state.json: what is not a tensor
    OUT/step-00001300.part/   being written, or left behind by a run that was killed

A folder gets its name when everything is in it, in one rename, and older ones go after that. Works in one process or many.
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

STATE = "state.json"


def save(out: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any], keep: int) -> Path:
    """Writes a checkpoint, then forgets all but the last `keep`. Every process calls it with its own part of the tensors."""
    final = out / f"step-{step:08}"
    part = final.with_name(final.name + ".part")
    if first():
        shutil.rmtree(part, ignore_errors=True)  # left by a run that was killed
        part.mkdir(parents=True)
    barrier()
    with _quietly():
        dcp.save(tensors, checkpoint_id=part, no_dist=not dist.is_initialized())
    if first():
        (part / STATE).write_text(json.dumps(state), encoding="utf-8")
        if final.exists():  # a run that went this way before
            _forget(final)
        os.rename(part, final)
        for old in sorted(_complete(out))[:-keep]:
            _forget(out / f"step-{old:08}")
    barrier()
    return final


def latest(out: Path) -> Path | None:
    """The newest checkpoint, None where there is none."""
    steps = _complete(out)
    return out / f"step-{max(steps):08}" if steps else None


def load(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Reads tensors in place, whatever number of processes wrote them. Returns the rest."""
    with _quietly():
        dcp.load(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def first() -> bool:
    """Whether this is the process that writes what is written once."""
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    """Waits for the other processes, where there are any."""
    if dist.is_initialized():
        dist.barrier()


def _forget(folder: Path) -> None:
    """Takes the name away first: half a folder must not look like a whole one."""
    gone = folder.with_name(folder.name + ".old")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _complete(out: Path) -> list[int]:
    names = [path.name for path in out.glob("step-*")] if out.is_dir() else []
    return [int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d{8})", name))]


def _quietly() -> warnings.catch_warnings:
    """The library warns about its own deprecations, and that one process is not many."""
    return warnings.catch_warnings(action="ignore")
