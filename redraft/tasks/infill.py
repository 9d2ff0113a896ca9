"""Text with holes, filled: what stands before a hole is read, what stands behind it is pinned on the page.

    "def area(r):\\n    [[ ]]\\n    return a" -> [1 texts and holes]
    a hole -> [2 pages, one for every length it may have] -> all at once -> [3 the one that reads best] -> the next hole

Holes are filled from left to right; those still open are noise on the page, as long as they are said or guessed to be. Pages
are as short as they can be. Which length fits is decided by the same weights as a language model: how likely the hole and
what follows it are behind what is before it. The user's text is never decoded again, so it comes back as it was.

A tokenizer would not have cut the text where the hole cuts it: "the [[ ]]" ends in a space that belongs to the next word,
"hap[[ ]]" in half a word. Such an end is taken back, and the page must begin with a token that begins with its letters.
"""

import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from redraft.config import SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import Draft, Finished, prefill
from redraft.engine import Engine, Stopped
from redraft.tokenizer.tokenizer import Tokenizer

Watch = Callable[[Draft], None]  # is shown a step of a page

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)  # tried where none is given
GUESS = 8  # tokens of a hole that waits for its turn
AFTER = 32  # tokens behind a hole that stand on its page
HEARD = 32  # and those that decide with it how long it is
PAID = 0.5  # nats that a token of a hole is worth: the likeliest text is short, but there are more long ones
SEEDS = 1 << 20  # between the seeds of two holes
LEAST = 4  # letters that a hole and what follows it share: fewer may be chance
HOLE = re.compile(r"\[\[[ \t]*(?:(\d+)[ \t]*)?\]\]")


# 1. Texts and holes


@dataclass(frozen=True)
class Template:
    """Texts with a hole between each and the next; the length of a hole in tokens, None where it is to be found."""

    texts: tuple[str, ...]
    lengths: tuple[int | None, ...]
    is_fim: bool = False  # a part of a text, whose hole is cut where it runs out of its place

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("there is nothing to fill: mark a hole as [[ ]], or as [[ 8 ]] for one of 8 tokens")
        if 0 in self.lengths:
            raise ValueError("a hole has at least one token, got [[ 0 ]]")


def parse_template(text: str) -> Template:
    """A text whose holes are marked [[ ]] or [[ 8 ]]."""
    texts, lengths, at = [], [], 0
    for found in [*HOLE.finditer(text), None]:
        part = text[at : found.start() if found else len(text)]
        if stray := re.search(r"\[\[|\]\]", part):
            line = text.count("\n", 0, at + stray.start()) + 1
            raise ValueError(
                f"{stray[0]!r} on line {line} belongs to no hole: holes are [[ ]] or [[ 8 ]], and not nested; "
                "a text that has such brackets of its own can be given as prefix and suffix"
            )
        texts.append(part)
        if found:
            lengths.append(int(found[1]) if found[1] else None)
            at = found.end()
    return Template(tuple(texts), tuple(lengths))


@dataclass(frozen=True)
class Filled:
    """A text without holes. `str(filled)` is the text."""

    text: str
    gaps: tuple[str, ...]
    score: float  # how likely the last hole and what follows it are, in nats, its length made up for; higher is better
    settled: bool  # False when a page still moved at its last step
    forwards: int  # passes over pages, all lengths that were tried
    seed: int

    def __str__(self) -> str:
        return self.text


# 2. Pages


