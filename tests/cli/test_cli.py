"""The command line: in a pipe, on a terminal, with user errors, interrupted."""

import faulthandler
import fcntl
import gc
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import traceback
from typing import NoReturn

import commands
import pyte
import pytest
import tiny
import torch
from rich.console import Console
from rich.text import Text

import redraft
from redraft.cli import main
from redraft.cli.terminal import CanvasView, Painter, defer_interrupt, strip_control_characters, summary
from redraft.diffusion.generate import Committed, Draft
from redraft.engine import EngineError
from redraft.kernels.threads import fix_threads

SILENT_SECONDS = 300  # a command that writes nothing for so long hangs, on a busy machine too
PATIENT_READS = 300  # or while the command goes on writing for so many reads
PATIENT_SECONDS = 10  # so long a user waits before Ctrl-C or Ctrl-D is pressed again
END_OF_INPUT = b"\x04"  # Ctrl-D


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return str(tiny.save_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(name="run")
def _run(monkeypatch, capsys, folder):
    """Runs the command line in this process: (exit code, stdout, stderr)."""

    def run(*args: str, stdin: str | bytes | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["redraft", *args])
        monkeypatch.delenv("REDRAFT_MODEL", raising=False)
        raw = stdin.encode() if isinstance(stdin, str) else stdin or b""
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        with pytest.raises(SystemExit) as left:
            main.main()
        out, err = capsys.readouterr()
        return left.value.code or 0, out, err

    return run


def test_a_pipe_gets_the_text_and_nothing_else(run, folder):
    expected = redraft.load(folder).chat("Hello", seed=3, max_tokens=30).text
    for args in (("Hello",), ("write", "Hello")):
        code, out, err = run(*args, "-m", folder, "--seed", "3", "-n", "30")
        assert (code, out) == (0, expected + "\n")
        assert err.count("\n") == 1
        assert "seed 3" in err
    assert run("-", "-m", folder, "--seed", "3", "-n", "30", stdin="Hello")[1] == expected + "\n"
    assert run("-m", folder, "--seed", "3", "-n", "30", stdin="Hello")[1] == expected + "\n"
    raw = redraft.load(folder).write("Hello", seed=3, max_tokens=30).text
    assert run("Hello", "--raw", "-m", folder, "--seed", "3", "-n", "30")[1] == raw + "\n"


def test_flags_reach_the_sampler(run, folder):
    flags = ["--steps", "2", "--entropy-bound", "0.5", "--temp", "0.7", "--canvas-length", "8", "-n", "20", "--seed", "9"]
    code, out, _ = run("Hello", "-m", folder, "--json", "--think", "-s", "Be kind", *flags)
    answer = json.loads(out)
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]
    settings = {"max_steps": 2, "entropy_bound": 0.5, "temperature": 0.7, "canvas_length": 8}
    expected = redraft.load(folder).chat(messages, think=True, max_tokens=20, seed=9, **settings)
    assert code == 0
    assert answer["text"] == expected.text
    assert answer["seed"] == 9
    assert answer["stats"]["steps"] == expected.stats.steps
    assert set(answer) == {"text", "reasoning", "tool_calls", "reason", "settled", "seed", "stats"}


def test_chat_remembers(run, folder, monkeypatch):
    prompts = []
    original = redraft.Writer.stream

    def stream(self, prompt, **options):
        prompts.append([dict(message) for message in prompt])
        return original(self, prompt, **options)

    monkeypatch.setattr(redraft.Writer, "stream", stream)
    code, out, _ = run("chat", "-m", folder, "-n", "8", "--seed", "1", stdin="Hi\n\nMore\n/reset\nAgain\n/exit\nNever\n")
    assert code == 0
    assert [[m["content"] for m in messages if m["role"] == "user"] for messages in prompts] == [
        ["Hi"],
        ["Hi", "More"],
        ["Again"],
    ]
    answer = prompts[1][1]
    assert answer["role"] == "assistant"
    assert out.startswith(answer["content"])


def test_info_knows_the_released_model_and_a_folder(run, folder):
    code, out, _ = run("info")
    assert code == 0
    for words in ("25.25 B", "50.50 GB", "26.02 GB", "17.67 GB", "262,144", "20 KiB a token", torch.__version__):
        assert words in out
    assert f"vocabulary           {tiny.VOCAB}" in run("info", "-m", folder)[1]


