"""Writer: a model, its tokenizer and its sampler settings, ready to write. What `redraft.load()` returns.

Everything here is `generate` with text at both ends; it adds no mathematics. A prompt is either text to be continued, or
a conversation (a list of messages), which goes through the chat template.
"""

import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from redraft import checkpoint
from redraft.config import SamplerConfig
from redraft.constraints import json_schema
from redraft.constraints.constraints import Constraints
from redraft.constraints.regex_dfa import PatternError
from redraft.constraints.token_automaton import AutomatonCompiler
from redraft.diffusion import rng
from redraft.diffusion.generate import Committed, Draft, Event, Finished, Stats, check_inputs, generate, prefill
from redraft.engine import Engine, Replay, Request, Stopped
from redraft.kernels.backend import has_bf16, select_dtype
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.quant import FP8, quantize_fp8
from redraft.tasks import edit, infill
from redraft.tasks.edit import DEFAULT_EDIT_STRENGTH, Edited, Span, Suggestion
from redraft.tasks.infill import Filled, Infiller, Template
from redraft.tasks.sudoku import board as boards
from redraft.tasks.sudoku import solve
from redraft.tasks.sudoku.board import Board
from redraft.tasks.sudoku.solve import Solution
from redraft.tokenizer.chat_parser import ChatParser, Parsed, ToolCall, parse_chat
from redraft.tokenizer.tokenizer import Decoder, Message, Tokenizer, TokenizerError

Prompt = str | Sequence[int] | Sequence[Message]
PATTERNS = ("regex", "schema", "choices")  # settings that the answer must match
DEFAULT_MODEL, SUDOKU_MODEL = checkpoint.PACKAGED / "tiny", checkpoint.PACKAGED / "sudoku"


@dataclass(frozen=True)
class TextDraft(Draft):
    """A draft with its text. This is the public `redraft.Draft`."""

    text: str = ""

    @classmethod
    def from_draft(cls, event: Draft, text: str) -> "TextDraft":
        """Adds the decoded text to an event of the core, which knows token ids only."""
        return cls(**_fields_of(event), text=text)


