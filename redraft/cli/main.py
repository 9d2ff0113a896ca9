"""The command line: redraft "prompt", redraft chat, redraft info. Flags have the names that llama.cpp and Ollama use.

On a terminal the canvas is drawn live; in a pipe only the committed text goes to stdout. A user error is one sentence on
stderr with exit code 2. Ctrl-C keeps the committed text and exits with 130.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

import redraft
from redraft.cli import (
    adapt,
    augment,
    batch,
    cluster,
    data,
    demo,
    edit,
    info,
    merge,
    models,
    quantize,
    serve,
    sudoku,
    train,
    tune,
    warm,
)
from redraft.cli.chat import Conversation
from redraft.cli.generation import (
    FLAGS,
    BestOf,
    Bound,
    CanvasLength,
    Check,
    LeftToRight,
    MaxTokens,
    MinP,
    RepetitionPenalty,
    Steps,
    Temperature,
    Think,
    Tolerance,
    TopK,
    TopP,
    build_options,
)
from redraft.cli.options import (
    Adapter,
    Context,
    Device,
    Dtype,
    GpuMemory,
    KeepBf16,
    Kv,
    Model,
    Quant,
    Seed,
    Threads,
    VerifyWith,
    Vision,
    name_flags,
    read_stdin,
    refuse_sudoku_model,
)
from redraft.cli.recording import Recording, check_recording
from redraft.cli.terminal import CanvasView, strip_control_characters, summary
from redraft.cli.warm import show_builds, show_builds_until_first, show_loaded, show_peak
from redraft.diffusion.events import Finished
from redraft.tasks.text_events import TextCommitted, TextEvent

if TYPE_CHECKING:
    from redraft.writer import Writer


class DefaultToWrite(TyperGroup):
    """`redraft "prompt"` means `redraft write "prompt"`: a first argument that is no command is a prompt."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Inserts the command `write` where the user left it out."""
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h", "--version"):
            args = ["write", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=DefaultToWrite,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_set: bool) -> None:
    if is_set:
        print(redraft.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Run text-diffusion language models. `redraft "prompt"` is short for `redraft write "prompt"`."""


System = Annotated[str | None, typer.Option("--system", "-s", help="A system message before the conversation.")]
Image = Annotated[
    list[Path] | None,
    typer.Option(
        "--image", help="A PNG, JPEG, WebP, GIF or BMP file before the prompt; may be given again.", metavar="FILE"
    ),
]
Visual = Annotated[bool | None, typer.Option("--visual/--no-visual", help="Draw the canvas as it settles. [on a terminal]")]


@app.command()
def write(
    prompt: Annotated[str | None, typer.Argument(help="Text to answer or continue; - or nothing reads stdin.")] = None,
    model: Model = "",
    max_tokens: MaxTokens = None,
    check: Check = None,
    left_to_right: LeftToRight = False,
    tolerance: Tolerance = None,
    best_of: BestOf = 1,
    steps: Steps = None,
    seed: Seed = None,
    entropy_bound: Bound = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    canvas_length: CanvasLength = None,
    think: Think = False,
    system: System = None,
    image: Image = None,
    regex: Annotated[str | None, typer.Option("--regex", help="The whole answer matches this regular expression.")] = None,
    schema: Annotated[str | None, typer.Option("--schema", help="The answer is JSON that follows this schema file.")] = None,
    choices: Annotated[str | None, typer.Option("--choices", help="The answer is one of these: a,b,c.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, without a chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print text, statistics and seed as one JSON object.")] = False,
    record: Annotated[str | None, typer.Option("--record", help="Save the run as an animated picture: OUT.svg.")] = None,
    visual: Visual = None,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    quant: Quant = None,
    keep_bf16: KeepBf16 = False,
    verify_with: VerifyWith = None,
    kv: Kv = None,
    gpu_memory: GpuMemory = None,
    context: Context = None,
    vision: Vision = False,
    adapter: Adapter = None,
) -> None:
    """Answer a prompt, or continue it when the model has no chat template."""
    text = _read_prompt(prompt)
    check_recording(record)
    loading = {"device": device, "dtype": dtype, "quant": quant, "keep_bf16": keep_bf16, "verify_with": verify_with}
    memory = {"kv": kv, "gpu_memory": gpu_memory, "context": context}
    writer = _load(model, **loading, **memory, adapter=adapter, vision=vision or bool(image))
    is_chat = writer.tokenizer.can_chat and not raw
    if not is_chat and (system or think or image):
        raise ValueError("--system, --think and --image need a chat model; this one continues text")
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
    options = build_options(
        writer.sampler,
        **filters,
        max_steps=steps,
        entropy_bound=entropy_bound,
        canvas_length=canvas_length,
        tolerance=tolerance,
        left_to_right=left_to_right,
        max_tokens=max_tokens,
        seed=seed,
        check=check,
        temperature=temperature,
        best_of=best_of,
        think=think,
        regex=regex,
        schema=Path(schema).read_text(encoding="utf-8", errors="replace") if schema is not None else None,
        choices=choices.split(",") if choices is not None else None,
    )
    with name_flags(FLAGS):
        events = writer.stream(_conversation(system, text, image) if is_chat else text, options=options)
    events = show_builds_until_first(events, _stderr(), message=_waiting_message(best_of))
    recording = Recording(text, writer.tokenizer, writer.sampler.eos_token_ids) if record is not None else None
    events = recording.watch(events) if recording is not None else events
    if as_json:
        _print_json(events, seed)
    else:
        _show(writer, events, visual, best_of, f"{text}\n" if is_chat else text)
    if recording is not None and record is not None:
        recording.save(record)
    show_peak(writer, _stderr())


@app.command()
def chat(
    model: Model = "",
    max_tokens: MaxTokens = None,
    check: Check = None,
    left_to_right: LeftToRight = False,
    tolerance: Tolerance = None,
    best_of: BestOf = 1,
    steps: Steps = None,
    seed: Seed = None,
    entropy_bound: Bound = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    canvas_length: CanvasLength = None,
    think: Think = False,
    system: System = None,
    visual: Visual = None,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    quant: Quant = None,
    keep_bf16: KeepBf16 = False,
    verify_with: VerifyWith = None,
    kv: Kv = None,
    gpu_memory: GpuMemory = None,
    context: Context = None,
    vision: Vision = False,
    adapter: Adapter = None,
) -> None:
    """Chat with a model, by default smollm2 if it has been pulled. /help lists commands; /exit or Ctrl-D leaves."""
    model = model or models.choose_chat_model()
    loading = {"device": device, "dtype": dtype, "quant": quant, "keep_bf16": keep_bf16, "verify_with": verify_with}
    writer = _load(model, **loading, kv=kv, gpu_memory=gpu_memory, context=context, adapter=adapter, vision=vision)
    if not writer.tokenizer.can_chat:
        raise ValueError(f'{model} cannot chat, it only continues texts: try redraft "PROMPT", or another --model')
    options = build_options(
        writer.sampler,
        max_steps=steps,
        entropy_bound=entropy_bound,
        canvas_length=canvas_length,
        tolerance=tolerance,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        left_to_right=left_to_right,
        max_tokens=max_tokens,
        seed=seed,
        check=check,
        temperature=temperature,
        best_of=best_of,
        think=think,
    )

    def answer(messages: list[dict[str, Any]]) -> str:
        events = writer.stream(messages, options=options)
        events = show_builds_until_first(events, _stderr(), message=_waiting_message(best_of))
        return _show(writer, events, visual, best_of)

    Conversation(writer, _conversation(system, None), answer).run()


app.command()(demo.demo)
app.command()(edit.fill)
app.command()(edit.edit)
app.command()(augment.augment)
app.command()(batch.batch)
app.command()(sudoku.sudoku)
app.command()(serve.serve)
app.add_typer(cluster.app, name="cluster")
app.command()(warm.warm)
app.command()(train.train)
app.command("eval")(train.evaluate)
app.command()(tune.tune)
app.command()(adapt.adapt)
app.command()(data.data)
app.command()(models.pull)
app.command()(models.models)
app.command()(models.rm)
app.command()(info.info)
app.command()(quantize.quantize)
app.command()(merge.merge)


def _read_prompt(argument: str | None) -> str:
    """The prompt from the argument, or from stdin."""
    if argument is not None and argument != "-":
        text = argument
    elif sys.stdin is not None and (argument == "-" or not sys.stdin.isatty()):
        text = read_stdin()
    else:
        raise ValueError("there is no prompt: give one as an argument, or pipe it in")
    if not text.strip():
        raise ValueError("the prompt is empty")
    return text


def _load(model: str, **options: Any) -> Writer:
    """Loads the model; shows a status line on stderr meanwhile, then what became of its weights, and the memory plan."""
    from redraft import checkpoint
    from redraft.writer import DEFAULT_MODEL

    folder = checkpoint.find(model or DEFAULT_MODEL)  # first: the status line would garble a download's progress bar
    with show_builds(_stderr(), message="loading"):
        writer = redraft.load(folder, **options)
    refuse_sudoku_model(writer)
    show_loaded(writer, _stderr())
    return writer


def _stderr() -> Console:
    return Console(stderr=True, highlight=False)


def _conversation(system: str | None, user: str | None, images: list[Path] | None = None) -> list[dict[str, Any]]:
    """The messages of a conversation; images come before the user's text, as Gemma was trained."""
    roles = (("system", system), ("user", user))
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in roles if text is not None]
    if images:
        parts: list[dict[str, Any]] = [{"type": "image", "image": path} for path in images]
        messages[-1]["content"] = [*parts, {"type": "text", "text": user}]
    return messages


