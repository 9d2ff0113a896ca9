"""`redraft chat` with pictures: /image, /drop, paths in messages, and mistakes, in a pipe and on a terminal."""

import io
import sys
import types

import pytest
import tiny
import vision_models
from rich.console import Console
from test_cli import _run as _run  # the fixture `run`
from test_cli import on_terminal

import redraft
from redraft.cli import chat
from redraft.cli.chat import Conversation
from redraft.tokenizer.images import read_picture

FLAGS = ["-n", "8", "--steps", "2", "--seed", "1"]
SETTINGS = {"max_tokens": 8, "max_steps": 2, "seed": 1}
TEXT_ONLY = "is a text-only model: its vision tower has no layers, so it takes no images"


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return str(vision_models.published(tmp_path_factory.mktemp("published")))


@pytest.fixture(name="text_only", scope="module")
def _text_only(tmp_path_factory):
    return str(tiny.save_folder(tmp_path_factory.mktemp("text")))


@pytest.fixture(name="here", autouse=True)
def _here(tmp_path, monkeypatch):
    """The folder in which the command starts, with pictures, and a page that is called one."""
    for name, kind in (("cat.png", "landscape"), ("my dog.jpg", "EXIF 6"), ("walk.gif", "animated GIF")):
        (tmp_path / name).write_bytes(vision_models.FILES[kind]())
    (tmp_path / "page.png").write_bytes(b"<html>")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(name="requests")
def _requests(monkeypatch):
    """The messages of every request to a model, in order."""
    requests = []
    original = redraft.Writer.stream

    def stream(self, prompt, **options):
        requests.append([dict(message) for message in prompt])
        return original(self, prompt, **options)

    monkeypatch.setattr(redraft.Writer, "stream", stream)
    return requests


def user(here, text, *names):
    """The last message of a request: pictures, then the text."""
    images = [{"type": "image", "image": (here / name).read_bytes()} for name in names]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}] if names else text}


def test_pictures_go_with_the_next_message_and_stay_in_the_conversation(run, folder, requests, here):
    lines = ["/image cat.png", "/image my dog.jpg", "Which?", "And now?", "/reset", "Again"]
    code, out, err = run("chat", "-m", folder, *FLAGS, stdin="\n".join(lines))
    assert code == 0, err
    first, second, again = requests
    assert first == [user(here, "Which?", "cat.png", "my dog.jpg")]
    assert second == [*first, {"role": "assistant", "content": second[1]["content"]}, user(here, "And now?")]
    assert again == [user(here, "Again")]
    expected = redraft.load(folder).chat(first, **SETTINGS)
    assert second[1]["content"] == expected.text
    assert out.startswith(expected.text)
    assert f"[image cat.png, {read_picture(here / 'cat.png', vision_models.IMAGES).token_count} tokens]" in err
    assert "[image" not in out


def test_paths_in_a_message_attach_pictures(run, folder, requests, here):
    lines = [f"'{here}/my dog.jpg' What is this?", f"{here}/cat.png", "Is cat.png the same?", "nothing.png is a name"]
    code, _, err = run("chat", "-m", folder, *FLAGS, stdin="\n".join(lines))
    assert code == 0, err
    assert [messages[-1] for messages in requests] == [
        user(here, "What is this?", "my dog.jpg"),
        user(here, "Is cat.png the same?", "cat.png", "cat.png"),  # the line before it, and its own
        user(here, "nothing.png is a name"),
    ]
    assert err.count("[image ") == 3


def test_pictures_are_listed_and_dropped(run, folder, requests, here):
    lines = [
        "/image",
        "/image cat.png walk.gif 'my dog.jpg'",
        "/drop 1",
        "/image",
        "Hm",
        "/image cat.png",
        "/drop",
        "So",
        "/help",
    ]
    code, _, err = run("chat", "-m", folder, *FLAGS, stdin="\n".join(lines))
    assert code == 0, err
    assert [messages[-1] for messages in requests] == [user(here, "Hm", "walk.gif", "my dog.jpg"), user(here, "So")]
    notes = [line for line in err.splitlines() if "token" not in line or line.startswith("[image")]
    assert notes[0] == "no image is attached: /image PATH attaches one"
    assert notes[2].startswith("[image walk.gif")
    assert notes[2].endswith("its first frame]")
    assert notes[4].startswith("[image cat.png")
    assert notes[4].endswith("is detached")
    assert "1 image detached" in err
    for command in ("/image PATH", "/drop", "/reset", "/exit", "/help"):
        assert f"\n{command}" in err


