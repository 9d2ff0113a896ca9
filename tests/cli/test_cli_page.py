"""Page adapters as users call them: a left-to-right model fills gaps and edits."""

import json

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


FLAGS = "--page --tokens 3k --sample-rows 24 --length 64 --batch 8 --rank 4 --canvas 16 --lr 1e-2 --device cpu".split()


@pytest.mark.soak
def test_a_decoder_learns_to_fill_gaps_from_its_own_answers(run, folder, tmp_path):
    base = str(folder / "base")
    out = tmp_path / "out"
    code, text, log = run("adapt", base, "--out", str(out), "--steps", "4", *FLAGS)
    assert code == 0, log
    assert text == f"{out}\n"
    for line in ("gaps, canvases: ", "gaps, left to right: "):
        assert line in log
    settings = json.loads((out / "adapter.json").read_text())
    assert settings["canvas_lengths"] == [4, 8, 16]
    assert settings["scores"]["gaps"].keys() == {"canvases", "left_to_right", "removed"}
    code, text, _ = run("info", str(out))
    assert code == 0
    assert "gaps canvases exact tokens" in text
    code, text, log = run("fill", "-", "-m", str(out), "--seed", "1", stdin="Once [[ 3 ]] time.")
    assert code == 0, log
    code, _, log = run("adapt", str(out), "--out", str(tmp_path / "other"), *FLAGS)
    assert code == 2
    assert "is a page adapter already: adapt its base" in log
    code, _, log = run("adapt", base, "--out", str(out), "--steps", "4", *FLAGS)  # resumes, and is at its end
    assert code == 0, log
    assert "at step 4 of 4" in log


@pytest.mark.soak
def test_a_decoder_learns_to_fill_gaps_from_texts(run, folder, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": f"{n} and {n + 1} and {n + 2}, and so on for ever"}) + "\n" for n in range(130))
    )
    out = str(tmp_path / "out")
    code, _, log = run("adapt", str(folder / "base"), "--out", out, "--data", str(texts), "--steps", "4", *FLAGS)
    assert code == 0, log
    assert not (tmp_path / "out/own").exists()
    code, text, log = run("eval", out, "-t", "gaps", "--data", str(texts), "-n", "4", "--device", "cpu")
    assert code == 0, log
    scores = json.loads(text)
    assert scores["gaps"] == 4
    assert scores["removed"]["exact_tokens"] == 1
    assert 0 <= scores["left_to_right"]["exact_tokens"] < 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "texts.jsonl"], "--data is for --page: a drafter learns from the model's own answers only"),
        (["--page", "--data", "no-such-file"], "--data: there is no file no-such-file"),
        (["--page", "--data", "a", "--prompts", "b"], "--data and --prompts are two sources of text: give one of them"),
        (["--page", "--head-size", "8"], "--head-size 8 is the size of a drafter's head: leave it out with --page"),
        (["--page", "--canvas", "0"], "--canvas must be"),
        (["--page", "--canvas", "5000"], "--canvas must be at least one length, from 2 to 4096, got [1250, 2500, 5000]"),
    ],
)
def test_mistakes_are_one_sentence(run, tmp_path, flags, message):
    code, _, log = run("adapt", str(tmp_path), "--out", str(tmp_path / "out"), *flags)
    assert code == 2
    assert message in log
    assert len(log.strip().splitlines()) == 1


def test_a_canvas_longer_than_a_row_and_too_few_texts_are_one_sentence(run, folder, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "Once upon a time"}\n')
    flags = (
        "adapt",
        str(folder / "base"),
        "--out",
        str(tmp_path / "out"),
        "--data",
        str(texts),
        "--device",
        "cpu",
        "--page",
    )
    code, _, log = run(*flags, "--length", "64")
    assert (code, len(log.strip().splitlines())) == (2, 1)
    assert "--canvas must be between 1 and the row length 64, got (32, 64, 128)" in log
    code, _, log = run(*flags)
    assert (code, len(log.strip().splitlines())) == (2, 1)
    assert "--data has 1 texts, and every 64th is held out: give more" in log
