"""A text redrafted in place: what the model doubts is noise for a while, everything else is pinned.

    text -> [1 tokens, and where each begins] -> pages -> [2 how much each token is doubted]
         -> the most doubted are noise, the rest is pinned -> [3 redrafted] -> the text with what has changed

A page is denoised as it stands, behind the pages before it: the model says of every token how likely it is, having read it
and what is on both sides. Tokens are replaced, never inserted. What does not change is the user's own text, never decoded.
"""

import difflib
import math
import re
import threading
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.constraints.constraints import ConstraintEdit, Constraints
from redraft.diffusion import rng
from redraft.diffusion.generate import Committed, Draft, prefill
from redraft.engine import Engine, Intervention, Replay, Request, Stopped
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.tokenizer.tokenizer import Tokenizer

Span = tuple[int, int]  # characters of a text: the first, and the one behind the last
DEFAULT_EDIT_STRENGTH = 0.3  # share of the tokens that an edit may replace: the default in Python, CLI and server
SALT = 7919  # draws that choose are none of those that the pages are made of


@dataclass(frozen=True)
class Change:
    """Letters of the old text, and what stands there now."""

    start: int
    end: int
    old: str
    new: str


@dataclass(frozen=True)
class Edited:
    """A text after an edit. `str(edited)` is the text."""

    text: str
    before: str
    changes: tuple[Change, ...]
    settled: bool  # False when a page still moved at its last step
    forwards: int
    seed: int

    def __str__(self) -> str:
        return self.text

    def diff(self, name: str = "text") -> str:
        """The change of lines, as `diff -u` writes it."""
        old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (self.before, self.text))
        lines = difflib.unified_diff(old, new, name, name)
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


@dataclass(frozen=True)
class Suggestion:
    """Letters that the model finds unlikely, and what it would rather read."""

    start: int
    end: int
    text: str
    probability: float
    alternatives: tuple[tuple[str, float], ...]  # with their probabilities, the likeliest first


# 1. Tokens


class Tokens:
    """A text as tokens, and where each begins."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.ids, self.bytes, spelled = tokenizer.encode(text), text.encode("utf-8", "replace"), tokenizer.token_bytes
        pieces = [spelled[token] for token in self.ids]
        if None in pieces:
            mark = tokenizer.decode([self.ids[pieces.index(None)]], keep_special=True)
            raise ValueError(f"the text holds {mark!r}, which is no text but a mark of the model; take it out")
        if b"".join(pieces) != self.bytes:
            raise ValueError("this tokenizer does not give the text back as it was, so it cannot be edited in place")
        self.begins = [0]
        for piece in pieces:
            self.begins.append(self.begins[-1] + len(piece))
        whole = [True, *((byte & 0xC0) != 0x80 for byte in self.bytes[1:]), True]
        self.whole = [whole[at] for at in self.begins]  # whether a character begins where the token does

    def touched(self, spans: Sequence[Span], text: str) -> set[int]:
        """Tokens with a letter in one of the spans."""
        found = set()
        for span in spans:
            if not isinstance(span, Sequence) or len(span) != 2:
                raise ValueError(f"spans are pairs of a start and an end, got {span!r}")
            start, end = span
            if not 0 <= start <= end <= len(text):
                raise ValueError(f"the span {start} to {end} is not inside of the text, which has {len(text)} characters")
            first, last = (len(text[:at].encode("utf-8", "replace")) for at in (start, end))
            found |= {at for at, (a, b) in enumerate(pairwise(self.begins)) if a < last and b > first}
        return found

    def runs(self, open_: Sequence[bool]) -> Iterator[tuple[int, int]]:
        """Open tokens that stand together, with those that share a character with them."""
        at = 0
        while at < len(open_):
            if not open_[at]:
                at += 1
                continue
            first = at
            while at < len(open_) and open_[at]:
                at += 1
            first, at = self.widened(first, at)
            yield first, at

    def widened(self, first: int, last: int) -> tuple[int, int]:
        """Tokens with all that share a character with them."""
        while not self.whole[first]:
            first -= 1
        while not self.whole[last]:
            last += 1
        return first, last

    def characters(self, first: int, last: int) -> Span:
        """Where tokens stand in the text."""
        begin = len(self.bytes[: self.begins[first]].decode())
        return begin, begin + len(self.bytes[self.begins[first] : self.begins[last]].decode())


# 2. Doubt


@torch.inference_mode()
def read(
    engine: Engine, prompt: Sequence[int], ids: Sequence[int], size: int, stop: threading.Event | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Where each canvas begins, and the log probabilities [C, V] at its positions, given the canvas as it stands.

    The KV cache is reserved in the engine's budget until the iterator ends or is closed.
    """
    model = engine.model
    fits(model, len(prompt), len(ids))
    begins = range(0, len(ids), size)
    if not begins:
        return
    with engine.reserve(len(prompt) + begins[-1], stop=stop) as cache:
        prefill(model, [prompt], cache)
        for begin in begins:
            if stop is not None and stop.is_set():
                raise Stopped
            canvas_1C = torch.tensor([ids[begin : begin + size]], device=model.device)
            yield begin, model.denoise(canvas_1C, None, cache)[0].float().log_softmax(dim=-1)
            if begin != begins[-1]:
                model.encode(canvas_1C, cache)


