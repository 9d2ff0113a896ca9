"""Paths of pictures in a typed line, as terminals paste them and as people write them."""

import os
from pathlib import Path

import pytest

from redraft.cli.attachments import find_pictures, parse_paths, remove_paths


@pytest.fixture(name="here")
def _here(tmp_path, monkeypatch):
    """A folder with files of all kinds of names, in which the command was started."""
    for name in (
        "cat.png",
        "my cat.JPG",
        "it's.webp",
        "notes.txt",
        'a "b".gif',
        "c%20d.bmp",
        "é.jpeg",
        "caf\\e.png",
        "it's 'my'.png",
    ):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def split(line: str) -> tuple[list[str], str]:
    """The names of the files that a message attaches, and the text that is left of it."""
    paths = find_pictures(line)
    return [typed.path.name for typed in paths], remove_paths(line, paths)


@pytest.mark.parametrize(
    ("line", "names", "text"),
    [
        ("cat.png", ["cat.png"], ""),
        ("{here}/cat.png", ["cat.png"], ""),
        ("~/cat.png", ["cat.png"], ""),
        ("{here}/my cat.JPG", ["my cat.JPG"], ""),  # the whole line is a path
        ("{here}/my\\ cat.JPG", ["my cat.JPG"], ""),
        ("'{here}/my cat.JPG'", ["my cat.JPG"], ""),
        ('"{here}/my cat.JPG" ', ["my cat.JPG"], ""),
        ("'{here}/it'\\''s.webp'", ["it's.webp"], ""),  # as shells quote it
        ("{here}/it\\'s.webp", ["it's.webp"], ""),
        ("it's.webp", ["it's.webp"], ""),
        ("it's\\ 'my'.png", ["it's 'my'.png"], ""),
        ('"a \\"b\\".gif"', ['a "b".gif'], ""),
        ("file://{here}/my%20cat.JPG", ["my cat.JPG"], ""),
        ("FILE://localhost{here}/cat.png", ["cat.png"], ""),
        ("file://{here}/c%2520d.bmp", ["c%20d.bmp"], ""),
        ("c%20d.bmp", ["c%20d.bmp"], ""),
        ("caf\\e.png", ["caf\\e.png"], ""),  # a backslash that is part of the name
        ("é.jpeg", ["é.jpeg"], ""),
        ("cat.png {here}/my\\ cat.JPG", ["cat.png", "my cat.JPG"], ""),
        ("cat.png What is this?", ["cat.png"], "What is this?"),
        ("'my cat.JPG'  cat.png Which one?", ["my cat.JPG", "cat.png"], "Which one?"),
        ("What's in {here}/cat.png? It's small.", ["cat.png"], "What's in cat.png? It's small."),
        ("Compare 'my cat.JPG', cat.png.", ["my cat.JPG", "cat.png"], "Compare my cat.JPG, cat.png."),
        ("'tis cat.png, isn't it", ["cat.png"], "'tis cat.png, isn't it"),
    ],
)
def test_paths_of_pictures_are_found(here, line, names, text):
    assert split(line.format(here=here)) == (names, text)


@pytest.mark.parametrize(
    "line",
    [
        "dog.png",  # no such file
        "notes.txt",  # no picture's ending
        "folder.png",
        "pipe.png",
        "cat",
        "my cat",
        "file://elsewhere{here}/cat.png",
        "https://example.org/cat.png",
        "file://[/cat.png",
        "/nowhere/cat.png what is it",
        "x" * 5000 + ".png",
        "a\0b.png",
        "'cat.png",
        "' \" \\",
        "\\",
    ],
)
def test_other_lines_are_text(here, line):
    line = line.replace("{here}", str(here))
    assert split(line) == ([], line)


def test_a_command_takes_one_path_or_several(here):
    assert parse_paths("my cat.JPG") == [Path("my cat.JPG")]
    assert parse_paths("'my cat.JPG' cat.png") == [Path("my cat.JPG"), Path("cat.png")]
    assert parse_paths("notes.txt") == [Path("notes.txt")]  # whether it is a picture is for the decoder to say
    for argument, name in (("dog.png", "dog.png"), ("my dog.png", "my dog.png"), ("cat.png dog.png", "dog.png")):
        with pytest.raises(ValueError, match=f"there is no file '{name}'.*{here.name}"):
            parse_paths(argument)


def test_a_long_line_of_quotes_is_read_at_once(here):
    for line in ("'a " * 20_000, '"\\' * 20_000, "\\'" * 20_000, "'a'" * 20_000 + "x", '"" ' * 20_000):
        assert find_pictures(line) == []
