"""Infilling: generates the missing text of gaps, given the text before and after them (FIM is the case of one gap).

    "def area(r):\\n    [[ ]]\\n    return a" -> [1 parse into texts and gaps]
    a gap -> [2 one canvas for each length it may have, denoised as a batch] -> [3 rank by likelihood] -> the next gap

The text before a gap is the prompt; the text after it is pinned on the canvas. Gaps are infilled from first to last; later
gaps are noise on the canvas, of their given length or an assumed one. Canvases are as short as possible. The causal half
of the model ranks the lengths: by the log-probability of the gap and the text after it, given the text before it. The
user's text is never decoded from tokens, so it comes back unchanged.

Token healing: a gap may cut the text where the tokenizer would not. "the [[ ]]" ends in a space that belongs to the next
token, "hap[[ ]]" in half a word. Such an ending is removed from the prompt, and the first token must begin with its bytes.
"""

import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from redraft.config import SamplerConfig, require_int
from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import Draft, Finished
from redraft.engine import Engine, Request, RequestError, Stopped
from redraft.tasks.canvas_html import render_marked, render_result, shorten_text
from redraft.tasks.generation import check_deadline, require_text
from redraft.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:  # text-only use does not load it
    from redraft.model.vision import ImageSpan

Watch = Callable[[Draft], None]  # called with every draft of one canvas

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)  # tried for a gap without a length
ASSUMED_LENGTH = 8  # tokens of a later gap without a length, on the canvas of an earlier one
SUFFIX_TOKENS = 32  # tokens after a gap that are pinned on its canvas
RANKED_SUFFIX_TOKENS = 32  # tokens after a gap whose likelihood counts in the ranking
TOKEN_BONUS = 0.5  # nats per token of a gap: without it, the ranking prefers short gaps, which are likelier
SEED_STRIDE = 1 << 20  # between the seeds of two gaps
MIN_OVERLAP = 4  # characters that a gap and the suffix share to be cut: fewer may be chance
GAP = re.compile(r"\[\[[ \t]*(?:(\d+)[ \t]*)?\]\]")
MAX_GAPS = 256
MAX_DIGITS = 10  # of a gap's length; Python refuses to read thousands of them


# 1. Texts and gaps


@dataclass(frozen=True)
class Template:
    """Texts with a gap between each and the next; the length of a gap in tokens, or None where it is to be found."""

    texts: tuple[str, ...]
    lengths: tuple[int | None, ...]
    is_fim: bool = False  # between a prefix and a suffix of a larger text: the gap is cut at overlap and indentation

    def __post_init__(self) -> None:
        if not self.lengths:
            raise RequestError("there is nothing to fill: write a gap as [[ ]], or as [[ 8 ]] for one of 8 tokens")
        if 0 in self.lengths:
            raise RequestError("a gap has at least one token, got [[ 0 ]]")


def parse_template(text: str) -> Template:
    """Parses a text with gaps written [[ ]] or [[ 8 ]]."""
    require_text("a text with gaps", text)
    texts: list[str] = []
    lengths: list[int | None] = []
    position = 0
    for match in chain(GAP.finditer(text), [None]):
        part = text[position : match.start() if match else len(text)]
        if stray := re.search(r"\[\[|\]\]", part):
            line = text.count("\n", 0, position + stray.start()) + 1
            raise RequestError(
                f"{stray[0]!r} on line {line} belongs to no gap: gaps are [[ ]] or [[ 8 ]], and not nested; "
                "give a text with such brackets of its own as prefix and suffix"
            )
        texts.append(part)
        if len(texts) > MAX_GAPS and match:
            raise RequestError(f"the text has more than {MAX_GAPS} gaps, the most that are filled at once: fill it in parts")
        if match:
            lengths.append(int(match[1][:MAX_DIGITS]) if match[1] else None)
            position = match.end()
    return Template(tuple(texts), tuple(lengths))


