"""Checks of single values, for configurations and for files that cannot be trusted."""

from collections.abc import Mapping
from typing import Any

MOST_LENGTHS = 64


class ConfigError(ValueError):
    """A configuration cannot be run. The message names the value and, where there is one, the way out."""


def show_value(value: Any) -> str:
    """A value as an error message shows it: a long one is cut, since it may come from an untrusted file."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def require_int(name: str, value: Any, low: int = 1, high: int = 2**31 - 1) -> int:
    """Returns the value if it is a whole number from `low` to `high`, else raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, got {show_value(value)}")
    return value


def require_number(name: str, value: Any, low: float = 0.0) -> float:
    """Returns the value if it is a finite number above `low`, else raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= 1e30:
        raise ConfigError(f"{name} must be a number above {low:g}, got {show_value(value)}")
    return float(value)


def require_range(name: str, value: Any, low: float, high: float) -> float:
    """Returns the value if it is a number from `low` to `high`, else raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, got {show_value(value)}")
    return float(value)


def require_object(name: str, value: Any) -> Mapping[str, Any]:
    """Returns the value if it is a JSON object, an empty one for None, else raises ConfigError."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be an object, got {show_value(value)}")
    return value or {}


def require_ids(name: str, value: Any, vocab_size: int = 2**31) -> tuple[int, ...]:
    """Returns the token ids, given as one id or as a list of them, else raises ConfigError."""
    ids = value if isinstance(value, list | tuple) else (value,)
    return tuple(require_int(name, token, 0, vocab_size - 1) for token in ids)


def require_lengths(name: str, value: Any) -> tuple[int, ...]:
    """Returns the lengths, shortest first, if the value is a list of whole numbers above 0, else raises ConfigError."""
    if not isinstance(value, list | tuple) or len(value) > MOST_LENGTHS:
        raise ConfigError(f"{name} must be a list of at most {MOST_LENGTHS} lengths, got {show_value(value)}")
    return tuple(sorted({require_int(name, length) for length in value}))
