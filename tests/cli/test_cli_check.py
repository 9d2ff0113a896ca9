"""Checked and exact mode on the command line: the same tokens as the story, a visible sweep, mistakes in one sentence."""

import io
import json
import xml.etree.ElementTree as ET

import pytest
import test_cli
import tiny
from rich.console import Console

import redraft
from redraft.cli.recording import ROUND_SECONDS, STEP_SECONDS, Recording
from redraft.cli.terminal import AHEAD, CORRECTED, FLASH_ROUNDS, CanvasView, Painter, meter, summary
from redraft.diffusion.generate import Committed, Draft, Finished, Stats
from redraft.diffusion.verified import generate_verified

run = test_cli._run  # the fixture
CAUSAL_FLAGS = ["--temp", "0.8", "--top-k", "20", "--top-p", "0.95", "--min-p", "0.01", "--repetition-penalty", "1.2"]
CAUSAL = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2}


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return str(tiny.save_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(name="checked_folder", scope="module")
def _checked_folder(tmp_path_factory):
    """A checkpoint that is checked unless the user says otherwise: its redraft.json says so."""
    folder = tiny.remove_manifest(tiny.save_folder(tmp_path_factory.mktemp("checked")))
    settings = json.loads((folder / "redraft.json").read_text())
    settings["sampler"] |= {"check": "checked", "tolerance": 1.5, "temperature": 0.9}
    (folder / "redraft.json").write_text(json.dumps(settings))
    return str(folder)


def verified_text(folder: str, prompt: str, seed: int, **settings) -> tuple[str, Stats]:
    """The text and statistics of the plain story."""
    writer = redraft.load(folder)
    cfg = writer.sampler.changed(**settings)
    policy = tiny.engine_policy(cfg)
    *_, end = generate_verified(writer.model, writer.encode_prompt(prompt), cfg, seed=seed, policy=policy)
    ids = [token for token in end.ids_BT[0].tolist() if token not in cfg.eos_token_ids]
    return writer.tokenizer.decode(ids), end.stats[0]


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (["--check", "exact"], {"check": "exact"}),
        (["--check", "exact", *CAUSAL_FLAGS], {"check": "exact", **CAUSAL}),
        (["--check", "checked", "--tolerance", "0.5"], {"check": "checked", "tolerance": 0.5}),
        pytest.param(
            ["--check", "checked", "--steps", "2", "--canvas-length", "8", *CAUSAL_FLAGS],
            {"check": "checked", "draft_steps": 2, "canvas_length": 8, **CAUSAL},
            marks=pytest.mark.soak,
        ),
    ],
)
def test_the_answer_is_the_story_s(run, folder, flags, settings):
    text, stats = verified_text(folder, "Hello", 3, max_new_tokens=30, **settings)
    common = ["Hello", "-m", folder, "--raw", "-n", "30", "--seed", "3", *flags]
    code, out, _ = run(*common, "--json")
    answer = json.loads(out)
    assert (code, answer["text"]) == (0, text)
    for name in ("check", "rounds", "drafted", "accepted", "corrected", "new_tokens", "forwards"):
        assert answer["stats"][name] == getattr(stats, name)
    code, out, err = run(*common)
    assert (code, out) == (0, text + "\n")
    words = f"check {stats.check}: {stats.drafted} drafted, {stats.accepted} accepted, {stats.corrected} corrected"
    assert f" · {words} · {stats.forwards} forwards, {stats.tokens_per_forward:.1f} tokens each · seed 3\n" in err


def test_the_checkpoint_s_mode_is_the_default(run, checked_folder, folder):
    common = ["Hello", "--raw", "-n", "20", "--seed", "4"]
    checked, _ = verified_text(checked_folder, "Hello", 4, max_new_tokens=20)
    assert run(*common, "-m", checked_folder)[1] == checked + "\n"
    off = redraft.load(folder).write("Hello", seed=4, max_tokens=20).text
    code, out, err = run(*common, "-m", checked_folder, "--check", "off")
    assert (code, out) == (0, off + "\n")
    assert " · check off · " in err
    info = run("info", "-m", checked_folder)[1]
    assert "check         checked: drafted in 4 steps, corrected by the causal half" in info
    assert "tolerance     1.5 nats" in info
    assert "check       off: " in run("info", "-m", folder)[1]


def test_chat_takes_the_mode_too(run, folder):
    writer = redraft.load(folder)
    expected = writer.chat("Hi", seed=1, max_tokens=12, check="exact", temperature=0.5).text
    flags = ["--check", "exact", "--temp", "0.5", "-n", "12", "--seed", "1"]
    code, out, err = run("chat", "-m", folder, *flags, stdin="Hi\n")
    assert (code, out) == (0, expected + "\n")
    assert "check exact: " in err


