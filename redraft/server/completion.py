"""Completions, independent of the wire format: what a client asks for, and the chunks of the result.

    request body -> CompletionParams -> [stream_completion: Writer.stream, cut at stop strings] -> Frame, TextDelta, Finish

With check "off", a temperature of 1 is the checkpoint's own schedule and other values scale it; in checked and exact mode it
is the temperature of the causal half. This file knows nothing of HTTP.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from redraft.config import AUTO, parse_json
from redraft.constraints.constraints import Constraints
from redraft.constraints.errors import BudgetError
from redraft.diffusion.generate import Draft, Finished, Stats
from redraft.engine import RequestError, Stopped
from redraft.server.bodies import check_json_size
from redraft.server.checks import choose_check, step_settings
from redraft.server.errors import BadRequestError, checking_request
from redraft.server.frames import Frame, FrameBuilder
from redraft.server.images import NO_IMAGES, ServedImages, parts_of_content
from redraft.server.logprobs import LogprobCollector, TokenLogprob
from redraft.server.schema import ChatMessage
from redraft.server.stop_strings import SettledStop, StopStringFilter
from redraft.server.tool_calls import NO_TOOLS, CallDelta, CallReader, ToolChoice, build_structure, name_tools
from redraft.tasks import best_of
from redraft.tasks.generation import GenerationOptions, Prompt
from redraft.tasks.infill import sequence_logprobs
from redraft.tasks.text_events import NOTHING, EncodedPrompt, TextCommitted, TextDraft
from redraft.tokenizer.chat_parser import Parsed
from redraft.tokenizer.messages import image_sources
from redraft.tokenizer.tokenizer import Message, Tokenizer, TokenizerError
from redraft.tokenizer.tool_text import CallForm, write_tools
from redraft.writer import Writer, is_text_prompt, new_seed

MAX_ARGUMENT_VALUES = 10_000  # of the JSON in a tool call's arguments
LEFT_TO_RIGHT = "the pattern fits no canvas of this model, so the answer was written from left to right (check 'exact')"
JSON_OBJECT_SCHEMA = {"type": "object"}  # any object, with lists and objects inside


@dataclass(frozen=True, kw_only=True)
class CompletionParams:
    """One completion, as a client asks for it."""

    prompt: Prompt
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    tools: ToolChoice = NO_TOOLS
    call_form: CallForm | None = None  # the completion obeys a structure in which calls are text of this form
    think: bool = False
    pattern: Mapping[str, Any] = field(default_factory=dict)  # regex, schema, choices or structure
    forbidden: tuple[int, ...] = ()  # token ids
    ignore_eos: bool = False  # only its length ends the completion
    pins: Mapping[int, int] = field(default_factory=dict)
    draft: str | tuple[int, ...] | None = None  # a text, or token ids, that the first canvas starts from instead of noise
    sampler_settings: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplerConfig
    check: str | None = None  # off, checked or exact; None: as the checkpoint has it
    causal_settings: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplerConfig for checked and exact mode
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # in these modes; `forbidden` works in all
    best_of: int = 1  # the completion is one of so many, of which the likeliest are returned
    include_frames: bool = False
    logprobs: int | None = None  # how many likely tokens come with each token; None: no logprobs
    notes: tuple[str, ...] = ()  # sentences about how it is written, for the answer

    @property
    def compiles(self) -> bool:
        """Whether a pattern may have to be compiled before the first step."""
        return bool(self.pattern) or bool(self.tools.names)


@dataclass(frozen=True)
class Started:
    """The engine has accepted the request."""


@dataclass(frozen=True)
class TextDelta:
    """What has become final since the last delta: a part of a canvas, or all of it."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()
    tokens: tuple[TokenLogprob, ...] = ()  # if logprobs were requested


@dataclass(frozen=True)
class Finish:
    """The end of a completion."""

    finish_reason: str  # stop, length, deadline or tool_calls
    stats: Stats
    stop_string: str | None = None  # the client's own stop string that ended it
    mean_logprob: float | None = None  # of its tokens, under the causal half; only for completions that are compared
    notes: tuple[str, ...] = ()  # sentences about the images of the prompt, and about how the answer was written


Chunk = Started | Frame | TextDelta | Finish