class Infiller:
    """Fills templates with one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine, self.tokenizer = engine, tokenizer

    def infill(self, template: Template, cfg: SamplerConfig, *, watch: Watch | None = None, **options: Any) -> list[Filled]:
        """What `events` comes to; `watch` is shown the steps."""
        for event in self.stream(template, cfg, **options):
            if isinstance(event, list):
                return event
            if watch is not None:
                watch(event)
        raise AssertionError("no end")

    def stream(
        self,
        template: Template,
        cfg: SamplerConfig,
        *,
        seed: int,
        count: int = 1,
        longest: int = 32,
        seconds: float | None = None,
        stop: threading.Event | None = None,
        candidates: int = 0,
    ) -> Iterator[Draft | list[Filled]]:
        """Every step of one page of each hole; at last, the template filled in `count` ways at most, the likeliest first.

        Ways differ in the last hole. A hole without a length has at most `longest` tokens; after `seconds` its pages are
        taken as they are. Once `stop` is set, Stopped is raised. `candidates` as in `Engine.add`.
        """
        if count < 1 or longest < 1:
            raise ValueError(f"count and longest must be at least 1, got {count} and {longest}")
        self._fits(template)
        text, holes, forwards, settled, found = template.texts[0], [], 0, True, []
        for number, known in enumerate(template.lengths):
            last = number + 1 == len(template.lengths)
            place = _Place(self.tokenizer, template, number, text, cfg.eos_token_ids)
            lengths = [known] if known else [length for length in LENGTHS if length < longest] + [longest]
            tries = [length for length in lengths for _ in range(-(-count // len(lengths)) if last else 1)]
            more = {"seconds": seconds, "stop": stop, "candidates": candidates}
            ends = yield from self._written(place, tries, cfg, seed + number * SEEDS, **more)
            forwards += sum(end.stats[0].forwards for end in ends)
            found = self._ranked(place, tries, ends, cfg, template, stop)
            if not last:
                holes.append(found[0][1])
                settled &= found[0][2]
                text += holes[-1] + template.texts[number + 1]
        behind = template.texts[-1]
        yield [
            Filled(text + hole + behind, (*holes, hole), score, settled and still, forwards, seed)
            for score, hole, still in found[:count]
        ]

    def _written(
        self, place: "_Place", lengths: Sequence[int], cfg: SamplerConfig, seed: int, *, candidates: int, **options: Any
    ) -> Generator[Draft, None, list[Finished]]:
        """A page for each length, all at once; one of them is looked at."""
        room, requests = max(lengths) + min(len(place.after), AFTER), []
        middle, ends = len(lengths) // 2, {}
        try:
            for number, length in enumerate(lengths):
                prompt, settings, constraints = self._page(place, length, room, cfg)
                seen = candidates if number == middle else 0
                request = self.engine.add(
                    prompt, settings, seed=seed + number, constraints=constraints, candidates=seen, **options
                )
                requests.append(request)
            shown = requests[middle]
            for request, event in self.engine.events(sorted(requests, key=lambda one: one is not shown)):
                if isinstance(event, Draft) and request is shown:
                    yield event
                elif isinstance(event, Finished):
                    ends[request] = event
        finally:
            for request in requests:
                self.engine.cancel(request)
        if (stop := options["stop"]) is not None and stop.is_set():
            raise Stopped
        return [ends[request] for request in requests]

    def _page(
        self, place: "_Place", length: int, room: int, cfg: SamplerConfig
    ) -> tuple[list[int], SamplerConfig, Constraints]:
        """What to ask for: a hole of this length and what follows it, in so many tokens, and half a word taken back."""
        limit, answer = self.engine.model.config.max_position_embeddings, room + place.more
        size = min(cfg.canvas_length, answer)
        pages = -(-answer // size)
        if pages * size >= limit:
            follows = f"with the {room - length} that follow it"
            raise ValueError(f"a hole of {length} tokens does not fit the model's context of {limit} {follows}")
        marks = tuple(set(self.tokenizer.ids_without_text(self.engine.model.config.vocab_size)) - set(cfg.eos_token_ids))
        behind = zip(range(length + place.more, answer), place.after, strict=False)
        pins = {at: token for at, token in behind if token is not None}
        constraints = Constraints(pins=pins, forbidden=marks, allowed_first=place.first)
        return place.prompt[-(limit - pages * size) :], cfg.changed(canvas_length=size, max_new_tokens=answer), constraints

    def _fits(self, template: Template) -> None:
        """Refuses holes that no page could hold, before anything as long is made."""
        limit, most = self.engine.model.config.max_position_embeddings, max(length or 0 for length in template.lengths)
        if sum(length or 0 for length in template.lengths) >= limit:
            raise ValueError(f"a hole of {most} tokens does not fit the model's context of {limit} with all the others")

    def build_request(self, template: Template, cfg: SamplerConfig) -> tuple[str, list[int], SamplerConfig, Constraints]:
        """All holes at once, each as long as it is said to be: the text before the page, and what to ask for behind it."""
        if None in template.lengths:
            raise ValueError("every hole needs a length to be on one page with the others: mark it as [[ 8 ]]")
        self._fits(template)
        text, first = template.texts[0], template.lengths[0]
        place = _Place(self.tokenizer, template, 0, text, cfg.eos_token_ids)
        kept = text.encode("utf-8", "replace").removesuffix(place.healed).decode("utf-8", "replace")
        return kept, *self._page(place, first, first + len(place.after), cfg)

    # 3. What reads best

    def _ranked(
        self,
        place: "_Place",
        lengths: Sequence[int],
        ends: Sequence[Finished],
        cfg: SamplerConfig,
        template: Template,
        stop: threading.Event | None,
    ) -> list[tuple[float, str, bool]]:
        """Score, text and whether it settled, of the holes that differ, the likeliest first."""
        found: dict[str, tuple[list[int], bool]] = {}
        for length, end in zip(lengths, ends, strict=True):
            ids = _upto_stop(end.ids_BT[0, : length + place.more].tolist(), cfg.eos_token_ids)
            letters = b"".join(self.tokenizer.token_bytes[token] or b"" for token in ids)[len(place.healed) :]
            hole, still = letters.decode("utf-8", "ignore"), end.stats[0].settled == end.stats[0].canvases
            if template.is_fim and (cut := within(template, hole)) != hole:
                hole, ids = cut, self.tokenizer.encode(place.healed.decode("utf-8", "ignore") + cut)
            found.setdefault(hole, (ids, still))
        heard = place.heard()
        scores = likelihoods(self.engine, place.prompt, [[*ids, *heard] for ids, _ in found.values()], stop)
        pairs = zip(scores, found.items(), strict=True)
        ranked = [(score + PAID * len(ids), hole, still) for score, (hole, (ids, still)) in pairs]
        return sorted(ranked, key=lambda one: -one[0])


class _Place:
    """Where a hole is: what is read before it, what its page begins with, what follows it."""

    def __init__(self, tokenizer: Tokenizer, template: Template, number: int, text: str, stops: Sequence[int]) -> None:
        start, before = tokenizer.encode_prompt(""), tokenizer.encode(text)
        if not start and not before:
            raise ValueError("this tokenizer has no start token: the text cannot begin with a hole")
        self.healed, self.more, self.first = b"", 0, ()
        shorter = tokenizer.encode(text[:-1])
        if text[-1:] in (" ", "\t") and start + shorter:
            self.healed, before = text[-1:].encode(), shorter
        elif before and start + before[:-1] and re.search(r"\w\Z", text):
            self.healed, self.more, before = tokenizer.token_bytes[before[-1]] or b"", 1, before[:-1]
        if self.healed:
            spelled = enumerate(tokenizer.token_bytes)
            self.first = tuple(token for token, letters in spelled if letters and letters.startswith(self.healed))
        self.prompt = [*start, *before]
        self.after: list[int | None] = []
        for later, part in enumerate(template.texts[number + 1 :], number + 1):
            self.after += tokenizer.encode(part)
            if later < len(template.lengths):
                self.after += [None] * (template.lengths[later] or GUESS)
        self.after += [] if template.is_fim else [stops[0]]
        # A stop token may be the text's own mark: nothing can stand behind it on a page.
        end = next((at for at, token in enumerate(self.after) if token in stops), len(self.after))
        self.after = self.after[: end + 1]

    def heard(self) -> list[int]:
        """What follows the hole, up to the next one, as far as it is heard."""
        until = next((at for at, token in enumerate(self.after) if token is None), len(self.after))
        return [token for token in self.after[: min(until, HEARD)] if token is not None]


def _upto_stop(ids: list[int], stops: Sequence[int]) -> list[int]:
    """Up to a stop token, which only a hole that nothing follows can have."""
    return next((ids[:at] for at, token in enumerate(ids) if token in stops), ids)


@torch.inference_mode()
def likelihoods(
    engine: Engine, before: Sequence[int], texts: Sequence[Sequence[int]], stop: threading.Event | None = None
) -> list[float]:
    """The log probability of each text after `before`, by the causal half of the model.

    The KV cache is reserved in the engine's budget; its sliding layers keep their window and the longest text.
    """
    model = engine.model
    longest = max(map(len, texts))
    before = before[-(model.config.max_position_embeddings - longest) :]
    log_probs = []
    with engine.reserve(len(before) + longest, rewind=longest + 1, stop=stop) as cache:
        if len(before) > 1:
            prefill(model, [before[:-1]], cache)
        for text in texts:
            if stop is not None and stop.is_set():
                raise Stopped
            ids = torch.tensor([[before[-1], *text]], device=model.device)
            logs = model.head(model.encode(ids, cache)[0, :-1]).float().log_softmax(dim=-1)
            log_probs.append(float(logs.gather(1, ids[0, 1:, None]).sum()) if text else 0.0)
            cache.rewind([len(before) - 1])
    return log_probs


# 4. Between a prefix and a suffix


def without_overlap(hole: str, suffix: str) -> str:
    """A hole without the beginning of what follows it, where it has run into that."""
    for size in range(min(len(hole), len(suffix)), 0, -1):
        if hole.endswith(suffix[:size]):
            return hole[: len(hole) - size] if len(suffix[:size].strip()) >= LEAST else hole
    return hole


def within(template: Template, hole: str) -> str:
    """A hole of a part of a text as far as it belongs between its two texts."""
    before, behind = template.texts
    return within_block(before, without_overlap(hole, behind))


def within_block(prefix: str, hole: str) -> str:
    """A hole that begins an indented line, up to the first line behind it that is indented less."""
    indent = prefix[prefix.rfind("\n") + 1 :]
    if not indent or indent.strip():
        return hole
    first, *lines = hole.split("\n")
    for number, line in enumerate(lines):
        if line.strip() and not line.startswith(indent):
            return "\n".join([first, *lines[:number]])
    return hole