def _waiting_message(best_of: int) -> str:
    """What a terminal shows until the first event. Several answers may have none until the best of them is known."""
    return f"generating {best_of} answers" if best_of > 1 else ""


def _show(writer: Writer, events: Iterator[TextEvent], visual: bool | None, best_of: int, prompt: str = "") -> str:
    """Draws the answer or prints it, as the user asks or as the terminal allows. Returns its text."""
    console = Console(highlight=False)
    is_drawn = console.is_terminal if visual is None else visual
    return _draw(writer, events, console, best_of, prompt) if is_drawn else _print_committed(events)


def _draw(writer: Writer, events: Iterator[TextEvent], console: Console, best_of: int, prompt: str = "") -> str:
    """Draws the answer live and returns its text. After Ctrl-C, KeyboardInterrupt carries the text as `committed`.

    Of several answers the first is drawn while all of them are generated, and the best is written at the end.
    """
    committed = ""
    label = f"first of {best_of} answers" if best_of > 1 else ""
    with CanvasView(console, writer.tokenizer, writer.sampler.eos_token_ids, label, prompt) as view:
        try:
            for event in view.show(events):
                if isinstance(event, TextCommitted):
                    committed += event.text
                elif isinstance(event, Finished):
                    console.print(summary(event.stats[0]), style="bright_black")
        except KeyboardInterrupt as interrupt:
            interrupt.committed = committed  # type: ignore[attr-defined]
            raise
    return committed


