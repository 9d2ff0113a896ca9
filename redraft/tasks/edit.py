"""Editing in place: the least likely tokens of a text are replaced by noise and denoised again, all others are pinned.

    text -> [1 tokens and their character offsets] -> canvases -> [2 log-probability of each token, given its canvas]
         -> [3 noise in place of the least likely tokens, denoise] -> the text with its changes

Scoring is one denoising forward over the unchanged canvas, conditioned on the canvases before it: the model sees each token
and the text on both sides. Tokens are replaced, never inserted. Unchanged text is the user's own string, never decoded.
Shapes: C canvas positions, V vocabulary.
"""

import difflib
import math
import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from redraft.config import BackboneConfig, SamplerConfig, require_int
from redraft.constraints.constraints import ConstraintEdit, Constraints
from redraft.diffusion import rng
from redraft.diffusion.generate import Committed, Draft
from redraft.engine import Engine, Intervention, Replay, Request, RequestError, Stopped
from redraft.tasks.generation import check_deadline, require_text
from redraft.tokenizer.tokenizer import Tokenizer

Span = tuple[int, int]  # characters of a text: start, and end (exclusive)
SELECTION_SALT = 7919  # the draws that break ties in the selection differ from those that denoise the canvas


@dataclass(frozen=True)
class Change:
    """A replaced span of the old text: its characters, and the new ones."""

    start: int
    end: int
    old: str
    new: str


@dataclass(frozen=True)
class Edited:
    """The result of an edit. `str(edited)` is the new text."""

    text: str
    before: str
    changes: tuple[Change, ...]
    settled: bool  # False when a canvas used all its steps without settling
    forwards: int
    seed: int

    def __str__(self) -> str:
        return self.text

    def diff(self, name: str = "text") -> str:
        """A unified diff, as `diff -u` writes it."""
        old, new = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (self.before, self.text))
        lines = difflib.unified_diff(old, new, name, name)
        return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


@dataclass(frozen=True)
class Suggestion:
    """An unlikely piece of text, and more likely alternatives."""

    start: int
    end: int
    text: str
    probability: float
    alternatives: tuple[tuple[str, float], ...]  # text and probability, the most likely first


# 1. Tokens


class TokenizedText:
    """A text as tokens, with the byte offset of each. Token ranges are (first, end), end exclusive."""

    def __init__(self, tokenizer: Tokenizer, text: str, limit: int | None = None) -> None:
        """`limit` as in `Tokenizer.encode`."""
        self.ids = tokenizer.encode(require_text("text", text), limit)
        self.bytes = text.encode("utf-8", "replace")
        token_bytes = tokenizer.token_bytes
        pieces = []
        for token in self.ids:
            piece = token_bytes[token]
            if piece is None:
                special_token = tokenizer.decode([token], keep_special=True)
                raise RequestError(f"the text holds {special_token!r}, a special token of the model: remove it")
            pieces.append(piece)
        if b"".join(pieces) != self.bytes:
            raise RequestError("this tokenizer does not reproduce the text exactly, so it cannot be edited in place")
        self.offsets = [0]
        for piece in pieces:
            self.offsets.append(self.offsets[-1] + len(piece))
        starts_character = np.ones(len(self.bytes) + 1, dtype=bool)
        starts_character[:-1] = np.frombuffer(self.bytes, dtype=np.uint8) & 0xC0 != 0x80
        self.character_starts = np.flatnonzero(starts_character)  # the byte offset of every character, and the end
        self.starts_character = starts_character[self.offsets].tolist()  # of each token

    def positions_in(self, spans: Sequence[Span], text: str) -> set[int]:
        """Positions of the tokens that have a character in one of the spans."""
        is_inside = np.zeros(len(self.ids), dtype=bool)
        if not isinstance(spans, Sequence):
            raise RequestError(f"keep must be a list of spans, got {spans!r}")
        for span in spans:
            if not isinstance(span, Sequence) or len(span) != 2:
                raise RequestError(f"a span is a pair of a start and an end, got {span!r}")
            start, end = (require_int("a character of a span", character, 0) for character in span)
            if not 0 <= start <= end <= len(text):
                raise RequestError(f"the span {start} to {end} is outside of the text, which has {len(text)} characters")
            first = self.first_token(start)
            last = bisect_left(self.offsets, self.character_starts[end])
            if start < end:
                is_inside[first:last] = True
        return set(np.flatnonzero(is_inside).tolist())

    def first_token(self, character: int) -> int:
        """The position of the token that has this character."""
        return bisect_right(self.offsets, self.character_starts[character]) - 1

    def runs(self, is_changed: Sequence[bool]) -> Iterator[tuple[int, int]]:
        """Ranges of adjacent changed tokens, widened to whole characters."""
        position = 0
        while position < len(is_changed):
            if not is_changed[position]:
                position += 1
                continue
            first = position
            while position < len(is_changed) and is_changed[position]:
                position += 1
            first, position = self.widen(first, position)
            yield first, position

    def widen(self, first: int, end: int) -> tuple[int, int]:
        """Extends a token range until it begins and ends at a character boundary."""
        while not self.starts_character[first]:
            first -= 1
        while not self.starts_character[end]:
            end += 1
        return first, end

    def to_characters(self, first: int, end: int) -> Span:
        """The characters of a token range."""
        start, stop = np.searchsorted(self.character_starts, [self.offsets[first], self.offsets[end]]).tolist()
        return start, stop


