"""The command line: redraft "prompt", redraft chat, redraft info. Flags are those people know from llama.cpp and Ollama.

On a terminal the canvas is drawn live; in a pipe only the final text goes to stdout. A user's mistake is one sentence on
stderr and exit code 2; Ctrl-C keeps what is committed and exits with 130.
"""

import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

import redraft
from redraft import checkpoint
from redraft.cli import augment, edit, serve, sudoku, train, warm
from redraft.cli.options import Device, Dtype, Model, Seed, Threads, number, option, whole
from redraft.cli.recording import Recording
from redraft.cli.terminal import CanvasView, harmless, summary
from redraft.config import ModelConfig
from redraft.diffusion.generate import Finished
from redraft.kernels import backend
from redraft.tasks.text_events import TextCommitted, TextEvent
from redraft.writer import DEFAULT_MODEL, Writer


class DefaultToWrite(TyperGroup):
    """`redraft "prompt"` is `redraft write "prompt"`: anything that is not a command is something to write about."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the command in where the user left it out."""
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


def _version(asked: bool) -> None:
    if asked:
        print(redraft.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Text-diffusion language models. `redraft "prompt"` is short for `redraft write "prompt"`."""


MaxTokens = Annotated[
    int | None,
    option("--max-tokens", "-n", "--max-new-tokens", help="Most tokens to write. [checkpoint's]", parser=whole),
]
Steps = Annotated[
    int | None,
    option(
        "--max-denoising-steps", "--steps", "--diffusion-steps", help="Most steps for a page. [checkpoint's]", parser=whole
    ),
]
Bound = Annotated[float | None, option("--entropy-bound", help="Nats one step may accept. [checkpoint's]", parser=number)]
Temperature = Annotated[
    float | None,
    option("--temperature", "--temp", help="One temperature for all steps. [checkpoint's schedule]", parser=number),
]
CanvasLength = Annotated[int | None, option("--canvas-length", help="Tokens on a page. [checkpoint's]", parser=whole)]
Think = Annotated[bool, typer.Option("--think/--no-think", help="Let the model reason before it answers.")]
System = Annotated[str | None, typer.Option("--system", "-s", help="A system message before the conversation.")]
Visual = Annotated[bool | None, typer.Option("--visual/--no-visual", help="Draw the canvas as it settles. [on a terminal]")]
Quant = Annotated[str | None, typer.Option("--quant", help="fp8: pack the layers on the way in. [as stored]")]


@app.command()
def write(
    prompt: Annotated[str | None, typer.Argument(help="What to answer or continue; - or nothing reads stdin.")] = None,
    model: Model = "",
    max_tokens: MaxTokens = None,
    steps: Steps = None,
    seed: Seed = None,
    entropy_bound: Bound = None,
    temperature: Temperature = None,
    canvas_length: CanvasLength = None,
    think: Think = False,
    system: System = None,
    regex: Annotated[str | None, typer.Option("--regex", help="The answer matches this regular expression, whole.")] = None,
    schema: Annotated[str | None, typer.Option("--schema", help="The answer is JSON of this schema: a file.")] = None,
    choices: Annotated[str | None, typer.Option("--choices", help="The answer is one of these: a,b,c.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it stands, without a chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print text, statistics and seed as one JSON object.")] = False,
    record: Annotated[str | None, typer.Option("--record", help="Keep the run as a moving picture: OUT.svg.")] = None,
    visual: Visual = None,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    quant: Quant = None,
) -> None:
    """Answer a prompt, or continue a text when the model is not made for chat."""
    text = _prompt(prompt)
    writer = _load(model, device, dtype, quant)
    settings = _settings(steps, entropy_bound, temperature, canvas_length)
    chatting = writer.tokenizer.can_chat and not raw
    if not chatting and (system or think):
        raise ValueError("--system and --think need a chat model; this one continues text")
    messages: Any = _conversation(system, text) if chatting else text
    options = {"max_tokens": max_tokens, "seed": seed, "regex": regex, **settings}
    options["schema"] = Path(schema).read_text(encoding="utf-8", errors="replace") if schema is not None else None
    options["choices"] = choices.split(",") if choices is not None else None
    if chatting:
        options["think"] = think
    console = Console(highlight=False)
    events: Iterator[TextEvent] = writer.stream(messages, **options)
    recording = Recording(text, writer.tokenizer, writer.sampler.eos_token_ids) if record else None
    events = recording.watch(events) if recording else events
    if as_json:
        _print_json(events, seed)
    elif console.is_terminal if visual is None else visual:
        _draw(writer, events, console)
    else:
        _print_pieces(events)
    if recording and record:
        recording.save(record)


@app.command()
def chat(
    model: Model = "",
    max_tokens: MaxTokens = None,
    steps: Steps = None,
    seed: Seed = None,
    entropy_bound: Bound = None,
    temperature: Temperature = None,
    canvas_length: CanvasLength = None,
    think: Think = False,
    system: System = None,
    visual: Visual = None,
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    quant: Quant = None,
) -> None:
    """Talk with a model. /reset starts over, /exit or Ctrl-D leaves; Ctrl-C stops an answer."""
    writer = _load(model, device, dtype, quant)
    settings = _settings(steps, entropy_bound, temperature, canvas_length)
    options = {"max_tokens": max_tokens, "seed": seed, "think": think, **settings}
    console = Console(highlight=False)
    drawing = console.is_terminal if visual is None else visual
    opening = _conversation(system, None)
    messages = list(opening)
    for line in _lines(console):
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(opening)
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            events = writer.stream(asked, **options)
            said = _draw(writer, events, console) if drawing else _print_pieces(events)
        except KeyboardInterrupt as stopped:
            if not console.is_terminal:
                raise
            said = getattr(stopped, "committed", "")
            console.print("[bright_black](stopped)")
        except ValueError as error:
            if not console.is_terminal:
                raise
            console.print(harmless(str(error)), style="red", markup=False)  # the talk goes on without this message
            continue
        messages = [*asked, {"role": "assistant", "content": said}]


app.command()(edit.fill)
app.command()(edit.edit)
app.command()(augment.augment)
app.command()(sudoku.sudoku)
app.command()(serve.serve)
app.command()(warm.warm)
app.command()(train.train)
app.command("eval")(train.evaluate)


@app.command()
def info(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Checkpoint folder, or hub id OWNER/NAME. [the released 26B-A4B shape]")
    ] = "",
) -> None:
    """Show a checkpoint's shape, its memory by format, and what would run where."""
    console = Console(highlight=False)
    config, stored = ModelConfig(), None
    if model:
        folder = checkpoint.find(model, weights=False)
        config = checkpoint.read_model_config(folder)
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    console.print(model or "DiffusionGemma 26B-A4B (released shape)", style="bold", markup=False)
    console.print(_shape_table(config))
    console.print(_memory_table(config, stored))
    console.print(_place_table())


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or hub id OWNER/NAME.")],
    out: Annotated[str, typer.Argument(help="Folder to write.")],
    device: Device = None,
    threads: Threads = None,
) -> None:
    """Write a checkpoint with its layers in fp8, as compressed-tensors publishes it: about half the size."""
    source = checkpoint.find(model)
    with _waiting("packing"):
        stored = checkpoint.load_model(source).dtype  # what is not packed stays as it is
        writer = redraft.load(source, device=device, dtype=stored, quant="fp8")
        checkpoint.save(writer.model, out, sampler=writer.sampler, vision_from=checkpoint.folder_with_vision(source))
        writer.tokenizer.save(out)
    print(out)


