"""`redraft adapt` as users call it: a left-to-right model in, a drafter out with which it writes the same text."""

import json
import shutil

import llama_models
import pytest
import tiny
import torch
from test_cli import _run as _run  # the fixture `run`

import redraft
from redraft import checkpoint
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train import checkpoints

BASICS = "--tokens 3k --sample-rows 24 --length 64 --batch 16 --lr 1e-2 --device cpu".split()
FLAGS = [*BASICS, *"--rank 4 --head-size 32 --canvas 4".split()]

FAMILIES = ("smollm2", "qwen3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Small random decoders of two families, with a byte vocabulary."""
    folder = tmp_path_factory.mktemp("adapt")
    for family in FAMILIES:
        llama_models.save_reference(folder / family, family, vocab_size=260, max_position_embeddings=128)
        Tokenizer.byte_level(("<pad>", "<bos>", "<eos>")).save(folder / family)
    return folder


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_learns_to_draft_for_itself(run, folder, family):
    base = folder / family
    out = folder / f"{family} drafter"
    code, text, log = run("adapt", str(base), "--out", str(out), "--steps", "40", *FLAGS)
    assert code == 0, log
    assert text == f"{out}\n"
    assert "3,000 tokens of its own answers" in log
    code, text, _ = run("info", str(out))
    assert code == 0
    assert "longest draft" in text
    assert str(base) in text.replace("\n", "")
    code, _, log = run("adapt", str(out), "--out", str(folder / "other"), *FLAGS)
    assert code == 2
    assert "is a drafter already: adapt its base" in log
    scores = json.loads((out / "adapter.json").read_text())["scores"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lengths = [line["held_out"]["scores"]["tokens_per_round"] for line in lines if "held_out" in line]
    assert scores["held_out"]["tokens_per_round"] == max(lengths)
    assert max(lengths) > lengths[0] + 0.1
    assert scores["tokens_per_round"].keys() == {"T=0", "T=0.7", "T=1"}
    assert scores["tokens_per_round_in_trees"].keys() == scores["tokens_per_round"].keys()
    alone = redraft.load(base, dtype="float32")
    drafting = redraft.load(out, dtype="float32")
    for temperature in (0.0, 1.0):
        options = {"max_tokens": 40, "seed": 3, "temperature": temperature}
        found = drafting.write("Once upon", **options)
        assert found.ids == alone.write("Once upon", **options).ids
        assert found.stats.drafted > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "many"], "--tokens takes a number such as 500k or 50M, got 'many'"),
        (["--tokens", "0"], "--tokens takes a number"),
        (["--prompts", "no-such-file"], "--prompts: there is no file no-such-file"),
        (["--from", "no-such-folder"], "--from: there is no folder no-such-folder"),
        (["--from", ""], "--from: an empty name is no drafter or page adapter: give the --out of an earlier redraft adapt"),
        (["--from", "."], "--from: . is no drafter or page adapter: give the --out of an earlier redraft adapt"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--sample-rows", "0"], "--sample-rows must be at least 1, got 0"),
        (["--canvas", "1"], "--canvas must be from 2"),
        (["--rank", "0"], "--rank must be between 1"),
        (["--batch", "6", "--rows", "4"], "--batch 6 is no multiple of the 4 rows of a forward"),
    ],
)
def test_mistakes_are_one_sentence(run, tmp_path, flags, message):
    assert_refused(run, tmp_path, flags, message)


@pytest.fixture(name="earlier", scope="module")
def _earlier(tmp_path_factory):
    """A drafter and a page adapter of one model."""
    folder = tmp_path_factory.mktemp("earlier")
    llama_models.save_page(folder, checkpoint.load_model(llama_models.save_with_drafter(folder)))
    return folder


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("drafter", ["--page"], "drafter is a drafter: leave out --page, or give another folder"),
        ("page", [], "page is a page adapter: add --page, or give another folder"),
        ("drafter", ["--rank", "3", "--head-size", "8"], "drafter has sizes of its own: leave out --rank"),
        ("drafter", ["--rank", "2", "--canvas", "6"], "drafter has sizes of its own: leave out --canvas"),
        ("page", ["--page", "--canvas", "128"], "page has sizes of its own: leave out --canvas"),
        ("page", ["--page", "--head-size", "8"], "page has sizes of its own: leave out --head-size"),
    ],
)
def test_an_earlier_one_that_does_not_fit_is_refused_before_anything_is_sampled(
    run, earlier, tmp_path, name, flags, message
):
    assert_refused(run, tmp_path, ["--from", str(earlier / name), *flags], message)


