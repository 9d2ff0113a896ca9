"""The picture has a frame for each step, holds the text that was written, and is XML whatever the model says."""

import xml.etree.ElementTree as ET

import pytest
import tiny
from rich.text import Text

from redraft.cli.recording import COLUMNS, Recording, svg
from redraft.diffusion.generate import Committed, Draft

SVG = "{http://www.w3.org/2000/svg}"


def record(prompt: str, path, seed: int = 0) -> tuple[list, ET.Element]:
    writer = tiny.writer()
    recording = Recording(prompt, writer.tokenizer, writer.sampler.eos_token_ids)
    events = list(recording.watch(writer.stream(prompt, seed=seed)))
    recording.save(path)
    return events, ET.parse(path).getroot()


@pytest.mark.parametrize("prompt", ["Hi", '<&> "quotes" \x1b[31m\x00', "long " * 60, "tab\there\nnext"])
def test_every_step_is_a_frame_and_the_last_one_the_text(tmp_path, prompt):
    events, root = record(prompt, tmp_path / "out.svg", seed=3)
    frames = root.findall(f"{SVG}g")
    assert len(frames) == sum(isinstance(event, Draft) for event in events) + 1
    lines = ["".join(line.itertext()) for line in frames[-1].findall(f"{SVG}text")]
    assert max(map(len, lines)) <= COLUMNS + 80  # the counter is not wrapped
    said = "".join(event.text for event in events if isinstance(event, Committed))
    letters = [c for c in prompt + said if c.isalnum()]
    assert [c for c in "".join(lines[:-1]) if c.isalnum()][: len(letters)] == letters or "\x1b" in prompt
    assert "forwards" in lines[-1]
    assert "\x1b" not in (tmp_path / "out.svg").read_text()


def test_frames_take_turns():
    text = svg([[[("one", "")]], [[("two", "green")]], [[("three", "")]]])
    assert text.count("<g ") == 3
    assert [f"animation-delay:{s}s" in text for s in ("0.00", "0.16", "0.32")] == [True] * 3
    assert text.count('class="f d0"') == 2
    assert 'class="f d1 l"' in text
    assert "prefers-reduced-motion" in text


def test_nothing_recorded_is_said(tmp_path):
    with pytest.raises(ValueError, match="nothing was recorded"):
        Recording("x", tiny.byte_tokenizer(), [1]).save(tmp_path / "out.svg")


def test_tabs_do_not_shift_text_against_its_colours(tmp_path):
    writer = tiny.writer()
    recording = Recording("a\tb\t", writer.tokenizer, writer.sampler.eos_token_ids)
    recording.committed = "c\td"
    recording._add_frame(Text("e\tf", "green"), Text())
    ((pieces, *_),) = recording.frames
    assert [style for _, style in pieces] == ["prompt", "", "green"]
    assert [text for text, _ in pieces] == ["a   b   ", "c   d", "e  f"]  # tab stops every 4 columns
    letters = {letter: style for text, style in pieces for letter in text if letter != " "}
    assert letters == {"a": "prompt", "b": "prompt", "c": "", "d": "", "e": "green", "f": "green"}
    assert "\t" not in "".join(text for text, _ in pieces)
