"""Drafters and page adapters on disk: adapter.json (kind, base, size, scores) and adapter.safetensors in one folder.

What holds for both is said of drafters here: both are given to a left-to-right model, and their folders stand for it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from redraft.checkpoint.adapter_files import PRECISIONS, fingerprint
from redraft.checkpoint.find import PACKAGED
from redraft.checkpoint.names import CheckpointError
from redraft.checkpoint.tensor_file import save_tensors
from redraft.config import ConfigError, read_json, show_value, write_text
from redraft.model.backbone import Backbone
from redraft.model.drafter import Drafter, DrafterConfig, new_drafter
from redraft.model.lora import AdapterError
from redraft.model.page import PageAdapter, PageConfig, new_page_adapter

DRAFTER_CONFIG = "adapter.json"
DRAFTER_WEIGHTS = "adapter.safetensors"
FORMAT = 2  # format 1 predicted a token at its own position; format 2 predicts it at the position before
KINDS: dict[str, type[DrafterConfig] | type[PageConfig]] = {"drafter": DrafterConfig, "page": PageConfig}
NAMES = {DrafterConfig: "drafter", PageConfig: "page adapter"}


def is_drafter(folder: str | Path) -> bool:
    """Whether a folder holds a drafter or a page adapter."""
    return (Path(folder) / DRAFTER_CONFIG).is_file()


def find_by_fingerprint(given: Path | None, fingerprint: str) -> list[Path]:
    """The folders of the drafter and the page adapter of the model with this fingerprint, at most one of each.

    The given folder comes first. A kind that it does not hold is taken from the package.
    """
    found = {} if given is None else {type(read_drafter_config(given)[0]): given}
    for path in sorted(PACKAGED.glob(f"*/{DRAFTER_CONFIG}")):
        cfg, settings = read_drafter_config(path.parent)
        if settings["fingerprint"] == fingerprint:
            found.setdefault(type(cfg), path.parent)
    return list(found.values())


def refuse_drafter(folder: str | Path) -> None:
    """A drafter has no model's files: what needs them takes its base."""
    if is_drafter(folder):
        cfg, settings = read_drafter_config(folder)
        raise CheckpointError(f"{folder} is a {NAMES[type(cfg)]}, not a model: give its base, {settings['base']}")


def save_drafter(
    drafter: Drafter | PageAdapter,
    folder: str | Path,
    *,
    base: str,
    fingerprint: str,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a drafter, its weights in bf16. Each of the two files is replaced as a whole, the weights first.

    `base` is the name of its base model, and `fingerprint` is that model's.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in drafter.state_dict().items()}
    part = folder / f"{DRAFTER_WEIGHTS}.part"
    save_tensors({name: tensor.contiguous().clone() for name, tensor in weights.items()}, part, {"format": "pt"})
    part.replace(folder / DRAFTER_WEIGHTS)
    kind = next(kind for kind, config in KINDS.items() if isinstance(drafter.cfg, config))
    described = {"kind": kind, "format": FORMAT, "base": base, "fingerprint": fingerprint}
    settings = {**described, **asdict(drafter.cfg), **(metadata or {})}
    write_text(folder / DRAFTER_CONFIG, json.dumps(settings, indent=2) + "\n")
    return folder


def read_drafter_config(folder: str | Path) -> tuple[DrafterConfig | PageConfig, dict[str, Any]]:
    """The size of a drafter, and all that its file says: base, fingerprint, scores."""
    path = Path(folder) / DRAFTER_CONFIG
    if not path.is_file():
        raise AdapterError(f"{folder} holds no drafter: it has no {DRAFTER_CONFIG}")
    raw = read_json(path)
    kind = raw.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        known = " and ".join(map(repr, KINDS))
        raise AdapterError(f"{path} is of the kind {show_value(kind)}; redraft reads {known}")
    if raw.get("format") != FORMAT:
        given = show_value(raw["format"]) if "format" in raw else 1
        raise AdapterError(f"{path} has the format {given}, and redraft reads {FORMAT}: train it again with redraft adapt")
    for name in ("base", "fingerprint"):
        if not isinstance(raw.get(name), str):
            raise AdapterError(f"{path}: {name} must be a text, got {show_value(raw.get(name))}")
    sizes: dict[str, Any] = {}
    for f in fields(KINDS[kind]):
        value = raw.get(f.name)
        if f.name == "canvas_lengths":  # PageConfig checks them
            sizes[f.name] = value
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (f.type is int and not isinstance(value, int)):
            raise AdapterError(f"{path}: {f.name} must be a number, got {show_value(value)}")
        sizes[f.name] = value
    try:
        return KINDS[kind](**sizes), raw
    except ConfigError as error:
        raise AdapterError(f"{path}: {error}") from None


def give_drafter(folder: str | Path, model: Backbone) -> DrafterConfig | PageConfig:
    """Loads what a folder holds, a drafter or a page adapter, and gives it to the model. Returns its configuration."""
    drafter = load_drafter(folder, model)
    if isinstance(drafter, Drafter):
        model.drafter = drafter
    else:
        model.page = drafter
    return drafter.cfg


def load_drafter(folder: str | Path, model: Backbone) -> Drafter | PageAdapter:
    """Loads a drafter for this model, in its precision and on its device. Refuses one of another base."""
    folder = Path(folder)
    cfg, raw = read_drafter_config(folder)
    if raw["fingerprint"] != fingerprint(model):
        raise AdapterError(f"{folder} was trained for another model, {show_value(raw['base'])}: use it with that one")
    zeros_D = torch.zeros(model.config.hidden_size)
    drafter: Drafter | PageAdapter
    if isinstance(cfg, PageConfig):
        drafter = new_page_adapter(cfg, model.config, zeros_D)
    else:
        drafter = new_drafter(cfg, model.config, zeros_D)
    expected = drafter.state_dict()
    path = folder / DRAFTER_WEIGHTS
    weights = {}
    try:
        with safe_open(path, "pt") as file:
            if set(file.keys()) != set(expected):
                names = sorted(set(file.keys()) ^ set(expected))
                raise AdapterError(
                    f"{path} is not the {NAMES[type(cfg)]} that {DRAFTER_CONFIG} describes: see tensor {names[0][:200]}"
                )
            for name, placeholder in expected.items():
                tensor = file.get_tensor(name)
                if tensor.shape != placeholder.shape or tensor.dtype not in PRECISIONS:
                    found = f"{list(tensor.shape)} {tensor.dtype}"
                    raise AdapterError(f"{path}: tensor {name} is {found}, {DRAFTER_CONFIG} says {list(placeholder.shape)}")
                if not tensor.isfinite().all():  # a drafter would draft nonsense, and training would lose its loss
                    raise AdapterError(f"{path}: tensor {name} has numbers that are not finite: train it again")
                weights[name] = tensor.to(model.device, model.dtype)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    drafter.load_state_dict(weights, assign=True)
    drafter.metadata = raw
    return drafter.eval().requires_grad_(False)