def as_stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns stop strings as a tuple."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def template_message(message: ChatMessage) -> Message:
    """Returns a message as the chat template reads it."""
    converted: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    converted["content"] = parts_of_content(message.content, "messages") if message.content is not None else ""
    if message.name is not None:
        converted["name"] = message.name
    if message.tool_calls:
        converted["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": parse_arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        converted["tool_call_id"] = message.tool_call_id
    return converted


def parse_arguments(arguments: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a tool call's arguments, which clients send as a JSON string."""
    if not isinstance(arguments, str):
        return arguments
    check_json_size(arguments.encode("utf-8", "replace"), MAX_ARGUMENT_VALUES, "a tool call")
    try:
        parsed = parse_json(arguments or "{}")
    except ValueError:
        raise BadRequestError(f"the arguments of a tool call must be JSON, got {arguments[:60]!r}", "messages") from None
    if not isinstance(parsed, dict):
        raise BadRequestError(f"the arguments of a tool call must be a JSON object, got {arguments[:60]!r}", "messages")
    return parsed


def split_prompts(prompt: str | Sequence[Any]) -> list[str | Sequence[int]]:
    """Returns the texts to continue, each as a string or as token ids, of a field that holds one or several."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


def prompt_text(tokenizer: Tokenizer, prompt: str | Sequence[int]) -> str:
    """Returns the text of a prompt that may be token ids."""
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, keep_special=True)


def join_messages(messages: Sequence[Message]) -> str:
    """Returns a conversation as one text, a paragraph per message: for models without a chat template."""
    if image_sources(messages):
        raise BadRequestError("this model has no chat template, so it takes no images: send text only", "messages")
    return "\n\n".join(str(message.get("content") or "") for message in messages)


def stream_completion(
    writer: Writer, params: CompletionParams, stop: threading.Event, images: ServedImages = NO_IMAGES
) -> Iterator[Chunk]:
    """Yields Started when the engine has accepted the request, then frames and text deltas, at last Finish."""
    began = time.perf_counter()
    seed = params.seed if params.seed is not None else new_seed()
    choice = params.tools
    with checking_request():
        params, options = plan_completion(writer, params, seed, stop)
        prompt = images.encode(writer, params.prompt, options)
        try:
            if params.best_of > 1:
                check_best_of_memory(writer, prompt, params.best_of, options)
            events = writer.stream(prompt, options)
        except BudgetError as error:
            raise name_tools(choice, error) from None
    yield Started()

    stop_filter = StopStringFilter(params.stop_strings)
    frames = FrameBuilder(writer.tokenizer)
    logprobs = LogprobCollector(writer.tokenizer, params.logprobs, prompt)
    cost = CostSoFar(params, len(prompt.ids))
    held: list[TextDelta] = []  # final, but not sent: frames show the canvas in work, and logprobs come with its commit
    sends_early = not params.include_frames and params.logprobs is None
    watch = watch_for_stop(writer, params, prompt)
    draft: Draft | None = None
    calls = CallReader(params.call_form, None if choice.is_parallel else 1)
    finished: Finished | None = None
    for event in events:
        if isinstance(event, Finished):
            finished = event
            continue
        cost.add(event)
        if isinstance(event, TextDraft):
            draft = event
            if params.include_frames:
                yield frames.build(event)
            if params.logprobs is not None:
                continue
        delta = event.delta
        if watch is not None:
            delta = watch.add(event) or delta
        if isinstance(event, TextDraft) and delta == NOTHING:
            continue
        if isinstance(event, TextCommitted):
            logprobs.add_canvas(event, draft)
            frames = FrameBuilder(writer.tokenizer)
            delta = delta if params.logprobs is None else Parsed(event.text, event.reasoning, event.tool_calls)
        own_text, call_deltas = calls.feed(delta)
        text = stop_filter.feed(own_text)
        cost.text += delta.reasoning + text
        held.append(TextDelta(text, delta.reasoning, call_deltas, logprobs.release(text)))
        if sends_early or isinstance(event, TextCommitted) or stop_filter.found is not None:
            yield join_deltas(held)
            held = []
        if stop_filter.found is not None:
            stats = cost.stats(writer, seed, time.perf_counter() - began)
            ids = writer.tokenizer.encode_fragment(cost.text)
            mean_logprob = mean_logprob_of(writer, params, prompt, stats, ids, stop)
            stop.set()
            writer.engine.notify()
            yield Finish("stop", stats, stop_filter.found, mean_logprob, (*params.notes, *prompt.notes))
            return
    if finished is None:
        raise Stopped
    if rest := stop_filter.feed(calls.flush()) + stop_filter.flush():
        yield TextDelta(rest, tokens=logprobs.release(rest))
    stats = finished.stats[0]
    ids = finished.ids_BT[0, : stats.new_tokens].tolist()
    mean_logprob = mean_logprob_of(writer, params, prompt, stats, ids, stop)
    reason = "tool_calls" if calls.calls and not calls.is_open else finished.reasons[0]
    yield Finish(reason, stats, mean_logprob=mean_logprob, notes=(*params.notes, *prompt.notes))


def plan_completion(
    writer: Writer, params: CompletionParams, seed: int, stop: threading.Event
) -> tuple[CompletionParams, GenerationOptions]:
    """The completion as this model writes it. A pattern that fits no canvas is written from left to right."""
    given = params.check
    params = adapt_to_model(writer, params)
    options = generation_options(params, seed, stop)
    if options.pattern is None or given is not None:
        return params, options
    check = writer.choose_check(replace(options, check=None))
    if check == params.check:
        return params, options
    params = replace(params, check=check, notes=(*params.notes, LEFT_TO_RIGHT))
    return params, generation_options(params, seed, stop)


def watch_for_stop(writer: Writer, params: CompletionParams, prompt: EncodedPrompt) -> SettledStop | None:
    """With check off, what ends a canvas when a stop string has settled on it. Logprobs come with whole canvases only.

    With `settle_prefix` the deltas of drafts have the settled text already. A stop string in a call ends nothing.
    """
    cfg = writer.sampler.changed(
        max_new_tokens=params.max_tokens, settle_prefix=params.sampler_settings.get("settle_prefix")
    )
    has_deltas = params.check != "off" or cfg.settle_prefix
    if has_deltas or params.call_form is not None or params.logprobs is not None or not any(params.stop_strings):
        return None
    return SettledStop(params.stop_strings, writer.tokenizer, cfg, prompt)


def join_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """Deltas that follow one another as one."""
    return TextDelta(
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
    )


def adapt_to_model(writer: Writer, params: CompletionParams) -> CompletionParams:
    """Checks what this model can do, and fills in what depends on it."""
    params = add_tools(writer.tokenizer, params)
    if params.think and not writer.tokenizer.can_think:
        lack = "has no chat template" if not writer.tokenizer.can_chat else "has a chat template without thinking"
        raise BadRequestError(f"this model {lack}, so it cannot reason before it answers: leave thinking out", "thinking")
    if not is_text_prompt(params.prompt) and not writer.tokenizer.can_chat:
        params = replace(params, prompt=join_messages(params.prompt))  # type: ignore[arg-type]
    if params.logprobs is not None:
        check_logprobs(writer.tokenizer, params)
    params = replace(params, check=choose_check(writer.sampler, params.check, has_draft=bool(params.draft)))
    if params.logit_bias and params.check == "off":
        token, bias = next(iter(params.logit_bias.items()))
        message = f"with check 'off', logit_bias can only forbid a token with -100, got {token}: {bias}"
        raise BadRequestError(message, "logit_bias")
    length = params.sampler_settings.get("canvas_length", writer.sampler.canvas_length)
    if length == AUTO:
        length = writer.sampler.canvas_length  # of a draft, and of a completion that is one canvas
    if isinstance(params.draft, tuple) and len(params.draft) != length:
        message = f"diffusion_seed_canvas has {len(params.draft)} tokens, the canvas has {length}"
        raise BadRequestError(message, "diffusion_seed_canvas")
    if params.ignore_eos:  # one canvas is the whole completion
        forbidden = (*params.forbidden, *writer.sampler.eos_token_ids)
        settings = {**params.sampler_settings, "canvas_length": length}
        params = replace(params, max_tokens=length, forbidden=forbidden, sampler_settings=settings)
    return params


def add_tools(tokenizer: Tokenizer, params: CompletionParams) -> CompletionParams:
    """Tells a model whose chat template knows no tools of them, and constrains calls whose form is text.

    A call is the whole completion, so no reasoning comes before it.
    """
    choice = params.tools
    if choice.is_forced and params.pattern:
        message = "tool_choice forces a call, so no response_format can apply: leave one of them out"
        raise BadRequestError(message, "tool_choice")
    if choice.names and (choice.is_forced or not tokenizer.has_call_tokens):
        form = tokenizer.call_form
        structure = build_structure(choice, form, params.pattern)
        params = replace(params, pattern={"structure": structure}, call_form=form, think=False)
    if is_text_prompt(params.prompt) or tokenizer.can_call:
        return params
    takes_system = tokenizer.takes_system or not tokenizer.can_chat
    messages = write_tools(params.prompt, choice.tools, takes_system=takes_system)  # type: ignore[arg-type]
    return replace(params, prompt=messages, tools=replace(choice, tools=None))


def generation_options(params: CompletionParams, seed: int, stop: threading.Event) -> GenerationOptions:
    """The Writer's options for a completion."""
    candidates = 0 if params.logprobs is None else params.logprobs or 1
    has_constraints = bool(params.pins or params.forbidden)
    assert params.check is not None
    settings = step_settings(params.check, params.sampler_settings)
    if params.check != "off":
        settings |= {**params.causal_settings, "logit_bias": tuple(params.logit_bias.items()) or None}
    return GenerationOptions(
        tools=params.tools.tools,
        think=params.think,
        max_tokens=params.max_tokens,
        seed=seed,
        check=params.check,
        temperature=params.temperature,
        constraints=Constraints(pins=params.pins, forbidden=params.forbidden) if has_constraints else None,
        stop=stop,
        draft=params.draft,
        drafts=params.include_frames,
        candidates=max(int(params.include_frames), candidates),
        sampler=settings,
        **params.pattern,
    )


def check_best_of_memory(writer: Writer, prompt: EncodedPrompt, count: int, options: GenerationOptions) -> None:
    """Refuses to compare more completions than the memory budget holds at once."""
    (cfg,), _ = writer.plan([prompt.ids], options)
    try:
        best_of.check_memory(writer.engine, len(prompt.ids) + cfg.max_answer, count)
    except RequestError as error:
        raise BadRequestError(str(error), "best_of") from None


def mean_logprob_of(
    writer: Writer,
    params: CompletionParams,
    prompt: EncodedPrompt,
    stats: Stats,
    ids: Sequence[int],
    stop: threading.Event,
) -> float | None:
    """The mean log probability of a completion's tokens under the causal half; None if it is not compared with others."""
    if params.best_of == 1:
        return None
    total = stats.logprob
    if total is None:  # the causal half has not seen them yet
        (total,) = sequence_logprobs(writer.engine, prompt.ids, [ids], stop, prompt.images)
    return total / max(1, len(ids))


def check_logprobs(tokenizer: Tokenizer, params: CompletionParams) -> None:
    """Raises BadRequestError where a completion has no logprobs."""
    if params.tools.names or params.think:
        raise BadRequestError("logprobs are not available with tools or thinking: leave tools and thinking out", "logprobs")
    try:
        _ = tokenizer.token_bytes
    except TokenizerError:
        raise BadRequestError("this model's tokens do not spell text: leave logprobs out", "logprobs") from None


@dataclass
class CostSoFar:
    """What a completion has cost and sent up to some event: the stats of one that a stop string ends."""

    params: CompletionParams
    prompt_tokens: int
    text: str = ""  # sent, reasoning included
    steps: int = 0  # of denoising
    committed: list[TextCommitted] = field(default_factory=list)
    draft: TextDraft | None = None  # of a canvas that is not committed yet

    def add(self, event: TextDraft | TextCommitted) -> None:
        """Counts an event."""
        if isinstance(event, TextCommitted):
            self.committed.append(event)
            self.draft = None
        else:
            self.steps += event.verified is None
            self.draft = event

    def stats(self, writer: Writer, seed: int, seconds: float) -> Stats:
        """The stats of the completion if it ends here."""
        params = self.params
        assert params.check is not None
        canvases = len(self.committed) + (self.draft is not None)
        stats = Stats(
            seed=seed,
            prompt_tokens=self.prompt_tokens,
            new_tokens=len(writer.tokenizer.encode_fragment(self.text)),
            canvases=canvases,
            settled=sum(bool(event.settled_B[0]) for event in self.committed) + (self.draft is not None),
            steps=self.steps,
            commits=canvases - 1 if params.check != "exact" else 0,
            seconds=seconds,
            prefill_seconds=0.0,
            check=params.check,
        )
        if params.check == "off":
            return stats
        last = self.draft or self.committed[-1]
        logprobs = [logprob for event in (*self.committed, self.draft) if event is not None for logprob in event.logprobs]
        counts: dict[str, Any] = dict(last.counts)
        return replace(stats, canvases=0, settled=0, logprob=sum(logprobs[: stats.new_tokens]), **counts)