def test_a_file_that_vanishes_is_sent_as_it_was(run, folder, requests, here, monkeypatch):
    expected = user(here, "What?", "cat.png")
    original = chat.read_attachment

    def read_and_remove(writer, path):
        attachment = original(writer, path)
        path.unlink()
        return attachment

    monkeypatch.setattr(chat, "read_attachment", read_and_remove)
    code, _, err = run("chat", "-m", folder, *FLAGS, stdin="/image cat.png\nWhat?\nMore?\n")
    assert code == 0, err
    assert [messages[0] for messages in requests] == [expected, expected]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/image none.png", "there is no file 'none.png': a path begins with / or ~, or in the folder "),
        ("/image page.png", "page.png is no PNG, JPEG, WebP, GIF or BMP file"),
        ("What is page.png?", "page.png is no PNG, JPEG, WebP, GIF or BMP file"),
        ("/drop 1", "/drop takes the number of an attached image, and none is attached, got '1'"),
    ],
)
def test_in_a_pipe_a_mistake_ends_the_chat(run, folder, requests, line, words):
    code, out, err = run("chat", "-m", folder, *FLAGS, stdin=f"{line}\nHello\n")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert words in err
    assert requests == []


def test_a_model_without_vision_says_so_at_once(run, text_only, requests):
    for line in ("/image cat.png", "cat.png"):
        code, out, err = run("chat", "-m", text_only, *FLAGS, stdin=f"{line}\nHello\n")
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert TEXT_ONLY in err
    assert requests == []
    code, _, err = run("chat", "-m", text_only, *FLAGS, stdin="Rename cat.png please\n")  # it can still be spoken of
    assert code == 0, err
    assert f"{TEXT_ONLY}. The message is sent as text." in err
    assert requests[0][-1]["content"] == "Rename cat.png please"


def test_on_a_terminal_mistakes_do_not_end_the_chat(folder):
    typing = [
        (b"> ", b"/image cat.png\n"),
        (b"tokens]", b"/image none.png\n"),
        (b"no file", b"What is page.png?\n"),
        (b"page.png is no", b"What?\n"),
        (b"/s)", b"/image\n"),
        (b"no image is attached", b"/exit\n"),
    ]
    code, _, _, lines = on_terminal(["chat", "-m", folder, *FLAGS, "--no-visual"], columns=200, lines=40, typing=typing)
    assert code == 0
    assert typing == []
    text = "\n".join(lines)
    assert text.count("[image cat.png, 60 tokens]") == 3  # once for itself, and after each mistake: it stays attached
    assert "there is no file 'none.png'" in text


def test_on_a_terminal_a_refused_message_comes_back_with_the_arrow_up(folder):
    typing = [
        (b"> ", b"What is page.png?\n"),
        (b"page.png is no", b""),
        (b"> ", b"\x1b[A" + b"\x7f" * len("page.png?") + b"my\\ dog.jpg?\n"),  # arrow up, backspaces
        (b"/s)", b"/exit\n"),
    ]
    code, _, _, lines = on_terminal(["chat", "-m", folder, *FLAGS, "--no-visual"], columns=150, lines=40, typing=typing)
    assert code == 0
    assert typing == []
    assert "> What is my\\ dog.jpg?" in lines
    assert sum(line.startswith("[image my dog.jpg") for line in lines) == 1


def test_a_terminal_has_a_history_where_there_is_readline(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    prompts = []

    def end(prompt):
        prompts.append(prompt)
        raise EOFError

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", end)
    # A stand-in: the module itself, imported twice in a process, handles SIGWINCH by a handler that calls itself forever.
    monkeypatch.setitem(sys.modules, "readline", types.ModuleType("readline"))
    assert list(chat.read_lines(Console(force_terminal=True))) == []
    monkeypatch.setitem(sys.modules, "readline", None)  # as on Windows
    assert list(chat.read_lines(Console(force_terminal=True))) == []
    assert prompts == [chat.BOLD_PROMPT, "> "]


def test_a_refused_message_changes_nothing(folder):
    def refuse(messages):
        raise ValueError(f"{len(messages)} messages are too many")

    conversation = Conversation(redraft.load(folder), [], refuse)
    conversation.take("/image cat.png")
    for line in ("What is 'my dog.jpg'?", "/image walk.gif page.png", "my\\ dog.jpg page.png"):
        with pytest.raises(ValueError, match=r"too many|is no PNG"):
            conversation.take(line)
        assert [attachment.name for attachment in conversation.attached] == ["cat.png"]
    assert conversation.messages == []


def test_ctrl_c_while_a_picture_is_read_does_not_end_the_chat(folder, monkeypatch):
    def interrupt(writer, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "read_attachment", interrupt)
    monkeypatch.setattr(chat, "read_lines", lambda console: iter(["/image cat.png", "Hello"]))
    sent = []
    conversation = Conversation(redraft.load(folder), [], lambda messages: sent.append(messages) or "Hi")
    conversation.console = Console(force_terminal=True)
    conversation.run()
    assert [message["content"] for message in sent[0]] == ["Hello"]