# 2. Score


@torch.inference_mode()
def score_canvas(
    engine: Engine, context: Sequence[int], canvas: Sequence[int], stop: threading.Event | None = None
) -> Tensor:
    """The log-probabilities [C, V] at the positions of a canvas after its context, given the canvas as it is.

    The canvases of a text share one KV cache, which follows them: none of them is encoded twice.
    """
    model = engine.model
    check_context(model.config, len(context), len(canvas))
    with engine.lend_prompt(context, stop) as cache:
        canvas_1C = torch.tensor([canvas], device=model.device)
        with engine.take_turn(len(canvas), stop):
            return model.denoise(canvas_1C, None, cache)[0].float().log_softmax(dim=-1)


def check_context(config: BackboneConfig, prompt_tokens: int, text_tokens: int) -> None:
    """Refuses a text that does not fit the model's context."""
    limit = config.max_position_embeddings
    if prompt_tokens + text_tokens > limit:
        raise RequestError(
            f"the text has {text_tokens} tokens after a prompt of {prompt_tokens}, but the model's context is {limit}: "
            "take it in parts"
        )


def check_strength(strength: float) -> None:
    """Refuses a strength outside of 0 to 1."""
    is_number = isinstance(strength, int | float) and not isinstance(strength, bool)
    if not is_number or not 0 <= strength <= 1:
        raise RequestError(f"strength is the share of tokens to replace, from 0 to 1, got {strength}")


def logprob_margins(logprobs_CV: Tensor, ids: Sequence[int]) -> Tensor:
    """By how many nats the most likely token beats the given one, at each position: margin_C."""
    own_C = logprobs_CV.gather(1, torch.tensor(ids, device=logprobs_CV.device)[:, None])[:, 0]
    return logprobs_CV.amax(dim=-1) - own_C


# 3. The edit


def edit(engine: Engine, tokenizer: Tokenizer, text: str, cfg: SamplerConfig, **options: Any) -> Edited:
    """Runs `stream_edit` to its end."""
    *_, edited = stream_edit(engine, tokenizer, text, cfg, **options)
    assert isinstance(edited, Edited)
    return edited


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
    """Yields every draft and every committed canvas; at the end, the edited text.

    Replaces at most the share `strength` of the tokens, the least likely ones, and none with a character in the spans
    `keep`. `prompt` (an instruction, for instance) precedes the text. Raises Stopped once `stop` is set. `candidates` as
    in `Engine.add`. A `replay` resumes an earlier edit, or adds interventions to it.
    """
    tokens = TokenizedText(tokenizer, text, engine.model.config.max_position_embeddings)
    events = stream_redraft(
        engine,
        tokens.ids,
        cfg,
        strength=strength,
        keep_positions=tokens.positions_in(keep, text),
        forbidden=tokenizer.ids_without_text(engine.model.config.vocab_size),
        prompt=list(prompt) or start_tokens(tokenizer),
        seed=seed,
        stop=stop,
        candidates=candidates,
        replay=replay,
    )
    for event in events:
        if isinstance(event, RedraftResult):
            changes = find_changes(tokenizer, tokens, event.ids)
            yield Edited(apply_changes(text, changes), text, changes, event.settled, event.forwards, seed)
        else:
            yield event