def test_info_says_which_kernels_run_and_why(run, monkeypatch):
    monkeypatch.delenv("REDRAFT_KERNELS", raising=False)
    out = run("info")[1]
    assert "cpu, every operation in plain PyTorch (no GPU)" in out
    assert "attention                PyTorch" in out
    monkeypatch.setenv("REDRAFT_KERNELS", "triton")
    out = run("info")[1]
    assert "kernels of our own (REDRAFT_KERNELS=triton)" in out
    assert "Triton: over caches in place" in out
    monkeypatch.setenv("REDRAFT_KERNELS", "fast")
    assert "may be reference or triton, got 'fast'" in run("info")[2]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["hi", "-m", "/no/such/folder"], "/no/such/folder"),
        (["hi", "-m", "{model}", "-n", "0"], "got 0"),
        (["hi", "-m", "{model}", "-n", "-5"], "got -5"),
        (["hi", "-m", "{model}", "-n", "many"], "'many' is not a whole number"),
        (["hi", "-m", "{model}", "--steps", "0"], "got 0"),
        (["hi", "-m", "{model}", "--steps", "1.5"], "'1.5' is not a whole number"),
        (["hi", "-m", "{model}", "--entropy-bound", "-1"], "got -1.0"),
        (["hi", "-m", "{model}", "--entropy-bound", "nan"], "nan"),
        (["hi", "-m", "{model}", "--temp", "cold"], "'cold' is not a number"),
        (["hi", "-m", "{model}", "--canvas-length", "0"], "got 0"),
        (["hi", "-m", "{model}", "--dtype", "int3"], "int3"),
        (["hi", "-m", "{model}", "--device", "toaster"], "toaster"),
        (["x" * 600, "-m", "{model}"], "context is 512"),
        (["", "-m", "{model}"], "prompt is empty"),
        (["hi", "-m", "{model}", "--frobnicate"], "--frobnicate"),
        (["hi", "there", "-m", "{model}"], "there"),
        (["info", "-m", "/no/such/folder"], "/no/such/folder"),
        (["info", "-m", "odd[/name]"], "odd[/name]"),
        (["hi", "-m", "{model}", "--temp", "inf"], "inf"),
        (["hi", "-m", "{model}", "--temp", "-1"], "temperature"),
        (["hi", "-m", "{model}", "--canvas-length", "100000", "-n", "5"], "canvases of 100000"),
        (["hi", "-m", "{model}", "--device", "meta"], "meta"),
        (["chat", "-m", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_non_zero_exit(run, folder, args, words):
    code, out, err = run(*[arg.format(model=folder) for arg in args])
    assert code == 2
    assert out == ""
    assert words in err
    assert err.startswith("redraft: ")
    assert err.count("\n") == 1


def test_damaged_checkpoints_are_one_sentence_too(run, tmp_path):
    for name, content, words in (
        ("model.safetensors", b"\xff" * 99, "damaged"),
        ("config.json", b"{", "not readable JSON"),
        ("tokenizer.json", b"{}", "not a readable tokenizer"),
        ("generation_config.json", b'{"max_denoising_steps": -2}', "got -2"),
    ):
        folder = tiny.remove_manifest(tiny.save_folder(tmp_path / name))
        (folder / name).write_bytes(content)
        code, _, err = run("hi", "-m", str(folder))
        assert code == 2
        assert words in err
        assert err.count("\n") == 1


def test_help_and_version(run):
    assert run("--version")[1] == redraft.__version__ + "\n"
    for args in ((), ("--help",), ("-h",)):
        code, out, _ = run(*args)
        assert code == 0
        assert "Commands:" in out
    assert "--max-denoising-steps" in run("write", "--help")[1]


def environment() -> dict[str, str]:
    return {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "", "LINES": ""}


def run_in_child(args: list[str]) -> NoReturn:
    """Runs the command in a forked child: torch is imported already, which saves seconds per test.

    The child computes with one thread, since the parent's pool of OpenMP threads does not survive a fork. It handles SIGINT
    as a process of a terminal does, also when the tests run in the background of a shell, which ignores the signal.
    Garbage of the parent stays as it is: a finalizer may wait for a lock that a thread of the parent held at the fork, or
    end a process of the parent. A child that hangs says where, and ends.
    """
    code = 1
    gc.freeze()
    faulthandler.dump_traceback_later(SILENT_SECONDS - 60, exit=True, file=2)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fix_threads(1)  # not torch.set_num_threads: a count that redraft has used before would not count as the user's
        os.environ.update(environment())
        sys.stdin = os.fdopen(0, "r", encoding="utf-8")
        sys.stdout = os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8")
        sys.argv = ["redraft", *args]
        main.main()
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        for file in (sys.stdout, sys.stderr):
            file.flush()
        os._exit(code)


def on_terminal(
    args: list[str], *, columns: int = 60, lines: int = 20, interrupt_at: bytes | None = None, typing: list | None = None
):
    """Runs the command on a pseudo-terminal: exit code, all that was written, its text, the lines left on the screen.

    `typing` is what to type, in order, each once something has been written behind the one before. An end of input or an
    interrupt that comes while the command turns its line editing on, or inside a callback of Python's, may be lost; after a
    while it comes again, as from a user.
    """
    screen = pyte.HistoryScreen(columns, lines, history=500)
    stream = pyte.ByteStream(screen)
    pid, fd = pty.fork()
    if pid == 0:
        run_in_child(args)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    written = b""
    typed = b""
    answered = 0  # how much of what was written has been answered
    is_interrupted = False
    reads = 0  # since it was interrupted
    silent = 0
    while True:
        if not select.select([fd], [], [], 1)[0]:
            silent += 1
            if typed == END_OF_INPUT and silent % PATIENT_SECONDS == 0:
                os.write(fd, typed)
            if is_interrupted and silent % PATIENT_SECONDS == 0:
                os.kill(pid, signal.SIGINT)
            if silent < SILENT_SECONDS:
                continue
            os.kill(pid, signal.SIGKILL)
            break
        try:
            data = os.read(fd, 65536)
        except OSError:
            break
        if not data:
            break
        silent = 0
        written += data
        reads += is_interrupted
        if reads > PATIENT_READS:
            os.kill(pid, signal.SIGINT)
            reads = 0
        stream.feed(data)
        if interrupt_at is not None and interrupt_at in written:
            os.kill(pid, signal.SIGINT)
            interrupt_at = None
            is_interrupted = True
        while typing and (begin := written.find(typing[0][0], answered)) >= 0:
            cue, typed = typing.pop(0)
            answered = begin + len(cue)
            os.write(fd, typed)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(fd)
    if b"Timeout (" in written:
        pytest.fail(f"the command hangs: {written.decode(errors='replace')}")
    above = ["".join(line[x].data for x in range(columns)) for line in screen.history.top]
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", written).decode(errors="replace")
    return code, written, text, [line.rstrip() for line in [*above, *screen.display]]


def wrapped(text: str, columns: int) -> list[str]:
    """The lines of a text that wraps by words."""
    lines = Text(strip_control_characters(text)).wrap(Console(), columns)
    return [line.plain.rstrip() for line in lines if line.plain.strip()]


@pytest.mark.parametrize("columns", [23, 60])
def test_the_canvas_is_drawn_live_and_only_the_text_remains(folder, columns):
    flags = ["--seed", "5", "-n", "90", "--steps", "12", "--temp", "0.9", "--entropy-bound", "0.2"]
    code, written, drawn, lines = on_terminal(["Hello", "-m", folder, *flags], columns=columns)
    assert code == 0
    assert "step" in drawn
    settings = {"max_steps": 12, "entropy_bound": 0.2, "temperature": 0.9}
    answer = redraft.load(folder).chat("Hello", seed=5, max_tokens=90, **settings)
    assert answer.stats.canvases > 2
    text = wrapped(f"Hello\n{answer.text}", columns)
    got = [line for line in lines if line.strip()]
    assert got[: len(text)] == text
    assert "".join(got[len(text) :]).startswith(summary(answer.stats)[:12])
    assert "entropy" not in "".join(got)
    assert b"\x1b[2J" not in written  # the screen is never cleared
    assert b"\x1b[?1049h" not in written


@pytest.fixture(name="restless", scope="module")
def _restless(tmp_path_factory):
    """A model that never settles nor stops: there is time to interrupt it. One layer: its 200 steps are quick."""
    folder = tiny.save_folder(tmp_path_factory.mktemp("restless"), tiny.CONFIGS["one layer"])
    never = tiny.sampler(confidence_threshold=1e-9, eos_token_ids=(), max_steps=200, max_new_tokens=400)
    writer = redraft.load(folder)
    redraft.save(writer.model, folder, tokenizer=writer.tokenizer, sampler=never, force=True)
    return str(folder)


@pytest.fixture(name="restless_canvases", scope="module")
def _restless_canvases(restless):
    """The texts of its first two canvases with seed 5."""
    events = redraft.load(restless).stream("Hello", seed=5)
    canvases = (event.text for event in events if isinstance(event, redraft.Committed))
    return next(canvases), next(canvases)


@pytest.mark.soak
def test_ctrl_c_keeps_what_is_committed(restless, restless_canvases):
    code, _, _, lines = on_terminal(["Hello", "-m", restless, "--seed", "5", "--raw"], interrupt_at=b"canvas 3")
    assert code == 130
    assert [line for line in lines if line.strip()] == wrapped("Hello" + "".join(restless_canvases), 60)


@pytest.mark.soak
def test_ctrl_c_in_a_pipe_is_130_and_keeps_the_text(restless, restless_canvases):
    command = [*commands.redraft(), "Hello", "-m", restless, "--seed", "5", "--raw"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        bufsize=0,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell ignores it
    )
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=SILENT_SECONDS)
    assert process.returncode == 130
    assert (first + rest).decode().startswith(restless_canvases[0])
    assert err == b""


def test_ctrl_c_stops_an_answer_in_chat_and_the_chat_continues(restless):
    typing = [(b"> ", b"Hi\n"), (b"(stopped)", b"/exit\n")]
    code, _, _, lines = on_terminal(["chat", "-m", restless, "-n", "32"], interrupt_at=b"canvas 2", typing=typing)
    assert code == 0
    assert any("(stopped)" in line for line in lines)


def test_a_message_that_is_too_long_does_not_end_the_chat(restless):
    typing = [(b"> ", b"x" * 300 + b"\n"), (b"context is", b"/exit\n")]
    code, _, _, lines = on_terminal(["chat", "-m", restless, "-n", "300"], typing=typing)
    assert code == 0
    assert any("context is 512" in line for line in lines)


def test_json_keeps_what_was_committed(run, folder, monkeypatch):
    """Ctrl-C on the second canvas; in this process, so that it comes exactly there."""
    original = redraft.Writer.stream

    def stream(self, prompt, **options):
        for event in original(self, prompt, **options):
            yield event
            if isinstance(event, Committed):
                raise KeyboardInterrupt

    expected = next(e.text for e in redraft.load(folder).stream("Hello", seed=5) if isinstance(e, Committed))
    monkeypatch.setattr(redraft.Writer, "stream", stream)
    code, out, err = run("Hello", "-m", folder, "--seed", "5", "--json", "--raw")
    answer = json.loads(out)
    assert (code, err) == (130, "")
    assert (answer["text"], answer["reason"], answer["seed"]) == (expected, "interrupted", 5)


@pytest.mark.soak
def test_invalid_bytes_ascii_consoles_and_a_closed_stdin(run, folder, monkeypatch):
    def shell(command: str, **env: str) -> subprocess.CompletedProcess:
        line = f"{sys.executable} -m redraft {command}"
        return subprocess.run(["bash", "-c", line], capture_output=True, env={**environment(), **env})

    assert shell(f"$'\\xff' -s $'\\xff' -m {folder} -n 30 --seed 3", PYTHONIOENCODING="ascii").returncode == 0
    closed = shell(f"-m {folder} <&-")
    assert closed.returncode == 2
    assert closed.stderr.startswith(b"redraft: there is no prompt")
    assert run("\udcff", "-m", folder, "-n", "5")[0] == 0  # an invalid byte of an argument is a lone surrogate
    assert run("hi", "-s", "\udcff", "-m", folder, "-n", "5")[0] == 0
    monkeypatch.setattr(sys, "argv", ["redraft", "chat", "-m", folder])
    monkeypatch.setattr(sys, "stdin", None)  # as Python starts with a closed stdin
    with pytest.raises(SystemExit) as left:
        main.main()
    assert not left.value.code


@pytest.mark.soak
def test_a_closed_pipe_is_no_traceback(folder):
    options = "--raw -n 400 --regex '[a-z]{40}' --seed 3"  # an empty answer writes nothing to the closed pipe
    command = f"{sys.executable} -m redraft Hello -m {folder} {options} | true"
    process = subprocess.run(["bash", "-c", command], capture_output=True, env=environment())
    assert process.stderr == b""


def test_colours_follow_what_happened_to_each_token():
    tokenizer = tiny.byte_tokenizer()
    view = Painter(tokenizer, [1])
    ids = tokenizer.encode("abcd")
    view.before = ([ids[0], ids[1], ids[3], ids[3]], [True, False, True, False])
    page = view.render_canvas(ids, [True, True, True, False])
    assert page.plain == "abcd"
    assert [(span.start, span.end, span.style) for span in page.spans] == [
        (0, 1, "medium_purple1"),
        (1, 3, "green"),
        (3, 4, "bright_black"),
    ]
    assert view.render_canvas([ids[0], 1, ids[2], ids[3]], [True] * 4).plain == "a"


def test_nothing_a_checkpoint_holds_can_steer_the_terminal(run, tmp_path, folder):
    spiteful = tiny.remove_manifest(tiny.save_folder(tmp_path))
    (spiteful / "chat_template.jinja").write_text('{{ raise_exception("\\x1b[31mred\\nsecond line") }}')
    code, _, err = run("hi", "-m", str(spiteful))
    assert code == 2
    assert "the chat template refuses this conversation" in err
    assert "\x1b" not in err
    assert err.count("\n") == 1
    _, written, _, _ = on_terminal(["Hello", "-m", folder, "--no-visual", "--seed", "3", "-n", "30"])
    assert "\x16" in redraft.load(folder).chat("Hello", seed=3, max_tokens=30).text
    assert b"\x16" not in written


@pytest.fixture(name="handled_interrupts")
def _handled_interrupts():
    """SIGINT raises KeyboardInterrupt, also when the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("handled_interrupts")
def test_ctrl_c_inside_a_drawing_arrives_after_it():
    drawn = []

    def draw() -> None:
        with defer_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            drawn.append("whole")

    with pytest.raises(KeyboardInterrupt):
        draw()
    assert drawn == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_model_cannot_steer_the_terminal():
    assert strip_control_characters("a\x1b[2Jb\x07\r\n\tc\u202e") == "a[2Jb\n\tc"
    assert strip_control_characters("می\u200cخواهم 👩\u200d🚀") == "می\u200cخواهم 👩\u200d🚀"


def test_frames_are_limited(folder, monkeypatch):
    """Twenty frames a second at most, however fast the steps come."""
    clock = [0.0]
    monkeypatch.setattr("redraft.cli.terminal.time.monotonic", lambda: clock[0])
    frames = []
    monkeypatch.setattr("redraft.cli.terminal.Live.update", lambda self, *a, **k: frames.append(clock[0]))
    writer = tiny.writer()
    drafts = [e for e in writer.stream("x", seed=1) if isinstance(e, Draft)][:1] * 100
    with CanvasView(Console(file=io.StringIO(), force_terminal=True), writer.tokenizer, [1]) as view:
        for event in drafts:
            clock[0] += 0.01
            list(view.show(iter([event])))
    assert 15 <= len(frames) <= 20


def test_a_fault_of_the_engine_is_one_line_and_lack_of_memory_says_what_to_try(monkeypatch, capsys):
    lines = {
        EngineError("the engine failed: IndexError: 3"): "the engine failed: IndexError: 3",
        torch.OutOfMemoryError("CUDA out of memory. Tried"): "out of GPU memory: CUDA out of memory; try a smaller model",
    }
    for error, line in lines.items():

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(main, "app", fail)
        with pytest.raises(SystemExit) as left:
            main.main()
        assert left.value.code == 2
        assert capsys.readouterr().err.startswith(f"redraft: {line}")
