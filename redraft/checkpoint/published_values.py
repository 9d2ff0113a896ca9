"""Values of published JSON files: the first that is there, the required, and those that redraft runs."""

from collections.abc import Mapping
from typing import Any

from redraft.config import ConfigError, show_value


def require_value(raw: Mapping[str, Any], name: str, source: str) -> Any:
    """Returns the value of a key that must be there."""
    if raw.get(name) is None:
        raise ConfigError(f"{source} has no value for {name}, and redraft assumes none")
    return raw[name]


def first_value(*values: Any) -> Any:
    """Returns the first value that is not None."""
    return next(value for value in values if value is not None)


def refuse_variants(text: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]], source: str) -> None:
    """Refuses settings that would silently change the mathematics."""
    for name, values in allowed.items():
        if text.get(name) not in values:
            runs = "redraft does not read it" if values == (None,) else f"redraft runs {values[-1]!r} only"
            raise ConfigError(f"{source}: {name} is {show_value(text[name])}; {runs}")