def _shape_table(config: ModelConfig) -> Table:
    counts = config.parameter_counts()
    table = Table("configuration", "", box=None, pad_edge=False)
    sliding = sum(kind == "sliding_attention" for kind in config.layer_types)
    rows = {
        "vocabulary": f"{config.vocab_size:,}",
        "model size": f"{config.hidden_size:,}",
        "layers": f"{config.num_hidden_layers} ({sliding} with a window of {config.sliding_window:,}, the rest full)",
        "heads": f"{config.num_attention_heads}; key-value {config.num_key_value_heads} x {config.head_dim}, "
        f"in full layers {config.num_global_key_value_heads} x {config.global_head_dim}",
        "experts": f"{config.num_experts} of {config.moe_intermediate_size:,}, {config.top_k_experts} at a time; "
        f"dense {config.intermediate_size:,}",
        "canvas": f"{config.canvas_length:,} tokens",
        "context": f"{config.max_position_embeddings:,} tokens",
        "parameters": f"{_si(counts['total'])}, {_si(counts['active'])} active",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for name, count in counts.items():
        if name not in ("total", "active"):
            table.add_row(f"  {name}", _si(count))
    return table


def _memory_table(config: ModelConfig, stored: int | None) -> Table:
    """Weights by format. Embedding, norms, router and self-conditioning stay bf16 in every published format."""
    counts = config.parameter_counts()
    kept = sum(counts[name] for name in ("embedding", "router", "self-conditioning", "norms and scalars"))
    linear = counts["total"] - kept
    full, sliding = config.kv_bytes_per_token()
    table = Table("memory", "", box=None, pad_edge=False)
    if stored:
        table.add_row("on disk", _si(stored, "B"))
    table.add_row("bf16", _si(2 * counts["total"], "B"))
    table.add_row("fp8 layers", _si(2 * kept + linear, "B"))
    table.add_row("4-bit experts (NVFP4)", _si(2 * (counts["total"] - counts["experts"]) + counts["experts"] * 9 / 16, "B"))
    table.add_row("4-bit layers", _si(2 * kept + linear * 9 / 16, "B"))
    table.add_row(
        "cache", f"{full / 1024:,.0f} KiB a token, and {_si(sliding * (config.sliding_window - 1), 'B')} of windows"
    )
    return table


def _place_table() -> Table:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    table = Table("here", "", box=None, pad_edge=False)
    table.add_row("python, torch", f"{platform.python_version()}, {torch.__version__}")
    table.add_row("cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    table.add_row("gpu", gpu)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    fast, why = backend.select_backend(place)
    table.add_row("runs on", f"{place}, {'kernels of our own' if fast else 'every operation in plain PyTorch'} ({why})")
    for operation, by in backend.OPERATIONS.items():
        table.add_row(f"  {operation}", by if fast else "PyTorch")
    return table


def _si(count: float, unit: str = "") -> str:
    for scale, letter in ((1e12, "T"), (1e9, "G" if unit else "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.2f} {letter}{unit}"
    return f"{count:.0f} {unit}"


def _prompt(given: str | None) -> str:
    """The prompt from the argument, or from a pipe."""
    if given is not None and given != "-":
        text = given
    elif sys.stdin is not None and (given == "-" or not sys.stdin.isatty()):
        text = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    else:
        raise ValueError("there is no prompt: give one, or pipe a text in")
    if not text.strip():
        raise ValueError("the prompt is empty")
    return text


def _load(model: str, device: str | None, dtype: str | None, quant: str | None) -> Writer:
    """The model, with a line on stderr while a person waits for it."""
    folder = checkpoint.find(model or DEFAULT_MODEL)  # before the line below, which would garble a download's progress bar
    with _waiting("loading"):
        return redraft.load(folder, device=device, dtype=dtype, quant=quant)


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def _settings(
    steps: int | None, entropy_bound: float | None, temperature: float | None, canvas_length: int | None
) -> dict[str, Any]:
    both = {"t_min": temperature, "t_max": temperature}
    return {"max_steps": steps, "entropy_bound": entropy_bound, "canvas_length": canvas_length, **both}


def _conversation(system: str | None, user: str | None) -> list[dict[str, str]]:
    turns = (("system", system), ("user", user))
    return [{"role": role, "content": text} for role, text in turns if text is not None]


def _lines(console: Console) -> Iterator[str]:
    """What the user types, or the lines of a pipe; empty ones are passed over."""
    while sys.stdin is not None:
        try:
            line = console.input("[bold]> [/bold]") if console.is_terminal and sys.stdin.isatty() else input()
        except EOFError:
            return
        if line.strip():
            yield line.strip()


def _draw(writer: Writer, events: Iterator[TextEvent], console: Console) -> str:
    """The answer drawn live; its text comes back, or rides on the KeyboardInterrupt that cut it short."""
    said = ""
    with CanvasView(console, writer.tokenizer, writer.sampler.eos_token_ids) as view:
        try:
            for event in view.show(events):
                if isinstance(event, TextCommitted):
                    said += event.text
                elif isinstance(event, Finished):
                    console.print(summary(event.stats[0]), style="bright_black")
        except KeyboardInterrupt as stop:
            stop.committed = said  # type: ignore[attr-defined]
            raise
    return said


def _print_pieces(events: Iterator[TextEvent]) -> str:
    """Committed text to stdout, page by page, and nothing else; what it cost, and any doubt, to stderr."""
    said, cost = "", ""
    try:
        for event in events:
            if isinstance(event, TextCommitted):
                said += event.text
                print(harmless(event.text) if sys.stdout.isatty() else event.text, end="", flush=True)
            elif isinstance(event, Finished):
                cost = summary(event.stats[0])
    finally:
        if said:
            print(flush=True)
    print(cost, file=sys.stderr)
    return said


def _print_json(events: Iterator[TextEvent], seed: int | None) -> None:
    """The answer as one JSON object; what was committed when Ctrl-C came is printed too."""
    pages: list[TextCommitted] = []
    answer: dict[str, Any] = {"reason": "interrupted", "settled": False, "seed": seed, "stats": None}
    try:
        for event in events:
            if isinstance(event, TextCommitted):
                pages.append(event)
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
        if pages:
            parts = {name: "".join(getattr(page, name) for page in pages) for name in ("text", "reasoning")}
            calls = [asdict(call) for page in pages for call in page.tool_calls]
            print(json.dumps({**parts, "tool_calls": calls, **answer}, ensure_ascii=False))


# Newer typer carries its own copy of click; the common ancestor of usage errors is found through what both export.
UsageProblem = next(kind for kind in typer.BadParameter.mro() if kind.__name__ == "ClickException")


def main() -> None:
    """The entry point: mistakes become one sentence, Ctrl-C becomes 130. REDRAFT_DEBUG=1 shows the traceback instead."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a narrow console must not lose an answer for one character
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="redraft", standalone_mode=False))
    except UsageProblem as error:
        _complain(f"{error.format_message()} (see redraft --help)")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except torch.OutOfMemoryError as error:
        _complain(f"out of GPU memory: {str(error).split('. ')[0]}; try a smaller model, a shorter prompt, or --device cpu")
    except (ValueError, OSError) as error:
        if os.environ.get("REDRAFT_DEBUG"):
            raise
        named = isinstance(error, OSError) and error.filename is not None and error.strerror
        _complain(f"{error.filename}: {error.strerror}" if named else str(error))


def _complain(sentence: str) -> NoReturn:
    """One line, whatever a file's names or a template's message may hold."""
    print(f"redraft: {harmless(' '.join(sentence.split()))}", file=sys.stderr)
    sys.exit(2)
