"""Keep-alive times as Ollama has them: how long a model stays in memory after its last request.

A number is seconds; a text has units ("10m", "1h30m", "500ms"). 0 unloads the model at once, a negative time never.
"""

import math
import re

KEEP_SECONDS = 300.0
FOREVER = math.inf
UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
NUMBER = r"[0-9]{1,12}(?:\.[0-9]{1,12})?"
PART = re.compile(rf"({NUMBER})(ns|us|µs|ms|s|m|h)")
DURATION = re.compile(rf"([+-]?)(?:({NUMBER})|(?:{PART.pattern})+)", re.ASCII)


def parse_keep_alive(value: str | float) -> float:
    """The seconds of a keep-alive time; FOREVER if it is negative. Raises ValueError."""
    if isinstance(value, str):
        match = DURATION.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"a keep-alive time is seconds, or a duration such as 10m or 1h30m, got {value[:60]!r}")
        plain = match[2]
        seconds = float(plain) if plain else sum(float(number) * UNITS[unit] for number, unit in PART.findall(value))
        value = -seconds if match[1] == "-" else seconds
    return FOREVER if value < 0 else float(value)
