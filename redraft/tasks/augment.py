"""Variants of texts for training sets: chosen spans start as noise, all other tokens are pinned, the canvas is denoised.

    texts -> [1 choose spans] -> jobs (a text and a seed) -> [2 denoise the canvases of a batch of jobs] -> variants

Spans are random runs of words, or the matches of a regular expression; matches of `keep` never change. A variant has as
many tokens as its text. Everything is a function of the seed, so an interrupted run can resume.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from redraft.config import BackboneConfig, SamplerConfig
from redraft.engine import Engine, Request
from redraft.tasks.edit import (
    Span,
    TokenizedText,
    add_canvas_request,
    apply_changes,
    check_context,
    find_changes,
    start_tokens,
)
from redraft.tokenizer.tokenizer import Tokenizer

BATCH = 16  # variants that are generated together
LONGEST_RUN = 4  # words of a random span
SEED_STRIDE = 1 << 16  # between the seeds of two texts


@dataclass(frozen=True)
class Plan:
    """Which spans are replaced, and how many variants are made."""

    share: float = 0.3  # of the words, when there is no regex
    regex: str | None = None  # its matches are replaced
    keep: str | None = None  # its matches are not
    count: int = 1  # variants per text
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"the share of words to replace must be above 0% and at most 100%, got {100 * self.share:g}%")
        if self.count < 1:
            raise ValueError(f"count must be at least 1 variant per record, got {self.count}")
        for pattern in (self.regex, self.keep):
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None

    def seeds(self, number: int) -> range:
        """The seeds of the variants of one text."""
        first = self.seed + number * SEED_STRIDE
        return range(first, first + self.count)


@dataclass(frozen=True)
class Variant:
    """A variant of a text."""

    number: int  # index of the text
    text: str
    spans: tuple[Span, ...]  # of the original text: the spans that were replaced
    seed: int
    tokens: int


# 1. Spans


def find_matches(pattern: str | None, text: str) -> list[Span]:
    """The non-empty matches of a regular expression."""
    return [match.span() for match in re.finditer(pattern, text) if match.end() > match.start()] if pattern else []


def choose_spans(text: str, plan: Plan, seed: int) -> list[Span]:
    """The spans to replace, in order, none of which overlaps a match of `keep`."""
    kept = find_matches(plan.keep, text)
    if plan.regex is not None:
        spans = find_matches(plan.regex, text)
    else:
        spans = _choose_words(text, plan.share, random.Random(f"{plan.seed} {seed}"))
    return [span for span in spans if not any(span[0] < end and start < span[1] for start, end in kept)]


def _choose_words(text: str, share: float, rng: random.Random) -> list[Span]:
    """Random runs of words, up to a share of all words."""
    words = [match.span() for match in re.finditer(r"\w+", text)]
    target = round(share * len(words))
    chosen: set[int] = set()
    while len(chosen) < target:
        first = rng.randrange(len(words))
        end = min(first + rng.randint(1, LONGEST_RUN), len(words), first + target - len(chosen))
        chosen.update(range(first, end))
    return [words[index] for index in sorted(chosen)]


# 2. Canvases


def variants(
    engine: Engine, tokenizer: Tokenizer, texts: Sequence[tuple[int, str]], cfg: SamplerConfig, plan: Plan
) -> Iterator[list[Variant]]:
    """Yields, for each numbered text, its variants: different from the text and from one another."""
    queue = [(number, text, seed) for number, text in texts for seed in plan.seeds(number)]
    made: dict[int, dict[str, Variant]] = {number: {} for number, _ in texts}
    for begin in range(0, len(queue), BATCH):
        jobs = [_Job(tokenizer, number, text, seed, plan) for number, text, seed in queue[begin : begin + BATCH]]
        _denoise_jobs(engine, tokenizer, jobs, cfg)
        for job in jobs:
            text = apply_changes(job.text, find_changes(tokenizer, job.tokens, job.new_ids))
            if text != job.text:
                variant = Variant(job.number, text, job.spans, job.seed, len(job.new_ids))
                made[job.number].setdefault(text, variant)
    for number, _ in texts:
        yield list(made[number].values())


def check_text(config: BackboneConfig, tokenizer: Tokenizer, text: str) -> None:
    """Refuses a text that does not fit the context or that holds special tokens. It needs no weights."""
    tokens = TokenizedText(tokenizer, text, config.max_position_embeddings)
    check_context(config, len(start_tokens(tokenizer)), len(tokens.ids))


class _Job:
    """One variant in work: a text, a seed, and the positions that are denoised."""

    def __init__(self, tokenizer: Tokenizer, number: int, text: str, seed: int, plan: Plan) -> None:
        self.number = number
        self.text = text
        self.seed = seed
        self.tokens = TokenizedText(tokenizer, text)
        self.spans = tuple(choose_spans(text, plan, seed))
        kept_positions = self.tokens.positions_in(find_matches(plan.keep, text), text)
        self.open_positions = self.tokens.positions_in(self.spans, text) - kept_positions
        self.new_ids = list(self.tokens.ids)


def _denoise_jobs(engine: Engine, tokenizer: Tokenizer, jobs: Sequence[_Job], cfg: SamplerConfig) -> None:
    """Denoises all jobs, canvas after canvas: the engine batches the canvases at the same place."""
    size = cfg.canvas_length
    special_tokens = tokenizer.ids_without_text(engine.model.config.vocab_size)
    start = start_tokens(tokenizer)
    for begin in range(0, max((len(job.new_ids) for job in jobs), default=0), size):
        requests: dict[Request, _Job] = {}
        try:
            for job in jobs:
                canvas = job.new_ids[begin : begin + size]
                open_positions = {index for index in range(len(canvas)) if begin + index in job.open_positions}
                if open_positions:
                    prefix = [*start, *job.new_ids[:begin]]
                    seed = job.seed + begin
                    request = add_canvas_request(engine, prefix, canvas, open_positions, cfg, special_tokens, seed)
                    requests[request] = job
            ends = engine.run(list(requests))
        finally:
            for request in requests:
                engine.cancel(request)
        for request, job in requests.items():
            job.new_ids[begin : begin + size] = ends[request].ids_BT[0].tolist()
