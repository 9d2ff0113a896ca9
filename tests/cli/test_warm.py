"""Kernel builds are shown, and `redraft warm` says where there is nothing to build."""

import io
from contextlib import contextmanager

import pytest
import tiny
from rich.console import Console

import redraft
from redraft.cli import warm
from redraft.kernels import builds


@pytest.fixture(name="builds")
def _builds(monkeypatch):
    """Kernels are built whenever the test calls what it is given."""
    listeners = []

    @contextmanager
    def watch(report):
        listeners.append(report)
        yield
        listeners.pop()

    monkeypatch.setattr("redraft.kernels.builds.watch_builds", watch)
    return lambda name: listeners[-1](name)


@pytest.mark.parametrize("terminal", [True, False])
def test_builds_are_shown_once_and_counted(builds, terminal):
    out = io.StringIO()
    names = []
    with warm.show_builds(Console(file=out, force_terminal=terminal, width=80), names.append):
        assert out.getvalue() == ""
        builds("first")
        builds("second")
    assert names == ["first", "second"]
    assert "building kernels, once" in out.getvalue()
    if not terminal:
        assert out.getvalue() == "building kernels, once\n"


def test_nothing_is_shown_where_nothing_is_built(builds):
    out = io.StringIO()
    with warm.show_builds(Console(file=out, force_terminal=True)):
        pass
    assert "building" not in out.getvalue()


def test_builds_before_the_first_event_are_shown_and_no_event_is_lost(builds):
    out = io.StringIO()

    def events():
        builds("first")
        yield from range(3)

    assert list(warm.show_builds_until_first(events(), Console(file=out))) == [0, 1, 2]
    assert out.getvalue() == "building kernels, once\n"
    assert list(warm.show_builds_until_first(iter(()), Console(file=out))) == []


def test_a_failure_before_the_first_event_is_raised(builds):
    def events():
        raise ValueError("no")
        yield

    with pytest.raises(ValueError, match="no"):
        warm.show_builds_until_first(events(), Console(file=io.StringIO()))


def test_watching_builds_without_a_gpu_does_nothing():
    with builds.watch_builds(print):
        pass


def test_warm_without_a_gpu_says_so(capsys):
    warm.warm(device="cpu")
    assert "There are no kernels to build: no GPU." in capsys.readouterr().err


def test_every_kind_of_request_is_run(monkeypatch):
    """Batches of every size, a pattern, candidates: the kernels of each are launched."""
    batches = []
    usual = tiny.Writer.write
    monkeypatch.setattr(
        tiny.Writer, "write", lambda self, prompt, **more: batches.append((prompt, more)) or usual(self, prompt, **more)
    )
    warm.launch_kernels(tiny.writer())
    assert [len(prompt) for prompt, _ in batches if not isinstance(prompt, str)] == [1, 2, 4, 8]
    assert [more["regex"] for prompt, more in batches if isinstance(prompt, str)] == ["[a-z ]+"]


@pytest.mark.soak
def test_a_model_that_takes_no_text_is_not_in_the_way():
    """`redraft serve -m sudoku` on a GPU launches kernels, too."""
    warm.launch_kernels(redraft.load("sudoku", device="cpu"))
