"""Infill and edits for editors: the text between a prefix and a suffix, trimmed as editors expect it, with its stats."""

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from redraft.diffusion.generate import Stats
from redraft.server.checks import temperature_settings
from redraft.server.errors import checking_request
from redraft.server.fim import Gap, Region
from redraft.server.stop_strings import StopStringFilter
from redraft.tasks.edit import check_context
from redraft.writer import Writer, new_seed

MAX_GAP_TOKENS = 64  # even if the client allows more: several lengths are tried, so each token costs
BLANK_LINE = re.compile(r"\n[ \t]*\n")


@dataclass(frozen=True)
class Infill:
    """The text for a gap or a region, and what it cost."""

    text: str
    stats: Stats


def infill_gap(
    writer: Writer,
    gap: Gap,
    stop: threading.Event,
    *,
    count: int = 1,
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    seconds: float | None = None,
    stop_strings: Sequence[str] = (),
    indent: int = 0,
    paragraph: bool = False,
) -> list[Infill]:
    """Returns at most `count` texts for a gap, the likeliest first. `paragraph` cuts them at the first blank line."""
    began = time.perf_counter()
    seed = seed if seed is not None else new_seed()
    with (
        checking_request()
    ):  # `fill` checks and generates in one call; faults of the engine are RuntimeErrors and pass through
        candidates = writer.fill(
            prefix=gap.prefix,
            suffix=gap.suffix,
            context=gap.context,
            count=count,
            longest=min(max_tokens or MAX_GAP_TOKENS, MAX_GAP_TOKENS),
            seed=seed,
            seconds=seconds,
            stop=stop,
            **temperature_settings(writer.sampler.changed(check="off"), temperature),
        )
    taken = time.perf_counter() - began
    encode = writer.tokenizer.encode
    prompt_tokens = count_read_tokens(writer, gap)
    infills: dict[str, Infill] = {}
    for candidate in candidates:
        text = trim_infill(candidate.gaps[0], stop_strings, indent, paragraph)
        stats = Stats(
            seed=seed,
            prompt_tokens=prompt_tokens,
            new_tokens=len(encode(text)),
            canvases=1,
            settled=int(candidate.settled),
            steps=0 if infills else candidate.forwards,  # all candidates share them: they are counted once
            commits=0,
            seconds=taken,
            prefill_seconds=0.0,
        )
        infills.setdefault(text, Infill(text, stats))
    return list(infills.values())


def count_read_tokens(writer: Writer, gap: Gap) -> int:
    """Counts the tokens around a gap that the model's context can hold; text further away is neither read nor tokenized."""
    limit = writer.model.config.max_position_embeddings
    reach = limit * writer.tokenizer.longest_token
    before = writer.tokenizer.encode((gap.context + gap.prefix)[-reach:])
    after = writer.tokenizer.encode(gap.suffix[:reach])
    return min(len(before) + len(after), limit)


def trim_infill(text: str, stop_strings: Sequence[str], indent: int, paragraph: bool) -> str:
    """Cuts a text at a stop string, at a line indented less than `indent`, and at the first blank line if requested."""
    stop_filter = StopStringFilter(stop_strings)
    text = stop_filter.feed(text) + stop_filter.flush()
    if paragraph and (blank := BLANK_LINE.search(text)) and text[: blank.start()].strip():
        text = text[: blank.start()]
    first, *lines = text.split("\n")
    for number, line in enumerate(lines):
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            return "\n".join([first, *lines[:number]])
    return text


def rewrite_region(writer: Writer, region: Region, stop: threading.Event, *, seed: int | None = None) -> Infill:
    """Repairs the mistakes in a region; the model reads the file before it. `seed` is reported only."""
    began = time.perf_counter()
    seed = seed if seed is not None else new_seed()
    with checking_request():
        prefix, suffix = surrounding_text(writer, region)
    text = prefix + region.text + suffix
    region_end = len(prefix) + len(region.text)
    with checking_request():
        edited = writer.edit(text, keep=[(0, len(prefix)), (region_end, len(text))], seed=seed, stop=stop)
    new_region = edited.text[len(prefix) : len(edited.text) - len(suffix)]
    stats = Stats(
        seed=seed,
        prompt_tokens=len(writer.tokenizer.encode(text)),
        new_tokens=len(writer.tokenizer.encode(new_region)),
        canvases=1,
        settled=int(edited.settled),
        steps=edited.forwards,
        commits=0,
        seconds=time.perf_counter() - began,
        prefill_seconds=0.0,
    )
    return Infill(new_region, stats)


def surrounding_text(writer: Writer, region: Region) -> tuple[str, str]:
    """Returns the text before and after a region, cut far from the region until all fits the model's context."""
    before = region.context + region.prefix
    after = region.suffix
    limit = writer.model.config.max_position_embeddings - 1  # one position for the start token
    reach = limit * writer.tokenizer.longest_token  # characters; more can never fit
    region_ids = writer.tokenizer.encode(region.text, limit)  # refuses a region that is clearly too long
    check_context(writer.model.config, 1, len(region_ids))
    before = before[-reach:]
    after = after[:reach]
    while (size := len(writer.tokenizer.encode(before + region.text + after))) > limit and before + after:
        share = 0.9 * limit / size
        before = before[len(before) - int(share * len(before)) :]
        after = after[: int(share * len(after))]
    return before, after
