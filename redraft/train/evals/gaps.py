"""Gaps in ordinary text: 4 to 16 tokens are removed and filled again, by canvases and left to right, with one model.

Canvases see the text on both sides of a gap. Left to right, the model sees the text before it, and writes as many tokens,
greedily. Both are scored alike: which tokens are those of the text, and how likely the causal half finds the text after the
gap, given the text before it and what fills it.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from redraft.config import SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.engine import Engine
from redraft.model.backbone import Backbone
from redraft.tasks.edit import add_canvas_request
from redraft.tasks.infill import sequence_logprobs
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.documents import Document, to_documents
from redraft.train.records import DataConfig, Source, scan_records

SHORTEST, LONGEST = 4, 16  # tokens of a gap
LEAST_CONTEXT = 8  # tokens before a gap, and after it
MOST_BEFORE = 256
MOST_AFTER = 32
BATCH = 16  # gaps at a time


class TokenGap(NamedTuple):
    """A text with a part removed, as tokens."""

    before: list[int]
    part: list[int]
    after: list[int]


@dataclass(frozen=True)
class GapScore:
    """How well one way fills gaps."""

    exact_tokens: float  # share of the removed tokens that came back, each at its place
    exact_gaps: float  # share of the gaps that came back as a whole
    nats_after: float  # negative log-likelihood of a token after a gap: lower is better

    def __str__(self) -> str:
        return (
            f"{self.exact_tokens:.1%} of the tokens exact, {self.exact_gaps:.1%} of the gaps; "
            f"the text after it: {self.nats_after:.3f} nats a token"
        )


def read_documents(source: Source, tokenizer: Tokenizer, stop: int) -> Iterator[Document]:
    """The documents of a source, in the order of its files."""
    for file in source.files:
        for number, item in enumerate(scan_records(file, DataConfig.separator)):
            if source.has(number):
                yield from to_documents(item.record, item.where, tokenizer, stop)


def remove_spans(documents: Iterator[Document], stops: Sequence[int], context: int, seed: int = 0) -> Iterator[TokenGap]:
    """Removes one span of each document that is long enough, never a stop token or a part of the prompt."""
    most_before = min(MOST_BEFORE, context - LONGEST - MOST_AFTER - 1)
    for number, document in enumerate(documents):
        rng = random.Random(f"{seed} {number}")
        end = next((index for index, token in enumerate(document.answer) if token in stops), len(document.answer))
        ids = [*document.prompt, *document.answer[:end]]
        length = rng.randint(SHORTEST, LONGEST)
        first = max(LEAST_CONTEXT, len(document.prompt))
        last = len(ids) - LEAST_CONTEXT - length
        if last >= first:
            start = rng.randint(first, last)
            after = ids[start + length :][:MOST_AFTER]
            yield TokenGap(ids[:start][-most_before:], ids[start : start + length], after)


def score_gaps(
    model: Backbone,
    tokenizer: Tokenizer,
    sampler: SamplerConfig,
    gaps: Sequence[TokenGap],
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, GapScore]:
    """The scores of filling by canvases and left to right; and of the removed tokens themselves, as a bound."""
    if not gaps:
        least = 2 * LEAST_CONTEXT + LONGEST
        raise ValueError(f"no text is long enough to remove something from it: give texts of {least} tokens or more")
    engine = Engine(model)
    forbidden = tuple({*tokenizer.ids_without_text(model.config.vocab_size), *sampler.eos_token_ids})
    greedy = sampler.changed(check="exact", draft_length=0, temperature=0.0)
    filled: dict[str, list[list[int]]] = {"canvases": [], "left_to_right": [], "removed": []}
    remaining = iter(gaps)
    while batch := list(islice(remaining, BATCH)):
        begin = len(filled["removed"])
        requests = []
        for number, (before, part, after) in enumerate(batch, begin):
            gap = range(len(part))
            requests.append(add_canvas_request(engine, before, [*part, *after], gap, sampler, forbidden, number))
            cfg = greedy.changed(max_new_tokens=len(part))
            requests.append(engine.add(before, cfg, seed=number, constraints=Constraints(forbidden=forbidden)))
        ends = engine.run(requests)
        ids = [ends[request].ids_BT[0].tolist() for request in requests]
        filled["canvases"] += [each[: len(gap.part)] for each, gap in zip(ids[::2], batch, strict=True)]
        filled["left_to_right"] += ids[1::2]
        filled["removed"] += [gap.part for gap in batch]
        progress(begin + len(batch))
    return {name: _score(engine, gaps, parts) for name, parts in filled.items()}


def _score(engine: Engine, gaps: Sequence[TokenGap], parts: Sequence[list[int]]) -> GapScore:
    """Compares what fills gaps with what was removed."""
    pairs = list(zip(gaps, parts, strict=True))
    same = sum(ours == theirs for gap, part in pairs for ours, theirs in zip(part, gap.part, strict=True))
    logprob = sum(sequence_logprobs(engine, [*gap.before, *part], [gap.after])[0] for gap, part in pairs)
    return GapScore(
        exact_tokens=same / sum(len(gap.part) for gap in gaps),
        exact_gaps=sum(part == gap.part for gap, part in pairs) / len(gaps),
        nats_after=-logprob / sum(len(gap.after) for gap in gaps),
    )