@pytest.mark.soak
@pytest.mark.parametrize("check", ["off", "checked", "exact"])
def test_the_best_of_several_answers_is_printed(run, folder, check):
    writer = redraft.load(folder)
    best = writer.write("Hello", seed=3, max_tokens=20, check=check, best_of=3)
    common = ["Hello", "-m", folder, "--raw", "-n", "20", "--check", check]
    code, out, err = run(*common, "--seed", "3", "--best-of", "3")
    assert (code, out) == (0, best.text + "\n")
    assert f"seed {best.seed}" in err
    assert run(*common, "--seed", str(best.seed))[1] == out  # the seed alone gives that answer again
    alone = [e for e in writer.stream("Hello", seed=3, max_tokens=20, check=check) if isinstance(e, Draft)]
    events = list(writer.stream("Hello", seed=3, max_tokens=20, check=check, best_of=3))
    shown = [event for event in events if isinstance(event, Draft)]
    assert [event.ids_BC.tolist() for event in shown] == [event.ids_BC.tolist() for event in alone]
    assert "".join(event.text for event in events if isinstance(event, Committed)) == best.text
    assert isinstance(events[-1], Finished)
    assert writer.engine.is_idle


def test_a_stream_of_several_answers_that_nobody_reads_is_cancelled():
    writer = tiny.writer()
    for reads in (0, 1):
        events = writer.stream("Hello", seed=3, best_of=3)
        for _ in range(reads):
            next(events)
        assert not writer.engine.is_idle
        del events
        assert writer.engine.is_idle


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--check", "maybe"], "check must be off, checked or exact, got 'maybe'"),
        (["--check", "checked", "--tolerance", "-1"], "tolerance must be "),
        (["--check", "checked", "--tolerance", "nan"], "nan"),
        (["--check", "checked", "--tolerance", "wide"], "'wide' is not a number"),
        (["--check", "exact", "--tolerance", "1"], "--tolerance is for --check checked, but this answer has --check exact"),
        (["--tolerance", "1"], "this answer has --check off"),
        (["--best-of", "0"], "--best-of must be "),
        (["--best-of", "1000"], "got 1000"),
        (["--best-of", "some"], "'some' is not a whole number"),
        (["--top-k", "5"], "--top-k is for the causal half, which --check off does not use"),
        (["--repetition-penalty", "1.1", "--check", "off"], "--repetition-penalty is for the causal half"),
        (["--check", "exact", "--steps", "5"], "--steps is for a canvas, and --check exact has none"),
        (["--check", "exact", "--canvas-length", "8"], "--canvas-length is for a canvas"),
        (["--check", "exact", "--top-p", "0"], "--top-p must be above 0"),
        (["--check", "exact", "--temp", "-1"], "temperature must be "),
    ],
)
@pytest.mark.parametrize("command", ["Hello", "chat"])
def test_a_mistake_is_one_sentence(run, folder, command, flags, sentence):
    code, out, err = run(command, "-m", folder, *flags, stdin="Hello\n")
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.startswith("redraft: ")
    assert err.count("\n") == 1


def test_more_answers_than_memory_are_refused(run, folder, monkeypatch):
    monkeypatch.setattr("redraft.tasks.best_of.count_fitting", lambda engine, tokens: 2)
    code, out, err = run("Hello", "-m", folder, "--best-of", "3")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--best-of is 3, but only 2 answers of this length fit the memory" in err
    assert "lower --best-of or --max-tokens" in err


@pytest.mark.parametrize(
    "flags",
    [
        ["--check", "checked"],
        pytest.param(["--check", "exact"], marks=pytest.mark.soak),
        pytest.param(["--check", "checked", "--best-of", "2"], marks=pytest.mark.soak),
    ],
)
def test_on_a_terminal_only_the_text_remains(folder, flags):
    best_of = int(flags[3]) if len(flags) > 2 else 1
    answer = redraft.load(folder).write("Hello", seed=5, max_tokens=60, check=flags[1], best_of=best_of)
    code, written, drawn, lines = test_cli.on_terminal(
        ["Hello", "-m", folder, "--raw", "--seed", "5", "-n", "60", *flags], columns=80
    )
    assert code == 0
    text = test_cli.wrapped("Hello" + answer.text, 80)
    left = [line for line in lines if line.strip()]
    assert left[: len(text)] == text
    assert f"check {flags[1]}: {answer.stats.drafted} drafted" in "".join(left[len(text) :])
    assert "checking" not in "".join(left)
    assert b"\x1b[?1049h" not in written
    if best_of > 1:
        assert "first of 2 answers · canvas" in drawn