def fits(model: DiffusionGemma, before: int, tokens: int) -> None:
    """Refuses a text that the model cannot read whole."""
    limit = model.config.max_position_embeddings
    if before + tokens > limit:
        raise ValueError(f"the text has {tokens} tokens behind {before}, the model's context is {limit}: take it in parts")


def check(strength: float) -> None:
    """Refuses what is no share."""
    if not 0 <= strength <= 1:
        raise ValueError(f"strength is the share of tokens that may change, from 0 to 1, got {strength}")


def doubts(logs_CV: Tensor, ids: Sequence[int]) -> Tensor:
    """How many nats likelier than each token the likeliest is, doubt_C."""
    own_C = logs_CV.gather(1, torch.tensor(ids, device=logs_CV.device)[:, None])[:, 0]
    return logs_CV.amax(dim=-1) - own_C


def suggest(
    engine: Engine, tokenizer: Tokenizer, text: str, cfg: SamplerConfig, *, least: float, most: int
) -> list[Suggestion]:
    """Tokens that another is `least` times likelier than, with at most so many others."""
    if not least >= 1 or most < 1:
        raise ValueError(f"least and most must be at least 1, got {least} and {most}")
    tokens, found = Tokens(tokenizer, text), []
    prompt = start_of(tokenizer)
    for begin, logs_CV in read(engine, prompt, tokens.ids, cfg.canvas_length):
        own = tokens.ids[begin : begin + len(logs_CV)]
        for at, doubt in enumerate(doubts(logs_CV, own).tolist()):
            if doubt < math.log(least) or doubt == 0:
                continue
            start, end = tokens.characters(*tokens.widened(begin + at, begin + at + 1))
            likeliest = [token for token in logs_CV[at].topk(most + 1).indices.tolist() if token != own[at]][:most]
            others = tuple((tokenizer.decode_fragment([token]), math.exp(logs_CV[at, token])) for token in likeliest)
            found.append(Suggestion(start, end, text[start:end], math.exp(logs_CV[at, own[at]]), others))
    return found


# 3. The edit


def edit(engine: Engine, tokenizer: Tokenizer, text: str, cfg: SamplerConfig, **options: Any) -> Edited:
    """What `events` comes to."""
    *_, found = stream_edit(engine, tokenizer, text, cfg, **options)
    assert isinstance(found, Edited)
    return found