def test_the_earlier_one_is_a_folder_and_not_its_file(run, earlier, tmp_path):
    file = earlier / "drafter/adapter.json"
    message = f"--from: {file} is no drafter or page adapter: give the --out of an earlier redraft adapt"
    assert_refused(run, tmp_path, ["--from", str(file)], message)


def test_the_earlier_one_may_be_in_the_home_folder(run, earlier, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(earlier))
    message = f"--from: {earlier / 'drafter'} is a drafter: leave out --page, or give another folder"
    assert_refused(run, tmp_path, ["--from", "~/drafter", "--page"], message)
    assert_refused(run, tmp_path, ["--from", "~/missing"], f"--from: there is no folder {earlier / 'missing'}")


@pytest.mark.parametrize(
    ("began", "flags", "message"),
    [
        ("", ["--from", "{earlier}/drafter"], "the run in {out} began without --from: leave it out, or give another --out"),
        ("{earlier}/page", [], "the run in {out} began with --from {earlier}/page: repeat it, or give another --out"),
        (
            "{earlier}/page",
            ["--from", "{earlier}/drafter"],
            "the run in {out} began with --from {earlier}/page: repeat it, or give another --out",
        ),
    ],
)
def test_a_run_resumes_with_the_start_that_it_began_with(run, earlier, tmp_path, began, flags, message):
    """Another one is refused before anything is sampled."""
    places = {"earlier": earlier, "out": tmp_path / "out"}
    batch = {"rows": 16} | ({"start_adapter": began.format(**places)} if began else {})
    checkpoints.save(tmp_path / "out", 5, {"weight": torch.zeros(1)}, {"step": 5, "batch": batch}, keep=1)
    given = [flag.format(**places) for flag in flags]
    code, _, log = run("adapt", str(earlier / "base"), "--out", str(tmp_path / "out"), *given, *BASICS)
    assert code == 2
    assert message.format(**places) in log
    assert not (tmp_path / "out/own").exists()


def test_an_earlier_one_of_another_model_is_refused_before_anything_is_sampled(run, earlier, folder, tmp_path):
    flags = ["--from", str(earlier / "drafter"), *BASICS]
    code, _, log = run("adapt", str(folder / "qwen3"), "--out", str(tmp_path / "out"), *flags)
    assert code == 2
    assert "drafter was trained for another model, '../base': use it with that one" in log
    assert not (tmp_path / "out").exists()


def test_an_earlier_one_that_cannot_be_the_start_is_refused_before_anything_is_sampled(run, earlier, tmp_path):
    shutil.copytree(earlier, tmp_path / "copy")
    drafter = tmp_path / "copy/drafter"
    command = ("adapt", str(tmp_path / "copy/base"), "--from", str(drafter), *BASICS)
    code, _, log = run(*command, "--out", str(drafter))
    assert code == 2
    assert f"--from and --out are both {drafter}: give --out another folder" in log
    (drafter / "adapter.safetensors").unlink()
    code, _, log = run(*command, "--out", str(tmp_path / "out"))
    assert code == 2
    assert f"{drafter / 'adapter.safetensors'} cannot be read" in log
    assert not (tmp_path / "out").exists()


def assert_refused(run, tmp_path, flags, message):
    code, _, log = run("adapt", str(tmp_path), "--out", str(tmp_path / "out"), *flags)
    assert code == 2
    assert message in log
    assert len(log.strip().splitlines()) == 1


def test_a_diffusion_model_drafts_already(run, tmp_path):
    tiny.save_folder(tmp_path / "model")
    code, _, log = run("adapt", str(tmp_path / "model"), "--out", str(tmp_path / "out"), *FLAGS)
    assert code == 2
    assert "is a diffusion model and drafts already" in log


def test_the_answers_of_another_model_are_not_learned(run, folder, tmp_path):
    own = tmp_path / "out/own"
    own.mkdir(parents=True)
    (own / "settings.json").write_text('{"model": "another"}')
    code, _, log = run("adapt", str(folder / "qwen3"), "--out", str(tmp_path / "out"), *FLAGS)
    assert code == 2
    assert "holds answers with another" in log