class RedraftResult(NamedTuple):
    """The end of `stream_redraft`."""

    ids: list[int]
    forwards: int
    settled: bool  # all canvases settled


def redraft_tokens(engine: Engine, ids: Sequence[int], cfg: SamplerConfig, **options: Any) -> RedraftResult:
    """Runs `stream_redraft` to its end."""
    *_, result = stream_redraft(engine, ids, cfg, **options)
    assert isinstance(result, RedraftResult)
    return result


def stream_redraft(
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
) -> Iterator[Draft | Committed | RedraftResult]:
    """Yields every draft and every committed canvas; at the end, the tokens with at most the share `strength` replaced.

    Tokens at `keep_positions` stay, the tokens `forbidden` are never generated. Canvases in the `replay` are taken as they
    are. An intervention on an earlier canvas constrains the later ones too.
    """
    engine.model.require_denoiser("edit")
    check_strength(strength)
    check_deadline(None, stop)
    check_context(engine.model.config, len(prompt), len(ids))
    replay = replay or Replay()
    _check_replay(replay, ids, cfg, engine.model.config.vocab_size, set(forbidden), strength)
    new_ids = list(ids)
    forwards = 0
    settled = True
    for block, begin in enumerate(range(0, len(new_ids), cfg.canvas_length) if strength else ()):
        canvas = new_ids[begin : begin + cfg.canvas_length]
        prefix = [*prompt, *new_ids[:begin]]
        if block < len(replay.canvases):
            new_ids[begin : begin + len(canvas)] = replay.canvases[block]
            continue
        interventions, earlier_edits = _interventions_on(replay, block, begin, len(canvas))
        free = {index for index in range(len(canvas)) if begin + index not in keep_positions}
        chosen = _choose_positions(engine, prefix, canvas, free, strength, seed, block, stop) if free else set()
        if not chosen and not earlier_edits and not any(intervention.step == 0 for intervention in interventions):
            if interventions:
                raise RequestError(
                    f"canvas {block} has nothing to redraft at strength {strength}: raise it, or intervene at step 0"
                )
            yield _unchanged_canvas(block, canvas)
            continue
        request = add_canvas_request(
            engine,
            prefix,
            canvas,
            chosen,
            cfg,
            forbidden,
            seed + block,
            earlier_edits,
            stop=stop,
            candidates=candidates,
            replay=Replay((), interventions),
        )
        end = None
        for event in engine.stream(request):
            if isinstance(event, Draft | Committed):
                yield replace(event, block=block)
            else:
                end = event
        if end is None:
            raise Stopped
        new_ids[begin : begin + len(canvas)] = end.ids_BT[0].tolist()
        forwards += 1 + end.stats[0].forwards
        settled = settled and end.stats[0].settled == 1
    yield RedraftResult(new_ids, forwards, settled)


def _interventions_on(
    replay: Replay, block: int, begin: int, length: int
) -> tuple[tuple[Intervention, ...], list[ConstraintEdit]]:
    """The interventions of this canvas, as those of its own request, and the edits that earlier canvases made on it."""
    own = []
    earlier = []
    for intervention in replay.interventions:
        edit = intervention.edit.restrict(begin, length)
        if intervention.block == block:
            own.append(Intervention(0, intervention.step, edit))
        elif intervention.block < block and edit.positions:
            earlier.append(edit)
    return tuple(own), earlier


def _check_replay(
    replay: Replay, ids: Sequence[int], cfg: SamplerConfig, vocab_size: int, forbidden: Container[int], strength: float
) -> None:
    """Refuses a replay that cannot belong to this text."""
    length = cfg.canvas_length
    replay.check_interventions(math.ceil(len(ids) / length), cfg.max_steps)
    if replay.interventions and not strength:
        raise RequestError("at strength 0 nothing is redrafted, so there is no step to intervene at: raise the strength")
    for block, canvas in enumerate(replay.canvases):
        expected = len(ids[block * length : (block + 1) * length])
        if len(canvas) != expected:
            raise RequestError(f"canvas {block} of this text has {expected} tokens, got {len(canvas)}")
        _check_text_tokens(canvas, vocab_size, forbidden)
    for intervention in replay.interventions:
        if outside := [position for position in intervention.edit.positions if not 0 <= position < len(ids)]:
            raise RequestError(f"position {max(outside)} is beyond the text's {len(ids)} tokens")
        _check_text_tokens(list(intervention.edit.pins.values()), vocab_size, forbidden)


