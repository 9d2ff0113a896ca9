"""Recipes: Python files with a function `recipe(folder)` that returns a TrainConfig; settings are changed by key=value."""

import importlib.util
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from redraft.config import parse_json
from redraft.train.config import TrainConfig

PACKAGED = Path(__file__).with_name("recipes")


def load_recipe(name: str, out: Path, changes: Sequence[str] = ()) -> TrainConfig:
    """Runs a recipe, a packaged one by its name or a file by its path; applies changes such as "optim.warmup=20"."""
    path = _find_recipe(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "recipe"):
        raise ValueError(f"{path} has no function recipe(folder)")
    config = module.recipe(out)
    return change_settings(config, changes)


def _find_recipe(name: str) -> Path:
    """A name never means a file of the working directory, which may be a stranger's: only a path does."""
    if name.endswith(".py") or "/" in name:
        if not Path(name).is_file():
            raise ValueError(f"there is no recipe {name}")
        return Path(name)
    paths = {path.stem: path for path in sorted(PACKAGED.glob("[!_]*.py"))}
    if name not in paths:
        raise ValueError(f"there is no recipe {name!r}; known are {', '.join(paths)}, or give a path as ./{name}.py")
    return paths[name]


def change_settings(config: Any, changes: Sequence[str]) -> Any:
    """Returns the configuration with some values replaced: "steps=100", "optim.warmup=20", "data.canvas_lengths=[32, 64]".

    All at once: values that need one another can be given in any order.
    """
    parsed = []
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise ValueError(f"--set wants key=value, got {change!r}")
        parsed.append((key.strip().split("."), text.strip(), change))
    return _replace_values(config, parsed)


def _replace_values(config: Any, changes: Sequence[tuple[list[str], str, str]]) -> Any:
    """Replaces values of one configuration. A change is the path to the value, its text, and how the user wrote both."""
    names = [f.name for f in fields(config)]
    values: dict[str, Any] = {}
    of_parts: dict[str, list[tuple[list[str], str, str]]] = {}
    for (name, *path), text, change in changes:
        if name not in names:
            raise ValueError(f"--set {change}: there is no {name!r} here; known are {', '.join(names)}")
        old = getattr(config, name)
        if not path:
            values[name] = _parse_value(text, old, change)
        elif is_dataclass(old):
            of_parts.setdefault(name, []).append((path, text, change))
        else:
            raise ValueError(f"--set {change}: {name!r} has no parts")
    values |= {name: _replace_values(getattr(config, name), parts) for name, parts in of_parts.items()}
    return replace(config, **values)


def _parse_value(text: str, old: Any, change: str) -> Any:
    """Parses the text as a value of the same type as the old value."""
    if isinstance(old, str):
        return text
    try:
        value = parse_json(text)
    except ValueError:
        raise ValueError(f"--set {change}: {text!r} is no JSON value") from None
    if isinstance(old, tuple) and isinstance(value, list):
        return tuple(value)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    has_same_type = isinstance(value, type(old)) and isinstance(value, bool) == isinstance(old, bool)
    if not has_same_type and not (type(old) is float and is_integer):
        raise ValueError(f"--set {change}: {text} is no {type(old).__name__}")
    return value
