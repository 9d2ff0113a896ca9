"""Keywords of the Writer's methods, so that type checkers, editors and notebooks know them.

The records are SamplerConfig and GenerationOptions; a test compares their fields with the keywords here.
"""

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, get_type_hints

from redraft.constraints.constraints import Constraints
from redraft.engine import Replay
from redraft.tasks.infill import Watch

Method = TypeVar("Method", bound=Callable[..., Any])


class SamplerKeywords(TypedDict, total=False):
    """Fields of SamplerConfig. `temperature` scales the checkpoint's schedule where the causal half does not check."""

    canvas_length: int | str
    canvas_lengths: Sequence[int]
    max_new_tokens: int
    max_steps: int
    entropy_bound: float
    t_min: float
    t_max: float
    stability_threshold: int
    confidence_threshold: float
    settle_prefix: bool
    eos_token_ids: Sequence[int]
    pad_token_id: int
    quota: bool
    accept_at_end: bool
    spread: int
    stops_last: bool
    check: str | None
    tolerance: float
    draft_length: int
    draft_steps: int
    draft_token: int | None
    temperature: float | None
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    logit_bias: Mapping[Any, float] | Sequence[tuple[int, float]]


class GenerationKeywords(SamplerKeywords, total=False):
    """Fields of GenerationOptions and of SamplerConfig."""

    max_tokens: int | None
    seed: int | None
    best_of: int
    constraints: Constraints | None
    regex: str | None
    schema: Any
    choices: Sequence[str] | None
    structure: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    think: bool
    seconds: float | None
    stop: threading.Event | None
    draft: str | Sequence[int] | None
    drafts: bool
    replay: Replay | None
    candidates: int
    sampler: Mapping[str, Any]


class FillKeywords(SamplerKeywords, total=False):
    """Keywords of `Writer.fill` and fields of SamplerConfig."""

    prefix: str | None
    suffix: str | None
    context: str
    longest: int
    seed: int | None
    seconds: float | None
    watch: Watch | None
    stop: threading.Event | None


class SudokuKeywords(TypedDict, total=False):
    """Keywords of `Writer.solve_sudoku`; beside its own, those of SamplerConfig that a board needs."""

    canvases: int
    check: bool
    max_steps: int
    entropy_bound: float
    temperature: float | None
    stability_threshold: int
    confidence_threshold: float


def list_keywords(keywords: type) -> Callable[[Method], Method]:
    """A decorator: the signature shows the keys of a TypedDict in place of `**keywords`, for `help` and notebooks.

    Editors read the annotation `Unpack[...]`; IPython and `help` read the signature.
    """

    def decorate(method: Method) -> Method:
        signature = inspect.signature(method)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        known = {parameter.name for parameter in named}
        listed = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in get_type_hints(keywords).items()
            if name not in known
        ]
        method.__signature__ = signature.replace(parameters=[*named, *listed])  # type: ignore[attr-defined]
        return method

    return decorate
