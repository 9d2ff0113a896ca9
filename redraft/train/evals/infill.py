"""Texts with a part taken out, put back: with its length known, with its length to be found, and with what follows hidden.

    lines, words    one line of each Python function; one to four words of one
    sentences       one sentence of each story
    single, spans   HumanEval's infilling tasks; whether the function then passes its tests is found by running them

The hidden way is the same weights left to right, greedily: what a model without a canvas has to say. Everything is seeded.
"""

import difflib
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from redraft.config import SamplerConfig
from redraft.engine import Engine
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.tasks.infill import Infiller, Template
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.data import open_text
from redraft.train.evals.measures import first_statement, greedy

LONGEST = 32  # tokens of a part that is taken out, and of a hole of unknown length
END = r"[.!?]+[\"']?(?=\s)"  # of a sentence
SECONDS = 5  # that a program may take
LIMITS = f"""import resource as _r
for _what, _most in ((_r.RLIMIT_CPU, {SECONDS}), (_r.RLIMIT_AS, 1 << 30), (_r.RLIMIT_FSIZE, 0), (_r.RLIMIT_NOFILE, 32)):
    _r.setrlimit(_what, (_most, _most))
"""
WELL = 42  # a program that has come to its end says so: leaving early is no success
ENDED = f"\nimport os as _o; _o._exit({WELL})\n"


@dataclass(frozen=True)
class Missing:
    """A text with a part taken out."""

    before: str
    part: str
    after: str
    check: str = ""  # a program that fails, behind the whole text, if that is wrong
    ends: str = ""  # an expression: what the part ends with, where that is not its line's end

    def passes(self, part: str) -> bool:
        """Whether the text with this part does what its check asks."""
        return runs(self.before + part + self.after + self.check)


# 1. What is missing


def lines(texts: Sequence[str], seed: int = 0) -> Iterator[Missing]:
    """One line of the code of each function, its indentation left: neither signature, docstring nor last line."""
    for number, text in enumerate(texts):
        if fit := _statements(text):
            start, end = random.Random(f"{seed} {number}").choice(fit)
            yield Missing(text[:start], text[start:end], text[end:])


def words(texts: Sequence[str], seed: int = 0) -> Iterator[Missing]:
    """One to four words of such a line, names and signs alike: what follows them on the line stays."""
    for number, text in enumerate(texts):
        if fit := _statements(text):
            rng = random.Random(f"{seed} {number}")
            start, end = rng.choice(fit)
            found = [one.span() for one in re.finditer(r"\w+|[^\w\s]+", text[start:end])]
            first = rng.randrange(len(found))
            last = min(first + rng.randrange(4), len(found) - 1)
            low, high = start + found[first][0], start + found[last][1]
            yield Missing(text[:low], text[low:high], text[high:])


def _statements(text: str) -> list[tuple[int, int]]:
    """Where lines of a function's code begin and end, without signature, docstring and last line."""
    rows, at, fit = text.rstrip("\n").split("\n"), 0, []
    begin = first_statement(text)
    for count, row in enumerate(rows[:-1], 1):
        if count >= begin and sum(map(str.isalnum, row)) >= 3:
            fit.append((at + len(row) - len(row.lstrip()), at + len(row.rstrip())))
        at += len(row) + 1
    return fit


def sentences(texts: Sequence[str], seed: int = 0) -> Iterator[Missing]:
    """One sentence of each text, neither its first nor its last."""
    for number, text in enumerate(texts):
        ends = [found.end() for found in re.finditer(END, text)]
        inner = [(a + 1, b) for a, b in pairwise(ends)]
        if inner:
            start, end = random.Random(f"{seed} {number}").choice(inner)
            yield Missing(text[:start], text[start:end], text[end:], ends=END)


def humaneval(path: Path) -> Iterator[Missing]:
    """The tasks of one file."""
    with open_text(path) as file:
        for task in map(json.loads, file):
            check = f"\n{task['test']}\ncheck({task['entry_point']})\n"
            yield Missing(task["prompt"], task["canonical_solution"], task["suffix"], check)


def runs(program: str) -> bool:
    """Whether a program ends well, in a process of its own, in an empty folder, with little time and memory and no files."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-B", "-"]
        try:
            ended = subprocess.run(
                command,
                input=(LIMITS + program + ENDED).encode(),
                cwd=folder,
                env={},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=2 * SECONDS,
            )
        except subprocess.TimeoutExpired:
            return False
    return ended.returncode == WELL


# 2. Ways to put it back


Way = Callable[[Missing, int], str]  # of a missing part and its number


def ways(model: DiffusionGemma, tokenizer: Tokenizer, sampler: SamplerConfig, seed: int = 0) -> dict[str, Way]:
    """By name."""
    infiller, settings = Infiller(Engine(model), tokenizer), sampler.changed(t_min=0.2, t_max=0.2)  # one answer is right

    def filled(one: Missing, number: int, length: int | None) -> str:
        template = Template((one.before, one.after), (length,), is_fim=length is None)
        return infiller.infill(template, settings, seed=seed + number, longest=LONGEST)[0].gaps[0]

    return {
        "known": lambda one, number: filled(one, number, max(1, len(tokenizer.encode(one.part)))),
        "unknown": lambda one, number: filled(one, number, None),
        "hidden": lambda one, number: spoken(model, tokenizer, one),
    }


def spoken(model: DiffusionGemma, tokenizer: Tokenizer, one: Missing) -> str:
    """What the same weights say left to right: as many lines as are missing, in at most twice as many tokens."""
    space = one.before[-1:] in (" ", "\t")  # it belongs to the first word that is missing, as `filling.py` tells
    ids, most = tokenizer.encode_prompt(one.before[:-1] if space else one.before), 2 * len(tokenizer.encode(one.part)) + 8

    def over(said: list[int]) -> bool:
        text = tokenizer.decode_fragment(said)
        return text.count("\n") > one.part.count("\n") or bool(one.ends and re.search(one.ends, text))

    return tokenizer.decode_fragment(greedy(model, ids, most, over))[int(space) :]


# 3. Scores


def score(taken: Sequence[Missing], way: Way, tokenizer: Tokenizer, tell: Callable[[int], None]) -> dict[str, Any]:
    """TopProbs put back exactly and running, how alike, how many tokens too long or short; spaces around do not count."""
    exact = alike = off = passed = 0.0
    for number, one in enumerate(taken):
        part = way(one, number)
        exact += part.strip() == one.part.strip()
        alike += difflib.SequenceMatcher(None, part, one.part, autojunk=False).ratio()
        off += abs(len(tokenizer.encode(part)) - len(tokenizer.encode(one.part)))
        passed += bool(one.check) and one.passes(part)
        tell(number + 1)
    count = max(1, len(taken))
    found = {"exact": exact / count, "similarity": alike / count, "tokens_off": off / count}
    return found | ({"passes": passed / count} if taken and taken[0].check else {})
