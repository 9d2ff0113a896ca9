"""Text on a terminal: committed text wraps by words, and begins with the prompt."""

import io
import textwrap
from dataclasses import replace

import pyte
import pytest
import tiny
import torch
from rich.console import Console

from redraft.cli.terminal import CanvasView, shorten_prompt
from redraft.tasks.text_events import TextCommitted

PAGE = TextCommitted(0, torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1), torch.ones(1))


def show(events: list[TextCommitted], columns: int, prompt: str = "") -> tuple[list[str], str]:
    """The lines on a screen after these events, and everything that was written."""
    console = Console(file=io.StringIO(), force_terminal=True, width=columns, height=50)
    with CanvasView(console, tiny.byte_tokenizer(), [1], prompt=prompt) as view:
        list(view.show(iter(events)))
    screen = pyte.Screen(columns, 50)
    pyte.Stream(screen).feed(console.file.getvalue().replace("\n", "\r\n"))
    return [line.rstrip() for line in screen.display if line.strip()], console.file.getvalue()


@pytest.mark.parametrize("piece", [1, 7, 50])
def test_committed_text_wraps_by_words_wherever_its_canvases_end(piece):
    story = " upon a time there was a girl. Her mommy said, extraordinarily slowly: come, we bake the best cake of all!" * 3
    events = [replace(PAGE, text=story[begin : begin + piece]) for begin in range(0, len(story), piece)]
    for columns in range(15, 50, 3):
        lines, written = show(events, columns, "Once")
        assert lines == textwrap.wrap("Once" + story, columns)
        assert "\x1b[2mOnce\x1b[0m upon" in written


def test_reasoning_and_answer_do_not_run_together():
    events = [replace(PAGE, reasoning="I think"), replace(PAGE, reasoning=" so"), replace(PAGE, text="The answer")]
    assert show(events, 40)[0] == ["I think so", "The answer"]


def test_of_a_long_prompt_the_end_is_shown():
    console = Console(file=io.StringIO(), width=20)
    assert shorten_prompt("two words", console) == "two words"
    assert shorten_prompt("a\n" * 99 + "b", console) == "…" + "a\n" * 7 + "b"