def between(prefix: str, suffix: str, context: str = "") -> Template:
    """A gap between a prefix and a suffix (FIM). The context precedes the prefix."""
    for name, part in (("prefix", prefix), ("suffix", suffix), ("context", context)):
        require_text(name, part)
    return Template((context + prefix, suffix), (None,), is_fim=True)


@dataclass(frozen=True)
class Filled:
    """A text with its gaps infilled. `str(filled)` is the text."""

    text: str
    gaps: tuple[str, ...]
    score: float  # log-probability of the last gap and the text after it, plus TOKEN_BONUS per token; higher is better
    settled: bool  # False when a canvas used all its steps without settling
    forwards: int  # over canvases, of all lengths that were tried
    seed: int
    spans: tuple[tuple[int, int], ...]  # characters of the text that were infilled, one span for each gap

    def __str__(self) -> str:
        return self.text

    def without_context(self, context: str) -> "Filled":
        """The same infill, of a text that begins behind the context."""
        spans = tuple((start - len(context), end - len(context)) for start, end in self.spans)
        return replace(self, text=self.text.removeprefix(context), spans=spans)

    def __repr__(self) -> str:
        settled = "" if self.settled else ", settled=False"
        gaps = ", ".join(map(shorten_text, self.gaps))
        return f"Filled({shorten_text(self.text)}, gaps=({gaps}), score={self.score:.1f}{settled}, seed={self.seed})"

    def _repr_html_(self) -> str:
        """The text in a notebook, with its infilled gaps on green."""
        notes = [f"{self.forwards} forwards", f"score {self.score:.1f}", f"seed {self.seed}"]
        warning = "" if self.settled else "a canvas did not settle"
        return render_result(render_marked(self.text, self.spans, "filled"), notes, warning)


class _Ranked(NamedTuple):
    """One infill of a gap."""

    score: float
    gap: str
    settled: bool


# 2. Canvases


