"""Holes and edits for editors: what is put between two texts, trimmed as an editor wants it, and what it cost."""

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from redraft.diffusion.generate import Stats
from redraft.server.completion import Stops, heated
from redraft.server.fim import Hole, Region
from redraft.writer import Writer, new_seed

LONGEST = 64  # tokens of a hole, where the client wants more: lengths are tried, so each costs
DOUBTED = 0.15  # share of a region's tokens that an edit may replace


@dataclass(frozen=True)
class Put:
    """What was put into a hole."""

    text: str
    stats: Stats


def put(
    writer: Writer,
    hole: Hole,
    stop: threading.Event,
    *,
    count: int = 1,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    seconds: float | None = None,
    stops: Sequence[str] = (),
    indent: int = 0,
    paragraph: bool = False,
) -> list[Put]:
    """At most `count` texts for a hole, the likeliest first. `paragraph`: up to the first blank line."""
    began, number = time.perf_counter(), seed if seed is not None else new_seed()
    found = writer.fill(
        prefix=hole.before,
        suffix=hole.after,
        context=hole.context,
        count=count,
        longest=min(max_tokens or LONGEST, LONGEST),
        seed=number,
        seconds=seconds,
        stop=stop,
        **heated(writer.sampler, temperature),
    )
    taken, texts = time.perf_counter() - began, {}
    read = len(writer.tokenizer.encode(hole.context + hole.before)) + len(writer.tokenizer.encode(hole.after))
    for one in found:
        text = trimmed(one.gaps[0], stops, indent, paragraph)
        new = len(writer.tokenizer.encode(text))
        passes = 0 if texts else one.forwards  # which all of them shared
        stats = Stats(number, read, new, 1, int(one.settled), passes, 0, taken, 0.0)
        texts.setdefault(text, Put(text, stats))
    return list(texts.values())


def trimmed(text: str, stops: Sequence[str], indent: int, paragraph: bool) -> str:
    """Up to a stop string, to a line that is indented less than asked, and to the first blank line if wanted."""
    cut = Stops(stops)
    text = cut.feed(text) + cut.flush()
    if paragraph and (blank := re.search(r"\n[ \t]*\n", text)) and text[: blank.start()].strip():
        text = text[: blank.start()]
    first, *lines = text.split("\n")
    for at, line in enumerate(lines):
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            return "\n".join([first, *lines[:at]])
    return text


def rewritten(
    writer: Writer, region: Region, stop: threading.Event, *, seed: int | None = None, temperature: float | None = None
) -> Put:
    """A region of a file redrafted where the model doubts it, the file around it in sight and untouched."""
    began, number = time.perf_counter(), seed if seed is not None else new_seed()
    before, after = around(writer, region)
    text, end = before + region.text + after, len(before) + len(region.text)
    keep, heat = [(0, len(before)), (end, len(text))], heated(writer.sampler, temperature)
    found = writer.edit(text, strength=DOUBTED, keep=keep, seed=number, stop=stop, **heat)
    new = found.text[len(before) : len(found.text) - len(after)]
    taken, tokens = time.perf_counter() - began, len(writer.tokenizer.encode(new))
    read = len(writer.tokenizer.encode(text))
    return Put(new, Stats(number, read, tokens, 1, int(found.settled), found.forwards, 0, taken, 0.0))


def around(writer: Writer, region: Region) -> tuple[str, str]:
    """What stands before and behind a region, as much as the model can read with it, the nearest first."""
    before, after = region.context + region.before, region.after
    limit = writer.model.config.max_position_embeddings - 1  # behind a start token
    while (size := len(writer.tokenizer.encode(before + region.text + after))) > limit and before + after:
        share = 0.9 * limit / size
        before, after = before[len(before) - int(share * len(before)) :], after[: int(share * len(after))]
    return before, after
