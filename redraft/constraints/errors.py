"""Errors of the constraints. A server answers them with 400."""

from typing import Any

MAX_SHOWN = 60  # characters of a value in an error message


class PatternError(ValueError):
    """A pattern or schema that cannot constrain an answer; the message says why."""


class BudgetError(PatternError):
    """A pattern or schema that would take more work or memory than one request may use; the message names the limit."""


class UnboundedError(PatternError):
    """A schema that no finite automaton expresses; a grammar from left to right may."""


def shorten(value: Any) -> str:
    """A value as an error message shows it: the first characters of its `repr`, on one line."""
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_SHOWN else value[: MAX_SHOWN - 3] + "...")
    if isinstance(value, list | tuple):
        value = value[:MAX_SHOWN]  # `repr` of the whole list may take seconds
    elif isinstance(value, dict):
        value = dict(list(value.items())[:MAX_SHOWN])
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with thousands of digits, a value that is nested deeply
        return f"a value of the type {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