def stream_edit(
    engine: Engine,
    tokenizer: Tokenizer,
    text: str,
    cfg: SamplerConfig,
    *,
    strength: float,
    keep: Sequence[Span] = (),
    prompt: Sequence[int] = (),
    seed: int,
    stop: threading.Event | None = None,
    candidates: int = 0,
    replay: Replay | None = None,
) -> Iterator[Draft | Committed | Edited]:
    """Every step and page; at last, the text with at most a share of its tokens replaced: the most doubted, none kept.

    `prompt` is read before it: an instruction, say; without one, the text stands alone. Once `stop` is set, Stopped is
    raised. `candidates` as in `Engine.add`. With a `replay` it is an edit that was under way, or that is steered.
    """
    tokens = Tokens(tokenizer, text)
    kept, prompt = tokens.touched(keep, text), list(prompt) or start_of(tokenizer)
    marks = tokenizer.ids_without_text(engine.model.config.vocab_size)
    options = {
        "strength": strength,
        "keep_positions": kept,
        "forbidden": marks,
        "prompt": prompt,
        "seed": seed,
        "stop": stop,
    }
    for event in redrafting(engine, tokens.ids, cfg, candidates=candidates, replay=replay, **options):
        if isinstance(event, Draft | Committed):
            yield event
            continue
        new, forwards, settled = event
        changes = changes_of(tokenizer, tokens, new)
        yield Edited(applied(text, changes), text, changes, settled, forwards, seed)


Redrafted = tuple[list[int], int, bool]  # tokens, the passes they took, and whether all pages settled


def redraft_tokens(engine: Engine, ids: Sequence[int], cfg: SamplerConfig, **options: Any) -> Redrafted:
    """What `redrafting` comes to."""
    *_, found = redrafting(engine, ids, cfg, **options)
    assert isinstance(found, tuple)
    return found


def redrafting(
    engine: Engine,
    ids: Sequence[int],
    cfg: SamplerConfig,
    *,
    strength: float,
    keep_positions: Container[int],
    forbidden: Sequence[int],
    prompt: Sequence[int],
    seed: int,
    stop: threading.Event | None = None,
    candidates: int = 0,
    replay: Replay | None = None,
) -> Iterator[Draft | Committed | Redrafted]:
    """Every step and page; at last, the tokens with at most a share of them replaced.

    Those at the places `kept` stay; the tokens `never` come in nowhere. Pages of the `replay` are taken as they are.
    """
    check(strength)
    fits(engine.model, len(prompt), len(ids))
    new, forwards, settled, replay = list(ids), 0, True, replay or Replay()
    _check_course(replay, ids, cfg, engine.model.config.vocab_size, set(forbidden), strength)
    for block, begin in enumerate(range(0, len(new), cfg.canvas_length) if strength else ()):
        page, before = new[begin : begin + cfg.canvas_length], [*prompt, *new[:begin]]
        if block < len(replay.canvases):
            new[begin : begin + len(page)] = replay.canvases[block]
            continue
        turns = [(turn, turn.edit.restrict(begin, len(page))) for turn in replay.interventions if turn.block <= block]
        own = tuple(Intervention(0, turn.step, more) for turn, more in turns if turn.block == block)
        held = [more for turn, more in turns if turn.block < block and more.positions]
        free = {at for at in range(len(page)) if begin + at not in keep_positions}
        chosen = _doubted(engine, before, page, free, strength, seed + SALT, block, stop) if free else set()
        if not chosen and not held and not any(turn.step == 0 for turn in own):
            if own:
                raise ValueError(f"page {block} has nothing to redraft at strength {strength}: raise it, or turn at step 0")
            yield _standing(block, page)
            continue
        options = {"stop": stop, "candidates": candidates, "replay": Replay((), own), "held": held}
        request, end = add_page(engine, before, page, chosen, cfg, forbidden, seed + block, **options), None
        for event in engine.stream(request):
            if isinstance(event, Draft | Committed):
                yield replace(event, block=block)
            else:
                end = event
        if end is None:
            raise Stopped
        new[begin : begin + len(page)] = end.ids_BT[0].tolist()
        forwards, settled = forwards + 1 + end.stats[0].forwards, settled and end.stats[0].settled == 1
    yield new, forwards, settled


