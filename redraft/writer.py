"""Writer: a model with its tokenizer and its sampler settings. `redraft.load()` returns one.

The Writer turns text into token ids, runs the engine, and turns the ids back into text; it adds no mathematics. A prompt
is a text to continue, or a conversation (a list of messages) to answer, which goes through the chat template.
"""

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, overload

import torch

from redraft import checkpoint
from redraft.config import DEFAULT_EDIT_STRENGTH, EngineConfig, SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.constraints.pattern_compiler import Compiled, LocalCompiler, Pattern, PatternCompiler
from redraft.constraints.prefix_grammar import PrefixGrammar
from redraft.constraints.token_automaton import AutomatonCompiler, TokenAutomaton
from redraft.diffusion.generate import step_cost
from redraft.engine import AdaptedEngine, Engine, Request, Stopped
from redraft.engine.gpu_limit import GpuLimit, explain_lack_of_memory, limit_gpu
from redraft.model.backbone import Backbone
from redraft.model.lora import Adapter
from redraft.tasks import best_of, decide, edit, infill
from redraft.tasks.answer import Answer
from redraft.tasks.async_stream import AsyncStream
from redraft.tasks.edit import Edited, Span, Suggestion
from redraft.tasks.generation import (
    GenerationOptions,
    Prompt,
    check_choices,
    choose_seed,
    is_text_prompt,
    require_text,
    start_from_draft,
    to_messages,
)
from redraft.tasks.generation import new_seed as new_seed
from redraft.tasks.images import ImageReader, has_images
from redraft.tasks.infill import Filled, Infiller
from redraft.tasks.keywords import FillKeywords, GenerationKeywords, SamplerKeywords, SudokuKeywords, list_keywords
from redraft.tasks.mend import DEFAULT_LEAST, Mender
from redraft.tasks.streamer import run_with_streamer
from redraft.tasks.sudoku import board as boards
from redraft.tasks.sudoku import solve
from redraft.tasks.sudoku.board import Board
from redraft.tasks.sudoku.solve import Solution
from redraft.tasks.text_events import EncodedPrompt, TextAssembler, TextEvent, add_text
from redraft.tokenizer.chat_parser import close_channel
from redraft.tokenizer.helper_process import HelperStoppedError
from redraft.tokenizer.tokenizer import Tokenizer

Options = GenerationOptions | None
DEFAULT_MODEL = checkpoint.PACKAGED / "tiny"
SUDOKU_MODEL = checkpoint.PACKAGED / "sudoku"


def load(
    path_or_id: str | Path = DEFAULT_MODEL,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    quant: str | None = None,
    keep_bf16: bool = False,
    verify_with: str | Path | None = None,
    kv: str | None = None,
    gpu_memory: str | float | None = None,
    context: int | None = None,
    adapter: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    drafter: bool = True,
    vision: bool = False,
) -> "Writer":
    """Loads a Writer from a checkpoint folder, a GGUF file or a hub id; by default, the small model that ships with redraft.

    "tiny" and "sudoku" name the models in the package. Without a dtype, weights keep their stored precision, but float16
    becomes bf16; on a CPU without bf16 arithmetic all become float32. `quant="nvfp4"`, "int4" or "fp8" rounds the experts
    while loading, and the other layers to fp8, except with `keep_bf16`; see QuantPolicy. `verify_with` is a checkpoint of
    the same vocabulary that verifies what this one drafts (docs/verified.md). `kv="fp8"` stores KV caches in 8 bits.
    `gpu_memory="18GB"` limits the GPU's memory and plans it for `context` tokens, by default 16,384 (docs/hardware.md).
    `adapter` is the folder of a LoRA adapter, or the name of one that ships, that all requests use; `adapters` are folders
    by the names by which `with_adapter` and the clients of a server choose them (docs/serve.md). A model for which the
    package has a drafter is loaded with it, and so is the base of a drafter's folder; with `drafter=False` it writes left to
    right (docs/adapt.md). The vision tower is loaded with the first image, or at once with `vision=True`.
    """
    named = {**(adapters or {}), **({} if adapter is None else {str(adapter): adapter})}
    folders = {name: checkpoint.find_adapter(folder) for name, folder in named.items()}
    for folder in folders.values():
        checkpoint.read_adapter_config(folder)  # refuses what is no adapter before a model is loaded
    options: dict[str, Any] = {"device": device, "dtype": dtype, "quant": quant, "keep_bf16": keep_bf16}
    limit = limit_gpu(device, gpu_memory, context, kv, verify_with, folders.values(), vision=vision)
    with explain_lack_of_memory(limit):
        model, tokenizer, sampler = checkpoint.load_checkpoint(
            path_or_id, **options, place=limit.place if limit else None, drafter=drafter
        )
        loaded = {name: checkpoint.load_adapter(folder, model, Path(name).name) for name, folder in folders.items()}
        config = limit.offload(model) if limit else EngineConfig(kv=kv)
        images = ImageReader(model, tokenizer, path_or_id, limit.context_bytes if limit else 0)
        if vision:
            images.load_vision()  # before the engine measures how much memory is left
    verifier = None
    if verify_with is not None:
        verifier = checkpoint.load_verifier(verify_with, model, tokenizer, str(path_or_id), **options)
        sampler = sampler.changed(check="exact" if sampler.check == "off" else None)
    writer = Writer(model, tokenizer, sampler, verifier, config, limit, images)
    writer.adapters = {name: loaded[name] for name in adapters or {}}
    return writer if adapter is None else writer.with_adapter(loaded[str(adapter)])


