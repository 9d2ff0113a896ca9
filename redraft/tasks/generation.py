"""Options of a generation, and the small conversions around one: prompts, seeds, stop tokens.

`GenerationOptions` is the record that Python (`Writer.write`, `chat`, `stream`), the command line and the server share.
"""

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from redraft.config import AUTO, AUTO_LENGTHS, ConfigError, SamplerConfig, require_int, require_number, show_value
from redraft.constraints.budget import Budget
from redraft.constraints.constraints import Constraints
from redraft.constraints.errors import PatternError, shorten
from redraft.constraints.pattern_compiler import Pattern
from redraft.constraints.token_automaton import TokenAutomaton
from redraft.diffusion import rng
from redraft.engine import Replay
from redraft.tokenizer.tokenizer import Message, Tokenizer

Prompt = str | Sequence[int] | Sequence[Message]  # a text to continue, its tokens, or a conversation to answer
MAX_BEST_OF = 64
DECISION_WORK = 100  # units of the budget for each position of a choice's canvas
PATTERNS = ("regex", "schema", "choices", "structure")  # options that constrain the whole answer; at most one of them is set


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How one answer is generated. None means: as the checkpoint has it."""

    max_tokens: int | None = None
    seed: int | None = None  # None: a new random seed, which the statistics report
    check: str | None = None  # "off", "checked" or "exact": whether the causal half verifies what the denoiser drafts
    temperature: float | None = None  # of the causal half; with check "off", a factor of the checkpoint's schedule
    best_of: int = 1  # answers that are generated; the one that the causal half finds likeliest is returned
    constraints: Constraints | None = None
    regex: str | None = None  # the whole answer matches this regular expression
    schema: Any = None  # the answer is JSON of this schema: a dictionary, or its JSON text
    choices: Sequence[str] | None = None  # the answer is one of these strings
    structure: Mapping[str, Any] | None = None  # the answer is made of texts, patterns and schemas: constraints/structure.py
    tools: Sequence[Mapping[str, Any]] | None = None  # functions that the model may call; conversations only
    think: bool = False  # lets the model reason before it answers; conversations only
    seconds: float | None = None  # deadline: after this time the current canvas is committed and generation ends
    stop: threading.Event | None = None  # cancels the request once it is set
    draft: str | Sequence[int] | None = None  # text or tokens at the start of the first canvas, in place of noise
    drafts: bool = True  # False: drafts carry no text, which saves decoding it
    replay: Replay | None = None  # resumes an earlier run, with its interventions
    candidates: int = 0  # drafts carry the probabilities of this many most likely tokens at each position
    sampler: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplerConfig; canvas_length may be "auto"

    def __post_init__(self) -> None:
        patterns = [name for name in PATTERNS if getattr(self, name) is not None]
        if len(patterns) > 1:
            raise PatternError(f"an answer obeys one of {', '.join(PATTERNS)}, got {' and '.join(patterns)}")
        if self.choices is not None:
            check_choices(self.choices)
        require_int("best_of", self.best_of, 1, MAX_BEST_OF)
        require_int("candidates", self.candidates, 0)
        choose_seed(self.seed)
        check_deadline(self.seconds, self.stop)
        for name, kind, article in (("constraints", Constraints, "redraft.Constraints"), ("replay", Replay, "a Replay")):
            if not isinstance(getattr(self, name), kind | None):
                raise ConfigError(f"{name} must be {article} or None, got {show_value(getattr(self, name))}")
        for name in ("think", "drafts"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {show_value(getattr(self, name))}")
        if not isinstance(self.sampler, Mapping):
            raise ConfigError(f"sampler must be a dictionary of sampler settings, got {show_value(self.sampler)}")
        if self.draft is not None and not isinstance(self.draft, str) and not _is_token_list(self.draft):
            raise ConfigError(f"draft must be a text or a list of token ids, got {show_value(self.draft)}")

    @classmethod
    def from_keywords(cls, options: "GenerationOptions | None" = None, **keywords: Any) -> "GenerationOptions":
        """Builds the record from keyword arguments, on top of `options`. Other names are fields of SamplerConfig."""
        if not isinstance(options, cls | None):
            raise ConfigError(
                f"options must be a GenerationOptions, got {show_value(options)}: give single options as keywords"
            )
        base = options if options is not None else cls()
        extra = keywords.pop("sampler", {})
        if not isinstance(extra, Mapping):
            raise ConfigError(f"sampler must be a dictionary of sampler settings, got {show_value(extra)}")
        names = {option.name for option in fields(cls)} - {"sampler"}
        changes = {name: keywords.pop(name) for name in names & keywords.keys()}
        sampler = {**base.sampler, **extra, **keywords}
        return replace(base, **changes, sampler=sampler)

    def sampler_config(self, base: SamplerConfig) -> SamplerConfig:
        """Applies temperature, max_tokens and sampler fields to a checkpoint's settings; a field given by name wins.

        A run that is resumed or steered is not checked unless the caller insists.
        """
        is_steered = self.replay is not None and self.replay.is_steered
        base = base.changed(check="off" if self.check is None and is_steered else self.check)
        base = base.changed(settle_prefix=False if is_steered else None)
        settings = {"max_new_tokens": self.max_tokens, **self.sampler}
        if settings.get("canvas_length") == AUTO:
            settings["canvas_length"] = None
            base = base.changed(canvas_lengths=base.canvas_lengths or AUTO_LENGTHS)
        if base.changed(check=self.sampler.get("check")).check == "off":
            return base.with_temperature(self.temperature).changed(**settings)
        return base.changed(**{"temperature": self.temperature, **settings})

    @property
    def chooses_canvas(self) -> bool:
        """The length of canvases may be chosen: the caller has given none, and no draft."""
        return self.sampler.get("canvas_length") in (None, AUTO) and not self.draft

    def fit_canvas(
        self, cfg: SamplerConfig, prompt_tokens: int, context: int, constraints: Constraints | None
    ) -> SamplerConfig:
        """Chooses the canvas length for a prompt, unless the caller has: from max_tokens, the constraints and the context.

        Only lengths at which the model was trained are chosen, or those of "auto" if the caller gave that. A draft keeps the
        checkpoint's length: what it has behind the answer is context.
        """
        if not self.chooses_canvas or not cfg.canvas_lengths:
            return cfg
        tokens = cfg.max_new_tokens
        if self.replay is not None and self.replay.canvases:
            return cfg.fit_canvas(len(self.replay.canvases[0]), context - prompt_tokens)
        if constraints is not None and constraints.automaton is not None:
            longest = constraints.automaton.longest_match(min(tokens, cfg.canvas_length))
            needed = longest + 1 if longest is not None else tokens  # and a stop token
            tokens = min(tokens, max([needed, *(position + 1 for position in constraints.pins)]))
        return cfg.fit_canvas(tokens, context - prompt_tokens)

    @property
    def pattern(self) -> Pattern | None:
        """The pattern that one of PATTERNS gives; None without any of them."""
        given = {name: getattr(self, name) for name in PATTERNS if getattr(self, name) is not None}
        return Pattern(**given) if given else None


def check_choices(choices: Sequence[str]) -> None:
    """Refuses anything but a list of different, non-empty strings."""
    is_list = isinstance(choices, list | tuple)
    if is_list:
        Budget().check_length(2 * len(choices) - 1, "the list of choices")  # a character and a separator at the least
    if not is_list or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise PatternError(f"choices must be a list of non-empty strings, got {shorten(choices)}")
    if len(set(choices)) < len(choices):
        raise PatternError(f"choices must differ from one another, got {shorten(choices)}")


def constrain_choices(
    automata: Sequence[TokenAutomaton], length: int, vocab_size: int, stops: Sequence[int]
) -> list[Constraints]:
    """One pattern for each choice's automaton, on a canvas of this length."""
    budget = Budget()
    patterns = []
    for automaton in automata:
        budget.spend(length * (DECISION_WORK + automaton.operations), "the list of choices")
        constraints = Constraints(automaton=automaton)
        constraints.validate(vocab_size, length, stops)
        patterns.append(constraints)
    return patterns