def _print_committed(events: Iterator[TextEvent]) -> str:
    """Prints text to stdout as soon as it is final, and the statistics to stderr. Returns the text."""
    committed = ""
    statistics = ""
    try:
        for event in events:
            if isinstance(event, Finished):
                statistics = summary(event.stats[0])
                continue
            text = event.delta.text
            committed += text
            print(strip_control_characters(text) if sys.stdout.isatty() else text, end="", flush=bool(text))
    finally:
        if committed:
            print(flush=True)
    print(statistics, file=sys.stderr)
    return committed


def _print_json(events: Iterator[TextEvent], seed: int | None) -> None:
    """Prints the answer as one JSON object; after Ctrl-C, with the text committed so far."""
    canvases: list[TextCommitted] = []
    answer: dict[str, Any] = {"reason": "interrupted", "settled": False, "seed": seed, "stats": None}
    try:
        for event in events:
            if isinstance(event, TextCommitted):
                canvases.append(event)
            elif isinstance(event, Finished):
                stats = event.stats[0]
                derived = {n: getattr(stats, n) for n in ("forwards", "tokens_per_forward", "tokens_per_second")}
                answer = {
                    "reason": event.reasons[0],
                    "settled": stats.settled == stats.canvases,
                    "seed": stats.seed,
                    "stats": asdict(stats) | derived,
                }
    finally:
        if canvases:
            parts = {name: "".join(getattr(canvas, name) for canvas in canvases) for name in ("text", "reasoning")}
            calls = [asdict(call) for canvas in canvases for call in canvas.tool_calls]
            print(json.dumps({**parts, "tool_calls": calls, **answer}, ensure_ascii=False))


# Newer typer carries its own copy of click; the common ancestor of usage errors is found through what both export.
UsageProblem: Any = next(kind for kind in typer.BadParameter.mro() if kind.__name__ == "ClickException")


def main() -> None:
    """The entry point. User errors become one sentence, Ctrl-C exit code 130. REDRAFT_DEBUG=1 shows tracebacks instead."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a console that cannot encode a character must not lose the answer
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="redraft", standalone_mode=False))
    except UsageProblem as error:
        _exit_with_error(f"{error.format_message()} (see redraft --help)")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except (ValueError, OSError) as error:
        if os.environ.get("REDRAFT_DEBUG"):
            raise
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            _exit_with_error(f"{error.filename}: {error.strerror}")
        _exit_with_error(str(error))
    except RuntimeError as error:
        if os.environ.get("REDRAFT_DEBUG") or (sentence := _explain_failure(error)) is None:
            raise
        _exit_with_error(sentence)


def _explain_failure(error: RuntimeError) -> str | None:
    """What to tell the user about a failure that is not theirs; None if it is a fault of redraft that needs its trace."""
    import torch

    from redraft.engine import EngineError
    from redraft.engine.errors import MEMORY_ADVICE

    if isinstance(error, torch.OutOfMemoryError):
        return f"out of GPU memory: {str(error).split('. ')[0]}; {MEMORY_ADVICE}"
    return str(error) if isinstance(error, EngineError) else None  # the log has its trace


def _exit_with_error(sentence: str) -> NoReturn:
    """Prints one line to stderr and exits with 2. File names and template messages may hold line breaks and escapes."""
    print(f"redraft: {strip_control_characters(' '.join(sentence.split()))}", file=sys.stderr)
    sys.exit(2)
