"""Code lines: one line of each Python function is removed and predicted again.

`fill_gaps` infills it by diffusion with the code after it in sight; `continue_before` generates it autoregressively with the
same weights, which do not see the code after it. Everything is seeded.
"""

import ast
import math
import random
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redraft.config import SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion import generate
from redraft.diffusion.autoregressive import generate_autoregressive
from redraft.model.backbone import Backbone
from redraft.tokenizer.tokenizer import Tokenizer

BATCH_ROWS = 16


@dataclass(frozen=True)
class LineGap:
    """A line removed from a text. The cuts are at token boundaries of the whole text, so that no token is split."""

    before: list[int]
    line: list[int]
    after: list[int]


def remove_lines(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int, seed: int = 0) -> list[LineGap]:
    """Removes one line of each function's code: not its signature, docstring or last line.

    The line has at least three letters or digits and at most `max_tokens` tokens. Texts that are no Python are skipped.
    """
    gaps = []
    for number, text in enumerate(texts):
        encoded = tokenizer.vocabulary.encode(text, add_special_tokens=False)
        first_line = first_statement(text)
        line_start = 0
        candidates = []
        for count, line in enumerate(text.rstrip("\n").split("\n")[:-1], 1):
            begin = line_start + len(line) - len(line.lstrip())
            end = line_start + len(line)
            inside = [i for i, (first, last) in enumerate(encoded.offsets) if first < end and last > begin]
            if count >= first_line and sum(map(str.isalnum, line)) >= 3 and len(inside) <= max_tokens:
                candidates.append(slice(inside[0], inside[-1] + 1))
            line_start = end + 1
        if candidates:
            gap = random.Random(f"{seed} {number}").choice(candidates)
            gaps.append(LineGap(encoded.ids[: gap.start], encoded.ids[gap], encoded.ids[gap.stop :]))
    return gaps


def first_statement(text: str) -> float:
    """Returns the line number (from 1) of a function's first statement after its docstring; infinity if there is none."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return math.inf
    body = next((n.body for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)), [])
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return body[0].lineno if body else math.inf


def fill_gaps(
    model: Backbone, tokenizer: Tokenizer, gaps: Sequence[LineGap], sampler: SamplerConfig, seed: int = 0
) -> list[list[int]]:
    """Infills every gap on one canvas; the tokens around it are pinned and its length is known."""
    answers = []
    cfg = sampler.changed(max_new_tokens=sampler.canvas_length, t_min=0.2, t_max=0.2)  # low: only one answer is right
    for begin in range(0, len(gaps), BATCH_ROWS):
        batch = gaps[begin : begin + BATCH_ROWS]
        plans = [_plan_canvas(gap, sampler) for gap in batch]
        prompts = [
            tokenizer.encode_prompt("") + gap.before[: plan.prompt_length] for gap, plan in zip(batch, plans, strict=True)
        ]
        seeds = [seed + begin + row for row in range(len(plans))]
        constraints = [Constraints(pins=plan.pins) for plan in plans]
        *_, committed, _ = generate.generate(model, prompts, cfg, seeds=seeds, constraints=constraints)
        for gap, plan, ids in zip(batch, plans, committed.ids_BC.tolist(), strict=True):
            answers.append(ids[plan.gap_start : plan.gap_start + len(gap.line)])
    return answers


@dataclass(frozen=True)
class _CanvasPlan:
    prompt_length: int  # tokens before the gap that go to the prompt
    gap_start: int  # on the canvas
    pins: dict[int, int]


def _plan_canvas(gap: LineGap, sampler: SamplerConfig) -> _CanvasPlan:
    """Puts the whole text on the canvas if it fits, else the part with the gap in its middle; a stop token ends the text."""
    size = sampler.canvas_length
    text = [*gap.before, *gap.line, *gap.after, sampler.eos_token_ids[0]]
    prompt_length = 0 if len(text) <= size else max(0, len(gap.before) - (size - len(gap.line)) // 2)
    gap_start = len(gap.before) - prompt_length
    gap_end = gap_start + len(gap.line)
    canvas = text[prompt_length : prompt_length + size]
    pins = {position: token for position, token in enumerate(canvas) if not gap_start <= position < gap_end}
    return _CanvasPlan(prompt_length, gap_start, pins)


def continue_before(model: Backbone, tokenizer: Tokenizer, gaps: Sequence[LineGap]) -> list[list[int]]:
    """Generates the same lines autoregressively and greedily, up to the newline, from the tokens before the gap only."""
    return [
        generate_until(
            model,
            [*tokenizer.encode_prompt(""), *gap.before],
            2 * len(gap.line) + 8,
            lambda ids: "\n" in tokenizer.decode(ids[-1:]),
        )
        for gap in gaps
    ]


def generate_until(
    model: Backbone, prompt: Sequence[int], max_tokens: int, is_end: Callable[[list[int]], bool]
) -> list[int]:
    """Generates greedily until `is_end` holds for the ids so far; the token that makes it hold is left out."""
    ids: list[int] = []
    for token in generate_autoregressive(model, prompt, max_tokens):
        if token in model.config.eos_token_ids or is_end([*ids, token]):
            break
        ids.append(token)
    return ids


def exact_share(answers: Sequence[list[int]], gaps: Sequence[LineGap]) -> float:
    """Returns the share of lines predicted token for token."""
    return sum(answer == gap.line for answer, gap in zip(answers, gaps, strict=True)) / max(1, len(gaps))
