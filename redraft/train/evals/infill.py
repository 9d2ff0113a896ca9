"""Infilling: a part of a text is removed and predicted again, in three ways.

    lines, words    one line of each Python function; one to four words of a line
    sentences       one sentence of each story
    single, spans   HumanEval's infilling tasks; the completed function is run against its tests (sandbox.py)

"known" infills by diffusion with the length of the gap known, "unknown" finds the length too, "hidden" generates greedily
and autoregressively with the same weights, which do not see the text after the gap. Everything is seeded.
"""

import difflib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from redraft.config import SamplerConfig
from redraft.engine import Engine
from redraft.model.backbone import Backbone
from redraft.tasks.infill import Infiller, Template
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.evals import sandbox
from redraft.train.evals.code_lines import first_statement, generate_until
from redraft.train.records import open_text

MAX_GAP_TOKENS = 32  # of a removed part, and of a gap of unknown length
SENTENCE_END = r"[.!?]+[\"']?(?=\s)"


@dataclass(frozen=True)
class Gap:
    """A text with a part removed."""

    before: str
    part: str
    after: str
    check: str = ""  # code that is appended to the text and fails if the text is wrong
    end_pattern: str = ""  # regular expression for the end of the part, where that is not the end of a line

    def passes(self, part: str) -> bool:
        """Whether the text with this part runs and passes its check, in the sandbox."""
        return sandbox.passes(self.before + part + self.after + self.check)


# 1. Gaps


def remove_lines(texts: Sequence[str], seed: int = 0) -> Iterator[Gap]:
    """Removes one line of each function's code, without its indentation: not the signature, docstring or last line."""
    for number, text in enumerate(texts):
        statements = _find_statements(text)
        if statements:
            start, end = random.Random(f"{seed} {number}").choice(statements)
            yield Gap(text[:start], text[start:end], text[end:])


def remove_words(texts: Sequence[str], seed: int = 0) -> Iterator[Gap]:
    """Removes one to four words or operators of such a line; the rest of the line stays."""
    for number, text in enumerate(texts):
        statements = _find_statements(text)
        if statements:
            rng = random.Random(f"{seed} {number}")
            start, end = rng.choice(statements)
            words = [match.span() for match in re.finditer(r"\w+|[^\w\s]+", text[start:end])]
            first = rng.randrange(len(words))
            last = min(first + rng.randrange(4), len(words) - 1)
            gap_start = start + words[first][0]
            gap_end = start + words[last][1]
            yield Gap(text[:gap_start], text[gap_start:gap_end], text[gap_end:])


def _find_statements(text: str) -> list[tuple[int, int]]:
    """Returns (start, end) of the lines of a function's code, without signature, docstring and last line."""
    statements = []
    first_line = first_statement(text)
    line_start = 0
    for count, line in enumerate(text.rstrip("\n").split("\n")[:-1], 1):
        if count >= first_line and sum(map(str.isalnum, line)) >= 3:
            statements.append((line_start + len(line) - len(line.lstrip()), line_start + len(line.rstrip())))
        line_start += len(line) + 1
    return statements


def remove_sentences(texts: Sequence[str], seed: int = 0) -> Iterator[Gap]:
    """Removes one sentence of each text, neither the first nor the last."""
    for number, text in enumerate(texts):
        ends = [match.end() for match in re.finditer(SENTENCE_END, text)]
        sentences = [(previous_end + 1, end) for previous_end, end in pairwise(ends)]
        if sentences:
            start, end = random.Random(f"{seed} {number}").choice(sentences)
            yield Gap(text[:start], text[start:end], text[end:], end_pattern=SENTENCE_END)


def read_humaneval(path: Path) -> Iterator[Gap]:
    """Reads the tasks of one HumanEval infilling file."""
    with open_text(path) as file:
        for task in map(json.loads, file):
            check = f"\n{task['test']}\ncheck({task['entry_point']})\n"
            yield Gap(task["prompt"], task["canonical_solution"], task["suffix"], check)


# 2. Methods


Method = Callable[[Gap, int], str]  # a gap and its index -> the predicted part


def infill_methods(model: Backbone, tokenizer: Tokenizer, sampler: SamplerConfig, seed: int = 0) -> dict[str, Method]:
    """Returns the three methods by name."""
    infiller = Infiller(Engine(model), tokenizer)
    cfg = sampler.changed(t_min=0.2, t_max=0.2)  # low: only one answer is right

    def infill(gap: Gap, number: int, length: int | None) -> str:
        template = Template((gap.before, gap.after), (length,), is_fim=length is None)
        return infiller.infill(template, cfg, seed=seed + number, longest=MAX_GAP_TOKENS)[0].gaps[0]

    return {
        "known": lambda gap, number: infill(gap, number, max(1, len(tokenizer.encode(gap.part)))),
        "unknown": lambda gap, number: infill(gap, number, None),
        "hidden": lambda gap, number: continue_before(model, tokenizer, gap),
    }


def continue_before(model: Backbone, tokenizer: Tokenizer, gap: Gap) -> str:
    """Generates the part autoregressively: as many lines as were removed, in at most about twice as many tokens."""
    # A space before the gap belongs to the first missing word's token, as in tasks/infill.py.
    has_space = gap.before[-1:] in (" ", "\t")
    prompt = tokenizer.encode_prompt(gap.before[:-1] if has_space else gap.before)
    max_tokens = 2 * len(tokenizer.encode(gap.part)) + 8

    def is_end(ids: list[int]) -> bool:
        text = tokenizer.decode_fragment(ids)
        return text.count("\n") > gap.part.count("\n") or bool(gap.end_pattern and re.search(gap.end_pattern, text))

    return tokenizer.decode_fragment(generate_until(model, prompt, max_tokens, is_end))[int(has_space) :]


# 3. Scores


def score(gaps: Sequence[Gap], method: Method, tokenizer: Tokenizer, progress: Callable[[int], None]) -> dict[str, Any]:
    """Returns the shares of parts predicted exactly and of programs that pass, the similarity, and the error in length.

    Spaces around a part do not count.
    """
    exact = similarity = tokens_off = passed = 0.0
    for number, gap in enumerate(gaps):
        part = method(gap, number)
        exact += part.strip() == gap.part.strip()
        similarity += difflib.SequenceMatcher(None, part, gap.part, autojunk=False).ratio()
        tokens_off += abs(len(tokenizer.encode(part)) - len(tokenizer.encode(gap.part)))
        passed += bool(gap.check) and gap.passes(part)
        progress(number + 1)
    count = max(1, len(gaps))
    scores = {"exact": exact / count, "similarity": similarity / count, "tokens_off": tokens_off / count}
    if gaps and gaps[0].check:
        scores["passes"] = passed / count
    return scores
