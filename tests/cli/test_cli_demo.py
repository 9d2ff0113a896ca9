"""The command redraft demo: text alone in a pipe; on a terminal both runs are drawn, and a line says what was seen."""

import pytest
import test_cli

import redraft
from redraft.cli import demo
from redraft.tasks.sudoku import board as boards
from redraft.tasks.sudoku import solver

run = test_cli._run  # the fixture


@pytest.fixture(name="folder")
def _folder():
    return ""  # the demo takes the models that ship


@pytest.fixture(name="story", autouse=True)
def _story(monkeypatch):
    """A short story, and boards without a pause."""
    monkeypatch.setattr(demo, "MAX_TOKENS", 16)
    monkeypatch.setattr(demo, "STEP_SECONDS", 0.0)
    return redraft.load().write(demo.PROMPT, seed=1, max_tokens=16).text


def test_in_a_pipe_the_demo_prints_the_text_alone(run, story):
    board = boards.to_grid(solver.solve(boards.parse_puzzle(demo.PUZZLE)))
    assert run("demo") == (0, f"{board}\n\n{demo.PROMPT}{story}\n", "")


def test_on_a_terminal_the_demo_says_what_was_seen(story):
    code, written, drawn, lines = test_cli.on_terminal(["demo"], columns=80, lines=40)
    assert code == 0
    assert "step 1" in drawn
    text = "\n".join(lines)
    assert "Solved: the 60 open cells changed together, in " in text
    assert text.index("Solved") < text.index(demo.PROMPT) < text.index("Written: ")
    assert test_cli.wrapped(demo.PROMPT + story, 80)[0] in lines
    assert b"\x1b[2mOnce upon a time" in written