class Infiller:
    """Infills templates with one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer

    def infill(self, template: Template, cfg: SamplerConfig, *, watch: Watch | None = None, **options: Any) -> list[Filled]:
        """Runs `stream` to its end; `watch` is called with the drafts."""
        if watch is not None and not callable(watch):
            raise RequestError(f"watch is a function that is called with every draft, got {watch!r}")
        for event in self.stream(template, cfg, **options):
            if isinstance(event, list):
                return event
            if watch is not None:
                watch(event)
        raise AssertionError("the stream ended without a result")

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
        """Yields the drafts of one canvas of each gap; at the end, at most `count` infills, the most likely first.

        The infills differ in the last gap. A gap without a length has at most `longest` tokens. After `seconds` the
        canvases of a gap are committed as they are. Raises Stopped once `stop` is set. `candidates` as in `Engine.add`.
        """
        for name, value in (("count", count), ("longest", longest)):
            require_int(name, value)
        check_deadline(seconds, stop)
        self._check_lengths(template)
        text = template.texts[0]
        suffixes = self._encode_suffixes(template)
        gaps: list[str] = []
        spans: list[tuple[int, int]] = []
        ranked: list[_Ranked] = []
        forwards = 0
        settled = True
        for number, length in enumerate(template.lengths):
            is_last = number + 1 == len(template.lengths)
            if stop is not None and stop.is_set():
                raise Stopped
            context = _GapContext(self.tokenizer, template, number, text, cfg.eos_token_ids, self._reach, suffixes)
            lengths = [length] if length else [option for option in LENGTHS if option < longest] + [longest]
            repeats = -(-count // len(lengths)) if is_last else 1
            tries = [option for option in lengths for _ in range(repeats)]
            ends = yield from self._denoise_lengths(
                context, tries, cfg, seed + number * SEED_STRIDE, seconds=seconds, stop=stop, candidates=candidates
            )
            forwards += sum(end.stats[0].forwards for end in ends)
            ranked = self._rank(context, tries, ends, cfg, template, stop)
            if not is_last:
                gaps.append(ranked[0].gap)
                spans.append((len(text), len(text) + len(ranked[0].gap)))
                settled = settled and ranked[0].settled
                text += ranked[0].gap + template.texts[number + 1]
        suffix = template.texts[-1]
        yield [
            Filled(
                text=text + best.gap + suffix,
                gaps=(*gaps, best.gap),
                score=best.score,
                settled=settled and best.settled,
                forwards=forwards,
                seed=seed,
                spans=(*spans, (len(text), len(text) + len(best.gap))),
            )
            for best in ranked[:count]
        ]

    def _denoise_lengths(
        self,
        context: "_GapContext",
        lengths: Sequence[int],
        cfg: SamplerConfig,
        seed: int,
        *,
        seconds: float | None,
        stop: threading.Event | None,
        candidates: int,
    ) -> Generator[Draft, None, list[Finished]]:
        """Denoises a canvas for each length, all in one batch; yields the drafts of the one in the middle."""
        max_tokens = max(lengths) + min(len(context.suffix), SUFFIX_TOKENS)
        middle = len(lengths) // 2
        requests: list[Request] = []
        ends: dict[Request, Finished] = {}
        try:
            for number, length in enumerate(lengths):
                prompt, canvas_cfg, constraints = self._canvas_request(context, length, max_tokens, cfg)
                request = self.engine.add(
                    prompt,
                    canvas_cfg.changed(check="off"),  # a check from the left does not see the text after the gap
                    seed=seed + number,
                    constraints=constraints,
                    candidates=candidates if number == middle else 0,
                    seconds=seconds,
                    stop=stop,
                )
                requests.append(request)
            shown = requests[middle]
            for request, event in self.engine.events(sorted(requests, key=lambda request: request is not shown)):
                if isinstance(event, Draft) and request is shown:
                    yield event
                elif isinstance(event, Finished):
                    ends[request] = event
        finally:
            for request in requests:
                self.engine.cancel(request)
        if len(ends) < len(requests):  # cancelled, by `stop` or because the engine's thread has ended
            raise Stopped
        return [ends[request] for request in requests]

    def _canvas_request(
        self, context: "_GapContext", length: int, max_tokens: int, cfg: SamplerConfig
    ) -> tuple[list[int], SamplerConfig, Constraints]:
        """Prompt, settings and constraints for a gap of this length and the text after it, `max_tokens` in all."""
        limit = self.engine.model.config.max_position_embeddings
        max_tokens += context.healed_tokens
        canvas_length = min(cfg.canvas_length, max_tokens)
        reserved = -(-max_tokens // canvas_length) * canvas_length
        if reserved >= limit:
            follows = f"with the {max_tokens - context.healed_tokens - length} tokens after it"
            raise RequestError(f"a gap of {length} tokens does not fit the model's context of {limit} {follows}")
        special_tokens = set(self.tokenizer.ids_without_text(self.engine.model.config.vocab_size))
        suffix = zip(range(length + context.healed_tokens, max_tokens), context.suffix, strict=False)
        constraints = Constraints(
            pins={position: token for position, token in suffix if token is not None},
            forbidden=tuple(special_tokens - set(cfg.eos_token_ids)),
            allowed_first=context.allowed_first,
        )
        canvas_cfg = cfg.changed(canvas_length=canvas_length, max_new_tokens=max_tokens)
        return context.prompt[-(limit - reserved) :], canvas_cfg, constraints

    def _check_lengths(self, template: Template) -> None:
        """Refuses gaps that do not fit the context, before any list of that length is built."""
        self.engine.model.require_denoiser("infill")
        limit = self.engine.model.config.max_position_embeddings
        lengths = [length or 0 for length in template.lengths]
        if sum(lengths) >= limit:
            raise RequestError(
                f"a gap of {max(lengths)} tokens does not fit the model's context of {limit} with all other gaps"
            )

    @property
    def _reach(self) -> int:
        """The most characters that the model's context can hold."""
        return self.engine.model.config.max_position_embeddings * self.tokenizer.longest_token

    def _encode_suffixes(self, template: Template) -> list[list[int]]:
        """The tokens of the text after each gap, for the contexts of all gaps."""
        return [self.tokenizer.encode(text[: self._reach]) for text in template.texts[1:]]

    def build_request(self, template: Template, cfg: SamplerConfig) -> tuple[str, list[int], SamplerConfig, Constraints]:
        """One request for all gaps at once, each of its given length: the text before it, prompt, settings, constraints."""
        lengths = [length for length in template.lengths if length is not None]
        if len(lengths) < len(template.lengths):
            raise RequestError("a canvas with all gaps needs the length of each: write it as [[ 8 ]]")
        self._check_lengths(template)
        text = template.texts[0]
        context = _GapContext(
            self.tokenizer, template, 0, text, cfg.eos_token_ids, self._reach, self._encode_suffixes(template)
        )
        before = text.encode("utf-8", "replace").removesuffix(context.healed).decode("utf-8", "replace")
        return before, *self._canvas_request(context, lengths[0], lengths[0] + len(context.suffix), cfg)

    # 3. Ranking

    def _rank(
        self,
        context: "_GapContext",
        lengths: Sequence[int],
        ends: Sequence[Finished],
        cfg: SamplerConfig,
        template: Template,
        stop: threading.Event | None,
    ) -> list[_Ranked]:
        """The infills that differ, the most likely first."""
        infills: dict[str, tuple[list[int], bool]] = {}
        pairs = list(zip(lengths, ends, strict=True))
        tried = [pair for pair in pairs if pair[1].stats[0].canvases]  # a deadline ends those without that still wait
        for length, end in tried or pairs:
            ids = _cut_at_stop(end.ids_BT[0, : length + context.healed_tokens].tolist(), cfg.eos_token_ids)
            gap_bytes = b"".join(self.tokenizer.token_bytes[token] or b"" for token in ids)[len(context.healed) :]
            gap = gap_bytes.decode("utf-8", "ignore")
            settled = 0 < end.stats[0].canvases == end.stats[0].settled
            if template.is_fim and (cut := trim_gap(template, gap)) != gap:
                gap = cut
                ids = self.tokenizer.encode(context.healed.decode("utf-8", "ignore") + cut)
            infills.setdefault(gap, (ids, settled))
        suffix = context.ranked_suffix()
        sequences = [[*ids, *suffix] for ids, _ in infills.values()]
        logprobs = sequence_logprobs(self.engine, context.prompt, sequences, stop)
        ranked = []
        for logprob, (gap, (ids, settled)) in zip(logprobs, infills.items(), strict=True):
            ranked.append(_Ranked(logprob + TOKEN_BONUS * len(ids), gap, settled))
        return sorted(ranked, key=lambda infill: -infill.score)


