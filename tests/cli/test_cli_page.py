"""Page adapters as users call them: a left-to-right model fills gaps and edits."""

import llama_models
import pytest
from test_cli import _run as _run  # the fixture `run`


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama in folder/base, and a page adapter for it in folder/page."""
    return llama_models.save_with_page(tmp_path_factory.mktemp("page"))


def test_fill_and_edit_work_on_the_command_line(run, folder):
    code, out, err = run("fill", "-", "-m", str(folder / "page"), "--seed", "1", stdin="Once [[ 3 ]] time.")
    assert code == 0, err
    assert out.startswith("Once ")
    assert out.endswith(" time.")
    assert out != "Once  time."
    text = "Once upon a time."
    code, out, err = run("edit", "-", "-m", str(folder / "page"), "--strength", "0.5", "--seed", "1", stdin=text)
    assert code == 0, err
    assert out != text
    code, out, err = run("fill", "-", "-m", str(folder / "base"), "--seed", "1", stdin="Once [[ 3 ]] time.")
    assert code == 2
    assert "infill needs a diffusion model" in err
    code, out, _ = run("info", str(folder / "page"))
    assert code == 0
    assert "page adapter" in out
    assert "8, 16" in out
