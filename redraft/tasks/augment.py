"""Variants of texts for training sets: some spans are noise, the rest is pinned, and the page settles another way.

    texts -> [1 which spans] -> jobs, a text and a seed each -> [2 all pages of many jobs at once] -> variants that differ

Spans are runs of words at random, or what an expression matches; what another expression matches stays. A variant has as
many tokens as its text. Everything is a function of the seed, so a run that was cut off goes on where it was.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from redraft.config import SamplerConfig
from redraft.engine import Engine, Request
from redraft.tasks.edit import Span, Tokens, add_page, applied, changes_of, fits, start_of
from redraft.tokenizer.tokenizer import Tokenizer

AT_ONCE = 16  # variants in work together
LONGEST = 4  # words of a span at random
SEEDS = 1 << 16  # between the seeds of two texts


@dataclass(frozen=True)
class Plan:
    """How variants are made."""

    share: float = 0.3  # of a text's words, where no expression chooses
    regex: str | None = None  # what is to be another
    keep: str | None = None  # what is not
    count: int = 1  # variants of a text
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"the share of words that become holes is above 0 and at most 100%, got {100 * self.share:g}%")
        if self.count < 1:
            raise ValueError(f"there must be at least 1 variant of a record, got {self.count}")
        for pattern in (self.regex, self.keep):
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None

    def seeds(self, number: int) -> range:
        """Of the variants of one text."""
        first = self.seed + number * SEEDS
        return range(first, first + self.count)


@dataclass(frozen=True)
class Variant:
    """A text that has become another."""

    number: int  # of the text
    text: str
    spans: tuple[Span, ...]  # of the old text, what was open
    seed: int
    tokens: int


# 1. Spans


def matches(pattern: str | None, text: str) -> list[Span]:
    """What an expression matches, nothing but something."""
    return [found.span() for found in re.finditer(pattern, text) if found.end() > found.start()] if pattern else []


def spans(text: str, plan: Plan, seed: int) -> list[Span]:
    """What becomes another, in order, none of it kept."""
    kept = matches(plan.keep, text)
    if plan.regex is not None:
        found = matches(plan.regex, text)
    else:
        found = _words(text, plan.share, random.Random(f"{plan.seed} {seed}"))
    return [span for span in found if not any(span[0] < b and a < span[1] for a, b in kept)]


def _words(text: str, share: float, chance: random.Random) -> list[Span]:
    """Runs of words at random, up to a share of all words."""
    words = [found.span() for found in re.finditer(r"\w+", text)]
    wanted, taken = round(share * len(words)), set[int]()
    while len(taken) < wanted:
        first = chance.randrange(len(words))
        taken.update(range(first, min(first + chance.randint(1, LONGEST), len(words), first + wanted - len(taken))))
    return [words[at] for at in sorted(taken)]


# 2. Pages


def variants(
    engine: Engine, tokenizer: Tokenizer, texts: Sequence[tuple[int, str]], cfg: SamplerConfig, plan: Plan
) -> Iterator[list[Variant]]:
    """For some numbered texts, one after the other, the variants that differ from it and from one another."""
    waiting = [(number, text, seed) for number, text in texts for seed in plan.seeds(number)]
    found: dict[int, dict[str, Variant]] = {number: {} for number, _ in texts}
    for begin in range(0, len(waiting), AT_ONCE):
        jobs = [_Job(tokenizer, *one, plan) for one in waiting[begin : begin + AT_ONCE]]
        _run(engine, tokenizer, jobs, cfg)
        for job in jobs:
            text = applied(job.text, changes_of(tokenizer, job.tokens, job.new))
            if text != job.text:
                one = Variant(job.number, text, job.spans, job.seed, len(job.new))
                found[job.number].setdefault(text, one)
    for number, _ in texts:
        yield list(found[number].values())


def check(engine: Engine, tokenizer: Tokenizer, text: str) -> None:
    """Refuses a text that cannot be made another."""
    fits(engine.model, len(start_of(tokenizer)), len(Tokens(tokenizer, text).ids))


class _Job:
    """A text on its way to be another."""

    def __init__(self, tokenizer: Tokenizer, number: int, text: str, seed: int, plan: Plan) -> None:
        self.number, self.text, self.seed = number, text, seed
        self.tokens, self.spans = Tokens(tokenizer, text), tuple(spans(text, plan, seed))
        self.open, self.new = self.tokens.touched(self.spans, text), list(self.tokens.ids)
        self.open -= self.tokens.touched(matches(plan.keep, text), text)


def _run(engine: Engine, tokenizer: Tokenizer, jobs: Sequence[_Job], cfg: SamplerConfig) -> None:
    """Page after page of all jobs."""
    size, marks, start = cfg.canvas_length, tokenizer.ids_without_text(engine.model.config.vocab_size), start_of(tokenizer)
    for begin in range(0, max((len(job.new) for job in jobs), default=0), size):
        requests: dict[Request, _Job] = {}
        try:
            for job in jobs:
                page = job.new[begin : begin + size]
                chosen = {at for at in range(len(page)) if begin + at in job.open}
                if chosen:
                    before = [*start, *job.new[:begin]]
                    requests[add_page(engine, before, page, chosen, cfg, marks, job.seed + begin)] = job
            ends = engine.run(list(requests))
        finally:
            for request in requests:
                engine.cancel(request)
        for request, job in requests.items():
            job.new[begin : begin + size] = ends[request].ids_BT[0].tolist()