def is_text_prompt(prompt: Prompt) -> bool:
    """Whether a prompt is a text to continue (a string or token ids) and not a conversation."""
    return isinstance(prompt, str) or (_is_token_list(prompt) and len(prompt) > 0)


def _is_token_list(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
    return is_list and all(isinstance(token, int) and not isinstance(token, bool) for token in value)


def require_text(name: str, value: Any) -> str:
    """Returns the value if it is a string, else raises ConfigError."""
    if not isinstance(value, str):
        way_out = ": decode it first" if isinstance(value, bytes | bytearray) else ""
        raise ConfigError(f"{name} must be a string, got {show_value(value)}{way_out}")
    return value


def check_deadline(seconds: float | None, stop: threading.Event | None) -> None:
    """Refuses a deadline that is no positive number, and a `stop` that cannot be set."""
    if seconds is not None:
        require_number("seconds", seconds)
    if stop is not None and not isinstance(stop, threading.Event):
        raise ConfigError(
            f"stop must be a threading.Event, which cancels the request once it is set, got {show_value(stop)}"
        )


def to_messages(prompt: Prompt) -> Sequence[Message]:
    """A conversation; a string becomes its only user message."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray)
    if not is_list or not (isinstance(prompt, str) or all(isinstance(message, Mapping) for message in prompt)):
        raise ConfigError(
            "a prompt is a string, a list of token ids or a list of messages "
            f'({{"role": "user", "content": "..."}}), got {show_value(prompt)}'
        )
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt  # type: ignore[return-value]


def new_seed() -> int:
    """A random seed. Statistics report it, so that the answer can be reproduced."""
    return secrets.randbits(32)


def choose_seed(seed: int | None) -> int:
    """The seed that was given, or a new one."""
    if seed is None:
        return new_seed()
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed must be a whole number, got {show_value(seed)}")
    return seed


def cut_at_stop(ids: Sequence[int], cfg: SamplerConfig, max_tokens: int) -> tuple[list[int], bool]:
    """The tokens of a canvas that belong to the answer, and whether a stop token ended it.

    They end before the first stop token, and there are at most `max_tokens`.
    """
    for position, token in enumerate(ids[:max_tokens]):
        if token in cfg.eos_token_ids:
            return list(ids[:position]), True
    return list(ids[:max_tokens]), False


def start_from_draft(
    seeds: Sequence[int], draft: str | Sequence[int] | None, tokenizer: Tokenizer, cfg: SamplerConfig, vocab_size: int
) -> Tensor | None:
    """First canvases, ids_BC, that begin with the draft's tokens; noise fills the rest. None without a draft."""
    if not draft:
        return None
    canvas_BC = rng.draws(list(seeds), 0, "cpu").noise(0, cfg.canvas_length, vocab_size)
    if isinstance(draft, str):
        draft = tokenizer.encode(draft[: cfg.canvas_length * tokenizer.longest_token])
    ids = draft[: cfg.canvas_length]
    canvas_BC[:, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    return canvas_BC