class _GapContext:
    """The tokens around one gap: the prompt before it, the healed bytes it begins with, the suffix after it.

    Text further than `reach` characters away cannot be within the model's context and is not tokenized.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        number: int,
        text: str,
        stops: Sequence[int],
        reach: int,
        suffixes: Sequence[list[int]],
    ) -> None:
        before = tokenizer.encode(text[-reach:])
        start = tokenizer.encode_prompt("") if before else tokenizer.start_ids
        if not start and not before:
            raise RequestError("this tokenizer has no start token: the text cannot begin with a gap")
        self.healed = b""  # bytes that moved from the prompt to the canvas
        self.healed_tokens = 0  # tokens that the canvas is longer for it: a space is part of the next word's token
        self.allowed_first: tuple[int, ...] = ()  # tokens that begin with the healed bytes
        shorter = tokenizer.encode(text[-reach:-1]) if text[-1:] in (" ", "\t") else []
        if start + shorter and text[-1:] in (" ", "\t"):
            self.healed = text[-1:].encode()
            before = shorter
        elif before and start + before[:-1] and re.fullmatch(r"\w", text[-1:]):
            self.healed = tokenizer.token_bytes[before[-1]] or b""
            self.healed_tokens = 1
            before = before[:-1]
        if self.healed:
            token_bytes = enumerate(tokenizer.token_bytes)
            self.allowed_first = tuple(token for token, piece in token_bytes if piece and piece.startswith(self.healed))
        self.prompt = [*start, *before]
        self.suffix = self._join_suffixes(template, number, stops, suffixes)

    @staticmethod
    def _join_suffixes(
        template: Template, number: int, stops: Sequence[int], suffixes: Sequence[list[int]]
    ) -> list[int | None]:
        """The tokens after the gap; None at the positions of later gaps."""
        suffix: list[int | None] = []
        for later, ids in enumerate(suffixes[number:], number + 1):
            suffix += ids
            if later < len(template.lengths):
                suffix += [None] * (template.lengths[later] or ASSUMED_LENGTH)
        if not template.is_fim:
            suffix.append(stops[0])
        # The text itself may hold a stop token: no position after it can be on a canvas.
        end = next((position for position, token in enumerate(suffix) if token in stops), len(suffix))
        return suffix[: end + 1]

    def ranked_suffix(self) -> list[int]:
        """The tokens after the gap, up to the next gap, whose likelihood counts in the ranking."""
        until = next((position for position, token in enumerate(self.suffix) if token is None), len(self.suffix))
        return [token for token in self.suffix[: min(until, RANKED_SUFFIX_TOKENS)] if token is not None]


def _cut_at_stop(ids: list[int], stops: Sequence[int]) -> list[int]:
    """The tokens before the first stop token. Only a gap at the end of a text can have one."""
    return next((ids[:position] for position, token in enumerate(ids) if token in stops), ids)


@torch.inference_mode()
def sequence_logprobs(
    engine: Engine,
    prompt: Sequence[int],
    sequences: Sequence[Sequence[int]],
    stop: threading.Event | None = None,
    images: Sequence["ImageSpan"] = (),
) -> list[float]:
    """The log-probability of each token sequence after the prompt, by the causal half of the model.

    The KV cache is reserved in the engine's budget; its sliding layers keep their window and the longest sequence. A prompt
    that is too long is cut at its beginning, unless it has `images`.
    """
    model = engine.model
    longest = max(map(len, sequences))
    if not images:
        prompt = prompt[-(model.config.max_position_embeddings - longest) :]
    elif images[-1].end == len(prompt):
        raise RequestError("answers are compared behind a token of text, and this prompt ends with an image")
    logprobs = []
    with engine.reserve(len(prompt) + longest, rewind=longest + 1, stop=stop) as cache:
        if len(prompt) > 1:
            engine.prefill_beside(prompt[:-1], cache, stop, images)
        for sequence in sequences:
            if stop is not None and stop.is_set():
                raise Stopped
            ids_1S = torch.tensor([[prompt[-1], *sequence]], device=model.device)
            with engine.take_turn(1 + len(sequence), stop):
                logprobs_SV = model.head(model.encode(ids_1S, cache)[0, :-1]).float().log_softmax(dim=-1)
            logprobs.append(float(logprobs_SV.gather(1, ids_1S[0, 1:, None]).sum()) if sequence else 0.0)
            cache.rewind([len(prompt) - 1])
    return logprobs


# 4. Between a prefix and a suffix


def trim_gap(template: Template, gap: str) -> str:
    """Cuts a FIM gap where it repeats the suffix or leaves the indented block of the prefix."""
    prefix, suffix = template.texts
    return cut_at_dedent(prefix, cut_overlap(gap, suffix))


def cut_overlap(gap: str, suffix: str) -> str:
    """Cuts the end of a gap that repeats the beginning of the suffix."""
    for size in range(min(len(gap), len(suffix)), 0, -1):
        if gap.endswith(suffix[:size]):
            return gap[: len(gap) - size] if len(suffix[:size].strip()) >= MIN_OVERLAP else gap
    return gap


def cut_at_dedent(prefix: str, gap: str) -> str:
    """Cuts a gap that begins an indented line before its first line with less indentation."""
    indent = prefix[prefix.rfind("\n") + 1 :]
    if not indent or indent.strip():
        return gap
    first, *lines = gap.split("\n")
    for number, line in enumerate(lines):
        if line.strip() and not line.startswith(indent):
            return "\n".join([first, *lines[:number]])
    return gap