def _check_course(
    replay: Replay, ids: Sequence[int], cfg: SamplerConfig, vocab_size: int, never: Container[int], strength: float
) -> None:
    """Refuses what cannot have been of this text."""
    length = cfg.canvas_length
    replay.check_interventions(math.ceil(len(ids) / length), cfg.max_steps)
    if replay.interventions and not strength:
        raise ValueError("at strength 0 nothing is redrafted, and there is no step to turn at: raise it")
    for block, page in enumerate(replay.canvases):
        wanted = len(ids[block * length : (block + 1) * length])
        if len(page) != wanted:
            raise ValueError(f"page {block} of this text has {wanted} tokens, got {len(page)}")
        _check_text(page, vocab_size, never)
    for turn in replay.interventions:
        if wrong := [at for at in turn.edit.positions if not 0 <= at < len(ids)]:
            raise ValueError(f"position {max(wrong)} is beyond the text's {len(ids)} tokens")
        _check_text(list(turn.edit.pins.values()), vocab_size, never)


def _check_text(tokens: Sequence[int], vocab_size: int, never: Container[int]) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size or token in never:
            raise ValueError(f"the token {token} is no text, so it cannot stand in one that is edited")


def _doubted(
    engine: Engine,
    before: Sequence[int],
    page: Sequence[int],
    free: Container[int],
    strength: float,
    seed: int,
    block: int,
    stop: threading.Event | None,
) -> set[int]:
    """Which of the free places of a page become noise."""
    ((_, logs_CV),) = read(engine, before, page, len(page), stop)
    jitter_C = rng.draws([seed], block, logs_CV.device).uniform(0, len(page))[0]
    worry_C = doubts(logs_CV, page) + 1e-3 * jitter_C  # where nothing is doubted, chance chooses
    ordered = [at for at in worry_C.argsort(descending=True).tolist() if at in free]
    return set(ordered[: int(strength * len(page) + 1e-9)])


def _standing(block: int, page: Sequence[int]) -> Committed:
    """A page that nobody doubts."""
    ids_1C, nothing_1 = torch.tensor([page]), torch.zeros(1, dtype=torch.int64)
    return Committed(block, ids_1C, torch.zeros(1, len(page)), nothing_1 == 0, nothing_1)


def add_page(
    engine: Engine,
    before: Sequence[int],
    page: Sequence[int],
    chosen: Container[int],
    cfg: SamplerConfig,
    forbidden: Sequence[int],
    seed: int,
    held: Sequence[ConstraintEdit] = (),
    **options: Any,
) -> Request:
    """Asks for the page behind what is before it, the chosen places open, the others pinned, but for what is `held`.

    `options` are those of `Engine.add`.
    """
    pins = {at: token for at, token in enumerate(page) if at not in chosen}
    constraints = Constraints(pins=pins, forbidden=tuple({*forbidden, *cfg.eos_token_ids}))
    for more in held:
        constraints = constraints.apply_edit(more)
    settings = cfg.changed(canvas_length=len(page), max_new_tokens=len(page))
    return engine.add(before, settings, seed=seed, constraints=constraints, **options)


def start_of(tokenizer: Tokenizer) -> list[int]:
    """What a text by itself stands behind."""
    start = tokenizer.encode_prompt("")
    if not start:
        raise ValueError("this tokenizer has no start token, and there is no instruction: nothing to read the text behind")
    return start


def changes_of(tokenizer: Tokenizer, tokens: Tokens, new: Sequence[int]) -> tuple[Change, ...]:
    """Where tokens differ. What would be half a character, or a mark, stays as it was."""
    found, spelled = [], tokenizer.token_bytes
    for first, last in tokens.runs([a != b for a, b in zip(tokens.ids, new, strict=True)]):
        pieces = [spelled[token] for token in new[first:last]]
        try:
            letters = b"".join(pieces).decode()
        except (TypeError, UnicodeDecodeError):
            continue
        start, end = tokens.characters(first, last)
        old = tokens.bytes[tokens.begins[first] : tokens.begins[last]].decode()
        if old != letters:
            found.append(Change(start, end, old, letters))
    return tuple(found)


def applied(text: str, changes: Sequence[Change]) -> str:
    """The text with the changes made."""
    parts, at = [], 0
    for change in changes:
        parts += [text[at : change.start], change.new]
        at = change.end
    return "".join([*parts, text[at:]])
