"""redraft --image: pictures before the prompt, and one sentence for each mistake."""

import json

import pytest
import test_cli
import tiny
import vision_models

import redraft

run = test_cli._run  # the fixture


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return str(vision_models.published(tmp_path_factory.mktemp("published")))


def test_images_come_before_the_prompt(run, folder, tmp_path):
    paths = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for path, name in zip(paths, ("landscape", "EXIF 6"), strict=True):
        path.write_bytes(vision_models.FILES[name]())
    images = [flag for path in paths for flag in ("--image", str(path))]
    code, out, _ = run("Which?", "--model", folder, *images, "--json", "-n", "16", "--steps", "4", "--seed", "3")
    parts = [*({"type": "image", "image": path} for path in paths), {"type": "text", "text": "Which?"}]
    expected = redraft.load(folder).chat([{"role": "user", "content": parts}], max_tokens=16, max_steps=4, seed=3)
    answer = json.loads(out)
    assert (code, answer["text"]) == (0, expected.text)
    assert answer["stats"]["prompt_tokens"] == expected.stats.prompt_tokens


def test_images_take_the_options_of_text(run, folder, tmp_path):
    picture = tmp_path / "a.png"
    picture.write_bytes(vision_models.FILES["square"]())
    flags = ["--json", "-n", "16", "--seed", "3", "--check", "exact", "--best-of", "2"]
    code, out, err = run("Which?", "--model", folder, "--vision", "--image", str(picture), *flags)
    assert code == 0, err
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": "Which?"}]
    settings = {"max_tokens": 16, "seed": 3, "check": "exact", "best_of": 2}
    expected = redraft.load(folder).chat([{"role": "user", "content": parts}], **settings)
    assert (code, json.loads(out)["text"]) == (0, expected.text), err


def test_mistakes_are_one_sentence(run, folder, tmp_path):
    picture = tmp_path / "a.png"
    picture.write_bytes(vision_models.FILES["square"]())
    page = tmp_path / "page.png"
    page.write_bytes(b"<html>")
    text_only = str(tiny.save_folder(tmp_path / "text"))
    for flags, words in (
        (["--model", folder, "--image", str(page)], "the image is no PNG, JPEG, WebP, GIF or BMP file"),
        (["--model", folder, "--image", str(tmp_path / "none.png")], "No such file"),
        (["--model", folder, "--image", str(picture), "--raw"], "--image need a chat model"),
        (["--model", text_only, "--image", str(picture)], "is a text-only model"),
        (["--model", text_only, "--vision"], "is a text-only model"),
    ):
        code, out, err = run("What?", *flags)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert words in err