class Writer:
    """Generates text with one model: write, chat, stream, fill, edit, suggest, decide.

    `write`, `chat` and `stream` take the fields of GenerationOptions as keywords (`max_tokens=64`, `seed=7`,
    `check="exact"`, `best_of=4`, `regex="[0-9]+"`, `schema={...}`, `choices=["yes", "no"]`) and those of SamplerConfig
    (`max_steps=20`, `entropy_bound=0.5`, `top_p=0.9`), or the record itself as `options`.
    """

    def __init__(
        self,
        model: Backbone,
        tokenizer: Tokenizer,
        sampler: SamplerConfig,
        verifier: Backbone | None = None,
        config: EngineConfig | None = None,
        gpu_limit: GpuLimit | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self.model = model
        self.adapters: dict[str, Adapter] = {}  # by the names by which clients choose them
        self.gpu_limit = gpu_limit
        self.tokenizer = tokenizer
        self.sampler = sampler
        self.images = images or ImageReader(model, tokenizer)
        self.engine = Engine(model, config, verifier)
        self.engine.memory_advice = gpu_limit.advice if gpu_limit else self.engine.memory_advice
        # A server sets a compiler that runs in helper processes.
        self.pattern_compiler: PatternCompiler = LocalCompiler(lambda: self.automaton_compiler)

    def __repr__(self) -> str:
        million = self.model.config.parameter_counts()["total"] / 1e6
        adapter = f", adapter={self.adapter.name!r}" if self.adapter is not None else ""
        place = f"{str(self.model.dtype).removeprefix('torch.')}, {self.model.device}"
        return f"Writer({million:,.1f} million parameters, {place}, check={self.sampler.check!r}{adapter})"

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that all requests of this Writer use."""
        return self.engine.adapter

    def with_adapter(self, adapter: Adapter | str | Path | None) -> "Writer":
        """A Writer whose requests use this adapter, or none. It shares model, engine and memory with this one.

        It is named as in `adapters`, or by its folder. Requests of both Writers, and of others, run together.
        """
        if isinstance(adapter, str) and adapter in self.adapters:
            adapter = self.adapters[adapter]
        elif isinstance(adapter, str | Path):
            adapter = checkpoint.load_adapter(adapter, self.model, Path(adapter).name)
        writer = copy.copy(self)
        writer.engine = AdaptedEngine(self.engine, adapter)
        vars(writer).pop("mender", None)  # it keeps the engine with which it was made
        return writer

    # 1. Generate

    @overload
    def write(  # type: ignore[overload-overlap]
        self, prompt: str, options: Options = None, *, streamer: Any = None, **keywords: Unpack[GenerationKeywords]
    ) -> Answer: ...
    @overload
    def write(
        self, prompt: Sequence[str], options: Options = None, *, streamer: Any = None, **keywords: Unpack[GenerationKeywords]
    ) -> list[Answer]: ...

    @list_keywords(GenerationKeywords)
    def write(
        self,
        prompt: str | Sequence[str],
        options: Options = None,
        *,
        streamer: Any = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> Answer | list[Answer]:
        """Continues a text, or several texts in one batch: text number i has the seed `seed + i`, as it would alone.

        `streamer` is a streamer of transformers; it receives the prompt, every draft and every committed canvas.
        """
        options = GenerationOptions.from_keywords(options, **keywords)
        if isinstance(prompt, str | bytes | bytearray) or not isinstance(prompt, Sequence):
            prompts = [require_text("a text to continue", prompt)]
        else:
            prompts = [require_text("each text to continue", text) for text in prompt]
        answers = self._answer_prompts([self.encode(text, options) for text in prompts], options, streamer)
        return answers[0] if isinstance(prompt, str) else answers

    @list_keywords(GenerationKeywords)
    def chat(
        self, messages: Prompt, options: Options = None, *, streamer: Any = None, **keywords: Unpack[GenerationKeywords]
    ) -> Answer:
        """Answers a conversation. A string is a conversation of one user message."""
        options = GenerationOptions.from_keywords(options, **keywords)
        return self._answer_prompts([self.encode(to_messages(messages), options)], options, streamer)[0]

    @list_keywords(GenerationKeywords)
    def astream(self, prompt: Prompt, options: Options = None, **keywords: Unpack[GenerationKeywords]) -> AsyncStream:
        """The events of `stream` for asyncio: `async for event in writer.astream(...)`, or `await` it for the stream.

        Closing the stream, or cancelling the task that reads it, sets `stop`, which cancels the request.
        """
        options = GenerationOptions.from_keywords(options, **keywords)
        stop = options.stop if options.stop is not None else threading.Event()
        return AsyncStream(lambda: self.stream(prompt, replace(options, stop=stop)), stop)

    @list_keywords(GenerationKeywords)
    def stream(
        self, prompt: Prompt | EncodedPrompt, options: Options = None, **keywords: Unpack[GenerationKeywords]
    ) -> Iterator[TextEvent]:
        """Yields the events of one answer with their text: every draft, every committed canvas, the end.

        A string or token ids are continued, messages are answered. The texts of the committed canvases add up to the
        answer; so do the deltas of all events, which come as soon as their text is final. After `seconds` the current canvas
        is committed and the stream ends; once `stop` is set, it ends at once.
        With `best_of`, the drafts are those of the first answer, and the canvases of the best one are committed at the end.
        """
        options = GenerationOptions.from_keywords(options, **keywords)
        encoded = prompt if isinstance(prompt, EncodedPrompt) else self.encode(prompt, options)
        (cfg,), constraints = self.plan([encoded.ids], options)
        assembler = TextAssembler(self.tokenizer, encoded)
        if options.best_of > 1:
            best_of.check_memory(self.engine, len(encoded.ids) + cfg.max_answer, options.best_of)
        seeds = best_of.seeds_of(choose_seed(options.seed), options.best_of)
        streams = [self.engine.stream(self._add_request(encoded, cfg, seed, options, constraints)) for seed in seeds]
        events = best_of.stream_likeliest(self.engine, encoded, streams, options.stop) if len(streams) > 1 else streams[0]
        return add_text(events, cfg, assembler, decodes_drafts=options.drafts, is_compared=len(streams) > 1)

    def plan(
        self, prompts: Sequence[Sequence[int]], options: GenerationOptions
    ) -> tuple[list[SamplerConfig], Constraints | None]:
        """The settings with which each prompt is answered, canvas length included, and the constraints on all answers."""
        constraints = self._constraints(options)
        cfg = self._fit_pattern(options, options.sampler_config(self.sampler), constraints)
        return [options.fit_canvas(cfg, len(ids), self._context, constraints) for ids in prompts], constraints

    def choose_check(self, options: GenerationOptions) -> str:
        """The mode in which an answer is written: that of the options, or "exact" where its pattern fits no canvas."""
        cfg = options.sampler_config(self.sampler)
        return (
            self._fit_pattern(options, cfg, self._constraints(options)).check if options.pattern is not None else cfg.check
        )

    def _fit_pattern(self, options: GenerationOptions, cfg: SamplerConfig, constraints: Constraints | None) -> SamplerConfig:
        """The settings with a canvas that is short enough for the pattern's sums, else those of exact mode.

        Exact mode writes from left to right. It is not chosen against the caller, nor where the canvas is the caller's.
        """
        if constraints is None or constraints.pattern is None or cfg.check == "exact":
            return cfg
        if constraints.automaton is not None:
            lengths = [cfg.canvas_length, *(cfg.canvas_lengths if options.chooses_canvas else ())]
            automaton, most = constraints.automaton, cfg.max_new_tokens
            short = sorted(
                {n for n in lengths if replace(step_cost(self.model, cfg), canvas_length=n).allows(automaton, most)}
            )
            if cfg.canvas_length in short:
                return cfg
            if short:
                return cfg.changed(canvas_length=short[-1], canvas_lengths=tuple(short))
        is_fixed = options.check == "off" or options.draft or options.replay is not None or constraints.pins
        if is_fixed or constraints.banned:
            return cfg  # it is refused
        return replace(options, check="exact").sampler_config(self.sampler)

    def encode(self, prompt: Prompt, options: GenerationOptions) -> EncodedPrompt:
        """A prompt for `stream`, as `encode_prompt` encodes it. An answer that obeys a pattern has no reasoning."""
        if has_images(prompt):
            return self.images.encode(to_messages(prompt), options, self._context, self.engine)
        ids = self.encode_prompt(prompt, options.tools, options.think, options.stop)
        is_chat = not is_text_prompt(prompt)
        has_pattern = options.pattern is not None
        return EncodedPrompt(close_channel(self.tokenizer, ids) if is_chat and has_pattern else ids, is_chat)

    def encode_prompt(
        self,
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool = False,
        stop: threading.Event | None = None,
    ) -> list[int]:
        """Token ids of a text to continue (which may be ids already) or of a conversation.

        Raises Stopped once `stop` is set.
        """
        if not is_text_prompt(prompt):
            try:
                return self.tokenizer.encode_chat(
                    to_messages(prompt), tools=tools, think=think, limit=self._context, stop=stop
                )
            except HelperStoppedError:
                raise Stopped from None
        if tools or think:
            raise ValueError("tools and think need a conversation; give messages instead of a text to continue")
        if isinstance(prompt, str):
            return self.tokenizer.encode_prompt(prompt, self._context)
        return list(prompt)  # type: ignore[arg-type]

    @property
    def _context(self) -> int:
        return self.model.config.max_position_embeddings

    def _answer_prompts(self, encoded: Sequence[EncodedPrompt], options: GenerationOptions, streamer: Any) -> list[Answer]:
        prompts = [prompt.ids for prompt in encoded]
        cfgs, constraints = self.plan(prompts, options)
        first_seed = choose_seed(options.seed)
        seeds = [first_seed + row for row in range(len(prompts))]
        if streamer is not None:
            if len(set(cfgs)) > 1:
                raise ValueError("with a streamer all prompts need canvases of one length: give canvas_length")
            end = run_with_streamer(self.engine, self.tokenizer, encoded, cfgs[0], seeds, options, constraints, streamer)
            return [Answer.from_finished(end, row, self.tokenizer, each, cfgs[0]) for row, each in enumerate(encoded)]
        if options.best_of > 1:
            longest = max(len(ids) + cfg.max_answer for ids, cfg in zip(prompts, cfgs, strict=True))
            best_of.check_memory(self.engine, longest, options.best_of)
        requests: list[Request] = []
        try:
            for prompt, cfg, seed in zip(encoded, cfgs, seeds, strict=True):
                for candidate_seed in best_of.seeds_of(seed, options.best_of):
                    requests.append(self._add_request(prompt, cfg, candidate_seed, options, constraints))
            ends = self.engine.run(requests)
        finally:
            for request in requests:
                self.engine.cancel(request)
        if len(ends) < len(requests):  # cancelled, by `stop` or because the engine's thread has ended
            raise Stopped
        chosen = zip(encoded, best_of.choose_answers(self.engine, encoded, requests, ends, options), strict=True)
        return [Answer.from_finished(end, 0, self.tokenizer, prompt, cfg) for prompt, (end, cfg) in chosen]

    def _add_request(
        self, prompt: EncodedPrompt, cfg: SamplerConfig, seed: int, options: GenerationOptions, given: Constraints | None
    ) -> Request:
        return self.engine.add(
            prompt.ids,
            cfg,
            seed=seed,
            constraints=given,
            first_canvas_1C=start_from_draft([seed], options.draft, self.tokenizer, cfg, self.model.config.vocab_size),
            seconds=options.seconds,
            stop=options.stop,
            replay=options.replay,
            candidates=options.candidates,
            images=prompt.images,
        )

    # 2. Constraints

    def _constraints(self, options: GenerationOptions) -> Constraints | None:
        """The constraints of the options, with the automaton of their regex, schema or choices."""
        if options.pattern is None:
            return options.constraints
        (compiled,) = self._compile([options.pattern], options.stop)
        constraints = options.constraints or Constraints()
        if isinstance(compiled, PrefixGrammar):
            return replace(constraints, grammar=compiled)
        return replace(constraints, automaton=compiled)

    def _compile(self, patterns: Sequence[Pattern], stop: threading.Event | None) -> list[Compiled]:
        try:
            return self.pattern_compiler.compile(patterns, stop)
        except HelperStoppedError:
            raise Stopped from None

    @cached_property
    def automaton_compiler(self) -> AutomatonCompiler:
        """Compiles regular expressions to automata over this model's vocabulary."""
        return AutomatonCompiler(self.token_bytes, self.sampler.eos_token_ids)

    @property
    def token_bytes(self) -> tuple[bytes | None, ...]:
        """The bytes of every id of the model; None for special tokens and for ids that only the model has."""
        token_bytes = self.tokenizer.token_bytes
        return (*token_bytes, *[None] * (self.model.config.vocab_size - len(token_bytes)))

    def decide(
        self, prompt: Prompt, choices: Sequence[str], *, seed: int = 0, stop: threading.Event | None = None
    ) -> dict[str, float]:
        """The probability of each choice as the answer, from one denoising forward over a canvas of noise.

        Sums over all tokenizations of a choice; the probabilities of the choices add up to one. A string is continued,
        messages are answered. Raises Stopped once `stop` is set.
        """
        check_choices(choices)
        self.model.require_denoiser("decide")
        ids = self.encode_prompt(prompt, stop=stop)
        compiled = self._compile([Pattern(choices=[choice]) for choice in choices], stop)
        automata = [each for each in compiled if isinstance(each, TokenAutomaton)]  # choices have no other form
        probabilities = decide.decide(self.engine, ids, automata, self.sampler, choose_seed(seed), stop)
        return dict(zip(choices, probabilities, strict=True))

    # 3. Infill and edit

    @overload
    def fill(self, text: str | None = None, *, count: None = None, **options: Unpack[FillKeywords]) -> Filled: ...
    @overload
    def fill(self, text: str | None = None, *, count: int, **options: Unpack[FillKeywords]) -> list[Filled]: ...

    @list_keywords(FillKeywords)
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
        **settings: Unpack[SamplerKeywords],
    ) -> Filled | list[Filled]:
        """Infills the gaps of a text, written [[ ]] or [[ 8 ]] for 8 tokens; or the gap between a prefix and a suffix (FIM).

        The text around the gaps is returned unchanged. A gap without a length has at most `longest` tokens. With `count`,
        returns a list of up to that many infills, the most likely first. `context` precedes the prefix and is not part of
        the result. After `seconds` a gap's canvases are committed as they are. `watch` is called with every draft of one
        canvas of each gap. Raises Stopped once `stop` is set. `settings` are `temperature` and fields of SamplerConfig.
        """
        if (text is None) == (prefix is None and suffix is None):
            raise ValueError("give a text with gaps, or a prefix and a suffix")
        if text is not None:
            if context:
                raise ValueError("context goes with a prefix; put it into the text that has gaps")
            template = infill.parse_template(text)
        else:
            template = infill.between(prefix or "", suffix or "", context)
        infills = Infiller(self.engine, self.tokenizer).infill(
            template,
            self._sampler_config(**settings),
            seed=choose_seed(seed),
            count=1 if count is None else count,
            longest=longest,
            seconds=seconds,
            watch=watch,
            stop=stop,
        )
        if text is None:
            infills = [filled.without_context(context) for filled in infills]
        return infills[0] if count is None else infills

    @list_keywords(SamplerKeywords)
    def edit(
        self,
        text: str,
        instruction: str | None = None,
        *,
        strength: float | None = None,
        keep: Sequence[Span] = (),
        seed: int | None = None,
        stop: threading.Event | None = None,
        **settings: Unpack[SamplerKeywords],
    ) -> Edited:
        """Edits a text in place. Without `strength` and an instruction it makes the repairs that `suggest` would suggest.

        With a strength it replaces at most this share of the tokens, the least likely ones; an instruction (chat models
        only, strength 0.3) conditions which are likely. Characters in the spans `keep` (start, end) do not change.
        Raises Stopped once `stop` is set. `settings` are `temperature` and fields of SamplerConfig; repairs take none.
        """
        if instruction is None and strength is None:
            self._sampler_config(**settings)  # refuses unknown settings
            if given := sorted(name for name, value in settings.items() if value is not None):
                raise ValueError(
                    f"{given[0]} has no meaning for repairs, which draw nothing: give a strength, or leave it out"
                )
            return self.mender.mend(text, least=DEFAULT_LEAST, keep=keep, seed=choose_seed(seed), stop=stop)
        prompt: list[int] = []
        if instruction is not None:
            request = f"{require_text('instruction', instruction)}\n\n{require_text('text', text)}"
            prompt = self.encode_prompt(to_messages(request), stop=stop)
        return edit.edit(
            self.engine,
            self.tokenizer,
            text,
            self._sampler_config(**settings),
            strength=DEFAULT_EDIT_STRENGTH if strength is None else strength,
            keep=keep,
            prompt=prompt,
            seed=choose_seed(seed),
            stop=stop,
        )

    def suggest(
        self, text: str, *, least: float = DEFAULT_LEAST, most: int = 3, stop: threading.Event | None = None
    ) -> list[Suggestion]:
        """Finds places where a small repair makes the text `least` times as likely. Lists `most` repairs at most.

        Raises Stopped once `stop` is set.
        """
        return self.mender.suggest(text, least=least, most=most, stop=stop)

    @cached_property
    def mender(self) -> Mender:
        """Finds and repairs mistakes with the causal half."""
        return Mender(self.engine, self.tokenizer)

    def _sampler_config(self, temperature: float | None = None, **settings: Any) -> SamplerConfig:
        return self.sampler.with_temperature(temperature).changed(**settings)

    # 4. Sudoku

    @overload
    def solve_sudoku(  # type: ignore[overload-overlap]
        self, puzzle: str | Board, *, seed: int | None = None, **options: Unpack[SudokuKeywords]
    ) -> Solution: ...
    @overload
    def solve_sudoku(
        self, puzzle: Sequence[str | Board], *, seed: int | None = None, **options: Unpack[SudokuKeywords]
    ) -> list[Solution]: ...

    @list_keywords(SudokuKeywords)
    def solve_sudoku(
        self, puzzle: str | Board | Sequence[str | Board], *, seed: int | None = None, **options: Unpack[SudokuKeywords]
    ) -> Solution | list[Solution]:
        """Solves a puzzle (81 characters, a drawn grid, or 81 numbers) or a batch of them. Needs a Sudoku model.

        Puzzle number i has the seed `seed + i`. `options` are `canvases=64`, `check=True`, and fields of SamplerConfig.
        """
        puzzles, is_single = boards.to_boards(puzzle)
        events = self.sudoku_events(puzzles, seed=choose_seed(seed), **options)
        solutions = sorted((e for e in events if isinstance(e, Solution)), key=lambda solution: solution.number)
        return solutions[0] if is_single else solutions

    def sudoku_events(
        self, puzzles: Sequence[Board], *, seed: int, canvases: int = 64, check: bool = True, **settings: Any
    ) -> Iterator[solve.SolveStep | Solution]:
        """Yields every denoising step over the boards, and every solution when it is done."""
        options: dict[str, Any] = {"seed": seed, "canvases": canvases, "check": check, "adapter": self.adapter}
        return solve.solve(self.model, puzzles, self._sampler_config(**settings), **options)
