"""What the files of an adapter say about it, without its base: for `redraft info`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.checkpoint.adapter_files import (
    ADAPTER_WEIGHTS,
    HALF_OF_PREFIX,
    PEFT_PREFIX,
    find_adapter,
    open_adapter,
    read_adapter_config,
    read_adapter_metadata,
)
from redraft.model.lora import MODULES, SELF_CONDITIONING

SHARED = "both, with the same pairs"


@dataclass(frozen=True, kw_only=True)
class AdapterSummary:
    """An adapter on disk."""

    base: str  # "" if the files do not say
    rank: int
    alpha: float
    targets: tuple[str, ...]  # of AdapterConfig.targets; other modules by their last name
    layers: tuple[int, ...]
    halves: str
    parameters: int  # a pair of both halves counts once
    nbytes: int
    metadata: dict[str, Any] = field(default_factory=dict)  # of our own files


def summarize_adapter(folder: str | Path) -> AdapterSummary:
    """Reads the settings, the metadata and the names of the tensors."""
    folder = find_adapter(folder)
    settings = read_adapter_config(folder)
    metadata = read_adapter_metadata(folder)
    tensors: dict[str, dict[str, Tensor]] = {}  # by their name in a half, then by half
    with open_adapter(folder) as file:
        for name in file.keys():  # noqa: SIM118  (it is no dictionary)
            half, rest = _split_half(name)
            tensors.setdefault(rest, {})[half] = file.get_tensor(name)
    counts = []
    for halves in tensors.values():
        is_shared = len(halves) == 2 and torch.equal(*halves.values())
        counts.append(sum(tensor.numel() for tensor in list(halves.values())[: 1 if is_shared else 2]))
    stored = sum(tensor.numel() for halves in tensors.values() for tensor in halves.values())
    return AdapterSummary(
        base=str(metadata.get("base") or settings.get("base_model_name_or_path") or ""),
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        targets=_find_targets(tensors),
        layers=tuple(sorted({int(layer[1]) for rest in tensors if (layer := re.match(r"layers\.(\d{1,6})\.", rest))})),
        halves=_describe_halves({half for halves in tensors.values() for half in halves}, is_shared=sum(counts) < stored),
        parameters=sum(counts),
        nbytes=(folder / ADAPTER_WEIGHTS).stat().st_size,
        metadata=metadata,
    )


def _split_half(name: str) -> tuple[str, str]:
    """The half of the model that a tensor belongs to, and its name there."""
    published = name.removeprefix(PEFT_PREFIX)
    prefix = next((prefix for prefix in HALF_OF_PREFIX if published.startswith(prefix)), "")
    return HALF_OF_PREFIX.get(prefix, ""), published.removeprefix(prefix)


def _describe_halves(found: set[str], *, is_shared: bool) -> str:
    if len(found - {""}) == 2:
        return SHARED if is_shared else "both, each with its own pairs"
    return ", ".join(sorted(found - {""}))


def _find_targets(tensors: Iterable[str]) -> tuple[str, ...]:
    """The targets of AdapterConfig that these tensors belong to. Modules that no target names are given as they are."""
    modules = {name.split(".lora_")[0].removesuffix(".base_layer") for name in tensors}
    conditioning = {module for module in modules if module in SELF_CONDITIONING}
    targets = {target: {m for m in modules - conditioning if _is_of(m, target)} for target in MODULES}
    others = modules - conditioning - set().union(*targets.values())
    named = [target for target, own in targets.items() if own] + (["self_conditioning"] if conditioning else [])
    return (*named, *sorted({module.rpartition(".")[2] for module in others}))


def _is_of(module: str, target: str) -> bool:
    return module.endswith(MODULES[target]) or (target == "experts" and module.endswith(".experts"))
