"""SamplerConfig: how tokens are generated."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from redraft.config.values import (
    ConfigError,
    require_ids,
    require_int,
    require_lengths,
    require_number,
    require_range,
    show_value,
)

COLDEST_TEMPERATURE_SCALE = 0.02  # of the checkpoint's schedule; a temperature of 0 means this
CHECKS = ("off", "checked", "exact")
DEFAULT_EDIT_STRENGTH = 0.3  # share of the tokens that an edit may replace: the default in Python, CLI and server
AUTO = "auto"  # in place of a canvas length: chosen for the answer
AUTO_LENGTHS = (32, 64, 128)  # that a checkpoint is given on request if it was trained at one length only
MAX_DRAFT_LENGTH = 64
MAX_SPREAD = 4096  # a step takes time in proportion, and a canvas is no longer


def parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Token ids with the numbers added to their logits, from pairs or from a JSON object, whose keys are strings."""
    pairs = value.items() if isinstance(value, Mapping) else value
    message = f"logit_bias maps token ids to numbers from -100 to 100, got {show_value(value)}"
    try:
        bias = tuple((int(token), float(number)) for token, number in pairs)
        is_whole = all(float(token) == int(token) for token, _ in pairs)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(message) from None
    if not is_whole or any(token < 0 or not -100 <= number <= 100 for token, number in bias):
        raise ConfigError(message)
    for token, count in Counter(token for token, _ in bias).most_common(1):
        if count > 1:
            raise ConfigError(f"{message}: give one number for token {token}")
    return bias


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How tokens are generated. The defaults are those of the released checkpoint.

    The first part says how a canvas is denoised and when it has settled. The second part is for checked and exact mode, in
    which the causal half verifies what the denoiser drafts (docs/verified.md).
    """

    canvas_length: int = 256
    canvas_lengths: tuple[int, ...] = ()  # at which the denoiser was trained: a short answer takes a short canvas
    max_new_tokens: int = 256
    max_steps: int = 48
    entropy_bound: float = 0.1  # nats: summed entropy of the tokens one step accepts, without the last one's own
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1  # steps for which the argmax of the canvas must not change
    confidence_threshold: float = 0.005  # nats: the mean entropy must be strictly below this
    settle_prefix: bool = False  # positions that settle from the left are final at once, before the whole canvas settles
    eos_token_ids: tuple[int, ...] = (1, 106, 50)
    pad_token_id: int = 0
    # For small models, whose entropies exceed the bound (see docs/tour.md). Off for published checkpoints.
    quota: bool = False  # a step accepts at least its share of the open positions, whatever their entropy
    accept_at_end: bool = False  # the last step accepts every position
    spread: int = 0  # of the unsure positions within this distance, a step accepts only the surest; 0 turns it off
    stops_last: bool = False  # stop tokens are accepted after all others
    # Checked and exact mode.
    check: str = "off"  # "checked": drafts that the causal half finds likely are accepted; "exact": only its own choices
    tolerance: float = 2.0  # nats: checked mode accepts a token at most this much less likely than the likeliest one
    draft_length: int = 7  # tokens that one forward drafts; 0: none, so tokens are generated autoregressively
    draft_steps: int = 4  # checked mode: denoising steps that draft a whole canvas before it is verified
    draft_token: int | None = None  # fills the canvases of drafts, if the model was trained so; None: noise
    temperature: float = 1.0  # of the causal half; 0 takes the likeliest token
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, number added to its logit)

    def __post_init__(self) -> None:
        for name in ("canvas_length", "max_new_tokens", "max_steps"):
            require_int(name, getattr(self, name))
        object.__setattr__(self, "canvas_lengths", require_lengths("canvas_lengths", self.canvas_lengths))
        require_int("stability_threshold", self.stability_threshold, 0)
        require_ids("pad_token_id", self.pad_token_id)
        object.__setattr__(self, "eos_token_ids", require_ids("eos_token_ids", self.eos_token_ids))  # JSON gives a list
        require_number("entropy_bound", self.entropy_bound)
        require_number("confidence_threshold", self.confidence_threshold)
        if self.t_min != 0 or isinstance(self.t_min, bool):
            require_number("t_min", self.t_min)
        require_number("temperature (t_max)", self.t_max, 1e-4)  # below this, soft-capped logits overflow
        if self.t_max < self.t_min:
            raise ConfigError(f"t_max must not be below t_min, got {self.t_max} and {self.t_min}")
        require_int("spread", self.spread, 0, MAX_SPREAD)
        for name in ("settle_prefix", "quota", "accept_at_end", "stops_last"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        self._check_verification()

    def _check_verification(self) -> None:
        """Refuses nonsense among the settings of checked and exact mode."""
        if self.check not in CHECKS:
            raise ConfigError(f"check must be off, checked or exact, got {show_value(self.check)}")
        for name in ("tolerance", "temperature"):
            require_range(name, getattr(self, name), 0, 1e4)
        for name in ("top_p", "min_p"):
            require_range(name, getattr(self, name), 0, 1)
        if self.top_p == 0:
            raise ConfigError(f"top_p must be above 0, or no token is left, got {self.top_p!r}")
        require_range("repetition_penalty", self.repetition_penalty, 0.01, 100)
        require_int("top_k", self.top_k, 0)
        require_int("draft_length", self.draft_length, 0, MAX_DRAFT_LENGTH)
        require_int("draft_steps", self.draft_steps, 1)
        if self.draft_token is not None:
            require_ids("draft_token", self.draft_token)
        object.__setattr__(self, "logit_bias", parse_logit_bias(self.logit_bias))

    @property
    def max_canvases(self) -> int:
        """The number of canvases that hold max_new_tokens; the last one may be filled only in part."""
        return -(-self.max_new_tokens // self.canvas_length)

    def fit_canvas(self, tokens: int, room: int) -> "SamplerConfig":
        """Chooses the canvas for an answer of at most `tokens`: the shortest trained length that holds it.

        The canvases of an answer must fit the `room` that the prompt leaves. Where no length does both, it is the longest
        that fits, and the settings stay as they are where none fits.
        """
        shorter = [length for length in self.canvas_lengths if length < self.canvas_length]
        choices = [replace(self, canvas_length=length) for length in (*shorter, self.canvas_length)]
        fitting = [cfg for cfg in choices if cfg.max_answer <= room]
        holding = [cfg for cfg in fitting if cfg.canvas_length >= tokens]
        return (holding[:1] or fitting[-1:] or [self])[0]

    @property
    def max_answer(self) -> int:
        """Positions that an answer may take: whole canvases, or just max_new_tokens in exact mode, which has none."""
        return self.max_new_tokens if self.check == "exact" else self.max_canvases * self.canvas_length

    @property
    def for_drafts(self) -> "SamplerConfig":
        """Checked mode: the settings with which a whole canvas is drafted before it is verified. Nothing of it is final."""
        return replace(self, max_steps=self.draft_steps, settle_prefix=False)

    @property
    def without_filters(self) -> "SamplerConfig":
        """The settings with which the causal half's drafts are sampled: top-k, top-p and min-p would cost time only."""
        return replace(self, top_k=0, top_p=1.0, min_p=0.0)

    def changed(self, **changes: Any) -> "SamplerConfig":
        """Returns a copy with some settings replaced. A value of None leaves a setting unchanged."""
        names = {f.name for f in fields(self)}
        if unknown := sorted(set(changes) - names):
            raise ConfigError(f"unknown sampler setting {unknown[0]!r}; known are {', '.join(sorted(names))}")
        return replace(self, **{k: v for k, v in changes.items() if v is not None})

    def with_temperature(self, scale: float | None) -> "SamplerConfig":
        """Scales the temperature schedule: 1.0 (or None) leaves the checkpoint's own schedule unchanged.

        A scale of 0 asks for greedy sampling. It becomes COLDEST_TEMPERATURE_SCALE, as the sampler divides by temperature.
        """
        if scale is None:
            return self
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale <= 1e30:
            raise ConfigError(f"temperature scales the checkpoint's schedule and must be a number from 0 up, got {scale!r}")
        if scale == 1:
            return self
        scale = max(scale, COLDEST_TEMPERATURE_SCALE)
        return replace(self, t_min=self.t_min * scale, t_max=self.t_max * scale)