def styles_of(text) -> list[str]:
    """The style of every character."""
    styles = [""] * len(text.plain)
    for span in text.spans:
        styles[span.start : span.end] = [str(span.style)] * (span.end - span.start)
    return styles


def test_text_behind_the_cursor_is_final_and_a_corrected_token_flashes():
    tokenizer = tiny.byte_tokenizer()
    painter = Painter(tokenizer, [1])
    painter.draft = tokenizer.encode("abcdefgh")
    first = painter.render_verified(tokenizer.encode("abXdefgh"), 3)
    assert first.plain == "abXdefgh"
    assert styles_of(first) == ["", "", CORRECTED, *[AHEAD] * 5]
    for _ in range(FLASH_ROUNDS - 1):
        page = painter.render_verified(tokenizer.encode("abXdefgh"), 5)
        assert styles_of(page) == ["", "", CORRECTED, "", "", *[AHEAD] * 3]
    ended = painter.render_verified([*tokenizer.encode("abXdefZ"), 1, *tokenizer.encode("noise")], 7)
    assert ended.plain == "abXdefZ"
    assert styles_of(ended) == ["", "", "", "", "", "", CORRECTED]


def test_the_sweep_is_drawn_between_drafts_and_commit(monkeypatch):
    clock = [1.0]
    monkeypatch.setattr("redraft.cli.terminal.time.monotonic", lambda: clock[0])
    pages = []
    expected = []
    monkeypatch.setattr("redraft.cli.terminal.Live.update", lambda self, page, **_: pages.append(page.renderables))
    writer = tiny.writer()
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    with CanvasView(console, writer.tokenizer, writer.sampler.eos_token_ids) as view:
        for event in view.show(writer.stream("x", seed=1, check="checked")):
            clock[0] += 1
            if isinstance(event, Draft):
                expected.append("step" if event.verified is None else "checking")
            if isinstance(event, Draft) and event.verified is not None:
                text, line = pages[-1]
                assert f"{event.verified}/{event.ids_BC.shape[1]} checked" in line.plain
                behind = len(writer.tokenizer.decode_fragment(event.ids_BC[0, : event.verified].tolist()))
                assert AHEAD not in styles_of(text)[: min(behind, 20)]
    assert [line.plain.split()[3] for _, line in pages if line] == expected
    assert {"step", "checking"} == set(expected)


def test_a_recording_shows_the_sweep_and_the_growing_text(tmp_path):
    writer = tiny.writer()
    frames = {}
    for check in ("checked", "exact"):
        recording = Recording("Hi", writer.tokenizer, writer.sampler.eos_token_ids)
        events = list(recording.watch(writer.stream("Hi", seed=3, check=check)))
        recording.save(tmp_path / "out.svg")
        groups = ET.parse(tmp_path / "out.svg").getroot().findall("{http://www.w3.org/2000/svg}g")
        shown = [event for event in events if isinstance(event, Draft if check == "checked" else Committed)]
        assert len(groups) == len(shown) + 1
        frames[check] = ["".join(group.itertext()) for group in groups]
        if check == "checked":
            expected = [STEP_SECONDS if event.verified is None else ROUND_SECONDS for event in shown]
            assert recording.seconds[:-1] == expected
        else:
            assert set(recording.seconds[:-1]) == {ROUND_SECONDS}
    assert "checking" in "".join(frames["checked"])
    assert [len(frame) for frame in frames["exact"][:-1]] == sorted(len(frame) for frame in frames["exact"][:-1])


def test_the_last_line_names_the_mode():
    numbers = {"prompt_tokens": 1, "new_tokens": 30, "canvases": 0, "settled": 0, "steps": 4, "commits": 0}
    times = {"seconds": 2.0, "prefill_seconds": 0.1}
    counts = {"rounds": 11, "drafted": 40, "accepted": 25, "corrected": 5}
    assert summary(Stats(seed=7, **numbers, **times, check="checked", **counts)) == (
        "30 tokens in 2.00 s (15.0/s) · check checked: 40 drafted, 25 accepted, 5 corrected · 15 forwards, 2.0 tokens each "
        "· seed 7"
    )
    off = Stats(seed=7, **{**numbers, "canvases": 2, "settled": 1}, **times)
    assert "check off · 4 forwards" in summary(off)
    assert summary(off).endswith("1 of 2 canvases did not settle")


def test_the_line_below_the_canvas_says_which_answer_it_is():
    event = next(event for event in tiny.writer().stream("x", seed=1) if isinstance(event, Draft))
    assert meter(event, "first of 3 answers").plain == f"first of 3 answers · {meter(event).plain}"