@dataclass(frozen=True)
class TextCommitted(Committed):
    """A committed canvas with the text it adds to the answer. This is the public `redraft.Committed`."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    shown: int = 0  # how many of its tokens belong to the answer: those before the stop token and within max_tokens

    @classmethod
    def from_committed(cls, event: Committed, parsed: Parsed, shown: int) -> "TextCommitted":
        """Adds the decoded text to an event of the core, which knows token ids only."""
        return cls(
            **_fields_of(event),
            text=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=tuple(parsed.tool_calls),
            shown=shown,
        )


TextEvent = TextDraft | TextCommitted | Finished


def _fields_of(event: Draft | Committed) -> dict[str, Any]:
    return {field.name: getattr(event, field.name) for field in fields(event)}


@dataclass(frozen=True)
class Answer:
    """What was written. `str(answer)` is its text."""

    text: str
    reason: str  # "stop": the model ended it; "length": max_tokens did; "deadline": the clock did
    settled: bool  # False when a page still moved at its last step: treat the text with doubt
    ids: tuple[int, ...]  # without the stop token
    stats: Stats
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def seed(self) -> int:
        """Gives the same answer again."""
        return self.stats.seed

    def __str__(self) -> str:
        return self.text


def load(
    path_or_id: str | Path = DEFAULT_MODEL,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    quant: str | None = None,
) -> "Writer":
    """A Writer from a checkpoint folder or a hub id; without either, the small model that comes with redraft.

    "tiny" and "sudoku" are the models in the package. Without a dtype, weights stay in the precision they are stored in,
    or are float32 where a CPU does not multiply in bf16. `quant="fp8"` packs a checkpoint's layers on the way in.
    """
    if quant not in (None, FP8):
        raise ValueError(f"there is no quantization {quant!r}; known is {FP8}")
    device, folder = _device(device), checkpoint.find(path_or_id)
    config = checkpoint.read_model_config(folder)
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer.size > config.vocab_size:
        raise TokenizerError(
            f"the tokenizer in {folder} has ids up to {tokenizer.size - 1}, the model a vocabulary of "
            f"{config.vocab_size}: they do not belong together"
        )
    sampler = checkpoint.read_sampler_config(folder, config)
    model = checkpoint.load_model(folder, dtype=select_dtype(device, _dtype(dtype)), device=device)
    if quant == FP8 and not model.config.quant:
        model = quantize_fp8(model)
    elif not has_bf16(device):
        model = checkpoint.lay_out_for_cpu(model)
    return Writer(model, tokenizer, sampler)


def _device(asked: torch.device | str | None) -> torch.device:
    has_gpu = torch.cuda.is_available()
    try:
        device = torch.device(asked if asked is not None else "cuda" if has_gpu else "cpu")
    except RuntimeError:
        raise ValueError(f"{asked!r} is not a device; try cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"redraft runs on cpu and cuda, not on {str(device)!r}")
    if device.type == "cuda":
        if not has_gpu or (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"there is no {str(device)!r} here: {torch.cuda.device_count()} GPUs found; try cpu")
        if device.index is None:  # "cuda" is the current one; torch.cuda.set_device and CUDA graphs want its index
            device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(device)  # kernels, streams and graphs go where the model is
    return device


def _dtype(asked: torch.dtype | str | None) -> torch.dtype | None:
    dtype = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if asked is not None and dtype not in checkpoint.PRECISIONS:
        raise ValueError(f"{asked!r} is not a precision to compute in; try float32 or bfloat16")
    return dtype


class Writer:
    """Writes, streams and chats."""

    def __init__(self, model: DiffusionGemma, tokenizer: Tokenizer, sampler: SamplerConfig) -> None:
        self.model, self.tokenizer, self.sampler = model, tokenizer, sampler
        self.engine = Engine(model)

    @overload
    def write(self, prompt: str, **options: Any) -> Answer: ...
    @overload
    def write(self, prompt: Sequence[str], **options: Any) -> list[Answer]: ...

    def write(
        self,
        prompt: str | Sequence[str],
        *,
        max_tokens: int | None = None,
        seed: int | None = None,
        constraints: Constraints | None = None,
        streamer: Any = None,
        **settings: Any,
    ) -> Answer | list[Answer]:
        """Continues a text, or several at once: text number i is written with seed + i, as it would be alone.

        `settings` are fields of SamplerConfig: `max_steps=20, entropy_bound=0.5`; or a pattern that the answer must match:
        `regex="[0-9]+"`, `schema={"type": "object", ...}`, `choices=["yes", "no"]`.
        """
        constraints = self._obeyed(constraints, settings)
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        ids = [self.tokenizer.encode_prompt(text) for text in prompts]
        answers = self._answers(ids, False, self._settings(max_tokens, settings), seed, constraints, streamer)
        return answers[0] if isinstance(prompt, str) else answers

    def chat(
        self,
        messages: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool = False,
        max_tokens: int | None = None,
        seed: int | None = None,
        constraints: Constraints | None = None,
        streamer: Any = None,
        **settings: Any,
    ) -> Answer:
        """Answers a conversation; a string is a conversation of one user message. `settings` as for `write`."""
        constraints = self._obeyed(constraints, settings)
        ids = self.tokenizer.encode_chat(to_messages(messages), tools=tools, think=think)
        return self._answers([ids], True, self._settings(max_tokens, settings), seed, constraints, streamer)[0]

    def stream(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool = False,
        max_tokens: int | None = None,
        seed: int | None = None,
        constraints: Constraints | None = None,
        seconds: float | None = None,
        stop: threading.Event | None = None,
        draft: str | Sequence[int] | None = None,
        drafts: bool = True,
        replay: Replay | None = None,
        candidates: int = 0,
        **settings: Any,
    ) -> Iterator[TextEvent]:
        """The events of one answer, their `text` filled in: every draft, every committed page, the end.

        A string or its tokens are continued, messages are answered. The texts of the Committed events add up to the
        answer's. After `seconds` the page in work is committed as it is, and that is all; once `stop` is set, nothing more
        comes. With a `draft` the first page starts from that text, or from these tokens, instead of noise.
        Where nobody looks at them, `drafts=False` spares their text; with `candidates=5` they come with the probabilities of the
        five likeliest tokens everywhere. A `replay` takes up a run that was under way, and steers it.
        """
        constraints, chatting = self._obeyed(constraints, settings), not is_text_prompt(prompt)
        ids, cfg = self.encode_prompt(prompt, tools, think), self._settings(max_tokens, settings)
        number = seed if seed is not None else new_seed()
        first_canvas_1C = self._started(draft, cfg, number) if draft else None
        options = {"constraints": constraints, "first_canvas_1C": first_canvas_1C, "seconds": seconds, "stop": stop}
        request = self.engine.add(ids, cfg, seed=number, replay=replay, candidates=candidates, **options)
        return _with_text(self.engine.stream(request), cfg, _Reading(self.tokenizer, chatting), drafts)

    def encode_prompt(
        self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] | None = None, think: bool = False
    ) -> list[int]:
        """The tokens of a text to continue, which may be tokens already, or of a conversation."""
        if not is_text_prompt(prompt):
            return self.tokenizer.encode_chat(prompt, tools=tools, think=think)
        if tools or think:
            raise ValueError("tools and think need a conversation; give messages instead of a text to continue")
        return self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)

    def _started(self, draft: str | Sequence[int], cfg: SamplerConfig, seed: int) -> Tensor:
        """A first canvas that begins with a text, noise behind it."""
        canvas_1C = rng.draws([seed], 0, "cpu").noise(0, cfg.canvas_length, self.model.config.vocab_size)
        ids = (self.tokenizer.encode(draft) if isinstance(draft, str) else draft)[: cfg.canvas_length]
        canvas_1C[0, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
        return canvas_1C

    @overload
    def fill(self, text: str | None = None, *, count: None = None, **options: Any) -> Filled: ...
    @overload
    def fill(self, text: str | None = None, *, count: int, **options: Any) -> list[Filled]: ...

    def fill(
        self,
        text: str | None = None,
        *,
        prefix: str | None = None,
        suffix: str | None = None,
        context: str = "",
        count: int | None = None,
        longest: int = 32,
        seed: int | None = None,
        seconds: float | None = None,
        watch: infill.Watch | None = None,
        stop: threading.Event | None = None,
        **settings: Any,
    ) -> Filled | list[Filled]:
        """Fills the holes of a text, marked [[ ]], or [[ 8 ]] for 8 tokens; or what is missing between prefix and suffix.

        All the rest comes back as it was. A hole of unknown length has at most `longest` tokens. With a `count`, as many
        fills come back at most, the likeliest first. `context` is read before a prefix and is not part of the answer.
        After `seconds` a hole is taken as it is. `watch` is called with every step of one page of each hole; once
        `stop` is set, Stopped is raised. `settings` are fields of SamplerConfig.
        """
        if (text is None) == (prefix is None and suffix is None):
            raise ValueError("give a text with holes, or a prefix and a suffix")
        between, before, behind = text is None, prefix or "", suffix or ""
        if context and not between:
            raise ValueError("context stands before a prefix; a text with holes has its context in itself")
        template = Template((context + before, behind), (None,), is_fim=True) if between else infill.parse_template(text)
        infiller, cfg = Infiller(self.engine, self.tokenizer), self._settings(None, settings)
        options = {"seed": seed if seed is not None else new_seed(), "count": 1 if count is None else count}
        found = infiller.infill(template, cfg, longest=longest, seconds=seconds, watch=watch, stop=stop, **options)
        if between:
            found = [replace(one, text=before + one.gaps[0] + behind) for one in found]
        return found[0] if count is None else found

    def edit(
        self,
        text: str,
        instruction: str | None = None,
        *,
        strength: float = DEFAULT_EDIT_STRENGTH,
        keep: Sequence[Span] = (),
        seed: int | None = None,
        stop: threading.Event | None = None,
        **settings: Any,
    ) -> Edited:
        """Redrafts a text in place: at most this share of its tokens, those that the model doubts most.

        With an instruction, which takes a model that chats, it doubts what does not follow it. Characters in the spans
        `keep` (start, end) stay. `edited.diff()` shows what has changed. Once `stop` is set, Stopped is raised.
        `settings` are fields of SamplerConfig.
        """
        asked = [] if instruction is None else self.tokenizer.encode_chat(to_messages(f"{instruction}\n\n{text}"))
        seed, cfg = seed if seed is not None else new_seed(), self._settings(None, settings)
        options = {"strength": strength, "keep": keep, "prompt": asked, "seed": seed, "stop": stop}
        return edit.edit(self.engine, self.tokenizer, text, cfg, **options)

    def suggest(self, text: str, *, least: float = 20.0, most: int = 3) -> list[Suggestion]:
        """Marks what the model finds unlikely in a text: tokens that another is `least` times likelier than.

        With each come at most `most` others that it would rather read.
        """
        return edit.suggest(self.engine, self.tokenizer, text, self.sampler, least=least, most=most)

    @torch.inference_mode()
    def decide(
        self, prompt: Prompt, choices: Sequence[str], *, seed: int = 0, stop: threading.Event | None = None
    ) -> dict[str, float]:
        """How likely each of some answers is, from one pass over a page of noise, all ways to spell them added up.

        A string is continued, messages are answered. The probabilities add up to one. Once `stop` is set, Stopped is raised.
        """
        ids = self.encode_prompt(prompt)
        cfg, model = self.sampler.changed(max_new_tokens=self.sampler.canvas_length), self.model
        check_inputs(model.config, [ids], cfg, [seed], [Constraints()], None)
        noise_1C = rng.draws([seed], 0, model.device).noise(0, cfg.canvas_length, model.config.vocab_size)
        with self.engine.reserve(len(ids), stop=stop) as cache:
            prefill(model, [ids], cache)
            logits_CV = model.denoise(noise_1C, None, cache)[0].float().cpu().numpy()
        masses = []
        for choice in _choices(choices):
            if stop is not None and stop.is_set():
                raise Stopped
            found = Constraints(automaton=self.automaton_compiler.compile(re.escape(choice)))
            found.validate(model.config.vocab_size, cfg.canvas_length, cfg.eos_token_ids)
            masses.append(
                found.canvas_automaton(found.initial_state, 0, cfg.canvas_length, cfg.canvas_length).log_match_probability(
                    logits_CV
                )
            )
        shares = torch.tensor(masses, dtype=torch.float64).softmax(dim=0).tolist()
        return dict(zip(choices, shares, strict=True))

    def _obeyed(self, constraints: Constraints | None, settings: dict[str, Any]) -> Constraints | None:
        """The constraints with the pattern that is among the settings, which is taken out of them."""
        asked = {name: settings.pop(name) for name in PATTERNS if settings.get(name) is not None}
        for name in PATTERNS:
            settings.pop(name, None)
        if not asked:
            return constraints
        if len(asked) > 1:
            raise PatternError(f"an answer obeys one of {', '.join(PATTERNS)}, got {' and '.join(asked)}")
        ((name, value),) = asked.items()
        if name == "choices":
            value = "|".join(re.escape(choice) for choice in _choices(value))
        pattern = json_schema.build_regex(value) if name == "schema" else value
        return replace(constraints or Constraints(), automaton=self.automaton_compiler.compile(pattern))

    @cached_property
    def automaton_compiler(self) -> AutomatonCompiler:
        token_bytes = self.tokenizer.token_bytes
        missing = self.model.config.vocab_size - len(token_bytes)
        return AutomatonCompiler((*token_bytes, *[None] * missing), self.sampler.eos_token_ids)

    @overload
    def solve_sudoku(self, puzzle: str | Board, **options: Any) -> Solution: ...
    @overload
    def solve_sudoku(self, puzzle: Sequence[str | Board], **options: Any) -> list[Solution]: ...

    def solve_sudoku(
        self, puzzle: str | Board | Sequence[str | Board], *, seed: int | None = None, **options: Any
    ) -> Solution | list[Solution]:
        """Solves a puzzle (81 characters, a drawn grid, or 81 numbers), or several at once. For models made for boards.

        Puzzle number i has seed + i. `options` are `canvases=64`, `check=True`, and fields of SamplerConfig.
        """
        many = [puzzle] if isinstance(puzzle, str) else list(puzzle)
        alone = isinstance(puzzle, str) or (len(many) > 0 and not hasattr(many[0], "__iter__"))
        puzzles = [boards.given(one) for one in ([puzzle] if alone else many)]
        events = self.sudoku_events(puzzles, seed=seed if seed is not None else new_seed(), **options)
        found = sorted((e for e in events if isinstance(e, Solution)), key=lambda solution: solution.number)
        return found[0] if alone else found

    def sudoku_events(
        self, puzzles: Sequence[Board], *, seed: int, canvases: int = 64, check: bool = True, **settings: Any
    ) -> Iterator[solve.Pass | Solution]:
        """Every pass over the boards, and every puzzle when it is done."""
        cfg = self._settings(None, settings)
        return solve.solve(self.model, puzzles, cfg, seed=seed, canvases=canvases, check=check)

    def _settings(self, max_tokens: int | None, settings: Mapping[str, Any]) -> SamplerConfig:
        return self.sampler.changed(max_new_tokens=max_tokens, **settings)

    def _answers(
        self,
        prompts: Sequence[Sequence[int]],
        chatting: bool,
        cfg: SamplerConfig,
        seed: int | None,
        constraints: Constraints | None,
        streamer: Any,
    ) -> list[Answer]:
        first = seed if seed is not None else new_seed()
        seeds = [first + row for row in range(len(prompts))]
        if streamer is not None:  # which wants all rows step by step
            events = generate(
                self.model, prompts, cfg, seeds=seeds, constraints=[constraints or Constraints()] * len(prompts)
            )
            last = _drain(_feeding(events, prompts, streamer))
            return [self._answer(last, row, chatting, cfg) for row in range(len(prompts))]
        requests: list[Request] = []
        try:
            requests += [
                self.engine.add(ids, cfg, seed=number, constraints=constraints)
                for ids, number in zip(prompts, seeds, strict=True)
            ]
            ends = self.engine.run(requests)
        finally:
            for request in requests:
                self.engine.cancel(request)
        return [self._answer(ends[request], 0, chatting, cfg) for request in requests]

    def _answer(self, last: Finished, row: int, chatting: bool, cfg: SamplerConfig) -> Answer:
        ids, _ = cut_at_stop(last.ids_BT[row].tolist(), cfg, cfg.max_new_tokens)
        parts = parse_chat(self.tokenizer, ids) if chatting else Parsed(self.tokenizer.decode(ids))
        stats = last.stats[row]
        return Answer(
            text=parts.text,
            reason=last.reasons[row],
            settled=stats.settled == stats.canvases,
            ids=tuple(ids),
            stats=stats,
            reasoning=parts.reasoning,
            tool_calls=parts.tool_calls,
        )


def _choices(choices: Sequence[str]) -> Sequence[str]:
    if (
        not isinstance(choices, (list, tuple))
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise PatternError(f"choices must be a list of texts, none of them empty, got {choices!r}")
    if len(set(choices)) < len(choices):
        raise PatternError(f"choices must differ from one another, got {list(choices)!r}")
    return choices


def is_text_prompt(prompt: Prompt) -> bool:
    """Whether it is to be continued: a text, or its tokens."""
    return isinstance(prompt, str) or (len(prompt) > 0 and all(isinstance(token, int) for token in prompt))


def to_messages(prompt: Prompt) -> Sequence[Message]:
    """A conversation; a string becomes its only message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def new_seed() -> int:
    """A seed nobody has asked for; it is reported, so that the answer can be had again."""
    return secrets.randbits(32)


