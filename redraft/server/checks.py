"""Checked and exact mode on the wires: the mode of a request, the settings of the causal half, and the counts of drafts.

With check "off" the causal half picks no tokens, so its settings do not apply: the response names them. This file knows
nothing of HTTP.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from redraft.config import SamplerConfig
from redraft.diffusion.generate import Stats
from redraft.server.errors import BadRequestError
from redraft.server.schema import CausalOptions

# Settings of the causal half, and the values that change nothing.
NEUTRAL: dict[str, tuple[float, ...]] = {
    "tolerance": (),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
}
UNSUPPORTED_PENALTIES = ("frequency_penalty", "presence_penalty")
SMALLEST_TOP_P = 1e-9  # keeps the likeliest token only, as a client means with 0


def choose_check(sampler: SamplerConfig, check: str | None, *, has_draft: bool = False) -> str:
    """The mode of a request: the client's, else the checkpoint's. Exact mode takes no draft, so a draft turns it off."""
    if check is not None:
        return check
    return "off" if has_draft and sampler.check == "exact" else sampler.check


def causal_settings(options: CausalOptions) -> dict[str, Any]:
    """The given settings of the causal half, by the names of SamplerConfig."""
    penalty = options.repetition_penalty
    settings = {
        "tolerance": options.tolerance,
        "top_p": None if options.top_p is None else max(options.top_p, SMALLEST_TOP_P),
        "top_k": None if options.top_k is None else max(options.top_k, 0),
        "min_p": options.min_p,
        "repetition_penalty": penalty if penalty is not None else getattr(options, "repeat_penalty", None),
    }
    return {name: value for name, value in settings.items() if value is not None}


def ignored_settings(options: CausalOptions, check: str) -> list[str]:
    """The names of given settings of the causal half that this mode does not apply."""
    given = [name for name, neutral in NEUTRAL.items() if getattr(options, name, None) not in (None, *neutral)]
    if check == "off":
        return given
    return [name for name in given if name == "tolerance" and check == "exact"]


def warnings_of(options: CausalOptions, check: str) -> list[str]:
    """A sentence for each option that was not applied."""
    mode = "a canvas" if check == "off" else f"check {check!r}"
    warnings = [f"{name} has no meaning for {mode} and was not applied" for name in ignored_settings(options, check)]
    penalties = [name for name in UNSUPPORTED_PENALTIES if getattr(options, name, None) not in (None, 0)]
    return warnings + [f"{name} has no meaning for {mode} and was not applied" for name in penalties]


def temperature_settings(sampler: SamplerConfig, temperature: float | None) -> dict[str, Any]:
    """The sampler settings of a client's temperature: literal if the causal half decides, else a scale on the schedule."""
    if sampler.check != "off":
        return {} if temperature is None else {"temperature": temperature}
    scaled = sampler.with_temperature(temperature)
    return {} if scaled == sampler else {"t_min": scaled.t_min, "t_max": scaled.t_max}


def step_settings(check: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a canvas. In checked mode, max_steps are the steps that draft it."""
    if check == "checked" and settings.get("max_steps") is not None:
        return {**settings, "draft_steps": settings["max_steps"]}
    return dict(settings)


def require_unchecked(check: str | None, what: str) -> None:
    """Refuses a check where there is text behind the canvas, which a check from the left does not see."""
    if check not in (None, "off"):
        message = f"{what} has text after it, which a check from the left does not see: leave check out, got {check!r}"
        raise BadRequestError(message, "check")


def verification_fields(stats: Sequence[Stats]) -> dict[str, Any]:
    """Which mode was used, and how many tokens were drafted, accepted and corrected in it."""
    new_tokens = sum(row.new_tokens for row in stats)
    forwards = sum(row.forwards for row in stats)
    counts = {name: sum(getattr(row, name) for row in stats) for name in ("rounds", "drafted", "accepted", "corrected")}
    return {
        "check": stats[0].check if stats else "off",
        **counts,
        "tokens_per_forward": round(new_tokens / max(1, forwards), 3),
    }
