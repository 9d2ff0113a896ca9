"""Recipes: Python files with a function `recipe(folder)` that returns a TrainConfig; settings are changed by key=value."""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from redraft.train.config import TrainConfig

FOLDERS = (Path("recipes"), Path(__file__).with_name("recipes"))  # the user's, then those that ship


def load_recipe(name: str, out: Path, changes: Sequence[str] = ()) -> TrainConfig:
    """Runs a recipe, given by name or by path, and applies changes such as "optim.warmup=20"."""
    path = _find_recipe(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "recipe"):
        raise ValueError(f"{path} has no function recipe(folder)")
    config = module.recipe(out)
    for change in changes:
        config = change_setting(config, change)
    return config


def _find_recipe(name: str) -> Path:
    if name.endswith(".py") or "/" in name:
        if not Path(name).is_file():
            raise ValueError(f"there is no recipe {name}")
        return Path(name)
    paths = {path.stem: path for folder in reversed(FOLDERS) for path in sorted(folder.glob("[!_]*.py"))}
    if name not in paths:
        raise ValueError(f"there is no recipe {name!r}; known are {', '.join(sorted(paths)) or 'none'}, or give a path")
    return paths[name]


def change_setting(config: Any, change: str) -> Any:
    """Returns the configuration with one value replaced: "steps=100", "optim.warmup=20", "data.canvas_lengths=[32, 64]"."""
    key, equals, text = change.partition("=")
    if not equals:
        raise ValueError(f"--set wants key=value, got {change!r}")
    return _replace_value(config, key.strip().split("."), text.strip(), change)


def _replace_value(config: Any, path: list[str], text: str, change: str) -> Any:
    names = [f.name for f in fields(config)]
    if path[0] not in names:
        raise ValueError(f"--set {change}: there is no {path[0]!r} here; known are {', '.join(names)}")
    old = getattr(config, path[0])
    if len(path) > 1:
        if not is_dataclass(old):
            raise ValueError(f"--set {change}: {path[0]!r} has no parts")
        return replace(config, **{path[0]: _replace_value(old, path[1:], text, change)})
    return replace(config, **{path[0]: _parse_value(text, old, change)})


def _parse_value(text: str, old: Any, change: str) -> Any:
    """Parses the text as a value of the same type as the old value."""
    if isinstance(old, str):
        return text
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise ValueError(f"--set {change}: {text!r} is no JSON value") from None
    if isinstance(old, tuple) and isinstance(value, list):
        return tuple(value)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    has_same_type = isinstance(value, type(old)) and isinstance(value, bool) == isinstance(old, bool)
    if not has_same_type and not (type(old) is float and is_integer):
        raise ValueError(f"--set {change}: {text} is no {type(old).__name__}")
    return value