def cut_at_stop(ids: Sequence[int], cfg: SamplerConfig, room: int) -> tuple[list[int], bool]:
    """Of a committed page, the tokens a user gets: up to the stop token or the room left, and whether it stopped."""
    for at, token in enumerate(ids[:room]):
        if token in cfg.eos_token_ids:
            return list(ids[:at]), True
    return list(ids[:room]), False


class _Reading:
    """Turns the tokens of one answer into text as they come, thoughts and calls taken out of a chat's."""

    def __init__(self, tokenizer: Tokenizer, chatting: bool) -> None:
        self.tokenizer = tokenizer
        self._decoder = Decoder(tokenizer)
        self._parser = ChatParser(tokenizer) if chatting else None

    def draft(self, ids: Sequence[int]) -> str:
        """A page that may still change."""
        return self.tokenizer.decode(ids)

    def add(self, ids: Sequence[int], final: bool) -> Parsed:
        """What these tokens add to the text, the reasoning and the calls."""
        if self._parser is not None:
            return self._parser.feed(ids, final=final)
        return Parsed(self._decoder.feed(ids) + (self._decoder.flush() if final else ""))


def _with_text(events: Iterator[Event], cfg: SamplerConfig, reading: _Reading, drafts: bool) -> Iterator[TextEvent]:
    room = cfg.max_new_tokens
    for event in events:
        match event:
            case Draft() if not drafts:
                yield TextDraft.from_draft(event, "")
            case Draft():
                ids, _ = cut_at_stop(event.ids_BC[0].tolist(), cfg, room)
                yield TextDraft.from_draft(event, reading.draft(ids))
            case Committed():
                ids, stopped = cut_at_stop(event.ids_BC[0].tolist(), cfg, room)
                room -= len(ids)
                parsed = reading.add(ids, final=stopped or room <= 0)
                yield TextCommitted.from_committed(event, parsed, shown=len(ids))
            case Finished():
                yield event


def _feeding(events: Iterator[Event], prompts: Sequence[Sequence[int]], streamer: Any) -> Iterator[Event]:
    """Passes events on and feeds a streamer as transformers does: the prompt, drafts if it takes them, pages, the end."""
    if getattr(streamer, "_takes_logits", False):
        raise ValueError(f"{type(streamer).__name__} wants logits with every draft; redraft sends token ids")
    longest = max(map(len, prompts))
    streamer.put(torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts]))
    for event in events:
        if isinstance(event, Draft) and hasattr(streamer, "put_draft"):
            streamer.put_draft(_plain(event.ids_BC))
        elif isinstance(event, Committed):
            streamer.put(_plain(event.ids_BC))
        yield event
    streamer.end()


def _plain(ids: Tensor) -> Tensor:
    return ids.detach().cpu().clone()


def _drain(events: Iterator[Event]) -> Finished:
    *_, last = events
    assert isinstance(last, Finished)
    return last