def _check_text_tokens(tokens: Sequence[int], vocab_size: int, forbidden: Container[int]) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size or token in forbidden:
            raise RequestError(f"the token {token} is no text, so an edited text cannot contain it")


def _choose_positions(
    engine: Engine,
    prefix: Sequence[int],
    canvas: Sequence[int],
    free: Container[int],
    strength: float,
    seed: int,
    block: int,
    stop: threading.Event | None,
) -> set[int]:
    """The free positions of a canvas that become noise: those with the largest margins."""
    logprobs_CV = score_canvas(engine, prefix, canvas, stop)
    jitter_C = rng.draws([seed + SELECTION_SALT], block, logprobs_CV.device).uniform(0, len(canvas))[0]
    scores_C = logprob_margins(logprobs_CV, canvas) + 1e-3 * jitter_C  # breaks ties where every token is the most likely
    ordered = [position for position in scores_C.argsort(descending=True).tolist() if position in free]
    return set(ordered[: int(strength * len(canvas) + 1e-9)])


def _unchanged_canvas(block: int, canvas: Sequence[int]) -> Committed:
    """The event of a canvas that is committed without a step."""
    zeros_1 = torch.zeros(1, dtype=torch.int64)
    return Committed(
        block=block,
        ids_BC=torch.tensor([canvas]),
        entropy_BC=torch.zeros(1, len(canvas)),
        settled_B=zeros_1 == 0,
        steps_B=zeros_1,
    )


def add_canvas_request(
    engine: Engine,
    prefix: Sequence[int],
    canvas: Sequence[int],
    open_positions: Container[int],
    cfg: SamplerConfig,
    forbidden: Sequence[int],
    seed: int,
    edits: Sequence[ConstraintEdit] = (),
    **options: Any,
) -> Request:
    """Requests one canvas after a prefix: the open positions are noise, all others are pinned unless `edits` open them.

    `options` are those of `Engine.add`.
    """
    pins = {position: token for position, token in enumerate(canvas) if position not in open_positions}
    constraints = Constraints(pins=pins, forbidden=tuple({*forbidden, *cfg.eos_token_ids}))
    for edit in edits:
        constraints = constraints.apply_edit(edit)
    canvas_cfg = cfg.changed(canvas_length=len(canvas), max_new_tokens=len(canvas))
    return engine.add(prefix, canvas_cfg.changed(check="off"), seed=seed, constraints=constraints, **options)


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens before a text that has no prompt: the start token."""
    start = tokenizer.start_ids
    if not start:
        raise RequestError("this tokenizer has no start token, so the text needs a prompt: give an instruction")
    return start


def find_changes(tokenizer: Tokenizer, tokens: TokenizedText, new_ids: Sequence[int]) -> tuple[Change, ...]:
    """The differences as spans of characters. New tokens that are special or no valid UTF-8 are left out."""
    changes = []
    is_changed = [old != new for old, new in zip(tokens.ids, new_ids, strict=True)]
    for first, end in tokens.runs(is_changed):
        pieces = [tokenizer.token_bytes[token] for token in new_ids[first:end]]
        try:
            new_text = b"".join(piece for piece in pieces if piece is not None).decode()
        except UnicodeDecodeError:
            continue
        if None in pieces:
            continue
        start, stop = tokens.to_characters(first, end)
        old_text = tokens.bytes[tokens.offsets[first] : tokens.offsets[end]].decode()
        if old_text != new_text:
            changes.append(Change(start, stop, old_text, new_text))
    return tuple(changes)


def apply_changes(text: str, changes: Sequence[Change]) -> str:
    """The text with the changes made."""
    parts = []
    position = 0
    for change in changes:
        parts += [text[position : change.start], change.new]
        position = change.end
    return "".join([*parts, text[position:]])
